"""How `kvstow top` looks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kvstow.bytesize import format_size
from kvstow.stats import SLOT_STATES
from kvstow.status import Readiness
from kvstow_api.history import METRICS, lines_of
from kvstow_api.numberformat import counted, duration, percent, rate
from kvstow_api.words import (
    NOT_PINNED,
    block_movement,
    hit_ratio_now,
    most_telling,
    pin_progress,
    rank_trouble,
    transfer_wait,
)
from kvstow_service.cli.output import STATE_STYLES
from kvstow_service.cli.snapshot import Snapshot
from kvstow_service.cli.sparkline import sparkline

# Where there are no colours, the characters tell the states apart.
_SLOTS: dict[str, tuple[str, str]] = {
    "protected": ("█", "magenta"),
    "leased": ("▓", "blue"),
    "cached": ("▒", "green"),
    "filling": ("▚", "yellow"),
    "quarantined": ("▞", "red"),
    "free": ("·", "bright_black"),
    NOT_PINNED: (" ", ""),
}
assert set(_SLOTS) == {*SLOT_STATES, NOT_PINNED}

_LABEL, _WORDS = 12, 58
_NARROWEST = 10  # a bar
_MINUTES_OF_SAMPLES = 60  # 5 min, one each 5 s
_OTHER_LINES = 24  # than those of ranks, with a blank one above each section
_SECTIONS = 5
_FEW_RANKS = 4


def board(snapshot: Snapshot | None, lost: str | None, *, width: int, height: int, server: str) -> RenderableType:
    """The whole picture. `lost`: why the server does not answer now; what is shown is what it said last."""
    if snapshot is None:
        return Group(Text(f"kvstow top  {server}", style="bold"), Text(), _lost(lost or "asking ..."))
    room = height - _OTHER_LINES - len(snapshot.switches) - bool(lost)
    airy = room >= min(len(snapshot.readiness.ranks), _FEW_RANKS)
    most = max(_FEW_RANKS, room if airy else room + _SECTIONS)
    sections = {
        "Memory": rank_bars(snapshot.readiness, width, most),
        "Pool": _pool(snapshot, width),
        "Traffic": _traffic(snapshot, width),
        "In flight": _pending(snapshot),
        "Evictions": _evictions(snapshot),
    }
    parts: list[RenderableType] = [_head(snapshot, server)]
    if lost:
        parts.append(_lost(lost))
    for title, body in sections.items():
        parts += [Text(f"\n{title}" if airy else title, style="bold cyan"), body]
    return Group(*parts)


def _head(snapshot: Snapshot, server: str) -> RenderableType:
    info, readiness = snapshot.info, snapshot.readiness
    about = (f"kvstow {info.version}", info.settings.get("model"), info.mode, server)
    name = ", ".join((*filter(None, about), f"up {duration(info.uptime_seconds)}"))
    state = (readiness.state, f"bold {STATE_STYLES.get(readiness.state, '')}".strip())
    why = Text.assemble(state, f"  {readiness.reason}")
    switches = (Text(f"{words} (`{undo}` ends it)", style="yellow") for words, undo in snapshot.switches)
    return Group(Text(name, style="bold", no_wrap=True, overflow="ellipsis"), why, *switches)


def _lost(reason: str) -> Text:
    return Text(f"no answer: {reason}; trying again", style="red")


def _grid() -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(width=_LABEL, no_wrap=True)
    grid.add_column(min_width=_NARROWEST, no_wrap=True)
    grid.add_column(no_wrap=True, overflow="ellipsis")
    return grid


def rank_bars(readiness: Readiness, width: int, most: int) -> RenderableType:
    """A bar for each rank; where there are too many, for those that tell most."""
    lines: list[RenderableType] = []
    for rank in most_telling(readiness.ranks, most):
        bar = ProgressBar(max(rank.target_bytes, 1), rank.pinned_bytes, _bar_width(width), complete_style="green")
        state = Text(rank.state, style=STATE_STYLES.get(rank.state, ""))
        line = _grid()
        line.add_row(f"rank {rank.rank}", bar, Text.assemble(state, f"  {pin_progress(rank)}"))
        lines.append(line)
        if trouble := rank_trouble(rank):
            lines.append(Padding(Text(trouble, style="red"), (0, 0, 0, _LABEL + 2)))
    if len(readiness.ranks) > most:
        lines.append(Text(f"and {len(readiness.ranks) - most} more ranks", style="dim"))
    return Group(*lines)


def _pool(snapshot: Snapshot, width: int) -> RenderableType:
    pool = snapshot.stats.pool
    assert pool is not None
    counts: dict[str, int] = {state: getattr(pool.slots, state) for state in SLOT_STATES}
    counts[NOT_PINNED] = max(0, pool.capacity_slots - pool.usable_slots)
    legend = Text()
    for state, (mark, style) in _SLOTS.items():
        if counts[state] or state in ("cached", "free"):
            legend.append(f"{mark} ".lstrip(), style).append(f"{state} {counts[state]:,}   ")
    size = format_size(pool.capacity_slots * pool.slot_bytes)
    words = f"{pool.usable_slots:,} of {pool.capacity_slots:,} slots, {size} each rank, {pool.policy}"
    grid = _grid()
    grid.add_row("slots", _stack(counts, _bar_width(width)), words)
    return Group(grid, Padding(legend, (0, 0, 0, _LABEL + 2)))


def _stack(counts: Mapping[str, int], width: int) -> Text:
    """Each state's share of the bar; whoever has a slot has a character."""
    total, bar = sum(counts.values()), Text()
    shares = {state: max(1, round(counts[state] * width / total)) for state in _SLOTS if counts[state]}
    largest = max(shares, key=lambda state: shares[state])
    shares[largest] += width - sum(shares.values())
    for state, share in shares.items():
        mark, style = _SLOTS[state]
        bar.append(mark * share, style)
    return bar


