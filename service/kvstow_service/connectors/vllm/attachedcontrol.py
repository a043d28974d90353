"""The control plane of an engine that is attached to the node service: hits in the service's pool, which are asked
for when a request arrives and taken when vLLM asks, loads and stores, and the state of the session."""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeVar

from kvstow.attach.calls import EventPage, Hold
from kvstow.attach.connection import Answer
from kvstow.attach.engine import AttachedEngine, Hits
from kvstow.attach.hello import TRANSIENT_REFUSALS, SessionTicket, number_of
from kvstow.hints import Hints
from kvstow.messages import Completion, Direction, Op
from kvstow.prefill import PrefillNews
from kvstow.results import Awaited, Given, KeyRun, Lease, Settled, StoreGrant
from kvstow.source import Source
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

    def labels(self) -> dict[str, str]:
        return self._asdict()


def refusal_word(refusal: str) -> str:
    return refusal if refusal in REFUSALS else "other"


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
"""The same limit if the service has said that it waits: for the fleet tier up to 2 s, for memory to be registered 1
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
        answer = self._control.find_prompt(keys) if is_prompt else self._control.find(keys, hold)
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


class AttachedControl:
    """Asks the node service, which answers later. See `ControlPlane`.

    The `AttachedEngine` is created at the first use, in the first step or with the first request, because vLLM has its
    block hashes only then. While there is no service, or it does not answer, lookups miss and stores are refused.
    """

    def __init__(
        self,
        make_engine: Callable[[], AttachedEngine],
        slot_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.slot_bytes = slot_bytes
        self.begins_loads_at_once = False
        self._make_engine, self._clock = make_engine, clock
        self._engine: AttachedEngine | None = None
        self._asked: deque[_Asked] = deque()
        self._step = self._resets = 0
        self._layer_wait_left = LAYER_WAIT_SECONDS  # of this step
        self._bypasses_loads = self._is_slow = False
        self._failure: str | None = None
        self.refused_stores: Counter[str] = Counter()
        """Blocks that were offered and not stored, by outcome."""
        self.moved_blocks: Counter[str] = Counter()
        """Bytes of ops that are done, by direction."""
        self.moved_seconds: defaultdict[str, float] = defaultdict(float)
        """Seconds of the same ops, each on its slowest rank."""
        self._seconds: dict[int, float] = {}  # by op whose result has not arrived

    @property
    def engine(self) -> AttachedEngine:
        if self._engine is None:
            self._engine = self._make_engine()
        return self._engine

    @property
    def ticket(self) -> SessionTicket | None:
        return None if self._engine is None else self._engine.ticket

    @property
    def state(self) -> AttachState:
        """See `problem`, which gives the state as a sentence."""
        engine = self._engine
        if self._failure is not None:
            return AttachState("failed")
        if engine is None or (engine.problem is None and not engine.is_attached):
            return AttachState("starting")
        if engine.is_attached:
            sharing = sharing_word(engine.sharing_off, was_reset=self._resets > 0)
            return AttachState("no_answer" if self._is_slow else "attached", sharing=sharing)
        if engine.refusal is not None:
            return AttachState("refused", refusal_word(engine.refusal))
        return AttachState("no_service")

    @property
    def problem(self) -> str | None:
        """Why there is no host cache, as a sentence; None while there is one."""
        if self._failure is not None:
            return f"KVStow has failed: {self._failure}"
        if self._engine is None:
            return "the engine has not made a step yet"
        if self._is_slow:
            return "the node service does not answer"
        return None if self._engine.is_attached else self._engine.problem or "not attached yet"

    # -- steps ----------------------------------------------------------------------------------------------

    def step(self) -> None:
        self._step += 1
        self._layer_wait_left = LAYER_WAIT_SECONDS
        if self._failure is not None:
            return
        self.engine.step()
        self._watch()

    def _watch(self) -> None:
        """Notice a service that takes calls and does not answer."""
        while self._asked and (self._asked[0].answer.done or self._asked[0].answer.is_pending):
            answer = self._asked.popleft().answer
            if answer.done and isinstance(answer.value, StoreGrant):
                self.refused_stores.update(answer.value.outcomes)
        silent = 0.0
        if self._asked and self._asked[0].step <= self._step - 2:  # a step may take seconds
            silent = self._clock() - self._asked[0].at
        is_slow = silent > SLOW_SECONDS
        if is_slow and not self._is_slow:
            logger.warning("the node service does not answer: lookups miss and nothing is stored until it does")
        elif self._is_slow and not is_slow and self.engine.is_attached:
            logger.info("the node service answers again")
        self._is_slow = is_slow
        if silent > SILENT_SECONDS:
            self.engine.disconnect(f"the service has not answered for {silent:.0f} seconds")

    def wait(self, answer: Awaited[object]) -> bool:
        if isinstance(answer, Answer) and not answer.done:
            self.engine.wait(answer)
        return answer.done

    def wait_for_slots(self, answer: Awaited[object]) -> bool:
        if isinstance(answer, Answer) and not answer.done:
            begun = self._clock()
            self.engine.wait(answer, seconds=0.0 if self._is_slow else self._layer_wait_left)
            self._layer_wait_left = max(0.0, self._layer_wait_left - (self._clock() - begun))
        return answer.done

    # -- lookups --------------------------------------------------------------------------------------------

    def hit_finder(self, groups: KVGroups) -> AttachedHits:
        return AttachedHits(self, groups, self._clock)

    @property
    def finds_hits(self) -> bool:
        """Whether lookups can find anything."""
        if self._bypasses_loads or self._is_slow or self._failure is not None:
            return False
        return self.engine.is_attached

    def find(self, keys: Sequence[bytes], hold: Hold) -> Answer[Hits]:
        return self._note(self.engine.find(keys, hold=hold, count=False))

    def find_prompt(self, keys: Sequence[bytes]) -> Answer[Hits]:
        return self._note(self.engine.find_prompt(keys))

    def discard(self, answer: Answer[Hits]) -> None:
        self.engine.discard(answer)

    def is_held(self, lease: Lease) -> bool:
        """Whether the lease's session is still the current one."""
        ticket = self.ticket
        return ticket is not None and number_of(lease.lease_id) == ticket.number

    def release_lease(self, lease: Lease) -> None:
        self.engine.release_lease(lease)

    def count_lookup(self, queried: int, hits: int, source: Source) -> None:
        if self._engine is not None:
            self._engine.count_lookup(queried, hits, source)

    @property
    def source_key(self) -> bytes:
        return b"" if self._engine is None else self._engine.source_key

    def note_prefill(self, news: PrefillNews) -> None:
        if self._engine is not None:
            self._engine.note_prefill(news)

    # -- events ---------------------------------------------------------------------------------------------

    @property
    def life(self) -> Life:
        ticket = self.ticket
        return Life(0 if ticket is None else ticket.number, self._resets)

    @property
    def is_attached(self) -> bool:
        return self._engine is not None and self._engine.is_attached

    def read_events(self, after: int) -> Answer[EventPage]:
        return self._note(self.engine.read_events(after))

    # -- loads and stores -----------------------------------------------------------------------------------

    def begin_load(
        self, lease: Lease, blocks: Sequence[int], *, first: int, request_id: str, choice: str
    ) -> Answer[Op | None]:
        return self._note(self.engine.begin_load(lease, blocks, first=first, request_id=request_id, choice=choice))

    def begin_store(self, keys: Sequence[bytes], blocks: Sequence[int], *, request_id: str) -> Awaited[StoreGrant]:
        if self._failure is not None or self._is_slow or not self.engine.is_attached:
            self.refused_stores["not_attached"] += len(keys)
            return Given(StoreGrant(None, (), {}, range(len(keys))))
        return self._note(self.engine.begin_store(keys, blocks, request_id=request_id))

    def present(self, keys: Sequence[bytes]) -> Sequence[bool]:
        return [False] * len(keys)

    def store_room(self) -> int:
        return 0 if self._failure is not None or self._is_slow else self.engine.store_room()

    def use(
        self,
        keys: Sequence[bytes],
        *,
        start: int,
        looked_up: tuple[int, int],
        hints: Hints | None,
        source: Source,
    ) -> None:
        if (keys or hints is not None) and self._engine is not None:
            self._engine.use(keys, start=start, looked_up=looked_up, hints=hints, source=source)

    def complete(self, rank: int, boot_id: str, completions: Iterable[Completion]) -> None:
        if self._engine is None:
            return
        completions = tuple(completions)
        for completion in completions:
            if completion.mark == "done" and self._engine.is_awaited(completion.op_id):  # not an op that has failed
                self._seconds[completion.op_id] = max(self._seconds.get(completion.op_id, 0.0), completion.seconds)
        self._engine.complete(rank, boot_id, completions)

    def take_settled(self) -> list[Settled]:
        settled = [] if self._engine is None else self._engine.take_settled()
        for entry in settled:
            if entry.mark == "source_free":
                continue
            seconds = self._seconds.pop(entry.op_id, 0.0)
            if entry.mark == "done":
                self.moved_blocks[entry.direction] += len(entry.blocks)
                self.moved_seconds[entry.direction] += seconds
        return settled

    @property
    def sessions_lost(self) -> int:
        if self._engine is None:
            return 0
        return self._engine.num_sessions - self._engine.is_attached

    def open_blocks(self, direction: Direction) -> int:
        """Blocks that ops under way move."""
        return 0 if self._engine is None else self._engine.open_blocks(direction)

    @property
    def awaited_transfers(self) -> int:
        return 0 if self._engine is None else self._engine.awaited_transfers

    @property
    def open_transfers(self) -> int:
        return 0 if self._engine is None else self._engine.open_transfers

    # -- all blocks -----------------------------------------------------------------------------------------

    def reset(self) -> None:
        self._resets += 1
        if self._failure is None:
            self.engine.reset()

    def bypass_loads(self) -> str:
        self._bypasses_loads = True
        return "this engine restarts"

    def fail(self, reason: str) -> None:
        self._failure = self._failure or reason
        self.close()

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()

    def _note(self, answer: Answer[_T]) -> Answer[_T]:
        if not answer.done:
            self._asked.append(_Asked(answer, self._clock(), self._step))
        return answer
