"""The namespaces of a pool, and the slots of their keys.

In each namespace, a key has one meaning. Equal keys of two namespaces are different blocks.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import compress, count, takewhile
from operator import ne
from typing import Any, NamedTuple, cast

import numpy as np

from kvstow.control.chains import Order
from kvstow.control.keytable import Hashes
from kvstow.control.slots import SlotKeys, values_at
from kvstow.errors import ConflictError
from kvstow.results import KeyRun

_SHORT = 8
"""Fewer keys are looked up one by one, because comparing slices would take as long."""
_MAX_NAMESPACES = 1 << 16
_MIX_TAG = 0x9E3779B97F4A7C15


def mix_of(tag: int) -> int:
    """Return the number with which the hashes of keys of a namespace are combined, so that equal keys of two namespaces
    have different hashes. `tag`: the number of the namespace."""
    mixed = tag * _MIX_TAG & (1 << 64) - 1
    return mixed - (mixed >> 63 << 64)  # as a signed number


def hashes_of(keys: Sequence[bytes], mix: int) -> Hashes:
    """Return the hashes of keys of the namespace whose `mix_of` is given."""
    hashes = np.fromiter(map(hash, keys), np.int64, len(keys))
    return hashes ^ mix if mix else hashes


class NamespaceLabel(NamedTuple):
    """A namespace's name, and what the host wants to know of it after a restart, as JSON."""

    name: str
    note: Any = None


