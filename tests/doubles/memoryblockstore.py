"""A store below the pools in the memory of this process: for tests and benchmarks."""

from __future__ import annotations

import mmap
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from threading import Condition, RLock
from typing import Any, Literal, NamedTuple

from kvstow.tier.blockstore import (
    BlockTransfer,
    Expectation,
    PartCounters,
    PartState,
    Piece,
    Purged,
    PurgeWish,
    StoredExtent,
    StoredLayout,
    StorePart,
)

Name = tuple[str, bytes]
"""Fingerprint and key."""


Fate = Literal["missing", "corrupt", "failed", "refused"]


class StoredBlock(NamedTuple):
    """`identity`: of the pool that wrote it. `ranks`: the contents of the slot on each rank."""

    identity: str
    ranks: tuple[Any, ...]


class MemoryBlockStore:
    """Blocks of one process, the least recently used ones first to go. Thread-safe.

    Nothing ends by itself: `run` does what was asked for so far, on the calling thread, reads before writes. `start`
    begins a thread that calls it for every request, as a real store does.

    A test says how the store behaves: `answers_later`: `has` gives no answer at once. `fate`: what becomes of a block
    instead of being moved. `wants`: which offered blocks are wanted, of those that it does not have, when they are
    stored and when they are used. `expectation`: what reading so many blocks takes. `most_in_piece`: blocks in one
    piece. `is_hanging`: `run` does nothing. `held`: transfers that it does not do, or extents that it does not remove;
    `release` ends that.
    """

    name = "memory"
    slot_alignment = 1
    shown = "memory"

    def __init__(
        self, places: int | None = None, *, most_in_piece: int = 64, shares: MemoryBlockStore | None = None
    ) -> None:
        """`places`: blocks that the store has room for; None for no limit. `shares`: another node's store, whose blocks
        are the same."""
        self.places, self.most_in_piece = places, most_in_piece
        self.answers_later = self.is_hanging = False
        self.held: set[Literal["read", "write", "remove", "purge"]] = set()
        self.fate: Callable[[Name], Fate | None] = lambda name: None
        self.wants: Callable[[bytes, bool], bool] = lambda key, again: True
        self.expectation: Callable[[int], Expectation] = lambda num_blocks: Expectation(0.0, 0, 0.0)
        self.read_bytes_per_second: float | None = None
        """What its part shows as the measured rate of reads."""
        self.memory: Sequence[dict[int, Any]] | None = None
        """The contents of slots by rank, where a test has them in place of extents."""
        self.blocks: OrderedDict[Name, StoredBlock] = OrderedDict() if shares is None else shares.blocks
        """The least recently used one first."""
        self.counts = dict.fromkeys(("read", "written", "refused", "failed", "corrupt", "evicted"), 0)
        self.lock: RLock = RLock() if shares is None else shares.lock
        self.pools: list[MemoryStoredPool] = []
        self._changed = Condition(self.lock)
        self._is_closed = False
        self._thread: threading.Thread | None = None

    # -- the node's side --------------------------------------------------------------------------------------

    def start(self, witness: int) -> None:
        self._thread = threading.Thread(target=self._serve, name="kvstow-memory-store", daemon=True)
        self._thread.start()

    def join(self, layout: StoredLayout, on_end: Callable[[Sequence[Piece]], object]) -> MemoryStoredPool:
        pool = MemoryStoredPool(self, layout, on_end)
        with self.lock:
            self.pools.append(pool)
        return pool

    def parts(self) -> Sequence[StorePart]:
        with self.lock:
            counts = self.counts
            counters = PartCounters(
                read_blocks=counts["read"],
                written_blocks=counts["written"],
                corrupt_blocks=counts["corrupt"],
                failed_blocks=counts["failed"],
                refused_blocks=counts["refused"],
                evicted_blocks=counts["evicted"],
            )
            state: PartState = "closed" if self._is_closed else "stuck" if self.is_hanging else "on"
            rate = self.read_bytes_per_second
            blocks = len(self.blocks)
            return [StorePart(name="memory", state=state, counters=counters, blocks=blocks, read_bytes_per_second=rate)]

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            pools = list(self.pools)
        self.release()
        for pool in pools:
            pool.leave(lambda: None)
        if self._thread is not None:
            self._thread.join()
        self.run()

    @property
    def answers_at_once(self) -> bool:
        return not self.answers_later

    # -- the test's side --------------------------------------------------------------------------------------

    def run(self) -> int:
        """Do everything that was asked for, and return how many things that were."""
        count = 0
        while not self.is_hanging and (actions := self._take()):
            for action in actions:
                action()
            count += len(actions)
        return count

    def release(self) -> None:
        """Do from now on what was `held`, and what hung."""
        with self._changed:
            self.held.clear()
            self.is_hanging = False
            for pool in self.pools:
                pool.calls.extend(pool.removals)
                pool.removals.clear()
            self._changed.notify_all()

    def has_work(self) -> bool:
        reads, writes = "read" not in self.held, "write" not in self.held
        return any(pool.calls or (reads and pool.reads) or (writes and pool.writes) for pool in self.pools)

    def note_change(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _take(self) -> list[Callable[[], object]]:
        with self.lock:
            pools = list(self.pools)
            for pool in pools:
                if pool.calls:
                    actions, pool.calls = list(pool.calls), deque()
                    return actions
            queues = [(pool, pool.reads) for pool in pools if "read" not in self.held]
            queues += [(pool, pool.writes) for pool in pools if "write" not in self.held]
            found: list[Callable[[], object]] = [partial(pool.move, queue) for pool, queue in queues if queue]
            return found[:1]

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or (self.has_work() and not self.is_hanging))
                if self._is_closed:
                    return
            self.run()

    def put(self, name: Name, block: StoredBlock) -> None:
        """The youngest block from now on. Call it with the lock held."""
        self.blocks.setdefault(name, block)
        self.blocks.move_to_end(name)
        while self.places is not None and len(self.blocks) > self.places:
            self.blocks.popitem(last=False)
            self.counts["evicted"] += 1


