"""What a pool with the policy `auto` learns, keeps and evicts, through its own calls."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Sequence
from heapq import heappush
from itertools import count
from math import isclose
from typing import Any

import pytest
from tests.doubles.fakes import FakeClock
from tests.doubles.rank import FakeRank, make_ranks, store_keys, use_keys
from tests.engine.control.sharedhost import Host

from kvstow.config import EngineConfig
from kvstow.control.chains import Chains, FoundKeys
from kvstow.control.engine import OffloadEngine
from kvstow.control.hazards import (
    LOWER,
    NUM_BINS,
    UPPER,
    USED_ONCE,
    Hazards,
    Observations,
    bin_of,
    compute,
    used_again,
    uses_of,
)
from kvstow.control.slots import RefCounts
from kvstow.endings import (
    FETCHED,
    NO_ENDING,
    OTHER,
    PAIRS_BYTES,
    RELEASED,
    RESUME_TIMES,
    RESUMES,
    RUNNING,
    Ending,
    Endings,
)
from kvstow.hints import Hints, context_id

MakeEngine = Callable[..., OffloadEngine]

TOOL, ANSWER = Ending("stop", (1, 0)), Ending("stop", (2, 0))


def past_of(*pauses: float) -> int:
    """The past of blocks that were used again after each of these pauses, in seconds."""
    past = USED_ONCE
    for pause in pauses:
        past = used_again(past, pause)
    return past


def make_keys(count: int, name: str = "key") -> list[bytes]:
    return [f"{name} {number:08}".encode() for number in range(count)]


class Traffic:
    """Requests of an engine whose copies are done at once, by the clock of a test."""

    def __init__(self, engine: OffloadEngine, clock: FakeClock) -> None:
        self.engine, self.clock = engine, clock
        self.ranks: list[FakeRank] = make_ranks(engine)

    def begin(self, keys: Sequence[bytes], **options: object) -> int:
        number = self.engine.admit(keys, **options)  # type: ignore[arg-type]
        store_keys(self.engine, self.ranks, list(keys))
        return number

    def end(self, number: int, keys: Sequence[bytes], ending: Ending = NO_ENDING) -> None:
        if self.engine.end_request(number, ending).is_incomplete:
            store_keys(self.engine, self.ranks, list(keys))

    def serve(self, keys: Sequence[bytes], seconds: float = 1.0, ending: Ending = NO_ENDING, **options: object) -> None:
        number = self.begin(keys, **options)
        self.clock.advance(seconds)
        self.end(number, keys, ending)

    def present(self, keys: Sequence[bytes]) -> int:
        return sum(self.engine.contains(keys))

    def teach(self, rounds: int = 200) -> None:
        """Chains that end with a tool call come back after 10 seconds, and those that end with an answer never do."""
        for number in range(rounds):
            chain = make_keys(3, f"tool {number}")
            self.serve(chain, 1.0, TOOL)
            self.serve(make_keys(3, f"answer {number}"), 1.0, ANSWER)
            self.clock.advance(8.0)
            self.serve(chain, 1.0, ANSWER)


def test_a_bin_that_ends_between_two_floats_is_left(
    make_traffic: Callable[..., Traffic], clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where `now` is rounded, a list that was due and had nothing to move was queued again for ever."""
    start = 7.887233511355132
    assert start + UPPER[0] - UPPER[0] < start
    traffic, keys, queued = make_traffic(8), make_keys(3), count()
    clock.advance(start)
    number = traffic.begin(keys)

    def queue(due: list[Any], entry: Any) -> None:
        assert next(queued) < 100, "it goes on for ever"
        heappush(due, entry)

    monkeypatch.setattr("kvstow.control.chains.heappush", queue)
    clock.advance(UPPER[0])
    assert clock() == start + UPPER[0]
    traffic.engine.tick()
    traffic.end(number, keys)
    traffic.engine.check_integrity()


@pytest.fixture
def make_traffic(make_host: MakeEngine, clock: FakeClock) -> Callable[..., Traffic]:
    return lambda slots: Traffic(make_host(slots=slots, policy="auto"), clock)


MakeTraffic = Callable[..., Traffic]


