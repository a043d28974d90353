"""The end of a tier, whatever its host does meanwhile."""

from __future__ import annotations

from typing import cast

from kvstow.config import EngineConfig
from kvstow.control.engine import OffloadEngine
from kvstow.control.fleettier import FleetTier
from kvstow.control.tiersettings import TierSettings
from kvstow.messages import TierCompletion, TierOp
from kvstow.stats import SlotCounts
from kvstow.testing.rank import make_ranks
from kvstow.tier.memorystore import MemoryStore
from kvstow.tier.ranktransfers import RankTransfers
from kvstow_service.tiers.tierend import end_transfers


class ClosedTransfers:
    """Transfers that fail what they are given."""

    def __init__(self) -> None:
        self.is_closed = False
        self.completions: list[TierCompletion] = []

    def submit(self, op: TierOp) -> None:
        assert self.is_closed
        self.completions.append(TierCompletion(op.op_id, "failed", "the rank's transfers were closed"))

    def take_completions(self) -> list[TierCompletion]:
        taken, self.completions = self.completions, []
        return taken

    def close(self) -> None:
        self.is_closed = True


def test_ops_that_no_step_has_given_to_the_ranks_end_too() -> None:
    engine = OffloadEngine(EngineConfig(slot_bytes=4096, capacity_slots=8, num_ranks=2, block_tokens=16))
    ranks = make_ranks(engine)
    tier = FleetTier(engine, MemoryStore().open_lookups(), TierSettings(), "f")
    tier.traffic.begin_fetch("f", [bytes([0, 0, number]) for number in range(4)])
    assert tier.traffic.in_flight == 1
    transfers = [ClosedTransfers(), ClosedTransfers()]
    end_transfers(
        tier,
        cast("list[RankTransfers]", transfers),
        lambda rank, completions: engine.complete(rank, ranks[rank].boot_id, completions),
    )
    assert tier.traffic.in_flight == 0
    assert engine.stats().pool.slots == SlotCounts(8, 0, 0, 0, 0, 0)
