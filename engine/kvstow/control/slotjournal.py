"""Where a pool records what its slots hold, so that the next process recovers the index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from kvstow.errors import InvalidRequestError

ANY_SESSION = 0
"""Slots that sessions may still read, although they hold no block any more, are begun under this number."""


class NamespaceLabel(NamedTuple):
    """A namespace's name, and what the host wants to know of it after a restart, as JSON."""

    name: str
    note: Any = None


class SlotJournal(Protocol):
    """Used with the pool's lock held. No call waits or raises, unless the pool has a defect. O(slots given).

    A slot is begun before any rank is told to write it, published once all ranks have its bytes, and cleared as soon as
    it is free. So a slot that is published in the journal has whole bytes whenever the process ends.
    """

    max_key_bytes: int

    def begin(self, slots: Sequence[int], session: int) -> None:
        """The session's processes may use these slots, which hold no block."""

    def publish(self, slots: Sequence[int], namespace: int, keys: Sequence[bytes]) -> None:
        """Each slot holds the block with the key beside it, in the namespace with this number."""

    def clear(self, slots: Sequence[int]) -> None:
        """Nothing uses these slots."""

    def name_namespaces(self, namespaces: Mapping[int, NamespaceLabel]) -> None:
        """The namespaces by number, the most important first. Blocks of others are not recovered."""


def fit(keys: Sequence[bytes], most: int) -> bool:
    """Whether all keys have one length, from 1 to `most` bytes, as in one call of `publish`."""
    widths = set(map(len, keys))
    return not widths or (len(widths) == 1 and 1 <= max(widths) <= most)


def check_width(keys: Sequence[bytes], most: int) -> None:
    """Raises `InvalidRequestError` unless the keys `fit`."""
    if not fit(keys, most):
        widths = sorted(set(map(len, keys)))
        raise InvalidRequestError(
            f"keys of {widths} bytes; allowed: keys of one length, from 1 to {most} bytes, because the pool's "
            "journal has a field of that size"
        )
