"""The fleet tier of a run: its store is in this process, and its transfers run when the run says so."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any

import pytest
from tests.vllm.harness.report import Report
from tests.vllm.harness.setup import Setup

from kvstow.control.fleettier import FleetTier
from kvstow.messages import TierCompletion, TierOp
from kvstow.testing.fakes import FakeClock
from kvstow.tier.breakeven import BreakEven
from kvstow.tier.fingerprint import WEIGHTS_CHANGED
from kvstow.tier.memorystore import MemoryStore, MemoryTransfers
from kvstow.tier.ranktransfers import RankTransfers
from kvstow.tier.store import GetStatus, PutStatus, SlotObject
from kvstow_service.connectors.engine_core.embeddedtier import EmbeddedTier

SHARED = "kvstow_service.connectors.engine_core"
_TIMEOUT = 30.0


class Tier:
    """Makes the parts that take the place of threads, and holds what the connector makes of the tier.

    The store forgets some objects, on each rank others, so that fetches end early. It keeps those of all weights: after
    a change the weights get another name at once.
    """

    def __init__(self, setup: Setup, random: Random, clock: FakeClock, patch: pytest.MonkeyPatch) -> None:
        self.store = CheckedStore(Random(f"store of {setup.name}/{setup.seed}"), setup.forget_rate)
        self.weights: Callable[[], int] = lambda: 0
        """How often they have changed."""
        self._random, self._delay = random, setup.delay
        self._embedded: EmbeddedTier | None = None
        self.transfers: list[SteppedTransfers] = []
        """Of all boots of all ranks."""

        def make_embedded(*args: Any, **options: Any) -> EmbeddedTier:
            self._embedded = EmbeddedTier(*args, **options, clock=clock)
            return self._embedded

        patch.setattr(f"{SHARED}.embeddedtier.EmbeddedTier", make_embedded)
        patch.setattr(f"{SHARED}.ranktier.RankTransfers", partial(SteppedTransfers, tier=self))
        patch.setattr("kvstow_service.tiers.stores.open_store", lambda url: self.store)
        patch.setattr("kvstow_service.connectors.vllm.unshared._are_reproducible", lambda algorithm: True)
        patch.setattr(BreakEven, "note_prefill", lambda self, tokens, seconds: None)  # by a real clock

    def delay(self) -> int:
        return self._random.randint(*self._delay)

    def advance(self) -> None:
        """Let a tick of all transfers pass."""
        for transfers in self.transfers:
            transfers.advance()

    def follow(self) -> None:
        """Wait for the answer to what the last step has asked, and name new weights."""
        if self._embedded is None or self._embedded.tier is None:
            return
        fleet = self._embedded.tier.fleet
        _wait_answers(fleet)
        if fleet.status().reason == WEIGHTS_CHANGED:
            fleet.name_weights(f"weights {self.weights()}")

    def finish(self, report: Report) -> None:
        assert self._embedded is not None
        assert self._embedded.tier is not None
        fleet = self._embedded.tier.fleet
        counters = fleet.status().counters
        report.put_blocks, report.fetched_blocks = counters.put_blocks, counters.fetched_blocks
        report.short_blocks = counters.failed_fetch_blocks
        for problem in self.store.problems:
            report.add(problem)
        if self._embedded.tier.has_failed:
            report.add("the tier has failed")
        if fleet.traffic.in_flight:
            report.add(f"transfers of the tier left: {fleet.traffic.in_flight}")


class CheckedStore(MemoryStore):
    """Notes which objects are put in the wrong order, or by several ranks."""

    def __init__(self, random: Random, forget_rate: float) -> None:
        super().__init__()
        self.problems: list[str] = []
        self._random, self._forget_rate = random, forget_rate
        self._forgotten: dict[tuple[int, str], bool] = {}
        self._put_by: dict[str, int] = {}

    def open_transfers(self, rank: int, witness: int | None = None) -> CheckedTransfers:
        return CheckedTransfers(self, rank)

    def forgets(self, one: SlotObject, rank: int) -> bool:
        """For good. Drawn when the rank fetches it first."""
        return self._forgotten.setdefault((rank, str(one.name)), self._random.random() < self._forget_rate)

    def note_put(self, one: SlotObject, rank: int) -> None:
        name = one.name
        if self._put_by.setdefault(str(name), rank) != rank:
            self.problems.append(f"put by several ranks: {name}")
        others = [str(name._replace(rank=other)) for other in range(1, name.num_ranks)]
        if not name.rank and not all(self.has(others)):
            self.problems.append(f"rank 0 was first: {name}")


class CheckedTransfers(MemoryTransfers):
    def __init__(self, store: CheckedStore, rank: int) -> None:
        super().__init__(store)
        self._checks, self._rank = store, rank

    def put(self, objects: Sequence[SlotObject], timeout: float) -> list[PutStatus]:
        for one in objects:
            self._checks.note_put(one, self._rank)
        return super().put(objects, timeout)

    def _get(self, one: SlotObject) -> GetStatus:
        return "missing" if self._checks.forgets(one, self._rank) else super()._get(one)


class SteppedTransfers(RankTransfers):
    """Its ops run in `advance`, on the caller's thread. The threads of a `RankTransfers` have nothing to do."""

    def __init__(self, *args: Any, tier: Tier, **options: Any) -> None:
        super().__init__(*args, **options)
        self._tier = tier
        self._waiting: list[tuple[int, TierOp]] = []
        self._tick = 0
        tier.transfers.append(self)

    def submit(self, op: TierOp) -> None:
        self._waiting.append((self._tick + self._tier.delay(), op))

    def advance(self) -> None:
        self._tick += 1
        due = [op for tick, op in self._waiting if tick <= self._tick]
        self._waiting = [one for one in self._waiting if one[1] not in due]
        for op in due:
            self._finish(self._move(op, 0.0))

    def close(self) -> None:
        for _, op in self._waiting:
            self._finish(TierCompletion(op.op_id, "failed", "the rank's transfers were closed"))
        self._waiting.clear()
        super().close()


def _wait_answers(fleet: FleetTier) -> None:
    lookups = fleet._lookups
    deadline = time.monotonic() + _TIMEOUT
    while True:
        with lookups._state:
            if len(lookups._results) >= fleet._asked:
                return
        if time.monotonic() > deadline:
            raise TimeoutError("the look-ups of the last step were not answered")
        threading.Event().wait(0.0002)
