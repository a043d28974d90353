from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.doubles.fakes import FakeClock

from kvstow.prefill import PromptPart
from kvstow.stats import LOAD_CHOICES
from kvstow_service.connectors.engine_core.loadpolicy import LoadPath, LoadPolicy
from kvstow_service.connectors.engine_core.trackedrequests import Choice

MIB = 1 << 20


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def make(
    clock: FakeClock, path: LoadPath = "auto", budget: float = 0.01, *, layer: float = 1000, whole: float = 1000
) -> LoadPolicy:
    """Slots of 1 MiB, of which a link brings so many a second by layer, and before the step."""
    policy = LoadPolicy(path, budget, MIB, clock)
    policy.measured(1000 * MIB, 1000 / layer, by_layer=True)
    policy.measured(1000 * MIB, 1000 / whole, by_layer=False)
    return policy


_numbers = itertools.count(1)


def plan(policy: LoadPolicy, **scheduled: int) -> int:
    """Returns the number of the step."""
    number = next(_numbers)
    policy.planned(number, SimpleNamespace(num_scheduled_tokens=scheduled))
    return number


def run_step(policy: LoadPolicy, clock: FakeClock, seconds: float, **scheduled: int) -> None:
    number = plan(policy, **scheduled)
    clock.advance(seconds)
    policy.step_ended(number)


def run_steps(policy: LoadPolicy, clock: FakeClock, seconds: float, *running: str, tokens: int = 1) -> None:
    for _ in range(50):
        run_step(policy, clock, seconds, **dict.fromkeys(running, tokens))


def choose(policy: LoadPolicy, num_blocks: int, *, is_whole: bool = False) -> Choice:
    return policy.choose("new", num_blocks, is_whole=is_whole)


def test_a_load_beside_nothing_goes_by_layer_however_long_it_is(clock: FakeClock) -> None:
    assert choose(make(clock), 100_000) == (True, "alone")


@pytest.mark.parametrize("path", ["auto", "layer"])
def test_a_whole_prompt_never_goes_by_layer(path: LoadPath, clock: FakeClock) -> None:
    assert choose(make(clock, path), 10, is_whole=True) == (False, "whole_prompt")


def test_beside_others_a_load_may_add_the_budget_to_their_step(clock: FakeClock) -> None:
    policy = make(clock)
    run_steps(policy, clock, 0.02, "other")
    assert choose(policy, 29) == (True, "budget")
    assert choose(policy, 32) == (False, "budget")


def test_without_a_budget_no_load_goes_by_layer_beside_others(clock: FakeClock) -> None:
    policy = make(clock, budget=0.0)
    run_steps(policy, clock, 1.0, "other")
    assert choose(policy, 1) == (False, "budget")
    policy.finished("other")
    assert choose(policy, 1) == (True, "alone")


def test_a_request_that_comes_back_is_no_other_one(clock: FakeClock) -> None:
    policy = make(clock, budget=0.0)
    run_steps(policy, clock, 1.0, "new")
    assert choose(policy, 1) == (True, "alone")


def test_of_a_burst_the_first_load_goes_by_layer(clock: FakeClock) -> None:
    policy = make(clock)
    for expected in (Choice(True, "alone"), Choice(False, "burst"), Choice(False, "burst")):
        assert choose(policy, 100) == expected
        policy.begun(expected, 100)
    plan(policy, new=1)
    assert policy.counts == {(True, "alone"): 1, (False, "burst"): 2}


def test_a_burst_after_long_steps_is_a_burst_all_the_same(clock: FakeClock) -> None:
    """Those that wait for its loads are its own requests, and their steps are short."""
    policy = make(clock)
    run_steps(policy, clock, 0.5, "other")
    policy.finished("other")
    policy.begun(Choice(True, "alone"), 12)
    assert choose(policy, 12) == (False, "burst")


def test_of_the_last_steps_the_shortest_counts(clock: FakeClock) -> None:
    policy = make(clock)
    run_steps(policy, clock, 0.5, "other")
    run_step(policy, clock, 0.01, other=1)
    assert choose(policy, 21) == (False, "budget")
    assert choose(policy, 20) == (True, "budget")


def test_what_is_queued_on_the_link_counts(clock: FakeClock) -> None:
    policy = make(clock)
    policy.begun(Choice(False, "burst"), 100)
    assert choose(policy, 1) == (False, "burst")
    policy.ended(100)
    assert choose(policy, 1) == (True, "alone")


def test_loads_whose_slots_come_late_count(clock: FakeClock) -> None:
    policy = make(clock)
    policy.waits(8)
    assert choose(policy, 4) == (False, "burst")
    policy.waits(-8)
    assert choose(policy, 4) == (True, "alone")


def test_small_loads_of_one_step_share_the_budget(clock: FakeClock) -> None:
    policy = make(clock)
    run_steps(policy, clock, 0.0, "other")
    for _ in range(2):
        assert choose(policy, 4) == (True, "budget")
        policy.begun(Choice(True, "budget"), 4)
    assert choose(policy, 4) == (False, "burst")
    plan(policy, other=1)
    assert choose(policy, 4) == (True, "budget")


