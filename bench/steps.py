"""What the connector adds to a step of vLLM's scheduler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from bench.control import VLLM_PYTHON, run_probe, vllm_is_there
from bench.machine import wait_until_quiet
from bench.report import Table, verdict

_PATIENCE_SECONDS = 8.0
_ROWS = (
    ("idle", "256 requests decode, none completes a block", 100e-6),
    ("store", "plan to store 1,000 blocks, evicting", 1e-3),
    ("settle", "hear that they are stored", None),
    ("end", "a request of 1,000 blocks ends", None),
    ("hit", "find, hold and plan to load 1,000 blocks", None),
    ("again", "be asked again for a request that waits", None),
    ("burst", "plan, while a request has 131,072 complete blocks", None),
    ("burst_end", "that request ends, most of its blocks not stored", None),
    ("rest", "plan to store what it left behind, the longest", None),
)


def run(sizes: Sequence[int], repeats: int, say: Callable[[str], None]) -> list[Table]:
    """Return medians over `repeats` processes, for the largest size. Without vLLM, there are none."""
    if not vllm_is_there():
        say("no .venv-vllm: `make venv-vllm` makes it; the steps are not measured")
        return []
    slots = max(sizes)
    runs = []
    for turn in range(repeats):
        busy = wait_until_quiet(_PATIENCE_SECONDS)
        runs.append(run_probe(VLLM_PYTHON, "bench.step_probe", str(slots)))
        say(f"steps, {slots} slots, run {turn + 1} of {repeats}, CPUs {busy:.0%} busy")
    rows = []
    for name, title, bar in _ROWS:
        middle, high = (median(figures[figure] for figures in runs) for figure in (name, f"{name}_p99"))
        limit = f"at most {bar * 1e6:,.0f} us, {verdict(middle <= bar)}" if bar else ""
        rows.append([title, f"{middle * 1e6:,.1f} us", f"{high * 1e6:,.1f} us", limit])
    return [Table(f"Scheduler side, {slots:,} slots, vLLM's own BlockPool", ["a step", "median", "p99", "bar"], rows)]
