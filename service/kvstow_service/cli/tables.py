"""The tables of `kvstow get` and `kvstow top`: the columns of each kind of thing, and its rows as text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from kvstow.bytesize import format_size
from kvstow.status import (
    BlockStatus,
    ContextStatus,
    NamespaceStatus,
    RankStatus,
    SessionStatus,
    SessionSummary,
    TransferStatus,
)
from kvstow.tier.tierstatus import TierStatus
from kvstow_api.answers import LogLevelView, OperationView, PoolView, ProgressView, SizeView
from kvstow_api.shortlist import shortlist
from kvstow_api.texts import ABSENT, count, duration, moment, per_second, percent, rate

Place = Literal["everywhere", "lists", "wide"]
"""Where a column is shown: in `kvstow top` and `kvstow get`, only in `kvstow get`, or only in its -o wide."""

_REPORTS_ARE_FRESH = 5.0  # the age in seconds up to which a report counts as current; ranks report every second
_NAMED_RANKS = 3

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Column(Generic[_Item]):
    title: str
    cell: Callable[[_Item], str | None]
    """Returns the text. None and an empty text are shown as a dash."""
    place: Place = "everywhere"
    is_name: bool = False
    """Whether a narrow terminal may cut the middle of the text."""

    def text(self, item: _Item) -> str:
        return self.cell(item) or ABSENT


class Columns(Generic[_Item]):
    """The columns of one kind of thing, the most important first, because a narrow terminal leaves out the last ones.
    Other commands take the thing by the text of the first column. `name` is the field of that column."""

    def __init__(self, name: str, *columns: Column[_Item]) -> None:
        self.name, self.columns = name, columns

    def of(self, *places: Place) -> list[Column[_Item]]:
        return [column for column in self.columns if column.place in places]


class TableRow(NamedTuple):
    """The texts of one thing. With `troubled`, a condition concerns it."""

    cells: tuple[str, ...]
    troubled: bool

    @property
    def name(self) -> str:
        return self.cells[0]


class Table(NamedTuple):
    """Rows with the columns that are shown everywhere. `names` are the numbers of the columns that have names.
    `omitted` is how many rows are left out."""

    titles: tuple[str, ...]
    rows: tuple[TableRow, ...]
    names: tuple[int, ...]
    omitted: int = 0

    @classmethod
    def of(
        cls,
        items: Iterable[_Item],
        kind: Columns[_Item],
        troubled: Callable[[_Item], bool],
        *,
        without: str | None = None,
        omitted: int = 0,
    ) -> Table:
        """Make the table. `without` is the title of a column to leave out, because it would be the same in each row."""
        columns = [column for column in kind.of("everywhere") if column.title != without]
        rows = tuple(TableRow(tuple(column.text(one) for column in columns), troubled(one)) for one in items)
        names = tuple(number for number, column in enumerate(columns) if column.is_name)
        return cls(tuple(column.title for column in columns), rows, names, omitted)

    def limited(self, most: int) -> Table:
        """Return at most `most` rows in order. Rows that a condition concerns are kept before others."""
        rows = tuple(shortlist(self.rows, most, lambda row: not row.troubled))
        return self._replace(rows=rows, omitted=self.omitted + len(self.rows) - len(rows))


# -- pools, their engines, and the store below them ----------------------------------------------------------------


def _used(pool: PoolView) -> str:
    return percent((pool.usable_slots - pool.slots.free) / pool.usable_slots if pool.usable_slots else None)


def _pool_transfers(pool: PoolView) -> str:
    pending = pool.pending
    words = count(pending.loads + pending.stores)
    return f"{words} ({pending.stuck:,} stuck)" if pending.stuck else words


POOLS = Columns[PoolView](
    "name",
    Column("pool", lambda one: one.name, is_name=True),
    Column("state", lambda one: one.state),
    Column("memory", lambda one: format_size(one.granted_bytes)),
    Column("used", _used),
    Column("hits", lambda one: percent(one.now.hit_ratio)),
    Column("in flight", _pool_transfers),
    Column("loads", lambda one: rate(one.now.load_bytes_per_second)),
    Column("stores", lambda one: rate(one.now.store_bytes_per_second)),
    Column("dropped", lambda one: per_second(one.now.dropped_blocks_per_second)),
    Column("evicted", lambda one: per_second(one.now.evicted_blocks_per_second)),
    Column("sessions", lambda one: count(one.sessions)),
    Column("ranks", lambda one: count(one.num_ranks), "lists"),
    Column("model", lambda one: one.model, "wide"),
    Column("due", lambda one: format_size(one.due_bytes), "wide"),
    Column("size", lambda one: format_size(one.capacity_bytes), "wide"),
    Column("slots", lambda one: count(one.capacity_slots), "wide"),
    Column("usable", lambda one: count(one.usable_slots), "wide"),
    Column("policy", lambda one: one.policy, "wide"),
    Column("leases", lambda one: count(one.leases), "wide"),
    Column("free", lambda one: count(one.slots.free), "wide"),
    Column("filling", lambda one: count(one.slots.filling), "wide"),
    Column("cached", lambda one: count(one.slots.cached), "wide"),
    Column("leased", lambda one: count(one.slots.leased), "wide"),
    Column("quarantined", lambda one: count(one.slots.quarantined), "wide"),
    Column("slot", lambda one: format_size(one.slot_bytes), "wide"),
    Column("maximum", lambda one: format_size(one.max_capacity_bytes), "wide"),
    Column("etag", lambda one: one.etag, "wide"),
)


def _age(session: SessionStatus | SessionSummary) -> str:
    minutes = int(session.age_seconds // 60)
    if minutes < 60:
        return f"{minutes} min" if minutes else "< 1 min"
    return f"{minutes // 60} h {minutes % 60} min"


SESSIONS = Columns[SessionStatus | SessionSummary](
    "id",
    Column("session", lambda one: one.id, is_name=True),
    Column("state", lambda one: one.state),
    Column("engine", lambda one: one.engine, is_name=True),
    Column("host", lambda one: one.host, is_name=True),
    Column("in flight", lambda one: count(one.in_flight)),
    Column("oldest", lambda one: duration(one.oldest_seconds if one.in_flight else None)),
    Column("holds", lambda one: count(one.leased_slots + one.quarantined_slots)),
    Column("loads", lambda one: rate(one.load_bytes_per_second)),
    Column("stores", lambda one: rate(one.store_bytes_per_second)),
    Column("pool", lambda one: one.pool, is_name=True),
    Column("ranks", lambda one: count(one.num_ranks)),
    Column("registered", lambda one: count(one.registered_slots)),
    Column("age", _age),
    Column("pid", lambda one: _identifier(one.pid)),
    Column("model", lambda one: one.model, "lists"),
    Column("namespace", lambda one: one.namespace, "wide"),
    Column("leases", lambda one: count(one.leases), "wide"),
    Column("leased", lambda one: count(one.leased_slots), "wide"),
    Column("quarantined", lambda one: count(one.quarantined_slots), "wide"),
    Column("processes", lambda one: count(one.processes), "wide"),
)


def _identifier(number: int | None) -> str | None:
    return None if number is None else str(number)


TIERS = Columns[TierStatus](
    "namespace",
    Column("namespace", lambda one: one.namespace, is_name=True),
    Column("state", lambda one: one.state),
    Column("reading", lambda one: count(one.reading_blocks)),
    Column("read", lambda one: count(one.counters.read_blocks)),
    Column("hits", lambda one: count(one.counters.hit_blocks)),
    Column("writing", lambda one: count(one.writing_blocks)),
    Column("written", lambda one: count(one.counters.written_blocks)),
    Column("waited", lambda one: duration(one.counters.wait_seconds)),
    Column("saved", lambda one: duration(one.counters.saved_seconds)),
    Column("pool", lambda one: one.pool, "lists"),
    Column("decision", lambda one: one.reason or one.decision, "lists"),
    Column("fingerprint", lambda one: one.fingerprint, "wide"),
    Column("stuck", lambda one: count(one.stuck_slots), "wide"),
)

NAMESPACES = Columns[NamespaceStatus](
    "name",
    Column("namespace", lambda one: one.name),
    Column("pool", lambda one: one.pool),
    Column("model", lambda one: one.model),
    Column("weights", lambda one: one.weights_id),
    Column("from", lambda one: one.weights_source),
    Column("sessions", lambda one: count(one.sessions)),
    Column("blocks", lambda one: count(one.blocks)),
    Column("looked up", lambda one: count(one.looked_up_blocks)),
    Column("found", lambda one: count(one.hit_blocks)),
    Column("shared", lambda one: f"no: {'; '.join(one.sharing_off)}" if one.sharing_off else "yes"),
    Column("dropped", lambda one: _yes_or_no(one.dropped), "wide"),
)


def _yes_or_no(value: bool) -> str:
    return "yes" if value else "no"


_BAR_WIDTH = 40

CURVE = Columns[SizeView](
    "num_slots",
    Column("slots", lambda one: count(one.num_slots)),
    Column("size", lambda one: format_size(one.num_bytes)),
    Column("times", lambda one: f"{one.times:.3g}"),
    Column("hits", lambda one: f"{'>= ' if one.at_least else ''}{percent(one.ratio)}"),
    Column("error", lambda one: percent(one.error)),
    Column("note", lambda one: "now" if one.times == 1 else ""),
    Column("of all blocks", lambda one: "█" * round(_BAR_WIDTH * one.ratio)),
)


# -- ranks and what they copy --------------------------------------------------------------------------------------


def rank_state(rank: RankStatus) -> str:
    """Return the state that the rank reported last, or say that the report is old."""
    age = rank.last_report_age_seconds
    return f"silent for {duration(round(age))}" if age is not None and age > _REPORTS_ARE_FRESH else rank.state


def _pinned(rank: RankStatus) -> str:
    share = percent(rank.pinned_bytes / rank.target_bytes if rank.target_bytes else None)
    return f"{format_size(rank.pinned_bytes)} of {format_size(rank.target_bytes)} ({share})"


RANKS = Columns[RankStatus](
    "rank",
    Column("rank", lambda one: str(one.rank)),
    Column("state", rank_state),
    Column("pool", lambda one: one.pool),
    Column("session", lambda one: one.session),
    Column("host", lambda one: one.host),
    Column("pid", lambda one: _identifier(one.pid)),
    Column("device", lambda one: one.device),
    Column("pinned", _pinned),
    Column("rate", lambda one: rate(one.pin_rate_bytes_per_second)),
    Column("pending", lambda one: count(one.pending_ops)),
    Column("report", lambda one: duration(one.last_report_age_seconds)),
    Column("error", lambda one: ": ".join(filter(None, (one.error_reason, one.error)))),
    Column("boot", lambda one: one.boot_id, "wide"),
    Column("mode", lambda one: one.pin_mode, "wide"),
    Column("layers", lambda one: one.layer_way, "wide"),
    Column("kernel", lambda one: rate(one.layer_kernel_bytes_per_second), "wide"),
    Column("engine", lambda one: rate(one.layer_engine_bytes_per_second), "wide"),
    Column("resident", lambda one: None if one.resident_bytes is None else format_size(one.resident_bytes), "wide"),
    Column("loaded", lambda one: format_size(one.load_bytes_total), "wide"),
    Column("stored", lambda one: format_size(one.store_bytes_total), "wide"),
    Column("notice", lambda one: one.notice, "wide"),
)


def waits_for(transfer: TransferStatus) -> str:
    busy = [rank for rank in transfer.pending_ranks if rank not in transfer.idle_ranks]
    if transfer.idle_ranks and not busy:
        return "the host"
    return f"{len(busy)} ranks" if len(busy) > _NAMED_RANKS else f"rank {', '.join(map(str, busy))}"


TRANSFERS = Columns[TransferStatus](
    "op_id",
    Column("op", lambda one: str(one.op_id)),
    Column("direction", lambda one: one.direction),
    Column("state", lambda one: one.state),
    Column("pool", lambda one: one.pool),
    Column("session", lambda one: one.session),
    Column("blocks", lambda one: count(one.blocks)),
    Column("size", lambda one: format_size(one.bytes)),
    Column("age", lambda one: duration(one.age_seconds)),
    Column("request", lambda one: one.request_id),
    Column("waits for", waits_for),
    Column("failed", lambda one: _yes_or_no(one.failed), "wide"),
)

BLOCKS = Columns[BlockStatus](
    "key",
    Column("key", lambda one: one.key),
    Column("slot", lambda one: str(one.slot)),
    Column("state", lambda one: one.state),
    Column("age", lambda one: duration(one.age_seconds)),
    Column("idle", lambda one: duration(one.idle_seconds)),
    Column("leases", lambda one: count(one.leases)),
    Column("namespace", lambda one: one.namespace, "wide"),
)


def _expected(context: ContextStatus) -> str | None:
    seconds = context.resume_in_seconds
    if seconds is None:
        return None
    return f"in {duration(seconds)}" if seconds >= 0 else f"overdue for {duration(-seconds)}"


CONTEXTS = Columns[ContextStatus](
    "context",
    Column("context", lambda one: one.context),
    Column("name", lambda one: one.name),
    Column("blocks", lambda one: count(one.blocks)),
    Column("size", lambda one: format_size(one.bytes)),
    Column("tokens", lambda one: count(one.tokens)),
    Column("expected", _expected),
    Column("requests", lambda one: count(one.requests)),
    Column("idle", lambda one: duration(one.idle_seconds)),
    Column("namespace", lambda one: one.namespace, "wide"),
)


# -- the server ----------------------------------------------------------------------------------------------------


def progress_words(progress: ProgressView) -> str:
    return f"{progress.done:,} of {progress.total:,} slots"


def _removed(operation: OperationView) -> str | None:
    result = operation.result
    if result is None:
        return None
    return f"{'would remove' if result.dry_run else 'removed'} {result.evicted_slots:,}"


OPERATIONS = Columns[OperationView](
    "id",
    Column("id", lambda one: one.id),
    Column("pool", lambda one: one.pool),
    Column("kind", lambda one: one.kind),
    Column("state", lambda one: "waiting" if one.state == "running" and one.waiting else one.state),
    Column("progress", lambda one: progress_words(one.progress)),
    Column("result", _removed),
    Column("created", lambda one: moment(one.created)),
    Column("error", lambda one: one.error),
    Column("ended", lambda one: moment(one.ended), "wide"),
)

LOG_LEVELS = Columns[LogLevelView](
    "logger",
    Column("logger", lambda one: one.logger),
    Column("level", lambda one: one.level),
)

LISTS: Mapping[str, Columns[Any]] = {
    "pools": POOLS,
    "sessions": SESSIONS,
    "namespaces": NAMESPACES,
    "ranks": RANKS,
    "blocks": BLOCKS,
    "contexts": CONTEXTS,
    "transfers": TRANSFERS,
    "operations": OPERATIONS,
    "tiers": TIERS,
    "curve": CURVE,
    "log-levels": LOG_LEVELS,
}
"""The columns by the nouns of `kvstow get`."""