@pytest.mark.parametrize("path", ["auto", "layer"])
def test_a_rank_that_failed_ends_loads_by_layer(path: LoadPath, clock: FakeClock) -> None:
    policy = make(clock, path)
    policy.off = "rank 1: CopyError"
    assert choose(policy, 1) == (False, "rank")


def test_the_setting_decides(clock: FakeClock) -> None:
    assert choose(make(clock, "async"), 1) == (False, "setting")
    policy = make(clock, "layer")
    run_steps(policy, clock, 0.001, "other")
    assert choose(policy, 100_000) == (True, "setting")


def test_short_loads_do_not_count_as_a_measurement(clock: FakeClock) -> None:
    policy = make(clock)
    run_steps(policy, clock, 0.0, "other")
    for by_layer in (True, False):
        policy.measured(MIB, 1.0, by_layer=by_layer)
        policy.measured(1000 * MIB, 0.0, by_layer=by_layer)
    assert choose(policy, 9) == (True, "budget")


# -- two estimates ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "whole", "tokens", "expected"),
    [
        (1000, 1000, 16, (True, "alone")),
        (500, 1000, 16, (False, "rate")),  # 200 ms, and 100 and 25 and 5
        (900, 1000, 16, (True, "alone")),  # 111, and 130
        (500, 1000, 2048, (True, "alone")),  # 205, and 310
        (1000, 500, 16, (True, "alone")),
    ],
)
def test_the_way_that_takes_less_is_taken(
    layer: float, whole: float, tokens: int, expected: tuple[bool, str], clock: FakeClock
) -> None:
    """For 100 slots; steps take 25 ms, and 0.1 ms for each token of more than 250."""
    policy = make(clock, layer=layer, whole=whole)
    run_steps(policy, clock, 0.025, "r", tokens=16)
    run_steps(policy, clock, 0.1, "r", tokens=1000)
    policy.finished("r")
    assert policy.choose("new", 100, is_whole=False, rest=PromptPart(tokens)) == expected


def test_beside_others_a_slow_way_is_not_taken_either(clock: FakeClock) -> None:
    policy = make(clock, budget=1.0, layer=100, whole=1000)
    run_steps(policy, clock, 0.02, "other")
    assert choose(policy, 50) == (False, "rate")
    assert choose(policy, 1) == (True, "budget")


def test_where_others_wait_no_long_load_goes_by_layer(clock: FakeClock) -> None:
    policy = make(clock)
    policy.requests = cast(Any, {"new": None, "another": None})
    assert choose(policy, 100) == (False, "burst")
    assert choose(policy, 5) == (True, "budget")
    policy.requests = cast(Any, {"new": None})
    assert choose(policy, 100) == (True, "alone")


def test_a_load_before_the_step_is_tried_once_if_none_was_measured(clock: FakeClock) -> None:
    policy = LoadPolicy("auto", 0.01, MIB, clock)
    assert choose(policy, 100) == (True, "alone")
    policy.measured(100 * MIB, 0.1, by_layer=True)
    assert choose(policy, 100) == (False, "trial")
    assert choose(policy, 10) == (True, "alone"), "too small to measure"
    policy.measured(100 * MIB, 0.1, by_layer=False)
    assert choose(policy, 100) == (True, "alone")


def test_loads_by_layer_that_were_slower_are_tried_again_every_minute(clock: FakeClock) -> None:
    policy = make(clock, layer=500)
    clock.advance(59.0)
    assert choose(policy, 100) == (False, "rate")
    clock.advance(1.0)
    assert choose(policy, 10) == (False, "rate"), "too small to measure"
    assert choose(policy, 100) == (True, "trial")
    policy.begun(Choice(True, "trial"), 100)
    plan(policy, new=1)
    policy.finished("new")
    assert choose(policy, 100) == (False, "rate")
    for _ in range(20):
        policy.measured(100 * MIB, 0.1, by_layer=True)
    assert choose(policy, 100) == (True, "alone")


def is_worth_it(policy: LoadPolicy, tokens: int, rest: int, num_blocks: int) -> bool:
    choice = policy.choose("new", num_blocks, is_whole=False, rest=PromptPart(rest))
    return policy.is_worth_it("new", choice, num_blocks, PromptPart(tokens), PromptPart(rest))


@pytest.fixture
def steady(clock: FakeClock) -> LoadPolicy:
    """A launch takes 26 ms, and each token of more than 260 0.1 ms."""
    policy = make(clock)
    run_steps(policy, clock, 0.026, "r", tokens=16)
    run_steps(policy, clock, 0.1, "r", tokens=1000)
    policy.finished("r")
    return policy


