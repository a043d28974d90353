"""What this node knows about the objects in Mooncake."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

PRESENT_SECONDS = 5.0
ABSENT_SECONDS = 2.0
MOST_ANSWERS = 1 << 18

Name = tuple[str, bytes]
"""The fingerprint and the key of a block. The object of rank 0 is put last, so its presence shows that of all ranks."""


class _Answer(NamedTuple):
    is_present: bool
    until: float


class Answers:
    """The store's recent answers, which all requests share, and the blocks that this node has put or got. Both are
    hints, because an object may be gone since, or may have been put since. Bounded. Not locked."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._answers: OrderedDict[Name, _Answer] = OrderedDict()
        self._moved: OrderedDict[Name, None] = OrderedDict()

    def known(self, fingerprint: str, keys: Sequence[bytes]) -> list[bool | None]:
        """Return for each key whether the store has it, or None if that is unknown."""
        now, answers = self._clock(), self._answers
        found = [answers.get((fingerprint, key)) for key in keys]
        return [None if one is None or now >= one.until else one.is_present for one in found]

    def note(self, fingerprint: str, keys: Iterable[bytes], *, present: bool) -> None:
        """Note that the store has, or lacks, these keys."""
        answer = _Answer(present, self._clock() + (PRESENT_SECONDS if present else ABSENT_SECONDS))
        for key in keys:
            self._answers[fingerprint, key] = answer
            self._answers.move_to_end((fingerprint, key))
            if not present:
                self._moved.pop((fingerprint, key), None)
        while len(self._answers) > MOST_ANSWERS:
            self._answers.popitem(last=False)

    def note_moved(self, fingerprint: str, keys: Sequence[bytes]) -> None:
        """Note that this node has put, or got, these blocks."""
        self.note(fingerprint, keys, present=True)
        for key in keys:
            self._moved[fingerprint, key] = None
        while len(self._moved) > MOST_ANSWERS:
            self._moved.popitem(last=False)

    def is_moved(self, fingerprint: str, key: bytes) -> bool:
        return (fingerprint, key) in self._moved
