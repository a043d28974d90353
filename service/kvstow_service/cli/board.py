"""The overview of a server as terminal text, for `kvstow top`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table as Grid
from rich.text import Text

from kvstow.bytesize import format_size
from kvstow.stats import SLOT_STATES, EngineStats
from kvstow.status import RankStatus, TransferStatus
from kvstow_api.answers import OverviewView, PoolCurveView, PoolView, TransfersView
from kvstow_api.figures import CurvesView
from kvstow_api.shortlist import shortlist
from kvstow_api.texts import counted, duration, pace_words, per_second, percent, rate
from kvstow_service.cli.output import STATE_STYLES
from kvstow_service.cli.tables import POOLS, SESSIONS, TIERS, Table, rank_state, waits_for

_NOT_PINNED = "not pinned"
# On terminals without colours, the characters tell the states apart.
_SLOTS: dict[str, tuple[str, str]] = {
    "leased": ("▓", "blue"),
    "cached": ("▒", "green"),
    "filling": ("▚", "yellow"),
    "quarantined": ("▞", "red"),
    "free": ("·", "bright_black"),
    _NOT_PINNED: (" ", ""),
}
assert set(_SLOTS) == {*SLOT_STATES, _NOT_PINNED}

_LABEL, _WORDS = 12, 58
_GAPS = 4  # columns between the three columns
_NARROWEST = 10  # the least width of a bar
_FEW = 4  # each kind of rows gets this many lines at least, even on a small screen
_FIXED_LINES, _POOL_LINES = 6, 7  # lines besides rows, ranks and transfers; lines of one pool's part below the rows
_HEAD_LINES = 2  # how many of the fixed lines are the head
_GROUPS = 7
_GAP = 2  # between the columns of a table
_SHORTEST_NAME = 20
_LEVELS = "▁▂▃▄▅▆▇█"
_GOOD_STATES = ("ready", "pinning", "starting")
_SHORTEST_WAIT = 1.0  # seconds; if less time is left to pin, it is not shown


def board(
    shown: OverviewView | None, lost: str | None, *, width: int, height: int, server: str, footer: str = ""
) -> RenderableType:
    """Make the whole screen. `server` is its address. `lost` says why it does not answer; `shown` is then its last
    answer."""
    if shown is None:
        return Group(Text(f"kvstow: {server}", style="bold"), Text(), _lost(lost or "connecting"), Text(footer))
    head, conditions = _head(shown, server, width), _conditions(shown, width, max(_FEW, height // 4))
    room = (
        height
        - _FIXED_LINES
        + _HEAD_LINES
        - len(head)
        - sum(-(-one.cell_len // width) for one in conditions)
        - bool(lost)
        - bool(footer)
    )
    room -= len(shown.transfers.items) + bool(shown.tier.items) + (_POOL_LINES if shown.stats else 0)
    wanted = [len(shown.pools), len(shown.sessions), len(shown.tier.items), len(shown.ranks)]
    pools, sessions, tiers, ranks = _shares(room, wanted)
    airy = room - sum(wanted) >= _GROUPS
    groups = [
        Group(*head, *conditions, *([] if lost is None else [_lost(lost)])),
        _memory(shown, width),
        _pools(shown, width, pools),
        _sessions(shown, width, sessions),
    ]
    if shown.tier.items:
        names = shown.troubled.tiers
        table = Table.of(
            shown.tier.items, TIERS, lambda one: one.namespace in names, omitted=shown.omitted.get("tiers", 0)
        )
        groups.append(row_table(table, width, tiers, noun="tiers"))
    if shown.ranks:
        paused = any(pool.pinning_paused for pool in shown.pools if pool.name == shown.selected)
        groups.append(rank_bars(shown.ranks, width, ranks, pinning_paused=paused, troubled=shown.troubled.ranks))
    pool = next((one for one in shown.pools if one.name == shown.selected), None)
    if pool and shown.stats and shown.curve:
        groups += [_slots(pool, width), _traffic(shown, pool, shown.stats, shown.curve, width)]
    groups.append(_pending(shown, pool))
    parts: list[RenderableType] = []
    for group in groups:
        parts += [Text(), group] if airy and parts else [group]
    if footer:
        parts.append(Text(footer, style="dim"))
    return Group(*parts)


def pool_choices(shown: OverviewView) -> list[str]:
    """Return the pools that a user can choose from, or nothing if there is no choice."""
    return [pool.name for pool in shown.pools] if len(shown.pools) > 1 or shown.is_missing else []


def _shares(room: int, wanted: Sequence[int]) -> list[int]:
    """Divide `room` lines among kinds of rows. Each kind gets up to `_FEW` lines, and the first kinds get the rest."""
    shares = [min(_FEW, want) for want in wanted]
    for number, want in enumerate(wanted):
        shares[number] += max(0, min(want - shares[number], room - sum(shares)))
    return shares


def _head(shown: OverviewView, server: str, width: int) -> list[Text]:
    """Make the head. The attach socket has a line of its own if it does not fit into the first one. The reason of the
    state is left out if a condition gives it."""
    info = shown.info
    about = ", ".join(filter(None, (info.settings.get("model"), info.mode, f"version {info.version}", server)))
    name, attach = f"kvstow {info.host_name}: {about}", f"engines attach at {info.attach}"
    name += f", up {duration(info.uptime_seconds)}"
    lines = [name]
    if info.attach:
        lines = [f"{name}, {attach}"] if len(name) + len(attach) + 2 <= width else [name, attach]
    is_good = shown.state in _GOOD_STATES
    has_reason = any(one.what == shown.reason if is_good else one.severity != "info" for one in shown.conditions)
    state = (shown.state, f"bold {STATE_STYLES.get(shown.state, '')}".strip())
    names = [Text(line, style="bold", no_wrap=True, overflow="ellipsis") for line in lines]
    return [*names, Text.assemble(state, "" if has_reason else f"  {shown.reason}")]


def _conditions(shown: OverviewView, width: int, most: int) -> list[Text]:
    """Show the first condition of each kind, the worst first, with what mends it, in at most `most` lines."""
    lines: list[Text] = []
    for number, one in enumerate(shown.conditions):
        style, alike = STATE_STYLES.get(one.severity, "cyan"), shown.alike.get(one.name)
        line = Text.assemble((one.severity, style), f"  {one.what}  ", (one.fix, "dim"))
        line.append(f"  and {alike:,} more like this" if alike else "")
        most -= -(-line.cell_len // width)
        if most < 0 and lines:
            left = len(shown.conditions) - number + shown.omitted.get("conditions", 0)
            return [*lines, Text(f"and {left} more kinds: `kvstow doctor`", style="dim")]
        lines.append(line)
    return lines


def _lost(reason: str) -> Text:
    return Text(f"no answer: {reason}; retrying", style="red")


def _grid() -> Grid:
    grid = Grid.grid(padding=(0, 2, 0, 0))
    grid.add_column(width=_LABEL, no_wrap=True)
    grid.add_column(min_width=_NARROWEST, no_wrap=True)
    grid.add_column(no_wrap=True, overflow="ellipsis")
    return grid


def _bar(done: int, total: int, width: int) -> ProgressBar:
    return ProgressBar(max(total, 1), done, width, complete_style="green")


def rank_bars(
    ranks: Sequence[RankStatus],
    width: int,
    most: int,
    *,
    pinning_paused: bool = False,
    troubled: Collection[str] = (),
) -> RenderableType:
    """Make a bar for each rank. If there are more than `most`, the ranks in `troubled` (SESSION/RANK) and those that
    have pinned least come first. A narrow terminal cuts off host, pid and device."""
    room = most if len(ranks) <= most else most - 1
    chosen = shortlist(ranks, room, lambda rank: (_id(rank) not in troubled, rank.pinned_bytes))
    several = len({rank.session for rank in ranks}) > 1
    words = []
    for rank in chosen:
        state = rank_state(rank)
        style = STATE_STYLES.get(state, "red" if _id(rank) in troubled else "")
        place = _place(rank, several)
        progress = _progress(rank, pinning_paused)
        words.append(Text.assemble((state, style), f"  {progress}", (f"  {place}", "dim")))
    left = width - _LABEL - _GAPS - max((len(text) for text in words), default=0)
    bar_width = max(_NARROWEST, min(left, _bar_width(width)))
    grid = _grid()
    for rank, text in zip(chosen, words, strict=True):
        grid.add_row(_label(f"rank {rank.rank}"), _bar(rank.pinned_bytes, rank.target_bytes, bar_width), text)
    if len(chosen) == len(ranks):
        return grid
    return Group(grid, Text(f"and {len(ranks) - len(chosen)} more ranks", style="dim"))


def _id(rank: RankStatus) -> str:
    return f"{rank.session}/{rank.rank}"


def _progress(rank: RankStatus, paused: bool) -> str:
    size = format_size(rank.target_bytes)
    left = rank.target_bytes - rank.pinned_bytes
    if left <= 0:
        return size
    words, speed = f"{format_size(rank.pinned_bytes)} of {size}", rank.pin_rate_bytes_per_second
    if not speed or paused or rank.state != "pinning" or left / speed < _SHORTEST_WAIT:
        return words  # a rank of a node waits until memory is populated, and pins it very fast after that
    return f"{words}, {rate(speed)}, {duration(left / speed)} left"


def _place(rank: RankStatus, several: bool) -> str:
    process = f"pid {rank.pid}" if rank.pid is not None else None
    return ", ".join(filter(None, (rank.session if several else None, rank.host, process, rank.device)))


def _memory(shown: OverviewView, width: int) -> RenderableType:
    memory, size = shown.memory, format_size(shown.memory.target_bytes)
    words = size
    if memory.populated_bytes < memory.target_bytes:
        words = f"{format_size(memory.populated_bytes)} of {size} {'populated' if shown.info.node else 'pinned'}"
        words += pace_words(memory)
    if shown.info.node:
        words += f", {format_size(memory.granted_bytes)} in pools"
    grid = _grid()
    grid.add_row(_label("memory"), _bar(memory.populated_bytes, memory.target_bytes, _bar_width(width)), words)
    return grid


def _pools(shown: OverviewView, width: int, most: int) -> RenderableType:
    missing = [Text("there is no pool of the name that you chose", "red")] if shown.is_missing else []
    if not shown.pools:
        attach = shown.info.attach
        how = f'; vLLM attaches with "attach": "{attach}" in kv_connector_extra_config' if attach else ""
        return Group(Text(f"no engine has attached yet, so there is no pool{how}"), *missing)
    troubled = shown.troubled.pools
    table = Table.of(shown.pools, POOLS, lambda one: one.name in troubled, omitted=shown.omitted.get("pools", 0))
    selected = (shown.selected or "") if pool_choices(shown) else None
    return Group(row_table(table, width, most, noun="pools", selected=selected), *missing)


def _sessions(shown: OverviewView, width: int, most: int) -> RenderableType:
    if not shown.sessions:
        return Text("no engine is attached" + (f" to pool {shown.selected}" if shown.selected else ""))
    troubled = shown.troubled.sessions
    table = Table.of(
        shown.sessions,
        SESSIONS,
        lambda one: one.id in troubled,
        without=None if shown.selected is None else "pool",
        omitted=shown.omitted.get("sessions", 0),
    )
    return row_table(table, width, most, noun="sessions")


# -- one pool ----------------------------------------------------------------------------------------------------------


def _slots(pool: PoolView, width: int) -> RenderableType:
    counts = {state: getattr(pool.slots, state, 0) for state in _SLOTS}
    counts[_NOT_PINNED] = max(0, pool.capacity_slots - pool.usable_slots)
    legend = Text()
    for state, count in counts.items():
        mark, style = _SLOTS[state]
        if count or state in ("cached", "free"):
            legend.append(f"{mark} ".lstrip(), style).append(f"{state} {count:,}   ")
    grid = _grid()
    grid.add_row(
        _label("slots"),
        _stack(counts, _bar_width(width)),
        f"{pool.usable_slots:,} of {pool.capacity_slots:,} slots usable, "
        f"{format_size(pool.capacity_bytes)} per rank, {pool.policy}",
    )
    return Group(grid, Padding(legend, (0, 0, 0, _LABEL + 2)))


def _stack(counts: Mapping[str, int], width: int) -> Text:
    """Make a bar with the share of each state. A state that has a slot is at least one character wide."""
    total, bar = sum(counts.values()), Text()
    shares = {state: max(1, round(counts[state] * width / total)) for state in counts if counts[state]}
    if shares:  # a pool may have no slot yet
        largest = max(shares, key=lambda state: shares[state])
        shares[largest] += width - sum(shares.values())
    for state, share in shares.items():
        mark, style = _SLOTS[state]
        bar.append(mark * share, style)
    return bar


def _traffic(
    shown: OverviewView, pool: PoolView, stats: EngineStats, curve: PoolCurveView, width: int
) -> RenderableType:
    (curves,) = shown.curves
    now, ever = pool.now, stats.lookups.hit_ratio
    hits = "no lookups" if now.hit_ratio is None else percent(now.hit_ratio)
    if ever is not None:
        hits += f"  ({percent(ever)} since the start)"
    top = max([point for name in _BANDWIDTH for point in curves.points[name] if point is not None], default=0.0)
    grid, room = _grid(), _bar_width(width)
    grid.add_row(_label("hit ratio"), _curve(curves, "hit_ratio", room, 1.0, "green"), hits)
    for name, (label, style) in _BANDWIDTH.items():
        speed = getattr(now, name)
        words = "no transfers" if speed is None else rate(speed)
        grid.add_row(_label(label), _curve(curves, name, room, top, style), words)
    has_advice = any(one.name == "pool_size" and one.pool == curve.pool for one in shown.conditions)
    return Group(grid, _by_size(curve, "" if has_advice else curve.advice, width))


_BANDWIDTH = {"load_bytes_per_second": ("loads", "blue"), "store_bytes_per_second": ("stores", "yellow")}


def _curve(curves: CurvesView, name: str, room: int, top: float, style: str) -> Text:
    return Text(sparkline(curves.points[name], room, top).rjust(room), style=style)


def _by_size(curve: PoolCurveView, advice: str, width: int) -> RenderableType:
    """Make one line with a bar for the hits of each size. The present size and the next useful one have another colour.
    Without a curve, the line has only the advice."""
    sizes, better = curve.items, curve.next_useful
    if not sizes:
        return Text.assemble(_label("by size".ljust(_LABEL + 2)), advice, no_wrap=True, overflow="ellipsis")
    wide, top = _bar_width(width) // len(sizes), max(0.05, *(size.ratio for size in sizes))
    line = Text()
    for size in sizes:
        style = "bold green" if size.times == 1 else "yellow" if size == better else "blue"
        line.append((_level(size.ratio, top) * max(1, wide - 1)).ljust(wide), style)
    words = [f"{percent(size.ratio)} now" for size in sizes if size.times == 1]
    if better is not None:
        words.append(f"{percent(better.ratio)} with {format_size(better.num_bytes)}")
    if curve.saved_seconds_per_hour is not None:
        words.append(f"{duration(curve.saved_seconds_per_hour)} of prefill saved an hour")
    grid = _grid()
    grid.add_row(_label("by size"), line, ", ".join(words))
    return grid


# -- transfers ---------------------------------------------------------------------------------------------------------


def _pending(shown: OverviewView, pool: PoolView | None) -> RenderableType:
    """Show what is in flight and, if one pool is selected, what was evicted."""
    flight = Text("   ".join(_in_flight(shown.transfers)))
    flight.highlight_words(["stuck"], "bold red")
    parts: list[RenderableType] = [_labelled("in flight", flight)]
    if shown.transfers.items:
        oldest = _grid()
        for one in shown.transfers.items:
            state = Text(one.state, style=STATE_STYLES.get(one.state, ""))
            oldest.add_row(one.direction, state, _transfer(one, len(shown.sessions)))
        parts.append(oldest)
    if pool and shown.stats:
        counts = "   ".join(f"{name.replace('_', ' ')} {one:,}" for name, one in shown.stats.evictions.items() if one)
        rates = (
            f"evicted for capacity: {per_second(pool.now.evicted_blocks_per_second)}, "
            f"dropped: {per_second(pool.now.dropped_blocks_per_second)}"
        )
        parts.append(_labelled("evictions", Text(f"{counts or 'none'}   ({rates})")))
    return Group(*parts)


def _in_flight(transfers: TransfersView) -> list[str]:
    pending, choices = transfers.pending, {name: one for name, one in transfers.load_choices.items() if one}
    oldest = duration(pending.oldest_seconds) if pending.loads or pending.stores else "none"
    words = [
        f"loads {pending.loads:,} ({format_size(pending.load_bytes)})",
        f"stores {pending.stores:,} ({format_size(pending.store_bytes)})",
        f"oldest {oldest}" + (f" ({pending.stuck} stuck)" if pending.stuck else ""),
    ]
    if choices:
        by_layer = sum(one for name, one in choices.items() if name.startswith("layer_"))
        reasons = ", ".join(f"{name.replace('_', ' ', 1)} {one:,}" for name, one in choices.items())
        words.append(f"loads by layer {by_layer:,} of {sum(choices.values()):,} ({reasons})")
    return words


def _transfer(one: TransferStatus, num_sessions: int) -> str:
    session = f", session {one.session}" if num_sessions > 1 else ""
    request = f", request {one.request_id}" if one.request_id else ""
    return f"{counted(one.blocks, 'block')}, {duration(one.age_seconds)}, waits for {waits_for(one)}{session}{request}"


def _label(text: str) -> Text:
    return Text(text, style="bold cyan")


def _labelled(label: str, text: Text) -> RenderableType:
    grid = Grid.grid(padding=(0, 2, 0, 0))
    grid.add_column(width=_LABEL, no_wrap=True)
    grid.add_column()
    grid.add_row(_label(label), text)
    return grid


def _bar_width(width: int) -> int:
    return max(_NARROWEST, min(50, width - _LABEL - _WORDS))


# -- tables and curves -------------------------------------------------------------------------------------------------


def row_table(table: Table, width: int, most: int, *, noun: str, selected: str | None = None) -> RenderableType:
    """Make a table with titles, the first columns that fit, and at most `most` lines of rows. Rows with a condition
    come before others. Long names are cut, so that more columns fit. `selected` is the name of a row to mark."""
    shown = table.limited(most if len(table.rows) <= most else max(1, most - 1))
    mark = 2 if selected is not None else 0
    titles = [title.upper() for title in shown.titles]
    widths = [max(map(len, column)) for column in zip(titles, *(row.cells for row in shown.rows), strict=True)]
    excess = mark + sum(widths) + _GAP * (len(widths) - 1) - width
    while excess > 0 and max(cut := [(widths[at], at) for at in shown.names])[0] > _SHORTEST_NAME:
        widths[max(cut)[1]] -= 1
        excess -= 1
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
    """Cut the middle of a name, because its end distinguishes it from others.

    >>> _cut("llama-3-1-8b-instruct-0a1b2c", 20)
    'llama-3-1-8…t-0a1b2c'
    """
    if len(text) <= width:
        return text
    tail = max(1, width * 2 // 5)
    return f"{text[: width - tail - 1]}…{text[-tail:]}"


def sparkline(points: Sequence[float | None], width: int, top: float) -> str:
    """Draw at most the newest `width` points, from 0 to `top`. Gaps are blank.

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
