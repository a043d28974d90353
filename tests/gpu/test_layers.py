"""Loads by layer: bytes, and the order against the computation that reads them and against older work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from kvstow.dataplane import DataPlane
from kvstow.devices.base import TicketState
from kvstow.devices.cuda import CudaDevice, CudaFence, DriverError
from kvstow.devices.cuda.context import primary_context
from kvstow.layeredloads import LayeredLoads
from kvstow.layout import Part, Span
from kvstow.messages import Op, StepPlan

MakeRank = Callable[..., Any]
Finish = Callable[[Any], TicketState]
MakeStored = Callable[..., tuple[Any, Any]]

_new_stream: Any = torch.cuda.Stream  # untyped in torch
_ROUNDS = 150
_PATIENCE = 30.0


def _end(rank: Any, load: Any) -> None:
    deadline = time.monotonic() + _PATIENCE
    while load.ticket.poll() is not TicketState.DONE:
        assert time.monotonic() < deadline
        rank.device.advance()


@pytest.fixture
def make_stored(make_rank: MakeRank, finish: Finish) -> MakeStored:
    """Makes a rank whose first slots have what its first blocks had; returns it with these bytes."""

    def make(pages: Sequence[int] = (8192,) * 4, *, stored: int = 4, **given: Any) -> tuple[Any, Any]:
        rank = make_rank(list(pages), **given)
        rank.tensors[-1].fill_(7)  # the driver loads the kernel now, which it could not beside a latch's
        rank.scramble()
        expected = rank.blocks(range(stored))
        assert finish(rank.store(range(stored), range(stored))) is TicketState.DONE
        return rank, expected

    return make


@pytest.fixture
def a_launch_for_each_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise parts as small as those of a test share one."""
    monkeypatch.setattr("kvstow.devices.cuda.layerloader._LAUNCH_BYTES", 1)


@contextmanager
def _plane_of(rank: Any, latch: Any = None) -> Iterator[tuple[DataPlane, LayeredLoads]]:
    plane = DataPlane(0, rank.pool, rank.device, layers=rank.device)
    try:
        assert plane.layered is not None
        yield plane, plane.layered
    finally:
        if latch is not None:
            latch.open()
        plane.close()


def _wrong_rounds(
    rank: Any,
    latch: Any,
    compute: Callable[[int, Callable[[int], None]], None],
    is_right: Callable[[int], bool],
    *,
    waits: bool,
    stream: Any,
    rounds: int = _ROUNDS,
) -> int:
    """Load beside a computation, again and again, and return how often that went wrong. `compute` calls what it is
    given before it touches a part. A latch holds each load back, so that one that does not wait is always too early."""
    wrong = 0
    for number in range(rounds):
        rank.scramble()
        latch.close()
        load = rank.device.load_layers(range(4), range(4), CudaFence.record(latch.stream))
        with torch.cuda.stream(stream):
            compute(number, load.wait if waits else lambda part: None)
        if not waits:
            stream.synchronize()
        latch.open()
        torch.cuda.synchronize()
        wrong += not is_right(number)
        _end(rank, load)
    return wrong


@pytest.mark.parametrize("seed", range(12))
def test_bytes_arrive_in_random_layouts(seed: int, make_rank: MakeRank, finish: Finish) -> None:
    chance = np.random.default_rng(seed)
    pages = [int(chance.choice([1, 5, 16, 1000, 4096, 4104, 9000, 65536, 70001])) for _ in range(chance.integers(1, 9))]
    gaps = [int(chance.choice([0, 3, 16, 512])) for _ in pages]
    count = int(chance.integers(1, 48))
    rank = make_rank(pages, gaps=gaps, blocks=64, slots=48, chunk_bytes=1 << 20)
    sources, targets = chance.permutation(64)[:count].tolist(), chance.permutation(64)[:count].tolist()
    slots = chance.permutation(48)[:count].tolist()
    expected = rank.blocks(sources)
    assert finish(rank.store(sources, slots)) is TicketState.DONE
    rank.scramble()
    others = [block for block in range(64) if block not in targets]
    untouched, storage = rank.blocks(others), [memory.clone() for memory in rank.storage]
    load = rank.device.load_layers(targets, slots, None)
    for part in range(len(pages)):
        load.wait(part)
        seen = rank.tensors[part][torch.tensor(targets, device="cuda")]  # on the stream that has waited
        start = sum(pages[:part])
        assert np.array_equal(seen.cpu().numpy(), expected[:, start : start + pages[part]])
    _end(rank, load)
    assert load.ticket.seconds > 0
    assert np.array_equal(rank.blocks(targets), expected)
    assert np.array_equal(rank.blocks(others), untouched)
    for before, memory, page in zip(storage, rank.storage, pages, strict=True):
        assert torch.equal(before[:, page:], memory[:, page:])


