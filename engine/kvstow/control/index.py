"""The index: which key lies in which slot, and which slots are in use.

Every used slot is in exactly one of these sets:

    filling      a store is writing it; its key is invisible
    cached       visible and evictable: these, and no others, are in the eviction policy
    held         leased (by `hold`); visible, or an orphan whose key was removed meanwhile
    pinned       visible and pinned by an operator (may be held too)
    quarantined  a store was given up while some rank may still write it
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from kvstow.control.arc import ArcPolicy
from kvstow.control.filling import Filling
from kvstow.control.holds import Holds
from kvstow.control.keymap import KeyMap
from kvstow.control.pins import Pins
from kvstow.control.policy import EvictionPolicy, LruPolicy
from kvstow.control.recency import Links, RecencyList
from kvstow.control.times import SlotTimes
from kvstow.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Removal:
    """Keys that left the index, and the slots that are free for other use because of it."""

    keys: tuple[bytes, ...]
    freed: list[int]


class Index:
    """Keys and the use of slots. Not locked; each call is O(keys or slots given).

    Sequences of keys and slots are in prefix order, root first: the order in which they stay longest.
    """

    def __init__(self, policy: str) -> None:
        self._links = Links()
        self.keys = KeyMap()
        self.filling = Filling()
        self._held = Holds()
        self._orphans: set[int] = set()
        self._pins = Pins()
        self._held_and_pinned = 0
        self._quarantined: set[int] = set()
        self.times = SlotTimes()
        self._num_slots = 0
        self.policy: EvictionPolicy = self._make_policy(policy, RecencyList(self._links))

    # -- counts ---------------------------------------------------------------------------------------------

    @property
    def num_cached(self) -> int:
        return len(self.policy)

    @property
    def num_leased(self) -> int:
        """Held slots that are not pinned."""
        return len(self._held) - self._held_and_pinned

    @property
    def num_pinned(self) -> int:
        return len(self._pins)

    @property
    def num_quarantined(self) -> int:
        return len(self._quarantined)

    # -- look-up --------------------------------------------------------------------------------------------

    def is_pinned(self, slot: int) -> bool:
        return slot in self._pins

    def pin_expiry(self, slot: int) -> float | None:
        """When the operator's pin ends (`inf`: never); None where there is no pin."""
        return self._pins.end_of(slot)

    def holds(self, slot: int) -> int:
        """How many holds are on the slot."""
        return self._held.count(slot)

    # -- holds ----------------------------------------------------------------------------------------------

    def hold(self, slots: list[int]) -> None:
        """Keep visible slots from eviction until `unhold` with the same slots."""
        slots = self._held.add(slots)
        unpinned = self._pins.unpinned(slots)
        self._held_and_pinned += len(slots) - len(unpinned)
        self.policy.detach(unpinned)

    def unhold(self, slots: list[int]) -> list[int]:
        """End a hold. Returns the slots that are free now, because their keys were removed meanwhile."""
        slots = self._held.remove(slots)
        freed: list[int] = []
        if self._orphans:
            freed = [slot for slot in slots if slot in self._orphans]
            self._orphans.difference_update(freed)
            slots = [slot for slot in slots if self.keys.key_of[slot] is not None]
        unpinned = self._pins.unpinned(slots)
        self._held_and_pinned -= len(slots) - len(unpinned)
        self.policy.attach(unpinned)
        return freed

    def use(self, runs: Sequence[Sequence[int]], now: float) -> None:
        """The visible blocks in these runs of slots were used, without being held."""
        self.times.mark_used(runs, now)
        self.policy.use(self._evictable(runs))

    def refresh(self, runs: Sequence[Sequence[int]], now: float) -> None:
        """Evict these visible slots as late as if just stored; held or pinned ones once released."""
        self.times.mark_used(runs, now)
        self.policy.refresh(self._evictable(runs))

    def _evictable(self, runs: Sequence[Sequence[int]]) -> list[int]:
        """Those of the slots that the policy has, without repeats."""
        slots = list(chain.from_iterable(runs))
        if len(set(slots)) < len(slots):
            slots = list(dict.fromkeys(slots))
        return self._pins.unpinned(self._held.free_of(slots))

    # -- stores ---------------------------------------------------------------------------------------------

    def publish(self, keys: Sequence[bytes], slots: Sequence[int], now: float) -> Removal:
        """Filling slots, in ascending order, hold valid bytes: their keys become visible. Those disowned meanwhile are
        freed.

        Returns the keys that were published, and the freed slots.
        """
        disowned = self.filling.remove(keys, slots)
        if disowned:
            keys = [key for key, slot in zip(keys, slots, strict=True) if slot not in disowned]
            slots = [slot for slot in slots if slot not in disowned]
        self.keys.put(keys, slots)
        self.times.mark_stored(slots, now)
        self.policy.admit(list(slots))
        return Removal(tuple(keys), list(disowned))

    def lose_contents(self, low: int, now: float) -> None:
        """The contents of the slots from `low` on are lost. Those being stored do not become visible; visible blocks
        are removed by the caller."""
        self.filling.disown_from(low)
        if low == 0:
            self.times.mark_lost(now)

    def quarantine(self, keys: Sequence[bytes], slots: Sequence[int]) -> None:
        """A store was given up, but some rank may still write its slots."""
        self.filling.remove(keys, slots)
        self._quarantined.update(slots)

    def end_quarantine(self, slots: Iterable[int]) -> None:
        """No rank writes these slots any more: the caller frees them."""
        self._quarantined.difference_update(slots)

    def needs_all(self, keys: Sequence[bytes], slots: Sequence[int | None]) -> bool:
        """Whether these keys, which lie in `slots`, are all new and different."""
        absent = slots.count(None) == len(keys) and self.filling.isdisjoint(keys)
        return absent and len(set(keys)) == len(keys)

    # -- removal --------------------------------------------------------------------------------------------

    def evict(self, num_slots: int) -> Removal:
        """Remove up to `num_slots` evictable blocks, in the policy's order; their slots are free."""
        slots = self.policy.evict(num_slots)
        return Removal(tuple(self.keys.take(slots)), slots)

    def remove(self, slots: Iterable[int]) -> Removal:
        """Remove visible blocks, whatever holds them. A held slot stays in use until its last `unhold`."""
        key_of = self.keys.key_of
        visible = [slot for slot in dict.fromkeys(slots) if key_of[slot] is not None]
        freed: list[int] = []
        cached: list[int] = []
        for slot in visible:
            pinned = self._pins.discard(slot)
            if slot in self._held:
                self._orphans.add(slot)
                self._held_and_pinned -= pinned
            else:
                freed.append(slot)
                if not pinned:
                    cached.append(slot)
        self.policy.detach(cached)
        return Removal(tuple(self.keys.take(visible)), freed)

    # -- operator's pins ------------------------------------------------------------------------------------

    def pin(self, slots: list[int], end: float) -> None:
        """Keep visible slots from eviction until `end` (`inf`: until `unpin`); a new pin replaces an old one."""
        unpinned = self._pins.unpinned(slots)
        unheld = self._held.free_of(unpinned)
        self._held_and_pinned += len(unpinned) - len(unheld)
        self.policy.detach(unheld)
        for slot in slots:
            self._pins.add(slot, end)

    def end_pins(self, now: float, limit: int) -> int:
        """End up to `limit` of the pins that are over at `now`; returns how many it ended. O(limit)."""
        due = self._pins.due(now, limit)
        return self._unpin(due) if due else 0

    def unpin(self, slots: list[int]) -> int:
        """End the pins of these slots; returns how many there were."""
        return self._unpin([slot for slot in slots if slot in self._pins])

    def unpin_between(self, low: int, high: int) -> int:
        """End all pins of the slots from `low` to below `high`; returns how many there were."""
        return self._unpin(self._pins.between(low, high))

    def _unpin(self, slots: list[int]) -> int:
        for slot in slots:
            self._pins.discard(slot)
        unheld = self._held.free_of(slots)
        self._held_and_pinned -= len(slots) - len(unheld)
        self.policy.attach(unheld)
        return len(slots)

    def num_pinned_from(self, slot: int) -> int:
        """How many slots from `slot` on are pinned. O(pool / 1,024)."""
        return self._pins.count_from(slot)

    # -- slices of the pool ---------------------------------------------------------------------------------

    def evictable_since(self, what: Literal["stored", "used"], moment: float, low: int, high: int) -> list[int]:
        """Evictable slots from `low` to below `high` whose blocks were last stored, or used, at `moment` or before."""
        until = self.times.stored_until if what == "stored" else self.times.used_until
        visible = [slot for slot in until(moment, low, high) if self.keys.key_of[slot] is not None]
        return self._pins.unpinned(self._held.free_of(visible))

    # -- policy and size ------------------------------------------------------------------------------------

    def set_policy(self, name: str) -> EvictionPolicy | None:
        """Change the order of eviction without touching a slot: the new policy starts from the present order. Returns
        the policy that was replaced, if any."""
        if name == self.policy.name:
            return None
        replaced = self.policy
        self.policy = self._make_policy(name, replaced.hand_over())
        self.policy.set_capacity(self._num_slots)
        return replaced

    def set_num_slots(self, num_slots: int) -> None:
        """The pool has the slots below `num_slots`; blocks above it are removed by the caller."""
        self._num_slots = num_slots
        self._links.grow(num_slots)
        self.keys.grow(num_slots)
        self.times.grow(num_slots)
        self.policy.set_capacity(num_slots)

    def _make_policy(self, name: str, order: RecencyList) -> EvictionPolicy:
        if name == "lru":
            return LruPolicy(order)
        if name == "arc":
            return ArcPolicy(order, self._links, self.keys.key_of)
        raise ConfigError("policy", name, "lru or arc")

    # -- integrity ------------------------------------------------------------------------------------------

    def slots_in_use(self) -> dict[str, set[int]]:
        """The used slots by state; held and pinned ones count as pinned. O(pool): for integrity checks."""
        pinned = self._pins.slots()
        return {
            "filling": self.filling.slots(),
            "cached": set(self.policy),
            "leased": self._held.slots() - pinned,
            "pinned": pinned,
            "quarantined": set(self._quarantined),
        }

    def outlived_a_loss(self, slot: int) -> bool:
        """Whether the block in `slot` was stored before all contents were lost."""
        return self.times.outlived_a_loss(slot)

    def defects(self) -> list[str]:
        """What does not balance within the index. O(pool): for integrity checks."""
        found = self.keys.defects()
        visible = self.keys.slots()
        held, pinned = self._held.slots(), self._pins.slots()
        cached = list(self.policy)
        if len(cached) != len(self.policy) or len(set(cached)) != len(cached):
            found.append("the eviction order repeats or loses slots")
        if set(cached) != visible - held - pinned:
            found.append("the evictable slots are not those that are visible and unused")
        if self._orphans != held - visible:
            found.append("orphans are not the held slots without a key")
        if not pinned <= visible:
            found.append("a pinned slot is not visible")
        if self._held_and_pinned != len(held & pinned):
            found.append("the count of held and pinned slots is wrong")
        if not self.filling.balances():
            found.append("the count of filling slots is wrong")
        if not self._held.balances():
            found.append("a slot has further holders, but no first one")
        if not self._pins.balances():
            found.append("the pins by slot and by end differ")
        return found
