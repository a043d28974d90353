"""What each rank has reported, and what follows for the pool as a whole."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from kvstow.config import EngineConfig
from kvstow.errors import InvalidRequestError, NotFoundError
from kvstow.messages import RankReport
from kvstow.stats import RankStatus


@dataclass(slots=True)
class RankRecord:
    """The last report of a rank, and when it came."""

    rank: int
    report: RankReport | None = None
    reported_at: float = 0.0
    most: int = sys.maxsize
    """The least that it may have been told to keep since what `report` says it has applied: no more slots count."""


class RankTable:
    """The ranks 0 to `config.num_ranks` - 1. Not locked.

    A rank with a new boot id has lost its memory. What an earlier boot says afterwards is not believed.

    Of the slots that a rank has reported only those count that it keeps. It gives slots back when the wanted capacity
    is lowered, and an older report may be the last one, or come late, while the capacity already grows again. So each
    lowering starts a new `generation`; until a rank reports under it, it counts for no more than was wanted since.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._ranks = [RankRecord(rank) for rank in range(config.num_ranks)]
        self._slot_bytes_of = config.slot_bytes_of
        self._report_timeout = config.report_timeout
        self._dead_boots: deque[tuple[int, str]] = deque(maxlen=16 * config.num_ranks)
        self.generation = 0

    def __len__(self) -> int:
        return len(self._ranks)

    def boot_id(self, rank: int) -> str | None:
        """The boot that `rank` is in; None before its first report. Raises `NotFoundError`."""
        report = self._get(rank).report
        return report.boot_id if report else None

    def check(self, report: RankReport) -> None:
        """Raises `NotFoundError` or `InvalidRequestError` if the report cannot be of a rank of this pool."""
        self._get(report.rank)
        slot_bytes = self._slot_bytes_of(report.rank)
        if report.slot_bytes != slot_bytes:
            raise InvalidRequestError(
                f"rank {report.rank} reports slot_bytes {report.slot_bytes}; allowed: {slot_bytes}, as this rank's pool"
            )
        if not report.boot_id:
            raise InvalidRequestError(f"rank {report.rank} reports boot_id ''; allowed: a non-empty string")
        if report.generation > self.generation:
            raise InvalidRequestError(
                f"rank {report.rank} reports generation {report.generation}; allowed: 0 to {self.generation}, "
                f"as it was told"
            )

    def is_late(self, report: RankReport) -> bool:
        """Whether the rank has left the boot or the generation that the report is of."""
        last = self._ranks[report.rank].report
        if last is not None and last.boot_id == report.boot_id:
            return report.generation < last.generation
        return (report.rank, report.boot_id) in self._dead_boots

    def update(self, report: RankReport, now: float, capacity_slots: int) -> bool:
        """Take a report that passed `check` and is not late; True if the rank has started anew. The rank is told of
        `capacity_slots` in answer."""
        record, old_boot = self._ranks[report.rank], self.boot_id(report.rank)
        record.report, record.reported_at = report, now
        if report.generation == self.generation:
            record.most = sys.maxsize
        elif report.boot_id != old_boot:
            record.most = capacity_slots
        if old_boot is None or old_boot == report.boot_id:
            return False
        self._dead_boots.append((report.rank, old_boot))
        return True

    def shrink(self, capacity_slots: int) -> None:
        """The ranks will be told to give back what lies above the lowered capacity."""
        self.generation += 1
        for record in self._ranks:
            record.most = min(record.most, capacity_slots)

    def usable_slots(self) -> int:
        """Slots that every rank has pinned, and keeps; 0 until all have reported."""
        return min(min(record.report.pinned_slots, record.most) if record.report else 0 for record in self._ranks)

    def can_copy(self) -> bool:
        """Whether every rank has reported and none has lost its copy thread."""
        return all(record.report and record.report.state not in ("failed", "stopped") for record in self._ranks)

    def idle_since(self, rank: int, moment: float, now: float) -> bool:
        """Whether `rank` has reported after `moment`, and not long ago, that it works and has nothing under way: an op
        planned at `moment` is then no longer this rank's to finish."""
        record = self._ranks[rank]
        report = record.report
        if report is None or report.state in ("failed", "stopped") or report.pending_ops:
            return False
        return record.reported_at > moment and now - record.reported_at <= self._report_timeout

    def uncollected(self, ranks: Iterable[int]) -> int:
        """Completions of these ranks that the host had not collected when they last reported."""
        reports = (self._ranks[rank].report for rank in ranks)
        return sum(report.uncollected_completions for report in reports if report is not None)

    def records(self) -> list[RankRecord]:
        return self._ranks

    def statuses(self, now: float) -> tuple[RankStatus, ...]:
        return tuple(self._status(record, now) for record in self._ranks)

    def _get(self, rank: int) -> RankRecord:
        if not 0 <= rank < len(self._ranks):
            raise NotFoundError(f"rank is {rank}; allowed: 0 to {len(self._ranks) - 1}")
        return self._ranks[rank]

    def _status(self, record: RankRecord, now: float) -> RankStatus:
        known = record.report or RankReport(
            record.rank, "", "starting", self._slot_bytes_of(record.rank), 0, 0, pinned_bytes=0, target_bytes=0
        )
        return RankStatus(
            **{name: getattr(known, name) for name in _SHARED_FIELDS},
            boot_id=known.boot_id or None,
            last_report_age_seconds=now - record.reported_at if record.report else None,
        )


_SHARED_FIELDS = (set(RankStatus.__dataclass_fields__) & set(RankReport.__dataclass_fields__)) - {"boot_id"}
