"""Which block makes room for the next one, with places of several lengths and owners in one file."""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstow_service.stores.disk.diskformat import PlaceKind, name_digests
from kvstow_service.stores.disk.places import (
    Assignment,
    BlockName,
    DiskPlaces,
    FoundChunk,
    Selection,
    TakenPlace,
    key_start,
)

CHUNK = 64
A, B, C = PlaceKind("1000", "", 4), PlaceKind("1000", "", 16), PlaceKind("1000", "", 10)


def digest(number: int, kind: PlaceKind = A) -> bytes:
    return bytes([kind.place_bytes]) + kind.owner.encode()[:7].ljust(7) + number.to_bytes(8, "big")


class Disk:
    """Writes and uses blocks as the store does, and checks after each call that the budget holds."""

    def __init__(self, num_chunks: int = 8) -> None:
        self.places, self.now = DiskPlaces(num_chunks, CHUNK), 0.0
        self.assigned: dict[int, Assignment] = {}

    def has(self, number: int, kind: PlaceKind = A) -> bool:
        return digest(number, kind) in self.places.index

    def use(self, number: int, kind: PlaceKind = A) -> None:
        self.now += 1
        self.places.use(self.places.index[digest(number, kind)], self.now)

    def write(self, number: int, kind: PlaceKind = A) -> int | None:
        self.now += 1
        taken = self._take(kind)
        if taken.waits:
            taken = self._take(kind)
        if taken.place is not None:
            self.places.publish(taken.place, BlockName(digest(number, kind), 1, number), self.now)
        return taken.place

    def _take(self, kind: PlaceKind) -> TakenPlace:
        taken = self.places.take(kind, self.now)
        if taken.assign is not None:
            self.assigned[taken.assign.chunk] = taken.assign
            self.places.assigned(taken.assign.chunk)
        return taken

    def request(self, number: int, kind: PlaceKind = A) -> bool:
        """Whether it was a hit."""
        if self.has(number, kind):
            self.use(number, kind)
            return True
        self.write(number, kind)
        return False

    def check(self) -> None:
        ranges = []
        for place in self.places.index.values():
            where, kind = self.places.where(place), self.places.kind_of(place)
            assert self.assigned[where.chunk].kind == kind
            assert where.chunk * CHUNK <= where.offset <= (where.chunk + 1) * CHUNK - kind.place_bytes
            ranges.append((where.offset, where.offset + kind.place_bytes))
        ranges.sort()
        assert all(end <= start for (_, end), (start, _) in pairwise(ranges)), "places overlap"
        assert sum(end - start for start, end in ranges) == self.places.used_bytes <= self.places.size_bytes


def test_the_least_recently_used_block_makes_room() -> None:
    disk = Disk(1)
    for number in range(16):
        disk.write(number)
    disk.use(0)
    disk.write(16)
    assert disk.has(0)
    assert not disk.has(1)
    disk.check()


def test_nothing_is_evicted_while_a_chunk_is_on_its_way() -> None:
    places = DiskPlaces(4, CHUNK)
    chunks = []
    for number in range(40):
        taken = places.take(A, float(number))
        assert not taken.num_evicted
        if taken.assign is not None:
            chunks.append(taken.assign.chunk)
        if taken.place is None:
            assert taken.waits
            places.assigned(chunks.pop())
        else:
            places.publish(taken.place, BlockName(digest(number), 1, number), float(number))


def test_a_block_that_is_being_read_or_written_stays() -> None:
    disk = Disk(1)
    for number in range(16):
        disk.write(number)
    held = disk.places.index[digest(0)]
    disk.places.hold(held)
    disk.write(16)
    assert disk.has(0)
    assert not disk.has(1)
    assert not disk.places.let_go(held)
    taken = disk.places.take(A, disk.now)
    assert taken.place is not None
    for number in range(17, 60):
        assert disk.write(number) != taken.place
    disk.places.abandon(taken.place)
    assert disk.places.let_go(taken.place)
    for number in range(60, 100):
        assert disk.write(number) != taken.place, "dirty places are not used"
    disk.places.clean(taken.place)
    assert disk.write(100) == taken.place


