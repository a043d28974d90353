"""Loads by layer through the copy engine, and which of the two ways is taken, on a device with two rates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.doubles.fakes import FakeClock

from kvstow.devices.base import TicketState
from kvstow.devices.cuda import DriverError
from kvstow.devices.cuda.layergroups import group_ends, may_use_engine, slot_ends
from kvstow.devices.cuda.layerways import WayRates
from kvstow.layout import KVLayout, Region, Span
from kvstow.messages import LayerFigures

MakeRank = Callable[..., Any]
KIB, MIB = 1 << 10, 1 << 20

_PAGE = 128 * KIB
_PAGES = [_PAGE] * 8
_BLOCKS = [9, 4, 7, 6, 5]
_SLOTS = [3, 0, 4, 1, 2]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock = FakeClock()
    monkeypatch.setattr("kvstow.devices.cuda.layerloader.WayRates", lambda: WayRates(clock))
    return clock


@pytest.fixture
def make_rank(cuda: Any, make_cuda_rank: MakeRank, monkeypatch: pytest.MonkeyPatch) -> MakeRank:
    """Groups have two layers, and a staging buffer one slot. The slots have what the first blocks had."""
    monkeypatch.setattr("kvstow.devices.cuda.layergroups._STAGING", 1)
    monkeypatch.setattr("kvstow.devices.cuda.layertrial._SLOTS", 4)

    def make(fetch: float, copy: float) -> Any:
        cuda.speeds = {"fetch": fetch, "copy": copy}
        rank = make_cuda_rank(_PAGES, blocks=10, slots=10, layers=True)
        ticket = rank.store(range(5), range(5))
        while ticket.poll() is not TicketState.DONE:
            cuda.run()
        rank.expected = [rank.block(slot) for slot in _SLOTS]
        rank.scramble()
        return rank

    return make


@pytest.fixture
def slow(make_rank: MakeRank, clock: FakeClock) -> Any:
    """Its kernel reads at half the rate of the copy engine."""
    return make_rank(20e9, 40e9)


def _names(cuda: Any) -> list[str]:
    return [name for stream in cuda.streams for name in stream.names]


def _load(cuda: Any, rank: Any) -> list[str]:
    """Load, and return what was queued for it."""
    before = _names(cuda)
    load = rank.device.load_layers(_BLOCKS, _SLOTS, None)
    queued = _names(cuda)[len(before) :]
    cuda.run()
    rank.device.advance()
    assert load.ticket.poll() is TicketState.DONE
    assert [rank.block(block) for block in _BLOCKS] == rank.expected
    rank.scramble()
    return queued


@pytest.mark.parametrize(
    ("fetch", "copy", "way"),
    [(20e9, 40e9, "engine"), (27e9, 45.7e9, "engine"), (49e9, 54e9, "kernel"), (55e9, 30e9, "kernel")],
)
def test_the_kernel_reads_unless_it_is_slow(
    fetch: float, copy: float, way: str, cuda: Any, make_rank: MakeRank, clock: FakeClock
) -> None:
    """From the first load on. At 49 of 54 GB/s it was the better way on a GPU, as new tokens had to be computed."""
    rank = make_rank(fetch, copy)
    queued = _load(cuda, rank)
    assert ("scatter" in queued) == (way == "engine")
    found = rank.device.layer_figures
    assert found.layer_way == way
    assert found.layer_kernel_bytes_per_second == pytest.approx(fetch)
    assert found.layer_engine_bytes_per_second == pytest.approx(copy)


def test_each_layer_waits_for_its_group_and_for_none_behind_it(
    cuda: Any, slow: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, compute = cuda.cuStreamCreateWithPriority(0, 0)
    monkeypatch.setattr("torch._C._cuda_getCurrentRawStream", lambda ordinal: compute, raising=False)
    load = slow.device.load_layers(_BLOCKS, _SLOTS, None)
    assert load.launches == [0, 0, 1, 1, 2, 2, 3, 3]
    load.wait(2)
    seen = []

    def read() -> bool:
        seen.append([slow.tensors[part][block].numpy().tobytes() for part in (0, 1, 2) for block in _BLOCKS])
        return True

    compute.work.append(("layer", read, []))
    kernels = next(stream for stream in cuda.streams if "scatter" in stream.names)
    while compute.work:
        assert any(stream.step() for stream in (compute, kernels, *cuda.streams))
        if seen:
            assert kernels.names.count("scatter") >= 2 * 2, "groups behind it are not awaited"
    assert seen == [[each[part * _PAGE : (part + 1) * _PAGE] for part in (0, 1, 2) for each in slow.expected]]
    cuda.run()


def test_never_more_copies_can_run_than_there_are_buffers(cuda: Any, slow: Any) -> None:
    """While no kernel runs, so that no buffer is freed: what the step copies itself waits for no more."""
    slow.device.load_layers(_BLOCKS, _SLOTS, None)
    links = [stream for stream in cuda.streams if "copy" in stream.names and "scatter" not in stream.names]
    before = sum(stream.names.count("copy") for stream in links)
    cuda.run(*links)
    left = sum(stream.names.count("copy") for stream in links)
    assert before - left == 4 + 1, "a buffer has four blocks of a group; the second one gets the last block"
    cuda.run()


def test_a_buffer_is_not_filled_again_before_it_is_empty(cuda: Any, slow: Any) -> None:
    """The kernels run last of all, as long as anything else can."""
    load = slow.device.load_layers(_BLOCKS, _SLOTS, None)
    kernels = next(stream for stream in cuda.streams if "scatter" in stream.names)
    others = [stream for stream in cuda.streams if stream is not kernels]
    while kernels.work:
        cuda.run(*others)
        assert kernels.step()
    slow.device.advance()
    assert load.ticket.poll() is TicketState.DONE
    assert [slow.block(block) for block in _BLOCKS] == slow.expected


def test_nothing_is_written_before_the_fence(cuda: Any, slow: Any, new_fence: Callable[[], Any]) -> None:
    fence, older = new_fence()
    before = [slow.block(block) for block in _BLOCKS]
    slow.device.load_layers(_BLOCKS, _SLOTS, fence)
    cuda.run(*(stream for stream in cuda.streams if stream is not older))
    assert [slow.block(block) for block in _BLOCKS] == before
    cuda.run()
    assert [slow.block(block) for block in _BLOCKS] == slow.expected


@pytest.mark.parametrize("call", ["cuLaunchKernel", "cuEventRecord", "cuMemcpyBatchAsync", "cuStreamWaitEvent"])
@pytest.mark.parametrize("number", range(4))
def test_a_load_that_fails_has_left_the_device(call: str, number: int, cuda: Any, slow: Any) -> None:
    cuda.failures[call] = (cuda.calls.get(call, 0) + number, 1)
    with pytest.raises(DriverError):
        slow.device.load_layers(_BLOCKS, _SLOTS, None)
    assert not any(stream.work for stream in cuda.streams)
    assert "scatter" in _load(cuda, slow)


def test_both_ways_are_tried_again_every_minute(cuda: Any, slow: Any, clock: FakeClock) -> None:
    cuda.speeds["fetch"] = 60e9
    clock.advance(59.0)
    assert "fetch" not in _load(cuda, slow)
    clock.advance(1.0)
    assert "fetch" in _load(cuda, slow)
    assert slow.device.layer_figures.layer_way == "kernel"
    clock.advance(59.0)
    assert "scatter" not in _load(cuda, slow)
    assert slow.device.layer_figures.layer_kernel_bytes_per_second == pytest.approx(60e9)


def test_a_trial_has_ended_before_the_load_gives_its_slots_back(cuda: Any, slow: Any, clock: FakeClock) -> None:
    clock.advance(60.0)
    load = slow.device.load_layers(_BLOCKS, _SLOTS, None)
    stream = next(stream for stream in cuda.streams if "fetch" in stream.names)
    while "fetch" in stream.names or "copy" in stream.names:
        slow.device.advance()
        assert load.ticket.poll() is TicketState.PENDING
        assert any(each.step() for each in cuda.streams)
    cuda.run()
    slow.device.advance()
    assert load.ticket.poll() is TicketState.DONE


@pytest.mark.parametrize(
    ("kernel", "engine", "before", "after"),
    [
        (40, 50, "kernel", "kernel"),
        (39, 50, "kernel", "engine"),
        (43, 50, "engine", "engine"),
        (45, 50, "engine", "kernel"),
    ],
)
def test_rates_near_the_limit_do_not_change_the_way(kernel: float, engine: float, before: str, after: str) -> None:
    ways = WayRates(FakeClock())
    ways.tried(1, 2 if before == "engine" else 1)
    assert ways.way == before
    ways.tried(kernel, engine)
    assert ways.way == after


@pytest.mark.parametrize(("blocks", "layers"), [(32, 4), (128, 4), (1000, 8), (2048, 16), (4096, 32), (100_000, 32)])
def test_a_load_has_about_four_thousand_copies(blocks: int, layers: int) -> None:
    """8B: pages of 64 KiB, 32 layers."""
    groups = group_ends([64 * KIB * number for number in range(1, 33)], blocks)
    assert groups[0] == layers
    assert len(groups) * min(blocks, 4096) <= 4096
    assert groups[-1] == 32


def test_no_group_is_smaller_than_the_others() -> None:
    assert group_ends([64 * KIB * number for number in range(1, 11)], 1) == [4, 10]


@pytest.mark.parametrize(
    ("parts", "ends"),
    [
        ([(Span(0, 0, 4), Span(1, 0, 6)), (Span(2, 0, 8),)], [10, 18]),
        ([(Span(0, 0, 4), Span(2, 0, 8)), (Span(1, 0, 6),)], None),
        ([(Span(2, 0, 8),), (Span(0, 0, 4), Span(1, 0, 6))], None),
    ],
)
def test_layers_must_lie_together_in_a_slot(parts: Any, ends: list[int] | None) -> None:
    layout = KVLayout(tuple(Region(str(size), 4, size, size) for size in (4, 6, 8)))
    assert slot_ends(layout, parts) == ends


def test_a_slot_of_one_group_leaves_the_kernel_alone(make_cuda_rank: MakeRank) -> None:
    layout = KVLayout(tuple(Region(str(number), 4, 64 * KIB, 64 * KIB) for number in range(7)))
    assert not may_use_engine(layout, layout.parts)
    rank = make_cuda_rank([4096] * 8, layers=True)
    assert rank.device.layer_figures == LayerFigures(layer_way="kernel")


def test_closing_waits_for_all_streams_before_it_destroys_them(cuda: Any, slow: Any) -> None:
    """The real driver ends a process that waits for a stream that is gone."""
    load = slow.device.load_layers(_BLOCKS, _SLOTS, None)
    slow.device.close()
    assert load.ticket.poll() is TicketState.DONE
    assert cuda.offences == []
    assert [slow.block(block) for block in _BLOCKS] == slow.expected
