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
"""Requests whose blocks are known after their end."""


def ending_of(request: Any) -> Ending:
    """How vLLM's request has ended. Its `stop_reason` is None after a plain end of text, and stop strings reach the
    engine as aborts, so what a model does next is known by its last two tokens."""
    status = _STATUSES.get(getattr(getattr(request, "status", None), "name", ""), "other")
    tokens = getattr(request, "output_token_ids", None)
    if status != "stop" or tokens is None or len(tokens) < 2:
        return Ending(status)
    return Ending(status, (int(tokens[-2]), int(tokens[-1])))


class RunningRequests:
    """Used by the scheduler's thread. Only blocks of groups that attend to everything are used by a running request:
    those of windows and recurrent states have left its tables by then, and count when it ends."""

    def __init__(self, control: ControlPlane, groups: KVGroups) -> None:
        self._control, self._alignment = control, groups.alignment
        self._full = KVGroups(groups.full, groups.alignment)
        self._all = groups
        self._blocks_per_stride = sum(groups.alignment // group.block_tokens for group in groups.full)
        self._ended: dict[int, list[int]] = {}
        """The GPU blocks of requests that have ended and lacked nothing, as far as was known, by number."""

    def admitted(self, tracked: TrackedRequest) -> None:
        """The request has its GPU blocks. Its chain is known as far as its prompt goes; it is told once."""
        if tracked.number is not None or tracked.withheld or not tracked.has_keys:
            return
        first = self._all.groups[0]
        hash_tokens = first.block_tokens // first.hashes_per_block
        tracked.told_tokens = self._whole(tracked, len(tracked.request.block_hashes) * hash_tokens)
        keys = tracked.keys_between(self._full, 0, tracked.told_tokens) if self._full.groups else []
        looked_up = self._position(tracked.looked_up.start), self._position(tracked.looked_up.stop)
        tracked.number = self._control.admit(keys, looked_up=looked_up, hints=tracked.hints, salt=tracked.salt)

    def ended(self, tracked: TrackedRequest, ending: Ending) -> bool:
        """The request has ended, or vLLM has taken its GPU blocks away. Returns whether the pool lacks blocks of it
        that are worth storing now."""
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
        """The GPU blocks of requests of which the pool has lent some before their end, as it has said only since. By
        now they may have another content."""
        return [block for number in self._control.take_late() for block in self._ended.pop(number, ())]

    def _whole(self, tracked: TrackedRequest, num_tokens: int) -> int:
        """Of so many tokens, those that are in whole strides of `alignment`, and that the pool may have."""
        if not tracked.may_store:
            num_tokens = min(num_tokens, tracked.computed_from)
        return num_tokens // self._alignment * self._alignment

    def _position(self, num_tokens: int) -> int:
        """How many keys a chain has before the block that begins after so many tokens."""
        return num_tokens // self._alignment * self._blocks_per_stride
