"""What is not as it should be, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar, Literal

from kvstow_api.views.base import View

Severity = Literal["info", "warning", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingView(View):
    """What was found by the check `check`, why it matters, what mends it, and the measured numbers it rests on."""

    check: str
    severity: Severity
    what: str
    why: str
    fix: str
    evidence: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorView(View):
    """`findings`, the worst first; `healthy` says that there is none but `info`. `skipped`: checks that had nothing
    to measure, and why."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {
        "json_schema_extra": {
            "examples": [
                {
                    "checked": "2026-11-02T09:30:00Z",
                    "healthy": False,
                    "findings": [
                        {
                            "check": "memory",
                            "severity": "error",
                            "what": "8.00 GiB are still to be pinned, and 2.00 GiB are left under the cgroup limit",
                            "why": "pinning stops short of the pool's size, or the kernel ends the process",
                            "fix": "raise the memory limit of the container, or make the pool smaller",
                            "evidence": {"needed_bytes": 8589934592, "headroom_bytes": 2147483648},
                        }
                    ],
                    "checks": ["memory", "huge_pages"],
                    "skipped": {"slow_link": "fewer than 2 ranks have moved 1.00 GiB"},
                }
            ]
        }
    }

    checked: datetime
    healthy: bool
    findings: list[FindingView]
    checks: list[str]
    skipped: dict[str, str]
