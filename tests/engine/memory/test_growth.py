"""A pool that grows while its host makes steps: chunks are populated ahead, and the host's thread registers them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.doubles.fakes import FakeClock, FakeRegistrar
from tests.engine.memory.measured import make_step
from tests.waiting import eventually

from kvstow.errors import PinError
from kvstow.memory.growth import Growth
from kvstow.memory.hostpool import HostPool
from kvstow.memory.region import HostRegion

MakePool = Callable[..., HostPool]
CHUNK = 4 * 4096  # four slots


@pytest.fixture(autouse=True)
def small_calls(calls_of: Callable[[int], None]) -> None:
    calls_of(CHUNK)


class Growing:
    """A pool of 40 chunks. The test's thread is the host's: its clock advances in steps only, so the host never counts
    as idle."""

    def __init__(
        self, make_pool: MakePool, registrar: FakeRegistrar | None = None, chunks: int = 40, *, is_idle: bool = False
    ) -> None:
        self.clock = FakeClock()
        self.registrar = registrar or FakeRegistrar()
        self.threads: set[threading.Thread] = set()
        register = self.registrar.register

        def noted(address: int, num_bytes: int) -> None:
            self.threads.add(threading.current_thread())
            register(address, num_bytes)

        self.registrar.register = noted  # type: ignore[method-assign]
        self.pool = make_pool(
            self.registrar,
            clock=self.clock,
            cpu_clock=FakeClock(),  # or a test that waits in a call makes the pause after it long
            pool_bytes=chunks * CHUNK,
            max_bytes=100 * CHUNK,
            chunk_bytes=None,
            pause=None,
        )
        if not is_idle:
            self.step()
        self.pool.start()

    def step(self) -> bool:
        return make_step(self.pool.steps, self.clock)

    def in_the_middle(self) -> None:
        """Some chunks are registered, and more are populated."""
        eventually(lambda: self.pool.status().resident_bytes == 8 * CHUNK)
        self.steps_until(lambda: self.pool.pinned_slots)

    def steps_until(self, condition: Callable[[], object]) -> None:
        eventually(lambda: self.step() and condition())

    def idle_until(self, state: str = "ready") -> None:
        """The host makes no step meanwhile."""

        def is_over() -> bool:
            self.clock.advance(1.0)
            return self.pool.status().state == state

        eventually(is_over)

    def is_settled(self) -> bool:
        status = self.pool.status()
        return status.resident_bytes == sum(self.registrar.registered.values()) == status.pinned_slots * 4096


def test_the_hosts_thread_registers_all_chunks_and_the_pinning_thread_runs_less_often(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    populated = Populated(monkeypatch)
    growing = Growing(make_pool)
    growing.steps_until(lambda: growing.pool.status().state == "ready")
    assert growing.threads == {threading.current_thread()}
    assert set(growing.registrar.registered.values()) == {CHUNK}
    assert len(growing.registrar.registered) == 40
    assert populated.batches <= 8, "1, 1, 2, 4, and then at least 8 chunks at once"


def test_a_growth_has_ended_also_where_the_pinning_thread_did_not_see_its_last_calls(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    growing = Growing(make_pool, chunks=6)
    goes_on = growing.pool._goes_on

    def late(growth: Growth) -> bool:
        """As if nothing ran the pinning thread until the host's thread has made all calls."""
        if len(growth.queue) == 6:
            eventually(lambda: growth.queue.made == 6)
        return goes_on(growth)

    monkeypatch.setattr(growing.pool, "_goes_on", late)
    growing.steps_until(lambda: growing.pool.status().state == "ready")
    seconds = growing.pool.status().pin_elapsed_seconds
    growing.clock.advance(1000)
    assert growing.pool.status().pin_elapsed_seconds == seconds