class MemoryStoredPool:
    """The `StoredPool` of a `MemoryBlockStore`. Without extents it moves no bytes, as a model of a store."""

    def __init__(
        self, store: MemoryBlockStore, layout: StoredLayout, on_end: Callable[[Sequence[Piece]], object]
    ) -> None:
        self.layout = layout
        self.calls: deque[Callable[[], object]] = deque()
        self.removals: list[Callable[[], object]] = []
        self.reads: deque[BlockTransfer] = deque()
        self.writes: deque[BlockTransfer] = deque()
        self._store, self._on_end = store, on_end
        self._has_left = False
        self._writing: set[Name] = set()
        self.maps: dict[tuple[int, int], tuple[StoredExtent, mmap.mmap]] = {}

    # -- what the store has -----------------------------------------------------------------------------------

    def has(
        self, fingerprint: str, keys: Sequence[bytes], on_answer: Callable[[Sequence[bool]], object]
    ) -> Sequence[bool] | None:
        if self._store.answers_later:
            self._later(lambda: on_answer(self._known(fingerprint, keys)))
            return None
        return self._known(fingerprint, keys)

    def _known(self, fingerprint: str, keys: Sequence[bytes]) -> list[bool]:
        with self._store.lock:
            return [not self._has_left and (fingerprint, key) in self._store.blocks for key in keys]

    def offer(self, fingerprint: str, keys: Sequence[bytes], *, is_use: bool) -> Sequence[int]:
        store = self._store
        with store.lock:
            names = [(fingerprint, key) for key in keys]
            for name in reversed(names):  # the root is the youngest
                if name in store.blocks:
                    store.blocks.move_to_end(name)
            return [
                index
                for index, name in enumerate(names)
                if name not in store.blocks and name not in self._writing and store.wants(name[1], is_use)
            ]

    def expect(self, num_blocks: int) -> Expectation:
        return self._store.expectation(num_blocks)

    # -- transfers --------------------------------------------------------------------------------------------

    def read(self, transfer: BlockTransfer) -> None:
        self._add(self.reads, transfer)

    def write(self, transfer: BlockTransfer) -> None:
        with self._store.lock:
            self._writing.update((transfer.fingerprint, key) for key in transfer.keys)
        self._add(self.writes, transfer)

    def _add(self, queue: deque[BlockTransfer], transfer: BlockTransfer) -> None:
        with self._store.lock:
            if self._has_left:
                self._end_later(transfer)
            else:
                queue.append(transfer)
        self._store.note_change()

    def cancel(self, op_id: int) -> None:
        with self._store.lock:
            for queue in (self.reads, self.writes):
                for transfer in [one for one in queue if one.op_id == op_id]:
                    queue.remove(transfer)
                    self._end_later(transfer)
        self._store.note_change()

    def _end_later(self, transfer: BlockTransfer) -> None:
        self._forget_writing(transfer.fingerprint, transfer.keys)
        self.calls.append(lambda: self._on_end([Piece(transfer.op_id, (), tuple(transfer.slots))]))

    def _forget_writing(self, fingerprint: str, keys: Iterable[bytes]) -> None:
        self._writing.difference_update((fingerprint, key) for key in keys)

    def move(self, queue: deque[BlockTransfer]) -> None:
        """Move one piece of the oldest transfer. For `MemoryBlockStore.run`."""
        with self._store.lock:
            if not queue:
                return
            transfer, most = queue.popleft(), self._store.most_in_piece
            if len(transfer.keys) > most:
                queue.appendleft(transfer._replace(keys=transfer.keys[most:], slots=transfer.slots[most:]))
            now = transfer._replace(keys=transfer.keys[:most], slots=transfer.slots[:most])
            is_read = queue is self.reads
            fates = [
                (self._read_one if is_read else self._write_one)((now.fingerprint, key), slot)
                for key, slot in zip(now.keys, now.slots, strict=True)
            ]
            if not is_read:
                self._forget_writing(now.fingerprint, now.keys)
        good = tuple(slot for slot, fate in zip(now.slots, fates, strict=True) if fate is None)
        bad = tuple(slot for slot, fate in zip(now.slots, fates, strict=True) if fate is not None)
        self._on_end([Piece(now.op_id, good, bad)])

    def _read_one(self, name: Name, slot: int) -> Fate | None:
        store, fate = self._store, self._store.fate(name)
        block = store.blocks.get(name)
        if fate is None and block is None:
            fate = "missing"
        if fate is not None or block is None:
            store.blocks.pop(name, None)
            store.counts["corrupt" if fate == "corrupt" else "failed"] += fate in ("corrupt", "failed")
            return fate
        store.blocks.move_to_end(name)
        for rank, data in enumerate(block.ranks):
            if store.memory is not None:
                store.memory[rank][slot] = data
            else:
                where, start = self._locate(rank, slot)
                where[start : start + len(data)] = data
        store.counts["read"] += 1
        return None

    def _write_one(self, name: Name, slot: int) -> Fate | None:
        store, fate = self._store, self._store.fate(name)
        if fate is not None:
            store.counts["refused" if fate == "refused" else "failed"] += 1
            return fate
        data: list[Any] = []
        for rank, num_bytes in enumerate(self.layout.slot_bytes):
            if store.memory is not None:
                data.append(store.memory[rank][slot])
            elif self.maps:
                where, start = self._locate(rank, slot)
                data.append(where[start : start + num_bytes])
        store.put(name, StoredBlock(self.layout.identity, tuple(data)))
        store.counts["written"] += 1
        return None

    def _locate(self, rank: int, slot: int) -> tuple[mmap.mmap, int]:
        for (of_rank, _), (extent, where) in self.maps.items():
            if of_rank == rank and extent.first_slot <= slot < extent.first_slot + extent.num_slots:
                return where, (slot - extent.first_slot) * extent.slot_stride
        raise LookupError(f"slot {slot} of rank {rank} is in no extent")

    def purge(self, wish: PurgeWish, then: Callable[[Purged], object], *, dry_run: bool = False) -> None:
        with self._store.lock:
            found = [name for name, block in self._store.blocks.items() if self._matches(wish, name, block)]
            if not dry_run:
                for name in found:
                    del self._store.blocks[name]
            answer = partial(then, Purged(len(found)))
            if "purge" in self._store.held:
                self.removals.append(answer)
            else:
                self._later(answer)

    def _matches(self, wish: PurgeWish, name: Name, block: StoredBlock) -> bool:
        if wish.fingerprint is not None:
            return name[0] == wish.fingerprint
        if block.identity != self.layout.identity:
            return False
        if wish.keys is not None:
            return name[1] in wish.keys
        return wish.key_prefixes is None or name[1].startswith(wish.key_prefixes)

    # -- memory -----------------------------------------------------------------------------------------------

    def add_extent(self, rank: int, extent: StoredExtent, fd: int, then: Callable[[str], object]) -> None:
        with self._store.lock:
            if not self._has_left:
                self.maps[rank, extent.extent_id] = extent, mmap.mmap(fd, extent.num_bytes)
            problem = "the pool has left the store" if self._has_left else ""
        self._later(lambda: then(problem))

    def remove_extent(self, rank: int, extent_id: int, then: Callable[[], object]) -> None:
        def remove() -> None:
            with self._store.lock:
                found = self.maps.pop((rank, extent_id), None)
            if found is not None:
                found[1].close()
            then()

        with self._store.lock:
            if "remove" in self._store.held:
                self.removals.append(remove)
                return
        self._later(remove)

    def leave(self, then: Callable[[], object]) -> None:
        with self._store.lock:
            if self._has_left:
                return
            self._has_left = True
            for queue in (self.reads, self.writes):
                while queue:
                    self._end_later(queue.popleft())
            for rank, extent_id in list(self.maps):
                self.remove_extent(rank, extent_id, lambda: None)
            self._later(then)

    def _later(self, call: Callable[[], object]) -> None:
        with self._store.lock:
            self.calls.append(call)
        self._store.note_change()