def test_a_block_that_is_removed_while_it_is_read_is_overwritten_after_that() -> None:
    disk = Disk(1)
    disk.write(0)
    place = disk.places.index[digest(0)]
    disk.places.hold(place)
    disk.places.hold(place)
    disk.places.remove(place)
    assert not disk.has(0)
    assert not disk.places.let_go(place)
    assert not disk.places.let_go(place), "its record is not dirty yet"
    assert disk.places.let_go(place)
    disk.places.clean(place)
    disk.check()


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32), st.integers(1, 12), st.sampled_from([(A, B), (A, B, C), (A, B, C, PlaceKind("2000", "", 7))])
)
def test_several_lengths_never_exceed_one_size(seed: int, num_chunks: int, kinds: tuple[PlaceKind, ...]) -> None:
    random, disk = Random(seed), Disk(num_chunks)
    for _ in range(400):
        kind = random.choice(kinds)
        disk.request(random.randrange(40), kind)
        if random.random() < 0.05 and disk.places.index:
            place = random.choice(list(disk.places.index.values()))
            disk.places.remove(place)
            assert disk.places.let_go(place)
            disk.places.clean(place)
        disk.check()


def run_mixed(
    seed: int, shares: tuple[float, float], lengths: tuple[PlaceKind, PlaceKind], budget: int
) -> tuple[float, float]:
    """Traffic of two lengths whose shares of the bytes are exchanged at half time. Hits by bytes, of `DiskPlaces` and
    of one order of use over both."""
    random, disk = Random(seed), Disk(budget // CHUNK)
    one: OrderedDict[tuple[int, PlaceKind], None] = OrderedDict()
    used = hits = ideal = total = 0
    for step in range(24_000):
        first = shares[0] if step < 12_000 else shares[1]
        first = first / lengths[0].place_bytes / (first / lengths[0].place_bytes + (1 - first) / lengths[1].place_bytes)
        kind = lengths[0] if random.random() < first else lengths[1]
        number = int(random.paretovariate(0.6)) if random.random() < 0.8 else step + 10_000
        if number > 1000 * 16 // kind.place_bytes:
            number = step + 10_000_000
        total += kind.place_bytes
        hits += kind.place_bytes * disk.request(number, kind)
        if (number, kind) in one:
            ideal += kind.place_bytes
            one.move_to_end((number, kind))
        else:
            one[number, kind] = None
            used += kind.place_bytes
            while used > budget:
                (_, gone), _ = one.popitem(last=False)
                used -= gone.place_bytes
    disk.check()
    return hits / total, ideal / total


@pytest.mark.parametrize("lengths", [(A, B), (B, A), (A, C)])
def test_lengths_share_the_size_as_one_order_of_use_would(lengths: tuple[PlaceKind, PlaceKind]) -> None:
    """Traffic that shifts from 90:10 to 10:90."""
    ours, ideal = run_mixed(1, (0.9, 0.1), lengths, 24 * CHUNK)
    assert ours > ideal - 0.02


def test_a_second_owner_gets_its_share_and_no_more() -> None:
    disk, other = Disk(8), PlaceKind("2000", "", 4)
    for number in range(200):
        disk.write(number)
    for number in range(4000):
        disk.write(number, other)
        if not number % 16:  # so seldom that by age alone, the other one would take it all
            disk.request(number // 16 % 64)
    owners = [one.kind.owner for one in disk.assigned.values()]
    assert owners.count("2000") == 4
    assert all(disk.has(number) for number in range(64)), "what the first one uses fits into its share"
    disk.check()


def test_an_owner_that_has_ended_leaves_its_share_to_others() -> None:
    disk, other = Disk(8), PlaceKind("2000", "", 4)
    for number in range(200):
        disk.write(number)
    disk.now += 10_000
    for number in range(400):
        disk.write(number, other)
    assert [one.kind.owner for one in disk.assigned.values()].count("2000") == 8
    disk.check()


def found(chunk: int, kind: PlaceKind, blocks: dict[int, int], dirty: list[int], used_at: float = 5.0) -> FoundChunk:
    numbers = np.array(list(blocks.values()))
    return FoundChunk(
        Assignment(chunk, kind, 3),
        np.array(list(blocks), np.int64),
        b"".join(digest(number, kind) for number in blocks.values()),
        np.ones(len(blocks), np.uint64),
        numbers.astype(np.uint64),
        np.full(len(blocks), 4.0),
        used_at + numbers,
        np.array(dirty, np.int64),
    )


def test_a_start_takes_over_blocks_their_order_and_what_must_be_overwritten() -> None:
    places = DiskPlaces(3, CHUNK)
    dirty = places.restore([found(1, A, {0: 7, 5: 3, 6: 9}, [2]), found(0, B, {1: 1}, [])], {0: 3, 1: 3})
    assert [places.where(place).offset for place in dirty] == [CHUNK + 2 * 4]
    assert sorted(places.index) == sorted([digest(7), digest(3), digest(9), digest(1, B)])
    assert places.where(places.index[digest(3)]).offset == CHUNK + 5 * 4
    assert places.where(places.index[digest(3)]).generation == 3
    evicted: list[bytes] = []
    for _ in range(16 + 16 + 16):
        before = list(places.index)
        taken = places.take(A, 100.0)
        if taken.assign is not None:
            places.assigned(taken.assign.chunk)
        gone = [one for one in before if one not in places.index]
        assert taken.num_evicted == len(gone)
        evicted += gone
    assert evicted[:3] == [digest(3), digest(7), digest(9)]


def test_of_two_places_with_one_block_a_start_keeps_one() -> None:
    places = DiskPlaces(2, CHUNK)
    dirty = places.restore([found(0, A, {0: 7, 1: 7}, [])], {0: 3})
    assert len(dirty) == len(places.index) == 1
    assert places.used_bytes == 4


def test_blocks_are_selected_by_owner_of_the_layout_namespace_start_of_key_and_age() -> None:
    places, ours = DiskPlaces(2, CHUNK), A._replace(identity="ours")
    places.restore([found(0, ours, {0: 0x10, 1: 0x11, 2: 0x20}, []), found(1, B, {0: 0x10}, [])], {0: 3, 1: 3})
    index, every = places.index, Selection("ours")
    first, second, third = (index[digest(number)] for number in (0x10, 0x11, 0x20))
    assert places.select(every) == places.select(every._replace(namespace=1)) == [first, second, third]
    assert places.select(every._replace(namespace=2)) == places.select(Selection("nobody's")) == []
    zeros = bytes(7)
    assert places.select(every._replace(prefixes=(zeros + b"\x10", zeros + b"\x20"))) == [first, third]
    assert places.select(every._replace(prefixes=(b"\0", b"\1"))) == [first, second, third]
    assert places.select(every._replace(used_before=5.0 + 0x11)) == [first, second]
    assert places.select(every._replace(written_before=3.0)) == []


def test_blocks_are_selected_by_their_keys_in_every_namespace_of_the_pool() -> None:
    disk, keys = Disk(2), [b"a" * 34, b"b" * 34]
    for namespace in (7, 8):
        for key, (name,) in zip(keys, ([one] for one in name_digests(namespace, keys)), strict=True):
            taken = disk._take(A)
            taken = disk._take(A) if taken.waits else taken
            assert taken.place is not None
            disk.places.publish(taken.place, BlockName(name, namespace, key_start(key)), 1.0)
    chosen = disk.places.select(Selection("", keys=frozenset([keys[0], b"c" * 34])))
    assert sorted(chosen) == sorted(disk.places.index[one] for space in (7, 8) for one in name_digests(space, keys[:1]))
    assert disk.places.select(Selection("", keys=frozenset(keys), used_before=0.5)) == []
