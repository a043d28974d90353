"""What is known of the objects in a tier's store, and what is to be asked next; and the thread that asks, so that no
step of a scheduler waits for the store."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from itertools import chain, compress, groupby, islice
from operator import not_
from threading import Lock
from typing import NamedTuple

from kvstow.errors import TierUnavailableError
from kvstow.tier.store import LookupClient, ObjectName

PRESENT_SECONDS = 5.0
ABSENT_SECONDS = 2.0
_MAX_ANSWERS = 1 << 18
_PIECE = 128
"""Answers that are noted at a time, while the lock is held: 20 us."""


class _Answer(NamedTuple):
    """One object for all keys of a call, so that a run of them is compared without looking inside."""

    is_present: bool
    until: float


class Inquiry:
    """What one request wants to know: whether the store has its keys from `start` on. `is_open`: there is no answer
    yet. The table alone writes it; anybody may read it."""

    __slots__ = ("is_open", "keys", "start")

    def __init__(self, keys: Sequence[bytes], start: int) -> None:
        self.keys, self.start, self.is_open = keys, start, True


Question = Sequence[Inquiry]
"""Inquiries that are answered together."""


class Known(NamedTuple):
    """`end`: the first key that the store does not have, as far as is known. `is_final`: it is known of that key, or
    there is none."""

    end: int
    is_final: bool


class LookupTable:
    """Answers of the store, shared by all who ask: what one has asked for is not asked again until the answer is old.

    A hint in both directions: an object may be gone when it is fetched, and may have been put since it was absent.
    Thread-safe, and never waits. What a scheduler's step calls is O(1), except for keys that the store has; what is
    O(keys) is for the thread that asks the store.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = Lock()
        self._answers: OrderedDict[bytes, _Answer] = OrderedDict()
        """Read without the lock, one key at a time."""
        self._wanted: list[Inquiry] = []
        self._asked: list[Inquiry] = []
        self.version = 0
        """Grows when an answer has come: what was not known before may be now."""

    # -- for requests ---------------------------------------------------------------------------------------

    def present_until(self, keys: Sequence[bytes], start: int) -> Known:
        """How far the store has the keys from `start` on. Stops at the first key that it does not have, or of which
        nothing is known: O(keys that it has)."""
        now, at = self._clock(), start
        for answer, run in groupby(map(self._answers.get, islice(keys, start, None))):
            if answer is None or now >= answer.until:
                return Known(at, is_final=False)
            if not answer.is_present:
                break
            at += len(list(run))
        return Known(at, is_final=True)

    def known(self, keys: Sequence[bytes]) -> list[bool | None]:
        """For each key, whether the store has it; None: nothing is known. O(keys)."""
        now = self._clock()
        answers = map(self._answers.get, keys)
        return [None if answer is None or now >= answer.until else answer.is_present for answer in answers]

    def want(self, keys: Sequence[bytes], start: int) -> Inquiry:
        """Make the keys from `start` on part of the next question, unless they are known by then. O(1)."""
        inquiry = Inquiry(keys, start)
        with self._lock:
            self._wanted.append(inquiry)
        return inquiry

    def drop(self, inquiry: Inquiry) -> None:
        """Nobody wants to know any more. O(1)."""
        inquiry.is_open = False

    def take_question(self) -> Question | None:
        """All that is wanted since the last question; None if that is nothing, or if the last one has no answer
        yet. O(inquiries)."""
        with self._lock:
            if self._asked or not self._wanted:
                return None
            self._asked = [one for one in self._wanted if one.is_open]
            self._wanted = []
            return self._asked or None

    def note(self, keys: Sequence[bytes], *, present: bool) -> None:
        """Known without asking: these keys were put, or could not be fetched. O(keys)."""
        self._note(keys, present)

    # -- for the thread that asks the store -----------------------------------------------------------------

    def unknown(self, question: Question) -> list[bytes]:
        """The keys to ask the store about, each once."""
        now = self._clock()
        wanted = chain.from_iterable(islice(one.keys, one.start, None) for one in question)
        answers = self._answers
        return [key for key in dict.fromkeys(wanted) if (answer := answers.get(key)) is None or now >= answer.until]

    def answer(self, question: Question, keys: Sequence[bytes], found: Sequence[bool]) -> None:
        """The store's answer for the keys that were unknown. If the store could not be asked, the caller passes that
        nothing was found."""
        self._note(list(compress(keys, found)), is_present=True)
        self._note(list(compress(keys, map(not_, found))), is_present=False)
        with self._lock:
            for one in question:
                one.is_open = False
            self._asked = []
            self.version += 1

    def _note(self, keys: Sequence[bytes], is_present: bool) -> None:
        """Piece by piece, so that nobody waits for the lock for long."""
        answer = _Answer(is_present, self._clock() + (PRESENT_SECONDS if is_present else ABSENT_SECONDS))
        for start in range(0, len(keys), _PIECE):
            with self._lock:
                answers = self._answers
                for key in keys[start : start + _PIECE]:
                    answers[key] = answer
                    answers.move_to_end(key)
                while len(answers) > _MAX_ANSWERS:
                    answers.popitem(last=False)


