"""Random operations on a journal. They follow from a seed, so that a test can tell what was done before a crash."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Literal, NamedTuple

from kvstow.control.indexjournal import IndexJournal

SLOTS = 200
SESSION, NAMESPACE = 5, 3

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
