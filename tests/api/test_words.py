"""What the status page and `kvstow top` say of switches and ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.api.test_doctor import GIB, RANK

from kvstow.status import BypassStatus, DrainStatus
from kvstow_api.words import Switch, most_telling, pin_progress, rank_trouble, switched

OPEN = BypassStatus(load=False, store=False, ttl_seconds_left=None)
NO_DRAIN = DrainStatus(False, None, None, False, 0, 0)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, []),
        ({"bypass": BypassStatus(True, True, None)}, [("loads and stores are bypassed", "kvstow bypass --off")]),
        ({"bypass": BypassStatus(False, True, 90.0)}, [("stores are bypassed for 1m 30s more", "kvstow bypass --off")]),
        ({"pinning_paused": True}, [("pinning is paused", "kvstow pinning resume")]),
        (
            {"drain": DrainStatus(True, "all", 30.0, False, 2, 1)},
            [("draining: 2 transfers and 1 lease are left, 30 s until the deadline", "kvstow undrain")],
        ),
        (
            {"drain": DrainStatus(True, "all", None, True, 0, 0)},
            [("drained: nothing is in flight", "kvstow undrain")],
        ),
    ],
)
def test_a_switch_is_told_with_what_undoes_it(changes: dict[str, Any], told: list[Switch]) -> None:
    given = {"drain": NO_DRAIN, "bypass": OPEN, "pinning_paused": False, **changes}
    assert list(switched(given.pop("drain"), given.pop("bypass"), **given)) == told


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, "8 GiB"),
        ({"pinned_bytes": 2 * GIB}, "2 GiB of 8 GiB"),
        (
            {"pinned_bytes": 2 * GIB, "state": "pinning", "pin_rate_bytes_per_second": GIB / 2},
            "2 GiB of 8 GiB, 512 MiB/s, 12 s left",
        ),
        ({"pinned_bytes": 2 * GIB, "state": "degraded", "pin_rate_bytes_per_second": GIB / 2}, "2 GiB of 8 GiB"),
    ],
)
def test_the_time_that_is_left_is_told_of_a_rank_that_pins(changes: dict[str, Any], told: str) -> None:
    assert pin_progress(replace(RANK, **changes)) == told


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, ""),
        ({"last_report_age_seconds": None}, ""),
        ({"error_reason": "memlock", "error": "no more"}, "memlock: no more"),
        ({"last_report_age_seconds": 75.0}, "last report 1m 15s ago"),
        ({"error": "no more", "last_report_age_seconds": 8.0}, "no more; last report 8 s ago"),
    ],
)
def test_a_rank_that_is_silent_or_has_an_error_is_in_trouble(changes: dict[str, Any], told: str) -> None:
    assert rank_trouble(replace(RANK, **changes)) == told


def test_ranks_in_trouble_are_never_left_out_for_those_that_are_well() -> None:
    ranks = [replace(RANK, rank=number, pinned_bytes=number * GIB) for number in range(6)]
    ranks[5] = replace(ranks[5], error="no more")
    assert [rank.rank for rank in most_telling(ranks, 3)] == [0, 1, 5]
