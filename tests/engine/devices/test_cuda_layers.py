"""Loads by layer, on a device that runs when the test says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvstow.devices.base import TicketState
from kvstow.devices.cuda import DriverError
from kvstow.errors import ConfigError, CopyError
from kvstow.layout import KVLayout, Part, Region, Span

MakeRank = Callable[..., Any]

PENDING, DONE, FAILED = TicketState.PENDING, TicketState.DONE, TicketState.FAILED

_PAGES = [4096, 1000, 9000, 5]
CURRENT_STREAM = "torch._C._cuda_getCurrentRawStream"
"""What says which stream a thread computes on. PyTorch has it with CUDA alone."""


@pytest.fixture
def rank(cuda: Any, make_cuda_rank: MakeRank) -> Any:
    """Its slots 0 to 3 have what its blocks 0 to 3 had, which have other bytes now."""
    rank = make_cuda_rank(_PAGES, layers=True)
    ticket = rank.store(range(4), range(4))
    while ticket.poll() is not DONE:
        cuda.run()
    rank.expected = [rank.block(block) for block in range(4)]
    rank.scramble()
    return rank


@pytest.fixture
def compute(cuda: Any, rank: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The stream that computes."""
    _, stream = cuda.cuStreamCreateWithPriority(0, 0)
    monkeypatch.setattr(CURRENT_STREAM, lambda ordinal: stream, raising=False)
    return stream


@pytest.fixture
def one_part_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstow.devices.cuda.layerloader._LAUNCH_BYTES", 1)


def _reader(rank: Any, part: int, blocks: list[int], seen: dict[int, list[bytes]]) -> Callable[[], bool]:
    """What a layer does: it reads its part of these blocks."""

    def read() -> bool:
        seen[part] = [bytes(rank.tensors[part][block].tolist()) for block in blocks]
        return True

    return read


def _parts_of(rank: Any, part: int) -> list[bytes]:
    start = sum(_PAGES[:part])
    return [block[start : start + _PAGES[part]] for block in rank.expected]


@pytest.mark.usefixtures("one_part_a_launch")
@pytest.mark.parametrize("waits", [True, False], ids=["waits", "control"])
def test_each_layer_reads_its_own_bytes_if_it_waits_for_them(waits: bool, cuda: Any, rank: Any, compute: Any) -> None:
    blocks, seen = [5, 4, 7, 6], dict[int, list[bytes]]()
    load = rank.device.load_layers(blocks, range(4), None)
    for part in range(len(_PAGES)):
        if waits:
            load.wait(part)
        compute.work.append(("layer", _reader(rank, part, blocks, seen), []))
    cuda.run(compute)
    assert bool(seen) is not waits
    cuda.run()
    right = [seen[part] == _parts_of(rank, part) for part in seen]
    assert len(right) == len(_PAGES)
    assert all(right) if waits else not any(right)
    assert [rank.block(block) for block in blocks] == rank.expected


@pytest.mark.usefixtures("one_part_a_launch")
def test_a_layer_waits_for_its_own_part_and_for_none_behind_it(cuda: Any, rank: Any, compute: Any) -> None:
    seen = dict[int, list[bytes]]()
    load = rank.device.load_layers([4, 5, 6, 7], range(4), None)
    load.wait(1)
    compute.work.append(("layer", _reader(rank, 1, [4, 5, 6, 7], seen), []))
    stream = next(stream for stream in cuda.streams if "fetch" in stream.names)
    for left, expected in ((3, {}), (2, {1: _parts_of(rank, 1)})):
        while stream.names.count("fetch") > left:
            assert stream.step()
        while stream.work[0][0] == "record":
            stream.step()
        cuda.run(compute)
        assert seen == expected
    cuda.run()


