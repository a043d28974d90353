"""Shows numbers, times, values of fields and switches as text for people. It uses only the standard library, so that
clients can import it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from kvstow.bytesize import format_size
from kvstow.status import HOST_NAME, BypassStatus, DrainStatus, MemoryStatus

ABSENT = "-"


def duration(seconds: float | None) -> str:
    """
    >>> [duration(x) for x in (None, 0.0042, 12.5, 200, 600, 90061)]
    ['-', '4.2 ms', '12.5 s', '3m 20s', '10m', '25h 1m']
    """
    if seconds is None:
        return ABSENT
    if seconds < 0.9995:  # the unit depends on the three digits that are shown
        return f"{seconds * 1000:.3g} ms"
    if seconds < 59.95:
        return f"{seconds:.3g} s"
    minutes, left = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m {left}s" if left else f"{minutes}m"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes}m" if minutes else f"{hours}h"


def rate(per_second: float | None) -> str:
    """
    >>> rate(3 << 30)
    '3 GiB/s'
    """
    return ABSENT if per_second is None else f"{format_size(per_second)}/s"


def percent(ratio: float | None) -> str:
    """
    >>> percent(0.6123)
    '61.2 %'
    """
    return ABSENT if ratio is None else f"{ratio * 100:.1f} %"


def per_second(number: float | None) -> str:
    """
    >>> per_second(1234.56)
    '1,234.6/s'
    """
    return ABSENT if number is None else f"{number:,.1f}/s"


def count(number: int | None) -> str:
    """
    >>> count(1234), count(None)
    ('1,234', '-')
    """
    return ABSENT if number is None else f"{number:,}"


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Return a number and its noun. Without `plural`, the plural is the noun with an s.

    >>> counted(1, "block"), counted(1200, "block")
    ('1 block', '1,200 blocks')
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def moment(time: datetime | None) -> str:
    return ABSENT if time is None else time.astimezone().isoformat(sep=" ", timespec="seconds")


def field_text(name: str, value: object) -> str:
    """Return the value of a view's field as text. The name of the field tells the unit.

    >>> field_text("load_bytes", 2048), field_text("timeout", 2.5), field_text("hit_ratio", 0.5)
    ('2 KiB', '2.5 s', '50.0 %')
    >>> field_text("load_bytes_per_second", 2048.0), field_text("blocks_per_second", 12.34)
    ('2 KiB/s', '12.3/s')
    >>> field_text("blocks", 1234), field_text("op_id", 12345), field_text("paused", True), field_text("error", None)
    ('1,234', '12345', 'yes', '-')
    """
    match value:
        case None:
            return ABSENT
        case bool():
            return "yes" if value else "no"
        case datetime():
            return moment(value)
        case int() | float():
            return _number(name, value)
        case list() | tuple():
            return ", ".join(field_text(name, item) for item in value) or ABSENT
    return str(value) or ABSENT


_SIZES = {"bytes", "size", "chunk", "memory"}
_TIMES = {"seconds", "timeout", "delay", "deadline", "pause", "latency", "eof", "budget"}
_IDENTIFIERS = {"port", "pid", "rank", "slot", "id", "ranks"}
"""Words in the names of fields whose numbers identify something. They are shown without separators."""


def _number(name: str, value: float) -> str:
    words = set(name.split("_"))
    if name.split("_")[-1] in _IDENTIFIERS and not name.startswith("num_"):
        return str(value)
    if name.endswith("bytes_per_second"):
        return rate(value)
    if name.endswith("per_second"):
        return per_second(value)
    if words & _SIZES:
        return format_size(value)
    if words & _TIMES:
        return duration(value)
    if name.endswith("ratio"):
        return percent(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def populate_words(memory: MemoryStatus) -> str:
    """Say how much of a node's memory is populated and, if known, how fast that goes and how long it will still
    take."""
    size = f"{format_size(memory.populated_bytes)} of {format_size(memory.target_bytes)}"
    return f"{size} of memory are populated{pace_words(memory)}"


def pace_words(memory: MemoryStatus) -> str:
    """Say how fast memory is populated, and how long it will still take. The text continues other words. It is empty if
    this is unknown."""
    pace, left = memory.populate_bytes_per_second, memory.target_bytes - memory.populated_bytes
    return f", {rate(pace)}, about {duration(left / pace)} left" if pace and left > 0 else ""


def bypassed(bypass: BypassStatus) -> list[str]:
    return [name for name, is_off in (("loads", bypass.load), ("stores", bypass.store)) if is_off]


def bypass_words(bypass: BypassStatus) -> str:
    off, left = bypassed(bypass), bypass.ttl_seconds_left
    if not off:
        return "nothing is bypassed"
    return f"{' and '.join(off)} are bypassed" + ("" if left is None else f" for another {duration(left)}")


def drain_words(drain: DrainStatus) -> str:
    if not drain.active:
        return "nothing is drained: new requests are served"
    if drain.drained:
        return "drained: nothing is in flight"
    stays = " (loads continue)" if drain.mode == "stop_stores" else ""
    words = f"draining{stays}: {counted(drain.pending_transfers, 'transfer')} and {counted(drain.leases, 'lease')} left"
    left = drain.deadline_seconds_left
    return words if left is None else f"{words}, {duration(left)} until the deadline"


def event_words(kind: str, data: Mapping[str, Any]) -> str:
    """Describe an event, such as an entry of the journal. `data` is that of an `EventView` of this type.

    >>> event_words("rank", {"pool": "a", "session": "s1", "rank": 0, "state": "degraded", "error": "no memory"})
    'rank 0 of session s1 is degraded: no memory'
    """
    match kind:
        case "state":
            subject = "the node" if data["pool"] is None else f"pool {data['pool']}"
            words = f"{subject} is {data['state']}: {data['reason']}"
        case "session":
            about = ", ".join(filter(None, (data["engine"], f"pool {data['pool']}")))
            words = f"session {data['session']} ({about}) is {data['state']}: {data['reason']}"
        case "rank":
            of_session = "" if data["pool"] == HOST_NAME else f" of session {data['session']}"
            words = f"rank {data['rank']}{of_session} is {data['state']}{_continued(data['error'])}"
        case "tier":
            words = f"the store below {data['namespace']} is {data['state']}{_continued(data['reason'])}"
        case "operation":
            noun = f"dry run of {data['kind']}" if data["dry_run"] else data["kind"]
            words = f"{noun} in pool {data['pool']} {data['state']}{_continued(data['error'])}"
        case "change":
            words = f"{data['method']} {data['path']} by {data['actor']}"
        case "stored" | "removed":
            why = f" ({data['reason']})" if "reason" in data else ""
            words = f"{counted(len(data['keys']), 'block')} in pool {data['pool']}{why}: {' '.join(data['keys'])}"
        case "lost":
            number = data["count"]
            words = "the server has started anew" if number is None else f"{counted(number, 'event')} came too fast"
        case _:
            words = ", ".join(f"{name} {value}" for name, value in data.items())
    return words


def _continued(reason: str | None) -> str:
    return f": {reason}" if reason else ""
