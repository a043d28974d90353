"""The index: which key is in which slot, and how each slot is used.

Every used slot is in exactly one of these sets:

    filling      a store is writing it; its key is invisible
    cached       visible and evictable
    held         leased (by `hold`); visible, or an orphan whose key was removed meanwhile
    quarantined  a store was given up while some rank may still write it
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Literal

from kvstow.control.chains import NO_LIMIT, Chains, FoundKeys, Limit, Running
from kvstow.control.hazards import Hazards
from kvstow.control.namespaces import Namespace, Namespaces
from kvstow.control.slots import RefCounts, SlotKeys, SlotSet, SlotTimes

_SHARE = 16
"""How many blocks are evicted from one namespace before the next one is chosen."""


@dataclass(frozen=True, slots=True)
class Removal:
    """Keys that left the index, the slots that this has freed, and the slots that holders keep in use (`orphans`).

    `counts`: each namespace and how many of the keys belong to it, in the order of the keys.
    """

    keys: tuple[bytes, ...]
    freed: list[int]
    orphans: Sequence[int] = ()
    counts: Sequence[tuple[Namespace, int]] = ()


class Index:
    """Keys and the use of slots. Not locked; each call is O(keys or slots given).

    Sequences of keys and slots are in prefix order, root first; the root is evicted last.
    """

    def __init__(self) -> None:
        self.times = SlotTimes()
        self.slot_keys = SlotKeys()
        self.held = RefCounts()
        """How often each slot is held. A held slot is not evicted; see `hold`."""
        self._num_orphans = 0
        """Held slots whose key was removed."""
        self.chains = Chains(Hazards(), self.held)
        self.namespaces = Namespaces(self.slot_keys, self.chains.make_order)
        self.quarantined = SlotSet()
        """Used slots that some process may still write, although no store is to become visible there."""

    # -- counts ---------------------------------------------------------------------------------------------

    @property
    def num_cached(self) -> int:
        return self.num_visible - len(self.held) + self._num_orphans

    @property
    def num_filling(self) -> int:
        return sum([len(namespace.pending_stores) for namespace in self.namespaces])

    @property
    def num_visible(self) -> int:
        return sum([len(namespace.keys) for namespace in self.namespaces])

    # -- holds ----------------------------------------------------------------------------------------------

    def hold(self, slots: list[int]) -> None:
        """Keep visible slots from eviction until `unhold` with the same slots."""
        self.held.increment(slots)

    def unhold(self, slots: list[int]) -> list[int]:
        """End a hold. Returns the slots that this frees, because their keys were removed meanwhile."""
        slots = self.held.decrement(slots)
        freed: list[int] = []
        if self._num_orphans:
            key_of = self.slot_keys.key_of
            freed = [slot for slot in slots if key_of[slot] is None]
            self._num_orphans -= len(freed)
        self.chains.unhold(slots)
        return freed

    # -- requests -------------------------------------------------------------------------------------------

    def extend(self, running: Running, namespace: Namespace, keys: Sequence[bytes], now: float) -> None:
        """Add the next blocks to the chain of a request that is being admitted; see `Chains.extend`."""
        if len(set(keys)) < len(keys):  # no chain repeats a block, but a client may
            keys = list(dict.fromkeys(keys))
        runs = namespace.keys.leading_runs(keys)
        found = FoundKeys(runs)
        leading = sum(map(len, runs))
        if leading < len(keys):
            rest = keys[leading:]
            found = FoundKeys(runs, rest, namespace.keys.slots_of(rest))
        self.times.mark_used(runs, now)
        self.chains.extend(running, found, now)

    def absorb(self, running: Running, namespace: Namespace, keys: Sequence[bytes], now: float) -> None:
        """Add the blocks of all KV groups of a request that is about to end; see `Chains.absorb`. If the request has no
        blocks yet, the visible ones of these become its own."""
        keys = list(dict.fromkeys(keys))
        found = namespace.keys.slots_of(keys)
        slots = [slot for slot in found if slot is not None]
        self.times.mark_used([slots], now)
        if running.parts:
            pairs = zip(keys, found, strict=True)
            stores = namespace.pending_stores
            self.chains.absorb(running, [(key, slot) for key, slot in pairs if slot is not None or key in stores])
        elif slots:
            self.chains.extend(running, FoundKeys([slots]), now)

    def evictable(self, runs: Sequence[Sequence[int]]) -> list[int]:
        """Return the evictable slots of these runs, each only once."""
        slots = list(chain.from_iterable(runs))
        if len(set(slots)) < len(slots):
            slots = list(dict.fromkeys(slots))
        return self.unused(slots)

    def unused(self, slots: list[int]) -> list[int]:
        """Return the slots that are not held, in the order given."""
        return self.held.free_of(slots)

    # -- stores ---------------------------------------------------------------------------------------------

    def restore(
        self, namespace: Namespace, keys: Sequence[bytes], slots: Sequence[int], pasts: bytes, now: float
    ) -> None:
        """Take in blocks that an earlier life of the pool has stored in these slots, which are in ascending order; see
        `Chains.restore`."""
        namespace.keys.put(keys, slots)
        self.times.mark_stored(slots, now)
        self.chains.restore(namespace.order, slots, pasts, now)

    def lose_contents(self, low: int, now: float) -> None:
        """Note that the contents of the slots from `low` on are lost. Stores in flight to them do not become visible.
        The caller removes the visible blocks."""
        for namespace in self.namespaces:
            namespace.pending_stores.disown_from(low)
        if low == 0:
            self.times.mark_lost(now)

    def quarantine(self, namespace: Namespace, slots: Sequence[int]) -> None:
        """Keep the slots of an abandoned store from other uses, because some rank may still write them."""
        namespace.pending_stores.abandon(slots)
        self.quarantined.add(slots)

    # -- removal --------------------------------------------------------------------------------------------

    def evict(self, num_slots: int, limit: Limit = NO_LIMIT) -> Removal:
        """Remove up to `num_slots` evictable blocks, and free their slots. Blocks of namespaces without sessions go
        first, whatever the `limit`: those of dropped namespaces, then those of the namespace that has been without
        sessions for the longest time. Then the blocks go that are first in the policy's order. If there are several
        namespaces, the next one is chosen after at most 16 blocks of one."""
        evicted: list[bytes] = []
        freed: list[int] = []
        counts: list[tuple[Namespace, int]] = []
        while len(freed) < num_slots and (namespace := self.namespaces.only or self._next_to_evict()):
            wanted = num_slots - len(freed)
            if self.namespaces.only is None and namespace.num_sessions:
                wanted = min(wanted, _SHARE)
            taken = self.chains.evict(namespace.order, wanted, limit if namespace.num_sessions else NO_LIMIT)
            slots = [slot for _, some in taken for slot in some]
            if not slots:
                break
            keys, at = namespace.keys.take(slots), 0
            for part, some in taken:
                self.chains.forget_keys(part, keys[at : at + len(some)])
                at += len(some)
            evicted += keys
            freed += slots
            counts.append((namespace, len(slots)))
            if self.namespaces.only is None:
                self.namespaces.forget_if_empty(namespace)
        return Removal(tuple(evicted), freed, counts=counts)

    def _next_to_evict(self) -> Namespace | None:
        """Return the namespace whose block is evicted next, or None."""
        chains = self.chains
        for namespace in self.namespaces.unused():
            if chains.next_list(namespace.order) is not None:
                return namespace
        found = ((watches, one) for one in self.namespaces if (watches := chains.next_list(one.order)) is not None)
        lowest = min(found, key=lambda pair: chains.rank_of(pair[0]), default=None)
        return None if lowest is None else lowest[1]

    def evict_below(self, slot: int, num_slots: int, budget: int) -> Removal:
        """Remove up to `num_slots` evictable blocks in the slots below `slot`. Only the next `budget` blocks in the
        order of eviction are searched for them."""
        used = (namespace for namespace in self.namespaces if namespace.num_sessions)
        orders = chain.from_iterable(self.chains.slots_of(one.order) for one in chain(self.namespaces.unused(), used))
        found = [one for one in self.unused(list(islice(orders, budget))) if one < slot][:num_slots]
        for namespace, some in self.namespaces.grouped(found):
            self.chains.remember(namespace.order, some, self.slot_keys)
        return self.remove(found)

    def remove(self, slots: Iterable[int]) -> Removal:
        """Remove visible blocks, also held ones. A held slot stays in use until its last `unhold`."""
        key_of = self.slot_keys.key_of
        visible = [slot for slot in dict.fromkeys(slots) if key_of[slot] is not None]
        freed = self.unused(visible)
        orphans = [slot for slot in visible if slot in self.held] if len(freed) < len(visible) else []
        self.chains.remove(visible)
        keys: list[bytes] = []
        counts: list[tuple[Namespace, int]] = []
        for namespace, some in self.namespaces.grouped(visible):
            keys += namespace.keys.take(some)
            counts.append((namespace, len(some)))
        self._num_orphans += len(orphans)
        return Removal(tuple(keys), freed, orphans, counts)

    # -- slices of the pool ---------------------------------------------------------------------------------

    def evictable_since(self, what: Literal["stored", "used"], moment: float, low: int, high: int) -> list[int]:
        """Return the evictable slots from `low` to below `high` whose blocks were stored, or last used, at `moment` or
        before."""
        found = self.times.until(what, moment, low, high)
        visible = [slot for slot in found if self.slot_keys.key_of[slot] is not None]
        return self.unused(visible)

    # -- size -----------------------------------------------------------------------------------------------

    def set_num_slots(self, num_slots: int) -> None:
        """Give the pool the slots below `num_slots`. The caller removes the blocks above."""
        self.slot_keys.grow(num_slots)
        self.times.grow(num_slots)
        self.chains.grow(num_slots)
        self.held.grow(num_slots)
        self.quarantined.grow(num_slots)

    def make_tables(self, num_slots: int) -> None:
        """Make the tables whose size follows from that of the pool. No other thread may use the pool yet."""
        for _ in self.chains.evicted_blocks.fit(num_slots):
            pass
        for _ in self.slot_keys.table.fit(num_slots):
            pass

    # -- integrity ------------------------------------------------------------------------------------------

    def visible_slots(self) -> set[int]:
        """Return all slots with a visible block. O(pool): for integrity checks."""
        return set().union(*(namespace.keys.slots() for namespace in self.namespaces))

    def slots_in_use(self) -> dict[str, set[int]]:
        """Return the used slots by state. O(pool): for integrity checks."""
        return {
            "filling": set().union(*(namespace.pending_stores.slots() for namespace in self.namespaces)),
            "cached": self.visible_slots() - self.held.slots(),
            "leased": self.held.slots(),
            "quarantined": self.quarantined.slots(),
        }

    def defects(self) -> list[str]:
        """Return inconsistencies within the index. O(pool): for integrity checks."""
        found = [defect for namespace in self.namespaces for defect in namespace.keys.defects()]
        visible = self.visible_slots()
        if visible != {slot for slot, key in enumerate(self.slot_keys.key_of) if key is not None}:
            found.append("a visible slot belongs to no namespace")
        held = self.held.slots()
        if len(visible - held) != self.num_cached:
            found.append("the count of evictable slots is wrong")
        found += self.chains.defects([one.order for one in self.namespaces], visible, held)
        if self._num_orphans != len(held - visible):
            found.append("the count of orphans is not that of held slots without a key")
        num_pending = sum([namespace.pending_stores.num_linked for namespace in self.namespaces])
        if self.slot_keys.table.num_linked != len(visible) + num_pending:
            found.append("the table of keys has other slots than the namespaces")
        if not all(namespace.pending_stores.is_consistent() for namespace in self.namespaces):
            found.append("the keys and slots that are being stored do not match")
        if not self.held.is_consistent():
            found.append("the count of held slots is wrong")
        return found
