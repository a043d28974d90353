"""A node with a fleet tier, whose store and ranks do what the test says."""

from __future__ import annotations

from collections.abc import Callable

from tests.engine.conftest import Eventually
from tests.engine.control.tiernode import TierNode, in_store

from kvstow.control.engine import OffloadEngine
from kvstow.control.fleettier import FleetTier, TierSettings, TierWait
from kvstow.messages import TierCompletion, TierOp
from kvstow.testing.fakes import FakeClock
from kvstow.testing.rank import make_ranks
from kvstow.testing.tier import ControlledStore
from kvstow.tier.store import ObjectName

KEYS = [bytes([0, 0, number]) for number in range(12)]
BLOCK_TOKENS = 10
RANKS = 2


class TieredNode(TierNode):
    """A node whose requests wait for the tier. The store answers look-ups with what ranks have put."""

    def __init__(
        self,
        engine: OffloadEngine,
        clock: FakeClock,
        settings: TierSettings,
        eventually: Eventually,
        store: ControlledStore | None = None,
        off_reason: str = "",
    ) -> None:
        """`off_reason`: why the tier is off, if it is at first."""
        super().__init__(engine, make_ranks(engine), {})
        self.offload, self.clock, self.eventually = engine, clock, eventually
        self.store_of_names = store or ControlledStore()
        self.fleet = FleetTier(
            engine,
            self.store_of_names.open_lookups(),
            settings,
            None if off_reason else "f",
            off_reason=off_reason,
            name="fake",
            clock=clock,
        )
        self.tier = self.fleet.traffic

    def deliver(self) -> None:
        for rank, op in self.fleet.take_plans():
            self.queues[rank][op.op_id] = op

    def add(self, keys: list[bytes], fingerprint: str = "f") -> None:
        """Another node has put these."""
        in_store(self.objects, keys, RANKS)
        for key in keys:
            self.store_of_names.put(str(ObjectName(fingerprint, key, 0, RANKS)), b"x")

    def hear(self) -> None:
        """Step until the store has answered all questions."""
        self.fleet.step()

        def has_heard() -> bool:
            self.fleet.step()
            return not self.fleet._asked

        self.eventually(has_heard)

    def ops(self, direction: str) -> list[TierOp]:
        """Under way on rank 1."""
        return [op for op in self.waiting(1) if op.direction == direction]

    def look(self, keys: list[bytes]) -> TierWait:
        """A request that waits, and knows what the store has."""
        wait = self.fleet.look_for(keys)
        assert wait is not None
        self.hear()
        return wait

    def fetch_all(self, keys: list[bytes]) -> bool:
        """A request comes, and everything goes well. Whether it had to wait for fetches."""
        wait = self.fleet.look_for(keys)
        if wait is None:
            return False
        self.hear()
        if self.fleet.is_over(wait):
            return False
        self.run_all()
        self.fleet.step()
        assert self.fleet.is_over(wait)
        return True

    def outage(self, op: TierOp, rank: int = 1) -> None:
        del self.queues[rank][op.op_id]
        lost = TierCompletion(op.op_id, "failed", "no answer in 0.5 s", outage=True)
        self.engine.complete(rank, self.ranks[rank].boot_id, [lost])


MakeNode = Callable[..., TieredNode]
