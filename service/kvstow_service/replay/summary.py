"""The result of a replay for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from kvstow.bytesize import format_size
from kvstow_service.replay.launcher import AttachedResult, EngineResult
from kvstow_service.replay.result import ReplayResult

Row = tuple[str, str]


def summary_rows(result: ReplayResult) -> list[Row]:
    """What is worth a line, in order of reading."""
    reasons = ", ".join(f"{reason.removeprefix('dropped_')} {count:,}" for reason, count in result.drops.items())
    policy = f", {result.policy}" if result.policy is not None else ""
    rows = [
        ("requests", f"{result.requests:,} in {result.seconds:.1f} s"),
        ("pool", f"{result.slots:,} slots on {result.ranks} rank{'s' if result.ranks > 1 else ''}{policy}"),
        ("hit ratio", f"{result.block_hit_rate:.2%} ({result.hit_blocks:,} of {result.blocks:,} blocks)"),
        ("loaded", _moved(result.loaded_blocks, result.loaded_bytes, result.load_gbps)),
        ("stored", _moved(result.stored_blocks, result.stored_bytes, result.store_gbps)),
        *([] if result.evicted_blocks is None else [("evicted", f"{result.evicted_blocks:,} blocks")]),
        ("dropped stores", f"{result.dropped_stores:,} blocks" + (f" ({reasons})" if reasons else "")),
        ("failed", f"{result.failed_loads:,} loaded, {result.failed_stores:,} stored blocks"),
        ("verified", f"{format_size(result.verified_bytes)} of {format_size(result.loaded_bytes)} loaded"),
        ("mismatches", f"{result.mismatches:,} blocks"),
    ]
    if result.abandoned:
        rows.append(("abandoned", f"{result.abandoned:,} requests"))
    return rows + [("wrong bytes", place) for place in result.first_mismatches]


def attached_rows(result: AttachedResult) -> list[Row]:
    """The engines together, and a line for each where there are several or one was started again."""
    rows = summary_rows(result.total)
    rows.append(("tier", _tier_of_node(result.waits)))
    if len(result.engines) == 1 and len(result.engines[0].lives) == 1:
        return rows
    return rows + [(engine.name, _engine(engine)) for engine in result.engines]


def _tier_of_node(waits: int) -> str:
    """The service alone knows what was fetched: several engines wait for the same blocks."""
    if waits:
        return f"{waits:,} look-ups waited for the service; `kvstow get tier` shows what was fetched and put"
    return "no look-up waited for the service: it has no fleet tier, or fetches do not pay; see `kvstow get tier`"


def _engine(engine: EngineResult) -> str:
    text = f"hit ratio {engine.result.block_hit_rate:.2%} in {engine.result.requests:,} requests"
    for life in engine.lives[1:]:
        text += f"; started again: {life.first_hit_blocks:,} of the first {life.first_blocks:,} blocks found"
    return text


def print_rows(rows: Sequence[Row], console: Console, *, title: str) -> None:
    """A table on a terminal, aligned lines elsewhere."""
    if not console.is_terminal:
        for name, value in rows:
            console.print(f"{name:16}{value}", highlight=False, markup=False, soft_wrap=True)
        return
    table = Table(title=title, show_header=False, title_justify="left")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _moved(blocks: int, num_bytes: int, gbps: float) -> str:
    text = f"{blocks:,} blocks, {format_size(num_bytes)}"
    return f"{text}, {gbps:.2f} GB/s while copying" if gbps else text
