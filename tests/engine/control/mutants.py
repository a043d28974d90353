"""Mutants of the engine that more than one test must notice: each takes one safeguard out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvstow.control.engine import OffloadEngine
from kvstow.control.ledger import Ledger, Verdict
from kvstow.control.state import ControlState
from kvstow.messages import Completion


def visible_at_submission(patch: pytest.MonkeyPatch) -> None:
    begin_store = OffloadEngine.begin_store

    def publish_at_once(self: OffloadEngine, keys: list[bytes], blocks: list[int], **rest: str) -> object:
        grant = begin_store(self, keys, blocks, **rest)
        if grant.op:
            state: ControlState = self._state
            entry = state.ledger.get(grant.op.op_id)
            assert entry is not None
            state.index.publish(entry.keys, grant.op.slots, 0.0)
            entry.keys, entry.op = (), replace(grant.op, slots=())
        return grant

    patch.setattr(OffloadEngine, "begin_store", publish_at_once)


def first_rank_decides(patch: pytest.MonkeyPatch) -> None:
    record = Ledger.record

    def settle_at_first_word(self: Ledger, rank: int, completion: Completion) -> Verdict:
        verdict = record(self, rank, completion)
        return Verdict.SETTLED if verdict is Verdict.PROGRESS and completion.mark != "source_free" else verdict

    patch.setattr(Ledger, "record", settle_at_first_word)