class KeyMap:
    """The visible keys of one namespace, and their slots. Not locked; each call is O(keys or slots given).

    The pool's table of keys also has the slots that are being written. They have no key in `SlotKeys` yet: see
    `PendingStores`.
    """

    __slots__ = ("_mix", "_num_visible", "_own_tags", "_slot_keys", "_table", "_tag")

    def __init__(self, slot_keys: SlotKeys, tag: int) -> None:
        self._slot_keys, self._table = slot_keys, slot_keys.table
        self._tag, self._mix = tag, mix_of(tag)
        self._num_visible = 0
        self._own_tags = b""
        """The bytes of `tag_of` for a run of slots of this namespace, as long as the longest run that was compared."""

    def __len__(self) -> int:
        """How many keys are visible."""
        return self._num_visible

    def leading_runs(self, keys: Sequence[bytes]) -> list[Sequence[int]]:
        """Return the slots of the keys up to the first key that is not visible, as runs of neighbours. For a few keys,
        they are in one list.

        Blocks of a prefix are mostly in neighbouring slots (see `Pool.make_room`). Then comparing keys slot by slot
        reads memory in order and computes no hash: a lookup among a million slots is three times as fast as with the
        dictionary alone.
        """
        get = self.get
        if len(keys) < _SHORT:
            few: list[int] = []
            for key in keys:
                slot = get(key)
                if slot is None or slot < 0:
                    break
                few.append(slot)
            return [few] if few else []
        if not isinstance(keys, list):
            keys = list(keys)  # its slices are compared with those of a list, which differs from any other sequence
        runs: list[Sequence[int]] = []
        at, run = 0, 1
        while at < len(keys):
            slot = get(keys[at])
            if slot is None or slot < 0:
                break
            run = self._run_length(keys, at, slot, max(run, _SHORT))
            if run > 1 and self._slot_keys.has_namespaces:
                run = self._length_of_own(slot, run)
            runs.append(range(slot, slot + run))
            at += run
        return runs

    def _run_length(self, keys: Sequence[bytes], at: int, slot: int, window: int) -> int:
        """Return how many keys from `at` on are in the slots from `slot` on. The first one is. `window` says how many
        keys to compare first; the length of the run before is a good guess."""
        key_of = self._slot_keys.key_of
        most = min(len(keys) - at, len(key_of) - slot)
        run = 1
        while run < most and key_of[slot + run] == keys[at + run]:
            end = min(run + window, most)
            wanted, found = keys[at + run : at + end], key_of[slot + run : slot + end]
            if wanted != found:  # this is three times as fast as the search for the difference
                return run + next(compress(count(), map(ne, wanted, found)))
            run, window = end, 4 * window
        return run

    def _length_of_own(self, slot: int, length: int) -> int:
        """Return how many of the `length` slots from `slot` on belong to this namespace. The first one does, but equal
        keys of another namespace may follow it."""
        tags = self._slot_keys.tag_of[slot : slot + length]
        found = tags.tobytes()  # bytes are compared ten times as fast as arrays
        if len(found) > len(self._own_tags):
            self._own_tags = array("H", (self._tag,)).tobytes() * length
        if self._own_tags.startswith(found):
            return length
        return next(at for at, tag in enumerate(tags) if tag != self._tag)

    def find(
        self, keys: Sequence[bytes], below: int | None, *, leading: bool = False
    ) -> tuple[list[Sequence[int]], list[KeyRun]]:
        """Return the slots of the visible keys, as runs of neighbours where possible, and the runs of these keys.
        `below`: only slots below this number count. `leading`: stop at the first key that is not found."""
        runs = self.leading_runs(keys)
        if below is not None:
            runs = runs_below(runs, below)
        count = sum(map(len, runs))
        found = [KeyRun(0, count)] if count else []
        if not leading and count < len(keys):  # the key after the leading ones is not found
            slots = self.slots_of(keys[count:], below)
            scattered = [slot for slot in slots if slot is not None]
            if scattered:
                runs.append(scattered)
                found += _runs_of(bytes(slot is not None for slot in slots), count)
        return runs, found

    def slots_of(self, keys: Iterable[bytes], below: int | None = None) -> list[int | None]:
        """Return the slot of each key; None for a key that is not visible, or not in a slot below `below`."""
        numbers = self.find_all(list(keys))
        end = self._slot_keys.num_slots if below is None else below
        return [slot if slot is not None and 0 <= slot < end else None for slot in numbers]

    def get(self, key: bytes) -> int | None:
        """Return the slot of a visible key. For a key that is being stored, return the complement of its slot, which is
        negative. None for any other key."""
        key_of, hashed = self._slot_keys.key_of, hash(key) ^ self._mix
        slot = self._table.get(hashed)
        if slot is None or key_of[slot] == key:  # nearly always
            return slot
        for slot in self._table.slots(hashed):
            found = key_of[slot]
            if found is None:  # only the hash says that it is this key; if it is another, a store is left out
                return ~slot
            if found == key:
                return slot
        return None

    def find_all(self, keys: Sequence[bytes], hashes: Hashes | None = None) -> list[int | None]:
        """Return what `get` returns for each key. `hashes`: those of the keys, if the caller has them."""
        if len(keys) < _SHORT:
            return [self.get(key) for key in keys]
        numbers: list[int | None] = [None] * len(keys)
        key_of = self._slot_keys.key_of
        indices, slots = self._table.find(self.hashes_of(keys) if hashes is None else hashes)
        for index, slot in zip(indices, slots, strict=True):
            found, key = key_of[slot], keys[index]
            numbers[index] = slot if found == key else ~slot if found is None else self.get(key)
        return numbers

    def hashes_of(self, keys: Sequence[bytes]) -> Hashes:
        """Return the hashes of keys of this namespace, by which the table knows them."""
        return hashes_of(keys, self._mix)

    def link(self, hashes: Hashes, slots: Sequence[int]) -> None:
        """Note that these slots are to hold the keys with these hashes, which are neither visible nor being stored."""
        if slots:
            self._table.link(hashes, slots)

    def unlink(self, slots: Sequence[int]) -> None:
        """Note that these slots do not hold their keys any more, or will not hold them."""
        if slots:
            self._table.unlink(slots)

    def linked(self, keys: Sequence[bytes], slots: Sequence[int]) -> tuple[Sequence[bytes], Sequence[int]]:
        """Return the keys and slots whose slot is still to hold its key."""
        is_linked = list(map(self._table.is_linked, slots))
        return list(compress(keys, is_linked)), list(compress(slots, is_linked))

    def put(self, keys: Sequence[bytes], slots: Sequence[int]) -> None:
        """Make keys visible that are neither visible nor being stored. Their slots are in ascending order and have no
        keys."""
        self.link(self.hashes_of(keys), slots)
        self.show(keys, slots)

    def show(self, keys: Sequence[bytes], slots: Sequence[int]) -> None:
        """Make the keys visible that were being stored to these slots, which are in ascending order."""
        if not slots:
            return
        self._num_visible += len(keys)
        key_of, tag_of, tag = self._slot_keys.key_of, self._slot_keys.tag_of, self._tag
        has_namespaces = self._slot_keys.has_namespaces
        if slots[-1] - slots[0] == len(slots) - 1:
            run = slice(slots[0], slots[-1] + 1)
            key_of[run] = keys
            if has_namespaces:
                tag_of[run] = array("H", (tag,)) * len(slots)
            return
        for key, slot in zip(keys, slots, strict=True):
            key_of[slot] = key
            if has_namespaces:
                tag_of[slot] = tag

    def take(self, slots: Sequence[int]) -> tuple[bytes, ...]:
        """Remove the keys in these slots, each of which has one, and return them."""
        key_of = self._slot_keys.key_of
        keys = cast(tuple[bytes, ...], values_at(key_of, slots))
        for slot in slots:
            key_of[slot] = None
        self.unlink(slots)
        self._num_visible -= len(keys)
        return keys

    def slots(self) -> set[int]:
        """Return the slots with a visible key. O(pool): for integrity checks."""
        tag_of = self._slot_keys.tag_of
        pairs = enumerate(self._slot_keys.key_of)
        return {slot for slot, key in pairs if key is not None and tag_of[slot] == self._tag}

    def defects(self) -> list[str]:
        """Return inconsistencies. O(pool): for integrity checks."""
        key_of = self._slot_keys.key_of
        visible = self.slots()
        if len(visible) != self._num_visible:
            return ["the count of keys is wrong"]
        if any(self.get(cast(bytes, key_of[slot])) != slot for slot in visible):
            return ["keys by slot and slots by key differ"]
        return []


