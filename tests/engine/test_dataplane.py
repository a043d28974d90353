from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.doubles.fakes import FakeDevice, FakeRegistrar, Latch, rests
from tests.waiting import eventually

from kvstow.attach.calls import Report
from kvstow.dataplane import DataPlane
from kvstow.devices.cpu import CpuDevice
from kvstow.errors import PinError
from kvstow.layout import KVLayout, Region
from kvstow.memory.hostpool import HostPool
from kvstow.memory.slotpool import PoolStatus
from kvstow.messages import Completion, DesiredState, Direction, LoadLaunch, Op, RankReport, StagedLoad, StepPlan

if TYPE_CHECKING:
    MakePool = Callable[..., HostPool]
    MakeDataPlane = Callable[..., DataPlane]

BLOCKS = 8


def plan(op_id: int, direction: Direction, blocks: tuple[int, ...], slots: tuple[int, ...]) -> StepPlan:
    return StepPlan((Op(op_id, direction, blocks, slots),))


def wait_for(plane: DataPlane, *op_ids: int) -> dict[int, Completion]:
    """The final completions of these ops."""
    seen: dict[int, Completion] = {}
    while not seen.keys() >= set(op_ids):
        assert plane.wait_completions(10), f"only {sorted(seen)}"
        seen |= {c.op_id: c for c in plane.take_completions() if c.mark != "source_free"}
    return seen


@pytest.fixture
def make_data_plane(make_pool: MakePool) -> Iterator[MakeDataPlane]:
    """Data planes over 16 slots of 4 KiB; not pinned before `pool.start()`, but for a fake device to copy."""
    planes: list[DataPlane] = []

    def make(pool: HostPool | None = None, device: Any = None, **options: Any) -> DataPlane:
        planes.append(DataPlane(len(planes), pool or make_pool(), device or FakeDevice(), **options))
        if isinstance(device, FakeDevice):
            planes[-1].pool.start()
            eventually(lambda: planes[-1].pool.pinned_slots == 16)
        return planes[-1]

    yield make
    for plane in planes:
        plane.close(0)


class CpuRank:
    """A data plane over a CPU device whose blocks hold their own number, with a pinned pool."""

    def __init__(self, pool: HostPool, make_data_plane: MakeDataPlane) -> None:
        self.kv = torch.arange(BLOCKS, dtype=torch.uint8).repeat_interleave(4096).view(BLOCKS, 4096)
        self.pool = pool
        device = CpuDevice(pool, KVLayout((Region("kv", BLOCKS, 4096, 4096),)), [self.kv])
        self.plane = make_data_plane(pool, device)
        pool.start()
        eventually(lambda: self.plane.report().state == "ready")

    def slot(self, slot: int) -> bytes:
        return ctypes.string_at(self.pool.address + slot * 4096, 4096)


@pytest.fixture
def make_rank(make_pool: MakePool, make_data_plane: MakeDataPlane) -> Callable[[], CpuRank]:
    return lambda: CpuRank(make_pool(), make_data_plane)


def test_ops_of_another_boot_fail_and_those_beside_them_do_not(make_data_plane: MakeDataPlane) -> None:
    """Their slots are in the memory of that boot, and hold other bytes here."""
    device = FakeDevice()
    plane = make_data_plane(device=device)
    boots = {1: ("before",), 2: (plane.boot_id,), 3: ()}
    plane.submit(StepPlan(tuple(Op(op_id, "load", (op_id,), (op_id,), named) for op_id, named in boots.items())))
    (failed,) = plane.take_completions()
    assert (failed.op_id, failed.error) == (1, "CopyError: this rank has restarted since the op began")
    for op_id in (2, 3):
        device.ticket(op_id).finish()
    assert {done.mark for done in wait_for(plane, 2, 3).values()} == {"done"}


def test_a_report_counts_uncollected_completions(make_rank: Callable[[], CpuRank]) -> None:
    plane = make_rank().plane
    plane.submit(plan(1, "store", (5,), (0,)))
    eventually(lambda: plane.report().pending_ops == 0)
    assert plane.report().uncollected_completions == 1
    plane.take_completions()
    assert plane.report().uncollected_completions == 0