# -- what is evicted ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "tools", "answers"), [("auto", 6, 2), ("lru", 2, 6)])
def test_what_will_come_back_stays_and_with_the_policy_lru_what_was_used_last(
    make_host: MakeEngine, clock: FakeClock, policy: str, tools: int, answers: int
) -> None:
    traffic = Traffic(make_host(slots=16, policy=policy), clock)
    traffic.teach()
    earlier, later = make_keys(6, "a"), make_keys(6, "b")
    traffic.serve(earlier, 0.5, TOOL)
    traffic.serve(later, 0.5, ANSWER)
    for number in range(2):
        traffic.serve(make_keys(4, f"other {number}"), 0.5, ANSWER)
    assert (traffic.present(earlier), traffic.present(later)) == (tools, answers)
    traffic.engine.check_integrity()


def test_the_policy_lru_goes_by_the_start_of_the_last_request(make_host: MakeEngine, clock: FakeClock) -> None:
    traffic = Traffic(make_host(slots=12, policy="lru"), clock)
    chains = {name: make_keys(4, name) for name in ("long", "short", "late")}
    long = traffic.engine.admit(chains["long"])
    clock.advance(0.1)
    traffic.serve(chains["short"], 0.1)
    store_keys(traffic.engine, traffic.ranks, chains["long"])  # later than it was used
    traffic.serve(chains["late"], 1.0)
    traffic.end(long, chains["long"])
    traffic.serve(make_keys(4, "other"), 1.0)
    assert [traffic.present(chain) for chain in chains.values()] == [0, 4, 4]
    traffic.engine.check_integrity()


def test_the_end_of_a_chain_goes_before_its_beginning(make_traffic: MakeTraffic) -> None:
    traffic = make_traffic(8)
    chain = make_keys(8)
    traffic.serve(chain)
    store_keys(traffic.engine, traffic.ranks, make_keys(3, "new"))
    assert traffic.engine.contains(chain) == [True] * 5 + [False] * 3


def test_a_running_request_evicts_nothing_that_is_needed_sooner(make_traffic: MakeTraffic) -> None:
    traffic = make_traffic(8)
    traffic.teach()
    soon, long = make_keys(8, "soon"), make_keys(8, "long")
    traffic.serve(soon, 0.5, TOOL)
    assert traffic.present(soon) == 8
    number = traffic.begin(long)
    assert (traffic.present(soon), traffic.present(long)) == (8, 0)
    assert traffic.engine.stats().stores["deferred"] >= 8
    traffic.clock.advance(1e4)  # the others have not come back
    traffic.end(number, long, TOOL)
    assert traffic.present(long) == 8, "it is stored when its request ends"
    traffic.engine.check_integrity()


def test_what_a_running_request_uses_may_go_and_is_taken_back_at_its_end(make_traffic: MakeTraffic) -> None:
    traffic = make_traffic(8)
    traffic.teach()
    traffic.clock.advance(1e4)  # nothing that is there will come back
    lent = make_keys(8, "lent")
    number = traffic.begin(lent)
    assert traffic.present(lent) == 8
    traffic.clock.advance(0.5)
    traffic.serve(make_keys(4, "short"), 0.5, TOOL)
    assert traffic.present(lent) == 4, "a GPU has them"
    assert traffic.engine.incomplete.count(number) == 1
    traffic.clock.advance(1e4)
    traffic.end(number, lent, TOOL)
    assert traffic.present(lent) == 8
    traffic.engine.check_integrity()


@pytest.mark.parametrize("engines", [1, 2])
def test_what_another_engine_has_found_meanwhile_is_not_lent(clock: FakeClock, engines: int) -> None:
    """The GPU that has it is not the only one that uses it."""
    host = Host(slots=16, policy="auto")
    clients = [host.attach() for _ in range(2)]
    hazards = host.pool.index.chains.hazards
    for _ in range(50):
        for state, seconds in ((RUNNING, 1000.0), (OTHER, 10.0)):
            observe(hazards, state, seconds, 1, returns=True)
    refresh(hazards)
    old, shared, new = make_keys(4, "old"), make_keys(4, "shared"), make_keys(10, "new")
    before = clients[0].session.admit(old)
    clients[0].store(old)
    clients[0].session.end_request(before)
    first = clients[0].session.admit(shared)
    clients[0].store(shared)
    second = clients[engines - 1].session.admit(shared)
    ended = clients[0].session.admit(new)
    clients[0].session.end_request(ended)
    clients[0].store(new)
    found = clients[1].session.lookup(old), clients[1].session.lookup(shared)
    assert found == ((2, 4) if engines == 2 else (4, 2))
    assert host.counts["cached"] == 16
    for client, number in ((clients[0], first), (clients[engines - 1], second)):
        client.session.end_request(number)
    host.pool.admin.purge(everything=True).run()


