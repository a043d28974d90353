"""Chooses the items that a limited list shows. It uses only the standard library, so that clients can import it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

_Item = TypeVar("_Item")


def shortlist(items: Sequence[_Item], most: int, urgency: Callable[[_Item], Any]) -> list[_Item]:
    """Return at most `most` of the items, in their order. If there are more, those with the lowest `urgency` stay, and
    among equals the first ones.

    >>> shortlist(["b", "a", "c"], 2, lambda one: one != "c")
    ['b', 'c']
    """
    first = sorted(range(len(items)), key=lambda number: urgency(items[number]))[:most]
    return [items[number] for number in sorted(first)]
