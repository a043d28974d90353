"""Failed loads that the engine cannot handle. Only vLLM before 0.30 and tpu-inference need this module."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

from kvstow_service.connectors.engine_core.controlplane import ControlPlane
from kvstow_service.connectors.engine_core.kvgroups import KVGroups
from kvstow_service.connectors.engine_core.trackedrequests import TrackedRequest

logger = logging.getLogger("kvstow.vllm")


class FailedLoads:
    """Rolls a request whose load failed back to the tokens that it had before. Used by the scheduler's thread.

    vLLM before 0.30 accepts only bad blocks, and only for models with one KV group. In tpu-inference, KVStow reports no
    more than that. If that group has a window, vLLM would continue at the first bad block without the window before it.
    A request that had nothing on the GPU, or has lost its window, cannot continue because it would read wrong bytes. It
    is held back until it is aborted. Loads are bypassed from then on, so that no other request gets stuck.
    """

    def __init__(
        self, control: ControlPlane, groups: KVGroups, null_block: int, requests: Mapping[str, TrackedRequest]
    ) -> None:
        """`requests`: the requests that vLLM has, by name; owned by the caller."""
        self._control, self._groups, self._null_block, self._requests = control, groups, null_block, requests
        self._stranded: set[str] = set()

    def continuing(self, ended: Collection[str]) -> set[str]:
        """The requests that may continue, out of those whose loads have `ended`. Also contains requests that were held
        back and have been aborted since."""
        failed = {name for name in ended if name in self._requests and self._requests[name].load_failed}
        stuck = {name for name in failed if not self._rewind(self._requests[name])}
        if stuck:
            self._strand(stuck)
        aborted = {name for name in self._stranded if name not in self._requests}
        self._stranded -= aborted
        return {*ended} - stuck | aborted

    def _rewind(self, tracked: TrackedRequest) -> bool:
        """Let the request continue after its local prefix. Returns False if it lacks something that the next token
        reads."""
        for group in self._groups.partial:
            first, end = group.first_block(tracked.start), tracked.start // group.block_tokens
            if self._null_block in tracked.tables[group.index][first:end]:
                return False
        if tracked.start:
            tracked.request.num_computed_tokens = tracked.start
        return tracked.start > 0

    def _strand(self, stuck: set[str]) -> None:
        self._stranded |= stuck
        end = self._control.bypass_loads()
        logger.error(
            "requests %s wait until they are aborted: their loads failed, and this engine cannot compute them if the "
            "model has several KV groups or a window; loads are bypassed until %s",
            ", ".join(sorted(stuck)),
            end,
        )
