"""Slots under the real control plane and the JAX device: who gets one, and when it may be written again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from tests.jax.rank import Host, JaxRank

from kvstow.control.namespaces import KeySelection, Namespace
from kvstow.control.ops import OpsInFlight
from kvstow.devices.jax.devicestores import GatheredPiece
from kvstow.messages import Completion, StepPlan
from kvstow.results import StoreGrant

pytestmark = pytest.mark.jax


class Scheduler(Host):
    """Of one rank, whose slots it has all."""

    def __init__(self, rank: JaxRank) -> None:
        super().__init__(rank, rank.num_slots)

    def store(self, keys: list[bytes], blocks: list[int]) -> StoreGrant:
        grant = self.engine.begin_store(keys, blocks)
        if grant.op is not None:
            self.rank.plane.submit(StepPlan((grant.op,)))
        return grant

    def load(self, key: bytes, block: int) -> None:
        lease = self.engine.lease([key])
        assert lease is not None
        op = self.engine.begin_load(lease, [block])
        self.rank.order.expect((op,))
        self.rank.plane.submit(StepPlan((op,)))
        self.settle()


def test_duplicates_in_a_batch_are_not_allocated_twice(make_rank: Callable[..., JaxRank]) -> None:
    host = Scheduler(make_rank(num_slots=4))
    grant = host.store([b"a", b"b", b"a"], [0, 1, 2])
    assert grant.op is not None
    assert len(grant.op.slots) == 2
    host.settle()
    host.engine.check_integrity()
    host.engine.admin.purge(everything=True).run()
    assert host.engine.stats().pool.slots.free == 4
    host.engine.check_integrity()


def test_a_slot_is_not_rewritten_while_its_last_save_is_queued(make_rank: Callable[..., JaxRank]) -> None:
    rank = make_rank(num_slots=1)
    host = Scheduler(rank)
    contents = rank.blocks([1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GatheredPiece, "has_arrived", lambda self: False)
        host.store([b"first"], [0])
        rank.wait_until(lambda: host.engine.take_settled(), host.turn)  # the block may be overwritten
        assert host.store([b"second"], [1]).op is None
    host.settle()
    assert host.store([b"second"], [1]).op is not None
    host.settle()
    host.load(b"second", 5)
    rank.put([5], contents)
    assert rank.wrong_elements() == 0
    assert not host.engine.contains([b"first"])[0]


def duplicates_allocated_twice(patch: pytest.MonkeyPatch) -> None:
    def select_all(namespace: Namespace, keys: Sequence[bytes], outcomes: dict[str, int]) -> KeySelection:
        return KeySelection(list(range(len(keys))), namespace.keys.hashes_of(keys), [])

    patch.setattr(Namespace, "select", select_all)


def saves_end_when_their_blocks_are_read(patch: pytest.MonkeyPatch) -> None:
    complete = OpsInFlight.complete

    def end_early(self: OpsInFlight, rank: int, completion: Completion) -> None:
        mark = "done" if completion.mark == "source_free" else completion.mark
        complete(self, rank, Completion(completion.op_id, mark))

    patch.setattr(OpsInFlight, "complete", end_early)


@pytest.mark.parametrize(
    ("mutant", "scenario"),
    [
        (duplicates_allocated_twice, test_duplicates_in_a_batch_are_not_allocated_twice),
        (saves_end_when_their_blocks_are_read, test_a_slot_is_not_rewritten_while_its_last_save_is_queued),
    ],
)
def test_taking_out_a_safeguard_is_noticed(
    mutant: Callable[[pytest.MonkeyPatch], None],
    scenario: Callable[[Any], None],
    make_rank: Callable[..., JaxRank],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        scenario(make_rank)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_floats_of_fewer_bits_survive_a_store_and_a_load(make_rank: Callable[..., JaxRank], dtype: str) -> None:
    """As in the KV caches of TPUs. Finite ones: XLA for the CPU rewrites the payload of a NaN."""
    rank = make_rank(dtype=np.dtype(dtype))
    for round_number in range(3):
        before = rank.blocks([1, 2, 3])
        rank.done(rank.store([1, 2, 3], [4, 5, 6]))
        rank.overwrite([1, 2, 3])
        rank.done(rank.load([7, 3 + round_number], [5, 6]))
        rank.put([7, 3 + round_number], [layer[1:] for layer in before])
        assert rank.wrong_elements() == 0
