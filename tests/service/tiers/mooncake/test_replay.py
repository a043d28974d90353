"""Replays of several nodes over a real Mooncake: hit rates, and what is killed in the middle of them."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from tests.service.replay.fleetreplay import replay
from tests.service.tiers.mooncake.cluster import WATERMARK, Cluster

from kvstow.control.tiersettings import TierSettings
from kvstow.tier.objectname import ObjectName
from kvstow.tier.store import GetStatus, PutStatus, SlotObject
from kvstow.tier.tierstatus import TierStatus
from kvstow_service.replay.fleet import Fleet
from kvstow_service.replay.generate import TraceShape, generate_trace
from kvstow_service.replay.result import ReplayResult
from kvstow_service.replay.trace import read_trace
from kvstow_service.tiers.mooncake.mooncakestore import MooncakeLookups, MooncakeStore, MooncakeTransfers
from kvstow_service.tiers.objectheader import HEADER_BYTES, MAGIC

pytestmark = pytest.mark.tier

PATIENCE = 60.0
_PAUSE = 0.05
SLOT_BYTES = 64 << 10
SEGMENT_BYTES = 256 << 20
OBJECT_BYTES = SLOT_BYTES + HEADER_BYTES
PRODUCTION = Path(__file__).parents[4].parent / "shared" / "data" / "conversation_trace.jsonl"


class PatientTransfers(MooncakeTransfers):
    def put(self, objects: Sequence[SlotObject], timeout: float) -> list[PutStatus]:
        """Again while there is no room: the master evicts on a thread of its own, which a busy machine keeps
        waiting."""
        deadline = time.monotonic() + PATIENCE
        while "full" in (statuses := super().put(objects, PATIENCE)) and time.monotonic() < deadline:
            time.sleep(_PAUSE)
        return statuses

    def get(self, objects: Sequence[SlotObject], timeout: float) -> list[GetStatus]:
        return super().get(objects, PATIENCE)


class PatientLookups(MooncakeLookups):
    def exists(self, names: Sequence[ObjectName], timeout: float) -> list[bool]:
        return super().exists(names, PATIENCE)


class PatientStore(MooncakeStore):
    """Gives calls, and evictions, time that the engine does not: on a busy machine, half a second is no fault."""

    def open_transfers(self, rank: int, witness: int | None = None) -> MooncakeTransfers:
        return PatientTransfers(super().open_transfers(rank, witness).channel)

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


def corrupt_memory(cluster: Cluster) -> None:
    """Change a byte of every object that the provider has. The header comes after the slot."""
    pid = cluster.provider.pid
    writable = [line.split()[0] for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if " rw" in line]
    ranges = [tuple(int(number, 16) for number in text.split("-")) for text in writable]
    begin, end = max(ranges, key=lambda one: one[1] - one[0])
    with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
        memory.seek(begin)
        contents = memory.read(end - begin)
        headers = [found.start() for found in re.finditer(re.escape(MAGIC), contents)]
        assert headers
        for at in headers:
            os.pwrite(memory.fileno(), bytes([contents[at - 1] ^ 1]), begin + at - 1)


FAULTS: dict[str, Callable[[Cluster], None]] = {
    "the master is killed": lambda cluster: cluster.kill(cluster.master),
    "the provider is killed": lambda cluster: cluster.kill(cluster.provider),
    "the master hangs": lambda cluster: cluster.stop(cluster.master),
    "the provider hangs": lambda cluster: cluster.stop(cluster.provider),
    "our processes are killed": kill_children,
    "objects are corrupted": corrupt_memory,
}


def replay_with(
    cluster: Cluster, on_request: Callable[[Sequence[TierStatus], int, int], None] = lambda tiers, number, last: None
) -> ReplayResult:
    """60 requests on two nodes with two ranks each; `on_request` is told what the nodes' tiers say, the number of
    requests finished, and that of all."""
    requests = list(generate_trace(TraceShape(sessions=12)))[:60]

    def finished(fleet: Fleet, number: int) -> None:
        found = (node.offload.figures().tier for node in fleet.nodes)
        on_request([one for one in found if one is not None], number, len(requests))

    settings = TierSettings(deadline=2.0, lookup_wait=2.0)
    store = MooncakeStore(cluster.location)
    return replay(requests, store, settings, nodes=2, slots=40, slot_bytes=SLOT_BYTES, ranks=2, on_request=finished)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_middle_costs_hits_and_nothing_else(make_cluster: Callable[..., Cluster], fault: str) -> None:
    cluster = make_cluster(SEGMENT_BYTES)
    failed: list[int] = []

    def hurt(tiers: Sequence[TierStatus], number: int, last: int) -> None:
        if number == last // 2:
            assert any(one.counters.fetched_blocks for one in tiers), "nothing was fetched before the fault"
            failed.append(sum(one.counters.failed_fetch_blocks for one in tiers))
            FAULTS[fault](cluster)

    result = replay_with(cluster, hurt)
    assert result.tier is not None
    if fault == "objects are corrupted":
        assert result.tier.counters.failed_fetch_blocks > failed[0], "nothing that was changed was fetched"


def test_a_full_store_costs_hits_and_nothing_else(make_cluster: Callable[..., Cluster]) -> None:
    """It refuses what does not fit, because it evicts too late."""
    result = replay_with(make_cluster(16 << 20, watermark=0.95))
    assert result.tier is not None
    assert result.tier.counters.fetched_blocks > 0
    assert result.tier.counters.failed_put_blocks > 0