class _Batch(NamedTuple):
    """Keys that are stored together, and the slot of each."""

    keys: Sequence[bytes]
    slots: Sequence[int]


class KeySelection(NamedTuple):
    """Which keys of a store need a slot, and which are already present. `fresh`: the indices of the keys that need a
    slot. `hashes`: the hashes of these keys, so that `PendingStores.start` need not compute them again. `present`: the
    slots of the keys that are present, as runs."""

    fresh: list[int]
    hashes: Hashes
    present: Sequence[Sequence[int]]


class PendingStores:
    """Keys being stored, each with its slot. Not locked; each call is O(keys given).

    A key can be disowned while its slot is written. Then it does not become visible, and may be stored in another slot
    at the same time. The table of keys does not have the slot of a disowned key any more.
    """

    __slots__ = ("_batches", "_key_map", "_num_disowned", "_num_slots")

    def __init__(self, key_map: KeyMap) -> None:
        self._key_map = key_map
        self._batches: dict[int, _Batch] = {}
        """The batches by their first slot."""
        self._num_slots = self._num_disowned = 0

    def __len__(self) -> int:
        """How many slots are being written, including those of disowned keys."""
        return self._num_slots

    def __contains__(self, key: bytes) -> bool:
        number = self._key_map.get(key)
        return number is not None and number < 0

    def batches(self) -> list[Sequence[bytes]]:
        """Return the keys of each store, including disowned ones. O(stores)."""
        return [batch.keys for batch in self._batches.values()]

    def slot_of(self, key: bytes) -> int | None:
        """Return the slot that is being written with this key's block, or None."""
        number = self._key_map.get(key)
        return ~number if number is not None and number < 0 else None

    def slots(self) -> set[int]:
        return {slot for batch in self._batches.values() for slot in batch.slots}

    def keys_of(self, slots: Sequence[int]) -> Sequence[bytes]:
        """Return the keys, including disowned ones, of the slots that were given to `start` together."""
        return self._batches[slots[0]].keys

    def start(self, keys: Sequence[bytes], slots: Sequence[int], hashes: Hashes, *, apart: bool = False) -> None:
        """Note that a store begins to write these keys, which are neither visible nor being stored, to the slots.
        `hashes`: those of the keys; see `KeySelection`. `apart`: the slots may end in any order, as if each was given
        alone."""
        if slots:
            self._key_map.link(hashes, slots)
            if apart:
                self._batches.update((slot, _Batch((key,), (slot,))) for key, slot in zip(keys, slots, strict=True))
            else:
                self._batches[slots[0]] = _Batch(keys, slots)
            self._num_slots += len(slots)

    def finish(self, slots: Sequence[int]) -> tuple[Sequence[bytes], Sequence[int]]:
        """Note that these slots are not written any more. They are the first slots of one call of `start`, or any slots
        of calls with `apart`. Returns their keys and slots, without disowned ones. The caller makes the keys visible or
        gives them up."""
        if not slots:
            return (), ()
        batch, count = self._batches.pop(slots[0]), len(slots)
        if count < len(batch.slots):
            self._batches[batch.slots[count]] = _Batch(batch.keys[count:], batch.slots[count:])
            batch = _Batch(batch.keys[:count], batch.slots[:count])
        elif count > len(batch.slots):  # they were given apart
            others = [self._batches.pop(slot) for slot in slots[1:]]
            batch = _Batch([batch.keys[0], *(one.keys[0] for one in others)], slots)
        self._num_slots -= count
        owned = self._owned(batch)
        self._num_disowned -= count - len(owned.slots)
        return owned

    def abandon(self, slots: Sequence[int]) -> None:
        """Do what `finish` does, but let none of the keys become visible."""
        self._key_map.unlink(self.finish(slots)[1])

    def _owned(self, batch: _Batch) -> _Batch:
        """Return the batch without its disowned keys."""
        return _Batch(*self._key_map.linked(*batch)) if self._num_disowned else batch

    def disown(self, keys: Iterable[bytes]) -> None:
        """Keep these keys from becoming visible if they are being stored."""
        numbers = self._key_map.find_all(list(dict.fromkeys(keys)))
        pending = [~number for number in numbers if number is not None and number < 0]
        self._key_map.unlink(pending)
        self._num_disowned += len(pending)

    def disown_from(self, slot: int) -> None:
        """Disown all keys that are being stored in the slots from `slot` on. O(slots being written)."""
        for batch in self._batches.values():
            slots = [one for one in self._owned(batch).slots if one >= slot]
            self._key_map.unlink(slots)
            self._num_disowned += len(slots)

    def is_consistent(self) -> bool:
        """Whether keys by slot and slots by key agree. For integrity checks."""
        owned = list(map(self._owned, self._batches.values()))
        pairs = ((key, slot) for batch in owned for key, slot in zip(*batch, strict=True))
        num_owned = sum(len(batch.slots) for batch in owned)
        num_slots = sum(len(batch.slots) for batch in self._batches.values())
        counts = num_slots == self._num_slots == num_owned + self._num_disowned
        return counts and all(self._key_map.get(key) == ~slot for key, slot in pairs)

    @property
    def num_linked(self) -> int:
        """How many slots are being written whose keys are to become visible."""
        return self._num_slots - self._num_disowned


