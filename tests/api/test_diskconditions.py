"""The conditions of disks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.api.test_conditions import diagnose, evidence
from tests.api.tieredhost import STATUS

from kvstow.tier.blockstore import PartCounters, StorePart
from kvstow_api.answers import TierView
from kvstow_api.conditions.evidence import Evidence

DISK = StorePart(name="/mnt/nvme0", state="on", counters=PartCounters())


def disks(store: str = "disk", **changes: Any) -> Evidence:
    corrupt = changes.pop("corrupt", 0)
    view = TierView(
        store=store, url="/mnt/nvme0, /mnt/nvme1", items=[], parts=[DISK, replace(DISK, name="/mnt/nvme1", **changes)]
    )
    return evidence(tier=view, corrupt={"/mnt/nvme1": corrupt})


@pytest.mark.parametrize(
    ("changes", "name", "severity"),
    [
        ({"state": "failed", "reason": "Input/output error"}, "disk_ready", "error"),
        ({"state": "in use", "reason": "another process has its files"}, "disk_ready", "warning"),
        (
            {"state": "stuck", "reason": "an operation has taken more than 30 s", "stuck_slots": 3},
            "disk_stuck",
            "error",
        ),
        ({"drive_writes_per_day": 1.5, "written_bytes_today": 1 << 40}, "disk_wear", "warning"),
        ({"corrupt": 2}, "disk_corrupt", "error"),
    ],
)
def test_each_state_of_a_disk_is_a_condition(changes: dict[str, Any], name: str, severity: str) -> None:
    found = [one for one in diagnose(disks(**changes)).conditions if one.name.startswith("disk_")]
    assert [(one.name, one.severity) for one in found] == [(name, severity)]
    assert "/mnt/nvme1" in found[0].what


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"state": "starting", "reason": "its process starts"},
        {"drive_writes_per_day": 1.5, "write_budget_bytes": 1 << 40},
        {"drive_writes_per_day": 0.9},
        {"store": "mooncake", "state": "failed"},
    ],
)
def test_a_disk_that_works_is_none(changes: dict[str, Any]) -> None:
    assert not [one for one in diagnose(disks(**changes)).conditions if one.name.startswith("disk_")]


@pytest.mark.parametrize("state", ["failed", "in use", "stuck", "starting"])
def test_a_disk_that_does_not_work_is_told_once(state: Any) -> None:
    """Its pools use no store then, which has a text for stores that other machines run."""
    given = disks(state=state, reason="it is so")
    down = replace(STATUS, state="down", reason="it is so")
    found = diagnose(given._replace(tier=replace(given.tier, items=[down]))).conditions
    (one,) = [one for one in found if one.name.startswith(("disk_", "tier_"))]
    assert "it is so" in one.what
    assert "check that the store runs" not in one.fix
