"""Loads: what was held for a request becomes copies into the GPU blocks that it was given."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

from kvstow.control.engine import OffloadEngine
from kvstow.errors import LeaseError
from kvstow.messages import Op
from kvstow_service.connectors.vllm.groups import KVGroup, KVGroups
from kvstow_service.connectors.vllm.requests import Hit, TrackedRequest

logger = logging.getLogger("kvstow.vllm")


class PlannedLoads(NamedTuple):
    """The loads that start with a step. `requests`: their ops by request id. `lost`: requests whose load cannot be had
    any more, though vLLM waits for it, with the GPU blocks that stay unwritten."""

    ops: tuple[Op, ...]
    requests: dict[str, tuple[int, ...]]
    lost: dict[str, tuple[int, ...]]


class Loads:
    """Plans loads and follows them. Used by the scheduler's thread.

    vLLM waits for a load that it was promised until every rank has spoken, so each plan ends in exactly one report
    per rank: of its ops, or of the loss.
    """

    def __init__(self, engine: OffloadEngine, groups: KVGroups, null_block: int) -> None:
        """`null_block`: what stands in a block table for blocks out of the window."""
        self._engine, self._groups, self._null_block = engine, groups, null_block
        self._ops: list[Op] = []
        self._requests: dict[str, tuple[int, ...]] = {}
        self._lost: dict[str, tuple[int, ...]] = {}
        self._pending: dict[int, TrackedRequest] = {}

    def __len__(self) -> int:
        """Load ops under way."""
        return len(self._pending)

    def plan(self, tracked: TrackedRequest, num_tokens: int) -> None:
        """Load the `num_tokens` tokens after `tracked.start` into its tables. Uses the hit up."""
        hit, tracked.hit = tracked.hit, None
        tracked.load_failed = False
        begun: list[Op] = []
        if hit is None or not self._begin(tracked, hit, tracked.start + num_tokens, begun):
            self._lose(tracked, num_tokens)
        if hit is not None:
            for lease in hit.leases:
                if lease is not None:
                    self._engine.release(lease)  # no more than a formality for those that a load has used up
        request_id = tracked.request.request_id
        if begun:
            self._requests[request_id] = tuple(op.op_id for op in begun)
        for op in begun:
            self._ops.append(op)
            self._pending[op.op_id] = tracked
            tracked.loads.add(op.op_id)

    def take_planned(self) -> PlannedLoads:
        """All that was planned since the last call."""
        planned = PlannedLoads(tuple(self._ops), self._requests, self._lost)
        self._ops, self._requests, self._lost = [], {}, {}
        return planned

    def settle(self, op_id: int, *, failed: bool) -> None:
        """An op has ended on every rank."""
        tracked = self._pending.pop(op_id, None)
        if tracked is not None:
            tracked.loads.discard(op_id)
            tracked.load_failed |= failed

    def _begin(self, tracked: TrackedRequest, hit: Hit, end: int, begun: list[Op]) -> bool:
        """False if not all that the request needs could be begun."""
        if not hit.start <= tracked.start < end <= hit.end or (self._groups.partial and end != hit.end):
            return False
        for group in self._groups.groups:
            targets, first = self._targets(tracked, group, end)
            lease = hit.leases[group.index]
            if not targets:
                continue
            if lease is None or self._null_block in targets:
                return False
            try:
                op = self._engine.begin_load(
                    lease, targets, first=first - hit.firsts[group.index], request_id=tracked.request.request_id
                )
            except LeaseError as error:  # a rank has lost its memory since the look-up
                logger.warning("request %s: its hit is gone, it is computed: %s", tracked.request.request_id, error)
                return False
            begun.append(op)
        return True

    def _targets(self, tracked: TrackedRequest, group: KVGroup, end: int) -> tuple[Sequence[int], int]:
        """(GPU blocks to write, number of the first of them). A block of which `end` needs a part is written whole."""
        first = max(tracked.start // group.block_tokens, group.first_block(end))
        return tracked.tables[group.index][first : -(-end // group.block_tokens)], first

    def _lose(self, tracked: TrackedRequest, num_tokens: int) -> None:
        tracked.load_failed = True
        end = tracked.start + num_tokens
        targets = [block for group in self._groups.groups for block in self._targets(tracked, group, end)[0]]
        self._lost[tracked.request.request_id] = tuple(targets)
