"""Written blocks: GPU blocks that the step being planned computes into."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from functools import cached_property

from kvstow_service.connectors.vllm.kvgroups import KVGroup
from kvstow_service.connectors.vllm.trackedrequests import TrackedRequest


class WrittenBlocks:
    """The blocks that a step writes. Its stores begin before it does, so they must read none of these.

    vLLM names a block by the hash of what it will hold when a step is planned that completes it. So a hash proves
    nothing about a block that this step writes, whether the block is allocated in this step or was begun in an older
    one.
    """

    def __init__(
        self,
        scheduled: Iterable[str] = (),
        requests: Mapping[str, TrackedRequest] | None = None,
        groups: Iterable[KVGroup] = (),
        states: Iterable[int] = (),
    ) -> None:
        """`groups`: those whose blocks are in the tables of the `scheduled` requests. `states`: blocks of recurrent
        layers that the step computes."""
        self._scheduled, self._requests, self._groups, self._states = scheduled, requests or {}, groups, states

    @cached_property
    def block_ids(self) -> Set[int]:
        """O(scheduled requests), at the first use: most steps have none."""
        found = set(self._states)
        for request_id in self._scheduled:
            tracked = self._requests.get(request_id)
            if tracked is None:
                continue
            confirmed = max(0, tracked.confirmed_tokens)
            for group in self._groups:
                found.update(tracked.tables[group.index][confirmed // group.block_tokens :])
        return found
