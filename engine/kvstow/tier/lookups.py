"""What is known of the objects in a tier's store, and what is to be asked next."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import chain, compress, groupby, islice
from operator import not_
from threading import Lock
from typing import NamedTuple

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
