"""Mutants of the engine that several tests must notice: each removes one safeguard."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvstow.control.engine import OffloadEngine
from kvstow.control.ops import OpenOp, OpenTierOp, OpsInFlight
from kvstow.control.pool import Pool
from kvstow.messages import Completion, TierCompletion


def visible_at_submission(patch: pytest.MonkeyPatch) -> None:
    begin_store = OffloadEngine.begin_store

    def publish_at_once(self: OffloadEngine, keys: list[bytes], blocks: list[int], **rest: str) -> object:
        grant = begin_store(self, keys, blocks, **rest)
        if grant.op:
            pool: Pool = self.pool
            entry = self.ops.get(grant.op.op_id)
            assert entry is not None
            pool.publish(entry.namespace, grant.op.slots)
            entry.op = replace(grant.op, slots=())
        return grant

    patch.setattr(OffloadEngine, "begin_store", publish_at_once)


def first_rank_decides(patch: pytest.MonkeyPatch) -> None:
    accept = OpsInFlight._accept

    def end_at_first_completion(self: OpsInFlight, entry: OpenOp, rank: int, completion: Completion) -> None:
        if completion.mark != "source_free":
            entry.pending = {rank}
        accept(self, entry, rank, completion)

    patch.setattr(OpsInFlight, "_accept", end_at_first_completion)


def rank_0_puts_first(patch: pytest.MonkeyPatch) -> None:
    def plan_all(self: OpsInFlight, entry: OpenTierOp) -> None:
        entry.waits_for_others = False
        self.tier_plans.extend((rank, entry.op) for rank in sorted(entry.pending))

    patch.setattr(OpsInFlight, "_plan", plan_all)


def short_ranks_do_not_count(patch: pytest.MonkeyPatch) -> None:
    note = OpenTierOp.note

    def believe_all(self: OpenTierOp, completion: TierCompletion) -> None:
        note(self, completion)
        self.moved = len(self.op.slots)

    patch.setattr(OpenTierOp, "note", believe_all)
