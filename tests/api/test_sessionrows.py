"""The row of a session, on the status page and in `kvstow top`."""

from __future__ import annotations

from dataclasses import replace

from kvstow.status import SessionStatus
from kvstow_api.client.decoding import decode
from kvstow_api.openapi import EXAMPLES
from kvstow_api.sessionrows import session_row

SESSION = decode(SessionStatus, EXAMPLES["SessionStatus"])


def test_the_row_of_a_session_says_what_it_holds() -> None:
    row = session_row(replace(SESSION, leased_slots=3, quarantined_slots=4, in_flight=0, age_seconds=90.0))
    assert (row.name, row.state, row.in_flight, row.oldest, row.holds) == (SESSION.id, "attached", "0", "-", "7")
    assert (row.age, row.troubled) == ("1 min", False)
