"""The control plane as a replay uses it: the node service's.

A connector tells the control plane about a request at two moments of its life, its beginning and its end. Everything
that it tells there is in `admit` and `end`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstow.attach.calls import Hold
from kvstow.attach.connection import Answer
from kvstow.attach.engine import AttachedEngine, Hits
from kvstow.attach.hello import SessionTicket
from kvstow.attach.identity import GroupIdentity, NamespaceIdentity, PoolIdentity, RegionIdentity
from kvstow.keys import BlockKey
from kvstow.messages import Op
from kvstow.results import Awaited, Lease, StoreGrant
from kvstow.tier.fingerprint import named_weights
from kvstow_service.replay.remoteranks import RemoteRanks
from kvstow_service.replay.trace import BLOCK_TOKENS, Shape, ending_of_trace

_MODEL = "replay"
_CONTENT = "blake2b-1"
"""Names the contents of blocks. Change it with `kvstow_service.replay.kv`."""
_SCHEMA = f"mooncake-{BLOCK_TOKENS}"
"""Names the form of keys. Change it with `TraceRequest.keys`."""


def pool_identity(shape: Shape, num_ranks: int) -> PoolIdentity:
    """Return the identity of the pool for a replay. Replays of the same shape and number of ranks share memory."""
    regions = tuple(RegionIdentity(region.name, region.page_bytes) for region in shape.layout(1).regions)
    return PoolIdentity(
        slot_bytes=(shape.slot_bytes,) * num_ranks,
        regions=regions,
        kv_cache_dtype="uint8",
        groups=(GroupIdentity("full", BLOCK_TOKENS, BLOCK_TOKENS),),
        tensor_parallel=num_ranks,
    )


@dataclass(slots=True)
class _FoundLease:
    offload: AttachedOffload
    answer: Answer[Hits]
    has_waited: bool = False

    @property
    def done(self) -> bool:
        if self.answer.is_pending and not self.has_waited:
            self.has_waited = True
            self.offload.waits += 1
        return self.answer.done

    @property
    def value(self) -> Lease:
        return self.answer.value.lease

    @property
    def error(self) -> str | None:
        return self.answer.error


class AttachedOffload:
    """The control plane of a replay: an engine in the node service. One thread uses it. Answers come in the order of
    the calls, after a later `step`. The ranks join each of the engine's sessions. While there is no session, lookups
    miss and stores are refused."""

    def __init__(
        self, path: Path, engine: str, pool: PoolIdentity, ranks: RemoteRanks, *, wanted_bytes: int = 0
    ) -> None:
        # Replays of the same form of traces share blocks, because equal ids mean equal prefixes with the same content.
        namespace = NamespaceIdentity(
            model=_MODEL, weights_id=_CONTENT, weights_source="configured", hash_probe=_SCHEMA
        )
        self.engine = AttachedEngine(
            path,
            engine=engine,
            pool=pool,
            namespace=namespace,
            fleet_weights=named_weights(_CONTENT, _MODEL),
            wanted_bytes=wanted_bytes,
        )
        self._ranks = ranks
        self._numbers: dict[int, int] = {}
        self._joined: SessionTicket | None = None
        self._asked: Answer[StoreGrant] | None = None
        self._room = 0
        self._looked_at: float | None = None
        self.seconds_without = 0.0
        """How long there was no session since the first step."""
        self.waits = 0
        """How many lookups the service has answered later, because the store below the pool might have more, or because
        a rank was still registering what was found."""

    def step(self) -> None:
        """Receive answers. Called once in each step of the replay."""
        self.engine.step()
        self._follow_session()

    def _follow_session(self) -> None:
        now, ticket = time.monotonic(), self.engine.ticket
        if self._looked_at is not None and ticket is None:
            self.seconds_without += now - self._looked_at
        self._looked_at = now
        if ticket != self._joined:
            self._joined = ticket
            self._ranks.join(ticket)

    def wait(self, seconds: float) -> None:
        """Wait for news of the ranks or the service."""
        self._ranks.wait(seconds, self.engine.fileno())

    def ask_room(self) -> int:
        """Return how many slots a store would find, as the service last reported, or 0 without a report. Call it in
        every step. It asks by a store of no blocks."""
        if self._asked is not None and self._asked.done:
            self._room = 0 if self._asked.error else self.engine.store_room()
            self._asked = None
        if self._asked is None:
            self._asked = self.engine.begin_store((), ())
        return self._room

    def admit(self, number: int, keys: Sequence[BlockKey]) -> Awaited[Lease]:
        """Begin request `number` of the replay, which has this chain. Look up its leading present keys, and keep them
        from eviction. The lease may be empty."""
        answer = self.engine.find(keys, hold=Hold.LEADING)
        self._numbers[number] = self.engine.admit(keys)
        return _FoundLease(self, answer)

    def end(self, number: int, stop: str | None) -> bool:
        """End the request. `stop` says how it ended, as in its trace. Returns whether the pool lacks blocks of it,
        which should then be stored."""
        return self.engine.end_request(self._numbers.pop(number), ending_of_trace(stop))

    def hold(self, keys: Sequence[BlockKey]) -> Awaited[Lease]:
        """Keep all of these keys from eviction. The lease is empty if one of them is absent."""
        return _FoundLease(self, self.engine.find(keys, hold=Hold.ALL, count=False))

    def release(self, held: Awaited[Lease]) -> None:
        """End a lease as soon as the service has granted it. Idempotent, and allowed after a load has ended the
        lease."""
        assert isinstance(held, _FoundLease)
        self.engine.discard(held.answer)

    def begin_load(self, lease: Lease, blocks: Sequence[int], request_id: str) -> Awaited[Op | None]:
        """Load the keys of the lease, which ends it. The answer is None if the lease was broken meanwhile."""
        return self.engine.begin_load(lease, blocks, request_id=request_id)

    def begin_store(self, keys: Sequence[BlockKey], blocks: Sequence[int], request_id: str) -> Awaited[StoreGrant]:
        return self.engine.begin_store(keys, blocks, request_id=request_id)

    def figures(self) -> dict[str, Any]:
        """Return the fields of `ReplayResult` that describe the pool."""
        return {"slots": self._ranks.usable_slots}
