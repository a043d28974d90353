"""The row of a session, on the status page and in `kvstow top`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvstow_api.client.decoding import decode
from kvstow_api.openapi import EXAMPLES
from kvstow_api.sessionrows import session_row
from kvstow_api.views.sessions import SessionRankView, SessionView

SESSION = decode(SessionView, EXAMPLES["SessionView"])


def test_the_row_of_a_session_says_what_it_holds() -> None:
    row = session_row(
        replace(SESSION, leased_slots=3, quarantined_slots=4, in_flight=0, age_seconds=90.0), on_node=True
    )
    assert (row.name, row.state, row.in_flight, row.oldest, row.holds) == (SESSION.id, "attached", "0", "-", "7")
    assert (row.age, row.trouble) == ("1 min", "")


@pytest.mark.parametrize(
    ("changes", "trouble"),
    [
        ({"state": "stuck", "oldest_seconds": 45.0, "in_flight": 1}, "its oldest transfer has been in flight for 45 s"),
        ({"state": "lost", "processes": 1, "quarantined_slots": 2}, "2 slots are kept because 1 worker may still copy"),
        ({"state": "lost", "processes": 0}, "its connection has ended"),
        ({"state": "attaching", "ranks": []}, "not all ranks have reported yet"),
        (
            {"state": "attaching", "ranks": [SessionRankView(rank=1, pid=7, device=None, registered_slots=0)]},
            "on rank 1",
        ),
        (
            {
                "state": "attaching",
                "ranks": [SessionRankView(rank=rank, pid=7, device=None, registered_slots=0) for rank in range(64)],
            },
            "no slot is registered yet on 64 ranks",
        ),
    ],
)
def test_the_trouble_of_a_session(changes: dict[str, Any], trouble: str) -> None:
    assert trouble in session_row(replace(SESSION, **changes), on_node=True).trouble


@pytest.mark.parametrize("on_node", [True, False])
def test_an_engine_in_trouble_can_be_detached_only_from_a_node(on_node: bool) -> None:
    row = session_row(replace(SESSION, state="stuck"), on_node=on_node)
    assert (f"kvstow detach {SESSION.id} --kill" in row.trouble) == on_node