def test_a_store_reads_its_blocks_only_after_the_fence(make_rank: Callable[[], CpuRank]) -> None:
    rank, latch = make_rank(), Latch()
    rank.plane.submit(plan(1, "store", (3,), (0,)), latch)
    assert latch.wait_queried(2)
    rank.kv[3] = 99  # the work that the fence names
    latch.open()
    wait_for(rank.plane, 1)
    assert rank.slot(0) == b"\x63" * 4096


def test_a_load_writes_its_blocks_only_after_the_fence(make_rank: Callable[[], CpuRank]) -> None:
    rank, latch = make_rank(), Latch()
    rank.plane.submit(plan(1, "load", (3,), (0,)), latch)
    assert latch.wait_queried(2)
    assert rank.kv[3].tolist() == [3] * 4096
    rank.kv[3] = 99  # an older step that still writes the destination
    latch.open()
    wait_for(rank.plane, 1)
    assert rank.kv[3].tolist() == [0] * 4096


def test_a_fence_that_is_not_reached_delays_no_other_op(make_rank: Callable[[], CpuRank]) -> None:
    rank, latch = make_rank(), Latch()
    rank.plane.submit(plan(1, "store", (1,), (1,)), latch)
    rank.plane.submit(plan(2, "load", (7,), (2,)))
    rank.plane.submit(plan(3, "store", (4,), (4,)))
    assert wait_for(rank.plane, 2, 3).keys() == {2, 3}
    assert rank.plane.report().pending_ops == 1
    latch.open()
    assert wait_for(rank.plane, 1)[1].mark == "done"


