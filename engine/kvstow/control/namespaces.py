"""Namespaces: in each of them, a key has one meaning. Equal keys of two namespaces are different blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from kvstow.control.keymap import KeyMap, SlotKeys
from kvstow.control.pendingstores import PendingStores
from kvstow.control.policy import EvictionPolicy
from kvstow.errors import ConflictError

_MAX_NAMESPACES = 1 << 16


class Namespace:
    """The keys of one namespace, and the order in which its blocks are evicted. Not locked.

    `num_sessions`: sessions that use it. A dropped namespace is found by no session any more; its blocks are the first
    to be evicted. One that is forgotten counts as dropped: whoever still has it must fill no slot in it.
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


class Namespaces:
    """The namespaces of a pool, including dropped ones that still have blocks. Not locked.

    `only`: the namespace, if there is exactly one.
    """

    def __init__(self, slot_keys: SlotKeys, make_policy: Callable[[], EvictionPolicy]) -> None:
        self._slot_keys = slot_keys
        self._make_policy = make_policy
        self._by_name: dict[str, Namespace] = {}
        self._by_tag: dict[int, Namespace] = {}
        self._unused: dict[int, Namespace] = {}
        """Those without sessions, in the order in which they are evicted."""
        self.only: Namespace | None = None
        self._last_epoch = 0

    def __iter__(self) -> Iterator[Namespace]:
        return iter(self._by_tag.values())

    def unused(self) -> Iterable[Namespace]:
        """Those without sessions, in the order in which they are evicted."""
        return self._unused.values()

    def join(self, name: str) -> Namespace:
        """The namespace with this name, for one more session. Raises `ConflictError` if there are too many."""
        for unused in list(self._unused.values()):
            self.forget_if_empty(unused)
        namespace = self._by_name.get(name)
        if namespace is None:
            tag = next((tag for tag in range(_MAX_NAMESPACES) if tag not in self._by_tag), None)
            if tag is None:
                raise ConflictError(f"the pool has {_MAX_NAMESPACES} namespaces, as many as it can have")
            namespace = self._add(name, tag)
        namespace.num_sessions += 1
        self._unused.pop(namespace.tag, None)
        return namespace

    def fresh_name(self, name: str, life: str) -> str:
        """The name of a new epoch of a namespace. `life`: an id of this life of the pool."""
        self._last_epoch += 1
        return f"{name.partition('@')[0]}@{life}-{self._last_epoch}"

    def restore(self, name: str, tag: int) -> Namespace:
        """A namespace with the number that it had before a restart, for a session that then leaves it."""
        namespace = self._add(name, tag)
        namespace.num_sessions += 1
        return namespace

    def leave(self, namespace: Namespace) -> None:
        """A session does not use it any more."""
        namespace.num_sessions -= 1
        if not namespace.num_sessions:
            self._unused[namespace.tag] = namespace
            self.forget_if_empty(namespace)

    def drop(self, name: str) -> Namespace | None:
        """Let no session find the blocks of this namespace; returns None if there is none. Stores in flight do not
        become visible. Its blocks are the first to be evicted, or removed by the caller. O(slots being written).
        Raises `ConflictError` if it has sessions."""
        namespace = self._by_name.get(name)
        if namespace is None:
            return None
        if namespace.num_sessions:
            raise ConflictError(f"namespace {name!r} is used by {namespace.num_sessions} sessions; detach them first")
        del self._by_name[name]
        namespace.is_dropped = True
        namespace.pending_stores.disown_from(0)
        del self._unused[namespace.tag]
        self._unused = {namespace.tag: namespace, **self._unused}
        self.forget_if_empty(namespace)
        return namespace

    def _add(self, name: str, tag: int) -> Namespace:
        namespace = Namespace(name, tag, self._slot_keys, self._make_policy())
        self._by_name[name] = self._by_tag[tag] = namespace
        self._slot_keys.has_namespaces |= len(self._by_tag) > 1 or tag > 0
        self.only = namespace if len(self._by_tag) == 1 else None
        return namespace

    def forget_if_empty(self, namespace: Namespace) -> None:
        """Forget a namespace that has no sessions and no slots."""
        if namespace.num_sessions or not namespace.is_empty or self._by_tag.get(namespace.tag) is not namespace:
            return
        del self._by_tag[namespace.tag], self._unused[namespace.tag]
        if not namespace.is_dropped:
            del self._by_name[namespace.name]
            namespace.is_dropped = True
        self.only = next(iter(self._by_tag.values())) if len(self._by_tag) == 1 else None

    def policy_of(self, slots: Sequence[int]) -> EvictionPolicy:
        """The policy of slots of one namespace."""
        return self.of_slot(slots[0]).policy

    def of_slot(self, slot: int) -> Namespace:
        """The namespace of the block in this slot."""
        return self.only or self._by_tag[self._slot_keys.tag_of[slot]]

    def grouped(self, slots: list[int]) -> Iterable[tuple[Namespace, list[int]]]:
        """The slots, which hold visible blocks, by namespace."""
        if self.only:
            return ((self.only, slots),)
        groups: dict[int, list[int]] = {}
        for slot in slots:
            groups.setdefault(self._slot_keys.tag_of[slot], []).append(slot)
        return [(self._by_tag[tag], some) for tag, some in groups.items()]

    def slots_of(self, namespace: Namespace, low: int, high: int) -> list[int]:
        """Its slots from `low` to below `high`."""
        if self._by_tag.get(namespace.tag) is not namespace:
            return []
        tag_of = self._slot_keys.tag_of
        return [slot for slot, _ in self._slot_keys.between(low, high) if tag_of[slot] == namespace.tag]

    def find_all(self, keys: Iterable[bytes]) -> list[int]:
        """The slots of these keys in all namespaces."""
        keys = list(keys)
        found = (namespace.keys.slots_of(keys) for namespace in self._by_tag.values())
        return [slot for slots in found for slot in slots if slot is not None]

    def keys_being_stored(self) -> list[bytes]:
        """O(slots being written)."""
        return [key for namespace in self._by_tag.values() for key in namespace.pending_stores]

    def disown(self, keys: Iterable[bytes]) -> None:
        """Keep these keys from becoming visible, as far as they are being stored, in all namespaces."""
        keys = list(keys)
        for namespace in self._by_tag.values():
            namespace.pending_stores.disown(keys)
