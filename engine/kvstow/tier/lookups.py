"""What is known of the objects in a tier's store, and what is to be asked next."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from threading import Lock
from typing import NamedTuple

PRESENT_SECONDS = 5.0
ABSENT_SECONDS = 2.0
_MAX_ANSWERS = 1 << 18


class Question(NamedTuple):
    """Keys to ask the store about. Answers to a question from before the last `forget` are ignored."""

    epoch: int
    keys: tuple[bytes, ...]


class LookupTable:
    """Answers of the store, shared by all who ask: what one has asked for is not asked again until the answer is old.

    A hint in both directions: an object may be gone when it is fetched, and may have been put since it was absent.
    Thread-safe; O(keys), and never waits.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = Lock()
        self._answers: OrderedDict[bytes, tuple[bool, float]] = OrderedDict()
        self._wanted: dict[bytes, None] = {}
        self._asked: set[bytes] = set()
        self._epoch = 0

    def presence(self, keys: Sequence[bytes]) -> list[bool | None]:
        """Whether the store has these keys; None: not known yet, and part of the next question."""
        now = self._clock()
        found: list[bool | None] = []
        with self._lock:
            answers = self._answers
            for key in keys:
                answer = answers.get(key)
                if answer is not None and now < answer[1]:
                    found.append(answer[0])
                    continue
                found.append(None)
                if answer is not None:
                    del answers[key]
                if key not in self._asked:
                    self._wanted[key] = None
        return found

    def take_question(self) -> Question | None:
        """All keys that are wanted since the last question; None if there are none, or if the last one has no answer
        yet."""
        with self._lock:
            if not self._wanted or self._asked:
                return None
            keys = tuple(self._wanted)
            self._asked = set(keys)
            self._wanted.clear()
            return Question(self._epoch, keys)

    def answer(self, question: Question, found: Sequence[bool]) -> None:
        """The store's answer. If the store could not be asked, the caller passes that nothing was found."""
        with self._lock:
            if question.epoch == self._epoch:
                self._asked.clear()
                self._note(question.keys, found)

    def note(self, keys: Sequence[bytes], *, present: bool) -> None:
        """Known without asking: these keys were put, or could not be fetched."""
        with self._lock:
            self._note(keys, [present] * len(keys))

    def _note(self, keys: Sequence[bytes], found: Sequence[bool]) -> None:
        now = self._clock()
        for key, present in zip(keys, found, strict=True):
            self._answers[key] = present, now + (PRESENT_SECONDS if present else ABSENT_SECONDS)
            self._answers.move_to_end(key)
        while len(self._answers) > _MAX_ANSWERS:
            self._answers.popitem(last=False)

    def forget(self) -> None:
        """Keys have another meaning from now on."""
        with self._lock:
            self._epoch += 1
            self._answers.clear()
            self._wanted.clear()
            self._asked.clear()
