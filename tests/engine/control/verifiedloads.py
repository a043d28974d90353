"""A host of random schedules: it reuses blocks as soon as it may, and verifies the bytes of every load."""

from __future__ import annotations

from collections.abc import Sequence

from tests.doubles.rank import FakeRank

from kvstow.messages import Op
from kvstow.results import Settled


class VerifyingHost:
    """`loads`: by op id, the op, the contents that it should load, and each rank's boot when it began."""

    ranks: Sequence[FakeRank]
    loads: dict[int, tuple[Op, tuple[bytes, ...], list[str]]]
    stores: dict[int, Op]
    next_block: int

    def take_settled(self) -> list[Settled]:
        raise NotImplementedError

    def fresh_blocks(self, count: int) -> list[int]:
        self.next_block += count
        return list(range(self.next_block - count, self.next_block))

    def settle(self) -> None:
        for settled in self.take_settled():
            if settled.direction == "store":
                self.settle_store(settled)
            else:
                self.settle_load(settled)

    def settle_store(self, settled: Settled) -> None:
        """The host reuses the blocks from now on."""
        for rank in self.ranks:
            rank.blocks.update(dict.fromkeys(settled.blocks, b"overwritten"))
        if settled.mark != "source_free":
            del self.stores[settled.op_id]

    def settle_load(self, settled: Settled) -> None:
        op, contents, boots = self.loads.pop(settled.op_id)
        if settled.mark != "done":
            return
        for rank, boot_id in zip(self.ranks, boots, strict=True):
            if rank.boot_id == boot_id:
                assert op.op_id not in rank.queue, "a load is done although a rank has not copied it"
                assert tuple(rank.blocks[block] for block in op.blocks) == contents, "wrong bytes were loaded"
