"""Loads: what was held for a request becomes copies into the GPU blocks that it was given."""

from __future__ import annotations

import logging
from typing import NamedTuple

from kvstow.control.engine import OffloadEngine
from kvstow.errors import LeaseError
from kvstow.messages import Op
from kvstow_service.connectors.vllm.kvgroups import KVGroups
from kvstow_service.connectors.vllm.trackedrequests import Hit, TrackedRequest

logger = logging.getLogger("kvstow.vllm")


class PlannedLoads(NamedTuple):
    """The loads that start with a step: `ops[i]` is that of request `requests[i]`. `lost`: requests whose load cannot
    be had any more, though vLLM waits for it, with the GPU blocks that stay unwritten."""

    ops: tuple[Op, ...]
    requests: tuple[str, ...]
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
        self._requests: list[str] = []
        self._lost: dict[str, tuple[int, ...]] = {}
        self._pending: dict[int, TrackedRequest] = {}

    def __len__(self) -> int:
        """Load ops under way."""
        return len(self._pending)

    def plan(self, tracked: TrackedRequest, num_tokens: int) -> None:
        """Load the `num_tokens` tokens after `tracked.start` into its tables. Uses the hit up."""
        hit, tracked.hit = tracked.hit, None
        tracked.load_failed = False
        end = tracked.start + num_tokens
        places = self._groups.places(tracked.start, end)
        targets = [tracked.tables[group][number] for group, number in places]
        op = None if hit is None else self._begin(tracked, hit, end, places, targets)
        if op is None:
            self.lose(tracked, num_tokens)
        else:
            self._ops.append(op)
            self._requests.append(tracked.request.request_id)
            self._pending[op.op_id] = tracked

    def lose(self, tracked: TrackedRequest, num_tokens: int) -> None:
        """The load of the `num_tokens` tokens after `tracked.start` cannot be had."""
        places = self._groups.places(tracked.start, tracked.start + num_tokens)
        tracked.load_failed = True
        self._lost[tracked.request.request_id] = tuple([tracked.tables[group][number] for group, number in places])

    def take_planned(self) -> PlannedLoads:
        """All that was planned since the last call."""
        planned = PlannedLoads(tuple(self._ops), tuple(self._requests), self._lost)
        self._ops, self._requests, self._lost = [], [], {}
        return planned

    def settle(self, op_id: int, *, failed: bool) -> None:
        """An op has ended on every rank."""
        tracked = self._pending.pop(op_id, None)
        if tracked is not None:
            tracked.load_failed = failed

    def _begin(
        self, tracked: TrackedRequest, hit: Hit, end: int, places: list[tuple[int, int]], targets: list[int]
    ) -> Op | None:
        """None if not all that the request needs can be loaded; nothing is held then."""
        held = places
        if (tracked.start, end) != (hit.start, hit.end):
            held = self._groups.places(hit.start, hit.end)
        first = held.index(places[0]) if places and places[0] in held else len(held)
        try:
            if held[first : first + len(places)] == places and self._null_block not in targets:
                return self._engine.begin_load(hit.lease, targets, first=first, request_id=tracked.request.request_id)
        except LeaseError as error:  # a rank has lost its memory since the look-up
            logger.warning("request %s: its hit is gone, it is computed: %s", tracked.request.request_id, error)
        self._engine.release(hit.lease)
        return None
