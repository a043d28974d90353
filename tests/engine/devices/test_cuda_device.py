"""The CUDA device over a fake CUDA in host memory (conftest): what is queued when, and its results."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.doubles.fakes import Latch
from tests.waiting import eventually

from kvstow.config import PoolConfig
from kvstow.devices.base import TicketState
from kvstow.devices.cuda import CudaDevice, CudaOptions, DriverError
from kvstow.devices.cuda.context import primary_context
from kvstow.devices.cuda.device import CANDIDATES, NEVER, choose_threshold
from kvstow.devices.cuda.plan import Split
from kvstow.errors import ConfigError, CopyError
from kvstow.layout import KVLayout, Region
from kvstow.memfd import create_memfd
from kvstow.memory.hostpool import HostPool
from kvstow.memory.mappedpool import MappedPool
from kvstow.memory.pinning import FixedPace

MakeRank = Callable[..., Any]
NewFence = Callable[[], Any]

PENDING, SOURCE_FREE, DONE, FAILED = TicketState

_MIXED = {"strategy": "auto", "threshold_bytes": 2048}
strategies = pytest.mark.parametrize("options", [{}, {"strategy": "direct"}, _MIXED], ids=["staged", "direct", "mixed"])
directions = pytest.mark.parametrize("direction", ["store", "load"])


def _finish(cuda: Any, ticket: Any) -> TicketState:
    """Run and poll until the end."""
    for _ in range(100):
        cuda.run()
        state: TicketState = ticket.poll()
        if state in (DONE, FAILED):
            return state
    raise AssertionError("the copy does not end")


def _queued(cuda: Any) -> list[str]:
    """The kernels and copies that are queued and have not run."""
    return sorted(name for stream in cuda.streams for name in stream.names)


@strategies
@pytest.mark.parametrize("staging_bytes", [1, 12_000, 1 << 20])
def test_stored_blocks_can_be_loaded_elsewhere(
    options: Any, staging_bytes: int, cuda: Any, make_cuda_rank: MakeRank
) -> None:
    rank = make_cuda_rank([4096, 1000, 3000, 5], staging_bytes=staging_bytes, **options)
    sources, slots, targets = [3, 1, 7, 0, 5], [2, 6, 4, 5, 3], [0, 2, 4, 6, 7]
    expected = [rank.block(block) for block in sources]
    assert _finish(cuda, rank.store(sources, slots)) is DONE
    assert [rank.slot(slot) for slot in slots] == expected
    rank.scramble()
    untouched = rank.block(1)
    assert _finish(cuda, rank.load(slots, targets)) is DONE
    assert [rank.block(block) for block in targets] == expected
    assert rank.block(1) == untouched


@strategies
def test_a_store_waits_on_the_device_for_the_work_before_its_fence(
    options: Any, cuda: Any, make_cuda_rank: MakeRank, new_fence: NewFence
) -> None:
    rank = make_cuda_rank(**options)
    fence, compute = new_fence()
    ticket = rank.store([0, 1], [0, 1], fence)
    assert _queued(cuda)
    cuda.run(*(stream for stream in cuda.streams if stream is not compute))
    assert ticket.poll() is PENDING
    rank.scramble()
    expected = rank.block(1)
    assert _finish(cuda, ticket) is DONE
    assert rank.slot(1) == expected


@strategies
def test_a_load_copies_at_once_but_writes_its_blocks_after_its_fence(
    options: Any, cuda: Any, make_cuda_rank: MakeRank, new_fence: NewFence
) -> None:
    rank = make_cuda_rank(**options)
    expected = rank.block(0)
    assert _finish(cuda, rank.store([0], [0])) is DONE
    fence, compute = new_fence()
    ticket = rank.load([0], [1], fence)
    cuda.run(*(stream for stream in cuda.streams if stream is not compute))
    assert ("copy" in _queued(cuda)) == (options != {})  # what is staged was fetched, what is direct was not
    assert ticket.poll() is PENDING
    rank.scramble()
    assert _finish(cuda, ticket) is DONE
    assert rank.block(1) == expected


def test_the_device_is_named_after_its_gpu(make_cuda_rank: MakeRank) -> None:
    assert make_cuda_rank().device.name == "cuda:0"


@directions
@strategies
def test_a_fence_that_the_device_does_not_know_is_polled(
    options: Any, direction: str, cuda: Any, make_cuda_rank: MakeRank
) -> None:
    rank, fence = make_cuda_rank(**options), Latch()
    ticket = getattr(rank, direction)([0, 1], [0, 1], fence)
    cuda.run()
    assert ticket.poll() is PENDING
    assert not {"gather", "scatter"} & set(_queued(cuda))
    fence.open()
    assert ticket.poll() is PENDING
    assert _queued(cuda)
    assert _finish(cuda, ticket) is DONE


@directions
def test_a_fence_that_raises_fails_its_op_alone(direction: str, cuda: Any, make_cuda_rank: MakeRank) -> None:
    class Broken:
        def query(self) -> bool:
            raise ZeroDivisionError("no such step")

    rank = make_cuda_rank()
    ticket = getattr(rank, direction)([0], [0], Broken())
    assert _finish(cuda, ticket) is FAILED
    assert isinstance(ticket.error, ZeroDivisionError)
    assert _finish(cuda, getattr(rank, direction)([0], [0])) is DONE


@directions
def test_only_kernels_have_high_priority(direction: str, cuda: Any, make_cuda_rank: MakeRank) -> None:
    """Copies have the priority that the host's streams have by default."""
    rank = make_cuda_rank([4096])
    assert _finish(cuda, rank.store([0], [0])) is DONE
    seen = set()
    ticket = getattr(rank, direction)([0], [0])
    while ticket.poll() is PENDING:
        seen |= {(name, stream.priority) for stream in cuda.streams for name in stream.names}
        any(stream.step() for stream in cuda.streams)
    assert seen == {("gather" if direction == "store" else "scatter", -5), ("copy", 0)}


