"""Tells the pool which blocks the engine's requests use, from the admission of a request to its end."""

from __future__ import annotations

from typing import Any

from kvstow.endings import Ending, Status
from kvstow_service.connectors.engine_core.controlplane import ControlPlane
from kvstow_service.connectors.engine_core.kvgroups import KVGroups
from kvstow_service.connectors.engine_core.trackedrequests import TrackedRequest

_STATUSES: dict[str, Status] = {
    "FINISHED_STOPPED": "stop",
    "FINISHED_LENGTH_CAPPED": "length",
    "FINISHED_ABORTED": "abort",
}
INTERRUPTED = Ending("interrupted")
_MOST_ENDED = 64
"""How many requests are remembered after their end, with their GPU blocks."""


def ending_of(request: Any) -> Ending:
    """How vLLM's request has ended. Its `stop_reason` is None after a plain end of text, and stop strings reach the
    engine as aborts. So only its last two tokens tell what its client is likely to do next."""
    status = _STATUSES.get(getattr(getattr(request, "status", None), "name", ""), "other")
    tokens = getattr(request, "output_token_ids", None)
    if status != "stop" or tokens is None or len(tokens) < 2:
        return Ending(status)
    return Ending(status, (int(tokens[-2]), int(tokens[-1])))


class RunningRequests:
    """Tells the pool which blocks running requests use. Used by the scheduler's thread. While a request runs, only its
    blocks of groups that attend to all tokens count as used. Blocks of windows and recurrent states leave its tables
    meanwhile, so they count when it ends."""

    def __init__(self, control: ControlPlane, groups: KVGroups) -> None:
        self._control, self._alignment = control, groups.alignment
        self._full = KVGroups(groups.full, groups.alignment)
        self._all = groups
        self._blocks_per_stride = sum(groups.alignment // group.block_tokens for group in groups.full)
        self._ended: dict[int, list[int]] = {}
        """The GPU blocks, by number, of requests that have ended and of which the pool seemed to have all blocks."""

    def admitted(self, tracked: TrackedRequest) -> None:
        """Tell the pool, once, the keys of a request that has its GPU blocks, as far as its prompt goes."""
        if tracked.number is not None or tracked.withheld or not tracked.has_keys:
            return
        first = self._all.groups[0]
        hash_tokens = first.block_tokens // first.hashes_per_block
        tracked.told_tokens = self._whole(tracked, len(tracked.request.block_hashes) * hash_tokens)
        keys = tracked.keys_between(self._full, 0, tracked.told_tokens) if self._full.groups else []
        looked_up = self._position(tracked.looked_up.start), self._position(tracked.looked_up.stop)
        tracked.number = self._control.admit(keys, looked_up=looked_up, hints=tracked.hints, salt=tracked.salt)

    def ended(self, tracked: TrackedRequest, ending: Ending) -> bool:
        """Tell the pool that the request has ended, or that vLLM has taken its GPU blocks away. Returns whether the
        pool lacks blocks of it that are worth storing now."""
        number, tracked.number = tracked.number, None
        if number is None:
            return False
        start, end = tracked.told_tokens, self._whole(tracked, tracked.confirmed_tokens)
        if tracked.withheld:
            return self._control.end_request(number, INTERRUPTED)
        more = tracked.keys_between(self._full, start, end) if self._full.groups and start < end else []
        others = tracked.keys_between(self._all, 0, end) if self._all.partial else []
        is_incomplete = self._control.end_request(number, ending, more=more, others=others)
        if not is_incomplete:
            self._ended[number] = [block for group in self._full.groups for block in tracked.tables[group.index]]
            if len(self._ended) > _MOST_ENDED:
                del self._ended[next(iter(self._ended))]
        return is_incomplete

    def late_blocks(self) -> list[int]:
        """The GPU blocks of ended requests for which the pool has reported only since that it had lent some of their
        slots before their end. By now these GPU blocks may have another content."""
        return [block for number in self._control.take_late() for block in self._ended.pop(number, ())]

    def _whole(self, tracked: TrackedRequest, num_tokens: int) -> int:
        """How many of the first `num_tokens` tokens are in whole strides of `alignment`, and may be in the pool."""
        if not tracked.may_store:
            num_tokens = min(num_tokens, tracked.computed_from)
        return num_tokens // self._alignment * self._alignment

    def _position(self, num_tokens: int) -> int:
        """How many keys a chain has before the block that begins after `num_tokens` tokens."""
        return num_tokens // self._alignment * self._blocks_per_stride
