"""What a replay asks of the control plane: embedded in its process, or in the node service.

`admit` and `end` are the two moments in a request's life about which a connector tells the control plane something:
what it says there is in these two methods alone.
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
from kvstow.control.engine import OffloadEngine
from kvstow.errors import LeaseError
from kvstow.keys import BlockKey
from kvstow.messages import Op
from kvstow.results import NO_LEASE, Awaited, Given, Lease, StoreGrant
from kvstow.tier.fingerprint import named_weights
from kvstow_service.replay.remoteranks import RemoteRanks
from kvstow_service.replay.trace import BLOCK_TOKENS, Shape, ending_of_trace


class EmbeddedOffload:
    """The engine in this process. Used by one thread. `AttachedOffload` has the same methods; its answers come in the
    order of the questions, at once or after a later `step`."""

    def __init__(self, engine: OffloadEngine) -> None:
        self._engine = engine
        self._evicted_before = engine.stats().evicted_for_capacity
        # What needs no answer is the engine's own.
        self.complete, self.take_settled = engine.complete, engine.take_settled
        self.note_prefill = engine.note_prefill
        self._numbers: dict[int, int] = {}
        """The control plane's numbers of the requests that are running."""

    def step(self) -> None:
        """Called once a step of the replay. The engine's host ticks it."""

    def admit(self, number: int, keys: Sequence[BlockKey]) -> Awaited[Lease]:
        """Request `number` of the replay begins, with this chain. Look up its leading keys that are present, and keep
        them from eviction. The lease may be empty."""
        lease = self._engine.acquire(keys)
        self._numbers[number] = self._engine.admit(keys)
        return Given(lease)

    def end(self, number: int, stop: str | None) -> bool:
        """The request has ended. `stop`: how, as in its trace. Returns whether the pool lacks blocks of it, which
        should be stored now."""
        return self._engine.end_request(self._numbers.pop(number), ending_of_trace(stop)).is_incomplete

    def hold(self, keys: Sequence[BlockKey]) -> Awaited[Lease]:
        """Keep exactly these keys from eviction; the lease is empty if one of them is absent."""
        return Given(self._engine.lease(keys) or NO_LEASE)

    def release(self, held: Awaited[Lease]) -> None:
        """End a lease, as soon as it is there. Idempotent, also after a load has used it."""
        self._engine.release_lease(held.value)

    def begin_load(self, lease: Lease, blocks: Sequence[int], request_id: str) -> Awaited[Op | None]:
        """Load the keys of the lease, which it uses up. None if the lease was broken in between."""
        try:
            return Given(self._engine.begin_load(lease, blocks, request_id=request_id))
        except LeaseError:
            self._engine.release_lease(lease)
            return Given(None)

    def begin_store(self, keys: Sequence[BlockKey], blocks: Sequence[int], request_id: str) -> Awaited[StoreGrant]:
        return Given(self._engine.begin_store(keys, blocks, request_id=request_id))

    def figures(self) -> dict[str, Any]:
        """Fields of `ReplayResult` that are the pool's."""
        stats = self._engine.stats()
        evicted = stats.evicted_for_capacity - self._evicted_before
        return {"slots": stats.pool.capacity_slots, "policy": stats.pool.policy, "evicted_blocks": evicted}


_MODEL = "replay"
_CONTENT = "blake2b-1"
"""Changes with `kvstow_service.replay.kv`."""
_SCHEMA = f"mooncake-{BLOCK_TOKENS}"
"""Changes with `TraceRequest.keys`."""


def pool_identity(shape: Shape, num_ranks: int) -> PoolIdentity:
    """Replays of the same shape, on as many ranks, share memory."""
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
    """The node service's engine. The ranks join each session of it; without one, lookups miss and stores are
    refused."""

    def __init__(
        self, path: Path, engine: str, pool: PoolIdentity, ranks: RemoteRanks, *, wanted_bytes: int = 0
    ) -> None:
        # All replays of one schema of traces share blocks: equal ids are equal prefixes, with the same content.
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
        # What needs no answer is the engine's own.
        self.complete, self.take_settled = self.engine.complete, self.engine.take_settled
        self.note_prefill, self.close = self.engine.note_prefill, self.engine.close
        self._ranks = ranks
        self._numbers: dict[int, int] = {}
        self._joined: SessionTicket | None = None
        self._asked: Answer[StoreGrant] | None = None
        self._room = 0
        self._looked_at: float | None = None
        self.seconds_without = 0.0
        """How long there was no session, from the first step on."""
        self.waits = 0
        """Look-ups that the service has answered later, because the fleet tier might have more, or a rank was still
        registering what was found."""

    def step(self) -> None:
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
        """Slots that a store would find, as the service has last reported; 0 without an answer. Call it in every step:
        a store of nothing is how the service is asked."""
        if self._asked is not None and self._asked.done:
            self._room = 0 if self._asked.error else self.engine.store_room()
            self._asked = None
        if self._asked is None:
            self._asked = self.engine.begin_store((), ())
        return self._room

    def admit(self, number: int, keys: Sequence[BlockKey]) -> Awaited[Lease]:
        answer = self.engine.find(keys, hold=Hold.LEADING)
        self._numbers[number] = self.engine.admit(keys)
        return _FoundLease(self, answer)

    def end(self, number: int, stop: str | None) -> bool:
        return self.engine.end_request(self._numbers.pop(number), ending_of_trace(stop))

    def hold(self, keys: Sequence[BlockKey]) -> Awaited[Lease]:
        return _FoundLease(self, self.engine.find(keys, hold=Hold.ALL, count=False))

    def release(self, held: Awaited[Lease]) -> None:
        assert isinstance(held, _FoundLease)
        self.engine.discard(held.answer)

    def begin_load(self, lease: Lease, blocks: Sequence[int], request_id: str) -> Awaited[Op | None]:
        return self.engine.begin_load(lease, blocks, request_id=request_id)

    def begin_store(self, keys: Sequence[BlockKey], blocks: Sequence[int], request_id: str) -> Awaited[StoreGrant]:
        return self.engine.begin_store(keys, blocks, request_id=request_id)

    def figures(self) -> dict[str, Any]:
        return {"slots": self._ranks.usable_slots}