class FakeLauncher:
    """Records its calls. `gather` fails once for each of `refused`."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.refused: list[Exception] = []

    def expect(self, op_id: int, num_blocks: int) -> Latch:
        self.calls.append(f"expect {op_id}")
        return Latch()

    def write(self, launches: Any) -> None:
        self.calls += [f"write {launch.op_id}" for launch in launches]

    def take_staged(self) -> list[StagedLoad]:
        return [StagedLoad(2, 1)]

    def gather(self, blocks: Any) -> Latch:
        self.calls.append(f"gather {blocks}")
        if self.refused:
            raise self.refused.pop()
        return Latch()

    def launch_rest(self) -> None:
        self.calls.append("rest")

    def stop(self) -> None:
        self.calls.append("stop")


class Watching(FakeDevice):
    """A device that keeps the fences of its stores."""

    def __init__(self) -> None:
        super().__init__()
        self.fences: dict[int, Any] = {}

    def launch_store(self, op_id: int, blocks: Any, slots: Any, after: Any) -> Any:
        self.fences[op_id] = after
        return super().launch_store(op_id, blocks, slots, after)


def test_a_launcher_works_on_the_host_s_thread_in_the_order_of_the_plan(make_data_plane: MakeDataPlane) -> None:
    device, launcher = Watching(), FakeLauncher()
    plane = make_data_plane(device=device, launcher=launcher)
    launcher.refused = [RuntimeError("injected")]
    ops = Op(1, "store", (1,), (1,)), Op(2, "load", (2,), (2,)), Op(3, "store", (3,), (3,))
    plane.submit(StepPlan(ops, (LoadLaunch(9, 1, 0, 1), LoadLaunch(8, 1, 0, 1))), after=Latch())
    assert launcher.calls == ["write 9", "write 8", "gather (1,)", "expect 2", "rest", "gather (3,)", "rest"]
    for op_id in (2, 3):
        device.ticket(op_id).finish()
    completions = wait_for(plane, 1, 2, 3)
    assert completions[1].error == "RuntimeError: injected"
    assert [completions[op_id].mark for op_id in (1, 2, 3)] == ["failed", "done", "done"]
    assert device.begun == (2, 3)
    assert isinstance(device.fences[3], Latch)
    launcher.calls.clear()
    plane.drive()
    assert launcher.calls == []
    assert plane.take_staged() == [StagedLoad(2, 1)]
    plane.submit(StepPlan(tuple(replace(op, op_id=op.op_id + 10, boots=("before",)) for op in ops)))
    assert launcher.calls == ["gather (1,)", "rest", "gather (3,)", "rest"], "what other ranks launch for them"
    assert [done.mark for done in wait_for(plane, 11, 12, 13).values()] == ["failed"] * 3


def test_without_a_launcher_nothing_is_staged(make_rank: Callable[[], CpuRank]) -> None:
    plane = make_rank().plane
    assert plane.take_staged() == []
    assert plane.take_completions() == []


def test_a_data_plane_stops_its_launcher_before_it_waits_for_ops(make_data_plane: MakeDataPlane) -> None:
    device = FakeDevice()

    class Ending(FakeLauncher):
        def stop(self) -> None:
            device.ticket(1).fail(RuntimeError("stopped"))

    plane = make_data_plane(device=device, launcher=Ending())
    plane.submit(plan(1, "load", (1,), (1,)))
    device.ticket(1)
    assert plane.close(timeout=300)
    assert wait_for(plane, 1)[1].error == "RuntimeError: stopped"


def test_a_copy_that_fails_in_the_middle_of_the_queue_leaves_the_others_right(make_rank: Callable[[], CpuRank]) -> None:
    rank = make_rank()
    ops = [
        Op(1, "store", (1,), (1,)),
        Op(2, "store", (2,), (16,)),
        Op(3, "store", (8,), (3,)),
        Op(4, "store", (4,), (4,)),
    ]
    rank.plane.submit(StepPlan(tuple(ops)))
    completions = wait_for(rank.plane, 1, 2, 3, 4)
    assert [completions[op_id].mark for op_id in (1, 2, 3, 4)] == ["done", "failed", "failed", "done"]
    assert "slot 16 is not pinned" in str(completions[2].error)
    assert "blocks 8 to 8; allowed: 0 to 7" in str(completions[3].error)
    assert (rank.slot(1)[0], rank.slot(4)[0]) == (1, 4)


def test_the_report_follows_pinning_from_starting_to_ready(make_pool: MakePool, make_data_plane: MakeDataPlane) -> None:
    registrar = FakeRegistrar(wait_at=1)
    pool = make_pool(registrar)
    plane = make_data_plane(pool)
    states: list[str] = []
    ready = threading.Event()

    def listen() -> None:
        states.append(plane.report().state)
        if states[-1] == "ready":
            ready.set()

    plane.add_listener(listen)
    assert plane.report().state == "starting"
    pool.start()
    assert registrar.waiting.wait(60)
    report = plane.report()
    assert (report.state, report.pinned_slots, report.target_slots) == ("pinning", 4, 16)
    registrar.go_on.set()
    assert ready.wait(60)
    assert states == ["pinning", "pinning", "pinning", "ready"]
    final = plane.report()
    assert Report.unpack(Report.now(final).pack()).report == final
    assert (final.pin_mode, final.locked_bytes, final.device) == ("fake", 16 * 4096, "fake")


@pytest.mark.parametrize(("failing", "slots"), [(0, 0), (2, 8)])
def test_a_pin_failure_degrades_the_rank_until_another_attempt_is_desired(
    make_pool: MakePool, make_data_plane: MakeDataPlane, failing: int, slots: int
) -> None:
    pool = make_pool(FakeRegistrar({failing: PinError("driver", "no more pages")}))
    plane = make_data_plane(pool)
    plane.apply(DesiredState("engine", 16, number=1))
    pool.start()
    eventually(lambda: plane.report().state == "degraded")
    report = plane.report()
    assert (report.error_reason, report.error, report.pinned_slots) == ("driver", "no more pages", slots)
    assert report.pin_failures == {"driver": 1}
    plane.apply(DesiredState("engine", 16, number=2))
    assert plane.report().state == "degraded", "no new attempt was asked for"
    plane.apply(DesiredState("engine", 16, pin_attempt=1, number=9))
    eventually(lambda: plane.report().state == "ready")
    assert plane.report().error is None


def test_the_pool_follows_the_desired_capacity_and_pause(make_pool: MakePool, make_data_plane: MakeDataPlane) -> None:
    pool = make_pool(max_bytes=32 * 4096)
    plane = make_data_plane(pool)
    pool.start()
    plane.apply(DesiredState("engine", 24, number=3))
    eventually(lambda: plane.report().pinned_slots == 24)
    plane.apply(DesiredState("engine", 3, number=4))
    assert plane.report().pinned_slots == 3
    eventually(lambda: plane.report().chunks_done == 1)
    pinned_more = threading.Event()
    plane.add_listener(lambda: pinned_more.set() if plane.report().pinned_slots > 4 else None)
    plane.apply(DesiredState("engine", 24, paused=True, number=5))
    assert not pinned_more.wait(0.05)
    assert plane.report().pinned_slots == 4
    plane.apply(DesiredState("engine", 24, number=6))
    eventually(lambda: plane.report().state == "ready")


def test_a_report_counts_slots_after_it_reads_the_applied_state(
    make_pool: MakePool, make_data_plane: MakeDataPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_pool()
    plane = make_data_plane(pool)
    pool.start()
    eventually(lambda: pool.pinned_slots == 16)
    meanwhile: list[RankReport] = []
    count, set_target = pool.status, pool.set_target

    def report_first(slots: int) -> None:
        meanwhile.append(plane.report())
        set_target(slots)

    def apply_after() -> PoolStatus:
        status = count()
        monkeypatch.undo()
        plane.apply(DesiredState("engine", 2, number=2))
        return status

    monkeypatch.setattr(pool, "set_target", report_first)
    plane.apply(DesiredState("engine", 4, number=1))
    monkeypatch.setattr(pool, "status", apply_after)
    meanwhile += [plane.report(), plane.report()]
    assert [(said.engine_id, said.applied, said.pinned_slots) for said in meanwhile] == [
        ("", 0, 16),
        ("engine", 1, 4),
        ("engine", 2, 2),
    ]


@pytest.mark.parametrize(
    ("newer", "late"),
    [
        (DesiredState("engine", 4, number=2), DesiredState("engine", 16, number=1)),
        (DesiredState("engine", 16, number=2), DesiredState("engine", 4, number=1)),
        (DesiredState("engine", 16, number=2), DesiredState("engine", 16, paused=True, number=1)),
    ],
    ids=["shrink", "growth", "pause"],
)
def test_a_late_desired_state_reverts_nothing(
    make_data_plane: MakeDataPlane, newer: DesiredState, late: DesiredState, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane = make_data_plane()
    plane.apply(newer)
    paused: list[bool] = []
    monkeypatch.setattr(plane.pool, "set_paused", paused.append)
    plane.apply(late)
    report = plane.report()
    assert (report.target_slots, report.applied) == (newer.capacity_slots, 2)
    assert paused == []
    applied: list[DesiredState] = []
    plane.add_listener(lambda: applied.append(plane.applied))
    plane.apply(newer)
    assert applied == [], "the same one comes with every answer"
    plane.apply(DesiredState("another engine", 16, number=1))
    assert (plane.report().target_slots, plane.report().applied) == (16, 1)


@pytest.mark.parametrize("direction", ["store", "load"])
def test_memory_under_a_copy_is_freed_only_after_the_copy(make_data_plane: MakeDataPlane, direction: Direction) -> None:
    """However the pool is made smaller: a device with a copy engine would write to freed memory."""
    device = FakeDevice()
    plane = make_data_plane(device=device)
    pool = plane.pool
    plane.submit(plan(1, direction, (0,), (5,)))
    ticket = device.ticket(1)
    pool.set_target(0)
    eventually(lambda: pool.status().chunks_done == 2)
    assert rests(pool), "the chunk of slot 5 stays, and so do those below"
    ticket.finish()
    wait_for(plane, 1)
    eventually(lambda: pool.status().chunks_done == 0)


def test_a_copy_to_unmapped_memory_fails_before_it_reaches_the_device(make_data_plane: MakeDataPlane) -> None:
    device = FakeDevice()
    plane = make_data_plane(device=device)
    plane.submit(plan(1, "store", (0,), (16,)))
    assert wait_for(plane, 1)[1].error == "CopyError: slot 16 is not pinned; the pool has 16 slots pinned"
    assert not device.begun


def test_a_capacity_beyond_the_reserved_space_is_met_in_part_and_reported(make_data_plane: MakeDataPlane) -> None:
    plane = make_data_plane()
    plane.pool.start()
    plane.apply(DesiredState("engine", 17, number=7))
    eventually(lambda: plane.report().pinned_slots == 16)
    report = plane.report()
    assert (report.state, report.target_slots, report.error_reason) == ("degraded", 16, "max_bytes")
    assert report.error == "the capacity is 17 slots; max_bytes of this rank's pool allows 16"
    plane.apply(DesiredState("engine", 16, number=8))
    assert plane.report().state == "ready"


def test_the_end_of_the_copy_thread_is_reported_and_listeners_are_called(make_data_plane: MakeDataPlane) -> None:
    device, told = FakeDevice(), threading.Event()
    plane = make_data_plane(device=device)
    plane.add_listener(told.set)
    plane.submit(plan(1, "store", (0,), (0,)))
    device.ticket(1).poll_error = RuntimeError("a defect")
    assert wait_for(plane, 1)[1].mark == "failed"
    assert told.wait(60)
    report = plane.report()
    assert (report.state, report.error_reason) == ("failed", "copy_thread")
    assert report.error == "the copy thread has failed: RuntimeError('a defect')"
    plane.submit(plan(2, "load", (0,), (0,)))
    assert wait_for(plane, 2)[2].mark == "failed"


def test_ops_beyond_the_queue_fail(make_data_plane: MakeDataPlane) -> None:
    device = FakeDevice()
    plane = make_data_plane(device=device, max_queued=1)
    for op_id in (1, 2):
        plane.submit(plan(op_id, "store", (0,), (0,)))
        device.ticket(op_id)
    plane.submit(StepPlan((Op(3, "store", (0,), (0,)), Op(4, "store", (0,), (0,)))))
    assert wait_for(plane, 4)[4].error == "QueueFullError: 1 ops are queued; no more are taken"


def test_closing_ends_threads_device_and_pool_and_keeps_the_completions(make_data_plane: MakeDataPlane) -> None:
    device = FakeDevice()
    plane = make_data_plane(device=device)
    plane.pool.start()
    plane.submit(plan(1, "store", (0,), (0,)))
    device.ticket(1)
    plane.close(0)
    plane.close(0)
    assert device.closed
    assert plane.pool.status().state == "closed"
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("kvstow")] == []
    assert [(c.op_id, c.mark) for c in plane.take_completions()] == [(1, "failed")]
    assert plane.report().state == "stopped"


def test_the_pool_outlives_a_copy_that_hangs(
    make_data_plane: MakeDataPlane, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvstow.copythread._STUCK_GRACE", 0.01)
    device, hanging, go_on = FakeDevice(), threading.Event(), threading.Event()

    def hang(*_: object) -> None:
        hanging.set()
        go_on.wait(60)

    monkeypatch.setattr(device, "launch_store", hang)
    plane = make_data_plane(device=device)
    plane.submit(plan(1, "store", (0,), (0,)))
    assert hanging.wait(60)
    with caplog.at_level(logging.ERROR):
        plane.close(0)
    assert plane.pool.status().state != "closed"
    assert not device.closed
    assert "a copy hangs in the device; its pool is not freed" in caplog.text
    go_on.set()
    monkeypatch.undo()
    plane.close(0)
    assert plane.pool.status().state == "closed"
