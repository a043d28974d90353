"""The columns of tables, and the lists of `kvstow get`."""

from __future__ import annotations

from kvstow.bytesize import format_size
from kvstow.status import BlockStatus, RankStatus
from kvstow.tier.tierstatus import TierClient
from kvstow_api.answers import OperationView, PoolView
from kvstow_api.numberformat import ABSENT, blocks_per_second, duration, field_text, moment, percent, rate
from kvstow_api.overview import waits_for
from kvstow_api.rankrows import rank_state
from kvstow_service.cli.output import Column


def _field(title: str, name: str, *, wide: bool = False) -> Column:
    """A column that shows one field."""
    return Column(title, lambda item: field_text(name, getattr(item, name)), wide)


def _error(item: RankStatus) -> str:
    return ": ".join(part for part in (item.error_reason, item.error) if part) or ABSENT


def _pinned(item: RankStatus) -> str:
    share = percent(item.pinned_bytes / item.target_bytes) if item.target_bytes else ABSENT
    return f"{format_size(item.pinned_bytes)} of {format_size(item.target_bytes)} ({share})"


def _used(item: PoolView) -> str:
    return percent((item.usable_slots - item.slots.free) / item.usable_slots if item.usable_slots else None)


def _progress(item: OperationView) -> str:
    return f"{item.progress.done:,} of {item.progress.total:,} slots"


def _removed(item: OperationView) -> str:
    if item.result is None:
        return ABSENT
    return f"{'would remove' if item.result.dry_run else 'removed'} {item.result.evicted_slots:,}"


def _in_flight(item: PoolView) -> str:
    pending = item.pending
    words = f"{pending.loads + pending.stores:,}"
    return f"{words} ({pending.stuck:,} stuck)" if pending.stuck else words


POOLS = (
    _field("NAME", "name"),
    _field("STATE", "state"),
    Column("MEMORY", lambda item: format_size(item.granted_bytes)),
    Column("USED", _used),
    Column("HITS", lambda item: percent(item.now.hit_ratio)),
    Column("LOADS", lambda item: rate(item.now.load_bytes_per_second)),
    Column("STORES", lambda item: rate(item.now.store_bytes_per_second)),
    Column("IN FLIGHT", _in_flight),
    Column("EVICTED", lambda item: blocks_per_second(item.now.evicted_blocks_per_second)),
    Column("DROPPED", lambda item: blocks_per_second(item.now.dropped_blocks_per_second)),
    _field("SESSIONS", "sessions"),
    _field("RANKS", "num_ranks"),
    _field("MODEL", "model", wide=True),
    Column("DUE", lambda item: format_size(item.due_bytes), wide=True),
    Column("SIZE", lambda item: format_size(item.capacity_bytes), wide=True),
    _field("SLOTS", "capacity_slots", wide=True),
    _field("USABLE", "usable_slots", wide=True),
    _field("POLICY", "policy", wide=True),
    _field("LEASES", "leases", wide=True),
    *(
        Column(state.upper(), lambda item, state=state: f"{getattr(item.slots, state):,}", wide=True)  # type: ignore[misc]
        for state in ("free", "filling", "cached", "leased", "protected", "quarantined")
    ),
    Column("SLOT", lambda item: format_size(item.slot_bytes), wide=True),
    Column("MAXIMUM", lambda item: format_size(item.max_capacity_bytes), wide=True),
    _field("ETAG", "etag", wide=True),
)

SESSIONS = (
    _field("ID", "id"),
    _field("ENGINE", "engine"),
    _field("STATE", "state"),
    _field("MODEL", "model"),
    _field("POOL", "pool"),
    _field("HOST", "host"),
    _field("PID", "pid"),
    Column("RANKS", lambda item: f"{len(item.ranks)}"),
    _field("REGISTERED", "registered_slots"),
    Column("LOADS", lambda item: rate(item.load_bytes_per_second), wide=True),
    Column("STORES", lambda item: rate(item.store_bytes_per_second), wide=True),
    Column("IN FLIGHT", lambda item: f"{item.in_flight:,}"),
    Column("OLDEST", lambda item: duration(item.oldest_seconds) if item.in_flight else ABSENT),
    Column("HOLDS", lambda item: f"{item.leased_slots + item.quarantined_slots:,}"),
    Column("AGE", lambda item: duration(item.age_seconds)),
    _field("NAMESPACE", "namespace", wide=True),
    _field("LEASES", "leases", wide=True),
    _field("LEASED", "leased_slots", wide=True),
    _field("QUARANTINED", "quarantined_slots", wide=True),
    _field("PROCESSES", "processes", wide=True),
)