def test_while_paused_the_host_registers_nothing_and_what_is_populated_stays(make_pool: MakePool) -> None:
    growing = Growing(make_pool)
    growing.in_the_middle()
    growing.pool.set_paused(True)
    calls = growing.registrar.calls
    eventually(lambda: growing.pool.pinned_slots == calls * 4)
    eventually(lambda: not growing.pool.steps.is_pinning)
    resident = growing.pool.status().resident_bytes
    for _ in range(100):
        growing.step()
    assert growing.registrar.calls == calls
    assert growing.pool.status().resident_bytes == resident > calls * CHUNK
    growing.pool.set_paused(False)
    growing.steps_until(lambda: growing.pool.status().state == "ready")
    assert growing.is_settled()


@pytest.mark.parametrize("is_paused", [False, True])
def test_a_smaller_target_ends_the_growth_at_once(make_pool: MakePool, is_paused: bool) -> None:
    growing = Growing(make_pool)
    growing.in_the_middle()
    growing.pool.set_paused(is_paused)
    growing.pool.set_target(2)
    calls = growing.registrar.calls
    growing.steps_until(lambda: growing.pool.status().resident_bytes == CHUNK)
    assert growing.registrar.calls == calls, "no chunk was registered in vain"
    assert (growing.pool.pinned_slots, len(growing.registrar.registered)) == (2, 1)


def test_closing_in_the_middle_of_the_queue_leaves_nothing(make_pool: MakePool) -> None:
    growing = Growing(make_pool)
    growing.in_the_middle()
    calls = growing.registrar.calls
    growing.pool.close()
    growing.step()
    assert (growing.registrar.calls, growing.registrar.registered) == (calls, {})
    assert growing.pool.status().resident_bytes == 0


@pytest.mark.parametrize("failing", [0, 1, 5, 20])
def test_a_call_that_fails_keeps_those_before_it_and_gives_the_rest_back(make_pool: MakePool, failing: int) -> None:
    growing = Growing(make_pool, FakeRegistrar({failing: PinError("driver", "refused")}))
    growing.steps_until(lambda: growing.pool.status().state == "degraded")
    assert growing.pool.status().error == "refused"
    assert growing.pool.pinned_slots == failing * 4
    assert growing.is_settled()
    growing.pool.retry()
    growing.steps_until(lambda: growing.pool.status().state == "ready")
    assert growing.is_settled()


@pytest.mark.parametrize("fit", [0, 1, 2, 3, 6, 13])
def test_all_chunks_that_fit_are_pinned_before_growth_fails(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch, fit: int
) -> None:
    commit = HostRegion.commit

    def limited(region: HostRegion, offset: int, num_bytes: int, *, plenty: bool, threads: int) -> None:
        if offset + num_bytes > fit * CHUNK:
            raise PinError("out_of_memory", "no pages")
        commit(region, offset, num_bytes, plenty=plenty, threads=threads)

    monkeypatch.setattr(HostRegion, "commit", limited)
    growing = Growing(make_pool)
    growing.steps_until(lambda: growing.pool.status().state == "degraded")
    assert (growing.pool.status().error, growing.pool.pinned_slots) == ("no pages", fit * 4)
    assert growing.is_settled()


def test_a_signal_in_the_middle_of_a_call_keeps_what_is_registered(make_pool: MakePool) -> None:
    class Interrupted(FakeRegistrar):
        def register(self, address: int, num_bytes: int) -> None:
            if len(self.registered) == 6:
                raise SystemExit
            super().register(address, num_bytes)

    growing = Growing(make_pool, Interrupted())
    with pytest.raises(SystemExit):
        growing.steps_until(lambda: False)
    eventually(lambda: growing.pool.status().state == "degraded")
    assert "interrupted" in str(growing.pool.status().error)
    assert (growing.pool.pinned_slots, growing.is_settled()) == (24, True)