def test_a_store_evicts_none_of_its_own_request(make_traffic: MakeTraffic) -> None:
    traffic = make_traffic(4)
    chain = make_keys(8)
    traffic.serve(chain)
    assert traffic.engine.contains(chain) == [True] * 4 + [False] * 4
    traffic.engine.check_integrity()


def test_a_held_block_stays_and_returns_to_the_order_with_its_last_hold(make_traffic: MakeTraffic) -> None:
    traffic = make_traffic(4)
    chain = make_keys(4)
    traffic.serve(chain)
    leases = [traffic.engine.acquire(chain[:3]) for _ in range(2)]
    store_keys(traffic.engine, traffic.ranks, make_keys(4, "new"))
    assert traffic.engine.contains(chain) == [True] * 3 + [False]
    for lease in leases:
        traffic.engine.check_integrity()
        store_keys(traffic.engine, traffic.ranks, make_keys(2, "other"))
        assert traffic.present(chain) == 3
        traffic.engine.release_lease(lease)
    traffic.engine.check_integrity()
    store_keys(traffic.engine, traffic.ranks, make_keys(4, "last"))
    assert traffic.present(chain) == 0
    traffic.engine.check_integrity()


def test_a_namespace_is_not_evicted_for_another_that_needs_its_blocks_less(clock: FakeClock) -> None:
    host = Host(slots=8, policy="auto")
    one, other = host.attach(namespace="a"), host.attach(namespace="b")
    first, second = make_keys(4, "first"), make_keys(4, "second")
    for client, keys in ((one, first), (other, second)):
        number = client.session.admit(keys)
        client.store(keys)
        host.clock.advance(1.0)
        client.session.end_request(number, NO_ENDING)
        host.clock.advance(10.0)
    one.store(make_keys(4, "third"))
    assert (one.session.lookup(first), other.session.lookup(second)) == (0, 4)
    host.pool.admin.purge(everything=True).run()


# -- what is learned ---------------------------------------------------------------------------------------------


def seen(traffic: Traffic, state: int, past: int = USED_ONCE) -> tuple[list[float], list[float]]:
    """What was observed of a class, by bin: what waited, and what came back."""
    hazards = traffic.engine.pool.index.chains.hazards
    first = hazards.first_cell(state, past)
    exposed, returned = hazards.observed()
    row = first // NUM_BINS
    return exposed[row].tolist(), returned[row].tolist()


def test_a_return_counts_by_how_long_the_blocks_have_waited(make_traffic: MakeTraffic) -> None:
    traffic = make_traffic(64)
    chain = make_keys(10)
    traffic.serve(chain, 4.0, Ending("length"))
    traffic.clock.advance(20.0)
    traffic.begin(chain)
    state = Endings().state_of(Ending("length"))[0]
    for where, seconds in ((state, 20.0), (RUNNING, 24.0)):
        exposed, returned = seen(traffic, where)
        at = bin_of(seconds)
        assert [round(one, 6) for one in exposed] == [1.0] * (at + 1) + [0.0] * (NUM_BINS - at - 1), "ten count as one"
        assert [round(one, 6) for one in returned] == [float(number == at) for number in range(NUM_BINS)]


def test_what_has_not_come_back_counts_as_waiting(make_traffic: MakeTraffic) -> None:
    traffic = make_traffic(4)
    traffic.serve(make_keys(4, "gone"), 1.0)
    traffic.clock.advance(20.0)
    traffic.serve(make_keys(4, "other"), 1.0, Ending("abort"))
    assert traffic.present(make_keys(4, "gone")) == 0
    traffic.clock.advance(100.0)
    traffic.engine.tick()
    exposed, returned = seen(traffic, OTHER)
    assert exposed[bin_of(50.0)] == 1.0, "it is observed further, although it was evicted"
    assert sum(returned) == 0


def test_uses_are_remembered_after_eviction(make_traffic: MakeTraffic) -> None:
    traffic = make_traffic(4)
    chain = make_keys(4)
    for _ in range(4):
        traffic.serve(chain, 3.0)
    for number in range(4):
        traffic.serve(make_keys(4, f"other {number}"), 100.0)
    assert traffic.present(chain) == 0
    traffic.serve(chain, 100.0)
    assert {uses_of(part.past) for part in traffic.engine.pool.index.chains.parts()} == {5}