NAMESPACES = (
    _field("NAME", "name"),
    _field("POOL", "pool"),
    _field("MODEL", "model"),
    _field("WEIGHTS", "weights_id"),
    _field("FROM", "weights_source"),
    _field("SESSIONS", "sessions"),
    _field("BLOCKS", "blocks"),
    Column("SHARED", lambda item: f"no: {'; '.join(item.sharing_off)}" if item.sharing_off else "yes"),
    _field("DROPPED", "dropped", wide=True),
)

BLOCKS = (
    Column("KEY", lambda item: str(item.key)),
    _field("SLOT", "slot"),
    _field("STATE", "state"),
    _field("NAMESPACE", "namespace", wide=True),
    Column("AGE", lambda item: duration(item.age_seconds)),
    Column("IDLE", lambda item: duration(item.idle_seconds)),
    _field("LEASES", "leases"),
    Column("PROTECTED FOR", lambda item: _protection_left(item)),
)


def _protection_left(item: BlockStatus) -> str:
    if item.state != "protected":
        return ABSENT
    return "until unprotected" if item.protection_ttl_seconds is None else duration(item.protection_ttl_seconds)


RANKS = (
    _field("RANK", "rank"),
    Column("STATE", rank_state),
    _field("POOL", "pool"),
    _field("SESSION", "session"),
    _field("HOST", "host"),
    _field("PID", "pid"),
    _field("DEVICE", "device"),
    Column("PINNED", _pinned),
    Column("RATE", lambda item: rate(item.pin_rate_bytes_per_second)),
    _field("PENDING", "pending_ops"),
    Column("REPORT", lambda item: duration(item.last_report_age_seconds)),
    Column("ERROR", _error),
    _field("BOOT", "boot_id", wide=True),
    _field("MODE", "pin_mode", wide=True),
    Column("RESIDENT", lambda item: format_size(item.resident_bytes), wide=True),
    Column("LOADED", lambda item: format_size(item.load_bytes_total), wide=True),
    Column("STORED", lambda item: format_size(item.store_bytes_total), wide=True),
    _field("NOTICE", "notice", wide=True),
)


TRANSFERS = (
    _field("OP", "op_id"),
    _field("DIRECTION", "direction"),
    _field("STATE", "state"),
    _field("POOL", "pool"),
    _field("SESSION", "session"),
    _field("BLOCKS", "blocks"),
    _field("SIZE", "bytes"),
    Column("AGE", lambda item: duration(item.age_seconds)),
    _field("REQUEST", "request_id"),
    Column("WAITS FOR", waits_for),
    _field("FAILED", "failed", wide=True),
)

OPERATIONS = (
    _field("ID", "id"),
    _field("POOL", "pool"),
    _field("KIND", "kind"),
    Column("STATE", lambda item: "waiting" if item.state == "running" and item.waiting else str(item.state)),
    Column("PROGRESS", _progress),
    Column("RESULT", _removed),
    Column("CREATED", lambda item: moment(item.created)),
    Column("ENDED", lambda item: moment(item.ended), wide=True),
    _field("ERROR", "error"),
)


TIERS = (
    _field("NAMESPACE", "namespace"),
    _field("POOL", "pool"),
    _field("STATE", "state"),
    Column("FETCHES", lambda item: rate(item.fetch_bytes_per_second)),
    Column("LOOKUP", lambda item: duration(item.lookup_seconds)),
    _field("TO PUT", "waiting_blocks"),
    Column("PUT", lambda item: f"{item.counters.put_blocks:,}"),
    Column("FETCHED", lambda item: f"{item.counters.fetched_blocks:,}"),
    Column("WAITED", lambda item: duration(item.counters.wait_seconds)),
    Column("SAVED", lambda item: duration(item.counters.saved_seconds)),
    Column("DECISION", lambda item: item.reason or item.decision),
    _field("FINGERPRINT", "fingerprint", wide=True),
    Column("CLIENTS", lambda item: "; ".join(map(_client, item.clients)), wide=True),
)


def _client(client: TierClient) -> str:
    health = client.health
    return f"{client.purpose} {health.state}" + (f" ({health.reason})" if health.reason else "")


LOG_LEVELS = (_field("LOGGER", "logger"), _field("LEVEL", "level"))

LISTS = {
    "pools": (POOLS, "name"),
    "sessions": (SESSIONS, "id"),
    "namespaces": (NAMESPACES, "name"),
    "ranks": (RANKS, "rank"),
    "blocks": (BLOCKS, "key"),
    "transfers": (TRANSFERS, "op_id"),
    "operations": (OPERATIONS, "id"),
    "tiers": (TIERS, "namespace"),
    "log-levels": (LOG_LEVELS, "logger"),
}
"""For each noun of `kvstow get` its columns, and the field that -o name prints: what other commands take."""
