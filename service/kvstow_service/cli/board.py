"""The overview of a server as terminal text, for `kvstow top` and `kvstow wait`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, cycle

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kvstow.stats import SLOT_STATES
from kvstow_api.answers import ConditionView
from kvstow_api.columns import Table as RowTable
from kvstow_api.texts import percent
from kvstow_service.cli.output import STATE_STYLES
from kvstow_service.cli.shown import NOT_PINNED, Chart, MemoryBar, Overview, PoolOverview, RankRow, Sizes, select_ranks

# The characters distinguish the states on terminals without colours.
_SLOTS: dict[str, tuple[str, str]] = {
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
_FEW = 4  # lines of rows of one kind, on a small screen
_FIXED_LINES, _POOL_LINES = 6, 4  # without rows, ranks and transfers; of what is below the rows, without curves
_HEAD_LINES = 2  # of the fixed ones
_GROUPS = 7
_GAP = 2  # between the columns of a table
_SURE_COLUMNS = 6  # a long name is cut to leave room for them
_SHORTEST_NAME = 16
_LEVELS = "▁▂▃▄▅▆▇█"


def board(
    shown: Overview | None, lost: str | None, *, width: int, height: int, server: str, footer: str = ""
) -> RenderableType:
    """The whole screen. `server`: its address and uptime. `lost`: why it does not answer; `shown` is then its last
    answer."""
    if shown is None:
        return Group(Text(f"kvstow: {server}", style="bold"), Text(), _lost(lost or "connecting"), Text(footer))
    head, conditions = _head(shown, server, width), _conditions(shown.conditions, width, max(_FEW, height // 4))
    room = (
        height
        - _FIXED_LINES
        + _HEAD_LINES
        - len(head)
        - sum(-(-one.cell_len // width) for one in conditions)
        - bool(lost)
        - bool(footer)
    )
    room -= len(shown.oldest) + bool(shown.tiers.rows)
    if shown.pool:
        room -= _POOL_LINES + sum(len(chart.curves) for chart in shown.pool.charts)
    wanted = [len(shown.pools.rows), len(shown.sessions.rows), len(shown.tiers.rows), len(shown.ranks)]
    pools, sessions, tiers, ranks = _shares(room, wanted)
    airy = room - sum(wanted) >= _GROUPS
    groups = [
        Group(*head, *conditions, *([] if lost is None else [_lost(lost)])),
        _memory(shown.memory, width),
        _pools(shown, width, pools),
        _sessions(shown, width, sessions),
    ]
    if shown.tiers.rows:
        groups.append(row_table(shown.tiers, width, tiers, noun="tiers"))
    if shown.ranks:
        groups.append(rank_bars(shown.ranks, width, ranks))
    if shown.pool:
        groups += [_slots(shown.pool, width), _traffic(shown.pool, width)]
    groups.append(_pending(shown))
    parts: list[RenderableType] = []
    for group in groups:
        parts += [Text(), group] if airy and parts else [group]
    if footer:
        parts.append(Text(footer, style="dim"))
    return Group(*parts)


def _shares(room: int, wanted: Sequence[int]) -> list[int]:
    """Lines for each kind of rows: `_FEW` at least, and what is left goes to the first ones first."""
    shares = [min(_FEW, want) for want in wanted]
    for number, want in enumerate(wanted):
        shares[number] += max(0, min(want - shares[number], room - sum(shares)))
    return shares


def _head(shown: Overview, server: str, width: int) -> list[Text]:
    """With a line for the attach socket where it does not fit beside the rest."""
    state = (shown.state, f"bold {STATE_STYLES.get(shown.state, '')}".strip())
    name = f"kvstow {shown.host_name}: {shown.about}, {server}"
    lines = [f"{name}, engines attach at {shown.attach}" if shown.attach else name]
    if len(lines[0]) > width and shown.attach:
        lines = [name, f"engines attach at {shown.attach}"]
    names = [Text(line, style="bold", no_wrap=True, overflow="ellipsis") for line in lines]
    return [*names, Text.assemble(state, f"  {shown.reason}")]


def _conditions(found: Sequence[ConditionView], width: int, most: int) -> list[Text]:
    """The worst conditions, as many as take at most `most` lines, each with what mends it."""
    lines: list[Text] = []
    for number, one in enumerate(found):
        line = Text.assemble(
            (one.severity, STATE_STYLES.get(one.severity, "cyan")), f"  {one.what}  ", (one.fix, "dim")
        )
        most -= -(-line.cell_len // width)
        if most < 0 and lines:
            return [*lines, Text(f"and {len(found) - number} more: `kvstow doctor`", style="dim")]
        lines.append(line)
    return lines


def _lost(reason: str) -> Text:
    return Text(f"no answer: {reason}; retrying", style="red")


def _grid() -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(width=_LABEL, no_wrap=True)
    grid.add_column(min_width=_NARROWEST, no_wrap=True)
    grid.add_column(no_wrap=True, overflow="ellipsis")
    return grid


def rank_bars(ranks: Sequence[RankRow], width: int, most: int) -> RenderableType:
    """A bar for each rank, or in `most` lines for some of them, as `select_ranks` chooses them. On a narrow terminal
    host, pid and device are cut off."""
    grid = _grid()
    chosen = select_ranks(ranks, most if len(ranks) <= most else most - 1)
    words = [
        Text.assemble(
            (rank.state, STATE_STYLES.get(rank.state, "red" if rank.troubled else "")),
            f"  {rank.progress}",
            (f"  {rank.place}", "dim"),
        )
        for rank in chosen
    ]
    room = width - _LABEL - _GAPS - max((len(text) for text in words), default=0)
    bar_width = max(_NARROWEST, min(room, _bar_width(width)))
    for rank, text in zip(chosen, words, strict=True):
        bar = ProgressBar(max(rank.target_bytes, 1), rank.pinned_bytes, bar_width, complete_style="green")
        grid.add_row(_label(f"rank {rank.rank}"), bar, text)
    if len(chosen) == len(ranks):
        return grid
    return Group(grid, Text(f"and {len(ranks) - len(chosen)} more ranks", style="dim"))


def _indented(text: Text) -> RenderableType:
    return Padding(text, (0, 0, 0, _LABEL + 2))


def _memory(memory: MemoryBar, width: int) -> RenderableType:
    grid = _grid()
    bar = ProgressBar(max(memory.target_bytes, 1), memory.populated_bytes, _bar_width(width), complete_style="green")
    grid.add_row(_label("memory"), bar, memory.progress)
    return grid


def _pools(shown: Overview, width: int, most: int) -> RenderableType:
    missing = [Text("there is no pool of the name that you chose", "red")] if shown.is_missing else []
    if not shown.pools.rows:
        return Group(Text(shown.empty), *missing)
    selected = (shown.selected or "") if shown.choices else None
    return Group(row_table(shown.pools, width, most, noun="pools", selected=selected), *missing)


def _sessions(shown: Overview, width: int, most: int) -> RenderableType:
    if not shown.sessions.rows:
        return Text("no engine is attached" + (f" to pool {shown.selected}" if shown.selected else ""))
    return row_table(shown.sessions, width, most, noun="sessions")


def _slots(shown: PoolOverview, width: int) -> RenderableType:
    legend = Text()
    for state, count in shown.slots.items():
        mark, style = _SLOTS[state]
        if count or state in ("cached", "free"):
            legend.append(f"{mark} ".lstrip(), style).append(f"{state} {count:,}   ")
    grid = _grid()
    grid.add_row(_label("slots"), _stack(shown.slots, _bar_width(width)), shown.about)
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
    for chart in shown.charts:
        _add_curves(grid, chart, _bar_width(width))
    return Group(grid, _by_size(shown.sizes, width))


def _by_size(sizes: Sizes, width: int) -> RenderableType:
    """A bar for each size, in another colour for the present and the next useful one. One line."""
    if not sizes.ratios:
        return Text.assemble(_label("by size".ljust(_LABEL + 2)), sizes.words, no_wrap=True, overflow="ellipsis")
    wide = _bar_width(width) // len(sizes.ratios)
    line = Text()
    for number, ratio in enumerate(sizes.ratios):
        style = "bold green" if number == sizes.now else "yellow" if number == sizes.next else "blue"
        line.append((_level(ratio, sizes.top) * max(1, wide - 1)).ljust(wide), style)
    words = [] if sizes.now is None else [f"{percent(sizes.ratios[sizes.now])} now"]
    if sizes.next is not None:
        words.append(f"{percent(sizes.ratios[sizes.next])} with {sizes.labels[sizes.next]}")
    words += [f"{row.value} {row.note}" for row in sizes.figures if row.name == "saved"]
    grid = _grid()
    grid.add_row(_label("by size"), line, ", ".join(words))
    return grid


def _add_curves(grid: Table, chart: Chart, room: int) -> None:
    styles = ("green",) if len(chart.curves) == 1 else ("blue", "yellow", "magenta")
    for curve, style in zip(chart.curves, cycle(styles), strict=False):
        line = Text(sparkline(curve.points, room, chart.top).rjust(room), style=style)
        grid.add_row(_label(curve.name), line, curve.now + (f"  ({chart.since_start})" if chart.since_start else ""))


def _pending(shown: Overview) -> RenderableType:
    """What is in flight; of one pool, also what was evicted."""
    words = "   ".join(f"{row.name} {row.value}" + (f" ({row.note})" if row.note else "") for row in shown.pending)
    flight = Text(words)
    flight.highlight_words(["stuck"], "bold red")
    parts: list[RenderableType] = [_labelled("in flight", flight)]
    if shown.oldest:
        oldest = _grid()
        for one in shown.oldest:
            oldest.add_row(one.name, Text(one.value, style=STATE_STYLES.get(one.value, "")), one.note)
        parts.append(oldest)
    if shown.pool:
        counts = "   ".join(f"{row.name} {row.value}" for row in shown.pool.evictions)
        parts.append(_labelled("evictions", Text(f"{counts or 'none'}   ({shown.pool.block_rates})")))
    return Group(*parts)


def _label(text: str) -> Text:
    return Text(text, style="bold cyan")


def _labelled(label: str, text: Text) -> RenderableType:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(width=_LABEL, no_wrap=True)
    grid.add_column()
    grid.add_row(_label(label), text)
    return grid


def _bar_width(width: int) -> int:
    return max(_NARROWEST, min(50, width - _LABEL - _WORDS))


# -- tables and curves -------------------------------------------------------------------------------------------------


def row_table(table: RowTable, width: int, most: int, *, noun: str, selected: str | None = None) -> RenderableType:
    """The first columns that fit, with their titles, and at most `most` lines of rows: those that a condition concerns
    before others. `selected`: the name of a row to mark."""
    shown = table if len(table.rows) <= most else table.limited(max(1, most - 1))
    mark = 2 if selected is not None else 0
    titles = [title.upper() for title in shown.titles]
    widths = [max(map(len, column)) for column in zip(titles, *(row.cells for row in shown.rows), strict=True)]
    widths[0] = min(widths[0], max(_SHORTEST_NAME, width - mark - sum(widths[1:_SURE_COLUMNS]) - _GAP * _SURE_COLUMNS))
    ends = accumulate(one + _GAP for one in widths)
    fitting = widths[: max(1, sum(end - _GAP + mark <= width for end in ends))]
    lines = [_line(titles, fitting, " " * mark, "bold cyan", -1)]
    for row in shown.rows:
        is_selected = row.name == selected
        prefix = ("▸ " if is_selected else "  ")[:mark]
        style = "bold" if is_selected else "yellow" if row.troubled else ""
        lines.append(_line(row.cells, fitting, prefix, style, shown.titles.index("state")))
    if shown.omitted:
        lines.append(Text(f"and {shown.omitted} more {noun}", style="dim"))
    return Group(*lines)


def _line(texts: Sequence[str], widths: Sequence[int], prefix: str, style: str, state: int) -> Text:
    line = Text(prefix, style=style, no_wrap=True, overflow="ellipsis")
    for number, (text, width) in enumerate(zip(texts, widths, strict=False)):
        shown = _cut(text, width).ljust(width + _GAP)
        line.append(shown, STATE_STYLES.get(text) if number == state else None)
    line.rstrip()
    return line


def _cut(text: str, width: int) -> str:
    """A name ends in what distinguishes it from others, so the middle is cut.

    >>> _cut("llama-3-1-8b-instruct-0a1b2c", 20)
    'llama-3-1-8…t-0a1b2c'
    """
    if len(text) <= width:
        return text
    tail = max(1, width * 2 // 5)
    return f"{text[: width - tail - 1]}…{text[-tail:]}"


def sparkline(points: Sequence[float | None], width: int, top: float) -> str:
    """At most the newest `width` points, from 0 to `top`. Gaps are blank.

    >>> sparkline([0, 1, None, 4, 8], 4, 8)
    '▂ ▅█'
    >>> sparkline([0.0, 0.0], 4, 0.0)
    '▁▁'
    """
    shown = points[-width:] if width > 0 else []
    return "".join(" " if point is None else _level(point, top) for point in shown)


def _level(point: float, top: float) -> str:
    share = min(1.0, max(0.0, point / top)) if top > 0 else 0.0
    return _LEVELS[round(share * (len(_LEVELS) - 1))]
