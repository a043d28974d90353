"""The control plane as the scheduler side sees it: the engine in this process, which answers at once, or the node
service's engine, which answers after a later `step`. Only the scheduler's thread uses either. No call raises because
the service is absent or slow: lookups then miss, and stores are refused.

A hit is a number of host blocks that were found and are held, so that a request can continue with them. The service is
asked for it when a request arrives, and the answer is read when vLLM asks."""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from kvstow.attach.calls import Hold, Lookup
from kvstow.attach.connection import Answer
from kvstow.attach.engine import AttachedEngine, Hits
from kvstow.attach.hello import NO_HOLD, GateHold, SessionTicket, number_of
from kvstow.descriptions import BlockDescription
from kvstow.endings import NO_ENDING, Ending
from kvstow.errors import LeaseError
from kvstow.hints import Hints
from kvstow.messages import Completion, Op
from kvstow.prefill import PrefillNews
from kvstow.results import Awaited, Given, Lease, Settled, StoreGrant
from kvstow_service.connectors.engine_core.kvgroups import KeyPresence, KVGroups, longest_end
from kvstow_service.connectors.engine_core.trackedrequests import Hit, TrackedRequest

if TYPE_CHECKING:
    from kvstow.control.engine import OffloadEngine

logger = logging.getLogger("kvstow.vllm")


class Later(Enum):
    """Says that the answer to a lookup has not arrived, and that vLLM has to ask again in the next step."""

    LATER = "later"


LATER = Later.LATER


# -- the engine in this process -----------------------------------------------------------------------------


