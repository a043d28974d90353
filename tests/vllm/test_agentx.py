"""The agents of `bench.vllm agentx`: what each of them asks, and after which pause; and which rows fit into a lease."""

from __future__ import annotations

from itertools import islice

import pytest
from bench.vllm.agentx import Lease, Turn, make_fleet, turns_of
from tests.doubles.fakes import FakeClock

from kvstow_service.replay.trace import TraceRequest

pytestmark = pytest.mark.vllm


def request(context: str, at: float, ended: float) -> TraceRequest:
    """At these seconds of the trace."""
    return TraceRequest(
        timestamp=at * 1e3, input_length=512, output_length=8, hash_ids=(1,), context=context, end=ended * 1e3
    )


def test_a_pause_is_that_before_its_own_turn() -> None:
    times = ((0, 5), (7, 8), (20, 21), (22, 25))
    fleet = make_fleet([request("one", *each) for each in times], scale=1, longest=1000, vocabulary=100)
    (turns,) = fleet.contexts
    assert [turn.pause for turn in turns] == [0, 2, 12, 1]


def test_an_agent_begins_at_once_in_the_middle_and_repeats_contexts_with_other_tokens() -> None:
    contexts = [[Turn(10.0 * name + at, (name,), 8, 1) for at in range(8)] for name in (1, 2, 3)]
    asked = list(islice(turns_of(1, 2, contexts), 24))
    (_, begun), *rest = asked
    number = 8 - sum(turn.blocks == (2,) for _, turn in asked[:8])
    assert 0 < number < 7, "another one than the first"
    assert begun == contexts[1][number]._replace(pause=0.0)
    expected = [(0, turn) for turn in contexts[1][number + 1 :]]
    expected += [(1, turn) for turn in contexts[0]] + [(1, turn) for turn in contexts[2]]
    assert rest[: len(expected)] == expected


def test_no_row_begins_that_would_end_too_late() -> None:
    clock = FakeClock()
    lease = Lease(100.0, clock)
    assert lease.begin(starts=True)
    clock.advance(60.0)
    lease.end(starts=True)
    assert lease.begin(starts=False), "nothing is known of rows whose server runs already"
    clock.advance(15.0)
    lease.end(starts=False)
    assert not lease.begin(starts=True)
    assert lease.begin(starts=False)
    clock.advance(11.0)
    lease.end(starts=False)
    assert not lease.begin(starts=False), "15 seconds would be one too many"
