"""Nodes whose ranks move blocks to and from one store that is a dict, when the test says so."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvstow.control.session import Session
from kvstow.control.tiertraffic import TierTraffic
from kvstow.messages import Mark, TierCompletion, TierOp
from kvstow.testing.rank import Content, FakeRank

Objects = dict[tuple[bytes, int], Content]
"""By key and rank."""


class TierNode:
    """An engine, its ranks, and what waits to be moved on each of them. `forgets`: the store drops objects, so that of
    rank 0 may be there without the others."""

    forgets = False

    def __init__(
        self, engine: Session, ranks: Sequence[FakeRank], objects: Objects, *, replicated: bool = False
    ) -> None:
        self.engine, self.ranks, self.objects, self.replicated = engine, ranks, objects, replicated
        self.tier = TierTraffic(engine, most=64, replicated=replicated)
        self.queues: dict[int, dict[int, TierOp]] = {rank.rank: {} for rank in ranks}

    def put(self, keys: Sequence[bytes], *, most: int = 64) -> list[TierOp]:
        return TierTraffic(self.engine, most=most, replicated=self.replicated).begin_put("f", keys)

    def fetch(self, keys: Sequence[bytes], *, most: int = 64) -> list[TierOp]:
        return TierTraffic(self.engine, most=most, replicated=self.replicated).begin_fetch("f", keys)

    def deliver(self) -> None:
        """Give the planned ops to their ranks."""
        for rank, op in self.tier.take_plans():
            assert op.op_id not in self.queues[rank], "a rank was given an op twice"
            self.queues[rank][op.op_id] = op

    def waiting(self, rank: int) -> list[TierOp]:
        self.deliver()
        return list(self.queues[rank].values())

    def run(self, rank: int, op: TierOp, *, most: int | None = None, fail: bool = False) -> None:
        """Move up to `most` of the objects, as far as the store has them, and report it."""
        moved = self.move(rank, op, most)
        self.send(rank, op, "failed" if fail else "done", moved)

    def move(self, rank: int, op: TierOp, most: int | None = None) -> int:
        """Without reporting it."""
        del self.queues[rank][op.op_id]
        slots, name = self.ranks[rank].slots, 0 if self.replicated else rank
        moved = 0
        for key, slot in zip(op.keys[:most], op.slots[:most], strict=True):
            if op.direction == "put":
                others = all((key, one.rank) in self.objects for one in self.ranks[1:])
                assert name or self.replicated or others or self.forgets, "rank 0's object is there before the others"
                self.objects[key, name] = slots.get(slot)
            elif (key, name) in self.objects:
                slots[slot] = self.objects[key, name]
            else:
                break
            moved += 1
        if op.direction == "fetch":
            slots.update(dict.fromkeys(op.slots[moved:]))  # half written
        return moved

    def send(self, rank: int, op: TierOp, mark: Mark = "done", moved: int | None = None) -> None:
        moved = len(op.keys) if moved is None else moved
        error = "injected" if mark == "failed" else None
        done = TierCompletion(op.op_id, mark, error, seconds=0.001, moved=moved)
        self.engine.complete(rank, self.ranks[rank].boot_id, [done])

    def run_all(self) -> None:
        """Until nothing is left to do."""
        self.deliver()
        while any(self.queues.values()):
            for rank, queue in self.queues.items():
                for op in list(queue.values()):
                    self.run(rank, op)
            self.deliver()

    def store(self, keys: Sequence[bytes]) -> None:
        """Compute and store these keys' blocks; each rank's bytes are its own, unless they are replicated."""
        blocks = range(1000, 1000 + len(keys))
        for rank in self.ranks:
            rank.blocks.update(zip(blocks, (self.content(key, rank.rank) for key in keys), strict=True))
        op = self.engine.begin_store(keys, blocks).op
        for rank in self.ranks:
            rank.submit(op)
            rank.run_all()
        self.engine.take_settled()

    def content(self, key: bytes, rank: int) -> bytes:
        return key + bytes([0 if self.replicated else rank])

    def loaded(self, keys: Sequence[bytes]) -> int:
        """Load the leading keys that are visible, and check the bytes on every rank. Returns how many there were."""
        lease = self.engine.acquire(keys)
        hits = lease.num_keys
        if not hits:
            return 0
        op = self.engine.begin_load(lease, range(2000, 2000 + hits))
        for rank in self.ranks:
            rank.submit(op)
            rank.run(op.op_id)
            found = [rank.blocks[2000 + at] for at in range(hits)]
            assert found == [self.content(key, rank.rank) for key in keys[:hits]], "wrong bytes were loaded"
        self.engine.take_settled()
        return hits


def in_store(objects: Objects, keys: Iterable[bytes], num_ranks: int) -> None:
    """Put objects of these keys for all ranks."""
    objects.update({(key, rank): key + bytes([rank]) for key in keys for rank in range(num_ranks)})
