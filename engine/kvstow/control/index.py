"""The index: which key is in which slot, and how each slot is used.

Every used slot is in exactly one of these sets:

    filling      a store is writing it; its key is invisible
    cached       visible and evictable; exactly these are in an order of eviction
    held         leased (by `hold`); visible, or an orphan whose key was removed meanwhile
    quarantined  a store was given up while some rank may still write it
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from math import inf
from typing import Literal

from kvstow.control.claims import Claims, Context
from kvstow.control.fetchedslots import FetchedSlots
from kvstow.control.namespaces import Namespace, Namespaces
from kvstow.control.policy import EvictionOrder, Links
from kvstow.control.slots import RefCounts, SlotKeys, SlotSet, SlotTimes
from kvstow.control.uses import Uses

_VISITS_PER_SLOT, _SLICE = 4, 256
"""The most claimed blocks that are visited for each block that is to be evicted, and how many more. Where only claimed
blocks are left, a store may find fewer than it wants; what was visited is found sooner by the next one."""
_SHARE = 16
"""Blocks that are evicted from one namespace before the next one is chosen."""


@dataclass(frozen=True, slots=True)
class Removal:
    """Keys that left the index, the slots that this has freed, and those that holders keep in use.

    `counts`: how many of the keys are of which namespace, in their order.
    """

    keys: tuple[bytes, ...]
    freed: list[int]
    orphans: Sequence[int] = ()
    counts: Sequence[tuple[Namespace, int]] = ()


class Index:
    """Keys and the use of slots. Not locked; each call is O(keys or slots given).

    Sequences of keys and slots are in prefix order, root first; the root is evicted last.
    """

    def __init__(self, k: float = 0.0) -> None:
        """`k`: see `Uses`."""
        links = self._links = Links()
        self.times = SlotTimes()
        uses = self.uses = Uses(self.times, k)
        self.slot_keys = SlotKeys()
        self.namespaces = Namespaces(self.slot_keys, lambda: EvictionOrder(links, uses))
        self.held = RefCounts()
        """Who keeps which slot from eviction; see `hold`."""
        self._num_orphans = 0
        """Held slots whose key was removed."""
        self._num_slots = 0
        self.quarantined = SlotSet()
        """Used slots that some process may still write, although no store is to become visible there."""
        self.claims: Claims | None = None
        """None until a request comes with hints."""
        self.fetched = FetchedSlots()

    # -- counts ---------------------------------------------------------------------------------------------

    @property
    def num_cached(self) -> int:
        others = len(self.fetched) + (0 if self.claims is None else self.claims.num_evictable)
        if self.namespaces.only:
            return len(self.namespaces.only.order) + others
        return sum([len(namespace.order) for namespace in self.namespaces]) + others

    @property
    def num_filling(self) -> int:
        return sum([len(namespace.pending_stores) for namespace in self.namespaces])

    @property
    def num_visible(self) -> int:
        return sum([len(namespace.keys) for namespace in self.namespaces])

    # -- holds ----------------------------------------------------------------------------------------------

    def hold(self, slots: list[int]) -> None:
        """Keep visible slots of one namespace from eviction until `unhold` with the same slots."""
        slots = self.held.increment(slots)
        if slots:
            self._detach(self.namespaces.of_slot(slots[0]), slots)

    def unhold(self, slots: list[int]) -> list[int]:
        """End a hold. Returns the slots that this frees, because their keys were removed meanwhile."""
        slots = self.held.decrement(slots)
        freed: list[int] = []
        if self._num_orphans:
            key_of = self.slot_keys.key_of
            freed = [slot for slot in slots if key_of[slot] is None]
            self._num_orphans -= len(freed)
            slots = [slot for slot in slots if key_of[slot] is not None]
        if slots:
            self._attach(self.namespaces.of_slot(slots[0]), slots)
        return freed

    def _detach(self, namespace: Namespace, slots: list[int]) -> None:
        """These slots are not evictable any more."""
        slots = self.fetched.detach(slots)
        if self.claims is not None:
            unclaimed = self.claims.unclaimed(slots)
            self.claims.num_evictable -= len(slots) - len(unclaimed)
            slots = unclaimed
        namespace.order.detach(slots)

    def _attach(self, namespace: Namespace, slots: list[int]) -> None:
        """These slots are evictable; they have just been used."""
        slots = self.fetched.attach(slots)
        if self.claims is not None:
            unclaimed = self.claims.unclaimed(slots)
            self.claims.num_evictable += len(slots) - len(unclaimed)
            slots = unclaimed
        namespace.order.attach(slots)

    def refresh(self, runs: Sequence[Sequence[int]], now: float) -> None:
        """Mark these visible slots of one namespace as just used. Held ones return to the order as just used
        anyway."""
        self.times.mark_used(runs, now)
        slots = self._ordered(runs)
        if slots:
            self.namespaces.of_slot(slots[0]).order.refresh(slots)

    def use(
        self, namespace: Namespace, runs: Sequence[Sequence[int]], absent: Sequence[bytes], now: float, least: int = 0
    ) -> tuple[int, int]:
        """A request has used a chain of blocks: that counts, and those that are visible, in these runs of slots, are
        marked as just used. `absent`: the keys of the others. Returns how many of the visible ones nobody had used
        before, and the least uses of the chain (`Uses.count`)."""
        namespace.order.attach(self.unused(self.fetched.use(list(chain.from_iterable(runs)))))
        slots = self._ordered(runs)
        classes = self.uses.classes(slots)
        new = self.uses.num_unused(runs)
        self.uses.recall(runs, self.slot_keys, namespace.tag)
        least = self.uses.count(runs, least)
        self.times.mark_used(runs, now)
        namespace.order.reclassify(slots, classes)
        if absent:
            self.uses.count_absent(absent, namespace.tag)
        return new, least

    def _ordered(self, runs: Sequence[Sequence[int]]) -> list[int]:
        """The slots among these that are in the order of eviction, without repeats."""
        slots = self.fetched.others(self.evictable(runs))
        return slots if self.claims is None else self.claims.unclaimed(slots)

    def evictable(self, runs: Sequence[Sequence[int]]) -> list[int]:
        """The slots among these that are evictable, without repeats."""
        slots = list(chain.from_iterable(runs))
        if len(set(slots)) < len(slots):
            slots = list(dict.fromkeys(slots))
        return self.unused(slots)

    def unused(self, slots: list[int]) -> list[int]:
        """Those of the slots that are not held, in the order given."""
        return self.held.free_of(slots)

    # -- stores ---------------------------------------------------------------------------------------------

    def admit(self, namespace: Namespace, slots: Sequence[int], now: float, *, is_fetched: bool = False) -> None:
        """The keys of these slots, in ascending order, have just become visible: the slots hold valid bytes. Computed
        blocks are evicted last, and blocks that were fetched from the store below the pool first."""
        self.times.mark_stored(slots, now)
        self.uses.admit(slots)
        if is_fetched:
            self.fetched.add(slots)
        else:
            namespace.order.attach(list(slots))

    def lose_contents(self, low: int, now: float) -> None:
        """The contents of the slots from `low` on are lost. Stores in flight to them do not become visible; the caller
        removes visible blocks."""
        for namespace in self.namespaces:
            namespace.pending_stores.disown_from(low)
        if low == 0:
            self.times.mark_lost(now)

    def quarantine(self, namespace: Namespace, slots: Sequence[int]) -> None:
        """A store was abandoned, but some rank may still write its slots."""
        namespace.pending_stores.abandon(slots)
        self.quarantined.add(slots)

    # -- removal --------------------------------------------------------------------------------------------

    def evict(self, num_slots: int) -> Removal:
        """Remove up to `num_slots` evictable blocks; frees their slots. Blocks that were fetched go first. Then
        namespaces without sessions, dropped ones before others, then the one that was left first. Within one, in its
        order; among those with sessions, the blocks with the least worth, 16 at a time. Claimed blocks go before those
        that are expected to be used earlier."""
        evicted: list[bytes] = []
        freed: list[int] = []
        counts: list[tuple[Namespace, int]] = []
        for namespace, slots in self.namespaces.grouped(self.fetched.evict(num_slots)):
            some = namespace.keys.take(slots)
            self.uses.evict(some, slots, namespace.tag)
            evicted += some
            freed += slots
            counts.append((namespace, len(slots)))
            self.namespaces.forget_if_empty(namespace)
        missing = num_slots - len(freed)
        if missing:
            rest = self._evict_others(missing)
            if not freed:
                return rest
            return Removal((*evicted, *rest.keys), freed + rest.freed, counts=[*counts, *rest.counts])
        return Removal(tuple(evicted), freed, counts=counts)

    def _evict_others(self, num_slots: int) -> Removal:
        """`evict`, when no fetched block is left."""
        if self.claims is not None:
            return self._evict_with(self.claims, num_slots)
        if only := self.namespaces.only:
            keys, slots = self._evict_from(only, num_slots)
            return Removal(keys, slots, counts=((only, len(slots)),))
        evicted: list[bytes] = []
        freed: list[int] = []
        counts: list[tuple[Namespace, int]] = []
        while len(freed) < num_slots and (namespace := self._next_to_evict()):
            missing = num_slots - len(freed)
            some, slots = self._evict_from(namespace, min(missing, _SHARE) if namespace.num_sessions else missing)
            evicted += some
            freed += slots
            counts.append((namespace, len(slots)))
            self.namespaces.forget_if_empty(namespace)
        return Removal(tuple(evicted), freed, counts=counts)

    def _evict_with(self, claims: Claims, num_slots: int) -> Removal:
        keys: list[bytes] = []
        freed: list[int] = []
        counts: list[tuple[Namespace, int]] = []
        claims.settle(num_slots)
        most = _VISITS_PER_SLOT * num_slots + _SLICE
        while len(freed) < num_slots:
            missing = min(num_slots - len(freed), _SHARE)
            namespace, idle = self._next_to_evict(), None
            if namespace is not None:
                idle = claims.now - self.times.used_at(namespace.order.next_slot()) if namespace.num_sessions else inf
            if namespace is None and most <= 0:
                break
            if most > 0 and claims.go_first(idle):
                most -= missing
                namespace, slots = claims.take(missing)
                if namespace is None:
                    if not claims.is_leaving:
                        break
                    claims.settle(missing)
                    continue
                slots = self.unused(slots)
                claims.num_evictable -= len(slots)
                some = namespace.keys.take(slots)
                self.uses.evict(some, slots, namespace.tag)
            else:
                assert namespace is not None
                some, slots = self._evict_from(namespace, missing)
                if idle is not None and idle < inf:
                    claims.evicted.watch(some, idle, claims.now)
            keys += some
            freed += slots
            counts.append((namespace, len(slots)))
            self.namespaces.forget_if_empty(namespace)
        return Removal(tuple(keys), freed, counts=counts)

    def _evict_from(self, namespace: Namespace, count: int) -> tuple[tuple[bytes, ...], list[int]]:
        slots = namespace.order.evict(count)
        keys = namespace.keys.take(slots)
        self.uses.evict(keys, slots, namespace.tag)
        return keys, slots

    def _next_to_evict(self) -> Namespace | None:
        """The namespace whose block is evicted next."""
        for namespace in self.namespaces.unused():
            if len(namespace.order):
                return namespace
        found = (namespace for namespace in self.namespaces if len(namespace.order))
        return min(found, key=lambda one: one.order.next_worth(), default=None)

    def evict_below(self, slot: int, num_slots: int, budget: int) -> Removal:
        """Remove up to `num_slots` of the next `budget` evictable blocks: those in the slots below `slot`."""
        used = (namespace for namespace in self.namespaces if namespace.num_sessions)
        order = chain.from_iterable(namespace.order for namespace in chain(self.namespaces.unused(), used))
        order = chain(list(islice(self.fetched, budget)), order)
        if self.claims is not None:
            order = chain(order, self.unused(self.claims.next_slots(budget + _SLICE)))  # some may be held
        found = [one for one in islice(order, budget) if one < slot][:num_slots]
        for namespace, some in self.namespaces.grouped(found):
            keys = [key for one in some if (key := self.slot_keys.key_of[one]) is not None]
            self.uses.evict(keys, some, namespace.tag)
        return self.remove(found)

    def remove(self, slots: Iterable[int]) -> Removal:
        """Remove visible blocks, also held ones. A held slot stays in use until its last `unhold`."""
        key_of = self.slot_keys.key_of
        visible = [slot for slot in dict.fromkeys(slots) if key_of[slot] is not None]
        freed = self.unused(visible)
        orphans = [slot for slot in visible if slot in self.held] if len(freed) < len(visible) else []
        for namespace, some in self.namespaces.grouped(freed):
            self._detach(namespace, some)
        self.fetched.drop(visible)
        if self.claims is not None:
            self.claims.forget(visible)
        keys: list[bytes] = []
        counts: list[tuple[Namespace, int]] = []
        for namespace, some in self.namespaces.grouped(visible):
            keys += namespace.keys.take(some)
            counts.append((namespace, len(some)))
        self._num_orphans += len(orphans)
        return Removal(tuple(keys), freed, orphans, counts)

    # -- slices of the pool ---------------------------------------------------------------------------------

    def evictable_since(self, what: Literal["stored", "used"], moment: float, low: int, high: int) -> list[int]:
        """Evictable slots from `low` to below `high` whose blocks were last stored, or used, at `moment` or before."""
        found = self.times.until(what, moment, low, high)
        visible = [slot for slot in found if self.slot_keys.key_of[slot] is not None]
        return self.unused(visible)

    # -- claims ---------------------------------------------------------------------------------------------

    def use_claims(self) -> Claims:
        """A request has come with hints."""
        if self.claims is None:
            self.claims = Claims(self.uses, self._unclaim, self._claim)
            self.claims.set_num_slots(self._num_slots)
        return self.claims

    def find_contexts(self, context_id: bytes) -> list[Context]:
        """In all namespaces."""
        if self.claims is None:
            return []
        found = [self.claims.find(namespace, context_id) for namespace in self.namespaces]
        return [context for context in found if context is not None]

    def _claim(self, namespace: Namespace, slots: list[int]) -> None:
        """These slots have got their first claim."""
        assert self.claims is not None
        fetched = set(self.fetched.drop(slots))
        slots = self.unused(slots)
        namespace.order.detach([slot for slot in slots if slot not in fetched] if fetched else slots)
        self.claims.num_evictable += len(slots)

    def _unclaim(self, namespace: Namespace, slots: list[int]) -> None:
        """These slots have lost their last claim."""
        assert self.claims is not None
        slots = self.unused(slots)
        self.claims.num_evictable -= len(slots)
        namespace.order.attach(slots)

    # -- size -----------------------------------------------------------------------------------------------

    def set_num_slots(self, num_slots: int) -> None:
        """The pool has the slots below `num_slots`; the caller removes blocks above."""
        self._links.grow(num_slots)
        self.slot_keys.grow(num_slots)
        self.times.grow(num_slots)
        self.uses.set_num_slots(num_slots)
        self.held.grow(num_slots)
        self.quarantined.grow(num_slots)
        self._num_slots = num_slots
        if self.claims is not None:
            self.claims.set_num_slots(num_slots)

    def make_tables(self, num_slots: int) -> None:
        """Have the tables whose size follows from that of the pool, for one that nobody else uses yet."""
        self.uses.make_room(num_slots)
        for _ in self.slot_keys.table.fit(num_slots):
            pass

    # -- integrity ------------------------------------------------------------------------------------------

    def visible_slots(self) -> set[int]:
        """O(pool): for integrity checks."""
        return set().union(*(namespace.keys.slots() for namespace in self.namespaces))

    def _cached(self) -> list[int]:
        slots = [*self.fetched, *(slot for namespace in self.namespaces for slot in namespace.order)]
        return slots if self.claims is None else [*slots, *self.unused(list(self.claims.claimed.slots()))]

    def slots_in_use(self) -> dict[str, set[int]]:
        """The used slots by state. O(pool): for integrity checks."""
        return {
            "filling": set().union(*(namespace.pending_stores.slots() for namespace in self.namespaces)),
            "cached": set(self._cached()),
            "leased": self.held.slots(),
            "quarantined": self.quarantined.slots(),
        }

    def defects(self) -> list[str]:
        """Inconsistencies within the index. O(pool): for integrity checks."""
        found = [defect for namespace in self.namespaces for defect in namespace.keys.defects()]
        visible = self.visible_slots()
        if visible != {slot for slot, key in enumerate(self.slot_keys.key_of) if key is not None}:
            found.append("a visible slot is of no namespace")
        held = self.held.slots()
        cached = self._cached()
        if len(cached) != self.num_cached or len(set(cached)) != len(cached):
            found.append("the eviction order repeats or loses slots")
        if set(cached) != visible - held:
            found.append("the evictable slots are not those that are visible and unused")
        if self._num_orphans != len(held - visible):
            found.append("the count of orphans is not that of held slots without a key")
        if self.claims is not None:
            found += self.claims.defects(visible)
        num_pending = sum([namespace.pending_stores.num_linked for namespace in self.namespaces])
        if self.slot_keys.table.num_linked != len(visible) + num_pending:
            found.append("the table of keys has other slots than the namespaces")
        if not all(namespace.pending_stores.is_consistent() for namespace in self.namespaces):
            found.append("the keys and slots that are being stored do not match")
        if not self.held.is_consistent():
            found.append("the count of held slots is wrong")
        return found
