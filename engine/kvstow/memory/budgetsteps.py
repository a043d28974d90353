"""What a budget decides: the steps that `NodeMemory` carries out."""

from __future__ import annotations

from typing import NamedTuple


class Create(NamedTuple):
    """Make an extent with this number."""

    extent: int
    num_bytes: int
    numa_node: int | None


class Give(NamedTuple):
    """The extent is this rank's, in this row of the pool. The slots of a row, from `first_slot` on, are usable once all
    its extents are given, as far as they are populated."""

    extent: int
    pool: str
    rank: int
    row: int
    first_slot: int
    num_slots: int


class Recall(NamedTuple):
    """The pool loses the row, its last one: evict what its slots hold, give out none of them, and ask each client that
    mapped one of the extents to let go of it."""

    pool: str
    row: int
    extents: tuple[int, ...]


class TakeBack(NamedTuple):
    """Nobody has the extent any more: it is no pool's, and spare."""

    extent: int
    pool: str


class Close(NamedTuple):
    """Give the spare extent's memory back to the machine, wherever this service or its keeper has it."""

    extent: int


Step = Create | Give | Recall | TakeBack | Close