class LookupCounts:
    """How many blocks sessions have looked up, and how many of them were found."""

    __slots__ = ("hits", "queried")

    def __init__(self) -> None:
        self.queried = self.hits = 0

    def add(self, queried: int, hits: int) -> None:
        self.queried += queried
        self.hits += hits


class Namespace:
    """The keys of one namespace, and the order in which its blocks are evicted. Not locked.

    `num_sessions`: how many sessions use it. No session finds a dropped namespace any more, and its blocks are evicted
    first. A forgotten namespace counts as dropped, so that code which still has it fills no slot in it.
    """

    __slots__ = ("is_dropped", "keys", "lookups", "name", "num_sessions", "order", "pending_stores", "tag")

    def __init__(self, name: str, tag: int, slot_keys: SlotKeys, order: Order) -> None:
        self.name, self.tag = name, tag
        self.keys = KeyMap(slot_keys, tag)
        self.pending_stores = PendingStores(self.keys)
        self.order = order
        self.num_sessions = 0
        self.is_dropped = False
        self.lookups = LookupCounts()
        """A namespace that begins because an engine has reset its cache takes over the counts of the one before it."""

    @property
    def is_empty(self) -> bool:
        return not self.keys and not self.pending_stores

    def select(self, keys: Sequence[bytes], outcomes: dict[str, int]) -> KeySelection:
        """Return which of the keys need a slot. Counts the others in `outcomes`, by reason."""
        present = self.keys.leading_runs(keys)
        known, rest = 0, keys  # usually none or all of the keys are present
        if present:
            known = outcomes["skipped_already_cached"] = sum(map(len, present))
            rest = keys[known:]
        hashes = self.keys.hashes_of(rest)
        numbers = self.keys.find_all(rest, hashes)
        if numbers.count(None) == len(rest) and len(set(rest)) == len(rest):
            return KeySelection(list(range(known, len(keys))), hashes, present)
        fresh: list[int] = []
        scattered: list[int] = []
        taken: set[bytes] = set()
        for i, (key, number) in enumerate(zip(rest, numbers, strict=True), known):
            if number is not None and number >= 0:
                scattered.append(number)
                reason = "skipped_already_cached"
            elif number is not None:
                reason = "skipped_in_flight"
            elif key in taken:
                reason = "skipped_duplicate"
            else:
                taken.add(key)
                fresh.append(i)
                continue
            outcomes[reason] = outcomes.get(reason, 0) + 1
        return KeySelection(fresh, hashes[[i - known for i in fresh]], [*present, scattered])

    def publish(self, slots: Sequence[int]) -> tuple[tuple[bytes, ...], Sequence[int]]:
        """Make the keys of filled slots visible. The slots are in ascending order. Returns the keys and their slots,
        without keys that were disowned meanwhile."""
        keys, slots = self.pending_stores.finish(slots)
        self.keys.show(keys, slots)
        return tuple(keys), slots


