"""Numbers as people read them. Standard library only: clients write them, too."""

from __future__ import annotations

from kvstow.bytesize import format_size

ABSENT = "-"


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


def counted(number: int, noun: str) -> str:
    """
    >>> counted(1, "block"), counted(1200, "block")
    ('1 block', '1,200 blocks')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
