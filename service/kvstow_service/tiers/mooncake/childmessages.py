"""What this process and a child of it say to each other."""

from __future__ import annotations

from typing import NamedTuple


class Connect(NamedTuple):
    """The first message: connect to the store."""

    local_host: str
    master: str
    protocol: str
    devices: str
    replicas: int


class AddMemory(NamedTuple):
    """Map and register `num_bytes` of the memfd that comes with this, from `offset` on."""

    range_id: int
    num_bytes: int
    offset: int


class RemoveMemory(NamedTuple):
    range_id: int


class SlotPart(NamedTuple):
    """An object, and its slot: `num_bytes` at `offset` in a range."""

    fingerprint: str
    name: str
    range_id: int
    offset: int
    num_bytes: int


class Put(NamedTuple):
    objects: tuple[SlotPart, ...]


class Get(NamedTuple):
    objects: tuple[SlotPart, ...]


class Exists(NamedTuple):
    names: tuple[str, ...]


class Done(NamedTuple):
    """An answer: a status code for each object or name."""

    codes: tuple[int, ...] = ()


class Refused(NamedTuple):
    """An answer: nothing was touched."""

    reason: str


CORRUPT = -1_000_000
"""A status code of ours: an object was found, and is not what was put under its name."""