def test_what_is_evicted_together_is_remembered_by_part(make_traffic: MakeTraffic) -> None:
    traffic = make_traffic(8)
    often, once = make_keys(4, "often"), make_keys(4, "once ")
    for _ in range(4):
        traffic.serve(often, 3.0)
    traffic.serve(once, 3.0)
    store_keys(traffic.engine, traffic.ranks, make_keys(8, "new  "))  # in one call, which evicts both
    assert traffic.present([*often, *once]) == 0
    for chain, uses in ((often, 5), (once, 2)):
        traffic.clock.advance(100.0)
        traffic.serve(chain, 100.0)
        assert traffic.present(chain) == 4
        assert uses in {uses_of(part.past) for part in traffic.engine.pool.index.chains.parts()}


def test_uses_within_two_seconds_count_once(make_traffic: MakeTraffic) -> None:
    traffic = make_traffic(64)
    chain = make_keys(4)
    for _ in range(16):
        traffic.serve(chain, 0.1)
    traffic.clock.advance(50.0)
    traffic.begin(chain)
    assert sum(seen(traffic, OTHER)[1]) >= 16.0
    assert sum(seen(traffic, OTHER, past_of(*[0.1] * 8))[1]) == 0


def test_blocks_are_classed_by_the_pause_before_their_last_use(make_traffic: MakeTraffic) -> None:
    """From the end of the request before: a long request is no pause."""
    traffic = make_traffic(64)
    chain = make_keys(4)
    traffic.serve(chain, 20.0)
    traffic.clock.advance(3.0)
    traffic.serve(chain, 20.0)
    traffic.clock.advance(30.0)
    traffic.serve(chain, 20.0)
    traffic.clock.advance(100.0)
    traffic.begin(chain)
    found = [sum(seen(traffic, OTHER, past)[1]) for past in (USED_ONCE, past_of(3.0), past_of(3.0, 30.0))]
    assert found == pytest.approx([1.0, 1.0, 1.0])


def test_a_repeated_key_counts_once(make_traffic: MakeTraffic) -> None:
    traffic = make_traffic(8)
    keys = make_keys(3)
    store_keys(traffic.engine, traffic.ranks, keys)
    use_keys(traffic.engine, [keys[0], keys[0]])
    traffic.engine.check_integrity()
    use_keys(traffic.engine, [keys[0], keys[0], keys[2], keys[0]])
    use_keys(traffic.engine, [*make_keys(2, "new"), *make_keys(2, "new")])
    traffic.engine.check_integrity()


def test_what_was_fetched_is_a_class_of_its_own_until_the_next_hit(make_traffic: MakeTraffic) -> None:
    traffic = make_traffic(64)
    pool, keys = traffic.engine.pool, make_keys(4)
    order = traffic.engine.namespace.order
    store_keys(traffic.engine, traffic.ranks, keys)
    with pool.lock:
        slots = slots_of(traffic, keys)
        pool.index.chains.remove(slots)
        pool.index.chains.publish(order, keys, slots, pool.clock(), fetched=True)
    traffic.serve(keys, 1.0, Ending("abort"))  # the request that has fetched them
    traffic.engine.check_integrity()
    traffic.clock.advance(9.0)
    traffic.begin(keys)
    assert sum(seen(traffic, FETCHED)[1]) == 1.0
    assert sum(seen(traffic, Endings().state_of(Ending("abort"))[0])[1]) == 0


def slots_of(traffic: Traffic, keys: Sequence[bytes]) -> list[int]:
    return [slot for slot in traffic.engine.namespace.keys.slots_of(keys) if slot is not None]


def test_what_the_store_below_has_is_of_the_class_of_fetched_blocks(make_traffic: MakeTraffic) -> None:
    traffic = make_traffic(64)
    pool, keys = traffic.engine.pool, make_keys(8)
    traffic.serve(keys)
    with pool.lock:
        pool.index.chains.below.add(slots_of(traffic, keys)[:4])
    for _ in range(2):
        traffic.clock.advance(10.0)
        traffic.serve(keys)
    found = [sum(seen(traffic, state, past_of(10.0))[1]) for state in (FETCHED, OTHER)]
    assert found == pytest.approx([0.5, 0.5])
    traffic.engine.check_integrity()


