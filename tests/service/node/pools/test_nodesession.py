"""The first requests of an engine that has restarted find what the service keeps, while its ranks still register it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from tests.doubles.fakes import FakeClock
from tests.service.node.hostbench import Engine, HostBench
from tests.service.node.rawengine import key_of

from kvstow.attach.calls import Admit, End, Found, Hold, Lookup, LookupPrompt, Pending, SettledOps
from kvstow.attach.wire import Message
from kvstow.hints import Hints, context_id
from kvstow_service.node.pools.nodesession import (
    HINTS_PER_SECOND,
    MOST_SECONDS,
    MOST_WAITING,
    STALLED_SECONDS,
    TOKENS_PER_SECOND,
    MemoryWaits,
)

TOKENS = TOKENS_PER_SECOND // 10
"""Of a lookup that waits for a tenth of a second."""
KEYS = [key_of(number) for number in range(10)]


@pytest.fixture
def successor(bench: HostBench) -> Engine:
    """An engine that is attached and has registered nothing; another one has stored KEYS."""
    bench.start().store(*range(10))
    engine = bench.attach()
    engine.join()
    bench.run()
    engine.report()
    return engine


def ask(engine: Engine, hold: Hold = Hold.PRESENT, keys: list[bytes] = KEYS) -> tuple[Message, list[Message]]:
    """What is answered at once, and what later."""
    later: list[Message] = []
    answer = engine.session.lookup(Lookup(keys, hold), lambda call: later.append(call()))
    return answer, later


@pytest.mark.parametrize("hold", [Hold.PRESENT, Hold.LEADING, Hold.NOTHING])
def test_the_first_lookup_waits_until_what_it_has_found_is_registered(successor: Engine, hold: Hold) -> None:
    answer, later = ask(successor, hold)
    assert isinstance(answer, Pending)
    successor.register(limit=5)
    assert not later
    successor.register(limit=10)
    (found,) = later
    assert isinstance(found, Found)
    assert found.runs == ((0, 10),)
    assert bool(found.lease_id) == (hold != Hold.NOTHING)
    successor.register()
    assert len(later) == 1
    answer, later = ask(successor, hold)
    assert isinstance(answer, Found)


def test_a_lookup_of_a_whole_prompt_waits_as_well(successor: Engine) -> None:
    later: list[Message] = []
    answer = successor.session.lookup(LookupPrompt(KEYS), lambda call: later.append(call()))
    assert isinstance(answer, Pending)
    successor.register(limit=9)
    assert not later
    successor.register()
    assert later == [Found(0, ((0, 10),))]


def test_a_lookup_waits_no_longer_than_computing_takes(successor: Engine, bench: HostBench) -> None:
    answer, later = ask(successor)
    assert isinstance(answer, Pending)
    successor.register(limit=4)
    assert bench.host.next_deadline() == bench.clock() + len(KEYS) * 16 / TOKENS_PER_SECOND
    bench.host.expire()
    assert not later
    bench.clock.advance(len(KEYS) * 16 / TOKENS_PER_SECOND)
    bench.host.expire()
    assert bench.host.next_deadline() is None
    (found,) = later
    assert isinstance(found, Found)
    assert found.runs == ((0, 4),), "what is registered by then"


def nothing_is_registered_any_more(engine: Engine) -> None:
    engine.bench.clock.advance(STALLED_SECONDS + 0.1)


def loads_are_bypassed(engine: Engine) -> None:
    engine.pool.facade.admin.set_bypass(load=True, store=False, ttl_seconds=None)


def the_pool_drains(engine: Engine) -> None:
    engine.pool.facade.admin.drain("all", None)


@pytest.mark.parametrize("why", [nothing_is_registered_any_more, loads_are_bypassed, the_pool_drains])
def test_a_lookup_that_cannot_gain_anything_does_not_wait(successor: Engine, why: Callable[[Engine], None]) -> None:
    why(successor)
    answer, later = ask(successor)
    assert answer == Found(0, ())
    assert not later


def test_what_nobody_has_stored_is_not_waited_for(successor: Engine) -> None:
    answer, _ = ask(successor, keys=[key_of(number) for number in range(50, 60)])
    assert answer == Found(0, ())


def test_an_engine_that_cannot_wait_is_answered_at_once(successor: Engine) -> None:
    assert successor.find(*range(10), hold=Hold.PRESENT) == Found(0, ())


def test_the_second_lookup_of_a_hit_does_not_wait(successor: Engine) -> None:
    """What it asks for was within reach at the first."""
    answer, _ = ask(successor, Hold.ALL)
    assert answer == Found(0, ())


def test_a_session_that_has_ended_answers_nothing(successor: Engine, bench: HostBench) -> None:
    _, later = ask(successor)
    session = successor.session
    successor.lose()
    session.registered(0, [])
    bench.clock.advance(MOST_SECONDS)
    session.registered(0, [])
    assert not later


def test_registering_that_takes_too_long_is_not_waited_for() -> None:
    clock = FakeClock()
    waits = MemoryWaits(clock)
    answered: list[str] = []
    waits.advance(100)
    clock.advance(0.1)
    waits.advance(200)  # 1,000 slots a second
    assert not waits.put(401, TOKENS, lambda: answered.append("far"))
    assert waits.put(400, TOKENS, lambda: answered.append("near"))
    clock.advance(0.1)
    waits.advance(700)  # 5,000
    assert answered == ["near"]
    assert waits.put(1700, TOKENS, lambda: answered.append("far"))
    waits.advance(1700)
    assert answered == ["near", "far"]


def test_the_first_deadline_is_the_next() -> None:
    clock = FakeClock()
    waits = MemoryWaits(clock)
    answered: list[str] = []
    assert waits.next_deadline is None
    assert waits.put(10, TOKENS, lambda: answered.append("long"))
    assert waits.put(5, TOKENS // 2, lambda: answered.append("short"))
    assert waits.next_deadline == clock() + 0.05
    clock.advance(0.05)
    waits.expire()
    assert answered == ["short"]
    assert waits.next_deadline == pytest.approx(clock() + 0.05)
    waits.advance(10)
    assert answered == ["short", "long"]
    assert waits.next_deadline is None


def test_waits_are_bounded_in_time_and_number() -> None:
    clock = FakeClock()
    waits = MemoryWaits(clock)
    answered: list[int] = []
    for number in range(MOST_WAITING):
        assert waits.put(10, 100 * TOKENS_PER_SECOND, partial(answered.append, number))
    assert not waits.put(10, TOKENS, lambda: answered.append(-1))
    clock.advance(MOST_SECONDS)
    waits.expire()
    assert answered == list(range(MOST_WAITING))
    assert waits.put(10, TOKENS, lambda: answered.append(-1))


def test_an_engine_is_told_after_the_end_of_a_request_that_some_of_its_blocks_were_lent(bench: HostBench) -> None:
    engine = bench.start()
    engine.session.admit(Admit(7, KEYS, (0, 0)))
    engine.store(*range(10))
    engine.pool.facade.admin.evict(slots=3).run()
    for _ in range(2):
        engine.session.end(End(7))
        bench.run()
    told = [one.message.incomplete for one in engine.pushed if isinstance(one.message, SettledOps)]
    assert [numbers for numbers in told if numbers] == [(7,)]


def test_more_hints_than_an_engine_can_send_are_ignored(bench: HostBench) -> None:
    engine = bench.start()
    admit = Admit(1, [], (0, 0), Hints(context_id("trip"), ignored=("unknown",)))

    def send(count: int) -> dict[str, int]:
        for _ in range(count):
            engine.session.admit(admit)
        return {reason: num for reason, num in engine.pool.counters.hints_ignored.items() if num}

    assert send(HINTS_PER_SECOND + 2) == {"unknown": HINTS_PER_SECOND, "rate": 2}
    bench.clock.advance(1)
    assert send(1) == {"unknown": HINTS_PER_SECOND + 1, "rate": 2}
