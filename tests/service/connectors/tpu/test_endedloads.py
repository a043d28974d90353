"""The end of loads, as the hosts of an engine report it."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest

from kvstow.messages import StepPlan
from kvstow_service.connectors.engine_core.stepplan import LoadId, PlannedStep
from kvstow_service.connectors.tpu.support import EndedLoads


def plan(step: int, *loads: str, lost: tuple[str, ...] = ()) -> PlannedStep:
    return PlannedStep(step, StepPlan(()), StepPlan(()), loads, dict.fromkeys(lost, (1,)))


def test_a_load_has_ended_when_every_host_has_reported_it() -> None:
    """vLLM would wait for a worker for each chip, or believe the first host."""
    ended = EndedLoads()
    ended.expect(plan(1, "a", "b", lost=("c",)))
    ended.add(0, [LoadId("a", 1), LoadId("c", 1)], 2)
    assert ended.take_ended() == set()
    ended.add(1, [LoadId("c", 1), LoadId("b", 1)], 2)
    assert ended.take_ended() == {"c"}
    ended.add(1, [LoadId("a", 1)], 2)
    ended.add(0, [LoadId("b", 1)], 2)
    assert ended.take_ended() == {"a", "b"}
    assert ended.take_ended() == set()
    assert ended.stale == 0


def test_a_word_that_is_said_twice_or_late_counts_for_no_other_load() -> None:
    ended = EndedLoads()
    ended.expect(plan(1, "a"))
    for rank in (0, 0, 1):
        ended.add(rank, [LoadId("a", 1)], 2)
    assert ended.take_ended() == {"a"}
    ended.expect(plan(5, "a"))
    for _ in range(3):
        ended.add(0, [LoadId("a", 1), LoadId("a", 5)], 2)
    assert ended.take_ended() == set()
    assert ended.stale == 6
    ended.add(1, [LoadId("a", 5)], 2)
    assert ended.take_ended() == {"a"}


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_in_any_order_each_load_ends_once(num_ranks: int) -> None:
    random = Random(num_ranks)
    for _ in range(300):
        ended = EndedLoads()
        loads = [LoadId(f"request {number}", number % 3) for number in range(8)]
        for step in range(3):
            ended.expect(plan(step, *(load.request_id for load in loads if load.step == step)))
        words = list(product(range(num_ranks), loads))
        said = words + random.choices(words, k=6)
        random.shuffle(said)
        seen: list[str] = []
        told: dict[LoadId, set[int]] = {load: set() for load in loads}
        for rank, load in said:
            ended.add(rank, [load], num_ranks)
            told[load].add(rank)
            for name in ended.take_ended():
                assert len(next(ranks for one, ranks in told.items() if one.request_id == name)) == num_ranks
                seen.append(name)
        assert sorted(seen) == sorted(load.request_id for load in loads)
        assert ended.stale == 6