def test_a_block_that_was_stored_anew_is_not_in_the_store_below(make_traffic: MakeTraffic) -> None:
    traffic = make_traffic(4)
    below, keys = traffic.engine.pool.index.chains.below, make_keys(4)
    traffic.serve(make_keys(4, "before"))
    with traffic.engine.pool.lock:
        below.add(range(4))
    store_keys(traffic.engine, traffic.ranks, keys)
    assert slots_of(traffic, keys), "in the place of the others"
    assert below.leading(slots_of(traffic, keys)) == 0


def test_what_is_cheap_to_read_has_a_low_place() -> None:
    hazards = Hazards()
    fetched, other = (hazards.first_cell(state, USED_ONCE) for state in (FETCHED, OTHER))
    hazards.fetch_cost = 0.25
    refresh(hazards)
    assert isclose(hazards.places.place[fetched], 0.25 * hazards.places.place[other])


def test_a_request_may_take_back_what_another_one_has_taken_meanwhile(make_traffic: MakeTraffic) -> None:
    traffic = make_traffic(64)
    chain = make_keys(4)
    first = traffic.begin(chain)
    traffic.clock.advance(5.0)
    second = traffic.begin(chain)
    traffic.clock.advance(5.0)
    traffic.engine.end_request(first, NO_ENDING, others=chain)
    traffic.engine.check_integrity()
    traffic.end(second, chain)
    traffic.engine.check_integrity()


def test_blocks_run_until_the_request_that_has_taken_them_last_ends(make_traffic: MakeTraffic) -> None:
    traffic = make_traffic(64)
    chain = make_keys(4)
    store_keys(traffic.engine, traffic.ranks, chain)
    first = traffic.begin(chain)
    traffic.clock.advance(5.0)
    second = traffic.begin(chain)
    for number, is_running in ((first, True), (second, False)):
        traffic.engine.end_request(number)
        parts = traffic.engine.pool.index.chains.parts()
        assert [part.request is not None for part in parts] == [is_running]


def test_a_request_with_unknown_blocks_leaves_others_what_it_does_not_use(make_traffic: MakeTraffic) -> None:
    """An unknown block counts as one of the request that has used the block after it."""
    traffic = make_traffic(64)
    first, unknown, third, fourth = make_keys(4)
    traffic.engine.admit([first, third, fourth])
    store_keys(traffic.engine, traffic.ranks, [first])
    traffic.engine.admit([first, unknown, third])
    traffic.engine.check_integrity()
    store_keys(traffic.engine, traffic.ranks, [unknown, third, fourth])
    traffic.engine.check_integrity()
    uses = {slot: uses_of(part.past) for part in traffic.engine.pool.index.chains.parts() for slot in part.slots}
    assert sorted(uses.values()) == [1, 1, 1, 1]


def test_every_salt_teaches_as_much(make_traffic: MakeTraffic) -> None:
    shares = make_traffic(4).engine.pool.requests.shares
    weights = {b"many": 0.0, b"few": 0.0}
    for number in range(4000):
        salt = b"few" if number % 4 == 0 else b"many"
        weights[salt] += shares.weigh(0, salt)
    assert weights[b"few"] == pytest.approx(weights[b"many"], rel=0.05)


def test_requests_of_a_session_that_is_lost_end(clock: FakeClock) -> None:
    host = Host(slots=8, policy="auto")
    client = host.attach()
    keys = make_keys(4)
    for number in range(40):
        client.session.admit(keys, number=number)
    client.store(keys)
    other = host.attach()
    client.session.lose("its socket has closed")
    host.pool.tick()
    assert not host.pool.requests.left
    parts = host.pool.index.chains.parts()
    assert parts
    assert all(part.request is None for part in parts), "nothing is running any more"
    assert other.session.lookup(keys) == 4


