"""KV events of an engine that is attached: what a router is told while blocks, sessions and the service come and go."""

from __future__ import annotations

from typing import Any, cast

import pytest
from tests.doubles.fakes import FakeClock
from tests.service.connectors.engine_core.test_kvevents import Removed, Request, Stored
from tests.service.connectors.vllm.slowservice import SlowService

from kvstow.attach.calls import EventPage
from kvstow.attach.connection import Answer
from kvstow.config import EngineConfig
from kvstow.control.attachedsession import AttachedSession
from kvstow.descriptions import DescribedBlocks
from kvstow.keys import make_key
from kvstow.messages import Completion, RankReport
from kvstow_service.connectors.engine_core import kvevents
from kvstow_service.connectors.engine_core.kvevents import (
    PERIOD_SECONDS,
    AttachedBlocks,
    EventFeed,
    GroupKind,
    Vocabulary,
)
from kvstow_service.connectors.engine_core.kvgroups import KVGroup, KVGroups
from kvstow_service.connectors.engine_core.trackedrequests import TrackedRequest

SLOTS = 16
GROUPS = KVGroups((KVGroup(0, 2, 1),), 2)
TOKENS = list(range(100, 180))
HASHES = [bytes([number]) * 32 for number in range(1, 40)]


def keys_of(*numbers: int) -> list[bytes]:
    return [make_key(0, bytes([number]) * 32) for number in numbers]


def tracked() -> TrackedRequest:
    return TrackedRequest(cast(Any, Request(HASHES, TOKENS)), 1)


class Bench:
    """An engine that is attached to a service whose answers arrive with the next step, and its feed."""

    def __init__(self, *, event_buffer: int = 64) -> None:
        self.clock = FakeClock()
        config = EngineConfig(slot_bytes=64, capacity_slots=SLOTS, event_buffer=event_buffer)
        self.service = SlowService(config, SLOTS, clock=self.clock, delay=lambda: 1)
        self.control = self.service.control()
        self.has_memory = True
        self.source = AttachedBlocks(self.control, lambda: self.has_memory, self.clock)
        vocabulary = Vocabulary(Stored, Removed, lambda block_hash: block_hash[0], lambda *span: span[1:])
        self.feed = EventFeed(self.source, [GroupKind("full")], vocabulary)
        self.feed.follow_requests(GROUPS, {}, 100)
        self.told: dict[int, Stored] = {}
        """What a router knows: by block hash."""
        self.step()

    @property
    def session(self) -> AttachedSession:
        assert self.service.session is not None
        return self.service.session

    def step(self, seconds: float = PERIOD_SECONDS) -> list[Stored | Removed]:
        """One step, as a router sees it."""
        self.clock.advance(seconds)
        self.control.step()
        if self.service.session is not None and not self.session.is_lost:
            join(self.service, self.session)
        self.control.take_settled()
        events: list[Stored | Removed] = self.feed.take_events()
        for event in events:
            for block_hash in event.block_hashes:
                if isinstance(event, Stored):
                    self.told[block_hash] = event
                else:
                    del self.told[block_hash]
        return events

    def settle(self) -> None:
        """Steps without a pause until nothing is to be waited for."""
        for _ in range(20):
            if not self.feed.is_behind:
                return
            self.step(0.0)
        raise AssertionError("the source stays behind")

    def store(self, *numbers: int) -> None:
        """Blocks of one request, from its first on."""
        keys = keys_of(*numbers)
        self.feed.known.follow(tracked())
        answer = self.control.begin_store(keys, range(len(keys)), request_id="r")
        self.step(0.0)
        assert answer.done
        grant = answer.value
        assert grant.op is not None
        self.control.describe_store(grant.op, self.feed.granted(keys, grant))
        self.control.complete(0, "boot", [Completion(grant.op.op_id, "done")])
        self.step(0.0)

    def purge(self, *numbers: int) -> None:
        assert self.service.facade.admin.purge(keys=keys_of(*numbers)).run().finished


