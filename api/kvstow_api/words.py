"""What the status page and `kvstow top` say alike. No web framework: clients import it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from kvstow.bytesize import format_size
from kvstow.status import BypassStatus, DrainStatus, RankStatus, TransferStatus
from kvstow_api.history import NowView
from kvstow_api.numberformat import counted, duration, percent, rate

NOT_PINNED = "not pinned"
"""What the slots are called that the pool is still to get."""

_REPORTS_ARE_FRESH = 5.0  # seconds; ranks report every second
_NAMED_RANKS = 3


class Switch(NamedTuple):
    """Something that an operator has switched; `undo` is the command that ends it."""

    words: str
    undo: str


def switched(drain: DrainStatus, bypass: BypassStatus, *, pinning_paused: bool) -> Iterator[Switch]:
    """All that is not as it is at the start."""
    if drain.active:
        yield Switch(_drained(drain), "kvstow undrain")
    off = bypassed(load=bypass.load, store=bypass.store)
    if off:
        left = bypass.ttl_seconds_left
        until = "" if left is None else f" for {duration(left)} more"
        yield Switch(f"{' and '.join(off)} are bypassed{until}", "kvstow bypass --off")
    if pinning_paused:
        yield Switch("pinning is paused", "kvstow pinning resume")


def bypassed(*, load: bool, store: bool) -> list[str]:
    """What is off."""
    return [name for name, is_off in (("loads", load), ("stores", store)) if is_off]


def pin_progress(rank: RankStatus) -> str:
    """How much of its memory a rank has pinned; how fast, and how long it will take, while it does."""
    size = format_size(rank.target_bytes)
    left = rank.target_bytes - rank.pinned_bytes
    if left <= 0:
        return size
    words, speed = f"{format_size(rank.pinned_bytes)} of {size}", rank.pin_rate_bytes_per_second
    return f"{words}, {rate(speed)}, {duration(left / speed)} left" if speed and rank.state == "pinning" else words


def rank_trouble(rank: RankStatus) -> str:
    """What is wrong with a rank as far as it has said, and whether it still speaks; empty where all is well."""
    error = ": ".join(part for part in (rank.error_reason, rank.error) if part)
    age = rank.last_report_age_seconds
    silence = f"last report {duration(age)} ago" if age is not None and age > _REPORTS_ARE_FRESH else ""
    return "; ".join(part for part in (error, silence) if part)


def most_telling(ranks: Iterable[RankStatus], most: int) -> list[RankStatus]:
    """At most so many ranks: those in trouble, then those that have pinned least. In the order of their numbers."""
    first = sorted(ranks, key=lambda rank: (not rank_trouble(rank), rank.pinned_bytes))
    return sorted(first[:most], key=lambda rank: rank.rank)


def hit_ratio_now(now: NowView) -> str:
    """Of the blocks that were looked up in the last seconds."""
    return "no look-ups" if now.hit_ratio is None else percent(now.hit_ratio)


def block_movement(now: NowView) -> str:
    """Blocks evicted now to make room for others, and blocks not taken."""
    evicted, dropped = _per_second(now.evicted_blocks_per_second), _per_second(now.dropped_blocks_per_second)
    return f"now {evicted} for room, {dropped} dropped"


def _per_second(blocks: float | None) -> str:
    return f"{blocks or 0.0:.1f} blocks/s"


def transfer_wait(one: TransferStatus) -> str:
    """How much a transfer moves, how long that has taken, and whom it waits for."""
    return f"{counted(one.blocks, 'block')}, {duration(one.age_seconds)}, waits for {waits_for(one)}"


def waits_for(one: TransferStatus) -> str:
    """Ranks that work on the transfer; the host where none does."""
    busy = [rank for rank in one.pending_ranks if rank not in one.idle_ranks]
    if one.idle_ranks and not busy:
        return "the host"
    return f"{len(busy)} ranks" if len(busy) > _NAMED_RANKS else f"rank {', '.join(map(str, busy))}"


def _drained(drain: DrainStatus) -> str:
    if drain.drained:
        return "drained: nothing is in flight"
    words = f"draining: {counted(drain.pending_transfers, 'transfer')} and {counted(drain.leases, 'lease')} are left"
    left = drain.deadline_seconds_left
    return words if left is None else f"{words}, {duration(left)} until the deadline"