def _traffic(snapshot: Snapshot, width: int) -> RenderableType:
    now = snapshot.now
    samples = snapshot.history[-_MINUTES_OF_SAMPLES:]
    grid = _grid()
    (hits,) = lines_of(METRICS["hit-ratio"], samples)
    loads, stores = lines_of(METRICS["bandwidth"], samples)
    lookups = snapshot.stats.lookups
    ratios = f"{hit_ratio_now(now)}  ({percent(lookups.hit_ratio if lookups else None)} since the start)"
    grid.add_row("hit ratio", _line(hits.points, width, 1.0, "green"), ratios)
    top = max((point for line in (loads, stores) for point in line.points if point is not None), default=0.0)
    grid.add_row("loads", _line(loads.points, width, top, "blue"), rate(now.load_bytes_per_second))
    grid.add_row("stores", _line(stores.points, width, top, "yellow"), rate(now.store_bytes_per_second))
    return grid


def _line(points: Sequence[float | None], width: int, top: float, style: str) -> Text:
    room = _bar_width(width)
    return Text(sparkline(points, room, top).rjust(room), style=style)


def _pending(snapshot: Snapshot) -> RenderableType:
    transfers = snapshot.stats.transfers
    assert transfers is not None
    pending = transfers.pending
    words = Text(f"{counted(pending.loads, 'load')} ({format_size(pending.load_bytes)}), ")
    words.append(f"{counted(pending.stores, 'store')} ({format_size(pending.store_bytes)})")
    if pending.loads or pending.stores:
        words.append(f", the oldest for {duration(pending.oldest_seconds)}")
    if pending.stuck:
        words.append(f", {pending.stuck} stuck", "bold red")
    grid = _grid()
    for one in snapshot.oldest:
        state = Text(one.state, style=STATE_STYLES.get(one.state, ""))
        request = f", request {one.request_id}" if one.request_id else ""
        grid.add_row(one.direction, state, transfer_wait(one) + request)
    return Group(words, grid) if snapshot.oldest else words


def _evictions(snapshot: Snapshot) -> RenderableType:
    counts = {reason: count for reason, count in (snapshot.stats.evictions or {}).items() if count}
    words = "   ".join(f"{reason.replace('_', ' ')} {count:,}" for reason, count in counts.items())
    return Text(f"{words or 'none'}   ({block_movement(snapshot.now)})")


def _bar_width(width: int) -> int:
    return max(_NARROWEST, min(50, width - _LABEL - _WORDS))
