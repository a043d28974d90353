"""The overview of a server as terminal text, for `kvstow top` and `kvstow wait`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kvstow.stats import SLOT_STATES
from kvstow_api.overview import NOT_PINNED, Chart, NodeOverview, Overview, PoolOverview, RankLine, Row, select_ranks
from kvstow_service.cli.output import STATE_STYLES
from kvstow_service.cli.sparkline import sparkline

# The characters distinguish the states on terminals without colours.
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
_GAPS = 4  # between the three columns
_NARROWEST = 10  # a bar
_OTHER_LINES = 24  # all but those of ranks, with a blank line above each section
_SECTIONS = 5
_FEW_RANKS = 4


def board(
    shown: Overview | None, lost: str | None, *, width: int, height: int, server: str, footer: str = ""
) -> RenderableType:
    """The whole screen. `server`: its address and uptime. `lost`: why it does not answer; `shown` is then its last
    answer."""
    if shown is None:
        return Group(Text(f"kvstow: {server}", style="bold"), Text(), _lost(lost or "connecting"), Text(footer))
    room = height - _OTHER_LINES - len(shown.switches) - bool(lost) - bool(footer)
    if shown.node:
        room -= len(shown.node.pools) + len(shown.node.sessions)
    airy = room >= min(len(shown.ranks), _FEW_RANKS)
    most = max(_FEW_RANKS, room if airy else room + _SECTIONS)
    sections: dict[str, RenderableType] = {}
    if shown.node:
        sections["Memory"] = _node_bar(shown.node, width)
        sections["Pools"] = _rows(shown.node.pools) if shown.node.pools else Text("no engine has attached yet")
        if shown.node.sessions:
            sections["Engines"] = _rows(shown.node.sessions)
    else:
        sections["Memory"] = rank_bars(shown.ranks, width, most)
    if shown.pool:
        sections |= {
            "Pool": _pool(shown.pool, width),
            "Traffic": _traffic(shown.pool, width),
            "In flight": _pending(shown.pool),
            "Evictions": _evictions(shown.pool),
        }
    parts: list[RenderableType] = [_head(shown, server)]
    if lost:
        parts.append(_lost(lost))
    for title, body in sections.items():
        parts += [Text(f"\n{title}" if airy else title, style="bold cyan"), body]
    if footer:
        parts.append(Text(footer, style="dim"))
    return Group(*parts)


def _head(shown: Overview, server: str) -> RenderableType:
    state = (shown.state, f"bold {STATE_STYLES.get(shown.state, '')}".strip())
    why = Text.assemble(state, f"  {shown.reason}")
    switches = (Text(f"{words} (undo: `{undo}`)", style="yellow") for words, undo in shown.switches)
    name = Text(f"kvstow: {shown.about}, {server}", style="bold", no_wrap=True, overflow="ellipsis")
    return Group(name, why, *switches)


def _lost(reason: str) -> Text:
    return Text(f"no answer: {reason}; retrying", style="red")


def _grid() -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(width=_LABEL, no_wrap=True)
    grid.add_column(min_width=_NARROWEST, no_wrap=True)
    grid.add_column(no_wrap=True, overflow="ellipsis")
    return grid


def rank_bars(ranks: Sequence[RankLine], width: int, most: int) -> RenderableType:
    """A bar for each rank, or for `most` of them, as `select_ranks` chooses them. Where host, pid and device do not fit
    beside the bar, they are below it, unless that takes more than `most` lines."""
    lines: list[RenderableType] = []
    chosen = select_ranks(ranks, most)
    room = width - _LABEL - _GAPS - _widest(chosen, with_place=True)
    below = room < _NARROWEST and 2 * len(chosen) <= most
    if below:
        room = width - _LABEL - _GAPS - _widest(chosen, with_place=False)
    bar_width = max(_NARROWEST, min(room, _bar_width(width)))
    for rank in chosen:
        bar = ProgressBar(max(rank.target_bytes, 1), rank.pinned_bytes, bar_width, complete_style="green")
        line = _grid()
        line.add_row(f"rank {rank.rank}", bar, _rank_words(rank, with_place=not below))
        lines.append(line)
        if below and rank.place:
            lines.append(_indented(Text(rank.place, style="dim")))
        if rank.trouble:
            lines.append(_indented(Text(rank.trouble, style="red")))
    if len(ranks) > most:
        lines.append(Text(f"and {len(ranks) - most} more ranks", style="dim"))
    return Group(*lines)


def _rank_words(rank: RankLine, *, with_place: bool) -> Text:
    state = Text(rank.state, style=STATE_STYLES.get(rank.state, ""))
    place = f"  {rank.place}" if rank.place and with_place else ""
    return Text.assemble(state, f"  {rank.progress}", (place, "dim"))


def _widest(ranks: Sequence[RankLine], *, with_place: bool) -> int:
    return max((len(_rank_words(rank, with_place=with_place)) for rank in ranks), default=0)


def _indented(text: Text) -> RenderableType:
    return Padding(text, (0, 0, 0, _LABEL + 2))


def _node_bar(node: NodeOverview, width: int) -> RenderableType:
    grid = _grid()
    bar = ProgressBar(max(node.target_bytes, 1), node.populated_bytes, _bar_width(width), complete_style="green")
    grid.add_row("node", bar, node.progress)
    return grid


def _rows(rows: Sequence[Row]) -> RenderableType:
    grid = Table.grid(padding=(0, 2, 0, 0))
    for row in rows:
        grid.add_row(row.name, Text(row.value, style=STATE_STYLES.get(row.value, "")), row.note)
    return grid


def _pool(shown: PoolOverview, width: int) -> RenderableType:
    legend = Text()
    for state, count in shown.slots.items():
        mark, style = _SLOTS[state]
        if count or state in ("cached", "free"):
            legend.append(f"{mark} ".lstrip(), style).append(f"{state} {count:,}   ")
    grid = _grid()
    grid.add_row("slots", _stack(shown.slots, _bar_width(width)), shown.about)
    return Group(grid, _indented(legend))


def _stack(counts: Mapping[str, int], width: int) -> Text:
    """The share of each state, at least one character wide if it has a slot."""
    total, bar = sum(counts.values()), Text()
    shares = {state: max(1, round(counts[state] * width / total)) for state in counts if counts[state]}
    if shares:  # a pool may have no slot yet
        largest = max(shares, key=lambda state: shares[state])
        shares[largest] += width - sum(shares.values())
    for state, share in shares.items():
        mark, style = _SLOTS[state]
        bar.append(mark * share, style)
    return bar


def _traffic(shown: PoolOverview, width: int) -> RenderableType:
    grid = _grid()
    for chart, styles in ((shown.hits, ("green",)), (shown.bandwidth, ("blue", "yellow"))):
        _add_curves(grid, chart, styles, _bar_width(width))
    return grid


def _add_curves(grid: Table, chart: Chart, styles: Sequence[str], room: int) -> None:
    for curve, style in zip(chart.curves, styles, strict=True):
        line = Text(sparkline(curve.points, room, chart.top).rjust(room), style=style)
        grid.add_row(curve.name, line, curve.now + (f"  ({chart.since_start})" if chart.since_start else ""))


def _pending(shown: PoolOverview) -> RenderableType:
    words = Text("   ").join(
        Text(f"{row.name} {row.value}" + (f" ({row.note})" if row.note else "")) for row in shown.pending
    )
    words.highlight_words(["stuck"], "bold red")
    grid = _grid()
    for one in shown.oldest:
        grid.add_row(one.name, Text(one.value, style=STATE_STYLES.get(one.value, "")), one.note)
    return Group(words, grid) if shown.oldest else words


def _evictions(shown: PoolOverview) -> RenderableType:
    counts = "   ".join(f"{row.name} {row.value}" for row in shown.evictions)
    return Text(f"{counts or 'none'}   ({shown.block_rates})")


def _bar_width(width: int) -> int:
    return max(_NARROWEST, min(50, width - _LABEL - _WORDS))
