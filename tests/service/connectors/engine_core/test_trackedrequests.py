"""What is known of a request: its keys, and how much of it is confirmed."""

from __future__ import annotations

import pytest
from tests.service.connectors.engine_core.vllmhost import FULL, LARGE, FakeRequest, hashes_of, keys_of

from kvstow.results import Lease
from kvstow_service.connectors.engine_core.kvgroups import KVGroups
from kvstow_service.connectors.engine_core.trackedrequests import Hit, TrackedRequest

GROUPS = KVGroups((FULL, LARGE), 6)


def test_a_block_is_named_by_its_group_and_its_last_hash() -> None:
    tracked = TrackedRequest(FakeRequest("r", "abcdefghijklmn"), 2)
    hashes = hashes_of("abcdefghijklmn")
    assert tracked.keys(FULL, 1, 3) == [b"\0\0" + hashes[1], b"\0\0" + hashes[2]]
    assert tracked.keys(LARGE, 0, 2) == [b"\0\1" + hashes[2], b"\0\1" + hashes[5]]


def test_there_are_no_keys_beyond_the_hashes() -> None:
    tracked = TrackedRequest(FakeRequest("r", "abcdefg"), 2)
    assert len(tracked.keys(FULL, 0, 9)) == 3
    assert len(tracked.keys(LARGE, 0, 9)) == 1
    assert tracked.keys(LARGE, 1, 9) == []


def test_keys_follow_a_request_that_grows() -> None:
    request = FakeRequest("r", "abcde")
    tracked = TrackedRequest(request, 2)
    assert tracked.keys(FULL, 0, 9) == keys_of("abcd")
    request.tokens += "fgh"
    assert tracked.keys(FULL, 0, 9) == keys_of("abcdefgh")
    assert tracked.keys(LARGE, 0, 9) == keys_of("abcdef", LARGE)


def test_keys_of_another_prompt_are_forgotten() -> None:
    """A streamed request goes on with another prompt, longer or shorter."""
    for other in ("abXdefghij", "XYZ", "abcd"):
        request = FakeRequest("r", "abcdefgh")
        tracked = TrackedRequest(request, 2)
        tracked.keys(FULL, 0, 9)
        tracked.keys(LARGE, 0, 9)
        request.tokens = other
        tracked.forget_stale_keys(GROUPS)
        assert tracked.keys(FULL, 0, 9) == keys_of(other)
        assert tracked.keys(LARGE, 0, 9) == keys_of(other, LARGE)


@pytest.mark.parametrize(
    ("fetched", "count"),
    [
        ((), 0),
        ((range(4, 8),), 4),
        ((range(6), range(14, 20)), 4),
        ((range(8, 12), range(4, 10), range(6, 8)), 8),
        ((range(40),), 12),
    ],
)
def test_tokens_that_the_tier_has_brought_are_counted_once(fetched: tuple[range, ...], count: int) -> None:
    assert Hit(0, 20, Lease(1), fetched=fetched).fetched_tokens(4, 16) == count


def test_tokens_of_a_step_in_flight_are_not_confirmed() -> None:
    request = FakeRequest("r", "abcdefgh")
    request.num_computed_tokens, request.num_output_placeholders = 6, 2
    assert TrackedRequest(request, 1).confirmed_tokens == 4


def test_new_tables_have_not_been_offered() -> None:
    tracked = TrackedRequest(FakeRequest("r", "abcdefghijklmn"), 2)
    tracked.has_run = True
    tracked.offered_tokens = 4
    tracked.give_tables([[1, 2], [3]], 5)
    assert (tracked.tables, tracked.offered_tokens) == ([[1, 2], [3]], 0)
    assert (tracked.admitted_at, tracked.has_run) == (5, False)