def join(service: SlowService, session: AttachedSession) -> None:
    """Its only rank has all memory."""
    desired = service.pool.target.desired
    report = RankReport(
        rank=0,
        boot_id="boot",
        state="ready",
        slot_bytes=64,
        pinned_slots=SLOTS,
        target_slots=SLOTS,
        pinned_bytes=0,
        target_bytes=0,
        engine_id=desired.engine_id,
        applied=desired.number,
        sender=f"s{session.session_id}",
        number=1,
    )
    session.report(report)


def store_elsewhere(service: SlowService, session: AttachedSession, *numbers: int, described: bool = False) -> None:
    """Another engine of the same namespace stores these blocks."""
    join(service, session)
    op = session.begin_store(keys_of(*numbers), range(len(numbers))).op
    assert op is not None
    if described:
        tokens = [bytes([number, 0, 0, 0] * 2) for number in numbers]
        session.describe_store(op.op_id, range(len(numbers)), DescribedBlocks(tuple(tokens)))
    session.complete(0, "boot", [Completion(op.op_id, "done")])


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_an_own_store_is_told_with_its_tokens_before_the_engine_rests(bench: Bench) -> None:
    bench.step()
    bench.store(1, 2, 3)
    assert bench.feed.is_behind
    bench.settle()
    event = bench.told[1]
    assert event.block_hashes == [1, 2, 3]
    assert event.token_ids == [100, 101, 102, 103, 104, 105]
    assert event.medium == "CPU"


def test_the_failure_of_the_last_store_is_sent_though_no_step_follows(bench: Bench) -> None:
    """An engine that has nothing left to wait for makes no more steps, and the store's slot would never be free."""
    answer = bench.control.begin_store(keys_of(1), [0], request_id="r")
    bench.step(0.0)
    assert answer.value.op is not None
    bench.control.complete(0, "boot", [Completion(answer.value.op.op_id, "failed", "broken")])
    assert [one.mark for one in bench.control.take_settled()] == ["failed"]
    assert (bench.control.awaited_transfers, list(bench.service.facade.transfers())) == (0, [])


def test_an_eviction_is_told(bench: Bench) -> None:
    bench.store(1, 2)
    bench.settle()
    bench.purge(2)
    bench.step()
    assert bench.step() == [Removed([2], "CPU", 0)]
    assert set(bench.told) == {1}