def test_an_idle_host_leaves_the_queue_to_the_pinning_thread(make_pool: MakePool) -> None:
    growing = Growing(make_pool)
    growing.in_the_middle()
    by_host = growing.registrar.calls

    growing.idle_until()
    assert growing.registrar.calls == 40 > by_host
    assert {thread.name for thread in growing.threads} == {threading.current_thread().name, "kvstow-pin"}
    assert growing.is_settled()


class Populated:
    """Which chunks have memory. What another thread than the pinning thread populates for the `number`th time waits for
    `go_on`, once `begun` is set, and fails with `error`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int = 1, error: Exception | None = None) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.chunks: set[int] = set()
        self.batches = 0
        commit, decommit, times = HostRegion.commit, HostRegion.decommit, 0

        def committing(region: HostRegion, offset: int, num_bytes: int, *, plenty: bool, threads: int) -> None:
            nonlocal times
            if threading.current_thread().name != "kvstow-pin":
                times += 1
                if times == number:
                    self.begun.set()
                    assert self.go_on.wait(30)
                    if error is not None:
                        raise error
            commit(region, offset, num_bytes, plenty=plenty, threads=threads)
            self.batches += 1
            self.chunks.update(range(offset // CHUNK, (offset + num_bytes) // CHUNK))

        def decommitting(region: HostRegion, offset: int, num_bytes: int) -> None:
            decommit(region, offset, num_bytes)
            self.chunks.difference_update(range(offset // CHUNK, (offset + num_bytes) // CHUNK))

        monkeypatch.setattr(HostRegion, "commit", committing)
        monkeypatch.setattr(HostRegion, "decommit", decommitting)


def test_beside_an_idle_host_chunks_are_populated_while_others_are_registered(make_pool: MakePool) -> None:
    ahead: list[int] = []

    class Waiting(FakeRegistrar):
        def register(self, address: int, num_bytes: int) -> None:
            if 1 <= len(self.registered) < 30:  # each call of the second growth waits for more memory
                eventually(lambda: growing.pool.status().resident_bytes > (len(self.registered) + 1) * CHUNK)
            super().register(address, num_bytes)
            ahead.append(growing.pool.status().resident_bytes // CHUNK - len(self.registered))

    registrar = Waiting()
    growing = Growing(make_pool, registrar, chunks=1, is_idle=True)
    eventually(lambda: growing.pool.pinned_slots == 4)
    growing.pool.set_target(160)

    growing.idle_until()
    assert growing.is_settled()
    assert 1 <= max(ahead) <= 12


def test_without_another_thread_the_pinning_thread_populates(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def submit(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(ThreadPoolExecutor, "submit", submit)
    growing = Growing(make_pool, is_idle=True)

    with caplog.at_level(logging.WARNING):
        growing.idle_until()
    assert growing.is_settled()
    message = "memory is not populated ahead, so pinning takes longer: can't start new thread"
    assert [record.getMessage() for record in caplog.records] == [message]


@pytest.mark.parametrize(
    ("ending", "number"),
    [("close", 1), ("close", 2), ("target", 1), ("target", 2), ("pause", 1), ("pause", 2), ("driver", 1)],
)
def test_growth_that_ends_while_chunks_are_populated_gives_those_back(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch, ending: str, number: int
) -> None:
    """The first time nothing else is left to register, the second time a chunk."""
    populated = Populated(monkeypatch, number)
    registrar = FakeRegistrar({0: PinError("driver", "refused")} if ending == "driver" else {})
    growing = Growing(make_pool, registrar, is_idle=True)
    pool = growing.pool
    assert populated.begun.wait(30)
    if ending == "driver":
        eventually(lambda: registrar.calls == 1)
    else:
        eventually(lambda: pool.pinned_slots == 4)
    closing = threading.Thread(target=pool.close, daemon=True)
    if ending == "close":
        closing.start()
        eventually(lambda: pool.status().state == "closed")
    elif ending == "target":
        pool.set_target(2)
    elif ending == "pause":
        pool.set_paused(True)
    populated.go_on.set()
    if ending == "close":
        closing.join(30)
        assert (pool.status().resident_bytes, registrar.registered) == (0, {})
    elif ending == "target":
        eventually(lambda: populated.chunks == {0})
        eventually(lambda: pool.status().resident_bytes == CHUNK)
        assert (pool.pinned_slots, len(registrar.registered)) == (2, 1)
    elif ending == "pause":
        growing.clock.advance(1.0)
        eventually(lambda: not pool.steps.is_pinning)
        assert len(registrar.registered) == 1
        eventually(lambda: len(populated.chunks) == (2 if number == 1 else 4))
    else:
        eventually(lambda: pool.status().state == "degraded" and not populated.chunks)
    pool.close()
    assert registrar.registered == {}


@pytest.mark.parametrize(
    ("error", "state"), [(PinError("out_of_memory", "no pages"), "ready"), (RuntimeError("a defect"), "failed")]
)
def test_an_error_while_chunks_are_populated_beside_others_is_not_lost(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch, error: Exception, state: str
) -> None:
    """A refusal is tried again on the pinning thread, when all before it are registered."""
    populated = Populated(monkeypatch, error=error)
    populated.go_on.set()
    growing = Growing(make_pool, is_idle=True)

    growing.idle_until(state)
    eventually(growing.is_settled)
    assert growing.pool.pinned_slots == (160 if state == "ready" else 4)


def test_a_pause_keeps_what_is_populated_beside_the_last_call(make_pool: MakePool) -> None:
    class Pausing(FakeRegistrar):
        def register(self, address: int, num_bytes: int) -> None:
            super().register(address, num_bytes)
            growing.pool.set_paused(self.calls == 1)

    growing = Growing(make_pool, Pausing(), is_idle=True)
    eventually(lambda: growing.pool.pinned_slots and not growing.pool.steps.is_pinning)
    assert (growing.pool.pinned_slots, growing.pool.status().resident_bytes) == (4, 2 * CHUNK)
    growing.pool.set_paused(False)

    growing.idle_until()
    assert growing.is_settled()


def test_a_host_that_makes_steps_again_lets_the_pinning_thread_sleep_while_chunks_are_populated(
    make_pool: MakePool, quick_checks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    populated = Populated(monkeypatch, 2)
    growing = Growing(make_pool, is_idle=True)
    assert populated.begun.wait(30)
    growing.pool.steps.begin()
    growing.pool.retry()  # wakes the pinning thread, as the next pause on a real clock
    eventually(lambda: growing.pool.steps.checks >= 5)
    populated.go_on.set()
    growing.steps_until(lambda: growing.pool.status().state == "ready")
    assert growing.is_settled()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from(["steps", "idle", "pause", "go on", "target", "fail"]), st.integers(0, 60))))
def test_whatever_happens_in_the_middle_the_pool_ends_as_asked(
    make_pool: MakePool, schedule: list[tuple[str, int]]
) -> None:
    growing = Growing(make_pool)
    pool, registrar, target = growing.pool, growing.registrar, 160
    for what, number in schedule:
        if what == "steps":
            for _ in range(number):
                growing.step()
        elif what == "idle":
            growing.clock.advance(number / 60)
        elif what in ("pause", "go on"):
            pool.set_paused(what == "pause")
        elif what == "target":
            target = number * 4
            pool.set_target(target)
        else:
            registrar.failures[registrar.calls + number % 4] = PinError("driver", "refused")
    registrar.failures.clear()
    pool.set_paused(False)

    def is_done() -> bool:
        made = registrar.calls
        assert pool.status().resident_bytes - made * CHUNK <= 12 * CHUNK, "memory ahead is bounded"
        if pool.status().state == "degraded":
            pool.retry()
        growing.step()
        return pool.pinned_slots == target and growing.is_settled()

    eventually(is_done)
    pool.close()
    assert registrar.registered == {}
