"""Numbers as people read them."""

from __future__ import annotations

from datetime import datetime

from kvstow.bytesize import format_size

ABSENT = "-"

STATE_STYLES = {
    "ready": "green",
    "succeeded": "green",
    "pinning": "cyan",
    "running": "cyan",
    "starting": "cyan",
    "draining": "yellow",
    "degraded": "yellow",
    "warning": "yellow",
    "stuck": "red",
    "failed": "red",
    "error": "red",
    "stopped": "red",
}
"""Colours of the words for states, where there are colours."""


def duration(seconds: float | None) -> str:
    """
    >>> [duration(x) for x in (None, 0.0042, 12.5, 200, 90061)]
    ['-', '4.2 ms', '12.5 s', '3m 20s', '25h 1m']
    """
    if seconds is None:
        return ABSENT
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, left = divmod(round(seconds), 60)
    return f"{minutes}m {left}s" if minutes < 60 else f"{minutes // 60}h {minutes % 60}m"


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


def moment(time: datetime | None) -> str:
    """In the reader's own time zone."""
    return ABSENT if time is None else time.astimezone().isoformat(sep=" ", timespec="seconds")


def counted(number: int, noun: str) -> str:
    """
    >>> counted(1, "block"), counted(1200, "block")
    ('1 block', '1,200 blocks')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def figure(name: str, value: object) -> str:
    """`value` of a view's field, whose name tells its unit."""
    match value:
        case None:
            return ABSENT
        case bool():
            return "yes" if value else "no"
        case datetime():
            return moment(value)
        case int() | float():
            return _number(name, value)
        case list():
            return ", ".join(figure(name, item) for item in value) or ABSENT
    return str(value) or ABSENT


def _number(name: str, value: float) -> str:
    if name.endswith("bytes_per_second"):
        return rate(value)
    if name.endswith(("bytes", "bytes_total", "_size")):
        return format_size(value)
    if "seconds" in name:
        return duration(value)
    if name.endswith("ratio"):
        return percent(value)
    return f"{value:,}" if isinstance(value, int) and name != "port" else f"{value:g}"
