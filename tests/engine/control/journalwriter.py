"""Writes to a journal until it is killed. What it does follows from a seed, so that a test can tell what it did."""

from __future__ import annotations

import mmap
import random
import struct
import sys
from collections.abc import Iterator
from typing import Literal, NamedTuple

from kvstow.control.indexjournal import IndexJournal

SLOTS = 200
SESSION, NAMESPACE = 5, 3

PROGRESS = struct.Struct("@QQ")  # operations begun and ended


Verb = Literal["begin", "publish", "clear"]
_VERBS: tuple[Verb, ...] = ("begin", "begin", "publish", "publish", "clear")


class Operation(NamedTuple):
    verb: Verb
    slots: list[int]
    keys: list[bytes]


def operations(seed: int) -> Iterator[Operation]:
    """Whatever is allowed, for ever: only slots that were begun are published."""
    chance = random.Random(seed)
    begun: set[int] = set()
    while True:
        verb = chance.choice(_VERBS)
        source = sorted(begun) if verb == "publish" else range(SLOTS)
        slots = chance.sample(source, min(len(source), chance.choice((1, 3, 40))))
        keys = [chance.randbytes(34) for _ in slots] if verb == "publish" else []
        begun = begun | set(slots) if verb == "begin" else begun - set(slots)
        yield Operation(verb, slots, keys)


def apply(journal: IndexJournal, operation: Operation) -> None:
    if operation.verb == "begin":
        journal.begin(operation.slots, SESSION)
    elif operation.verb == "publish":
        journal.publish(operation.slots, NAMESPACE, operation.keys)
    else:
        journal.clear(operation.slots)


def main(journal_fd: int, progress_fd: int, seed: int) -> None:
    journal = IndexJournal.open(journal_fd)
    progress = memoryview(mmap.mmap(progress_fd, PROGRESS.size)).cast("Q")
    for number, operation in enumerate(operations(seed), 1):
        progress[0] = number
        apply(journal, operation)
        progress[1] = number


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