def test_parts_may_divide_a_region(make_rank: MakeRank, finish: Finish) -> None:
    rank = make_rank([1 << 16, 4096], blocks=8, slots=8, chunk_bytes=1 << 20)
    parts: list[Part] = [(Span(0, 0, 1000), Span(1, 96, 4000)), (Span(0, 1000, 64536), Span(1, 0, 96))]
    device = CudaDevice(rank.pool, rank.layout, rank.tensors, registrar=rank.registrar, parts=parts)
    try:
        expected = rank.blocks(range(8))
        assert finish(rank.store(range(8), range(8))) is TicketState.DONE
        rank.scramble()
        device.load_layers(range(8), range(8), None).wait(1)
        assert np.array_equal(rank.blocks(range(8)), expected)
    finally:
        device.close()


@pytest.mark.parametrize(("waits", "wrong"), [(True, 0), (False, _ROUNDS)], ids=["waits", "control"])
def test_a_layer_attends_after_its_pages_came(
    waits: bool, wrong: int, make_stored: MakeStored, latch: Any, a_launch_for_each_part: None
) -> None:
    rank, expected = make_stored()
    seen: list[Any] = []

    def attend(number: int, wait: Callable[[int], None]) -> None:
        seen.clear()
        for part in range(4):
            wait(part)
            seen.append(rank.tensors[part][:4].clone())

    def is_right(number: int) -> bool:
        return np.array_equal(torch.cat(seen, dim=1).cpu().numpy(), expected)

    assert _wrong_rounds(rank, latch, attend, is_right, waits=waits, stream=_new_stream()) == wrong


@pytest.mark.parametrize(("fenced", "wrong"), [(True, 0), (False, _ROUNDS)], ids=["fenced", "control"])
def test_pages_land_after_the_older_work_that_writes_them(
    fenced: bool, wrong: int, make_stored: MakeStored, latch: Any
) -> None:
    rank, expected = make_stored()
    found = 0
    for number in range(_ROUNDS):
        latch.close()
        with torch.cuda.stream(latch.stream):
            for tensor in rank.tensors:
                tensor.fill_(number % 256)
        fence = CudaFence.record(latch.stream)
        load = rank.device.load_layers(range(4), range(4), fence if fenced else None)
        if not fenced:
            _end(rank, load)
        assert load.ticket.poll() is (TicketState.PENDING if fenced else TicketState.DONE)
        latch.open()
        torch.cuda.synchronize()
        found += not np.array_equal(rank.blocks(range(4)), expected)
        _end(rank, load)
    assert found == wrong


def test_a_pool_that_shrinks_keeps_what_a_load_reads(make_stored: MakeStored, latch: Any) -> None:
    rank, expected = make_stored([1 << 16] * 4, stored=16, blocks=16, slots=16, chunk_bytes=1 << 18)
    rank.scramble()
    with _plane_of(rank, latch) as (plane, layered):
        latch.close()
        load = layered.load((Op(1, "load", _first(16), _first(16)),), CudaFence.record(latch.stream))
        rank.pool.set_target(2)
        threading.Event().wait(0.1)
        latch.open()
        assert load is not None
        load.wait(3)
        assert np.array_equal(rank.blocks(range(16)), expected)
        assert plane.wait_completions(_PATIENCE)
        assert [one.mark for one in plane.take_completions()] == ["done"]


def _first(count: int) -> tuple[int, ...]:
    return tuple(range(count))


