"""What the tier costs and saves, in a network namespace of its own: replays of a fleet over a Mooncake of this machine.
argv: `gate`, with a modelled prefill and a link that is slowed down; or `trace` and the file of a trace.

Answers with a line of JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.service.replay.fleetreplay import PATIENT, hits_of_an_endless_tier, replay
from tests.service.tiers.mooncake.cluster import WATERMARK, Cluster

from kvstow.control.tiersettings import TierSettings
from kvstow_service.replay.generate import TraceShape, generate_trace
from kvstow_service.replay.result import ReplayResult
from kvstow_service.replay.trace import BLOCK_TOKENS, TraceRequest, read_trace
from kvstow_service.tiers.mooncake.mooncakestore import MooncakeStore
from kvstow_service.tiers.objectheader import HEADER_BYTES

_SLOT_BYTES = 512 << 10
_REQUESTS = 200
_SHAPE = TraceShape(sessions=60)
_BETWEEN_SECONDS = 0.03
"""Between requests, in each replay: one that comes after a pause takes 0.5 ms more, as caches and CPUs are cold. With
a tier, a pause is there anyway: the next request comes when all is put."""
_BURST = "512kb"
"""Of the link. What it saves up during a pause is quick."""

_TRACE_SLOT_BYTES = 64 << 10
_TRACE_BLOCKS = 32_000


def measure_gate() -> dict[str, Any]:
    """Mean times in milliseconds. The break-even is at a third of the store's rate."""
    requests = generate_trace(_SHAPE, limit=_REQUESTS)
    rate = _replay(requests, PATIENT, None)[1]
    prefill = rate / 3 / _SLOT_BYTES * BLOCK_TOKENS
    gated, open_ = TierSettings(write="through", prefill_rate=prefill), TierSettings(write="through")
    endless = hits_of_an_endless_tier(requests)
    found: dict[str, Any] = {"rate": rate, "prefill": prefill, "endless": endless, "rows": []}
    for name, settings, limit in [
        ("without a tier", None, None),
        ("with it", gated, None),
        ("with it, over a link of a tenth of the rate", gated, rate / 10),
        ("the same, and every fetch is waited for", open_, rate / 10),
    ]:
        result, _ = _replay(requests, settings, prefill, limit)
        counters = None if result.tier is None else result.tier.counters
        declined = 0 if counters is None else counters.declined_requests
        found["rows"].append([name, 1000 * result.mean_request_seconds, result.hit_blocks, declined])
    return found


def _replay(
    requests: list[TraceRequest], settings: TierSettings | None, prefill: float | None, limit: float | None = None
) -> tuple[ReplayResult, float]:
    """Also the rate of fetches, in bytes per second. Each replay has a store of its own. `limit`: of the link."""
    with TemporaryDirectory() as folder:
        cluster = Cluster(Path(folder) / "log", 4 << 30)
        try:
            if limit is not None:
                rate_bits = f"{int(8 * limit)}bit"
                _tc("add", "dev", "lo", "root", "tbf", "rate", rate_bits, "burst", _BURST, "latency", "50ms")
            result = replay(
                requests,
                None if settings is None else MooncakeStore(cluster.location),
                settings or PATIENT,
                nodes=2,
                slots=100,
                slot_bytes=_SLOT_BYTES,
                routing="random",
                prefill_rate=prefill,
                on_request=lambda fleet, number: time.sleep(_BETWEEN_SECONDS),
            )
        finally:
            if limit is not None:
                _tc("del", "dev", "lo", "root")
            cluster.close()
    rate = None if result.tier is None else result.tier.fetch_bytes_per_second
    return result, rate or 0.0


def _tc(*arguments: str) -> None:
    subprocess.run(["tc", "qdisc", *arguments], check=True)


def measure_trace(path: str) -> dict[str, Any]:
    """The whole trace on 4 nodes of 2,000 blocks, with room for 32,000 in the store."""
    requests = read_trace(path)
    with TemporaryDirectory() as folder:
        segment = int(_TRACE_BLOCKS * (_TRACE_SLOT_BYTES + HEADER_BYTES) / WATERMARK)
        cluster = Cluster(Path(folder) / "log", segment)
        try:
            store = MooncakeStore(cluster.location)
            settings = TierSettings(write="through", deadline=60.0, lookup_wait=60.0)
            result = replay(requests, store, settings, nodes=4, slots=2_000, slot_bytes=_TRACE_SLOT_BYTES)
        finally:
            cluster.close()
    assert result.tier is not None
    return {
        "hit": 100 * result.hit_blocks / result.blocks,
        "verified": result.verified_bytes,
        "mismatches": result.mismatches,
        "seconds": result.seconds,
        "dropped": result.tier.dropped_blocks + result.tier.counters.failed_put_blocks,
    }


if __name__ == "__main__":
    what, *others = sys.argv[1:]
    print(json.dumps(measure_gate() if what == "gate" else measure_trace(*others)), flush=True)
