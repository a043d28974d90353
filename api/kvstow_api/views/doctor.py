"""The findings of the doctor."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

Severity = Literal["info", "warning", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingView:
    """What the check `check` found, why it matters, how to fix it, and the measured numbers behind it. `pool` and
    `session`: what it is about; null for the host."""

    check: str
    severity: Severity
    pool: str | None = None
    session: str | None = None
    what: str
    why: str
    fix: str
    evidence: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorView:
    """`findings`, the worst first; `healthy` if none is worse than `info`. `skipped`: checks that had nothing to
    measure, and why."""

    checked: datetime
    healthy: bool
    findings: list[FindingView]
    checks: list[str]
    skipped: dict[str, str]
