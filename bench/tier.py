"""KVStow's client of a Mooncake store on this machine."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from importlib.util import find_spec
from statistics import median
from typing import Any

from bench.machine import wait_until_quiet
from bench.program import answer_of, running
from bench.report import Table, verdict

SLOT_BYTES = (64 << 10, 256 << 10, 1 << 20, 2 << 20)
_MOVED_BYTES = 256 << 20
_BAR = 0.8
_PATIENCE_SECONDS = 8.0

# Mooncake listens on all addresses, so it gets a network of its own. Its processes end with the benchmark.
_ALONE = ("unshare", "--user", "--map-root-user", "--net", "--pid", "--fork", "--mount-proc", "--kill-child")
_WITH_LOOPBACK = ("sh", "-c", 'ip link set lo up && exec "$@"', "sh")


def run(repeats: int, say: Callable[[str], None]) -> list[Table]:
    missing = [name for name in ("mooncake", "xxhash") if find_spec(name) is None]
    if missing or shutil.which("unshare") is None:
        say(f"tier, no rates: {', '.join(missing or ['unshare'])} is missing (make test-tier installs what it needs)")
        return []
    rows = [row for slot_bytes in SLOT_BYTES for row in _rates(slot_bytes, repeats, say)]
    return [Table("Mooncake over TCP on one machine", _RATES_HEAD, rows)]


_RATES_HEAD = ["batches of 64 slots", "KVStow", "bare loop", "one to the other, same round", "bar"]


def _rates(slot_bytes: int, repeats: int, say: Callable[[str], None]) -> list[list[str]]:
    """Measure KVStow's client, and a bare loop over the library."""
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


def _ask(module: str, *arguments: str) -> Any:
    with running(module, *arguments, through=(*_ALONE, *_WITH_LOOPBACK)) as program:
        return answer_of(program)
