"""How an engine's own processes tell its sessions apart."""

from __future__ import annotations

from hashlib import sha256
from typing import NamedTuple

_COUNT_BITS = 40


class SessionTicket(NamedTuple):
    """Lets the engine's workers join its session. `number` counts the engine's sessions from 1. `token` is a secret of
    this engine's processes."""

    number: int
    token: str


def digest_of(token: str) -> str:
    """Tells tokens apart without letting anybody join."""
    return sha256(token.encode()).hexdigest()


def unique_id(number: int, count: int) -> int:
    """An id of an op or a lease that is unique across all sessions of an engine. A service counts from 1, so a later
    session may repeat its numbers."""
    return number << _COUNT_BITS | count


def number_of(identifier: int) -> int:
    """The number of the session that an id belongs to."""
    return identifier >> _COUNT_BITS


def count_of(identifier: int) -> int:
    return identifier & ((1 << _COUNT_BITS) - 1)