class Namespaces:
    """The namespaces of a pool, including dropped ones that still have blocks. Not locked.

    `only`: the namespace, if there is exactly one.
    """

    def __init__(self, slot_keys: SlotKeys, make_order: Callable[[int], Order]) -> None:
        self._slot_keys = slot_keys
        self._make_order = make_order
        self._by_name: dict[str, Namespace] = {}
        self._by_tag: dict[int, Namespace] = {}
        self._unused: dict[int, Namespace] = {}
        """The namespaces without sessions, in the order in which their blocks are evicted."""
        self.only: Namespace | None = None
        self._last_epoch = 0

    def __iter__(self) -> Iterator[Namespace]:
        return iter(self._by_tag.values())

    def unused(self) -> Iterable[Namespace]:
        """Return the namespaces without sessions, in the order in which their blocks are evicted."""
        return self._unused.values()

    def join(self, name: str) -> Namespace:
        """Return the namespace with this name, which has one more session now. Raises `ConflictError` if there are too
        many namespaces."""
        for unused in list(self._unused.values()):
            self.forget_if_empty(unused)
        namespace = self._by_name.get(name)
        if namespace is None:
            tag = next((tag for tag in range(_MAX_NAMESPACES) if tag not in self._by_tag), None)
            if tag is None:
                raise ConflictError(f"the pool has {_MAX_NAMESPACES} namespaces and cannot have more")
            namespace = self._add(name, tag)
        namespace.num_sessions += 1
        self._unused.pop(namespace.tag, None)
        return namespace

    def fresh_name(self, name: str, life: str) -> str:
        """Return the name of a new epoch of a namespace. `life`: an id of this life of the pool."""
        self._last_epoch += 1
        return f"{name.partition('@')[0]}@{life}-{self._last_epoch}"

    def restore(self, name: str, tag: int) -> Namespace:
        """Return a namespace with the number that it had before a restart. It counts as used by one session until the
        caller calls `leave`."""
        namespace = self._add(name, tag)
        namespace.num_sessions += 1
        return namespace

    def leave(self, namespace: Namespace) -> None:
        """Note that a session does not use the namespace any more."""
        namespace.num_sessions -= 1
        if not namespace.num_sessions:
            self._unused[namespace.tag] = namespace
            self.forget_if_empty(namespace)

    def drop(self, name: str) -> Namespace | None:
        """Let no session find the blocks of this namespace any more, and return it, or None if there is no such
        namespace. Stores in flight do not become visible. Its blocks are evicted first, unless the caller removes them.
        O(slots being written). Raises `ConflictError` if it has sessions."""
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
        namespace = Namespace(name, tag, self._slot_keys, self._make_order(tag))
        self._by_name[name] = self._by_tag[tag] = namespace
        self._slot_keys.has_namespaces |= len(self._by_tag) > 1 or tag > 0
        self.only = namespace if len(self._by_tag) == 1 else None
        return namespace

    def forget_if_empty(self, namespace: Namespace) -> None:
        """Forget a namespace that has no sessions and no slots."""
        if namespace.num_sessions or not namespace.is_empty or self._by_tag.get(namespace.tag) is not namespace:
            return
        del self._by_tag[namespace.tag], self._unused[namespace.tag]
        namespace.order.forget()
        if not namespace.is_dropped:
            del self._by_name[namespace.name]
            namespace.is_dropped = True
        self.only = next(iter(self._by_tag.values())) if len(self._by_tag) == 1 else None

    def of_slot(self, slot: int) -> Namespace:
        """Return the namespace of the block in this slot."""
        return self.only or self._by_tag[self._slot_keys.tag_of[slot]]

    def grouped(self, slots: list[int]) -> Iterable[tuple[Namespace, list[int]]]:
        """Group these slots, which hold visible blocks, by namespace."""
        if self.only:
            return ((self.only, slots),)
        groups: dict[int, list[int]] = {}
        for slot in slots:
            groups.setdefault(self._slot_keys.tag_of[slot], []).append(slot)
        return [(self._by_tag[tag], some) for tag, some in groups.items()]

    def slots_of(self, namespace: Namespace, low: int, high: int) -> list[int]:
        """Return the slots from `low` to below `high` that hold visible blocks of this namespace."""
        if self._by_tag.get(namespace.tag) is not namespace:
            return []
        tag_of = self._slot_keys.tag_of
        return [slot for slot, _ in self._slot_keys.between(low, high) if tag_of[slot] == namespace.tag]

    def find_all(self, keys: Iterable[bytes]) -> list[int]:
        """Return the slots of these keys in all namespaces."""
        keys = list(keys)
        found = (namespace.keys.slots_of(keys) for namespace in self._by_tag.values())
        return [slot for slots in found for slot in slots if slot is not None]

    def disown(self, keys: Iterable[bytes]) -> None:
        """Keep these keys from becoming visible in all namespaces in which they are being stored."""
        keys = list(keys)
        for namespace in self._by_tag.values():
            namespace.pending_stores.disown(keys)


