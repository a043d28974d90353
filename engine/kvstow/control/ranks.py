"""What each rank has reported, and what follows for the pool as a whole."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from operator import attrgetter

from kvstow.config import EngineConfig
from kvstow.errors import InvalidRequestError, NotFoundError
from kvstow.messages import DesiredState, RankFigures, RankReport
from kvstow.status import RankStatus


@dataclass(slots=True)
class RankRecord:
    """The last report of a rank, and when it came."""

    rank: int
    report: RankReport | None = None
    reported_at: float = 0.0


class RankTable:
    """The ranks 0 to `config.num_ranks` - 1. Not locked.

    A report counts unless a later one has arrived before it: from the same sender with a larger number, or from the
    sender that followed it. A rank with a new boot id has lost its memory.

    A rank gives slots back when the wanted capacity is lowered, and says so with a later report. So until every rank
    has reported that it has applied the last lowering, only the lowest wanted capacity counts.
    """

    def __init__(self, config: EngineConfig, desired: DesiredState) -> None:
        self._ranks = [RankRecord(rank) for rank in range(config.num_ranks)]
        self._slot_bytes_of = config.slot_bytes_of
        self._report_timeout = config.report_timeout
        self._gone: deque[tuple[int, str]] = deque(maxlen=16 * config.num_ranks)  # former senders
        self._desired = desired
        self._lowered = desired
        """The last lowering; its capacity is the lowest since all ranks had applied the one before."""

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
        if report.applied > self._desired.number:
            raise InvalidRequestError(
                f"rank {report.rank} reports that it has applied desired state {report.applied}; "
                f"allowed: 0 to {self._desired.number}, as it was told"
            )

    def is_late(self, report: RankReport) -> bool:
        """Whether a later report has arrived before this one."""
        last = self._ranks[report.rank].report
        if last is not None and last.sender == report.sender:
            return report.number <= last.number
        return (report.rank, report.sender) in self._gone

    def update(self, report: RankReport, now: float) -> bool:
        """Take a report that passed `check` and is not late; True if the rank has restarted."""
        record = self._ranks[report.rank]
        last, record.report, record.reported_at = record.report, report, now
        if last is None:
            return False
        if last.sender != report.sender:
            self._gone.append((report.rank, last.sender))
        return last.boot_id != report.boot_id

    def want(self, desired: DesiredState) -> None:
        """The ranks are told of `desired` from now on."""
        if desired.capacity_slots < self._desired.capacity_slots:
            known = self._all_have_applied(self._lowered)
            least = desired.capacity_slots if known else min(desired.capacity_slots, self._lowered.capacity_slots)
            self._lowered = replace(desired, capacity_slots=least)
        self._desired = desired

    def usable_slots(self) -> int:
        """Slots that every rank has pinned, and keeps; 0 until all have reported."""
        pinned = min(record.report.pinned_slots if record.report else 0 for record in self._ranks)
        return pinned if self._all_have_applied(self._lowered) else min(pinned, self._lowered.capacity_slots)

    def _all_have_applied(self, desired: DesiredState) -> bool:
        """Of the ranks that have reported; the others know no desired state yet."""
        reports = [record.report for record in self._ranks if record.report is not None]
        return all(report.applied >= desired.number for report in reports)

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
        report = record.report
        if report is None:
            return RankStatus(record.rank, None, "starting", self._slot_bytes_of(record.rank), 0, 0, 0, 0)
        return RankStatus(*_figures_of(report), last_report_age_seconds=now - record.reported_at)


_figures_of = attrgetter(*RankFigures.__dataclass_fields__)
