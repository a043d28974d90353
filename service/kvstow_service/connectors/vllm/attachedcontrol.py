"""The control plane of an engine that is attached to the node service: hits in the service's pool, which are asked
for when a request arrives and taken when vLLM asks, loads and stores, and the state of the session."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeVar

from kvstow.attach.calls import Hold
from kvstow.attach.connection import Answer, Call
from kvstow.attach.engine import AttachedEngine, Hits
from kvstow.attach.hello import TRANSIENT_REFUSALS
from kvstow.attach.wire import Message
from kvstow.results import Awaited, KeyRun, Lease, StoreGrant
from kvstow_service.connectors.engine_core.controlplane import LATER, Later
from kvstow_service.connectors.engine_core.kvgroups import KeyPresence, KVGroups, longest_end
from kvstow_service.connectors.engine_core.trackedrequests import Hit, TrackedRequest

State = Literal["starting", "no_service", "refused", "no_answer", "no_memory", "attached", "failed"]
"""`no_memory`: the session has begun, but some rank has not registered memory of it yet."""

REFUSALS: Final = TRANSIENT_REFUSALS | {
    "hello_timeout",
    "identity",
    "internal",
    "malformed",
    "memory",
    "no_pidfd",
    "peer_ended",
    "sharing_off",
    "uid",
    "version",
}
"""Why the service refuses engines at the hello. Any other reason counts as `other`."""

_UNSHARED: Final = (
    "files_changed",
    "files_unknown",
    "hashes_not_reproducible",
    "kv_scales_not_fixed",
    "lora_names_not_unique",
    "revision_moved",
    "weights_not_fixed",
    "weights_unknown",
)


class AttachState(NamedTuple):
    """`refusal`: why the service has refused the engine, "" if it has not. `sharing`: "yes", or why others of its model
    do not share its blocks; "" while it is not attached."""

    state: State
    refusal: str = ""
    sharing: str = ""


def sharing_word(sharing_off: Sequence[str], *, was_reset: bool) -> str:
    """`sharing_off`: sentences of the welcome. The word is `differs` if the engine shares only with engines of its own
    identity, and was the first of them while others of its model were attached."""
    for sentence in sharing_off:
        word = sentence.partition(":")[0]
        if word in _UNSHARED:
            return word
    if was_reset:
        return "cache_was_reset"
    return "differs" if sharing_off else "yes"


MOST_AHEAD = 64
"""How many requests are looked up before vLLM asks about them. What is found for them is held."""
PATIENCE_SECONDS = 0.25
"""A lookup that has no answer after this time is a miss."""
LONGEST_PATIENCE_SECONDS = 5.0
"""The same limit if the service has sent `Pending`: for the fleet tier up to 2 s, for memory to be registered 1
s."""
_MOST_KEYS = 100_000  # of one lookup; a frame has room for more


class _Question(NamedTuple):
    """A lookup of a request's tokens `start` to `end`. `keys`: the keys that were asked for. `is_last`: it asks for
    exactly the blocks of a hit from `start` to `end`, and the answer holds all of them or nothing. `fetched`: the
    tokens of blocks that the fleet tier has brought before."""

    start: int
    end: int
    keys: Sequence[bytes]
    is_last: bool
    at: float
    answer: Answer[Hits]
    fetched: tuple[range, ...] = ()


class AttachedHits:
    """A `HitFinder` that waits for answers no longer than its step may.

    With one group that attends to everything, one lookup says which blocks are present, and holds them. Otherwise the
    first lookup says which blocks are present, and a second one holds those that are needed.
    """

    def __init__(self, control: AttachedControl, groups: KVGroups, clock: Callable[[], float]) -> None:
        self._control, self._groups, self._clock = control, groups, clock
        self._questions: dict[TrackedRequest, _Question] = {}

    def expect(self, tracked: TrackedRequest, end: int) -> None:
        if self._control.finds_hits and tracked not in self._questions and len(self._questions) < MOST_AHEAD:
            self._ask(tracked, 0, end, Hold.PRESENT)

    def find(self, tracked: TrackedRequest, local: int, end: int) -> Hit | Later | None:
        question = self._questions.get(tracked)
        if question is None or not _covers(question, local, end):
            self.forget(tracked)
            if not self._control.finds_hits:
                return None
            question = self._ask(tracked, local, end, Hold.LEADING)
        while question is not None:
            if not self._control.wait(question.answer):
                patience = LONGEST_PATIENCE_SECONDS if question.answer.is_pending else PATIENCE_SECONDS
                if self._control.finds_hits and self._clock() - question.at < patience:
                    return LATER
                self.forget(tracked)
                return None
            del self._questions[tracked]
            if question.is_last or self._groups.is_plain:
                return self._take(tracked, question, local, end)
            question = self._ask_for_hit(tracked, question, local, end)
        return None

    def is_valid(self, hit: Hit) -> bool:
        return self._control.is_held(hit.lease)

    def forget(self, tracked: TrackedRequest) -> None:
        question = self._questions.pop(tracked, None)
        if question is not None:
            self._control.discard(question.answer)

    def _ask(self, tracked: TrackedRequest, start: int, end: int, hold: Hold) -> _Question | None:
        keys = [
            key
            for group in self._groups.groups
            for key in tracked.keys(group, start // group.block_tokens, end // group.block_tokens)
        ]
        if self._groups.is_plain:
            keys = keys[:_MOST_KEYS]
        return self._put(tracked, start, end, keys, hold) if 0 < len(keys) <= _MOST_KEYS else None

    def _ask_for_hit(self, tracked: TrackedRequest, asked: _Question, local: int, end: int) -> _Question | None:
        """Ask for the blocks of the longest hit, now that it is known which blocks are present."""
        runs = asked.answer.value.runs
        found = {key for first, length in runs for key in asked.keys[first : first + length]}
        present = KeyPresence(lambda keys: [key in found for key in keys])
        end = longest_end(present, self._groups, tracked, local, end)
        keys = tracked.keys_of_places(self._groups, local, end) if end > local else ()
        return self._put(tracked, local, end, keys, Hold.ALL, self._fetched(tracked, asked)) if keys else None

    def _put(
        self,
        tracked: TrackedRequest,
        start: int,
        end: int,
        keys: Sequence[bytes],
        hold: Hold,
        fetched: tuple[range, ...] = (),
    ) -> _Question:
        is_prompt = not self._groups.is_plain and hold != Hold.ALL
        answer = self._control.find_prompt(keys) if is_prompt else self._control.find(keys, hold=hold, count=False)
        question = _Question(start, end, keys, hold == Hold.ALL, self._clock(), answer, fetched)
        self._questions[tracked] = question
        return question

    def _take(self, tracked: TrackedRequest, question: _Question, local: int, end: int) -> Hit | None:
        lease, runs, _ = question.answer.value
        if not lease.lease_id or not self._control.is_held(lease):
            return None
        if question.is_last:
            return Hit(question.start, question.end, lease, fetched=question.fetched)
        tokens = self._groups.full[0].block_tokens
        hit = _hit_at((local - question.start) // tokens, runs)
        if hit is None:
            self._control.release_lease(lease)
            return None
        first, length = hit
        return Hit(local, min(end, local + length * tokens), lease, first, self._fetched(tracked, question))

    def _fetched(self, tracked: TrackedRequest, question: _Question) -> tuple[range, ...]:
        """The tokens of the blocks that the fleet tier has brought, of an answer to `_ask`."""
        runs, found, at = question.answer.value.fetched, list[range](), 0
        for group in self._groups.groups if runs else ():
            size, number = group.block_tokens, question.start // group.block_tokens
            count = len(tracked.keys(group, number, question.end // size))
            for first, length in runs:
                begin, end = max(first, at), min(first + length, at + count)
                if begin < end:
                    found.append(range((number + begin - at) * size, (number + end - at) * size))
            at += count
        return tuple(found)


def _covers(question: _Question, local: int, end: int) -> bool:
    """Whether the answer says what can be loaded from `local` on."""
    if question.is_last:
        return question.start <= local < question.end
    return question.start <= local and end <= question.end


def _hit_at(number: int, runs: Sequence[KeyRun]) -> tuple[int, int] | None:
    """The position of key `number` in the lease, which holds the keys of all runs, and how many keys its run has from
    there."""
    before = 0
    for first, length in runs:
        if first <= number < first + length:
            return before + number - first, first + length - number
        before += length
    return None


LAYER_WAIT_SECONDS = 0.002
"""How long all loads by layer of one step together may wait for their slots: a load before the step takes longer than
that."""
STEP_WAIT_SECONDS = 0.0003
"""How long all lookups and loads of one step together may wait for answers."""
SLOW_SECONDS = 0.25
"""If the service has not answered for this long, lookups miss and nothing is stored until it answers."""
SILENT_SECONDS = 5.0
"""If the service has not answered for this long, its session ends, so that GPU blocks and requests stop waiting."""

logger = logging.getLogger("kvstow.vllm")

_T = TypeVar("_T")


class _Asked(NamedTuple):
    answer: Answer[Any]
    at: float
    step: int


class Life(NamedTuple):
    """A period in which stored blocks can be found. `session` is the session's number, 0 without one. `resets`: how
    many resets there have been."""

    session: int = 0
    resets: int = 0


class AttachedControl(AttachedEngine):
    """An `AttachedEngine` that is a `ControlPlane`: it notices a service that takes calls and does not answer. While
    there is no service, or it does not answer, lookups miss and stores are refused."""

    begins_loads_at_once = False

    def __init__(
        self, path: Path, slot_bytes: int, clock: Callable[[], float] = time.monotonic, **options: Any
    ) -> None:
        """`slot_bytes`: see `ControlPlane`. For the others see `AttachedEngine`."""
        super().__init__(path, step_wait=STEP_WAIT_SECONDS, clock=clock, **options)
        self.slot_bytes = slot_bytes
        self._asked: deque[_Asked] = deque()
        self._step = self._resets = 0
        self._layer_wait_left = LAYER_WAIT_SECONDS  # of this step
        self._bypasses_loads = self._is_slow = False
        self._failure: str | None = None
        self.refused_stores: Counter[str] = Counter()
        """Blocks that were offered and not stored, by outcome."""

    @property
    def state(self) -> AttachState:
        """See `problem`, which gives the state as a sentence."""
        if self._failure is not None:
            return AttachState("failed")
        if self.is_attached:
            sharing = sharing_word(self.sharing_off, was_reset=self._resets > 0)
            return AttachState("no_answer" if self._is_slow else "attached", sharing=sharing)
        if super().problem is None:
            return AttachState("starting")
        if self.refusal is not None:
            return AttachState("refused", self.refusal if self.refusal in REFUSALS else "other")
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
        self._step += 1
        self._layer_wait_left = LAYER_WAIT_SECONDS
        if self._failure is not None:
            return
        super().step()
        self._watch()

    def _watch(self) -> None:
        while self._asked and (self._asked[0].answer.done or self._asked[0].answer.is_pending):
            self._asked.popleft()
        silent = 0.0
        if self._asked and self._asked[0].step <= self._step - 2:  # a step may take seconds
            silent = self._clock() - self._asked[0].at
        is_slow = silent > SLOW_SECONDS
        if is_slow and not self._is_slow:
            logger.warning("the node service does not answer: lookups miss and nothing is stored until it does")
        elif self._is_slow and not is_slow and self.is_attached:
            logger.info("the node service answers again")
        self._is_slow = is_slow
        if silent > SILENT_SECONDS:
            self.disconnect(f"the service has not answered for {silent:.0f} seconds")

    def _ask(self, message: Message, read: Callable[[Call], _T], without: _T) -> Answer[_T]:
        answer = super()._ask(message, read, without)
        if not answer.done:
            self._asked.append(_Asked(answer, self._clock(), self._step))
        return answer

    def wait(self, *answers: Awaited[object], seconds: float | None = None) -> bool:
        return super().wait(*[each for each in answers if isinstance(each, Answer)], seconds=seconds)

    def wait_for_slots(self, answer: Awaited[object]) -> bool:
        if not answer.done:
            begun = self._clock()
            self.wait(answer, seconds=0.0 if self._is_slow else self._layer_wait_left)
            self._layer_wait_left = max(0.0, self._layer_wait_left - (self._clock() - begun))
        return answer.done

    # -- lookups --------------------------------------------------------------------------------------------

    def hit_finder(self, groups: KVGroups) -> AttachedHits:
        return AttachedHits(self, groups, self._clock)

    @property
    def finds_hits(self) -> bool:
        """Whether lookups can find anything."""
        return self.is_attached and not (self._bypasses_loads or self._is_slow or self._failure is not None)

    def is_held(self, lease: Lease) -> bool:
        """Whether the lease's session is still the current one."""
        return self._is_of_session(lease.lease_id)

    @property
    def life(self) -> Life:
        return Life(0 if self.ticket is None else self.ticket.number, self._resets)

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

    def _read_store(self, blocks: tuple[int, ...], request_id: str, call: Call) -> StoreGrant:
        grant = super()._read_store(blocks, request_id, call)
        self.refused_stores.update(grant.outcomes)
        return grant

    # -- all blocks -----------------------------------------------------------------------------------------

    def reset(self) -> Answer[str]:
        self._resets += 1
        return super().reset() if self._failure is None else Answer.given("")

    def bypass_loads(self) -> str:
        self._bypasses_loads = True
        return "this engine restarts"

    def fail(self, reason: str) -> None:
        self._failure = self._failure or reason
        self.close()
