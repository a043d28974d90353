"""Failed loads that vLLM cannot be told of by request. Only versions before 0.30 need this module."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

from kvstow.control.engine import OffloadEngine
from kvstow_service.connectors.vllm.kvgroups import KVGroups
from kvstow_service.connectors.vllm.trackedrequests import TrackedRequest

logger = logging.getLogger("kvstow.vllm")


class FailedLoads:
    """Sends a request whose load failed back to what it had before. Used by the scheduler's thread.

    Before 0.30 vLLM takes bad blocks only, of models with one KV group; and where that has a window, it would go on
    from the first of them with nothing in the window before it. A request that had nothing on the GPU, or has lost its
    window, can go nowhere: it is held back until it is aborted, rather than given wrong bytes. So that it stays the
    only one, nothing is loaded after that until an operator says so.
    """

    def __init__(
        self, engine: OffloadEngine, groups: KVGroups, null_block: int, requests: Mapping[str, TrackedRequest]
    ) -> None:
        """`requests`: those that vLLM has, by name; owned by the caller."""
        self._engine, self._groups, self._null_block, self._requests = engine, groups, null_block, requests
        self._stranded: set[str] = set()

    def continuing(self, ended: Collection[str]) -> set[str]:
        """Of the requests whose loads have ended, those that vLLM may go on with; and those held back before that were
        aborted since."""
        failed = {name for name in ended if name in self._requests and self._requests[name].load_failed}
        stuck = {name for name in failed if not self._rewind(self._requests[name])}
        if stuck:
            self._strand(stuck)
        aborted = {name for name in self._stranded if name not in self._requests}
        self._stranded -= aborted
        return {*ended} - stuck | aborted

    def _rewind(self, tracked: TrackedRequest) -> bool:
        """Whether the request has all that the token after its local prefix reads, and goes on from there."""
        for group in self._groups.partial:
            first, end = group.first_block(tracked.start), tracked.start // group.block_tokens
            if self._null_block in tracked.tables[group.index][first:end]:
                return False
        if tracked.start:
            tracked.request.num_computed_tokens = tracked.start
        return tracked.start > 0

    def _strand(self, stuck: set[str]) -> None:
        self._stranded |= stuck
        bypass = self._engine.admin.bypass
        if not bypass.load:
            self._engine.admin.set_bypass(load=True, store=bypass.store, ttl_seconds=None)
        logger.error(
            "requests %s wait until they are aborted: their loads failed, and vLLM before 0.30 computes none of those "
            "where the model has several KV groups or a window; loads are bypassed from now on (`kvstow bypass --off`)",
            ", ".join(sorted(stuck)),
        )
