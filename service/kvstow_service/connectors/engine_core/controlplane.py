"""The control plane as the scheduler side sees it: the engine in this process, or the node service's engine.

A hit is host blocks that were found and are held so that a request can continue with them."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from kvstow.errors import LeaseError
from kvstow.hints import Hints
from kvstow.messages import Completion, Op
from kvstow.prefill import PrefillNews
from kvstow.results import Awaited, Given, Lease, Settled, StoreGrant
from kvstow.source import Source
from kvstow_service.connectors.engine_core.kvgroups import KVGroups, longest_end
from kvstow_service.connectors.engine_core.trackedrequests import Hit, TrackedRequest

if TYPE_CHECKING:
    from kvstow.control.engine import OffloadEngine


class Later(Enum):
    """The answer to a lookup has not arrived: ask again in the next step."""

    LATER = "later"


LATER = Later.LATER


class HitFinder(Protocol):
    """Finds and holds what `Loads` asks for. Used by the scheduler's thread."""

    def expect(self, tracked: TrackedRequest, end: int) -> None:
        """The request has arrived and will soon be looked up, up to the token `end` at most."""

    def find(self, tracked: TrackedRequest, local: int, end: int) -> Hit | Later | None:
        """The longest hit that begins at the token `local` and ends at `end` at most. The hit is held."""

    def is_valid(self, hit: Hit) -> bool:
        """Whether the hit is still held, as far as that is known."""

    def forget(self, tracked: TrackedRequest) -> None:
        """The answer for this request is no longer needed."""


class EmbeddedHits:
    """Finds hits in the engine of this process, which answers at once."""

    def __init__(self, engine: OffloadEngine, groups: KVGroups) -> None:
        self._engine, self._groups = engine, groups

    def expect(self, tracked: TrackedRequest, end: int) -> None:
        """Does nothing: a lookup takes microseconds."""

    def forget(self, tracked: TrackedRequest) -> None:
        """Does nothing: no answer is awaited."""

    def is_valid(self, hit: Hit) -> bool:
        return True

    def find(self, tracked: TrackedRequest, local: int, end: int) -> Hit | None:
        groups = self._groups
        if groups.is_plain:  # the leading run alone counts: find and hold it in one step
            tokens = groups.full[0].block_tokens
            keys = tracked.keys(groups.full[0], local // tokens, end // tokens)
            run = self._engine.acquire(keys, count=False)
            return Hit(local, local + len(run.slots) * tokens, run) if run.slots else None
        end = longest_end(self._engine, groups, tracked, local, end)
        keys = tracked.keys_of_places(groups, local, end) if end > local else []
        lease = self._engine.lease(keys) if keys else None  # None: a block was evicted meanwhile
        return None if lease is None else Hit(local, end, lease)


class ControlPlane(Protocol):
    """The calls that need no explanation are those of `OffloadEngine`. Used only by the scheduler's thread. An embedded
    engine answers at once; the node service answers after a later `step`.

    Only `wait` waits, for a fraction of a millisecond in each step, and `wait_for_slots`, for 2 ms in each step.
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
        vLLM learns of it: its step cannot wait for them."""

    def wait_for_slots(self, answer: Awaited[object]) -> bool:
        """Like `wait`, for such a load."""

    def hit_finder(self, groups: KVGroups) -> HitFinder: ...
    def release_lease(self, lease: Lease) -> None: ...
    def begin_load(
        self, lease: Lease, blocks: Sequence[int], *, first: int, request_id: str, choice: str
    ) -> Awaited[Op | None]:
        """The value is None if the lease has ended; nothing is held in that case."""

    def begin_store(self, keys: Sequence[bytes], blocks: Sequence[int], *, request_id: str) -> Awaited[StoreGrant]: ...
    def contains(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """Which of these keys need not be stored, as far as that is known at once. Stores skip other keys that are
        present, too."""

    def store_room(self) -> int: ...
    @property
    def source_key(self) -> bytes:
        """Of the digests of sources (`source_of`); empty while there is none."""

    def use(
        self,
        keys: Sequence[bytes],
        *,
        start: int,
        looked_up: tuple[int, int],
        hints: Hints | None,
        source: Source,
    ) -> object: ...
    def count_lookup(self, queried: int, hits: int, source: Source) -> None: ...
    def note_prefill(self, news: PrefillNews) -> None: ...
    def complete(self, rank: int, boot_id: str, completions: Sequence[Completion]) -> None: ...
    def take_settled(self) -> list[Settled]: ...
    @property
    def awaited_transfers(self) -> int: ...
    def reset(self) -> object:
        """What is in the pool or in flight now is never found again."""

    def bypass_loads(self) -> str:
        """Stop finding hits. Returns what ends the bypass, as a phrase."""

    def fail(self, reason: str) -> None:
        """The host has failed: find and store nothing from now on."""


class EmbeddedControl:
    """The engine in this process, which is thread-safe. The admin server's thread ticks it."""

    begins_loads_at_once = True

    def __init__(self, engine: OffloadEngine) -> None:
        self._engine = engine
        self.slot_bytes = engine.config.slot_bytes
        # What needs no answer is the engine's own.
        self.contains, self.store_room, self.use = engine.contains, engine.store_room, engine.use
        self.release_lease, self.count_lookup, self.fail = engine.release_lease, engine.count_lookup, engine.fail
        self.complete, self.take_settled = engine.complete, engine.take_settled
        self.note_prefill, self.source_key = engine.note_prefill, engine.pool.sources.key

    def step(self) -> None:
        """Does nothing: each call is answered at once."""

    def wait(self, answer: Awaited[object]) -> bool:
        return answer.done

    wait_for_slots = wait

    def hit_finder(self, groups: KVGroups) -> HitFinder:
        return EmbeddedHits(self._engine, groups)

    def begin_load(
        self, lease: Lease, blocks: Sequence[int], *, first: int, request_id: str, choice: str
    ) -> Given[Op | None]:
        try:
            return Given(self._engine.begin_load(lease, blocks, first=first, request_id=request_id, choice=choice))
        except LeaseError as error:  # a rank has lost its memory since the lookup
            self.release_lease(lease)
            return Given(None, str(error))

    def begin_store(self, keys: Sequence[bytes], blocks: Sequence[int], *, request_id: str) -> Given[StoreGrant]:
        return Given(self._engine.begin_store(keys, blocks, request_id=request_id))

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
