"""What an operator has switched off, in words."""

from __future__ import annotations

from typing import Any

import pytest

from kvstow.status import BypassStatus, DrainStatus
from kvstow_api.switches import Switch, switches

OPEN = BypassStatus(load=False, store=False, ttl_seconds_left=None)
NO_DRAIN = DrainStatus(False, None, None, False, 0, 0)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, []),
        ({"bypass": BypassStatus(True, True, None)}, [("loads and stores are bypassed", "kvstow bypass --off")]),
        (
            {"bypass": BypassStatus(False, True, 90.0)},
            [("stores are bypassed for another 1m 30s", "kvstow bypass --off")],
        ),
        ({"paused": ["host"]}, [("pinning is paused", "kvstow pinning resume")]),
        (
            {"paused": ["a-1"], "several": True},
            [("pinning is paused in pool a-1", "kvstow pinning resume --pool a-1")],
        ),
        (
            {"drain": DrainStatus(True, "all", 30.0, False, 2, 1)},
            [("draining: 2 transfers and 1 lease left, 30 s until the deadline", "kvstow undrain")],
        ),
        (
            {"drain": DrainStatus(True, "stop_stores", None, False, 1, 0)},
            [("draining (loads continue): 1 transfer and 0 leases left", "kvstow undrain")],
        ),
        (
            {"drain": DrainStatus(True, "all", None, True, 0, 0)},
            [("drained: nothing is in flight", "kvstow undrain")],
        ),
    ],
)
def test_switches_come_with_the_command_that_undoes_them(changes: dict[str, Any], told: list[Switch]) -> None:
    given = {"drain": NO_DRAIN, "bypass": OPEN, **changes}
    assert list(switches(**given)) == told