logger = logging.getLogger("kvstow.tier")

NameOf = Callable[[bytes], ObjectName]

_PROBE_KEY = bytes(34)


class StoreAnswers(NamedTuple):
    """How a question ended. `keys`: how many the store was asked about; 0 if all were known by then. `error`: why the
    store gave no answer."""

    is_probe: bool
    keys: int
    seconds: float
    error: str | None = None


class LookupThread:
    """Asks one question at a time. Thread-safe; only `close` waits, for a question that is under way."""

    def __init__(
        self,
        table: LookupTable,
        client: LookupClient,
        *,
        timeout: float = 1.0,
        on_news: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """The caller keeps `client`. `on_news` is called on the thread after each answer; it must not wait."""
        self._table, self._client = table, client
        self._timeout, self._on_news, self._clock = timeout, on_news, clock
        self._state = threading.Condition()
        self._questions: deque[tuple[NameOf, Question | None]] = deque()
        """None: a probe."""
        self._results: list[StoreAnswers] = []
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kvstow-tier-lookup", daemon=True)
        self._thread.start()

    def ask(self, name_of: NameOf) -> bool:
        """Send all that is wanted as one question, unless one is under way; whether it was sent. Call it once in a
        step: it is O(requests), because the thread finds the keys to ask about, and their names."""
        question = self._table.take_question()
        if question is None:
            return False
        self._send(name_of, question)
        return True

    def probe(self, fingerprint: str) -> None:
        """Ask for one object, to see whether the store answers."""
        self._send(lambda key: ObjectName(fingerprint, key, 0, 1), None)

    def take_results(self) -> list[StoreAnswers]:
        """All questions that have ended since the last call, in order."""
        with self._state:
            taken, self._results = self._results, []
            return taken

    def close(self) -> None:
        """Idempotent."""
        with self._state:
            self._closing = True
            self._state.notify_all()
        self._thread.join()

    def _send(self, name_of: NameOf, question: Question | None) -> None:
        with self._state:
            self._questions.append((name_of, question))
            self._state.notify_all()

    def _run(self) -> None:
        while True:
            with self._state:
                self._state.wait_for(lambda: self._questions or self._closing)
                if self._closing:
                    return
                name_of, question = self._questions.popleft()
            result = self._ask(name_of, question)
            with self._state:
                self._results.append(result)
            if self._on_news is not None:
                self._on_news()

    def _ask(self, name_of: NameOf, question: Question | None) -> StoreAnswers:
        keys = [_PROBE_KEY] if question is None else self._table.unknown(question)
        begun = self._clock()
        found, error = self._find([name_of(key) for key in keys]) if keys else ([], None)
        seconds = self._clock() - begun
        if question is not None:
            self._table.answer(question, keys, found)
        return StoreAnswers(question is None, len(keys), seconds, error)

    def _find(self, names: list[ObjectName]) -> tuple[list[bool], str | None]:
        """What the store has of these, and why it gave no answer."""
        try:
            found = self._client.exists(names, self._timeout)
            if len(found) != len(names):
                raise ValueError(f"the store gave {len(found)} answers for {len(names)} objects")
            return found, None
        except TierUnavailableError as outage:
            error = str(outage)
        except Exception as defect:
            logger.exception("a lookup of %d objects failed: unexpected error", len(names))
            error = repr(defect)
        return [False] * len(names), error
