"""Namespaces: in each of them, a key has one meaning. Equal keys of two namespaces are different blocks."""

from __future__ import annotations

from collections.abc import Sequence

from kvstow.control.keymap import KeyMap, SlotKeys
from kvstow.control.pendingstores import PendingStores
from kvstow.control.policy import EvictionPolicy


class Namespace:
    """The keys of one namespace, and the order in which its blocks are evicted. Not locked.

    `num_sessions`: sessions that use it. A dropped namespace is found by no session any more; its blocks are the first
    to be evicted.
    """

    __slots__ = ("is_dropped", "keys", "name", "num_sessions", "pending_stores", "policy", "tag")

    def __init__(self, name: str, tag: int, slot_keys: SlotKeys, policy: EvictionPolicy) -> None:
        self.name, self.tag = name, tag
        self.keys = KeyMap(slot_keys, tag)
        self.pending_stores = PendingStores()
        self.policy = policy
        self.num_sessions = 0
        self.is_dropped = False

    def needs_all(self, keys: Sequence[bytes], slots: Sequence[int | None]) -> bool:
        """Whether none of these keys is visible or being stored, and none repeats. `slots`: where they are visible."""
        absent = slots.count(None) == len(keys) and self.pending_stores.isdisjoint(keys)
        return absent and len(set(keys)) == len(keys)

    @property
    def is_empty(self) -> bool:
        return not self.keys and not self.pending_stores