@pytest.mark.usefixtures("one_part_a_launch")
def test_each_of_two_streams_waits_for_a_layer(
    cuda: Any, rank: Any, compute: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of two micro-batches, whose threads launch the same layers: what one has waited for says nothing of the
    other."""
    _, other = cuda.cuStreamCreateWithPriority(0, 0)
    blocks, first, second = [4, 5, 6, 7], dict[int, list[bytes]](), dict[int, list[bytes]]()
    load = rank.device.load_layers(blocks, range(4), None)
    for stream, seen in ((compute, first), (other, second)):
        monkeypatch.setattr(CURRENT_STREAM, lambda ordinal, stream=stream: stream, raising=False)
        load.wait(2)
        stream.work.append(("layer", _reader(rank, 2, blocks, seen), []))
    cuda.run(compute, other)
    assert (first, second) == ({}, {})
    cuda.run()
    assert first == second == {2: _parts_of(rank, 2)}


@pytest.mark.usefixtures("one_part_a_launch")
def test_a_stream_waits_for_a_launch_once(cuda: Any, rank: Any, compute: Any) -> None:
    """Launches end in their order, and each wait costs the host as much as a layer's launch."""
    load = rank.device.load_layers([4, 5, 6, 7], range(4), None)
    for part in (2, 1, 2, 0):
        load.wait(part)
    assert len(compute.work) == 1
    load.wait(3)
    assert len(compute.work) == 2


def test_a_load_has_launches_as_the_root_of_its_bytes(cuda: Any, make_cuda_rank: MakeRank) -> None:
    """A block has the bytes of one launch here, in four layers."""
    rank = make_cuda_rank([640 << 10] * 4, blocks=25, slots=25, layers=True)
    for blocks, launches in ((1, [0] * 4), (4, [0, 0, 1, 1]), (16, [0, 1, 2, 3]), (25, [0, 1, 2, 3])):
        load = rank.device.load_layers(range(blocks), range(blocks), None)
        assert load.launches == launches
        assert [name for stream in cuda.streams for name in stream.names].count("fetch") == launches[-1] + 1
        cuda.run()
        rank.device.advance()


def test_blocks_are_written_after_the_work_before_the_fence(cuda: Any, rank: Any, new_fence: Callable[[], Any]) -> None:
    fence, older = new_fence()
    before = [rank.block(block) for block in range(4)]
    rank.device.load_layers(range(4), range(4), fence)
    cuda.run(*(stream for stream in cuda.streams if stream is not older))
    assert [rank.block(block) for block in range(4)] == before
    cuda.run()
    assert [rank.block(block) for block in range(4)] == rank.expected


def test_the_load_ends_once_the_last_layer_is_there(cuda: Any, rank: Any) -> None:
    load = rank.device.load_layers(range(4), range(4), None)
    rank.device.advance()
    assert load.ticket.poll() is PENDING
    cuda.run()
    assert load.ticket.poll() is PENDING
    rank.device.advance()
    assert load.ticket.poll() is DONE
    assert load.ticket.seconds > 0


def test_places_of_a_load_under_way_are_not_overwritten(cuda: Any, rank: Any) -> None:
    for number in range(4):
        rank.device.load_layers([number], [3 - number], None)
    with pytest.raises(CopyError, match="4 loads by layer are under way"):
        rank.device.load_layers([7], [0], None)
    cuda.run()
    assert [rank.block(block) for block in range(4)] == rank.expected[::-1]
    rank.device.advance()
    rank.device.load_layers([7], [0], None)
    cuda.run()
    assert rank.block(7) == rank.expected[0]


@pytest.mark.parametrize(
    ("blocks", "slots", "what"),
    [([0], [8], "slots 8 to 8"), ([8], [0], "blocks 8 to 8"), ([0, 1], [0], "2 blocks and 1 slots")],
)
def test_what_cannot_be_loaded_is_refused_before_anything_begins(
    blocks: list[int], slots: list[int], what: str, cuda: Any, rank: Any
) -> None:
    with pytest.raises(CopyError, match=what):
        rank.device.load_layers(blocks, slots, None)
    assert not any(stream.work for stream in cuda.streams)


@pytest.mark.usefixtures("one_part_a_launch")
@pytest.mark.parametrize("call", ["cuLaunchKernel", "cuEventRecord", "cuMemcpyAsync", "cuEventCreate"])
@pytest.mark.parametrize("number", range(4))
def test_a_load_that_fails_has_left_the_device(call: str, number: int, cuda: Any, rank: Any, compute: Any) -> None:
    """Otherwise it would write its blocks beside what comes instead."""
    cuda.failures[call] = (cuda.calls.get(call, 0) + number, 1)
    outcomes = []
    for _ in range(6):
        try:
            load = rank.device.load_layers(range(4), range(4), None)
        except DriverError:
            assert not any(stream.work for stream in cuda.streams)
            outcomes.append(False)
        else:
            load.wait(len(_PAGES) - 1)
            cuda.run()
            outcomes.append([rank.block(block) for block in range(4)] == rank.expected)
        rank.device.advance()
        rank.scramble()
    assert outcomes.count(False) <= 1
    assert outcomes.count(False) == 1 or number


def test_closing_waits_for_a_load(cuda: Any, rank: Any) -> None:
    load = rank.device.load_layers(range(4), range(4), None)
    rank.device.close()
    assert load.ticket.poll() is DONE
    assert not cuda.offences
    assert [rank.block(block) for block in range(4)] == rank.expected


def test_a_blocking_copy_has_ended_when_it_returns(rank: Any) -> None:
    rank.device.load_now([4, 6], [0, 2], None)
    assert [rank.block(4), rank.block(6)] == [rank.expected[0], rank.expected[2]]


def test_parts_may_divide_a_region(cuda: Any, rank: Any) -> None:
    parts: list[Part] = [(Span(0, 0, 96), Span(1, 0, 1000)), (Span(0, 96, 4000),), (Span(3, 0, 5), Span(2, 0, 9000))]
    rank.device.close()
    rank.parts = parts
    rank.device = rank.new_device()
    rank.device.load_layers(range(4), range(4), None)
    cuda.run()
    assert [rank.block(block) for block in range(4)] == rank.expected
    rank.device.close()


@pytest.mark.parametrize(
    "parts",
    [[(Span(0, 0, 9),)], [(Span(0, 0, 10), Span(0, 0, 10))], [(Span(1, 0, 10),)], [(Span(0, 1, 9), Span(0, 0, 2))]],
    ids=["short", "twice", "elsewhere", "overlapping"],
)
def test_parts_must_cover_each_byte_once(parts: list[Part]) -> None:
    layout = KVLayout((Region("0", 4, 10, 10),))
    layout.require_parts([(Span(0, 4, 6),), (Span(0, 0, 4),)])
    with pytest.raises(ConfigError):
        layout.require_parts(parts)


def test_without_parts_the_device_has_no_memory_for_loads_by_layer(cuda: Any, make_cuda_rank: MakeRank) -> None:
    make_cuda_rank(_PAGES)
    without = list(cuda.live.values()).count("memory")
    make_cuda_rank(_PAGES, layers=True)
    assert list(cuda.live.values()).count("memory") > 2 * without