def runs_below(runs: list[Sequence[int]], watermark: int) -> list[Sequence[int]]:
    """Return the runs up to the first slot at or above the watermark."""
    below: list[Sequence[int]] = []
    for run in runs:
        highest = run[-1] if isinstance(run, range) else max(run)
        part = run if highest < watermark else list(takewhile(lambda slot: slot < watermark, run))
        if part:
            below.append(part)
        if len(part) < len(run):
            break
    return below


def first_of_runs(runs: Sequence[KeyRun], count: int) -> list[KeyRun]:
    """Return the runs of the first `count` keys."""
    kept: list[KeyRun] = []
    for first, length in runs:
        if not count:
            break
        kept.append(KeyRun(first, min(length, count)))
        count -= kept[-1].length
    return kept


def joined_runs(runs: Sequence[KeyRun]) -> list[KeyRun]:
    """Return the keys of these runs, which are in ascending order, in as few runs as possible."""
    joined: list[KeyRun] = []
    for first, length in runs:
        if joined and sum(joined[-1]) == first:
            first, length = joined[-1].first, joined.pop().length + length
        joined.append(KeyRun(first, length))
    return joined


def runs_without(runs: Sequence[tuple[int, int]], others: Sequence[tuple[int, int]]) -> list[KeyRun]:
    """Return runs of the keys that are in `runs` and not in `others`."""
    left = bytearray(sum(runs[-1]) if runs else 0)
    for first, length in runs:
        left[first : first + length] = b"\1" * length
    for first, length in others:
        left[first : first + length] = bytes(length)
    return _runs_of(left)


def _runs_of(present: bytes | bytearray, start: int = 0) -> list[KeyRun]:
    """Return the runs of ones. The first byte stands for key `start`."""
    runs: list[KeyRun] = []
    begin = present.find(1)
    while begin >= 0:
        end = present.find(0, begin)
        end = len(present) if end < 0 else end
        runs.append(KeyRun(start + begin, end - begin))
        begin = present.find(1, end)
    return runs
