"""What a replay asks of the control plane: embedded in its process, or in the node service."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvstow.control.engine import OffloadEngine
from kvstow.errors import LeaseError
from kvstow.keys import BlockKey
from kvstow.messages import Completion, Op
from kvstow.results import Awaited, Given, Lease, Settled, StoreGrant


class PoolFigures(NamedTuple):
    """What is known of the pool; None where the node service alone knows it."""

    slots: int
    policy: str | None = None
    evicted_blocks: int | None = None


class Offload(Protocol):
    """Used by one thread. Answers come in the order of the questions, at once or after a later `step`."""

    def step(self) -> None:
        """Called once a step of the replay."""

    def find(self, keys: Sequence[BlockKey]) -> Awaited[Lease]:
        """Look up the leading keys that are present, and keep them from eviction. The lease may be empty."""

    def hold(self, keys: Sequence[BlockKey]) -> Awaited[Lease]:
        """Keep exactly these keys from eviction; the lease is empty if one of them is absent."""

    def release(self, held: Awaited[Lease]) -> None:
        """End a lease, as soon as it is there. Idempotent, also after a load has used it."""

    def begin_load(self, lease: Lease, blocks: Sequence[int], request_id: str) -> Awaited[Op | None]:
        """Load the keys of the lease, which it uses up. None if the lease was broken in between."""

    def begin_store(self, keys: Sequence[BlockKey], blocks: Sequence[int], request_id: str) -> Awaited[StoreGrant]: ...

    def use(self, keys: Sequence[BlockKey]) -> None:
        """A request has used these blocks, its whole prompt; see `Session.use`."""

    def note_prefill(self, tokens: int, seconds: float) -> None:
        """Report how long the model took for how many tokens: fetches from a fleet tier are compared with that."""

    def complete(self, rank: int, boot_id: str, completions: Sequence[Completion]) -> None: ...

    def take_settled(self) -> list[Settled]: ...

    def figures(self) -> PoolFigures: ...


class EmbeddedOffload:
    """The engine in this process."""

    def __init__(self, engine: OffloadEngine) -> None:
        self._engine = engine
        self._evicted_before = engine.stats().evicted_for_capacity

    def step(self) -> None:
        """The engine's host ticks it."""

    def find(self, keys: Sequence[BlockKey]) -> Awaited[Lease]:
        return Given(self._engine.acquire(keys))

    def hold(self, keys: Sequence[BlockKey]) -> Given[Lease]:
        return Given(self._engine.lease(keys) or Lease(0, (), ()))

    def release(self, held: Awaited[Lease]) -> None:
        self._engine.release_lease(held.value)

    def begin_load(self, lease: Lease, blocks: Sequence[int], request_id: str) -> Given[Op | None]:
        try:
            return Given(self._engine.begin_load(lease, blocks, request_id=request_id))
        except LeaseError:
            self._engine.release_lease(lease)
            return Given(None)

    def begin_store(self, keys: Sequence[BlockKey], blocks: Sequence[int], request_id: str) -> Given[StoreGrant]:
        return Given(self._engine.begin_store(keys, blocks, request_id=request_id))

    def use(self, keys: Sequence[BlockKey]) -> None:
        self._engine.use(keys)

    def note_prefill(self, tokens: int, seconds: float) -> None:
        """It has no tier."""

    def complete(self, rank: int, boot_id: str, completions: Sequence[Completion]) -> None:
        self._engine.complete(rank, boot_id, completions)

    def take_settled(self) -> list[Settled]:
        return self._engine.take_settled()

    def figures(self) -> PoolFigures:
        stats = self._engine.stats()
        evicted = stats.evicted_for_capacity - self._evicted_before
        return PoolFigures(stats.pool.capacity_slots, stats.pool.policy, evicted)