@directions
def test_copies_run_one_after_another_on_separate_streams(direction: str, cuda: Any, make_cuda_rank: MakeRank) -> None:
    """A copy engine leaves a stream for the host's only when it has no more work."""
    rank = make_cuda_rank([4096], staging_bytes=1)
    ticket = getattr(rank, direction)(range(2), range(2))
    first, second = (stream for stream in cuda.streams if "copy" in stream.names)
    cuda.run(*(stream for stream in cuda.streams if stream is not first))
    assert "copy" in second.names, "it has not waited for the first"
    cuda.run(first)
    cuda.run(second)
    assert "copy" not in second.names
    assert _finish(cuda, ticket) is DONE


@directions
@strategies
@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_no_more_batches_are_queued_than_configured(
    ahead: int, options: Any, direction: str, cuda: Any, make_cuda_rank: MakeRank
) -> None:
    """Stores: one per buffer, since the copy of a sampled token waits for all queued batches."""
    rank = make_cuda_rank([4096], staging_bytes=1, loads_ahead=ahead, **options)
    op, most = getattr(rank, direction), ahead if direction == "load" else 2
    tickets = [op(range(4), range(4)), op(range(4, 8), range(4, 8))]
    for left in range(8, 0, -most):
        for ticket in tickets:
            ticket.poll()
        assert _queued(cuda).count("copy") == min(most, left)
        cuda.run()
    assert [ticket.poll() for ticket in tickets] == [DONE, DONE]


def test_one_advance_adds_no_more_loads_than_allowed_to_those_under_way(cuda: Any, make_cuda_rank: MakeRank) -> None:
    """Finished batches are replaced in addition, so that the queue never gets shorter."""
    rank = make_cuda_rank([4096], blocks=40, slots=40, staging_bytes=1, loads_per_advance=3)
    ticket: Any = rank.device.launch_load(1, range(40), range(40), None)
    begun = []
    for _ in range(3):
        rank.device.advance()
        begun.append(ticket.begun)
    assert begun == [3, 6, 9]
    cuda.run()
    rank.device.advance()
    assert (ticket.finished, ticket.begun) == (9, 9 + 9 + 3)
    assert _finish(cuda, rank.load([0], [0])) is DONE
    assert ticket.poll() is DONE


