"""The index: which key lies in which slot, and which slots are in use.

Every used slot is in exactly one of these sets:

    filling      a store is writing it; its key is invisible
    cached       visible and evictable: these, and no others, are in the eviction policy
    held         leased (by `hold`); visible, or an orphan whose key was removed meanwhile
    pinned       visible and pinned by an operator (may be held too)
    quarantined  a store was given up while some rank may still write it
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import compress, count, repeat
from math import inf, nextafter
from operator import ne

from kvstow.control.arc import ArcPolicy
from kvstow.control.filling import Filling
from kvstow.control.holds import Holds
from kvstow.control.policy import EvictionPolicy, LruPolicy
from kvstow.control.recency import Links, RecencyList
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
        self._slot_of: dict[bytes, int] = {}
        self._key_of: list[bytes | None] = []
        self.filling = Filling()
        self._held = Holds()
        self._orphans: set[int] = set()
        self._pinned: dict[int, float] = {}
        self._expiries: list[tuple[float, int]] = []
        self._held_and_pinned = 0
        self._quarantined: set[int] = set()
        self._stored_at = array("d")
        self._used_at = array("d")
        self._lost_at = -inf
        self._num_slots = 0
        self.policy: EvictionPolicy = self._make_policy(policy, RecencyList(self._links))

    # -- counts ---------------------------------------------------------------------------------------------

    @property
    def num_visible(self) -> int:
        return len(self._slot_of)

    @property
    def num_known_slots(self) -> int:
        """No slot at or above it has ever existed."""
        return len(self._key_of)

    @property
    def num_cached(self) -> int:
        return len(self.policy)

    @property
    def num_leased(self) -> int:
        """Held slots that are not pinned."""
        return len(self._held) - self._held_and_pinned

    @property
    def num_pinned(self) -> int:
        return len(self._pinned)

    @property
    def num_quarantined(self) -> int:
        return len(self._quarantined)

    # -- look-up --------------------------------------------------------------------------------------------

    def leading_run(self, keys: Sequence[bytes]) -> list[int]:
        """Slots of the keys up to the first that is not visible.

        Blocks of a prefix mostly lie in neighbouring slots (`place_store` sees to it). Where they do, comparing
        keys slot by slot reads memory in order and computes no hash: a look-up among a million slots is three times
        as fast as by the dictionary alone.
        """
        key_of, slot_of = self._key_of, self._slot_of
        slots: list[int] = []
        at, last, last_slot = 0, len(keys) - 1, len(key_of) - 1
        while at <= last:
            slot = slot_of.get(keys[at])
            if slot is None:
                break
            run = 1
            if at < last and slot < last_slot and key_of[slot + 1] == keys[at + 1]:
                run = self._run_length(keys, at, slot)
            slots += range(slot, slot + run)
            at += run
        return slots

    def _run_length(self, keys: Sequence[bytes], at: int, slot: int) -> int:
        """How many keys from `at` on lie in the slots from `slot` on; the first two do."""
        run = window = 2
        while run == window and at + run < len(keys):  # all of the window matched: look at one four times as long
            window = min(4 * window, len(keys) - at)
            found = self._key_of[slot + run : slot + window]
            differing = map(ne, keys[at + run : at + window], found)
            run = next(compress(count(run), differing), run + len(found))
        return run

    def slots_of(self, keys: Iterable[bytes]) -> list[int | None]:
        return list(map(self._slot_of.get, keys))

    def key_at(self, slot: int) -> bytes | None:
        """The visible key in `slot`."""
        return self._key_of[slot]

    def is_pinned(self, slot: int) -> bool:
        return slot in self._pinned

    def pin_expiry(self, slot: int) -> float | None:
        """When the operator's pin ends (`inf`: never); None where there is no pin."""
        return self._pinned.get(slot)

    def holds(self, slot: int) -> int:
        """How many holds are on the slot."""
        return self._held.count(slot)

    def stored_at(self, slot: int) -> float:
        return self._stored_at[slot]

    def used_at(self, slot: int) -> float:
        return self._used_at[slot]

    # -- holds ----------------------------------------------------------------------------------------------

    def hold(self, slots: list[int], now: float) -> None:
        """Keep visible slots from eviction until `unhold` with the same slots."""
        used_at = self._used_at
        for slot in slots:
            used_at[slot] = now
        slots = self._held.add(slots)
        if self._pinned:
            unpinned = [slot for slot in slots if slot not in self._pinned]
            self._held_and_pinned += len(slots) - len(unpinned)
            slots = unpinned
        self.policy.detach(slots)

    def refresh(self, slots: list[int], now: float) -> None:
        """Let visible slots go as late as if they had come only now; those held or pinned do so once let go."""
        for slot in slots:
            self._used_at[slot] = now
        self.policy.refresh([slot for slot in slots if not self._held.count(slot) and slot not in self._pinned])

    def unhold(self, slots: list[int]) -> list[int]:
        """End a hold. Returns the slots that are free now, because their keys were removed meanwhile."""
        slots = self._held.remove(slots)
        freed: list[int] = []
        if self._orphans:
            freed = [slot for slot in slots if slot in self._orphans]
            self._orphans.difference_update(freed)
            slots = [slot for slot in slots if self._key_of[slot] is not None]
        if self._pinned:
            unpinned = [slot for slot in slots if slot not in self._pinned]
            self._held_and_pinned -= len(slots) - len(unpinned)
            slots = unpinned
        self.policy.attach(slots)
        return freed

    # -- stores ---------------------------------------------------------------------------------------------

    def publish(self, keys: Sequence[bytes], slots: Sequence[int], now: float) -> Removal:
        """Filling slots hold valid bytes: their keys become visible. Those disowned meanwhile are freed.

        Returns the keys that were published, and the freed slots. They count as stored after any loss, even where
        the clock has not moved since.
        """
        now = max(now, nextafter(self._lost_at, inf))
        disowned = self.filling.remove(keys, slots)
        if disowned:
            keys = [key for key, slot in zip(keys, slots, strict=True) if slot not in disowned]
            slots = [slot for slot in slots if slot not in disowned]
        key_of, slot_of = self._key_of, self._slot_of
        stored_at, used_at = self._stored_at, self._used_at
        for key, slot in zip(keys, slots, strict=True):
            slot_of[key] = slot
            key_of[slot] = key
            stored_at[slot] = used_at[slot] = now
        self.policy.admit(list(slots))
        return Removal(tuple(keys), list(disowned))

    def lose_contents(self, low: int, now: float) -> None:
        """The contents of the slots from `low` on are lost. Those being stored do not become visible; visible blocks
        are removed by the caller."""
        self.filling.disown(self.filling.keys_from(low))
        if low == 0:
            self._lost_at = max(now, nextafter(self._lost_at, inf))

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
        key_of = self._key_of
        keys: list[bytes] = []
        for slot in slots:
            key = key_of[slot]
            assert key is not None  # evictable slots are visible
            keys.append(key)
            key_of[slot] = None
            del self._slot_of[key]
        return Removal(tuple(keys), slots)

    def remove(self, slots: Iterable[int]) -> Removal:
        """Remove visible blocks, whatever holds them. A held slot stays in use until its last `unhold`."""
        keys: list[bytes] = []
        freed: list[int] = []
        cached: list[int] = []
        for slot in slots:
            key = self._key_of[slot]
            if key is None:
                continue
            keys.append(key)
            self._key_of[slot] = None
            del self._slot_of[key]
            pinned = self._pinned.pop(slot, None) is not None
            if slot in self._held:
                self._orphans.add(slot)
                self._held_and_pinned -= pinned
            else:
                freed.append(slot)
                if not pinned:
                    cached.append(slot)
        self.policy.detach(cached)
        return Removal(tuple(keys), freed)

    # -- operator's pins ------------------------------------------------------------------------------------

    def pin(self, slot: int, expires: float) -> None:
        """Keep a visible slot from eviction until `expires` (`inf`: until `unpin`); a new pin replaces an old one."""
        if slot not in self._pinned:
            if slot in self._held:
                self._held_and_pinned += 1
            else:
                self.policy.detach([slot])
        self._pinned[slot] = expires
        if expires < inf:
            heappush(self._expiries, (expires, slot))

    def end_pins(self, now: float) -> None:
        """End the pins that expire at or before `now`. O(log pins) for each that ends."""
        while self._expiries and self._expiries[0][0] <= now:
            expires, slot = heappop(self._expiries)
            if self._pinned.get(slot) == expires:  # else it was ended, or replaced, before
                self.unpin(slot)

    def unpin(self, slot: int) -> bool:
        """End a pin; False where there was none."""
        if self._pinned.pop(slot, None) is None:
            return False
        if slot in self._held:
            self._held_and_pinned -= 1
        else:
            self.policy.attach([slot])
        return True

    def pinned_slots(self) -> list[int]:
        return list(self._pinned)

    # -- policy and size ------------------------------------------------------------------------------------

    def set_policy(self, name: str) -> None:
        """Change the order of eviction without touching a slot: the new policy starts from the present order."""
        if name != self.policy.name:
            self.policy = self._make_policy(name, self.policy.hand_over())
            self.policy.set_capacity(self._num_slots)

    def set_num_slots(self, num_slots: int) -> None:
        """The pool has the slots below `num_slots`; blocks above it are removed by the caller."""
        self._num_slots = num_slots
        missing = num_slots - len(self._key_of)
        if missing > 0:
            self._links.grow(num_slots)
            self._key_of.extend(repeat(None, missing))
            self._stored_at.frombytes(bytes(8 * missing))
            self._used_at.frombytes(bytes(8 * missing))
        self.policy.set_capacity(num_slots)

    def _make_policy(self, name: str, order: RecencyList) -> EvictionPolicy:
        if name == "lru":
            return LruPolicy(order)
        if name == "arc":
            return ArcPolicy(order, self._links, self._key_of)
        raise ConfigError("policy", name, "lru or arc")

    # -- integrity ------------------------------------------------------------------------------------------

    def slots_in_use(self) -> dict[str, set[int]]:
        """The used slots by state; held and pinned ones count as pinned. O(pool): for integrity checks."""
        pinned = set(self._pinned)
        return {
            "filling": self.filling.slots(),
            "cached": set(self.policy),
            "leased": self._held.slots() - pinned,
            "pinned": pinned,
            "quarantined": set(self._quarantined),
        }

    def visible_slots(self) -> set[int]:
        """O(pool): for integrity checks."""
        return set(self._slot_of.values())

    def outlived_a_loss(self, slot: int) -> bool:
        """Whether the block in `slot` was stored before all contents were lost."""
        return self._stored_at[slot] <= self._lost_at

    def defects(self) -> list[str]:
        """What does not balance within the index. O(pool): for integrity checks."""
        found = []
        visible = {slot for slot, key in enumerate(self._key_of) if key is not None}
        if visible != set(self._slot_of.values()) or len(visible) != len(self._slot_of):
            found.append("keys by slot and slots by key differ")
        elif any(self._key_of[slot] != key for key, slot in self._slot_of.items()):
            found.append("a key's slot names another key")
        held = self._held.slots()
        cached = list(self.policy)
        if len(cached) != len(self.policy) or len(set(cached)) != len(cached):
            found.append("the eviction order repeats or loses slots")
        if set(cached) != visible - held - set(self._pinned):
            found.append("the evictable slots are not those that are visible and unused")
        if self._orphans != held - visible:
            found.append("orphans are not the held slots without a key")
        if not set(self._pinned) <= visible:
            found.append("a pinned slot is not visible")
        if self._held_and_pinned != len(held & set(self._pinned)):
            found.append("the count of held and pinned slots is wrong")
        if not self.filling.balances():
            found.append("the count of filling slots is wrong")
        if not self._held.balances():
            found.append("a slot has further holders, but no first one")
        return found
