"""The columns of tables, defined once for all who show them: the status page, `kvstow top` and `kvstow get`.

No web framework: clients import it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Literal, NamedTuple, TypeVar

from kvstow.bytesize import format_size
from kvstow.stats import SLOT_STATES
from kvstow.status import ContextStatus, RankStatus, SessionStatus, TransferStatus
from kvstow.tier.tierstatus import TierStatus
from kvstow_api.answers import OperationView, PoolView
from kvstow_api.texts import ABSENT, duration, field_text, percent

Place = Literal["everywhere", "lists", "wide"]
"""Where a column is shown: also on the status page and in `kvstow top`, in `kvstow get`, or in its -o wide alone."""

_REPORTS_ARE_FRESH = 5.0  # seconds; ranks report every second
_NAMED_RANKS = 3

_Item = TypeVar("_Item")


class Column(NamedTuple):
    """One column of a table, and the text of its cells."""

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


class Row(NamedTuple):
    """The texts of one thing. `troubled`: a condition concerns it."""

    cells: tuple[str, ...]
    troubled: bool

    @property
    def name(self) -> str:
        return self.cells[0]


class Table(NamedTuple):
    """Rows of what is shown everywhere. `omitted`: how many there are besides."""

    titles: tuple[str, ...]
    rows: tuple[Row, ...]
    omitted: int = 0

    @classmethod
    def of(
        cls, items: Iterable[_Item], kind: Columns, troubled: Callable[[_Item], bool], *, without: str | None = None
    ) -> Table:
        """`without`: the title of a column that would say the same in each row."""
        columns = [column for column in kind.of("everywhere") if column.title != without]
        rows = tuple(Row(tuple(column.cell(one) for column in columns), troubled(one)) for one in items)
        return cls(tuple(column.title for column in columns), rows)

    def limited(self, most: int) -> Table:
        """At most `most` rows, in order: those that a condition concerns before others."""
        if len(self.rows) <= most:
            return self
        first = sorted(range(len(self.rows)), key=lambda number: not self.rows[number].troubled)
        rows = tuple(self.rows[number] for number in sorted(first[:most]))
        return Table(self.titles, rows, len(self.rows) - len(rows))


def _field(title: str, name: str, place: Place = "everywhere") -> Column:
    """A column that shows one field, or a field of a field."""
    read, last = attrgetter(name), name.rpartition(".")[2]
    return Column(title, lambda item: field_text(last, read(item)), place)


# -- pools, their engines, and the fleet tier ----------------------------------------------------------------------


def _used(pool: PoolView) -> str:
    return percent((pool.usable_slots - pool.slots.free) / pool.usable_slots if pool.usable_slots else None)


def _pool_transfers(pool: PoolView) -> str:
    pending = pool.pending
    words = f"{pending.loads + pending.stores:,}"
    return f"{words} ({pending.stuck:,} stuck)" if pending.stuck else words


POOLS = Columns(
    (
        _field("pool", "name"),
        _field("state", "state"),
        _field("memory", "granted_bytes"),
        Column("used", _used),
        _field("hits", "now.hit_ratio"),
        Column("in flight", _pool_transfers),
        _field("loads", "now.load_bytes_per_second"),
        _field("stores", "now.store_bytes_per_second"),
        _field("dropped", "now.dropped_blocks_per_second"),
        _field("evicted", "now.evicted_blocks_per_second"),
        _field("sessions", "sessions"),
        _field("ranks", "num_ranks", "lists"),
        _field("model", "model", "wide"),
        _field("due", "due_bytes", "wide"),
        _field("size", "capacity_bytes", "wide"),
        _field("slots", "capacity_slots", "wide"),
        _field("usable", "usable_slots", "wide"),
        _field("policy", "policy", "wide"),
        _field("leases", "leases", "wide"),
        *(_field(state, f"slots.{state}", "wide") for state in SLOT_STATES),
        _field("slot", "slot_bytes", "wide"),
        _field("maximum", "max_capacity_bytes", "wide"),
        _field("etag", "etag", "wide"),
    ),
    "name",
)


def _age(session: SessionStatus) -> str:
    """Changes once a minute: the status page sends its sections again when they change."""
    minutes = int(session.age_seconds // 60)
    if minutes < 60:
        return f"{minutes} min" if minutes else "< 1 min"
    return f"{minutes // 60} h {minutes % 60} min"


SESSIONS = Columns(
    (
        _field("session", "id"),
        _field("state", "state"),
        _field("in flight", "in_flight"),
        Column("oldest", lambda one: duration(one.oldest_seconds) if one.in_flight else ABSENT),
        Column("holds", lambda one: f"{one.leased_slots + one.quarantined_slots:,}"),
        _field("pool", "pool"),
        _field("loads", "load_bytes_per_second"),
        _field("stores", "store_bytes_per_second"),
        _field("engine", "engine"),
        Column("ranks", lambda one: f"{len(one.ranks)}"),
        _field("registered", "registered_slots"),
        Column("age", _age),
        _field("host", "host"),
        _field("pid", "pid"),
        _field("model", "model", "lists"),
        _field("namespace", "namespace", "wide"),
        _field("leases", "leases", "wide"),
        _field("leased", "leased_slots", "wide"),
        _field("quarantined", "quarantined_slots", "wide"),
        _field("processes", "processes", "wide"),
    ),
    "id",
)


def _clients(tier: TierStatus) -> str:
    return "; ".join(
        f"{one.purpose} {one.health.state}" + (f" ({one.health.reason})" if one.health.reason else "")
        for one in tier.clients
    )


TIERS = Columns(
    (
        _field("namespace", "namespace"),
        _field("state", "state"),
        _field("fetches", "fetch_bytes_per_second"),
        _field("fetching", "fetching_blocks"),
        _field("to put", "waiting_blocks"),
        _field("put", "counters.put_blocks"),
        _field("fetched", "counters.fetched_blocks"),
        _field("waited", "counters.wait_seconds"),
        _field("saved", "counters.saved_seconds"),
        _field("pool", "pool", "lists"),
        _field("lookup", "lookup_seconds", "lists"),
        Column("decision", lambda one: one.reason or one.decision, "lists"),
        _field("fingerprint", "fingerprint", "wide"),
        Column("clients", _clients, "wide"),
    ),
    "namespace",
)

NAMESPACES = Columns(
    (
        _field("namespace", "name"),
        _field("pool", "pool"),
        _field("model", "model"),
        _field("weights", "weights_id"),
        _field("from", "weights_source"),
        _field("sessions", "sessions"),
        _field("blocks", "blocks"),
        Column("shared", lambda one: f"no: {'; '.join(one.sharing_off)}" if one.sharing_off else "yes"),
        _field("dropped", "dropped", "wide"),
    ),
    "name",
)


SOURCES = Columns(
    (
        _field("source", "source"),
        _field("kind", "kind"),
        _field("hits", "hit_blocks"),
        _field("stored", "stored_blocks"),
        _field("slots", "slots"),
        _field("looked up", "looked_up_blocks"),
        _field("missed", "missed_blocks", "wide"),
    ),
    "source",
)


CURVE = Columns(
    (
        _field("slots", "num_slots"),
        _field("size", "num_bytes"),
        Column("times", lambda one: f"{one.times:.3g}"),
        Column("hits", lambda one: percent(one.ratio)),
        Column("own order", lambda one: percent(one.own)),
        Column("lru", lambda one: percent(one.lru)),
        Column("note", lambda one: "now" if one.times == 1 else ""),
    ),
    "num_slots",
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


RANKS = Columns(
    (
        _field("rank", "rank"),
        Column("state", rank_state),
        _field("pool", "pool"),
        _field("session", "session"),
        _field("host", "host"),
        _field("pid", "pid"),
        _field("device", "device"),
        Column("pinned", _pinned),
        _field("rate", "pin_rate_bytes_per_second"),
        _field("pending", "pending_ops"),
        _field("report", "last_report_age_seconds"),
        Column("error", _error),
        _field("boot", "boot_id", "wide"),
        _field("mode", "pin_mode", "wide"),
        _field("resident", "resident_bytes", "wide"),
        _field("loaded", "load_bytes_total", "wide"),
        _field("stored", "store_bytes_total", "wide"),
        _field("notice", "notice", "wide"),
    ),
    "rank",
)


def waits_for(transfer: TransferStatus) -> str:
    """The ranks that work on the transfer, or the host if none does."""
    busy = [rank for rank in transfer.pending_ranks if rank not in transfer.idle_ranks]
    if transfer.idle_ranks and not busy:
        return "the host"
    return f"{len(busy)} ranks" if len(busy) > _NAMED_RANKS else f"rank {', '.join(map(str, busy))}"


TRANSFERS = Columns(
    (
        _field("op", "op_id"),
        _field("direction", "direction"),
        _field("state", "state"),
        _field("pool", "pool"),
        _field("session", "session"),
        _field("blocks", "blocks"),
        _field("size", "bytes"),
        _field("age", "age_seconds"),
        _field("request", "request_id"),
        Column("waits for", waits_for),
        _field("failed", "failed", "wide"),
    ),
    "op_id",
)


BLOCKS = Columns(
    (
        _field("key", "key"),
        _field("slot", "slot"),
        _field("state", "state"),
        _field("namespace", "namespace", "wide"),
        _field("age", "age_seconds"),
        _field("idle", "idle_seconds"),
        _field("leases", "leases"),
    ),
    "key",
)


def _expected(context: ContextStatus) -> str:
    seconds = context.resume_in_seconds
    if seconds is None:
        return "no more"
    words = f"in {duration(seconds)}" if seconds >= 0 else f"overdue for {duration(-seconds)}"
    return words if context.is_hinted else f"{words} (learned)"


CONTEXTS = Columns(
    (
        _field("context", "context"),
        Column("name", lambda one: one.name or ABSENT),
        _field("blocks", "blocks"),
        _field("size", "bytes"),
        _field("tokens", "tokens"),
        Column("expected", _expected),
        _field("requests", "requests"),
        _field("hits", "hits"),
        _field("idle", "idle_seconds"),
        _field("namespace", "namespace", "wide"),
    ),
    "context",
)


# -- the server ----------------------------------------------------------------------------------------------------


def _removed(operation: OperationView) -> str:
    result = operation.result
    if result is None:
        return ABSENT
    return f"{'would remove' if result.dry_run else 'removed'} {result.evicted_slots:,}"


OPERATIONS = Columns(
    (
        _field("id", "id"),
        _field("pool", "pool"),
        _field("kind", "kind"),
        Column("state", lambda one: "waiting" if one.state == "running" and one.waiting else str(one.state)),
        Column("progress", lambda one: f"{one.progress.done:,} of {one.progress.total:,} slots"),
        Column("result", _removed),
        _field("created", "created"),
        _field("ended", "ended", "wide"),
        _field("error", "error"),
    ),
    "id",
)
LOG_LEVELS = Columns((_field("logger", "logger"), _field("level", "level")), "logger")

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