@pytest.mark.parametrize("number", [0, 2, 3])
def test_a_launch_that_fails_leaves_the_load_to_the_staged_way(
    number: int, make_stored: MakeStored, a_launch_for_each_part: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, expected = make_stored(stored=8)
    rank.scramble()
    loader, left = rank.device._layers, [number]
    driver = primary_context(0).driver
    launch = driver.launch

    def launch_once_less(function: Any, *arguments: Any) -> None:
        if function is loader._fetch.function:
            left[0] -= 1
            if left[0] == -1:
                raise DriverError("cuLaunchKernel", 701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "injected")
        launch(function, *arguments)

    monkeypatch.setattr(driver, "launch", launch_once_less)
    with _plane_of(rank) as (_, layered):
        assert layered.load((Op(1, "load", _first(8), _first(8)),), None) is None
        assert np.array_equal(rank.blocks(range(8)), expected)
        assert layered.failure is not None


def test_a_blocking_copy(make_stored: MakeStored) -> None:
    rank, expected = make_stored([8192, 1000], gaps=[0, 8])
    rank.scramble()
    rank.device.load_now([4, 5, 6, 7], range(4), None)
    assert np.array_equal(rank.blocks([4, 5, 6, 7]), expected)


@pytest.mark.parametrize(("patient", "wrong"), [(True, 0), (False, _ROUNDS)], ids=["at its end", "control"])
def test_a_slot_gets_other_bytes_when_the_kernel_has_read_it(
    patient: bool, wrong: int, make_stored: MakeStored, latch: Any
) -> None:
    """The control plane gives a slot away when its load is complete."""
    rank, expected = make_stored()
    stored, found = iter(range(1_000_000, 2_000_000)), 0
    with _plane_of(rank, latch) as (plane, layered):

        def store(source: int) -> None:
            plane.submit(StepPlan((Op(next(stored), "store", tuple(range(source, source + 4)), _first(4)),)))
            _end_of(plane, 1)

        for number in range(_ROUNDS):
            for tensor in rank.tensors:
                tensor[4:8].fill_((number + 1) % 256)
            store(0)
            latch.close()
            op = Op(number + 1, "load", (8, 9, 10, 11), _first(4))
            assert layered.load((op,), CudaFence.record(latch.stream)) is not None
            if not patient:
                store(4)
            latch.open()
            _end_of(plane, 1)
            if patient:
                store(4)
            found += not np.array_equal(rank.blocks((8, 9, 10, 11)), expected)
    assert found == wrong


def _end_of(plane: DataPlane, number: int) -> None:
    """Wait until so many ops are complete."""
    deadline = time.monotonic() + _PATIENCE
    while number:
        assert time.monotonic() < deadline
        plane.wait_completions(1.0)
        marks = [one.mark for one in plane.take_completions()]
        assert "failed" not in marks
        number -= marks.count("done")


@pytest.mark.parametrize("graphs", ["piecewise", "full"])
@pytest.mark.parametrize(("waits", "wrong"), [(True, 0), (False, 50)], ids=["waits", "control"])
def test_graphs_that_read_the_pages_are_replayed_behind_them(
    graphs: str, waits: bool, wrong: int, make_stored: MakeStored, latch: Any
) -> None:
    """A piece for each layer waits for that layer; a graph of all layers waits for all of them."""
    rank, expected = make_stored()
    compute: Any = _new_stream()
    seen = [torch.zeros((4, 8192), dtype=torch.uint8, device="cuda") for _ in range(4)]
    pieces = [[part] for part in range(4)] if graphs == "piecewise" else [list(range(4))]
    captured = []
    for part in range(4):  # the driver loads the kernels now
        seen[part].copy_(rank.tensors[part][:4])
    torch.cuda.synchronize()
    for piece in pieces:
        graph: Any = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=compute):
            for part in piece:
                seen[part].copy_(rank.tensors[part][:4])
        graph.replay()
        captured.append((graph, piece[-1]))
    torch.cuda.synchronize()

    def replay(number: int, wait: Callable[[int], None]) -> None:
        for graph, part in captured:
            wait(part)
            graph.replay()

    def is_right(number: int) -> bool:
        return np.array_equal(torch.cat(seen, dim=1).cpu().numpy(), expected)

    assert _wrong_rounds(rank, latch, replay, is_right, waits=waits, stream=compute, rounds=50) == wrong


def test_two_loads_of_one_step_and_one_of_the_next(make_stored: MakeStored, latch: Any) -> None:
    rank, expected = make_stored([8192, 1000, 4096], stored=16, blocks=16, slots=16)
    rank.scramble()
    with _plane_of(rank, latch) as (plane, layered):
        latch.close()
        fence = CudaFence.record(latch.stream)
        places = [tuple(range(4 * one, 4 * one + 4)) for one in range(3)]
        ops = [Op(one, "load", four, four) for one, four in enumerate(places)]
        first, second = layered.load(ops[:2], fence), layered.load(ops[2:], fence)
        assert first is not None
        assert second is not None
        latch.open()
        second.wait(2)  # loads of a rank end in the order in which they began
        assert np.array_equal(rank.blocks(range(12)), expected[:12])
        _end_of(plane, 3)


@pytest.mark.parametrize(("waits", "wrong"), [(True, 0), (False, _ROUNDS)], ids=["waits", "control"])
def test_blocks_of_a_request_that_is_gone_are_written_behind_its_load(
    waits: bool, wrong: int, make_stored: MakeStored, latch: Any
) -> None:
    """It was aborted or preempted behind its step, and another request computes into its blocks. The step has ended
    with a wait for all of its load."""
    rank, _ = make_stored()

    def overwrite(number: int, wait: Callable[[int], None]) -> None:
        wait(3)
        for tensor in rank.tensors:
            tensor[:4].fill_(number % 256)

    def is_right(number: int) -> bool:
        return bool((rank.blocks(range(4)) == number % 256).all())

    assert _wrong_rounds(rank, latch, overwrite, is_right, waits=waits, stream=_new_stream()) == wrong