def test_too_many_requests_end_the_oldest(make_traffic: MakeTraffic, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstow.control.session.MOST_RUNNING", 3)
    traffic = make_traffic(64)
    numbers = [traffic.begin(make_keys(2, str(number))) for number in range(5)]
    running = {part.request for part in traffic.engine.pool.index.chains.parts()} - {None}
    assert len(running) == 3
    assert not traffic.engine.end_request(numbers[0]).is_incomplete, "it has ended"
    traffic.engine.check_integrity()


# -- hazards -----------------------------------------------------------------------------------------------------


def places_of(hazards: Hazards, state: int, past: int = USED_ONCE) -> list[float]:
    first = hazards.first_cell(state, past)
    return hazards.places.place[first : first + NUM_BINS]


def observe(hazards: Hazards, state: int, seconds: float, count: int, past: int = USED_ONCE, *, returns: bool) -> None:
    first, at = hazards.first_cell(state, past), bin_of(seconds)
    for _ in range(count):
        hazards.waited(first, first + at, 1.0)
        if returns:
            hazards.came_back(first + at, 1.0)


def due(hazards: Hazards) -> Observations:
    while True:
        found = hazards.count_request()
        if found is not None:
            return found


def refresh(hazards: Hazards) -> None:
    hazards.install(compute(due(hazards)))


def dump(hazards: Hazards) -> bytes:
    return due(hazards).dump()


def test_a_place_is_the_best_rate_of_return_over_all_horizons() -> None:
    """Against a search over all horizons, for random hazards."""
    rng = random.Random(1)
    hazards = Hazards()
    first = hazards.first_cell(OTHER, USED_ONCE)
    for number in range(NUM_BINS):
        hazards.waited(first + number, first + number + 1, 1e9)
        for _ in range(rng.randrange(4)):
            hazards.came_back(first + number, 1e8)
    refresh(hazards)
    exposed, returned = hazards.observed()
    found = places_of(hazards, OTHER)
    widths = [*(high - low for low, high in zip(LOWER, UPPER, strict=False)), 2 * LOWER[-1]]
    for start in range(NUM_BINS):
        left, back, wait, best = 1.0, 0.0, 0.0, 0.0
        for at in range(start, NUM_BINS):
            hazard = returned[0][at] / exposed[0][at]
            wait += left * widths[at] * (1 - hazard / 2)
            back += left * hazard
            left *= 1 - hazard
            best = max(best, back / wait)
        assert found[start] == pytest.approx(best, rel=1e-3)


def test_what_comes_back_at_a_known_time_is_worth_most_shortly_before_it() -> None:
    hazards = Hazards()
    observe(hazards, OTHER, 60.0, 500, returns=True)
    refresh(hazards)
    place = places_of(hazards, OTHER)
    assert place[0] < place[bin_of(50.0)] > place[bin_of(200.0)]


def test_little_is_known_of_a_pause_and_much_of_blocks_that_were_used_as_often() -> None:
    hazards, short, long = Hazards(), past_of(1.0), past_of(100.0)
    observe(hazards, RELEASED, 1000.0, 1000, returns=False)
    observe(hazards, OTHER, 60.0, 100, long, returns=True)
    refresh(hazards)
    at = bin_of(50.0)
    assert places_of(hazards, OTHER, short)[at] > places_of(hazards, OTHER, long)[at] / 2
    observe(hazards, OTHER, 1000.0, 300, short, returns=False)
    refresh(hazards)
    assert places_of(hazards, OTHER, short)[at] < places_of(hazards, OTHER, long)[at] / 3


def test_a_hint_is_believed_until_its_state_has_learned_otherwise() -> None:
    hazards = Hazards()
    observe(hazards, OTHER, 1000.0, 100, returns=False)
    refresh(hazards)
    state = Endings().state_of(Ending(resume_in=60.0))[0]
    assert RESUME_TIMES[state - RESUMES.start] == pytest.approx(60.0, rel=0.25)
    assert places_of(hazards, state)[bin_of(50.0)] > 10 * places_of(hazards, OTHER)[bin_of(50.0)]
    observe(hazards, state, 1000.0, 300, returns=False)
    refresh(hazards)
    assert places_of(hazards, state)[bin_of(50.0)] < 2 * max(places_of(hazards, OTHER)), "who lies is not believed"


def test_hazards_outlive_their_process() -> None:
    hazards, other = Hazards(), Hazards()
    observe(hazards, RELEASED, 60.0, 50, returns=True)
    refresh(hazards)
    data = dump(hazards)
    assert len(data) <= 16 << 10
    assert other.load(data)
    assert places_of(other, RELEASED) == pytest.approx(places_of(hazards, RELEASED), rel=1e-3)


def test_of_many_classes_those_with_the_most_observations_outlive_their_process() -> None:
    hazards, other = Hazards(), Hazards()
    states = [Endings().state_of(Ending(resume_in=seconds))[0] for seconds in RESUME_TIMES]
    for number, state in enumerate(states):
        for past in (USED_ONCE, past_of(1.0), past_of(100.0)):
            hazards.waited(hazards.first_cell(state, past), hazards.first_cell(state, past) + 1, 1.0 + number)
    data = dump(hazards)
    assert len(data) <= 16 << 10
    assert other.load(data)
    assert other.observed()[0].sum() > 0.5 * hazards.observed()[0].sum()


def test_a_pair_of_tokens_keeps_its_state() -> None:
    endings, other = Endings(), Endings()
    pairs = [(number, 1 << 60) for number in range(3)]
    states = [endings.state_of(Ending("stop", pair))[0] for pair in pairs]
    assert len(endings.dump()) == PAIRS_BYTES
    other.load(endings.dump())
    assert [other.state_of(Ending("stop", pair)) for pair in reversed(pairs)] == [(one, False) for one in states[::-1]]
    state, is_new = other.state_of(Ending("stop", (9, 9)))
    assert is_new
    assert state not in states


def test_the_counts_of_pairs_are_halved_as_often_after_a_restart() -> None:
    endings, other = Endings(), Endings()
    for _ in range(3000):
        endings.state_of(Ending("stop", (1, 2)))
    other.load(endings.dump())
    for _ in range(2000):
        endings.state_of(Ending("stop", (1, 2)))
        other.state_of(Ending("stop", (1, 2)))
    assert other.dump() == endings.dump()


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[:-1],
        lambda data: data + b"\0",
        lambda data: b"XXXX" + data[4:],
        lambda data: data[:4] + b"\xff" + data[5:],
        lambda data: data[:-4] + b"\0\0\xc0\x7f",
        lambda data: data[:-4] + b"\0\0\x80\x7f",
        lambda data: data[:12] + b"\xff\xff" + data[14:],
        lambda data: b"",
    ],
)
def test_damaged_hazards_are_dropped(change: Callable[[bytes], bytes]) -> None:
    hazards, other = Hazards(), Hazards()
    observe(hazards, OTHER, 60.0, 50, returns=True)
    assert not other.load(change(dump(hazards)))
    assert dump(other) == dump(Hazards())


