"""What every store below the pools must do. A store's tests subclass `BlockStoreContract` with a fixture `store`."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count

import pytest

from kvstow.keys import make_key
from kvstow.memfd import create_memfd
from kvstow.tier.blockstore import (
    BlockStore,
    BlockTransfer,
    Piece,
    Purged,
    PurgeWish,
    StoredExtent,
    StoredLayout,
    StoredPool,
)

SLOT_BYTES = (8192, 4096)
STRIDE = 12288
NUM_SLOTS = 64
PATIENCE = 60.0

_numbers = count(1)


def keys_of(numbers: range, group: int = 0) -> list[bytes]:
    return [make_key(group, number.to_bytes(32, "big")) for number in numbers]


class Client:
    """A pool of two ranks in one extent each, as its host uses a store. Its slots begin at number 100."""

    FIRST = 100

    def __init__(self, store: BlockStore, *, identity: str = "", owner: str = "1000") -> None:
        number = next(_numbers)
        self.fingerprint = f"{os.getpid():08x}{number:024x}"
        self.layout = StoredLayout(f"pool-{number}", SLOT_BYTES, identity or f"identity-{number}", owner)
        self._changed = threading.Condition()
        self._op_ids = count(1)
        self.ended: dict[int, list[Piece]] = {}
        self.pool: StoredPool = store.join(self.layout, self._on_end)
        self._fds = [create_memfd("kvstow-store-test", NUM_SLOTS * STRIDE) for _ in SLOT_BYTES]
        self.maps = [mmap.mmap(fd, NUM_SLOTS * STRIDE) for fd in self._fds]
        for rank, fd in enumerate(self._fds):
            assert self.wait_for(self._adding(rank, fd)) == "", "the extent cannot be used"

    def _adding(self, rank: int, fd: int) -> Callable[[Callable[[str], object]], object]:
        extent = StoredExtent(7 + rank, self.FIRST, NUM_SLOTS, STRIDE, NUM_SLOTS * STRIDE)
        return lambda then: self.pool.add_extent(rank, extent, fd, then)

    def wait_for(self, call: Callable[[Callable[..., object]], object]) -> object:
        """Make a call with a callback, and wait for what the callback gets."""
        got: list[tuple[object, ...]] = []

        def note(*values: object) -> None:
            with self._changed:
                got.append(values)
                self._changed.notify_all()

        call(note)
        with self._changed:
            assert self._changed.wait_for(lambda: got, PATIENCE), "the store has not called back"
        return got[0][0] if got[0] else None

    def _on_end(self, pieces: Sequence[Piece]) -> None:
        with self._changed:
            for piece in pieces:
                self.ended.setdefault(piece.op_id, []).append(piece)
            self._changed.notify_all()

    def fill(self, slot: int, value: int) -> None:
        for where, num_bytes in zip(self.maps, SLOT_BYTES, strict=True):
            start = (slot - self.FIRST) * STRIDE
            where[start : start + num_bytes] = bytes([value]) * num_bytes

    def bytes_in(self, slot: int) -> list[bytes]:
        start = (slot - self.FIRST) * STRIDE
        return [where[start : start + size] for where, size in zip(self.maps, SLOT_BYTES, strict=True)]

    def begin(self, direction: str, keys: Sequence[bytes], slots: Sequence[int]) -> int:
        op_id = next(self._op_ids)
        (self.pool.read if direction == "read" else self.pool.write)(
            BlockTransfer(op_id, self.fingerprint, keys, slots)
        )
        return op_id

    def finish(self, op_id: int, num_slots: int) -> tuple[set[int], set[int]]:
        """Wait for all slots of the transfer. Returns the good ones and the others."""

        def back() -> list[int]:
            return [slot for piece in self.ended.get(op_id, ()) for slot in (*piece.good, *piece.bad)]

        with self._changed:
            assert self._changed.wait_for(lambda: len(back()) >= num_slots, PATIENCE), "slots did not come back"
            assert len(set(back())) == len(back()) == num_slots, "a slot has come back twice"
            pieces = self.ended[op_id]
        good = {slot for piece in pieces for slot in piece.good}
        return good, {slot for piece in pieces for slot in piece.bad}

    def move(self, direction: str, keys: Sequence[bytes], slots: Sequence[int]) -> tuple[set[int], set[int]]:
        return self.finish(self.begin(direction, keys, slots), len(slots))

    def has(self, keys: Sequence[bytes], fingerprint: str | None = None) -> list[bool]:
        def ask(then: Callable[..., object]) -> None:
            found = self.pool.has(fingerprint or self.fingerprint, keys, then)
            if found is not None:
                then(found)

        found = self.wait_for(ask)
        assert isinstance(found, Sequence)
        return list(found)

    def offer(self, keys: Sequence[bytes], *, is_use: bool = False) -> list[int]:
        return list(self.pool.offer(self.fingerprint, keys, is_use=is_use))

    def purge(self, wish: PurgeWish, *, dry_run: bool = False) -> Purged:
        result = self.wait_for(lambda then: self.pool.purge(wish, then, dry_run=dry_run))
        assert isinstance(result, Purged)
        return result

    def close(self) -> None:
        self.wait_for(self.pool.leave)
        for where in self.maps:
            where.close()
        for fd in self._fds:
            os.close(fd)


class BlockStoreContract:
    """`store` gives a store that was started, with at least 16 MiB of room for each owner. `client` is a pool of its
    own in each test."""

    @pytest.fixture
    def store(self) -> Iterator[BlockStore]:
        raise NotImplementedError

    @pytest.fixture
    def client(self, store: BlockStore) -> Iterator[Client]:
        client = Client(store)
        yield client
        client.close()

    def test_what_was_written_is_read_into_other_slots_of_all_ranks(self, client: Client) -> None:
        keys, slots = keys_of(range(20)), range(100, 120)
        for slot in slots:
            client.fill(slot, slot)
        assert client.offer(keys) == list(range(20))
        assert client.move("write", keys, slots) == (set(slots), set())
        assert client.has(keys) == [True] * 20
        assert client.move("read", keys, range(140, 160)) == (set(range(140, 160)), set())
        for slot in slots:
            assert client.bytes_in(slot + 40) == client.bytes_in(slot) == [bytes([slot]) * size for size in SLOT_BYTES]

    def test_what_was_never_written_is_missing_and_does_not_stop_the_others(self, client: Client) -> None:
        keys = keys_of(range(6))
        client.move("write", keys[::2], [100, 102, 104])
        assert client.has(keys) == [True, False] * 3
        good, bad = client.move("read", keys, range(110, 116))
        assert good == {110, 112, 114}
        assert bad == {111, 113, 115}

    def test_a_read_writes_no_other_slot(self, client: Client) -> None:
        keys = keys_of(range(1))
        client.fill(101, 1)
        client.move("write", keys, [101])
        for slot in range(100, 164):
            client.fill(slot, 9)
        client.move("read", keys, [120])
        assert client.bytes_in(120) == [b"\1" * size for size in SLOT_BYTES]
        others = [slot for slot in range(100, 164) if slot != 120]
        assert all(client.bytes_in(slot) == [b"\t" * size for size in SLOT_BYTES] for slot in others)

    def test_a_block_is_written_once(self, client: Client) -> None:
        keys = keys_of(range(2))
        client.fill(100, 1)
        client.move("write", keys[:1], [100])
        client.fill(101, 2)
        assert client.offer(keys) == [1]
        assert client.move("write", keys[:1], [101]) == ({101}, set())
        client.move("read", keys[:1], [102])
        assert client.bytes_in(102) == client.bytes_in(100), "the first bytes stay"

    def test_equal_keys_of_two_namespaces_are_two_blocks(self, client: Client, store: BlockStore) -> None:
        other = Client(store)
        client.fill(100, 1)
        client.move("write", keys_of(range(1)), [100])
        assert other.has(keys_of(range(1))) == [False]
        assert other.move("read", keys_of(range(1)), [100]) == (set(), {100})
        other.close()

    def test_pools_with_equal_fingerprints_find_each_others_blocks(self, client: Client, store: BlockStore) -> None:
        other = Client(store, identity=client.layout.identity)
        other.fingerprint = client.fingerprint
        client.fill(100, 3)
        client.move("write", keys_of(range(1)), [100])
        assert other.move("read", keys_of(range(1)), [163]) == ({163}, set())
        assert other.bytes_in(163) == client.bytes_in(100)
        other.close()

    def test_a_transfer_of_no_blocks_and_the_end_of_a_transfer_that_is_over_are_ignored(self, client: Client) -> None:
        op_id = client.begin("write", keys_of(range(1)), [100])
        client.finish(op_id, 1)
        client.pool.cancel(op_id)
        client.pool.cancel(4711)
        assert client.has([]) == client.offer([]) == []

    def test_every_slot_of_a_cancelled_transfer_comes_back_once(self, client: Client) -> None:
        keys = keys_of(range(40))
        op_id = client.begin("write", keys, range(100, 140))
        client.pool.cancel(op_id)
        good, bad = client.finish(op_id, 40)
        assert good | bad == set(range(100, 140))
        assert client.has(keys) == [slot in good for slot in range(100, 140)]

    def test_a_purged_block_is_gone_and_may_be_written_again(self, client: Client) -> None:
        keys = keys_of(range(4))
        client.move("write", keys, range(100, 104))
        assert client.purge(PurgeWish(keys=keys[1:3]), dry_run=True).blocks == 2
        assert client.has(keys) == [True] * 4
        assert client.purge(PurgeWish(keys=keys[1:3])).blocks == 2
        assert client.has(keys) == [True, False, False, True]
        assert client.move("read", keys[1:2], [110]) == (set(), {110})
        client.move("write", keys[1:2], [101])
        assert client.has(keys) == [True, True, False, True]

    def test_a_purge_of_a_namespace_or_a_pool_leaves_the_others(self, client: Client, store: BlockStore) -> None:
        other, keys = Client(store), keys_of(range(3))
        for one in (client, other):
            one.move("write", keys, range(100, 103))
        assert client.purge(PurgeWish(fingerprint=client.fingerprint)).blocks == 3
        assert (client.has(keys), other.has(keys)) == ([False] * 3, [True] * 3)
        assert other.purge(PurgeWish()).blocks == 3
        assert other.has(keys) == [False] * 3
        other.close()

    def test_a_pool_that_has_left_gets_all_slots_back_and_moves_nothing_more(self, store: BlockStore) -> None:
        client = Client(store)
        op_ids = [client.begin("write", keys_of(range(at, at + 8)), range(100 + at, 108 + at)) for at in (0, 8, 16)]
        client.wait_for(client.pool.leave)
        for op_id in op_ids:
            client.finish(op_id, 8)
        assert client.has(keys_of(range(24))) == [False] * 24
        assert client.move("read", keys_of(range(2)), (100, 101))[1] == {100, 101}

    def test_an_extent_that_is_removed_is_not_mapped_any_more(self, client: Client) -> None:
        client.move("write", keys_of(range(1)), [100])
        for rank in range(2):
            client.wait_for(partial(client.pool.remove_extent, rank, 7 + rank))
        client.wait_for(lambda then: client.pool.remove_extent(0, 4711, then))

    def test_what_is_expected_grows_with_the_blocks(self, client: Client) -> None:
        client.move("write", keys_of(range(8)), range(100, 108))
        client.move("read", keys_of(range(8)), range(110, 118))
        few, many = client.pool.expect(1), client.pool.expect(64)
        if few.seconds is not None and many.seconds is not None:
            assert few.seconds <= many.seconds

    def test_its_parts_say_what_they_have_done(self, client: Client, store: BlockStore) -> None:
        before = sum(part.counters.written_blocks for part in store.parts())
        client.move("write", keys_of(range(4)), range(100, 104))
        parts = store.parts()
        assert {part.state for part in parts} == {"on"}
        assert sum(part.counters.written_blocks for part in parts) - before == 4
