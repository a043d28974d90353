from __future__ import annotations

import ctypes
import logging
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from tests.doubles.fakes import FakeClock, FakeRegistrar
from tests.engine.memory.measured import make_step, pool_bytes
from tests.waiting import eventually

from kvstow.errors import ConfigError, CopyError, InsufficientMemoryError, PinError
from kvstow.memory import hostpool
from kvstow.memory.chunks import ChunkGrid
from kvstow.memory.hostpool import HostPool
from kvstow.memory.limits import MemoryLimits
from kvstow.memory.pinning import FixedPace, PinProgress
from kvstow.memory.region import HostRegion
from kvstow.memory.slotpool import PoolState

if TYPE_CHECKING:
    MakePool = Callable[..., HostPool]

MIB = 1 << 20


def pinned(pool: HostPool, slots: int) -> Callable[[], bool]:
    return lambda: pool.pinned_slots == slots and pool.status().state == "ready"


def in_state(pool: HostPool, state: PoolState) -> Callable[[], bool]:
    return lambda: pool.status().state == state


def resident_bytes(pool: HostPool) -> int:
    return pool_bytes(pool, "Rss")


def write_cgroup(folder: Path, limit: int) -> MemoryLimits:
    folder.joinpath("cgroup").write_text("0::/\n")
    folder.joinpath("memory.max").write_text(str(limit))
    folder.joinpath("memory.current").write_text("0")
    return MemoryLimits(folder / "meminfo", folder / "cgroup", folder)


