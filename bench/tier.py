"""What the fleet tier costs and saves, over a Mooncake of this machine."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from bench.machine import wait_until_quiet
from bench.program import answer_of, running
from bench.report import Table, verdict

SLOT_BYTES = (64 << 10, 256 << 10, 1 << 20, 2 << 20)
_MOVED_BYTES = 256 << 20
_BAR = 0.8
_STEPS_SECONDS = 8.0
_MORE_MS = 0.1
_SIMULATED = 33.20
_PATIENCE_SECONDS = 8.0

# Mooncake listens on all addresses, and its processes end with the benchmark.
_ALONE = ("unshare", "--user", "--map-root-user", "--net", "--pid", "--fork", "--mount-proc", "--kill-child")
_WITH_LOOPBACK = ("sh", "-c", 'ip link set lo up && exec "$@"', "sh")


def run(repeats: int, trace: Path, say: Callable[[str], None]) -> list[Table]:
    missing = [name for name in ("mooncake", "xxhash") if find_spec(name) is None]
    if missing or shutil.which("unshare") is None:
        say(f"tier, not run: {', '.join(missing or ['unshare'])} is missing (make test-tier installs what it needs)")
        return []
    rates = [_rates(slot_bytes, repeats, say) for slot_bytes in SLOT_BYTES]
    tables = [
        Table("Mooncake over TCP on one machine", _RATES_HEAD, [row for rows in rates for row in rows]),
        _steps(say),
        _gate(say),
    ]
    return [*tables, _trace(trace, say)] if trace.exists() else tables


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


def _steps(say: Callable[[str], None]) -> Table:
    say(f"tier, steps, CPUs {wait_until_quiet(_PATIENCE_SECONDS):.0%} busy")
    found = _ask("bench.tiersteps", str(_STEPS_SECONDS))
    before = _share(found["without a tier"], 0.99)
    rows = []
    for name, steps in found.items():
        more = _share(steps, 0.99) - before
        bar = f"0.1 ms more, {verdict(more <= _MORE_MS)}" if name == "with look-ups" else ""
        shares = [f"{_share(steps, share):.2f}" for share in (0.5, 0.9, 0.99)]
        rows.append([name, str(len(steps)), *shares, f"{max(steps):.1f}", bar])
    return Table(
        "Steps with a new request of 100 blocks",
        ["steps", "number", "p50, ms", "p90", "p99", "longest", "bar at p99"],
        rows,
    )


def _gate(say: Callable[[str], None]) -> Table:
    say(f"tier, gate, CPUs {wait_until_quiet(_PATIENCE_SECONDS):.0%} busy")
    found = _ask("bench.tiergate", "gate")
    alone = found["rows"][0][1]
    rows = []
    for (name, mean, hits, declined), most in zip(found["rows"], (None, 1.0, 1.05, None), strict=True):
        bar = "" if most is None else f"{most:g} of the first, {verdict(mean <= most * alone)}"
        rows.append(
            [name, f"{mean:.1f} ms", f"{mean / alone:.2f}", f"{hits / found['endless']:.2f}", str(declined), bar]
        )
    title = f"Replays of 200 requests, prefill at a third of the store's rate ({found['rate'] / 1e9:.2f} GB/s)"
    head = ["replay", "mean request", "to the first", "hits, to those possible", "fetches declined", "bar"]
    return Table(title, head, rows)


def _trace(path: Path, say: Callable[[str], None]) -> Table:
    say("tier, the whole trace")
    found = _ask("bench.tiergate", "trace", str(path))
    row = [
        f"{found['hit']:.2f} %",
        f"{_SIMULATED:.2f} %",
        str(found["mismatches"]),
        f"{found['dropped']}",
        f"{found['seconds']:.0f} s",
    ]
    head = ["blocks that hit", "simulation of LRU caches", "wrong bytes", "blocks not put", "time"]
    return Table("The whole conversation trace, 4 nodes of 2,000 blocks, 32,000 blocks in the store", head, [row])


def _share(values: Sequence[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))]


def _ask(module: str, *arguments: str) -> Any:
    with running(module, *arguments, through=(*_ALONE, *_WITH_LOOPBACK)) as program:
        return answer_of(program)
