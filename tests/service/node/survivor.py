"""As much of a service as a test of survival needs: memory, index and keeper, and blocks whose bytes follow from their
keys. It recovers, verifies, then stores and evicts until it is killed."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import sys
from pathlib import Path

from kvstow.control.indexjournal import IndexJournal
from kvstow.memory.budget import MemoryBudget
from kvstow.memory.extents import Populator
from kvstow.memory.limits import MemoryLimits
from kvstow.memory.nodememory import NodeMemory
from kvstow.memory.rows import PoolLayout, RankLayout
from kvstow_service.node.survival.survivingmemory import SurvivingMemory

SLOT_BYTES = 64 << 10
EXTENT_BYTES = 4 << 20
TOTAL_BYTES = 16 << 20
SLOTS = TOTAL_BYTES // SLOT_BYTES // 2
MOST_AT_ONCE = 8
RANKS = 2


def content(key: bytes, rank: int) -> bytes:
    return hashlib.sha256(key + bytes([rank])).digest() * (SLOT_BYTES // 32)


class Survivor:
    def __init__(self, folder: Path) -> None:
        self.keeper = SurvivingMemory(folder, 600)
        kept = self.keeper.take_all()
        self.populator = Populator(MemoryLimits(), pause=0)
        budget = MemoryBudget(TOTAL_BYTES, EXTENT_BYTES)
        self.layout = PoolLayout(os.geteuid(), (RankLayout(SLOT_BYTES),) * RANKS, EXTENT_BYTES)
        budget.add_pool("a", self.layout)
        self.node = NodeMemory(budget, self.populator, keeper=self.keeper)
        self.node.restore(kept)
        budget.attach("a", "s")
        self.node.apply()
        if "journal" in kept:
            self.journal = IndexJournal.open(kept["journal"].fd)
        else:
            self.journal = IndexJournal.create(SLOTS, {"pool": "a"})
            self.keeper.put({"journal": (self.journal.fd, "")})
        found = self.journal.recover()
        self.index = found.blocks.get(0, {})
        for slots in found.filling.values():  # whose writer was this process's predecessor
            self.journal.clear(slots)
        self.populator.start()

    def place(self, slot: int, rank: int) -> tuple[int, int]:
        row, number = divmod(slot, self.layout.row_slots)
        extent = self.node.extent(self.node.budget.rows("a")[row].extents[rank])
        assert extent is not None
        return extent.fd, number * SLOT_BYTES

    def is_right(self, key: bytes, slot: int) -> bool:
        ranks = ((rank, *self.place(slot, rank)) for rank in range(RANKS))
        return all(os.pread(fd, SLOT_BYTES, offset) == content(key, rank) for rank, fd, offset in ranks)

    def num_bytes(self) -> int:
        """Of all memory that this node has."""
        found = (self.node.extent(number) for row in self.node.budget.rows("a").values() for number in row.extents)
        return sum(os.fstat(extent.fd).st_blocks * 512 for extent in found if extent is not None)

    def store_or_evict(self, chance: random.Random, order: str = "") -> None:
        """Hangs in the middle of storing if there is an `order`: "late" has the bytes of a rank first, as is right, and
        "early" the journal."""
        free = sorted(set(range(SLOTS)) - set(self.index.values()))
        if len(free) < MOST_AT_ONCE or (self.index and chance.random() < 0.3):
            for key in chance.sample(sorted(self.index), min(len(self.index), MOST_AT_ONCE)):
                free.append(self.index.pop(key))
        slots = chance.sample(free, min(len(free), MOST_AT_ONCE))
        keys = [chance.randbytes(34) for _ in slots]
        self.journal.begin(slots, 1)
        if order == "early":
            self.journal.publish(slots, 0, keys)
        for rank in range(RANKS):
            for key, slot in zip(keys, slots, strict=True):
                fd, offset = self.place(slot, rank)
                os.pwrite(fd, content(key, rank), offset)
            if order:
                print(len(self.index), flush=True)
                signal.pause()
        self.journal.publish(slots, 0, keys)
        self.index.update(zip(keys, slots, strict=True))


def main(folder: Path, seed: int, order: str = "") -> None:
    service = Survivor(folder)
    wrong = sum(not service.is_right(key, slot) for key, slot in service.index.items())
    print(len(service.index), wrong, service.num_bytes(), flush=True)
    chance = random.Random(seed)
    service.store_or_evict(chance)
    while True:
        service.store_or_evict(chance, order)
        print(len(service.index), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
