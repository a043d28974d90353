"""Numbers as people read them."""

from __future__ import annotations

from datetime import datetime

from kvstow.bytesize import format_size
from kvstow_api.figures import ABSENT, duration, percent, rate

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


def moment(time: datetime | None) -> str:
    """In the reader's own time zone."""
    return ABSENT if time is None else time.astimezone().isoformat(sep=" ", timespec="seconds")


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


_SIZES = {"bytes", "size", "chunk"}
_TIMES = {"seconds", "timeout", "delay", "deadline", "pause", "latency"}


def _number(name: str, value: float) -> str:
    words = set(name.split("_"))
    if name.endswith("bytes_per_second"):
        return rate(value)
    if words & _SIZES:
        return format_size(value)
    if words & _TIMES:
        return duration(value)
    if name.endswith("ratio"):
        return percent(value)
    return f"{value:,}" if isinstance(value, int) and name != "port" else f"{value:g}"
