"""The control plane compared with vLLM's BlockPool. Both get the same workload. Each measurement has its own process,
and the subjects alternate."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench.machine import wait_until_quiet
from bench.report import Table, verdict

VLLM_PYTHON = Path(__file__).parents[1] / ".venv-vllm" / "bin" / "python"
SIZES = (10_000, 100_000, 1_000_000)
TRACE_SIZES = (1_000, 10_000, 30_000, 100_000)

_OURS = ("kvstow-auto-1", "kvstow-lru-1", "kvstow-auto-8")
_NAMES = {
    "kvstow-auto-1": "KVStow",
    "kvstow-lru-1": "KVStow, policy lru",
    "kvstow-auto-8": "KVStow, 8 ranks",
    "vllm": "vLLM BlockPool",
}
_PATIENCE_SECONDS = 8.0
_KEY_BYTES = 80  # both make bytes objects of 67 to 69 bytes, and the allocator rounds these up

Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Operation:
    """A row of the tables. `bar` is how many times faster than BlockPool the largest pool must be."""

    figure: str
    title: str
    bar: float | None = None


_OPERATIONS = (
    Operation("lookup_fresh", "look up 1,000 blocks", 4.0),
    Operation("lookup_worn", "look up 1,000 blocks, worn pool", 4.0),
    Operation("lookup_warm_worn", "the same chain again"),
    Operation("use_fresh", "look up, lease, release 1,000", 3.0),
    Operation("use_worn", "look up, lease, release 1,000, worn pool", 3.0),
    Operation("use_warm_worn", "the same chain again"),
    Operation("keys_fresh", "make the keys of 1,000 blocks"),
    Operation("store", "begin + complete a store of 128, free slots"),
    Operation("store_evicting", "begin + complete a store of 128, evicting", 1.0),
)
_OWN_FIGURES = (
    ("store_present_fresh", "begin a store of 8,192 present blocks"),
    ("store_present_worn", "the same, worn pool"),
    ("use_long_fresh", "a request ends that has used 8,192 blocks"),
    ("use_long_worn", "the same, worn pool"),
    (
        "curve",
        "the curve of sizes for a request of 1,000 blocks, on the thread that ticks the pool, mean",
    ),
    ("curve_new", "the same, blocks that are new"),
    ("store_shrinking", "begin a store of 16 when the pool has begun to shrink to 2 %"),
    ("purge_slice_median", "slice of a purge of all, median"),
    ("purge_slice_max", "longest"),
)
_BYTES_BAR = 250


def vllm_is_there() -> bool:
    return VLLM_PYTHON.exists()


def run(sizes: Sequence[int], repeats: int, say: Callable[[str], None]) -> list[Table]:
    """Make one table for each size. Figures are medians over `repeats` processes of the medians in each."""
    tables = []
    for slots in sizes:
        found: dict[str, list[Figures]] = {name: [] for name in _subjects()}
        for turn in range(repeats):
            for name, figures in found.items():
                busy = wait_until_quiet(_PATIENCE_SECONDS)
                figures.append(probe(name, slots))
                say(f"control plane, {slots} slots, {_NAMES[name]}, run {turn + 1} of {repeats}, CPUs {busy:.0%} busy")
        tables.append(_table(slots, {name: _medians(figures) for name, figures in found.items()}))
    return tables


def run_trace(trace: Path, sizes: Sequence[int], say: Callable[[str], None]) -> list[Table]:
    """Replay the whole trace through both subjects, one request at a time."""
    rows = []
    subjects = [name for name in _subjects() if name != "kvstow-auto-8"]
    for slots in sizes:
        wait_until_quiet(_PATIENCE_SECONDS)
        found = {name: probe(name, slots, str(trace)) for name in subjects}
        say(f"trace, {slots} slots")
        rates = [f"{100 * found[name]['hits'] / found[name]['blocks']:.2f} %" for name in subjects]
        times = [f"{found[name]['seconds']:.2f} s" for name in subjects]
        rows.append([f"{slots:,}", *rates, *times])
    names = [_NAMES[name] for name in subjects]
    return [Table(f"{trace.name}, block hit rate and time of the whole trace", ["slots", *names, *names], rows)]


def probe(name: str, slots: int, *arguments: str) -> Figures:
    """Run `bench.probe` in the environment of the subject."""
    python = VLLM_PYTHON if name == "vllm" else Path(sys.executable)
    return run_probe(python, "bench.probe", name, str(slots), *arguments)


def run_probe(python: Path, module: str, *arguments: str) -> Figures:
    """Return the figures that a module prints as JSON in its last line. Raises `RuntimeError` with the module's error
    if it fails."""
    ended = subprocess.run(
        [str(python), "-m", module, *arguments],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_CONFIGURE_LOGGING": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode:
        raise RuntimeError(f"{module} {' '.join(arguments)} failed:\n{ended.stderr[-2000:]}")
    figures: Figures = json.loads(ended.stdout.splitlines()[-1])
    return figures


def _subjects() -> tuple[str, ...]:
    return (*_OURS, "vllm") if vllm_is_there() else _OURS


def _medians(runs: Sequence[Figures]) -> Figures:
    return {figure: median(run[figure] for run in runs) for figure in runs[0]}


def _table(slots: int, found: dict[str, Figures]) -> Table:
    largest = slots == max(SIZES)
    head = ["", *(_NAMES[name] for name in found), "to BlockPool", "bar"]
    rows = [_operation_row(operation, found, with_bar=largest) for operation in _OPERATIONS]
    return Table(f"{slots:,} slots", head, [*rows, *_memory_rows(found, with_bar=largest), *_own_rows(found)])


def _operation_row(operation: Operation, found: dict[str, Figures], *, with_bar: bool) -> list[str]:
    cells = [_us(figures.get(operation.figure)) for figures in found.values()]
    if "vllm" not in found or operation.figure == "keys_fresh":
        return [operation.title, *cells, "", ""]
    ratio = found["vllm"][operation.figure] / found["kvstow-auto-1"][operation.figure]
    bar = f"{operation.bar:g} x, {verdict(ratio >= operation.bar)}" if operation.bar and with_bar else ""
    return [operation.title, *cells, f"{ratio:.1f} x faster", bar]


def _memory_rows(found: dict[str, Figures], *, with_bar: bool) -> Iterator[list[str]]:
    for figure, title in (
        ("bytes_per_slot", "bytes a cached slot, with its key"),
        ("bytes_per_slot_worn", "the same, worn pool, with what is remembered of evicted blocks"),
    ):
        sizes = [figures[figure] for figures in found.values()]
        ratio = f"{sizes[0] / sizes[-1]:.2f} of it" if "vllm" in found else ""
        bar = f"at most {_BYTES_BAR}, {verdict(sizes[0] <= _BYTES_BAR)}" if with_bar else ""
        yield [title, *(f"{size:.0f}" for size in sizes), ratio, bar]
    sizes = [figures["bytes_per_slot"] for figures in found.values()]
    yield ["bytes a cached slot, without", *(f"{size - _KEY_BYTES:.0f}" for size in sizes), "", ""]


def _own_rows(found: dict[str, Figures]) -> Iterator[list[str]]:
    for figure, title in _OWN_FIGURES:
        yield [title, *(_us(figures.get(figure)) for figures in found.values()), "", ""]


def _us(seconds: float | None) -> str:
    return "none" if seconds is None else f"{seconds * 1e6:,.0f} us"