# -- parts -------------------------------------------------------------------------------------------------------


def test_a_slot_that_comes_back_to_its_part_is_counted_once() -> None:
    chains = Chains(Hazards(), RefCounts())
    chains.grow(12)
    order, keys = chains.make_order(0), make_keys(10)
    first = chains.begin(order, 0.0)
    chains.extend(first, FoundKeys([], keys, [None] * 10), 0.0)
    chains.admit(first, 0.0)
    chains.publish(order, keys, range(10), 0.0)
    chains.end(first, OTHER, 1.0)
    chains.remove(range(5))
    second = chains.begin(order, 5.0)
    chains.extend(second, FoundKeys([], keys, [None] * 5 + [*range(5, 10)]), 5.0)
    chains.admit(second, 5.0)
    chains.publish(order, keys[:3], range(3), 5.0)
    chains.publish(order, keys[3:5], [10, 11], 5.0)
    chains.below.add(range(10))  # so the blocks in the slots 10 and 11 become a part of their own
    chains.end(second, OTHER, 6.0)
    visible = {*range(3), *range(5, 12)}
    assert chains.defects([order], visible, set()) == []
    assert sorted(chains.slots_of(order)) == sorted(visible)


# -- ends --------------------------------------------------------------------------------------------------------


def test_the_most_frequent_last_tokens_have_a_state_each() -> None:
    endings = Endings()
    rng = random.Random(3)
    for _ in range(3000):
        endings.state_of(Ending("stop", (rng.randrange(1 << 17), rng.randrange(1 << 17))))
    for number in range(600):
        endings.state_of(Ending("stop", (7, number % 2)))
    states = {endings.state_of(Ending("stop", (7, number)))[0] for number in range(2)}
    assert len(states) == 2
    assert len(endings) <= 64


def test_a_state_that_gets_another_meaning_forgets_what_was_learned() -> None:
    endings = Endings()
    firsts = [endings.state_of(Ending("stop", (number, 0))) for number in range(8)]
    assert all(is_new for _, is_new in firsts)
    found = [endings.state_of(Ending("stop", (99, 0))) for _ in range(100)]
    changed = [state for state, is_new in found if is_new]
    assert len(changed) == 1
    assert changed[0] in {state for state, _ in firsts}