@pytest.mark.parametrize(
    ("tokens", "blocks", "expected"), [(200, 12, False), (500, 31, True), (500, 60, False), (16_000, 1000, True)]
)
def test_alone_a_load_that_takes_longer_than_computing_is_not_made(
    tokens: int, blocks: int, expected: bool, steady: LoadPolicy
) -> None:
    for _ in range(2):  # vLLM asks again if it has no room
        assert is_worth_it(steady, tokens, 7, blocks) is expected
    news = steady.take_news()
    assert news is not None
    assert news.not_made == (not expected)
    assert steady.take_news() is None


def test_a_prompt_that_no_graph_holds_is_loaded_where_computing_it_takes_longer(clock: FakeClock) -> None:
    """An H200 with graphs of up to 512 tokens: 46 ms to compute 519 tokens, 17 ms for the seven behind a hit."""
    policy = make(clock)
    for tokens in (7, 512):
        run_steps(policy, clock, 0.017, "r", tokens=tokens)
    run_steps(policy, clock, 0.3, "r", tokens=8192)
    policy.finished("r")
    assert not is_worth_it(policy, 519, 7, 32), "no step of this size was measured"
    for seconds in (1.0, 0.046, 0.046):  # the first compiles kernels
        run_step(policy, clock, seconds, r=519)
    policy.finished("r")
    assert is_worth_it(policy, 519, 7, 32)
    assert is_worth_it(policy, 1000, 488, 32), "1,000 tokens take at least as long"
    assert not is_worth_it(policy, 519, 7, 60)
    assert not is_worth_it(policy, 512, 7, 32)


def test_a_step_that_also_decodes_says_nothing_of_its_size(steady: LoadPolicy, clock: FakeClock) -> None:
    for _ in range(3):
        run_step(steady, clock, 1.0, r=200, other=1)
    for name in ("r", "other"):
        steady.finished(name)
    assert not is_worth_it(steady, 200, 7, 30)


def test_beside_others_a_load_is_always_made(steady: LoadPolicy, clock: FakeClock) -> None:
    """Computing would be theirs as well."""
    run_steps(steady, clock, 0.026, "other")
    assert is_worth_it(steady, 200, 7, 12)


def test_before_it_is_known_what_computing_costs_a_load_is_made(clock: FakeClock) -> None:
    assert is_worth_it(make(clock), 200, 7, 12)


@pytest.mark.parametrize("path", ["auto", "layer"])
def test_what_found_no_room_in_a_step_goes_before_the_next(path: LoadPath, clock: FakeClock) -> None:
    assert make(clock, path).choose("new", 1, is_whole=False, had_no_room=True) == (False, "no_room")


def test_an_engine_that_cannot_load_by_layer_says_so(clock: FakeClock) -> None:
    policy = LoadPolicy("layer", 0.01, MIB, clock, is_possible=False)
    assert choose(policy, 1) == (False, "engine")


def test_every_choice_has_a_label(clock: FakeClock) -> None:
    for choice in LOAD_CHOICES:
        path, reason = choice.split("_", 1)
        assert Choice(path == "layer", reason).label == choice


# -- the last block alone ---------------------------------------------------------------------------------------


def measured_steps(clock: FakeClock, tail: float, decode: float, delay: float) -> LoadPolicy:
    policy = make(clock)
    run_steps(policy, clock, tail, "r", tokens=16)
    run_steps(policy, clock, decode, "r")
    for _ in range(100):
        policy.begun(Choice(False, "whole_prompt"), 1)
        policy.ended(1, delay + 0.001)
    return policy


def test_the_last_block_alone_is_loaded_where_that_takes_less_than_computing_it(clock: FakeClock) -> None:
    """tp8 with CUDA graphs on an H200: 71.9 ms to compute it, 29.5 ms with it."""
    assert measured_steps(clock, tail=0.072, decode=0.030, delay=0.005).loads_last_block


@pytest.mark.parametrize(("tail", "decode", "delay"), [(0.020, 0.019, 0.005), (0.030, 0.020, 0.012)])
def test_otherwise_it_is_computed(tail: float, decode: float, delay: float, clock: FakeClock) -> None:
    assert not measured_steps(clock, tail, decode, delay).loads_last_block


def test_before_both_kinds_of_step_were_measured_it_is_computed(clock: FakeClock) -> None:
    policy = make(clock)
    assert not policy.loads_last_block
    run_steps(policy, clock, 0.1, "r", tokens=16)
    assert not policy.loads_last_block
    run_steps(policy, clock, 0.001, "r")
    assert policy.loads_last_block


def test_steps_that_load_or_prefill_and_idle_time_are_no_measurement(clock: FakeClock) -> None:
    policy = make(clock)
    policy.begun(Choice(True, "alone"), 10)
    run_step(policy, clock, 9.0, r=16)
    run_step(policy, clock, 9.0, r=1000)
    clock.advance(60.0)
    run_step(policy, clock, 0.001, other=1)
    assert not policy.loads_last_block, "no step has computed a last block alone"
    run_steps(policy, clock, 0.1, "r", tokens=16)
    assert policy.loads_last_block, "steps that decode take a millisecond"
