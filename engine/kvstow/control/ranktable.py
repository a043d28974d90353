"""The reports of the ranks, and what they mean for the pool as a whole."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

from kvstow.config import EngineConfig
from kvstow.errors import InvalidRequestError, NotFoundError
from kvstow.messages import DesiredState, RankFigures, RankReport, figures_of
from kvstow.status import RankStatus

_WITHOUT_COPIES = ("failed", "stopped")
"""States of a rank without a copy thread."""


@dataclass(slots=True)
class RankRecord:
    """The last report of a rank, and when it arrived. Before the first one, `report` is a stand-in without boot and
    slots, and `reported_at` is None."""

    report: RankReport
    reported_at: float | None = None


class RankTable:
    """The ranks 0 to `config.num_ranks` - 1. Not locked.

    A report is ignored if a newer one has arrived before: from the same sender with a larger number, or from a later
    sender. A rank with a new boot id has lost its memory.

    A rank unpins slots when the desired capacity is lowered, and reports it only later. So until every rank has
    reported that it has applied the last lowering, only the lowest desired capacity counts.
    """

    def __init__(self, config: EngineConfig, desired: DesiredState) -> None:
        self._ranks = [
            RankRecord(RankReport.without_pool(rank, "", "starting", config.slot_bytes_of(rank)))
            for rank in range(config.num_ranks)
        ]
        self.boots = ("",) * config.num_ranks
        """The current boot of each rank; empty before its first report."""
        self._config = config
        self._report_timeout = config.report_timeout
        self._gone: deque[tuple[int, str]] = deque(maxlen=16 * config.num_ranks)  # former senders
        self._desired = desired
        self._lowered = desired
        """The last lowering. Its capacity is the lowest since all ranks had applied the lowering before it."""

    def __len__(self) -> int:
        return len(self._ranks)

    def boot_id(self, rank: int) -> str:
        """Return the current boot of `rank`; empty before its first report. Raises `NotFoundError`."""
        return self._get(rank).report.boot_id

    def check(self, report: RankReport) -> None:
        """Raise `NotFoundError` or `InvalidRequestError` if the report cannot be from a rank of this pool."""
        self._get(report.rank)
        slot_bytes = self._config.slot_bytes_of(report.rank)
        if report.slot_bytes != slot_bytes:
            raise InvalidRequestError(
                f"rank {report.rank} reports slot_bytes {report.slot_bytes}; allowed: {slot_bytes}, as this rank's pool"
            )
        if not report.boot_id:
            raise InvalidRequestError(f"rank {report.rank} reports boot_id ''; allowed: a non-empty string")
        if report.applied > self._desired.number:
            raise InvalidRequestError(
                f"rank {report.rank} reports that it has applied desired state {report.applied}; "
                f"allowed: 0 to {self._desired.number}, the latest one sent"
            )

    def is_late(self, report: RankReport) -> bool:
        """Whether a newer report has arrived before this one. A report without a sender is never late, because its
        caller reports in order."""
        if not report.sender:
            return False
        last = self._ranks[report.rank].report
        if last.sender == report.sender:
            return report.number <= last.number
        return (report.rank, report.sender) in self._gone

    def is_of_another_process(self, report: RankReport) -> bool:
        """Whether another process has reported for this rank before."""
        return self._ranks[report.rank].report.sender not in ("", report.sender)

    def update(self, report: RankReport, now: float) -> bool:
        """Take a report that has passed `check` and is not late. Returns whether the rank has restarted."""
        record = self._ranks[report.rank]
        last, record.report, record.reported_at = record.report, report, now
        self.boots = tuple(one.report.boot_id for one in self._ranks)
        if not last.boot_id:
            return False
        if last.sender != report.sender:
            self._gone.append((report.rank, last.sender))
        return last.boot_id != report.boot_id

    def set_memory(self, rank: int, pinned_slots: int, applied: int) -> None:
        """Note that the rank has registered `pinned_slots` slots and has applied the desired state with the number
        `applied`. This holds until its next report."""
        record = self._get(rank)
        record.report = replace(record.report, pinned_slots=pinned_slots, applied=applied)

    def want(self, desired: DesiredState) -> None:
        """Send `desired` to the ranks from now on."""
        if desired.capacity_slots < self._desired.capacity_slots:
            known = self._all_have_applied(self._lowered)
            least = desired.capacity_slots if known else min(desired.capacity_slots, self._lowered.capacity_slots)
            self._lowered = replace(desired, capacity_slots=least)
        self._desired = desired

    def usable_slots(self) -> int:
        """Return how many slots every rank has pinned and will keep; 0 until all have reported."""
        pinned = min(record.report.pinned_slots for record in self._ranks)
        return pinned if self._all_have_applied(self._lowered) else min(pinned, self._lowered.capacity_slots)

    def have_all_applied(self, number: int) -> bool:
        """Whether every rank has reported that it has applied this desired state, or a later one."""
        return all(record.report.applied >= number for record in self._ranks)

    def _all_have_applied(self, desired: DesiredState) -> bool:
        """Whether all ranks that have reported have applied this desired state. The others know no desired state
        yet."""
        return all(record.report.applied >= desired.number for record in self._ranks if record.reported_at is not None)

    def can_copy(self) -> bool:
        """Whether every rank has reported and none has lost its copy thread."""
        return all(record.report.boot_id and record.report.state not in _WITHOUT_COPIES for record in self._ranks)

    def idle_since(self, rank: int, moment: float, now: float) -> bool:
        """Whether `rank` has reported after `moment`, and recently, that it works and has nothing under way. Then it
        has finished, or never received, an op planned at `moment`."""
        report, reported_at = self._ranks[rank].report, self._ranks[rank].reported_at
        if reported_at is None or report.state in _WITHOUT_COPIES or report.pending_ops:
            return False
        return reported_at > moment and now - reported_at <= self._report_timeout

    def uncollected(self, ranks: Iterable[int]) -> int:
        """Return how many completions of these ranks the host had not collected when they last reported."""
        return sum(self._ranks[rank].report.uncollected_completions for rank in ranks)

    def records(self) -> list[RankRecord]:
        return self._ranks

    def statuses(self, now: float, pool: str, session: str) -> tuple[RankStatus, ...]:
        return tuple(_status(record, now, pool, session) for record in self._ranks)

    def _get(self, rank: int) -> RankRecord:
        if not 0 <= rank < len(self._ranks):
            raise NotFoundError(f"rank is {rank}; allowed: 0 to {len(self._ranks) - 1}")
        return self._ranks[rank]


def _status(record: RankRecord, now: float, pool: str, session: str) -> RankStatus:
    age = None if record.reported_at is None else now - record.reported_at
    # Without __init__, which takes 5 us for the fields of a frozen dataclass: /readyz reads every rank four times.
    status = object.__new__(RankStatus)
    figures = figures_of(RankFigures, record.report)
    boot_id = record.report.boot_id or None
    vars(status).update(figures, boot_id=boot_id, last_report_age_seconds=age, pool=pool, session=session)
    return status