# -- contexts ----------------------------------------------------------------------------------------------------


def hint(name: str, **changes: object) -> Hints:
    return Hints(context_id(name), name=name, **changes)  # type: ignore[arg-type]


def test_a_name_in_a_strangers_request_releases_only_its_own_chain(make_traffic: MakeTraffic) -> None:
    traffic = make_traffic(64)
    mine, theirs = make_keys(20, "mine"), make_keys(20, "theirs")
    traffic.serve(mine, 1.0, hints=hint("booking"))
    traffic.clock.advance(1.0)
    traffic.serve(theirs, 1.0, hints=hint("booking", release=True))
    (context,) = traffic.engine.contexts().contexts
    assert (context.name, context.blocks) == ("booking", 20)
    parts = {part.ended.first_cell for part in traffic.engine.pool.index.chains.parts() if part.ended is not None}
    hazards = traffic.engine.pool.index.chains.hazards
    assert parts == {hazards.first_cell(OTHER, USED_ONCE), hazards.first_cell(RELEASED, USED_ONCE)}
    assert traffic.present(mine) == 20


@pytest.mark.parametrize(
    ("hints", "ending"),
    [
        (Hints(resume_in=60.0), Ending(resume_in=60.0)),
        (Hints(keep_for=60.0), Ending(resume_in=60.0)),
        (Hints(resume_in=5.0, keep_for=60.0), Ending(resume_in=5.0)),
        (Hints(resume_in=5.0, release=True), Ending(release=True)),
    ],
)
def test_what_a_client_says_classes_the_request_with_or_without_a_name(
    make_traffic: MakeTraffic, hints: Hints, ending: Ending
) -> None:
    traffic = make_traffic(64)
    traffic.serve(make_keys(20), 1.0, hints=hints)
    chains = traffic.engine.pool.index.chains
    parts = {part.ended.first_cell for part in chains.parts() if part.ended is not None}
    assert parts == {chains.hazards.first_cell(Endings().state_of(ending)[0], USED_ONCE)}


def test_an_operator_releases_what_no_other_request_has_used_since(make_traffic: MakeTraffic) -> None:
    traffic = make_traffic(64)
    chain = make_keys(20)
    traffic.serve(chain, 3.0, hints=hint("booking"))
    traffic.serve(chain[:5], 3.0)
    assert traffic.engine.admin.evict(context=context_id("booking"), dry_run=True).run().evicted_slots == 15
    assert traffic.engine.admin.release_context(context_id("booking")) == 20
    hazards = traffic.engine.pool.index.chains.hazards
    released = hazards.first_cell(RELEASED, USED_ONCE)
    parts = traffic.engine.pool.index.chains.parts()
    assert sum(part.resident for part in parts if part.ended is not None and part.ended.first_cell == released) == 15
    assert traffic.engine.contexts().total == 0
    traffic.engine.check_integrity()


def test_a_context_is_purged_whole_and_forgotten(make_traffic: MakeTraffic) -> None:
    traffic = make_traffic(64)
    chain = make_keys(20)
    traffic.serve(chain, 3.0, hints=hint("booking"))
    traffic.serve(chain[:5], 3.0)
    assert traffic.engine.admin.purge(context=context_id("booking")).run().evicted_slots == 20
    assert (traffic.present(chain), traffic.engine.contexts().total) == (0, 0)
    traffic.engine.check_integrity()


def test_contexts_are_bounded(make_traffic: MakeTraffic, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstow.control.contexts.MOST_CONTEXTS", 3)
    monkeypatch.setattr("kvstow.control.contexts.MOST_KEYS", 25)
    traffic = make_traffic(64)
    for number in range(5):
        traffic.serve(make_keys(2 if number < 4 else 24, str(number)), hints=hint(str(number)))
    assert [one.name for one in traffic.engine.contexts().contexts] == ["4"]


def test_a_pool_that_has_ended_is_collected() -> None:
    """The collector does not visit the list of the slots' parts, so no part may lead back to the pool."""
    engine = OffloadEngine(EngineConfig(slot_bytes=64, capacity_slots=16, num_ranks=1))
    ranks = make_ranks(engine)
    keys = [bytes([number]) * 12 for number in range(4)]
    use_keys(engine, keys)
    store_keys(engine, ranks, keys)
    use_keys(engine, keys)
    pool = weakref.ref(engine.pool)
    del engine, ranks
    gc.collect()
    assert pool() is None
