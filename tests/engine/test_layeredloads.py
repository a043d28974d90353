"""Loads that a computation waits for: they go by layer, or another way, and never half."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.doubles.fakes import rests
from tests.waiting import eventually

from kvstow.dataplane import DataPlane
from kvstow.devices.cpu import CpuDevice
from kvstow.errors import CopyError
from kvstow.layout import KVLayout, Region
from kvstow.memory.hostpool import HostPool
from kvstow.messages import Op

if TYPE_CHECKING:
    MakePool = Callable[..., HostPool]


class Flaky(CpuDevice):
    """Fails in the ways that are named."""

    fails: frozenset[str] = frozenset()

    def _attempt(self, way: str) -> None:
        if way in self.fails:
            raise CopyError(f"no load {way}")

    def load_layers(self, *arguments: Any) -> Any:
        self._attempt("by layer")
        return super().load_layers(*arguments)

    def launch_load(self, *arguments: Any) -> Any:
        self._attempt("staged")
        return super().launch_load(*arguments)

    def load_now(self, *arguments: Any) -> Any:
        self._attempt("now")
        return super().load_now(*arguments)


class Rank:
    """Two regions of 2 KiB pages; slot `s` is full of the byte `100 + s`."""

    def __init__(self, pool: HostPool) -> None:
        self.kv = torch.zeros((2, 16, 2048), dtype=torch.uint8)
        layout = KVLayout((Region("k", 16, 2048, 2048), Region("v", 16, 2048, 2048)))
        self.device = Flaky(pool, layout, list(self.kv), layout.parts)
        self.plane = DataPlane(0, pool, self.device, layers=self.device)
        self.pool = pool

    def fill(self) -> None:
        for slot in range(16):
            ctypes.memset(self.pool.address + slot * self.pool.slot_stride, 100 + slot, 4096)

    def load(self, *ops: Op) -> Any:
        assert self.plane.layered is not None
        return self.plane.layered.load(ops, None)

    def block(self, block: int) -> tuple[set[int], set[int]]:
        first, second = ({int(value) for value in region[block]} for region in self.kv)
        return first, second

    def ended(self) -> dict[int, str]:
        return {one.op_id: one.mark for one in self.plane.take_completions()}


@pytest.fixture
def rank(make_pool: MakePool) -> Iterator[Rank]:
    rank = Rank(make_pool())
    rank.plane.start()
    eventually(lambda: rank.pool.pinned_slots == 16)
    rank.fill()
    yield rank
    rank.plane.close(0)


TWO = (Op(1, "load", (3, 4), (0, 1)), Op(2, "load", (7,), (9,)))


def test_parts_arrive_in_order_and_the_ops_end_with_the_last_one(rank: Rank) -> None:
    load = rank.load(*TWO)
    load.wait(0)
    assert [rank.block(block) for block in (3, 4, 7)] == [({100}, {0}), ({101}, {0}), ({109}, {0})]
    assert rank.plane.pending_ops == 2
    assert rank.ended() == {}
    load.wait(1)
    assert [rank.block(block) for block in (3, 4, 7)] == [({100}, {100}), ({101}, {101}), ({109}, {109})]
    eventually(lambda: rank.plane.pending_ops == 0)
    completions = {one.op_id: one for one in rank.plane.take_completions()}
    assert {one.mark for one in completions.values()} == {"done"}
    assert [completions[1].num_bytes, completions[2].num_bytes] == [8192, 4096]
    assert completions[1].seconds == pytest.approx(2 * completions[2].seconds)


def test_the_memory_of_the_slots_stays_until_the_last_part_was_read(rank: Rank) -> None:
    load = rank.load(TWO[1])
    rank.pool.set_target(4)
    eventually(lambda: rests(rank.pool))
    kept = rank.pool.status().resident_bytes
    load.wait(0)
    assert rests(rank.pool)
    load.wait(1)
    eventually(lambda: rank.pool.status().resident_bytes < kept)
    assert rank.block(7) == ({109}, {109})


@pytest.mark.parametrize("fails", [{"by layer"}, {"by layer", "staged"}], ids=["staged", "blocking"])
def test_a_load_that_fails_goes_another_way_before_the_computation(
    fails: set[str], rank: Rank, caplog: pytest.LogCaptureFixture
) -> None:
    rank.device.fails = frozenset(fails)
    assert rank.load(*TWO) is None
    assert [rank.block(block) for block in (3, 4, 7)] == [({100}, {100}), ({101}, {101}), ({109}, {109})]
    assert rank.ended() == {op.op_id: "failed" if "staged" in fails else "done" for op in TWO}
    assert "a load by layer has failed" in caplog.text


def test_a_rank_that_failed_once_loads_by_layer_no_more(rank: Rank) -> None:
    rank.device.fails = frozenset({"by layer"})
    assert rank.load(TWO[0]) is None
    rank.device.fails = frozenset()
    assert rank.load(TWO[1]) is None
    assert rank.plane.layered is not None
    assert rank.plane.layered.failure == "CopyError: no load by layer"


def test_if_no_way_is_left_the_host_learns_it(rank: Rank) -> None:
    """Otherwise it would compute with blocks that were never written."""
    rank.device.fails = frozenset({"by layer", "staged", "now"})
    with pytest.raises(CopyError, match="no load now"):
        rank.load(*TWO)


def test_a_plane_that_is_closed_reports_the_load_as_failed(rank: Rank) -> None:
    load = rank.load(TWO[0])
    rank.plane.close(0)
    assert rank.ended() == {1: "failed"}
    with pytest.raises(CopyError, match="closed"):
        load.wait(1)
