"""The columns of tables, defined once for all who show them: the status page, `kvstow top` and `kvstow get`.

No web framework: clients import it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, Literal, NamedTuple, TypeVar

from kvstow.bytesize import format_size
from kvstow.status import ContextStatus, RankStatus, SessionFigures, TransferStatus
from kvstow_api.answers import OperationView, PoolView
from kvstow_api.texts import ABSENT, duration, field_text, percent

Place = Literal["everywhere", "lists", "wide"]
"""Where a column is shown: also on the status page and in `kvstow top`, in `kvstow get`, or in its -o wide alone."""

_REPORTS_ARE_FRESH = 5.0  # seconds; ranks report every second
_NAMED_RANKS = 3

_Item = TypeVar("_Item")


class Column(NamedTuple):
    title: str
    cell: Callable[[Any], str]
    place: Place = "everywhere"


class Columns(NamedTuple):
    """The columns of one kind of thing. The most important come first: a narrow terminal omits the last ones. The first
    one has the name, by which other commands take the thing; `name` is that field."""

    columns: Sequence[Column]
    name: str

    def of(self, *places: Place) -> list[Column]:
        return [column for column in self.columns if column.place in places]


class TableRow(NamedTuple):
    """The texts of one thing. `troubled`: a condition concerns it."""

    cells: tuple[str, ...]
    troubled: bool

    @property
    def name(self) -> str:
        return self.cells[0]


class Table(NamedTuple):
    """Rows of what is shown everywhere. `omitted`: how many there are besides."""

    titles: tuple[str, ...]
    rows: tuple[TableRow, ...]
    omitted: int = 0

    @classmethod
    def of(
        cls, items: Iterable[_Item], kind: Columns, troubled: Callable[[_Item], bool], *, without: str | None = None
    ) -> Table:
        """`without`: the title of a column that would say the same in each row."""
        columns = [column for column in kind.of("everywhere") if column.title != without]
        rows = tuple(TableRow(tuple(column.cell(one) for column in columns), troubled(one)) for one in items)
        return cls(tuple(column.title for column in columns), rows)

    def limited(self, most: int) -> Table:
        """At most `most` rows, in order: those that a condition concerns before others."""
        if len(self.rows) <= most:
            return self
        first = sorted(range(len(self.rows)), key=lambda number: not self.rows[number].troubled)
        rows = tuple(self.rows[number] for number in sorted(first[:most]))
        return Table(self.titles, rows, self.omitted + len(self.rows) - len(rows))


def _columns(
    name: str, everywhere: str, /, *, lists: str = "", wide: str = "", **cells: Callable[[Any], str]
) -> Columns:
    """From titles, separated by commas: each with the path of its attribute if that is not the title. `cells`: those
    that are made by a function, by the title."""
    columns = []
    places: tuple[tuple[Place, str], ...] = (("everywhere", everywhere), ("lists", lists), ("wide", wide))
    for place, text in places:
        for part in filter(None, text.split(", ")):
            title, _, path = part.partition("=")
            path = path or title
            cell = cells.get(title.replace(" ", "_"))
            cell = cell or partial(_text_of, path.rpartition(".")[2], attrgetter(path))
            columns.append(Column(title, cell, place))
    return Columns(columns, name)


def _text_of(name: str, read: Callable[[Any], object], item: Any) -> str:
    return field_text(name, read(item))


# -- pools, their engines, and the store below them ----------------------------------------------------------------


def _used(pool: PoolView) -> str:
    return percent((pool.usable_slots - pool.slots.free) / pool.usable_slots if pool.usable_slots else None)


def _pool_transfers(pool: PoolView) -> str:
    pending = pool.pending
    words = f"{pending.loads + pending.stores:,}"
    return f"{words} ({pending.stuck:,} stuck)" if pending.stuck else words


POOLS = _columns(
    "name",
    "pool=name, state, memory=granted_bytes, used, hits=now.hit_ratio, in flight, "
    "loads=now.load_bytes_per_second, stores=now.store_bytes_per_second, dropped=now.dropped_blocks_per_second, "
    "evicted=now.evicted_blocks_per_second, sessions",
    lists="ranks=num_ranks",
    wide="model, due=due_bytes, size=capacity_bytes, slots=capacity_slots, usable=usable_slots, policy, leases, "
    "free=slots.free, filling=slots.filling, cached=slots.cached, leased=slots.leased, "
    "quarantined=slots.quarantined, slot=slot_bytes, maximum=max_capacity_bytes, etag",
    used=_used,
    in_flight=_pool_transfers,
)


def _age(session: SessionFigures) -> str:
    minutes = int(session.age_seconds // 60)
    if minutes < 60:
        return f"{minutes} min" if minutes else "< 1 min"
    return f"{minutes // 60} h {minutes % 60} min"


SESSIONS = _columns(
    "id",
    "session=id, state, in flight=in_flight, oldest, holds, pool, loads=load_bytes_per_second, "
    "stores=store_bytes_per_second, engine, ranks=num_ranks, registered=registered_slots, age, host, pid",
    lists="model",
    wide="namespace, leases, leased=leased_slots, quarantined=quarantined_slots, processes",
    oldest=lambda one: duration(one.oldest_seconds) if one.in_flight else ABSENT,
    holds=lambda one: f"{one.leased_slots + one.quarantined_slots:,}",
    age=_age,
)


TIERS = _columns(
    "namespace",
    "namespace, state, reading=reading_blocks, read=counters.read_blocks, hits=counters.hit_blocks, "
    "writing=writing_blocks, written=counters.written_blocks, waited=counters.wait_seconds, "
    "saved=counters.saved_seconds",
    lists="pool, decision",
    wide="fingerprint, stuck=stuck_slots",
    decision=lambda one: one.reason or one.decision,
)

NAMESPACES = _columns(
    "name",
    "namespace=name, pool, model, weights=weights_id, from=weights_source, sessions, blocks, shared",
    wide="dropped",
    shared=lambda one: f"no: {'; '.join(one.sharing_off)}" if one.sharing_off else "yes",
)


SOURCES = _columns(
    "source",
    "source, kind, hits=hit_blocks, stored=stored_blocks, slots, looked up=looked_up_blocks",
    wide="missed=missed_blocks",
)


CURVE = _columns(
    "num_slots",
    "slots=num_slots, size=num_bytes, times, hits, own order, lru, note",
    times=lambda one: f"{one.times:.3g}",
    hits=lambda one: percent(one.ratio),
    own_order=lambda one: percent(one.own),
    lru=lambda one: percent(one.lru),
    note=lambda one: "now" if one.times == 1 else "",
)


# -- ranks and what they copy --------------------------------------------------------------------------------------


def rank_state(rank: RankStatus) -> str:
    """What the rank has last reported, unless that is old."""
    age = rank.last_report_age_seconds
    return f"silent for {duration(round(age))}" if age is not None and age > _REPORTS_ARE_FRESH else rank.state


def _pinned(rank: RankStatus) -> str:
    share = percent(rank.pinned_bytes / rank.target_bytes) if rank.target_bytes else ABSENT
    return f"{format_size(rank.pinned_bytes)} of {format_size(rank.target_bytes)} ({share})"


def _error(rank: RankStatus) -> str:
    return ": ".join(part for part in (rank.error_reason, rank.error) if part) or ABSENT


RANKS = _columns(
    "rank",
    "rank, state, pool, session, host, pid, device, pinned, rate=pin_rate_bytes_per_second, pending=pending_ops, "
    "report=last_report_age_seconds, error",
    wide="boot=boot_id, mode=pin_mode, layers=layer_way, kernel=layer_kernel_bytes_per_second, "
    "engine=layer_engine_bytes_per_second, resident=resident_bytes, loaded=load_bytes_total, stored=store_bytes_total, "
    "notice",
    state=rank_state,
    pinned=_pinned,
    error=_error,
)


def waits_for(transfer: TransferStatus) -> str:
    busy = [rank for rank in transfer.pending_ranks if rank not in transfer.idle_ranks]
    if transfer.idle_ranks and not busy:
        return "the host"
    return f"{len(busy)} ranks" if len(busy) > _NAMED_RANKS else f"rank {', '.join(map(str, busy))}"


TRANSFERS = _columns(
    "op_id",
    "op=op_id, direction, state, pool, session, blocks, size=bytes, age=age_seconds, request=request_id, waits for",
    wide="failed",
    waits_for=waits_for,
)


BLOCKS = _columns(
    "key",
    "key, slot, state, age=age_seconds, idle=idle_seconds, leases",
    wide="namespace",
)


def _expected(context: ContextStatus) -> str:
    seconds = context.resume_in_seconds
    if seconds is None:
        return ABSENT
    return f"in {duration(seconds)}" if seconds >= 0 else f"overdue for {duration(-seconds)}"


CONTEXTS = _columns(
    "context",
    "context, name, blocks, size=bytes, tokens, expected, requests, idle=idle_seconds",
    wide="namespace",
    name=lambda one: one.name or ABSENT,
    expected=_expected,
)


# -- the server ----------------------------------------------------------------------------------------------------


def _removed(operation: OperationView) -> str:
    result = operation.result
    if result is None:
        return ABSENT
    return f"{'would remove' if result.dry_run else 'removed'} {result.evicted_slots:,}"


OPERATIONS = _columns(
    "id",
    "id, pool, kind, state, progress, result, created, error",
    wide="ended",
    state=lambda one: "waiting" if one.state == "running" and one.waiting else str(one.state),
    progress=lambda one: f"{one.progress.done:,} of {one.progress.total:,} slots",
    result=_removed,
)
LOG_LEVELS = _columns(
    "logger",
    "logger, level",
)

LISTS: Mapping[str, Columns] = {
    "pools": POOLS,
    "sessions": SESSIONS,
    "namespaces": NAMESPACES,
    "ranks": RANKS,
    "blocks": BLOCKS,
    "contexts": CONTEXTS,
    "sources": SOURCES,
    "transfers": TRANSFERS,
    "operations": OPERATIONS,
    "tiers": TIERS,
    "curve": CURVE,
    "log-levels": LOG_LEVELS,
}
"""By the nouns of `kvstow get`."""
