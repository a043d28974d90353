"""The conditions of a server: what is wrong, whom it concerns, and what mends it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

Severity = Literal["info", "warning", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionView:
    """Something that an operator should know: its cause, why it matters, the command that mends it, and the measured
    numbers behind it. `pool`, `session` and `rank`: whom it concerns; null for the host. `name` is that of the metric
    `kvstow_condition` and of the alerts."""

    name: str
    severity: Severity
    pool: str | None = None
    session: str | None = None
    rank: int | None = None
    what: str
    why: str
    fix: str
    evidence: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorView:
    """`conditions`, the worst first; `healthy` if none is worse than `info`. `checked` names those that were looked
    for; `skipped`: those for which there was nothing to measure, and why."""

    time: datetime
    healthy: bool
    conditions: list[ConditionView]
    checked: list[str]
    skipped: dict[str, str]
