"""The control plane as the scheduler side sees it: the engine in this process, or the node service's engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from kvstow.errors import LeaseError
from kvstow.messages import Completion, Op
from kvstow.results import Awaited, Given, Lease, Settled, StoreGrant
from kvstow_service.connectors.engine_core.hits import EmbeddedHits, HitFinder
from kvstow_service.connectors.engine_core.kvgroups import KVGroups

if TYPE_CHECKING:
    from kvstow.control.engine import OffloadEngine


class ControlPlane(Protocol):
    """Used only by the scheduler's thread. An embedded engine answers at once; the node service answers after a later
    `step`.

    Only `wait` waits, for a fraction of a millisecond in each step, and `wait_for_slots`, for 2 ms at most.
    """

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot on the rank where they are largest."""

    def step(self) -> None:
        """Called once in each step, before the step is planned."""

    def wait(self, answer: Awaited[object]) -> bool:
        """Wait for an answer, as long as this step may wait. Returns whether it has arrived."""

    @property
    def begins_loads_at_once(self) -> bool:
        """Whether `begin_load` answers before it returns. Otherwise the slots of a load by layer are asked for before
        vLLM is told of it: its step cannot wait for them."""

    def wait_for_slots(self, answer: Awaited[Op | None]) -> bool:
        """Like `wait`, for such a load."""

    def hit_finder(self, groups: KVGroups) -> HitFinder: ...

    # Loads and stores: see `OffloadEngine`.

    def release_lease(self, lease: Lease) -> None: ...

    def begin_load(
        self, lease: Lease, blocks: Sequence[int], *, first: int, request_id: str, choice: str
    ) -> Awaited[Op | None]:
        """The value is None if the lease has ended; nothing is held in that case."""

    def begin_store(self, keys: Sequence[bytes], blocks: Sequence[int], *, request_id: str) -> Awaited[StoreGrant]: ...

    def present(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """Which of these keys need not be stored, as far as that is known at once. Stores skip other keys that are
        present, too."""

    def store_room(self) -> int: ...

    def refresh(self, keys: Sequence[bytes]) -> None: ...

    def count_lookup(self, queried: int, hits: int) -> None: ...

    def complete(self, rank: int, boot_id: str, completions: Iterable[Completion]) -> None: ...

    def take_settled(self) -> list[Settled]: ...

    @property
    def awaited_transfers(self) -> int: ...

    # All blocks.

    def reset(self) -> None:
        """What is in the pool or in flight now is never found again."""

    def bypass_loads(self) -> str:
        """Stop finding hits. Returns what ends the bypass, as a phrase."""

    def fail(self, reason: str) -> None:
        """The host has failed: find and store nothing from now on."""


class EmbeddedControl:
    """The engine in this process, which is thread-safe."""

    def __init__(self, engine: OffloadEngine) -> None:
        self._engine = engine

    @property
    def slot_bytes(self) -> int:
        return self._engine.config.slot_bytes

    def step(self) -> None:
        """The admin server's thread ticks it."""

    def wait(self, answer: Awaited[object]) -> bool:
        return answer.done

    begins_loads_at_once = True
    wait_for_slots = wait

    def hit_finder(self, groups: KVGroups) -> HitFinder:
        return EmbeddedHits(self._engine, groups)

    def release_lease(self, lease: Lease) -> None:
        self._engine.release_lease(lease)

    def begin_load(
        self, lease: Lease, blocks: Sequence[int], *, first: int, request_id: str, choice: str
    ) -> Given[Op | None]:
        try:
            return Given(self._engine.begin_load(lease, blocks, first=first, request_id=request_id, choice=choice))
        except LeaseError as error:  # a rank has lost its memory since the lookup
            self._engine.release_lease(lease)
            return Given(None, str(error))

    def begin_store(self, keys: Sequence[bytes], blocks: Sequence[int], *, request_id: str) -> Given[StoreGrant]:
        return Given(self._engine.begin_store(keys, blocks, request_id=request_id))

    def present(self, keys: Sequence[bytes]) -> Sequence[bool]:
        return self._engine.contains(keys)

    def store_room(self) -> int:
        return self._engine.store_room()

    def refresh(self, keys: Sequence[bytes]) -> None:
        self._engine.refresh(keys)

    def count_lookup(self, queried: int, hits: int) -> None:
        self._engine.count_lookup(queried, hits)

    def take_settled(self) -> list[Settled]:
        return self._engine.take_settled()

    def complete(self, rank: int, boot_id: str, completions: Iterable[Completion]) -> None:
        self._engine.complete(rank, boot_id, tuple(completions))

    @property
    def awaited_transfers(self) -> int:
        return self._engine.awaited_transfers

    def reset(self) -> None:
        self._engine.admin.purge(everything=True).run()

    def bypass_loads(self) -> str:
        bypass = self._engine.admin.bypass
        if not bypass.load:
            self._engine.admin.set_bypass(load=True, store=bypass.store, ttl_seconds=None)
        return "`kvstow bypass --off`"

    def fail(self, reason: str) -> None:
        self._engine.fail(reason)