def test_a_device_starts_loads_before_stores(
    cuda: Any, make_cuda_rank: MakeRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, launched = make_cuda_rank(), list[str]()
    driver = primary_context(0).driver
    launch = driver.launch

    def noted(name: str, *rest: Any) -> None:
        launched.append(name)
        launch(name, *rest)

    monkeypatch.setattr(driver, "launch", noted)
    rank.device.launch_store(1, [0], [0], None)
    rank.device.launch_load(2, [1], [1], None)
    rank.device.advance()
    assert launched == ["scatter", "gather"]


@directions
@pytest.mark.parametrize("step", ["staged_copies", "direct_copies"])
def test_an_op_that_cannot_be_planned_does_not_begin_and_delays_no_other(
    step: str, direction: str, cuda: Any, make_cuda_rank: MakeRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    rank = make_cuda_rank(**_MIXED)
    with monkeypatch.context() as patch:
        patch.setattr(Split, step, fail)
        with pytest.raises(MemoryError):
            getattr(rank, direction)([0], [0])
    assert _queued(cuda) == []
    assert _finish(cuda, getattr(rank, direction)([0], [0])) is DONE


def test_a_staging_buffer_is_reused_when_its_batch_has_finished(cuda: Any, make_cuda_rank: MakeRank) -> None:
    rank = make_cuda_rank([4096], staging_bytes=1)
    expected = [rank.block(block) for block in range(6)]
    assert _finish(cuda, rank.store(range(6), range(6))) is DONE
    rank.scramble()
    ticket = rank.load(range(6), range(6))
    cuda.run(*(stream for stream in cuda.streams if "scatter" not in stream.names))
    assert _queued(cuda).count("copy") == 4, "two are in the buffers"
    assert _finish(cuda, ticket) is DONE
    assert [rank.block(block) for block in range(6)] == expected


def test_a_staging_buffer_whose_batch_waits_for_the_host_is_left_alone(cuda: Any, make_cuda_rank: MakeRank) -> None:
    rank, fence = make_cuda_rank([4096], staging_bytes=1), Latch()
    expected = [rank.block(block) for block in range(6)]
    assert _finish(cuda, rank.store(range(6), range(6))) is DONE
    rank.scramble()
    ticket = rank.load(range(6), range(6), fence)
    assert _queued(cuda) == ["copy", "copy"]
    cuda.run()
    assert ticket.poll() is PENDING
    assert _queued(cuda) == []
    fence.open()
    assert _finish(cuda, ticket) is DONE
    assert [rank.block(block) for block in range(6)] == expected


def test_the_source_is_free_only_after_the_gather(cuda: Any, make_cuda_rank: MakeRank) -> None:
    rank = make_cuda_rank([4096], staging_bytes=1)
    ticket = rank.store(range(3), range(3))
    gathering, link = next((a, b) for a, b in zip(cuda.streams, cuda.streams[1:], strict=False) if "gather" in a.names)
    cuda.run(gathering)
    assert ticket.poll() is PENDING  # the third block is not gathered
    cuda.run()
    assert ticket.poll() is PENDING
    cuda.run(gathering)
    assert "copy" in link.names
    assert ticket.poll() is SOURCE_FREE
    cuda.run()
    assert ticket.poll() is DONE


@pytest.mark.parametrize("options", [{"strategy": "direct"}, _MIXED], ids=["direct", "mixed"])
def test_the_source_of_direct_copies_is_free_when_they_are_done(
    options: Any, cuda: Any, make_cuda_rank: MakeRank
) -> None:
    rank = make_cuda_rank(**options)
    ticket = rank.store([0], [0])
    for _ in range(100):
        state = ticket.poll()
        assert state in (PENDING, DONE)
        if state is DONE:
            return
        any(stream.step() for stream in cuda.streams)
    raise AssertionError("the copy does not end")


def test_the_time_is_the_devices_and_covers_copies_only(cuda: Any, make_cuda_rank: MakeRank) -> None:
    rank = make_cuda_rank([4096], staging_bytes=1)
    ticket = rank.store(range(3), range(3))
    assert _finish(cuda, ticket) is DONE
    assert ticket.seconds == pytest.approx(3 * 0.002)


@directions
@strategies
@pytest.mark.parametrize("number", [0, 2])
def test_a_refused_copy_fails_its_op_after_the_rest_has_finished(
    number: int, options: Any, direction: str, cuda: Any, make_cuda_rank: MakeRank
) -> None:
    rank = make_cuda_rank([4096], staging_bytes=1, **options)
    call = "cuMemcpyAsync"
    cuda.failures[call] = (cuda.calls.get(call, 0) + number, 1)
    ticket = getattr(rank, direction)(range(8), range(8))
    while (state := ticket.poll()) is PENDING:
        assert any(stream.work for stream in cuda.streams)
        any(stream.step() for stream in cuda.streams)
    assert state is FAILED
    assert isinstance(ticket.error, DriverError)
    assert _queued(cuda) == []
    assert _finish(cuda, getattr(rank, direction)(range(8), range(8))) is DONE


@pytest.mark.parametrize("call", ["cuLaunchKernel", "cuEventRecord", "cuStreamWaitEvent", "cuEventElapsedTime"])
@directions
def test_any_refused_call_fails_one_op(call: str, direction: str, cuda: Any, make_cuda_rank: MakeRank) -> None:
    rank = make_cuda_rank()
    cuda.failures[call] = (cuda.calls.get(call, 0), 1)
    ticket = getattr(rank, direction)([0], [0])
    assert _finish(cuda, ticket) is FAILED
    assert isinstance(ticket.error, DriverError)
    assert _finish(cuda, getattr(rank, direction)([0], [0])) is DONE


def test_a_lost_device_fails_what_was_under_way(cuda: Any, make_cuda_rank: MakeRank) -> None:
    rank = make_cuda_rank()
    ticket = rank.store([0], [0])
    cuda.refused = {"cuEventQuery": 700}
    assert _finish(cuda, ticket) is FAILED
    assert ticket.error.status == 700


def test_an_error_of_other_work_that_a_query_reports_ends_no_copy(cuda: Any, make_cuda_rank: MakeRank) -> None:
    rank = make_cuda_rank()
    ticket = rank.store([0], [0])
    cuda.failures["cuEventQuery"] = (cuda.calls.get("cuEventQuery", 0), 700)
    assert ticket.poll() is PENDING, "the copy is under way"
    assert _finish(cuda, ticket) is DONE


def test_a_context_that_cannot_be_entered_does_not_fail_the_copies(cuda: Any, make_cuda_rank: MakeRank) -> None:
    rank = make_cuda_rank()
    ticket = rank.store([0], [0])
    cuda.failures["cuCtxPushCurrent"] = (cuda.calls["cuCtxPushCurrent"], 700)
    with pytest.raises(DriverError, match="cuCtxPushCurrent"):
        ticket.poll()
    assert _finish(cuda, ticket) is DONE


def test_bad_slots_and_blocks_are_refused_before_anything_is_queued(cuda: Any, make_cuda_rank: MakeRank) -> None:
    rank = make_cuda_rank()
    cases = (
        ([0], [8], "slots 8 to 8"),
        ([0], [-1], "slots -1"),
        ([8], [0], "blocks 8 to 8"),
        ([0, 1], [0], "2 blocks"),
    )
    for blocks, slots, what in cases:
        with pytest.raises(CopyError, match=what):
            rank.store(blocks, slots)
        with pytest.raises(CopyError, match=what):
            rank.load(slots, blocks)
    assert _queued(cuda) == []
    expected = rank.slot(0)
    assert _finish(cuda, rank.load([0], [1])) is DONE
    assert rank.block(1) == expected


def test_an_op_of_no_blocks_is_done(make_cuda_rank: MakeRank) -> None:
    rank = make_cuda_rank()
    assert rank.store([], []).poll() is DONE
    assert rank.load([], []).poll() is DONE


def test_closing_waits_for_what_is_under_way_and_fails_the_rest(cuda: Any, make_cuda_rank: MakeRank) -> None:
    rank = make_cuda_rank([4096], staging_bytes=1)
    short, long = rank.store([0, 1], [0, 1]), rank.store(range(2, 8), range(2, 8))
    never_begun = rank.device.launch_load(1, [0], [0], None)
    expected = rank.block(1)
    rank.device.close()
    rank.device.close()
    assert [ticket.poll() for ticket in (short, long, never_begun)] == [DONE, FAILED, FAILED]
    assert rank.slot(1) == expected
    assert "closed" in str(long.error)
    for launch in (rank.device.launch_store, rank.device.launch_load):
        with pytest.raises(CopyError, match="closed"):
            launch(1, [0], [0], None)


def test_closing_frees_everything_that_the_device_held(cuda: Any, make_cuda_rank: MakeRank) -> None:
    rank = make_cuda_rank(**_MIXED)
    assert {"stream", "event", "memory", "module"} <= set(cuda.live.values())
    rank.device.close()
    rank.pool.close()
    assert cuda.live == {}


def test_copies_of_two_chunks_are_never_merged(cuda: Any, make_cuda_rank: MakeRank) -> None:
    """The driver refuses a copy that spans two registrations. Chunks have 16 KiB here."""
    rank = make_cuda_rank([4096], slots=8)
    assert len(rank.registrar.starts()) == 2
    ticket = rank.store(range(8), range(8))
    assert _queued(cuda).count("copy") == 2
    assert _finish(cuda, ticket) is DONE


@strategies
def test_copies_reach_the_extents_of_a_node_service(options: Any, cuda: Any, make_cuda_rank: MakeRank) -> None:
    """Neighbouring slots on both sides of the seam of two extents are two copies."""
    rank = make_cuda_rank([4096], gap=0, **options)
    with ExitStack() as undo:
        pool = MappedPool(4096, rank.registrar, pace=partial(FixedPace, 2 << 20, 0.0))
        undo.callback(pool.close)
        for number in range(2):
            fd = create_memfd("extent", 2 << 20)
            os.posix_fallocate(fd, 0, 2 << 20)
            granted: Any = SimpleNamespace(extent_id=number, first_slot=512 * number, num_slots=512)
            granted.num_bytes = granted.populated_bytes = 2 << 20
            pool.grant(4096, [granted], [fd])
        pool.start()
        eventually(lambda: pool.pinned_slots == 1024)
        rank.pool = pool
        device = rank.device = rank.new_device()
        undo.callback(device.close)
        blocks, slots = list(range(8)), list(range(508, 516))
        expected = [rank.block(block) for block in blocks]
        ticket = rank.store(blocks, slots)
        assert _queued(cuda).count("copy") == 2
        assert _finish(cuda, ticket) is DONE
        assert [rank.slot(slot) for slot in slots] == expected
        rank.scramble()
        assert _finish(cuda, rank.load(slots, blocks)) is DONE
        assert [rank.block(block) for block in blocks] == expected


@pytest.mark.parametrize(
    ("ratios", "threshold"),
    [((1, 1, 1, 1), 0), ((0.5, 0.99, 1, 1), 1), ((0.99, 0.5, 1, 1), 2), ((1, 1, 1, 0.9), None)],
)
def test_the_threshold_is_where_all_larger_pages_are_fast_enough(ratios: Any, threshold: int | None) -> None:
    expected = NEVER if threshold is None else CANDIDATES[threshold]
    assert choose_threshold(dict(zip(CANDIDATES, ratios, strict=True))) == expected


@pytest.mark.parametrize(("page", "calibrated"), [(CANDIDATES[0] - 1, False), (CANDIDATES[0], True)])
def test_only_pages_that_could_be_direct_are_calibrated(
    page: int, calibrated: bool, cuda: Any, make_cuda_rank: MakeRank
) -> None:
    rank = make_cuda_rank([page], blocks=2, slots=2, strategy="auto")
    assert ("cuMemHostAlloc" in cuda.calls) == calibrated
    assert _finish(cuda, rank.store([0], [1])) is DONE
    assert rank.slot(1) == rank.block(0)


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "both"},
        {"staging_bytes": 0},
        {"num_buffers": True},
        {"loads_ahead": 0},
        {"loads_per_advance": 0},
        {"threshold_bytes": -1},
    ],
)
def test_bad_options_are_refused(options: Any) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        CudaOptions(**options)


