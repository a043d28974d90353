"""The messages between this process and a child of it. Each lane has one request at a time, which has one answer."""

from __future__ import annotations

from typing import Literal, NamedTuple

from kvstow_service.stores.mooncake.objects import SlotObject

CORRUPT = -1_000_000
"""A status code of KVStow: an object was found, but it is not the one that was put under its name."""


class Connect(NamedTuple):
    """The first message: connect to the store."""

    local_host: str
    master: str
    protocol: str
    devices: str
    replicas: int


class AddMemory(NamedTuple):
    """Map and register the memfd that comes with this."""

    range_id: int
    num_bytes: int


class RemoveMemory(NamedTuple):
    range_id: int


class Move(NamedTuple):
    kind: Literal["put", "get"]
    objects: tuple[SlotObject, ...]


class Exists(NamedTuple):
    names: tuple[str, ...]


Answer = tuple[int, ...] | str
"""A status code for each object or name (none for other requests), or a text that says why the request was refused. A
request that was refused has touched no memory."""
