"""Replays of several nodes over a real Mooncake: hit rates, and what is killed in the middle of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from tests.service.replay.fleetreplay import replay
from tests.service.tiers.mooncake.cluster import WATERMARK, Cluster

from kvstow.control.fleettier import TierSettings
from kvstow.tier.objectname import ObjectName
from kvstow.tier.store import GetStatus, PutStatus, SlotObject
from kvstow_service.replay.fleet import Fleet
from kvstow_service.replay.generate import TraceShape, generate_trace
from kvstow_service.replay.trace import read_trace
from kvstow_service.tiers.mooncake.mooncakestore import MooncakeLookups, MooncakeStore, MooncakeTransfers
from kvstow_service.tiers.objectheader import HEADER_BYTES

pytestmark = pytest.mark.tier

PATIENCE = 60.0
SLOT_BYTES = 64 << 10
OBJECT_BYTES = SLOT_BYTES + HEADER_BYTES
PRODUCTION = Path(__file__).parents[4].parent / "shared" / "data" / "conversation_trace.jsonl"


class PatientTransfers(MooncakeTransfers):
    def put(self, objects: Sequence[SlotObject], timeout: float) -> list[PutStatus]:
        return super().put(objects, PATIENCE)

    def get(self, objects: Sequence[SlotObject], timeout: float) -> list[GetStatus]:
        return super().get(objects, PATIENCE)


class PatientLookups(MooncakeLookups):
    def exists(self, names: Sequence[ObjectName], timeout: float) -> list[bool]:
        return super().exists(names, PATIENCE)


class PatientStore(MooncakeStore):
    """Gives calls time that the engine does not: on a busy machine, a call that takes half a second is no fault."""

    def open_transfers(self, rank: int) -> MooncakeTransfers:
        return PatientTransfers(super().open_transfers(rank).channel)

    def open_lookups(self) -> MooncakeLookups:
        found = super().open_lookups()
        return PatientLookups(found.channel, found.capacity)


@pytest.mark.skipif(not PRODUCTION.exists(), reason="the production trace is not beside the checkout")
@pytest.mark.parametrize(
    ("segment_bytes", "simulated", "points"),
    [
        pytest.param(5 << 30, 31.42, 0.5, id="more than the working set"),
        # It evicts in passes of 5 %, so it holds a little less than that most of the time.
        pytest.param(int(8_000 * OBJECT_BYTES / WATERMARK), 17.71, 2.0, id="8,000 blocks"),
    ],
)
def test_the_hit_rate_of_the_production_trace_is_the_simulated_one(
    make_cluster: Callable[..., Cluster], segment_bytes: int, simulated: float, points: float
) -> None:
    requests = read_trace(str(PRODUCTION), limit=3_000)
    store = PatientStore(make_cluster(segment_bytes).location)
    result = replay(requests, store, nodes=4, slots=500, slot_bytes=SLOT_BYTES)
    assert result.tier is not None
    assert result.tier.counters.failed_put_blocks == result.tier.dropped_blocks == 0
    assert abs(100 * result.hit_blocks / result.blocks - simulated) <= points


def children() -> list[int]:
    """The processes that this one has started to talk to Mooncake."""
    found: list[str] = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended meanwhile
            found += (task / "children").read_text().split()
    return [int(pid) for pid in found if talks_to_mooncake(pid)]


def talks_to_mooncake(pid: str) -> bool:
    try:
        return b"storechild" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


def kill_children(cluster: Cluster) -> None:
    for pid in children():
        os.kill(pid, signal.SIGKILL)


FAULTS: dict[str, Callable[[Cluster], None]] = {
    "the master is killed": lambda cluster: cluster.kill(cluster.master),
    "the provider is killed": lambda cluster: cluster.kill(cluster.provider),
    "the master hangs": lambda cluster: cluster.stop(cluster.master),
    "our processes are killed": kill_children,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_middle_costs_hits_and_nothing_else(make_cluster: Callable[..., Cluster], fault: str) -> None:
    requests = list(generate_trace(TraceShape(sessions=12)))[:60]
    cluster = make_cluster()
    fetched: dict[int, int] = {}

    def hurt(fleet: Fleet, number: int) -> None:
        figures = [node.offload.figures().tier for node in fleet.nodes]
        fetched[number] = sum(one.counters.fetched_blocks for one in figures if one is not None)
        if number == len(requests) // 2:
            assert fetched[number], "nothing was fetched before the fault"
            FAULTS[fault](cluster)

    settings = TierSettings(deadline=2.0, lookup_wait=2.0)
    replay(
        requests,
        MooncakeStore(cluster.location),
        settings,
        nodes=2,
        slots=40,
        slot_bytes=SLOT_BYTES,
        ranks=2,
        on_request=hurt,
    )
