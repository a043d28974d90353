"""The row of a rank on the status page and in `kvstow top`: how far it has pinned its pool."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from kvstow.bytesize import format_size
from kvstow.status import RankStatus
from kvstow_api.numberformat import duration, rate

_REPORTS_ARE_FRESH = 5.0  # seconds; ranks report every second
_SHORTEST_WAIT = 1.0  # seconds


class RankRow(NamedTuple):
    """`progress` of pinning; `troubled`: a condition concerns the rank; `place`: host, pid and device, as far as known,
    and the session first if there are several."""

    rank: int
    state: str
    pinned_bytes: int
    target_bytes: int
    progress: str
    troubled: bool
    place: str


def rank_state(rank: RankStatus) -> str:
    """What the rank has last reported, unless that is old."""
    age = rank.last_report_age_seconds
    return f"silent for {duration(round(age))}" if age is not None and age > _REPORTS_ARE_FRESH else rank.state


def rank_rows(
    ranks: Sequence[RankStatus],
    *,
    pinning_paused: bool = False,
    troubled: Collection[tuple[str | None, int | None]] = (),
) -> tuple[RankRow, ...]:
    """`troubled`: sessions and numbers of ranks that a condition concerns."""
    several = len({rank.session for rank in ranks}) > 1
    return tuple(
        RankRow(
            rank.rank,
            rank_state(rank),
            rank.pinned_bytes,
            rank.target_bytes,
            _progress(rank, pinning_paused),
            (rank.session, rank.rank) in troubled,
            _place(rank, several),
        )
        for rank in ranks
    )


def select_ranks(ranks: Sequence[RankRow], most: int) -> list[RankRow]:
    """At most `most` ranks, in order: those that a condition concerns, then those that have pinned least."""
    first = sorted(range(len(ranks)), key=lambda number: (not ranks[number].troubled, ranks[number].pinned_bytes))
    return [ranks[number] for number in sorted(first[:most])]


def _progress(rank: RankStatus, paused: bool) -> str:
    size = format_size(rank.target_bytes)
    left = rank.target_bytes - rank.pinned_bytes
    if left <= 0:
        return size
    words, speed = f"{format_size(rank.pinned_bytes)} of {size}", rank.pin_rate_bytes_per_second
    if not speed or paused or rank.state != "pinning" or left / speed < _SHORTEST_WAIT:
        return words  # a rank of a node waits for memory that is being populated, and then pins it in no time
    return f"{words}, {rate(speed)}, {duration(left / speed)} left"


def _place(rank: RankStatus, several: bool) -> str:
    process = f"pid {rank.pid}" if rank.pid is not None else None
    return ", ".join(filter(None, (rank.session if several else None, rank.host, process, rank.device)))