def test_without_news_the_service_is_asked_ten_times_a_second(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.settle()
    asked: list[int] = []
    read = bench.control.read_events

    def noted(after: int) -> Answer[EventPage]:
        asked.append(after)
        return read(after)

    monkeypatch.setattr(bench.control, "read_events", noted)
    for _ in range(100):
        bench.step(PERIOD_SECONDS / 10)
    assert 9 <= len(asked) <= 11


def test_what_other_engines_store_is_told_with_their_tokens(bench: Bench) -> None:
    other = bench.service.pool.attach("other", bench.session.namespace.name)
    store_elsewhere(bench.service, other, 37, described=True)
    bench.step()
    bench.step()
    assert (bench.told[37].token_ids, bench.told[37].block_size) == ([37, 37], 2)


def test_what_nobody_has_described_is_told_when_a_request_has_loaded_it(bench: Bench) -> None:
    other = bench.service.pool.attach("other", bench.session.namespace.name)
    store_elsewhere(bench.service, other, 1, 2)
    bench.step()
    bench.settle()
    assert bench.told == {}
    bench.feed.used(tracked(), 0, 4)
    assert bench.feed.is_behind
    bench.settle()
    assert [event.token_ids for event in bench.told.values()] == [[100, 101, 102, 103]] * 2


def test_a_block_that_was_found_and_removed_before_the_answer_came_does_not_stay(bench: Bench) -> None:
    """A lookup finds it, then it is removed, then the engine asks for news: both answers come in one step."""
    other = bench.service.pool.attach("other", bench.session.namespace.name)
    store_elsewhere(bench.service, other, 1)
    bench.step()
    bench.settle()
    for delays in range(1, 4):
        bench.service.delay = lambda delays=delays: delays  # type: ignore[misc]
        bench.feed.used(tracked(), 0, 2)
        bench.step(0.0)
        bench.purge(1)
        for _ in range(8):
            bench.step()
        assert bench.told == {}
        store_elsewhere(bench.service, other, 1)


def test_what_was_stored_before_the_engine_came_is_told(bench: Bench) -> None:
    other = bench.service.pool.attach("other", bench.session.namespace.name)
    store_elsewhere(bench.service, other, 37, described=True)
    bench.service.lose()
    bench.step()
    bench.settle()
    assert set(bench.told) == {37}


def test_an_engine_is_not_sent_what_it_has_described_itself(bench: Bench) -> None:
    bench.store(1, 2)
    page = bench.control.read_events(0)
    bench.step()
    (change,) = page.value.changes
    assert (change.kind, len(change.keys), change.described) == ("stored", 2, ())


@pytest.fixture
def withdrawn_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step withdraws one announcement, so that some come back before they are withdrawn."""
    monkeypatch.setattr(kvevents, "_WITHDRAWN_PER_TAKE", 1)


def test_when_the_service_goes_nothing_stays_announced(bench: Bench, withdrawn_one_by_one: None) -> None:
    bench.store(1, 2, 3)
    bench.settle()
    bench.service.is_up = False
    bench.service.lose()
    for left in (2, 1, 0):
        bench.step()
        assert len(bench.told) == left, "slice by slice"
    assert not bench.feed.is_behind


@pytest.mark.parametrize("is_log_kept", [True, False])
def test_when_the_service_comes_back_what_it_has_kept_is_announced_again(
    bench: Bench, withdrawn_one_by_one: None, *, is_log_kept: bool
) -> None:
    bench.store(1, 2, 3)
    bench.settle()
    bench.service.lose()
    bench.purge(2)
    if not is_log_kept:  # another process has the pool
        log = bench.service.pool.events
        log.__init__(64, lambda: SLOTS)  # type: ignore[misc]
    for _ in range(6):
        bench.step()
    assert set(bench.told) == {1, 3}


def test_blocks_are_looked_up_again_once_the_ranks_have_memory(bench: Bench) -> None:
    """Before that, none would be found."""
    bench.store(1, 2)
    bench.settle()
    bench.service.lose()
    log = bench.service.pool.events
    log.__init__(64, lambda: SLOTS)  # type: ignore[misc]
    bench.has_memory = False
    for _ in range(6):
        bench.step()
    assert bench.told == {}
    bench.has_memory = True
    for _ in range(3):
        bench.step()
    assert set(bench.told) == {1, 2}


def test_after_a_reset_nothing_stays_announced_or_comes_back(bench: Bench) -> None:
    bench.store(1, 2)
    bench.settle()
    bench.store(3)  # told after the reset, if the answer were taken
    bench.control.reset()
    for _ in range(6):
        bench.step()
    assert bench.told == {}
    bench.store(4)
    bench.settle()
    assert set(bench.told) == {4}


def test_after_lost_events_no_announcement_is_stale() -> None:
    bench = Bench(event_buffer=2)
    bench.store(1, 2, 3)
    bench.settle()
    bench.purge(2)
    other = bench.service.pool.attach("other", bench.session.namespace.name)
    for _ in range(3 * SLOTS):
        store_elsewhere(bench.service, other, 9)
        bench.purge(9)
    for _ in range(8):
        bench.step()
    assert set(bench.told) == {1, 3}


def test_a_service_that_does_not_answer_ends_the_session_and_the_steps(bench: Bench) -> None:
    bench.store(1)
    bench.settle()
    bench.service.is_silent = True
    bench.step()
    assert bench.feed.is_behind
    for _ in range(60):
        bench.service.is_up = False
        bench.step()
    assert not bench.feed.is_behind
    assert bench.told == {}