@pytest.mark.parametrize("slot_bytes", [4096, 12 * 1024, 1000, 100_003])
def test_the_pool_takes_exactly_the_memory_configured(make_pool: MakePool, slot_bytes: int) -> None:
    pool_bytes, chunk_bytes = 10 * MIB + 5, MIB
    pool = make_pool(slot_bytes=slot_bytes, pool_bytes=pool_bytes, max_bytes=40 * MIB, chunk_bytes=chunk_bytes)
    assert resident_bytes(pool) == 0
    pool.start()
    eventually(pinned(pool, pool_bytes // slot_bytes))
    status = pool.status()
    assert status.pinned_bytes == status.target_bytes == pool_bytes // slot_bytes * slot_bytes
    assert resident_bytes(pool) == status.resident_bytes == status.locked_bytes
    assert status.resident_bytes <= pool_bytes * 1.01 + chunk_bytes


def test_the_first_slots_are_usable_long_before_a_large_pool_is_pinned(make_pool: MakePool) -> None:
    pool = make_pool(slot_bytes=4096, pool_bytes=64 << 30, chunk_bytes=MIB, pause=3600.0)
    pool.start()
    eventually(lambda: pool.pinned_slots)
    with pool.hold(256):
        ctypes.memset(pool.address, 1, MIB)
    status = pool.status()
    assert (status.state, status.pinned_slots) == ("pinning", 256)
    assert (status.chunks_done, status.chunks_total) == (1, 64 << 10)
    eventually(lambda: pool.status().resident_bytes == 2 * MIB)
    assert resident_bytes(pool) == 2 * MIB, "the next chunk is populated while the pause lasts"


def test_the_pool_grows_at_runtime_and_keeps_what_it_held(make_pool: MakePool) -> None:
    pool = make_pool(max_bytes=64 * 4096)
    pool.start()
    eventually(pinned(pool, 16))
    ctypes.memset(pool.address, 9, 16 * 4096)
    pool.set_target(50)
    eventually(pinned(pool, 50))
    assert ctypes.string_at(pool.address, 16 * 4096) == b"\x09" * (16 * 4096)
    assert resident_bytes(pool) == pool.status().resident_bytes == 50 * 4096


def test_shrinking_frees_whole_chunks_and_hides_the_slots_above_at_once(make_pool: MakePool) -> None:
    registrar = FakeRegistrar()
    pool = make_pool(registrar)
    pool.start()
    eventually(pinned(pool, 16))
    pool.set_target(6)
    assert pool.pinned_slots == 6
    eventually(lambda: pool.status().chunks_done == 2)
    eventually(lambda: pool.status().resident_bytes == 8 * 4096)
    assert resident_bytes(pool) == registrar.locked_bytes == 8 * 4096, "the chunk on the boundary stays"
    pool.set_target(0)
    eventually(lambda: pool.status().resident_bytes == 0)
    assert resident_bytes(pool) == registrar.locked_bytes == pool.status().chunks_done == 0
    pool.set_target(10)
    eventually(pinned(pool, 10))


def test_held_memory_is_not_freed(make_pool: MakePool) -> None:
    pool = make_pool()
    pool.start()
    eventually(pinned(pool, 16))
    stepped = threading.Event()
    pool.add_listener(stepped.set)
    with pool.hold(16):
        pool.set_target(4)
        assert not stepped.wait(0.05)
        ctypes.memset(pool.address, 1, 16 * 4096)  # a crash, were it gone
    eventually(lambda: pool.status().chunks_done == 1)


def test_slots_above_the_watermark_cannot_be_held(make_pool: MakePool) -> None:
    pool = make_pool()
    with pytest.raises(CopyError, match="slot 0 is not pinned; the pool has 0 slots pinned"), pool.hold(1):
        pass
    pool.start()
    eventually(pinned(pool, 16))
    with pytest.raises(CopyError, match="slot 16 is not pinned"), pool.hold(17):
        pass
    pool.set_target(3)
    with pytest.raises(CopyError, match="slot 3 is not pinned"), pool.hold(4):
        pass


@pytest.mark.parametrize(("failing", "slots"), [(0, 0), (2, 8)])
def test_a_failed_chunk_stops_growth_keeps_the_rest_and_is_tried_again_on_request(
    make_pool: MakePool, failing: int, slots: int
) -> None:
    registrar = FakeRegistrar({failing: PinError("driver", "CUDA_ERROR_OUT_OF_MEMORY: out of memory")})
    pool = make_pool(registrar)
    pool.start()
    eventually(in_state(pool, "degraded"))
    status = pool.status()
    assert (status.error_reason, status.error) == ("driver", "CUDA_ERROR_OUT_OF_MEMORY: out of memory")
    assert (status.pinned_slots, status.chunks_failed) == (slots, 1)
    assert (status.chunks_done, status.chunks_total) == (slots // 4, 4)
    assert resident_bytes(pool) == status.resident_bytes == slots * 4096, "the failed chunk left nothing behind"
    pool.retry()
    eventually(pinned(pool, 16))
    assert pool.status().error is None
    assert pool.status().chunks_failed == 0
    assert pool.status().pin_failures == {"driver": 1}, "it is a count"


def test_an_unexpected_error_is_reported_and_does_not_end_the_pinning(
    make_pool: MakePool, caplog: pytest.LogCaptureFixture
) -> None:
    pool = make_pool(FakeRegistrar({1: ZeroDivisionError("oops")}))
    pool.start()
    eventually(in_state(pool, "failed"))
    status = pool.status()
    assert (status.error_reason, status.error) == ("internal", "ZeroDivisionError('oops')")
    assert (status.pinned_slots, resident_bytes(pool)) == (4, 4 * 4096)
    assert "ZeroDivisionError" in caplog.text
    pool.retry()
    eventually(pinned(pool, 16))


def test_an_error_in_the_choice_of_the_next_step_does_not_end_the_pinning(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_pool()

    def fail(*_: object) -> None:
        monkeypatch.undo()
        raise MemoryError

    monkeypatch.setattr(ChunkGrid, "next_chunk", fail)
    pool.start()
    eventually(in_state(pool, "failed"))
    pool.retry()
    eventually(pinned(pool, 16))


@pytest.mark.parametrize("where", ["numa", "clock", "pace", "progress"])
def test_no_error_around_a_registration_loses_the_chunk(
    where: str, make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lost chunk would stay registered for good, and its memory could not be registered again."""
    registrar = FakeRegistrar()
    pool = make_pool(registrar, cpu_clock=lambda: told("clock", 0.0))

    def told(what: str, value: Any = None) -> Any:
        if what == where and len(registrar.registered) == 2:
            raise MemoryError
        return value

    monkeypatch.setattr(hostpool, "bytes_by_node", lambda *_: told("numa", Counter()))
    monkeypatch.setattr(FixedPace, "record", lambda *_: told("pace"))
    monkeypatch.setattr(PinProgress, "record", lambda *_: told("progress"))
    pool.start()
    eventually(in_state(pool, "failed"))
    slots = pool.pinned_slots
    assert sum(registrar.registered.values()) == slots * 4096 == pool.status().resident_bytes
    assert resident_bytes(pool) == slots * 4096
    monkeypatch.undo()
    where = ""
    pool.retry()
    eventually(pinned(pool, 16))
    assert pool.status().chunks_done == 4
    pool.close()
    assert registrar.registered == {}


def test_a_new_target_retries_after_a_failure(make_pool: MakePool) -> None:
    pool = make_pool(FakeRegistrar({2: PinError("driver", "no")}))
    pool.start()
    eventually(in_state(pool, "degraded"))
    pool.set_target(16)
    assert pool.status().state == "degraded", "that was no new target"
    pool.set_target(8)
    eventually(pinned(pool, 8))
    assert pool.status().error is None


def test_a_chunk_that_cannot_be_unregistered_stays_and_is_tried_again(make_pool: MakePool) -> None:
    registrar = FakeRegistrar()
    pool = make_pool(registrar)
    pool.start()
    eventually(pinned(pool, 16))
    registrar.unregister_error = PinError("driver", "busy")
    pool.set_target(12)
    eventually(in_state(pool, "degraded"))
    assert (pool.pinned_slots, pool.status().chunks_done) == (12, 4)
    registrar.unregister_error = None
    pool.retry()
    eventually(lambda: pool.status().chunks_done == 3)


def test_a_paused_pool_starts_no_chunk_until_it_is_unpaused(make_pool: MakePool) -> None:
    registrar = FakeRegistrar(wait_at=1)
    pool = make_pool(registrar)
    pool.start()
    assert registrar.waiting.wait(60)
    pool.set_paused(True)
    registrar.go_on.set()
    eventually(lambda: pool.pinned_slots == 8)
    pool.set_target(4)
    eventually(lambda: pool.status().chunks_done == 1)
    pool.set_target(16)
    assert (pool.status().state, pool.pinned_slots) == ("pinning", 4)
    pool.set_paused(False)
    eventually(pinned(pool, 16))


def test_the_registrar_prepares_the_pinning_thread_once(make_pool: MakePool) -> None:
    registrar = FakeRegistrar()
    pool = make_pool(registrar)
    pool.start()
    pool.start()
    eventually(pinned(pool, 16))
    assert registrar.prepared_by == ["kvstow-pin"]


def test_a_target_beyond_the_reserved_space_is_refused_with_the_bounds(make_pool: MakePool) -> None:
    pool = make_pool(max_bytes=20 * 4096)
    for slots in (-1, 21):
        with pytest.raises(ConfigError, match=f"target slots is {slots}; allowed: 0 to 20"):
            pool.set_target(slots)


def test_a_pool_larger_than_the_cgroup_is_refused_before_it_uses_memory(make_pool: MakePool, tmp_path: Path) -> None:
    limits = write_cgroup(tmp_path, 1 << 30)
    with pytest.raises(InsufficientMemoryError, match=r"2 GiB are needed .* is 1 GiB, of which 1 GiB is left"):
        make_pool(limits=limits, pool_bytes=2 << 30)


@pytest.mark.parametrize("what", ["cgroup", "machine"])
def test_memory_taken_by_other_processes_stops_growth_with_a_reason(
    make_pool: MakePool, tmp_path: Path, what: str
) -> None:
    limits = write_cgroup(tmp_path, 1 << 30)
    pool = make_pool(limits=limits)
    if what == "cgroup":
        (tmp_path / "memory.current").write_text(str(1 << 30))
    else:
        (tmp_path / "meminfo").write_text("MemAvailable: 1 kB\n")
    pool.start()
    eventually(in_state(pool, "degraded"))
    assert pool.status().error_reason == ("cgroup_limit" if what == "cgroup" else "out_of_memory")
    assert resident_bytes(pool) == 0
    write_cgroup(tmp_path, 1 << 30)
    (tmp_path / "meminfo").unlink(missing_ok=True)
    pool.retry()
    eventually(pinned(pool, 16))


@pytest.mark.parametrize("left", [4 << 30, 1 << 30])
def test_near_a_limit_the_kernel_populates_and_no_page_is_touched(
    make_pool: MakePool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    left: int,
) -> None:
    touched: list[bool] = []
    commit = HostRegion.commit

    def noted(region: HostRegion, offset: int, num_bytes: int, *, plenty: bool, threads: int) -> None:
        touched.append(plenty)
        commit(region, offset, num_bytes, plenty=plenty, threads=threads)

    monkeypatch.setattr(HostRegion, "commit", noted)
    pool = make_pool(limits=write_cgroup(tmp_path, left))
    pool.start()
    eventually(pinned(pool, 16))
    assert set(touched) == {left == 4 << 30}


def test_a_chunk_is_populated_during_the_pause_and_registered_after_it(make_pool: MakePool) -> None:
    class Timed(FakeRegistrar):
        populated: ClassVar[list[tuple[int, int]]] = []

        def register(self, address: int, num_bytes: int) -> None:
            super().register(address, num_bytes)
            self.populated.append((self.calls, pool.status().resident_bytes // 4096))

    pool = make_pool(Timed(), pause=3600.0)
    pool.start()
    eventually(lambda: pool.status().resident_bytes == 8 * 4096)
    assert pool.pinned_slots == 4
    assert Timed.populated == [(1, 4)], "never ahead of the first chunk, which has nothing to wait for"


def test_at_ease_pauses_are_longer_until_start_is_called_without_it(make_pool: MakePool) -> None:
    def start(registrar: FakeRegistrar) -> HostPool:
        clock = FakeClock()
        pool = make_pool(registrar, clock=clock, pause=3600.0)
        pool.add_listener(lambda: clock.advance(2 * 3600.0))  # after each chunk: a pause is over, and not five
        pool.start(at_ease=True)
        return pool

    class Hurried(FakeRegistrar):
        def register(self, address: int, num_bytes: int) -> None:
            super().register(address, num_bytes)
            hurried.start()

    rested = start(FakeRegistrar())
    eventually(lambda: rested.status().resident_bytes == 8 * 4096)
    hurried = start(Hurried())
    eventually(pinned(hurried, 16))
    assert rested.pinned_slots == 4


def test_an_adaptive_pace_follows_the_time_of_the_register_calls(make_pool: MakePool) -> None:
    clock = FakeClock()

    class Timed(FakeRegistrar):
        sizes: ClassVar[list[int]] = []

        def register(self, address: int, num_bytes: int) -> None:
            super().register(address, num_bytes)
            self.sizes.append(num_bytes)
            clock.advance(num_bytes / (4 << 30))

    pool = make_pool(
        Timed(), clock=clock, cpu_clock=clock, pool_bytes=64 * MIB, chunk_bytes=None, pause=None, latency_target=0.0025
    )
    pool.add_listener(lambda: clock.advance(1.0))
    pool.start()
    eventually(pinned(pool, 64 * 256))
    assert Timed.sizes[0] == 16 * MIB
    assert {size // MIB for size in Timed.sizes[2:-1]} == {10}, "2.5 ms each at 4 GiB/s"


@pytest.mark.parametrize("pace", ["adaptive", "fixed"])
def test_while_the_host_makes_steps_its_thread_registers_and_unregisters(pace: str, make_pool: MakePool) -> None:
    threads: list[threading.Thread] = []

    class Looking(FakeRegistrar):
        def register(self, address: int, num_bytes: int) -> None:
            super().register(address, num_bytes)
            threads.append(threading.current_thread())

        def unregister(self, address: int, num_bytes: int) -> None:
            super().unregister(address, num_bytes)
            threads.append(threading.current_thread())

    clock = FakeClock()
    config = {"chunk_bytes": None, "pause": None} if pace == "adaptive" else {"chunk_bytes": 16 * MIB}
    pool = make_pool(Looking(), clock=clock, cpu_clock=clock, pool_bytes=32 * MIB, max_bytes=48 * MIB, **config)

    make_step(pool.steps, clock)
    pool.start()
    eventually(lambda: make_step(pool.steps, clock) and pool.status().state == "ready")
    pool.set_target(0)
    eventually(lambda: make_step(pool.steps, clock) and pool.status().resident_bytes == 0)
    assert (threading.current_thread() in threads) == (pace == "adaptive")
    assert len(set(threads)) == 1


def test_memory_is_preferred_from_the_node_of_the_device(make_pool: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, int]] = []

    def refuse(address: int, num_bytes: int, node: int) -> str | None:
        asked.append((address, num_bytes, node))
        return "no such node"

    monkeypatch.setattr(hostpool, "prefer_node", refuse)
    pool = make_pool(numa_node=3)
    assert asked == [(pool.address, 16 * 4096, 3)]
    assert pool.status().notice == "no such node"
    pool.start()
    eventually(pinned(pool, 16))


def test_memory_is_counted_by_its_node(make_pool: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    first: list[int] = []

    def told(address: int, num_bytes: int) -> Counter[int]:
        first.append(address)
        return Counter({int(address > first[0]): num_bytes})  # the first chunk on node 0, the others on node 1

    monkeypatch.setattr(hostpool, "bytes_by_node", told)
    pool = make_pool()
    pool.start()
    eventually(pinned(pool, 16))
    assert pool.status().numa_bytes == {0: 4 * 4096, 1: 12 * 4096}
    pool.set_target(4)
    eventually(lambda: pool.status().chunks_done == 1)
    assert pool.status().numa_bytes == {0: 4 * 4096}
    pool.close()
    assert pool.status().numa_bytes == {}


def test_closing_interrupts_a_running_pin_at_the_next_chunk(make_pool: MakePool) -> None:
    registrar = FakeRegistrar(wait_at=1)
    pool = make_pool(registrar)
    pool.start()
    assert registrar.waiting.wait(60)
    closing = threading.Thread(target=pool.close)
    closing.start()
    eventually(in_state(pool, "closed"))
    registrar.go_on.set()
    closing.join(60)
    assert not closing.is_alive()
    assert (registrar.calls, registrar.registered) == (2, {})
    assert (pool.pinned_slots, resident_bytes(pool)) == (0, 0)


def test_closing_does_not_wait_for_the_pause(make_pool: MakePool) -> None:
    pool = make_pool(pause=3600.0)
    pool.start()
    eventually(lambda: pool.pinned_slots == 4)
    pool.close()
    assert pool.status().state == "closed"


def test_nothing_can_be_held_once_close_has_seen_that_nothing_is(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals: list[CopyError] = []

    class Gap(threading.Condition):
        """Asks for a hold when `close` lets go of the lock after its wait."""

        has_waited = False

        def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
            self.has_waited = pool.status().state == "closed"
            return super().wait_for(predicate, timeout)

        def __exit__(self, *details: Any) -> None:
            super().__exit__(*details)
            if not self.has_waited:
                return
            self.has_waited = False
            try:
                pool.hold(4).close()
            except CopyError as error:
                refusals.append(error)

    registrar = FakeRegistrar()
    with monkeypatch.context() as patch:
        patch.setattr(threading, "Condition", Gap)
        pool = make_pool(registrar)
    pool.start()
    eventually(pinned(pool, 16))
    pool.close()
    assert len(refusals) == 1, "memory was given back although it was held"


def test_close_is_final_and_may_be_called_concurrently_or_before_start(make_pool: MakePool) -> None:
    registrar = FakeRegistrar()
    pool = make_pool(registrar)
    pool.start()
    closing = [threading.Thread(target=pool.close) for _ in range(4)]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join(60)
    assert registrar.registered == {}
    unstarted = make_pool()
    unstarted.close()
    unstarted.start()
    unstarted.set_target(1)
    assert unstarted.status().state == "closed"


@pytest.mark.parametrize("error", [PinError("driver", "gone"), MemoryError("gone")])
def test_closing_continues_if_the_driver_refuses_to_unregister(
    error: Exception, make_pool: MakePool, caplog: pytest.LogCaptureFixture
) -> None:
    registrar = FakeRegistrar()
    pool = make_pool(registrar)
    pool.start()
    eventually(pinned(pool, 16))
    registrar.unregister_error = error
    with caplog.at_level(logging.WARNING):
        pool.close()
    assert "could not unregister slots 0-3: gone" in caplog.text
    assert "could not unregister slots 12-15: gone" in caplog.text
    assert resident_bytes(pool) == 0


def test_listeners_are_called_after_every_chunk_and_one_that_raises_harms_nothing(
    make_pool: MakePool, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[int] = []

    def broken() -> None:
        raise RuntimeError("a broken listener")

    pool = make_pool()
    pool.add_listener(broken)
    pool.add_listener(lambda: heard.append(pool.pinned_slots))
    pool.start()
    eventually(lambda: heard == [4, 8, 12, 16])
    assert caplog.text.count("RuntimeError: a broken listener") == 4


def test_progress_is_reported(make_pool: MakePool) -> None:
    pool = make_pool()
    assert pool.status().pin_elapsed_seconds == 0
    pool.start()
    eventually(pinned(pool, 16))
    status = pool.status()
    assert status.pin_rate_bytes_per_second
    assert status.pin_elapsed_seconds > 0
    assert status.pin_elapsed_seconds == pool.status().pin_elapsed_seconds, "the growth is over"


def test_without_lock_the_registrar_is_not_called(make_pool: MakePool) -> None:
    registrar = FakeRegistrar()
    pool = make_pool(registrar, lock=False)
    pool.start()
    eventually(pinned(pool, 16))
    status = pool.status()
    assert (status.pin_mode, status.locked_bytes, status.resident_bytes) == ("populate", 0, 16 * 4096)
    assert registrar.calls == 0


_KILLED = """
import os, signal, sys, threading
from kvstow.config import PoolConfig
from kvstow.memory.pinning import PopulateOnly
from kvstow.memory.hostpool import HostPool
pool = HostPool(PoolConfig(4096, 1 << 20, chunk_bytes=1 << 16, pause=3600.0), PopulateOnly())
pinned = threading.Event()
pool.add_listener(pinned.set)
pool.start()
pinned.wait(60)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_killed_while_pinning_leaves_no_file_and_no_shared_memory(tmp_path: Path) -> None:
    shared_before = set(os.listdir("/dev/shm"))
    environment: dict[str, Any] = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", _KILLED], env=environment, cwd=tmp_path, check=False)
    assert run.returncode == -9
    assert list(tmp_path.iterdir()) == []
    assert {name for name in set(os.listdir("/dev/shm")) - shared_before if "kvstow" in name} == set()
