"""What the fleet tier costs and saves: over a modelled link, and KVStow's client of a Mooncake of this machine."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from bench.fleet import replay
from bench.machine import wait_until_quiet
from bench.program import answer_of, running
from bench.report import Table, verdict
from kvstow.control.fleettier import TierSettings
from kvstow.testing.memorystore import MemoryStore
from kvstow.tier.store import PutStatus
from kvstow_service.replay.trace import BLOCK_TOKENS, TraceShape, generate_trace, read_trace

SLOT_BYTES = (64 << 10, 256 << 10, 1 << 20, 2 << 20)
_MOVED_BYTES = 256 << 20
_BAR = 0.8
_SIMULATED = 33.20
_PATIENCE_SECONDS = 8.0

_REQUESTS = 200
_GATE_SLOT_BYTES = 64 << 10
_LINK = 25e6
_BETWEEN_SECONDS = 0.03
"""Between requests, in each replay: one that comes after a pause takes 0.5 ms more, as caches and CPUs are cold. With
a tier, a pause is there anyway: the next request comes when all is put."""
_TRACE_SLOT_BYTES = 4 << 10
_TRACE_BLOCKS = 32_000

# Mooncake listens on all addresses, and its processes end with the benchmark.
_ALONE = ("unshare", "--user", "--map-root-user", "--net", "--pid", "--fork", "--mount-proc", "--kill-child")
_WITH_LOOPBACK = ("sh", "-c", 'ip link set lo up && exec "$@"', "sh")


def run(repeats: int, trace: Path, say: Callable[[str], None]) -> list[Table]:
    tables = [_gate(say)]
    if trace.exists():
        tables.append(_trace(trace, say))
    missing = [name for name in ("mooncake", "xxhash") if find_spec(name) is None]
    if missing or shutil.which("unshare") is None:
        say(f"tier, no rates: {', '.join(missing or ['unshare'])} is missing (make test-tier installs what it needs)")
        return tables
    rows = [row for slot_bytes in SLOT_BYTES for row in _rates(slot_bytes, repeats, say)]
    return [Table("Mooncake over TCP on one machine", _RATES_HEAD, rows), *tables]


_RATES_HEAD = ["batches of 64 slots", "KVStow", "bare loop", "one to the other, same round", "bar"]


def _rates(slot_bytes: int, repeats: int, say: Callable[[str], None]) -> list[list[str]]:
    """KVStow's client against a bare loop over the library."""
    say(f"tier, slots of {slot_bytes >> 10} KiB, CPUs {wait_until_quiet(_PATIENCE_SECONDS):.0%} busy")
    found = _ask("bench.tierprogram", str(slot_bytes), str(_MOVED_BYTES), str(3 * repeats))
    rows = []
    for call in ("put", "get"):
        ours, bare = found["ours"][call], found["bare"][call]
        ratio = median(mine / other for mine, other in zip(ours, bare, strict=True))
        rates = [f"{median(rates) / 1e9:.2f} GB/s" for rates in (ours, bare)]
        rows.append(
            [f"{call}, {slot_bytes >> 10} KiB", *rates, f"{ratio:.2f}", f"{_BAR:.1f}, {verdict(ratio >= _BAR)}"]
        )
    return rows


class _LinkedStore(MemoryStore):
    """A store behind a link of so many bytes a second, for each direction of each rank."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self._rate = rate

    def put(self, name: str, data: bytes) -> PutStatus:
        time.sleep(len(data) / self._rate)
        return super().put(name, data)

    def get(self, name: str) -> bytes | None:
        data = super().get(name)
        time.sleep(0 if data is None else len(data) / self._rate)
        return data


def _gate(say: Callable[[str], None]) -> Table:
    """The break-even is at a third of the rate of the link."""
    requests = generate_trace(TraceShape(sessions=60), limit=_REQUESTS)
    prefill = _LINK / 3 / _GATE_SLOT_BYTES * BLOCK_TOKENS
    gated = TierSettings(prefill_rate=prefill)
    rows, alone = list[list[str]](), 0.0
    for name, settings, rate, most in [
        ("without a tier", None, _LINK, None),
        ("with it", gated, _LINK, 1.0),
        ("with it, over a link of a tenth of the rate", gated, _LINK / 10, 1.05),
        ("the same, and every fetch is waited for", TierSettings(), _LINK / 10, None),
    ]:
        say(f"tier, gate, {name}, CPUs {wait_until_quiet(_PATIENCE_SECONDS):.0%} busy")
        found, tier = replay(
            requests,
            None if settings is None else _LinkedStore(rate),
            settings or TierSettings(),
            nodes=2,
            slots=100,
            slot_bytes=_GATE_SLOT_BYTES,
            routing="random",
            prefill_rate=prefill,
            on_request=lambda nodes, number: time.sleep(_BETWEEN_SECONDS),
        )
        mean = found.mean_request_seconds
        alone = alone or mean
        declined = 0 if tier is None else tier.counters.declined_requests
        bar = "" if most is None else f"{most:g} of the first, {verdict(mean <= most * alone)}"
        ratio = f"{mean / alone:.2f}"
        rows.append([name, f"{1000 * mean:.1f} ms", ratio, f"{found.block_hit_rate:.1%}", str(declined), bar])
    title = f"Replays of {_REQUESTS} requests over a modelled link, prefill at a third of its rate"
    return Table(title, ["replay", "mean request", "to the first", "blocks that hit", "fetches declined", "bar"], rows)


def _trace(path: Path, say: Callable[[str], None]) -> Table:
    """The whole trace on 4 nodes of 2,000 blocks, with room for 32,000 in the store."""
    say("tier, the whole trace")
    store = MemoryStore(_TRACE_BLOCKS * _TRACE_SLOT_BYTES)
    found, _ = replay(read_trace(str(path)), store, nodes=4, slots=2_000, slot_bytes=_TRACE_SLOT_BYTES)
    row = [f"{found.block_hit_rate:.2%}", f"{_SIMULATED:.2f} %", str(found.mismatches), f"{found.seconds:.0f} s"]
    head = ["blocks that hit", "simulation of LRU caches", "wrong bytes", "time"]
    return Table("The whole conversation trace, 4 nodes of 2,000 blocks, 32,000 blocks in the store", head, [row])


def _ask(module: str, *arguments: str) -> Any:
    with running(module, *arguments, through=(*_ALONE, *_WITH_LOOPBACK)) as program:
        return answer_of(program)
