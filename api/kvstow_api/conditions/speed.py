"""Conditions of speed: clocks, links, and whether stored blocks are used."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvstow.bytesize import format_size
from kvstow.status import RankStatus
from kvstow_api.answers import ConditionView
from kvstow_api.conditions.evidence import Evidence, NothingToMeasure, make_condition, rank_name

CLOCK_SECONDS = 1.0
LINK_BYTES = 1 << 30  # below this a rank's rate means little
LINK_RATIO = 0.5
THRASHING_REUSE = 0.1


def find_clocks(evidence: Evidence) -> Iterator[ConditionView]:
    """Ranks whose clock differs from the server's."""
    if not evidence.clock_offsets:
        raise NothingToMeasure("no rank has sent its time")
    for rank, offset in sorted(evidence.clock_offsets.items()):
        if abs(offset) > CLOCK_SECONDS:
            yield make_condition(
                "warning",
                f"the clock of rank {rank} differs from the server's by {offset:+.1f} s",
                "log lines of the two cannot be ordered by time; KVStow itself does not depend on clocks",
                "synchronize the clock of that node (NTP, chrony)",
                rank=rank,
                offset_seconds=round(offset, 3),
            )


def find_links(evidence: Evidence) -> Iterator[ConditionView]:
    """Ranks that move bytes at less than half the rate of the fastest."""
    rates = {direction: _rates(evidence.reporting, direction) for direction in ("load", "store")}
    compared = {direction: of_ranks for direction, of_ranks in rates.items() if len(of_ranks) > 1}
    if not compared:
        raise NothingToMeasure(f"fewer than 2 ranks have moved {format_size(LINK_BYTES)} in one direction")
    for direction, of_ranks in compared.items():
        fastest = max(rate for _, rate in of_ranks)
        for rank, rate in of_ranks:
            if rate < LINK_RATIO * fastest:
                yield make_condition(
                    "warning",
                    f"{rank_name(evidence, rank)} {direction}s at {format_size(int(rate))}/s, "
                    f"the fastest rank at {format_size(int(fastest))}/s",
                    "a transfer ends when its slowest rank has finished, so this rank slows all of them down",
                    "compare PCIe width and generation (nvidia-smi -q), NUMA binding, and other users of the link",
                    rank,
                    bytes_per_second=rate,
                    fastest_bytes_per_second=fastest,
                )


def _rates(ranks: Iterable[RankStatus], direction: str) -> list[tuple[RankStatus, float]]:
    """Bytes per busy second, of the ranks that have moved at least `LINK_BYTES`. Engines of a node have ranks of the
    same numbers."""
    found = []
    for rank in ranks:
        if direction == "load":
            num_bytes, busy = rank.load_bytes_total, rank.load_busy_seconds
        else:
            num_bytes, busy = rank.store_bytes_total, rank.store_busy_seconds
        if num_bytes >= LINK_BYTES and busy > 0:
            found.append((rank, num_bytes / busy))
    return found


def find_thrashing(evidence: Evidence) -> Iterator[ConditionView]:
    """A pool that evicts blocks before they are reused."""
    samples = evidence.kept
    if len(samples) < 2:
        raise NothingToMeasure("the server has not sampled its counters for long enough")
    first, last = samples[0], samples[-1]
    evicted = last.stats.evicted_for_capacity - first.stats.evicted_for_capacity
    hits = last.stats.lookups.hit_blocks - first.stats.lookups.hit_blocks
    slots = last.stats.pool.usable_slots
    if slots and evicted >= slots and hits < THRASHING_REUSE * evicted:
        seconds = last.time - first.time
        yield make_condition(
            "warning",
            f"in {seconds:.0f} s {evicted} blocks were evicted from {slots} slots, for {hits} hits",
            "blocks are evicted before their prefix is requested again, so stores cost bandwidth and save little",
            "enlarge the pool, route requests with a common prefix to the same engine, or bypass stores",
            evicted_blocks=evicted,
            hit_blocks=hits,
            usable_slots=slots,
            window_seconds=seconds,
        )