class EmbeddedHits:
    """Finds hits in the engine of this process. A lookup takes microseconds, so none is made ahead."""

    def __init__(self, engine: OffloadEngine, groups: KVGroups) -> None:
        self._engine, self._groups = engine, groups

    def expect(self, tracked: TrackedRequest, end: int) -> None: ...

    def forget(self, tracked: TrackedRequest) -> None: ...

    def is_valid(self, hit: Hit) -> bool:
        return True

    def find(self, tracked: TrackedRequest, local: int, end: int) -> Hit | None:
        groups = self._groups
        if groups.is_plain:  # only the leading run counts, so find and hold it in one call
            tokens = groups.full[0].block_tokens
            keys = tracked.keys(groups.full[0], local // tokens, end // tokens)
            run = self._engine.acquire(keys, count=False)
            return Hit(local, local + len(run.slots) * tokens, run) if run.slots else None
        end = longest_end(self._engine, groups, tracked.keys, local, end)
        keys = tracked.keys_of_places(groups, local, end) if end > local else []
        lease = self._engine.lease(keys) if keys else None  # None: a block was evicted meanwhile
        return None if lease is None else Hit(local, end, lease)


class EmbeddedControl:
    """Uses the engine in this process, which is thread-safe. The admin server's thread makes its periodic calls."""

    begins_loads_at_once = True
    gates_are_held = True
    """Always True: there are no sessions, so no rank refuses an op."""
    store_below = ""

    def __init__(self, engine: OffloadEngine) -> None:
        self._engine = engine
        self.slot_bytes = engine.config.slot_bytes

    def step(self) -> None: ...

    def admit(
        self, keys: Sequence[bytes], *, looked_up: tuple[int, int], hints: Hints | None = None, salt: bytes = b""
    ) -> int:
        return self._engine.admit(keys, looked_up=looked_up, hints=hints, salt=salt)

    def end_request(
        self,
        number: int,
        ending: Ending = NO_ENDING,
        *,
        more: Sequence[bytes] = (),
        others: Sequence[bytes] = (),
    ) -> bool:
        """End a request. Returns whether the pool lacks some of its blocks."""
        self._engine.incomplete.clear()  # the return value reports it
        return self._engine.end_request(number, ending, more=more, others=others).is_incomplete

    def take_late(self) -> list[int]:
        """Always empty, because `end_request` returns at once what there is to know."""
        return []

    def wait(self, answer: Awaited[object]) -> bool:
        return answer.done

    def wait_for_slots(self, answer: Awaited[object]) -> bool:
        return answer.done

    def contains(self, keys: Sequence[bytes]) -> Sequence[bool]:
        return self._engine.contains(keys)

    def count_lookup(self, queried: int, hits: int) -> None:
        self._engine.count_lookup(queried, hits)

    def release_lease(self, lease: Lease) -> None:
        self._engine.release_lease(lease)

    def hit_finder(self, groups: KVGroups) -> EmbeddedHits:
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

    def describe_store(self, op: Op, blocks: Sequence[BlockDescription | None]) -> None:
        """Does nothing: no other engine reads this engine's events."""

    def store_room(self) -> int:
        return self._engine.store_room()

    def complete(self, rank: int, boot_id: str, completions: Sequence[Completion]) -> None:
        self._engine.complete(rank, boot_id, completions)

    def take_settled(self) -> list[Settled]:
        return self._engine.take_settled()

    def note_prefill(self, news: PrefillNews) -> None:
        self._engine.note_prefill(news)

    def fail(self, reason: str) -> None:
        self._engine.fail(reason)

    @property
    def awaited_transfers(self) -> int:
        return self._engine.awaited_transfers

    def reset(self, reason: str = "") -> None:
        self._engine.admin.purge(everything=True).run()

    def bypass_loads(self) -> str:
        """Make lookups miss from now on. Returns what ends that, as a phrase."""
        bypass = self._engine.admin.bypass
        if not bypass.load:
            self._engine.admin.set_bypass(load=True, store=bypass.store, ttl_seconds=None)
        return "`kvstow bypass --off`"


# -- the node service ---------------------------------------------------------------------------------------

State = Literal["starting", "no_service", "refused", "no_answer", "no_memory", "attached", "failed"]
"""`no_memory`: the session has begun, but some rank has not registered any of its memory yet."""


class AttachState(NamedTuple):
    """The state of the connection to the service. `refusal`: the service's word for the reason why it has refused the
    engine. `sharing`: "yes", or a word for the reason why other engines of its model do not share its blocks; "" while
    it is not attached."""

    state: State
    refusal: str = ""
    sharing: str = ""


def sharing_word(sharing_off: Sequence[str], *, was_reset: bool) -> str:
    """The word for `AttachState.sharing`. `sharing_off`: sentences of the service's welcome. The word is `differs` if
    the engine shares only with engines of its own identity, and was the first of these while others of its model were
    attached."""
    for sentence in sharing_off:
        if (found := re.match(r"[a-z]+(_[a-z]+)+(?=: )", sentence)) is not None:  # an engine's own reason
            return found[0]
    if was_reset:
        return "cache_was_reset"
    return "differs" if any(sharing_off) else "yes"


MOST_AHEAD = 64
"""How many requests may be looked up before vLLM asks about them. The blocks that are found for them are held."""
PATIENCE_SECONDS = 0.25
"""The limit, in seconds, after which a lookup without an answer is a miss."""
LONGEST_PATIENCE_SECONDS = 5.0
"""The same limit if the service has sent `Pending`: it waits up to 2 s for the fleet tier, and 1 s for memory to be
registered."""
_WORD = re.compile(r"[a-z_]{1,40}")
"""The form of a reason of a refusal that may be a label of a metric."""
_MOST_KEYS = 100_000
"""How many keys one lookup may have. A frame has room for more."""


class _OpenLookup(NamedTuple):
    """A lookup of a request's tokens `start` to `end`. `keys`: the keys that are looked up. `is_last`: whether they are
    exactly those of a hit from `start` to `end`, so that the answer holds all of them or nothing. `fetched`: the tokens
    of blocks that the fleet tier has brought before."""

    start: int
    end: int
    keys: Sequence[bytes]
    is_last: bool
    at: float
    answer: Answer[Hits]
    fetched: tuple[range, ...] = ()

    def covers(self, local: int, end: int) -> bool:
        """Whether the answer tells what can be loaded from `local` on."""
        return self.start <= local and (local < self.end if self.is_last else end <= self.end)


class AttachedHits:
    """Finds hits in the node service's pool, and waits for answers no longer than a step may wait.

    If there is one group, which attends to all tokens, one lookup tells which blocks are present, and holds them.
    Otherwise the first lookup tells which blocks are present, and a second one holds those that are needed.
    """

    def __init__(self, control: AttachedControl, groups: KVGroups, clock: Callable[[], float]) -> None:
        self._control, self._groups, self._clock = control, groups, clock
        self._lookups: dict[TrackedRequest, _OpenLookup] = {}

    def expect(self, tracked: TrackedRequest, end: int) -> None:
        if self._control.finds_hits and tracked not in self._lookups and len(self._lookups) < MOST_AHEAD:
            self._ask(tracked, 0, end, Hold.PRESENT)

    def find(self, tracked: TrackedRequest, local: int, end: int) -> Hit | Later | None:
        lookup = self._lookups.get(tracked)
        if lookup is None or not lookup.covers(local, end):
            self.forget(tracked)
            if not self._control.finds_hits:
                return None
            lookup = self._ask(tracked, local, end, Hold.LEADING)
        while lookup is not None:
            if not self._control.wait(lookup.answer):
                patience = LONGEST_PATIENCE_SECONDS if lookup.answer.is_pending else PATIENCE_SECONDS
                if self._control.finds_hits and self._clock() - lookup.at < patience:
                    return LATER
                self.forget(tracked)
                return None
            del self._lookups[tracked]
            if lookup.is_last or self._groups.is_plain:
                return self._take(tracked, lookup, local, end)
            lookup = self._ask_for_hit(tracked, lookup, local, end)
        return None

    def is_valid(self, hit: Hit) -> bool:
        return self._control.is_held(hit.lease)

    def forget(self, tracked: TrackedRequest) -> None:
        lookup = self._lookups.pop(tracked, None)
        if lookup is not None:
            self._control.discard(lookup.answer)

    def _ask(self, tracked: TrackedRequest, start: int, end: int, hold: Hold) -> _OpenLookup | None:
        keys: list[bytes] = []
        for group in self._groups.groups:
            keys += tracked.keys(group, start // group.block_tokens, end // group.block_tokens)
        if self._groups.is_plain:
            keys = keys[:_MOST_KEYS]
        if not 0 < len(keys) <= _MOST_KEYS:
            return None
        if self._groups.is_plain:
            answer = self._control.find(keys, hold=hold, count=False)
        else:
            answer = self._control.find_prompt(keys)
        self._lookups[tracked] = lookup = _OpenLookup(start, end, keys, False, self._clock(), answer)
        return lookup

    def _ask_for_hit(self, tracked: TrackedRequest, asked: _OpenLookup, local: int, end: int) -> _OpenLookup | None:
        """Ask for the blocks of the longest hit, now that it is known which blocks are present."""
        runs = asked.answer.value.runs
        found = {key for first, length in runs for key in asked.keys[first : first + length]}
        present = KeyPresence(lambda keys: [key in found for key in keys])
        end = longest_end(present, self._groups, tracked.keys, local, end)
        keys = tracked.keys_of_places(self._groups, local, end) if end > local else ()
        if not keys:
            return None
        answer, fetched = self._control.find(keys, hold=Hold.ALL, count=False), self._fetched(tracked, asked)
        self._lookups[tracked] = lookup = _OpenLookup(local, end, keys, True, self._clock(), answer, fetched)
        return lookup

    def _take(self, tracked: TrackedRequest, lookup: _OpenLookup, local: int, end: int) -> Hit | None:
        lease, runs, _ = lookup.answer.value
        if not lease.lease_id or not self._control.is_held(lease):
            return None
        if lookup.is_last:
            return Hit(lookup.start, lookup.end, lease, fetched=lookup.fetched)
        tokens, before = self._groups.full[0].block_tokens, 0  # the lease has the keys of all runs
        number = (local - lookup.start) // tokens
        for first, length in runs:
            if first <= number < first + length:
                end = min(end, local + (first + length - number) * tokens)
                return Hit(local, end, lease, before + number - first, self._fetched(tracked, lookup))
            before += length
        self._control.release_lease(lease)
        return None

    def _fetched(self, tracked: TrackedRequest, lookup: _OpenLookup) -> tuple[range, ...]:
        """The tokens of the blocks that the fleet tier has brought, by an answer to `_ask`."""
        runs, found, at = lookup.answer.value.fetched, list[range](), 0
        for group in self._groups.groups if runs else ():
            size, number = group.block_tokens, lookup.start // group.block_tokens
            count = len(tracked.keys(group, number, lookup.end // size))
            for first, length in runs:
                begin, end = max(first, at), min(first + length, at + count)
                if begin < end:
                    found.append(range((number + begin - at) * size, (number + end - at) * size))
            at += count
        return tuple(found)


LAYER_WAIT_SECONDS = 0.002
"""How many seconds all loads by layer of one step together may wait for their slots. A load before the step takes
longer than that."""
STEP_WAIT_SECONDS = 0.0003
"""How many seconds all lookups and loads of one step together may wait for answers."""
SLOW_SECONDS = 0.25
"""If the service has not answered for this time, in seconds, lookups miss and nothing is stored until it answers."""
SILENT_SECONDS = 5.0
"""If the service has not answered for this time, in seconds, its session ends, so that GPU blocks and requests stop
waiting."""


class GateHolds:
    """A hold makes the ranks accept the ops of a session until no more come, even if the session ends. vLLM computes
    with a load by layer in the step for which it was promised, and most of its configurations cannot take that back. So
    a load by layer is promised only while every rank has said that it keeps the hold. Used by the scheduler's thread.

    A hold begins when the engine has a session and requests. When either of them has gone, the hold ends with the first
    step that has no op of the session. An engine without requests promises nothing, so its ranks need no hold.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks, self._last_number = num_ranks, 0
        self._current = NO_HOLD
        self._kept_by: set[int] = set()

    @property
    def is_held(self) -> bool:
        """Whether every rank keeps the present hold."""
        return self._current != NO_HOLD and len(self._kept_by) == self._num_ranks

    @property
    def is_begun(self) -> bool:
        """Whether the ranks were asked for a hold that has not ended."""
        return self._current != NO_HOLD

    def note(self, rank: int, number: int) -> None:
        """Note that the rank keeps the hold with this number, or none if it is 0. A late message about an earlier hold
        does not count for the present one."""
        if number and number == self._current.number:
            self._kept_by.add(rank)
        else:
            self._kept_by.discard(rank)

    def next(self, ticket: SessionTicket | None, ops: Iterable[Op], *, has_requests: bool) -> GateHold:
        """The hold to send to the ranks with a step that has these `ops` and was planned in the session of `ticket`."""
        session = 0 if ticket is None or not has_requests else ticket.number
        if session == self._current.session or any(number_of(op.op_id) == self._current.session for op in ops):
            return self._current
        self._kept_by.clear()
        self._current = NO_HOLD
        if session:
            self._last_number += 1
            self._current = GateHold(session, self._last_number)
        return self._current


class AttachedControl(AttachedEngine):
    """An `AttachedEngine` that notices if the service takes calls but does not answer."""

    begins_loads_at_once = False
    """False: the slots of a load by layer are requested before vLLM learns of the load, because its step cannot wait
    for them."""

    def __init__(
        self, path: Path, slot_bytes: int, clock: Callable[[], float] = time.monotonic, **options: Any
    ) -> None:
        """`slot_bytes`: bytes of a slot on the rank where slots are largest. For the others see `AttachedEngine`."""
        super().__init__(path, step_wait=STEP_WAIT_SECONDS, clock=clock, **options)
        self.slot_bytes = slot_bytes
        self._this_step = self._previous_step = float("-inf")
        """When these steps have begun."""
        self._resets = 0
        self._reset_reason = ""
        self._layer_wait_left = LAYER_WAIT_SECONDS  # of this step
        self._bypasses_loads = self._is_slow = False
        self._failure: str | None = None
        self.holds = GateHolds(self._ops.num_ranks)
        self.refused_stores: Counter[str] = Counter()
        """How many blocks were offered and not stored, by outcome."""

    @property
    def state(self) -> AttachState:
        """The state as words. `problem` gives it as a sentence."""
        if self._failure is not None:
            return AttachState("failed")
        if self.is_attached:
            sharing = sharing_word((self._reset_reason, *self.sharing_off), was_reset=self._resets > 0)
            return AttachState("no_answer" if self._is_slow else "attached", sharing=sharing)
        if super().problem is None:
            return AttachState("starting")
        if self.refusal is not None:
            return AttachState("refused", self.refusal if _WORD.fullmatch(self.refusal) else "other")
        return AttachState("no_service")

    @property
    def problem(self) -> str | None:
        """Why there is no host cache, as a sentence; None while there is one."""
        if self._failure is not None:
            return f"KVStow has failed: {self._failure}"
        if self._is_slow:
            return "the node service does not answer"
        return None if self.is_attached else super().problem or "not attached yet"

    # -- steps ----------------------------------------------------------------------------------------------

    def step(self) -> None:
        self._previous_step, self._this_step = self._this_step, self._clock()
        self._layer_wait_left = LAYER_WAIT_SECONDS
        if self._failure is not None:
            return
        super().step()
        self._watch()

    def _watch(self) -> None:
        oldest, silent = self._connection.oldest_call, 0.0
        if oldest is not None and oldest.sent_at < self._previous_step:  # a step may take seconds
            silent = self._clock() - oldest.sent_at
        is_slow = silent > SLOW_SECONDS
        if is_slow and not self._is_slow:
            logger.warning("the node service does not answer: lookups miss and nothing is stored until it does")
        elif self._is_slow and not is_slow and self.is_attached:
            logger.info("the node service answers again")
        self._is_slow = is_slow
        if silent > SILENT_SECONDS:
            self.disconnect(f"the service has not answered for {silent:.0f} seconds")

    def wait(self, *answers: Awaited[object], seconds: float | None = None) -> bool:
        return super().wait(*[each for each in answers if isinstance(each, Answer)], seconds=seconds)

    def wait_for_slots(self, answer: Awaited[object]) -> bool:
        """Wait for the slots of a load by layer. Returns whether the answer has arrived. The service may have closed
        the connection right after it, so all that has arrived is read, and the caller checks `is_held`, which tells
        whether the session still lives."""
        if not answer.done:
            begun = self._clock()
            self.wait(answer, seconds=0.0 if self._is_slow else self._layer_wait_left)
            self._layer_wait_left = max(0.0, self._layer_wait_left - (self._clock() - begun))
        if answer.done:
            self._connection.drain()
        return answer.done

    @property
    def gates_are_held(self) -> bool:
        """Whether every rank would accept a load by layer that is promised now."""
        return self.holds.is_held

    # -- lookups --------------------------------------------------------------------------------------------

    def hit_finder(self, groups: KVGroups) -> AttachedHits:
        return AttachedHits(self, groups, self._clock)

    @property
    def finds_hits(self) -> bool:
        return self.is_attached and not (self._bypasses_loads or self._is_slow or self._failure is not None)

    def is_held(self, lease: Lease) -> bool:
        return self._is_of_session(lease.lease_id)

    def present(self, keys: Sequence[bytes]) -> Answer[list[bool]]:
        """Ask which of the keys are present. This holds no blocks."""

        def read(answer: Answer[Any]) -> list[bool]:
            there = [False] * len(keys)
            for first, length in self._read_found(len(keys), answer).runs:
                there[first : first + length] = [True] * length
            return there

        return self._ask(Lookup(keys, Hold.NOTHING, counted=False), read, [])

    @property
    def life(self) -> tuple[int, int]:
        """Names the period in which stored blocks can be found: the session's number, or 0 without a session, and the
        number of resets so far."""
        return 0 if self.ticket is None else self.ticket.number, self._resets

    # -- stores ---------------------------------------------------------------------------------------------

    def contains(self, keys: Sequence[bytes]) -> Sequence[bool]:
        return [False] * len(keys)

    def store_room(self) -> int:
        return 0 if self._failure is not None or self._is_slow else super().store_room()

    def begin_store(self, keys: Sequence[bytes], blocks: Sequence[int], *, request_id: str = "") -> Answer[StoreGrant]:
        if self.is_attached and not self._is_slow:
            return super().begin_store(keys, blocks, request_id=request_id)
        self.refused_stores["not_attached"] += len(keys)
        return Answer.given(StoreGrant(None, (), {}, range(len(keys))))

    def _read_store(self, blocks: tuple[int, ...], request_id: str, answer: Answer[Any]) -> StoreGrant:
        grant = super()._read_store(blocks, request_id, answer)
        self.refused_stores.update(grant.outcomes)
        return grant

    # -- all blocks -----------------------------------------------------------------------------------------

    def reset(self, reason: str = "") -> Answer[str]:
        self._resets += 1
        self._reset_reason = reason
        return super().reset(reason) if self._failure is None else Answer.given("")

    def bypass_loads(self) -> str:
        self._bypasses_loads = True
        return "this engine restarts"

    def fail(self, reason: str) -> None:
        self._failure = self._failure or reason
        self.close()


ControlPlane = EmbeddedControl | AttachedControl