def test_tensors_that_do_not_fit_the_layout_are_refused(make_cuda_rank: MakeRank) -> None:
    rank = make_cuda_rank([4096])

    def make(page: int, tensors: list[Any]) -> None:
        layout = KVLayout((Region("kv", 8, page, page + 24),))
        CudaDevice(rank.pool, layout, tensors, registrar=rank.registrar)

    with pytest.raises(ConfigError, match="slot_bytes"):
        make(4000, [])
    with pytest.raises(ConfigError, match="tensors"):
        make(4096, [])
    with pytest.raises(ConfigError, match="one cuda device"):
        make(4096, [torch.zeros((8, 4096), dtype=torch.uint8)])


def test_a_pool_that_is_not_registered_with_cuda_is_refused(make_cuda_rank: MakeRank) -> None:
    rank = make_cuda_rank([4096])
    rank.pool = pool = HostPool(PoolConfig(4096, 4096, lock=False), rank.registrar)
    with pytest.raises(ConfigError, match="lock is False; allowed: true"):
        rank.new_device()
    pool.close()


def test_a_fence_is_reached_after_the_work_before_it(cuda: Any, new_fence: NewFence) -> None:
    fence, stream = new_fence()
    assert not fence.query()
    cuda.run(stream)
    assert fence.query()


