"""Mutants of the engine that several tests must notice: each removes one safeguard."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvstow.control.engine import OffloadEngine
from kvstow.control.ops import OpsInFlight
from kvstow.control.pool import Pool
from kvstow.messages import Completion


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
    complete = OpsInFlight.complete

    def end_at_first_completion(self: OpsInFlight, rank: int, completion: Completion) -> None:
        entry = self.get(completion.op_id)
        if entry is not None and completion.mark != "source_free" and rank in entry.pending:
            entry.pending = {rank}
        complete(self, rank, completion)

    patch.setattr(OpsInFlight, "complete", end_at_first_completion)