def test_fences_that_live_one_after_the_other_share_an_event(cuda: Any, new_fence: NewFence) -> None:
    for _ in range(10):
        fence, stream = new_fence()
        cuda.run(stream)
        assert fence.query()
        del fence
    assert cuda.calls["cuEventCreate"] == 1
    assert "cuEventDestroy" not in cuda.calls


def test_an_event_is_not_reused_while_its_fence_may_be_queried(cuda: Any, new_fence: NewFence) -> None:
    fence, _ = new_fence()
    another, stream = new_fence()
    cuda.run(stream)
    assert another.query()
    assert not fence.query(), "its own work has not run"


@directions
@strategies
def test_an_event_is_not_reused_while_an_op_has_yet_to_wait_for_it(
    options: Any, direction: str, cuda: Any, make_cuda_rank: MakeRank, new_fence: NewFence
) -> None:
    """The op is behind another in its copier, so the device does not know its fence yet."""
    rank, first = make_cuda_rank(**options), Latch()
    blocker = getattr(rank, direction)([0], [0], first)
    fence, compute = new_fence()
    ticket = getattr(rank, direction)([1], [1], fence)
    del fence
    later = [new_fence() for _ in range(3)]
    first.open()
    for _ in range(20):
        assert ticket.poll() is PENDING, "the work before its fence has not run"
        cuda.run(*(stream for stream in cuda.streams if stream is not compute))
    assert blocker.poll() is DONE
    assert _finish(cuda, ticket) is DONE
    assert all(another.query() for another, _ in later)


def test_a_fence_that_cannot_be_recorded_leaves_its_event_to_the_next(cuda: Any, new_fence: NewFence) -> None:
    cuda.failures["cuEventRecord"] = (0, 1)
    with pytest.raises(DriverError, match="cuEventRecord"):
        new_fence()
    fence, _ = new_fence()
    assert not fence.query()
    assert cuda.calls["cuEventCreate"] == 1


def test_only_a_limited_number_of_idle_events_is_kept(cuda: Any, new_fence: NewFence) -> None:
    fences = [new_fence()[0] for _ in range(300)]
    fences.clear()
    assert list(cuda.live.values()).count("event") == 256
