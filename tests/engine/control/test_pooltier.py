"""What is read from the store below a pool and written to it, and what a request waits for."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from math import isclose
from typing import Any

import pytest
from tests.doubles.memoryblockstore import MemoryBlockStore
from tests.engine.control.sharedhost import Host
from tests.engine.control.tieredpool import KEYS, TieredPool

from kvstow.control.indexjournal import IndexJournal
from kvstow.control.pooltier import ANSWER_SECONDS, WRITING_SHARE
from kvstow.control.session import result_of
from kvstow.errors import NotFoundError
from kvstow.hints import Hints
from kvstow.prefill import PrefillCost
from kvstow.results import Needed
from kvstow.tier.blockstore import Expectation, Piece, Purged, PurgeWish
from kvstow.tier.breakeven import FIRST_PROBE_SECONDS, PROBE_BLOCKS
from kvstow.tier.tierstatus import TIER_FAILED

pytestmark = pytest.mark.usefixtures("no_log_lines")


# -- reads ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answers_later", [False, True])
def test_a_request_gets_what_the_store_has_and_the_pool_lacks(answers_later: bool) -> None:
    tiered = TieredPool()
    tiered.store.answers_later = answers_later
    tiered.put(KEYS[:10])
    assert tiered.fetch(KEYS[:12]) == 10
    counters = tiered.of.counters
    assert (counters.requests, counters.found_blocks, counters.read_blocks) == (1, 10, 10)
    assert counters.saved_seconds == pytest.approx(10 * 0.01)
    tiered.check()


def test_what_the_pool_has_in_between_is_not_read() -> None:
    tiered = TieredPool()
    tiered.put(KEYS[:8])
    tiered.store_blocks(KEYS[:2])
    tiered.store_blocks(KEYS[4:6])
    tiered.run()
    request = tiered.look(KEYS[:8], first=2)
    tiered.run()
    request.end()
    assert tiered.of.counters.read_blocks == 4
    assert tiered.loaded(KEYS[:8]) == 8


def test_a_hit_ends_at_a_block_that_an_engine_is_storing_just_now() -> None:
    tiered = TieredPool()
    tiered.put(KEYS[:6])
    tiered.engine.begin_store(KEYS[3:4])
    request = tiered.look(KEYS[:6])
    tiered.run()
    request.end()
    assert tiered.of.counters.read_blocks == 3
    tiered.engine.run()
    tiered.check()


def test_two_requests_share_a_read() -> None:
    tiered = TieredPool()
    tiered.put(KEYS[:8])
    first, second = tiered.look(KEYS[:6]), tiered.look(KEYS[:8])
    assert (tiered.of.counters.found_blocks, len(tiered.store.pools[0].reads)) == (8, 2)
    tiered.run()
    for one in (first, second):
        one.end()
    assert tiered.of.counters.read_blocks == 8
    assert tiered.loaded(KEYS[:8]) == 8


def test_a_block_that_does_not_arrive_is_a_miss_and_costs_no_slot() -> None:
    tiered = TieredPool()
    tiered.put(KEYS[:8])
    tiered.store.fate = lambda name: "missing" if name[1] == KEYS[3] else None
    assert tiered.fetch(KEYS[:8]) == 3
    assert tiered.of.counters.failed_read_blocks == 1
    assert tiered.counts["cached"] == 7
    assert tiered.counts["filling"] == 0


def test_a_store_that_brings_nothing_back_is_asked_for_no_more_than_probes() -> None:
    tiered = TieredPool()
    tiered.store.fate = lambda name: "corrupt"
    tiered.takes(0.05)  # computing takes 0.1
    declined = []
    for _ in range(8):
        tiered.put(KEYS[:10])
        assert tiered.fetch(KEYS[:10]) == 0
        declined.append(tiered.of.counters.declined_requests)
    assert declined == [0, 0, 0, 1, 2, 3, 4, 5]


def test_a_read_that_was_given_up_says_nothing_about_what_the_store_loses() -> None:
    tiered = TieredPool()
    tiered.put(KEYS[:8])
    tiered.takes(0.06)  # computing takes 0.08
    request = tiered.look(KEYS[:8])
    tiered.clock.advance(0.081)
    tiered.tier.expire()
    tiered.run()
    request.end()
    assert tiered.fetch(KEYS[:8]) == 8
    assert tiered.of.counters.declined_requests == 0


def test_no_key_is_visible_before_its_bytes_have_arrived() -> None:
    tiered = TieredPool()
    tiered.put(KEYS[:8])
    tiered.look(KEYS[:8])
    assert tiered.engine.session.lookup(KEYS[:8]) == 0
    assert tiered.counts["filling"] == 8
    tiered.run()
    assert tiered.engine.session.lookup(KEYS[:8]) == 8


def test_what_arrives_is_leased_to_its_request_in_the_moment_in_which_it_becomes_visible() -> None:
    """Otherwise the next store would evict it before the request has looked again."""
    tiered = TieredPool(slots=8)
    tiered.put(KEYS[:4])
    request = tiered.look(KEYS[:4])
    tiered.store.run()  # the request has not been told yet
    assert tiered.counts["leased"] == 4
    tiered.store_blocks(KEYS[10:18])
    tiered.run()
    assert tiered.engine.session.lookup(KEYS[:4]) == 4
    request.end()
    tiered.store_blocks(KEYS[20:24])
    assert tiered.engine.session.lookup(KEYS[:4]) == 0
    tiered.check()


def test_an_engine_that_ends_meanwhile_leaves_nothing_held() -> None:
    tiered = TieredPool()
    tiered.put(KEYS[:8])
    tiered.look(KEYS[:8])
    tiered.store.run()
    tiered.engine.session.lose("closed")
    tiered.host.kill(tiered.engine)
    tiered.run()
    assert (tiered.counts["leased"], tiered.counts["cached"]) == (0, 8)


def test_nothing_is_read_into_a_namespace_that_nobody_finds() -> None:
    tiered = TieredPool()
    tiered.put(KEYS[:4])
    tiered.store_blocks(KEYS[:1])
    tiered.engine.session.lose("closed")
    tiered.host.kill(tiered.engine)
    tiered.pool.drop_namespace("model").run()
    assert result_of(tiered.tier.look_for(tiered.of, tiered.engine.session, KEYS[:4], lambda: None)) is None
    assert not tiered.store.pools[0].reads
    assert tiered.counts["free"] == 40


def test_what_is_read_when_the_last_engine_ends_is_there_for_the_next_one() -> None:
    tiered = TieredPool()
    tiered.put(KEYS[:4])
    tiered.look(KEYS[:4])
    tiered.engine.session.lose("closed")
    tiered.host.kill(tiered.engine)
    tiered.run()
    assert tiered.host.attach().session.lookup(KEYS[:4]) == 4
    tiered.check()


def test_keys_that_the_journal_could_not_publish_are_not_read() -> None:
    keys = [b"k", b"longer"]
    journal = IndexJournal.create(40, {})
    tiered = TieredPool(journal=journal)
    tiered.put(keys)
    tiered.look(keys)
    assert not tiered.store.pools[0].reads
    assert tiered.counts["free"] == 40


# -- the order of eviction --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("uses", [1, 2])
def test_the_request_that_fetched_is_no_use_and_the_next_hit_is(uses: int) -> None:
    tiered = TieredPool(slots=12)
    tiered.put(KEYS[:4])
    tiered.store_blocks(KEYS[10:18])
    tiered.run()
    assert tiered.fetch(KEYS[:4]) == 4
    for _ in range(uses - 1):
        tiered.use(KEYS[:4])
    tiered.clock.advance(10.0)
    tiered.use(KEYS[10:18])
    tiered.clock.advance(10.0)
    tiered.use(KEYS[:4])
    tiered.store_blocks(KEYS[20:24])
    found = (tiered.engine.session.lookup(KEYS[:4]), tiered.engine.session.lookup(KEYS[10:18]))
    assert found == ((0, 8) if uses == 1 else (4, 4)), "what was used least recently goes, its end first"
    tiered.check()


def test_what_was_written_is_known_to_be_in_the_store() -> None:
    tiered = TieredPool()
    below = tiered.pool.index.chains.below
    tiered.store_blocks(KEYS[:4])
    assert len(below) == 0
    tiered.run()
    assert len(below) == 4
    tiered.check()


def test_the_cost_of_reading_is_an_average_of_the_decisions() -> None:
    tiered = TieredPool()
    hazards = tiered.pool.index.chains.hazards
    tiered.put(KEYS[:30])
    tiered.takes(0.0025)  # of 0.01 s for a block
    for key in KEYS[:29]:
        tiered.fetch([key])
    cheap = 0.25 + 0.75 * 0.98**29
    assert isclose(hazards.fetch_cost, cheap)
    tiered.takes(100.0)
    tiered.look(KEYS[29:30])
    assert isclose(hazards.fetch_cost, cheap + 0.02 * (1.0 - cheap)), "what is not read costs as much as computing"


@pytest.mark.parametrize("has_failed", [False, True])
def test_nothing_is_cheap_to_read_from_a_store_that_is_not_used(has_failed: bool) -> None:
    tiered = TieredPool()
    tiered.put(KEYS[:1])
    tiered.takes(0.0)
    tiered.fetch(KEYS[:1])
    hazards = tiered.pool.index.chains.hazards
    assert hazards.fetch_cost < 1.0
    if has_failed:
        tiered.tier.fail(ValueError("a defect"))
    else:
        tiered.tier.close(lambda: None)
    assert hazards.fetch_cost == 1.0


# -- the gate ---------------------------------------------------------------------------------------------------------


def test_a_read_that_takes_as_long_as_computing_is_not_begun_and_nobody_waits() -> None:
    tiered = TieredPool()
    tiered.put(KEYS[:20])
    tiered.takes(0.161)  # of 0.2 s for 20 blocks
    assert tiered.look(KEYS[:20]).wait is None
    assert tiered.of.counters.declined_requests == 1
    tiered.takes(0.159)
    assert tiered.look(KEYS[:20]).wait is not None
    tiered.run()
    tiered.check()


def test_a_store_that_was_not_measured_is_measured_by_a_few_blocks_for_which_nobody_waits() -> None:
    tiered = TieredPool()
    tiered.put(KEYS[:20])
    tiered.takes(None)
    assert tiered.look(KEYS[:20]).wait is None
    tiered.run()
    assert tiered.of.counters.read_blocks == PROBE_BLOCKS
    assert tiered.look(KEYS[:20], first=16).wait is None
    tiered.run()
    assert tiered.of.counters.read_blocks == PROBE_BLOCKS, "one probe at a time"
    tiered.clock.advance(FIRST_PROBE_SECONDS)
    tiered.look(KEYS[:20], first=16)
    tiered.run()
    assert tiered.of.counters.read_blocks == 20


def test_while_reads_do_not_pay_nobody_waits_for_an_answer_of_the_store() -> None:
    tiered = TieredPool()
    tiered.put(KEYS[:20])
    tiered.store.answers_later = True
    tiered.takes(5.0)
    request = tiered.look(KEYS[:20])
    assert request.wait is not None
    tiered.run()
    request.end()
    assert tiered.look(KEYS[:20]).wait is None
    tiered.takes(0.0)
    tiered.run()  # what it finds shows that reads pay again
    assert tiered.look(KEYS[:20]).wait is not None
    tiered.run()
    tiered.check()


def test_a_request_waits_no_longer_than_computing_takes_and_uses_what_has_arrived() -> None:
    tiered = TieredPool()
    tiered.put(KEYS[:8])
    request = tiered.look(KEYS[:8])
    tiered.store.pools[0].move(tiered.store.pools[0].reads)  # 4 of 8
    tiered.clock.advance(0.079)
    tiered.tier.expire()
    tiered.answers and tiered.answers.pop()()
    assert not request.is_over
    assert tiered.tier.next_deadline == pytest.approx(0.08)
    tiered.clock.advance(0.002)
    tiered.tier.expire()
    tiered.run()
    request.end()
    assert (tiered.of.counters.cut_waits, tiered.loaded(KEYS[:8])) == (1, 4)
    assert tiered.of.counters.wait_seconds == pytest.approx(0.081)
    assert not tiered.store.pools[0].reads, "nobody waits for the rest, so it is not read"
    assert tiered.counts["filling"] == 0


def test_a_request_waits_for_an_answer_of_the_store_for_a_moment_only() -> None:
    tiered = TieredPool()
    tiered.put(KEYS[:8])
    tiered.store.answers_later = tiered.store.is_hanging = True
    request = tiered.look(KEYS[:8])
    assert tiered.tier.next_deadline == pytest.approx(ANSWER_SECONDS)
    tiered.clock.advance(ANSWER_SECONDS)
    tiered.tier.expire()
    tiered.run()
    request.end()
    tiered.store.is_hanging = False
    tiered.run()
    assert not tiered.store.pools[0].reads


def test_until_an_engine_has_told_what_prompts_cost_reads_pay() -> None:
    tiered = TieredPool(knows_prefill=False)
    tiered.put(KEYS[:4])
    tiered.takes(100.0)
    assert tiered.fetch(KEYS[:4]) == 4
    assert tiered.of.counters.saved_seconds == 0.0
    tiered.tier.note_prefill(tiered.of, PrefillCost(0.001))
    assert tiered.tier.statuses()[0].prefill_tokens_per_second == pytest.approx(1000)


# -- writes -----------------------------------------------------------------------------------------------------------


def test_every_block_is_written_once_when_it_is_stored_root_first() -> None:
    tiered = TieredPool(slots=400)
    tiered.store_blocks(KEYS[:8])
    (write,) = tiered.store.pools[0].writes
    assert list(write.keys) == KEYS[:8]
    tiered.run()
    tiered.use(KEYS[:8])
    tiered.run()
    assert (tiered.in_store(KEYS[:8]), tiered.of.counters.written_blocks) == ([True] * 8, 8)
    tiered.check()


def test_what_could_not_be_written_is_written_at_its_next_use() -> None:
    tiered = TieredPool(slots=400)
    tiered.store.fate = lambda name: "refused" if name[1] in KEYS[2:4] else None
    tiered.store_blocks(KEYS[:6])
    tiered.run()
    assert tiered.in_store(KEYS[:6]) == [True, True, False, False, True, True]
    assert tiered.of.counters.failed_write_blocks == 2
    tiered.store.fate = lambda name: None
    tiered.use(KEYS[:6])
    (write,) = tiered.store.pools[0].writes
    assert list(write.keys) == KEYS[2:4]
    tiered.run()
    assert tiered.in_store(KEYS[:6]) == [True] * 6


def test_writes_keep_at_most_a_twentieth_of_the_pool_and_the_rest_follows() -> None:
    tiered = TieredPool(slots=100)
    most = int(WRITING_SHARE * 100)
    tiered.store_blocks(KEYS[:12])
    assert tiered.counts["leased"] == most
    tiered.store_blocks(KEYS[20:22])
    assert tiered.counts["leased"] == most
    held: list[int] = []
    while tiered.store.has_work():
        pool = tiered.store.pools[0]
        pool.move(pool.writes)
        held.append(tiered.counts["leased"])
    assert max(held) <= most
    assert tiered.in_store([*KEYS[:12], *KEYS[20:22]]) == [True] * 14


def test_what_waits_to_be_written_is_bounded_and_the_rest_is_written_at_its_next_use() -> None:
    tiered = TieredPool(slots=2000)
    tiered.store.is_hanging = True
    keys = [number.to_bytes(3, "big") for number in range(1000, 2200)]
    for key in keys:
        tiered.store_blocks([key])
    postponed = tiered.of.counters.postponed_blocks
    assert 0 < postponed < 200
    tiered.store.is_hanging = False
    tiered.run()
    assert tiered.in_store(keys) == [True] * (1200 - postponed) + [False] * postponed
    tiered.use(keys[-8:])
    tiered.run()
    assert tiered.in_store(keys[-8:]) == [True] * 8


def test_a_slot_that_is_being_written_is_not_reused() -> None:
    tiered = TieredPool(slots=20)
    tiered.store_blocks(KEYS[:1])
    tiered.store_blocks(KEYS[1:39])
    tiered.run()
    tiered.pool.admin.evict(slots=1000).run()
    assert tiered.fetch(KEYS[:1]) == 1


def test_a_use_is_noted_also_of_blocks_that_the_pool_has_lost() -> None:
    tiered = TieredPool(slots=400, store=MemoryBlockStore(places=6))
    tiered.put(KEYS[:6])
    result_of(tiered.tier.note_use(tiered.of, KEYS[:3]))
    tiered.store_blocks(KEYS[10:13])
    tiered.run()
    assert tiered.in_store(KEYS[:6]) == [True] * 3 + [False] * 3


# -- long chains ------------------------------------------------------------------------------------------------------


def steps_of(steps: Generator[None, None, object]) -> int:
    return 1 + sum(1 for _ in steps)


def asked_in(tiered: TieredPool, monkeypatch: pytest.MonkeyPatch, what: str) -> list[Sequence[bytes]]:
    """The keys of each call of this name, from now on, where three keys make a slice."""
    stored, asked = tiered.tier.stored_pool, list[Sequence[bytes]]()
    call = getattr(stored, what)

    def note(fingerprint: str, keys: Sequence[bytes], *args: object, **options: object) -> object:
        asked.append(keys)
        return call(fingerprint, keys, *args, **options)

    monkeypatch.setattr(stored, what, note)
    tiered.pool.slice_slots = tiered.pool.debts.slice_slots = 3
    return asked


def test_a_long_chain_is_looked_for_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    tiered = TieredPool()
    tiered.put(KEYS[:8])
    asked = asked_in(tiered, monkeypatch, "has")
    steps = tiered.tier.look_for(tiered.of, tiered.engine.session, KEYS[:8], lambda: None)
    assert steps_of(steps) == 3
    assert asked == [KEYS[:3], KEYS[3:6], KEYS[6:8]]
    tiered.run()
    assert tiered.loaded(KEYS[:8]) == 8


def test_what_comes_behind_a_gap_is_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    tiered = TieredPool()
    tiered.put([*KEYS[:1], *KEYS[2:4], *KEYS[5:20]])
    tiered.store_blocks(KEYS[1:2])
    tiered.run()
    asked = asked_in(tiered, monkeypatch, "has")
    request = tiered.look(KEYS[:20])
    tiered.run()
    request.end()
    assert asked == [KEYS[:3], KEYS[3:6]]
    assert tiered.loaded(KEYS[:20]) == 4


def test_a_long_chain_is_offered_in_slices_its_root_last_and_written_root_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tiered = TieredPool(slots=400, store=MemoryBlockStore(most_in_piece=8))
    tiered.store.wants = lambda key, is_use: is_use
    tiered.store_blocks(KEYS[:8])
    offered = asked_in(tiered, monkeypatch, "offer")
    written = list[Sequence[bytes]]()
    monkeypatch.setattr(tiered.tier.stored_pool, "write", lambda transfer: written.append(list(transfer.keys)))
    assert steps_of(tiered.tier.note_use(tiered.of, KEYS[:8])) == 3
    assert offered == [KEYS[6:8], KEYS[3:6], KEYS[:3]]
    assert written == [KEYS[:3], KEYS[3:6], KEYS[6:8]]


# -- namespaces -------------------------------------------------------------------------------------------------------


def test_a_namespace_without_a_fingerprint_is_neither_written_nor_read() -> None:
    tiered = TieredPool()
    tiered.put(KEYS[:4])
    other = tiered.host.attach(namespace="another")
    of = tiered.enter(other, None)
    tiered.store_blocks(KEYS[:8], other)
    tiered.use(KEYS[:8], other, of)
    assert not tiered.store.pools[0].writes
    assert result_of(tiered.tier.look_for(of, other.session, KEYS[:4], lambda: None)) is None
    assert [(one.state, one.reason) for one in tiered.tier.statuses()] == [("on", ""), ("off", "for a reason")]


def test_counters_outlive_their_namespace() -> None:
    tiered = TieredPool(slots=400)
    tiered.store_blocks(KEYS[:4])
    tiered.run()
    tiered.engine.session.reset()
    tiered.pool.drop_namespace("model")
    tiered.enter(tiered.engine, None)
    assert [one.namespace for one in tiered.tier.statuses()] == [tiered.engine.session.namespace.name]
    assert tiered.tier.totals()["model"].written_blocks == 4


# -- several groups ---------------------------------------------------------------------------------------------------

FULL, WINDOW = KEYS[:6], KEYS[6:12]


class FullAndWindow:
    """A hit of n blocks needs the first n blocks of one group, and the n-th block of the other one."""

    most = 6

    def __call__(self, has: Callable[[Sequence[bytes]], Sequence[bool]], most: int | None = None) -> Needed:
        full, window = has(FULL), has(WINDOW)
        for number in range(self.most if most is None else most, 0, -1):
            if all(full[:number]) and window[number - 1]:
                return Needed([*FULL[:number], *WINDOW[number - 1 : number]], number)
        return Needed((), 0)


def read_of_groups(slots: int, in_store: Sequence[bytes], in_pool: Sequence[bytes] = ()) -> int:
    """How many blocks hit when a request of several groups has come."""
    tiered = TieredPool(slots)
    whole = TieredPool(100, store=MemoryBlockStore(shares=tiered.store))
    whole.put(list(in_store))
    if in_pool:
        tiered.store_blocks(in_pool)
    tiered.run()
    request = tiered.look([*FULL, *WINDOW], needs=FullAndWindow())
    tiered.run()
    request.end()
    tiered.check()
    return FullAndWindow()(tiered.engine.session.contains).blocks


@pytest.mark.parametrize(("slots", "blocks"), [(7, 6), (6, 5), (5, 4), (2, 1), (1, 0)])
def test_a_read_is_cut_to_a_hit_that_the_pool_has_room_for(slots: int, blocks: int) -> None:
    assert read_of_groups(slots, [*FULL, *WINDOW]) == blocks


def test_lengths_that_are_no_hit_are_passed_over_and_blocks_of_the_hit_itself_make_no_room() -> None:
    assert read_of_groups(6, [*FULL, WINDOW[1], WINDOW[5]]) == 2
    assert read_of_groups(5, [*FULL, *WINDOW], [*FULL[:2], WINDOW[1]]) == 4


# -- contexts ---------------------------------------------------------------------------------------------------------


CONTEXT = b"c" * 16


def pool_and_store() -> TieredPool:
    """Both have eight blocks."""
    tiered = TieredPool(slots=400)
    tiered.store_blocks(KEYS[:8])
    tiered.run()
    return tiered


def use_in_context(tiered: TieredPool, keys: Sequence[bytes], hints: Hints) -> None:
    session = tiered.engine.session
    number = session.admit(keys, hints=hints)
    result_of(tiered.tier.note_use(tiered.of, keys))
    session.end_request(number)
    tiered.tier.note_context(tiered.of, CONTEXT)


def end_in_context(tiered: TieredPool, keys: Sequence[bytes]) -> None:
    use_in_context(tiered, keys, Hints(context=CONTEXT))


def test_what_a_context_has_used_is_read_before_its_next_request() -> None:
    tiered = pool_and_store()
    end_in_context(tiered, KEYS[:8])
    tiered.pool.admin.evict(slots=1000).run()
    assert tiered.tier.prefetch(CONTEXT) == 8
    tiered.run()
    assert tiered.loaded(KEYS[:8]) == 8
    assert tiered.of.counters.prefetched_blocks == 8
    assert tiered.tier.prefetch(b"d" * 16) is None


def test_nothing_is_prefetched_while_anything_is_queued() -> None:
    tiered = pool_and_store()
    end_in_context(tiered, KEYS[:8])
    tiered.pool.admin.evict(slots=1000).run()
    tiered.takes(0.0, queued=1)
    tiered.tier.prefetch(CONTEXT)
    tiered.run()
    assert tiered.of.counters.prefetched_blocks == 0
    tiered.takes(0.0)
    tiered.tier.expire()
    tiered.run()
    assert tiered.of.counters.prefetched_blocks == 8


class InterruptedLock:
    """The lock of a pool. When it is next released after `interrupt`, another thread gets its turn."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self._then: Callable[[], object] | None = None

    def interrupt(self, then: Callable[[], object]) -> None:
        self._then = then

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        then, self._then = self._then, None
        if then is not None:
            then()


def test_two_threads_go_on_with_a_prefetch_at_once() -> None:
    """One of them serves operators, one engines, and one the store."""
    tiered = pool_and_store()
    end_in_context(tiered, KEYS[:8])
    tiered.pool.admin.evict(slots=1000).run()
    lock = InterruptedLock(tiered.pool.lock)
    tiered.pool.lock = lock  # type: ignore[assignment]
    turns = [tiered.tier.expire]

    def expect(num_blocks: int) -> Expectation:
        if turns and tiered.of.counters.prefetched_blocks:  # of two pieces, the first one has arrived
            lock.interrupt(turns.pop())
        return Expectation(0.0, 0, 0.0)

    tiered.store.expectation = expect
    tiered.tier.prefetch(CONTEXT)
    tiered.run()
    assert not turns
    assert [status.state for status in tiered.tier.statuses()] == ["on"]
    assert (tiered.of.counters.prefetched_blocks, tiered.of.counters.read_blocks) == (8, 8)
    assert tiered.loaded(KEYS[:8]) == 8


@pytest.mark.parametrize(("turns", "blocks"), [(2, 8), (1, 0)])
def test_a_context_is_prefetched_shortly_before_it_is_expected_if_it_has_come_back_before(
    turns: int, blocks: int
) -> None:
    tiered = pool_and_store()
    for _ in range(turns):
        tiered.clock.advance(100.0)
        use_in_context(tiered, KEYS[:8], Hints(context=CONTEXT, resume_in=100.0))
    tiered.pool.admin.evict(slots=1000).run()
    tiered.clock.advance(90.0)
    tiered.tier.expire()
    tiered.run()
    assert tiered.of.counters.read_blocks == 0, "it is too early"
    tiered.clock.advance(9.0)
    tiered.tier.expire()
    tiered.run()
    assert tiered.of.counters.read_blocks == blocks


@pytest.mark.parametrize("said", [None, 1000.0])
def test_an_operator_who_says_when_a_context_comes_back_moves_its_prefetch(said: float | None) -> None:
    tiered = pool_and_store()
    for _ in range(2):
        use_in_context(tiered, KEYS[:8], Hints(context=CONTEXT, resume_in=said))
    tiered.pool.admin.evict(slots=1000).run()
    tiered.pool.admin.set_context(CONTEXT, 100.0)
    tiered.run()
    deadline = tiered.tier.next_deadline
    assert deadline is not None
    assert tiered.clock() < deadline < tiered.clock() + 100.0
    tiered.clock.advance(99.0)
    tiered.tier.expire()
    tiered.run()
    assert tiered.of.counters.prefetched_blocks == 8


def test_who_wants_blocks_kept_for_a_time_does_not_say_when_it_comes_back() -> None:
    tiered = pool_and_store()
    for _ in range(2):
        tiered.clock.advance(100.0)
        use_in_context(tiered, KEYS[:8], Hints(context=CONTEXT, keep_for=100.0))
    tiered.pool.admin.evict(slots=1000).run()
    tiered.clock.advance(99.0)
    tiered.tier.expire()
    tiered.run()
    assert tiered.of.counters.read_blocks == 0, "so nothing is read before"


# -- stuck, failed and closed -----------------------------------------------------------------------------------------


def test_a_read_that_hangs_keeps_its_slots_and_stops_reads_when_it_has_a_hundredth_of_the_pool() -> None:
    tiered = TieredPool(slots=100)
    tiered.put(KEYS[:8])
    tiered.store.is_hanging = True
    tiered.look(KEYS[:1])
    tiered.clock.advance(31)
    tiered.pool.tick()
    tiered.tier.expire()
    assert (tiered.counts["quarantined"], tiered.tier.statuses()[0].stuck_slots) == (1, 1)
    assert tiered.look(KEYS[1:2]).wait is not None, "a hundredth is not exceeded"
    tiered.clock.advance(31)
    tiered.pool.tick()
    tiered.look(KEYS[2:3])
    assert tiered.counts["filling"] == 0
    tiered.store_blocks(KEYS[20:30])
    assert tiered.loaded(KEYS[20:30]) == 10, "loads and stores go on"
    tiered.store.is_hanging = False
    tiered.run()
    assert (tiered.counts["quarantined"], tiered.tier.statuses()[0].stuck_slots) == (0, 0)


def test_a_write_that_hangs_keeps_its_slots() -> None:
    tiered = TieredPool(slots=40)
    tiered.store.is_hanging = True
    tiered.store_blocks(KEYS[:2])
    tiered.clock.advance(31)
    tiered.pool.tick()
    tiered.pool.admin.purge(everything=True).run()
    assert (tiered.counts["leased"], tiered.counts["free"]) == (2, 38)
    tiered.store.is_hanging = False
    tiered.run()
    assert tiered.counts["free"] == 40


def test_what_comes_back_twice_is_ignored_and_counted() -> None:
    tiered = TieredPool()
    tiered.put(KEYS[:2])
    tiered.look(KEYS[:2])
    (read,) = tiered.store.pools[0].reads
    tiered.run()
    tiered.tier.take_pieces([Piece(read.op_id, read.slots)])
    assert tiered.counts["leased"] == 2
    assert tiered.pool.counters.faults.stale_completions == 1


@pytest.mark.parametrize("broken", ["has", "offer", "read"])
def test_a_defect_switches_the_store_off_for_the_pool_and_strands_no_request(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiered = TieredPool(slots=400)
    tiered.put(KEYS[:4])

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(tiered.tier.stored_pool, broken, fail)
    request = tiered.look(KEYS[:4])
    tiered.store_blocks(KEYS[10:12])
    tiered.run()
    request.end()
    (status,) = tiered.tier.statuses()
    assert (status.state, status.reason) == ("off", TIER_FAILED)
    assert tiered.look(KEYS[:4]).wait is None


def test_a_store_none_of_whose_parts_works_is_down() -> None:
    tiered = TieredPool()
    tiered.store.is_hanging = True
    assert tiered.tier.statuses()[0].state == "down"


def test_the_end_gives_every_slot_back_and_answers_the_requests() -> None:
    tiered = TieredPool(slots=40)
    tiered.put(KEYS[:4])
    request = tiered.look(KEYS[:4])
    tiered.store_blocks(KEYS[10:12])
    ended: list[bool] = []
    tiered.tier.close(lambda: ended.append(True))
    tiered.run()
    request.end()
    assert ended == [True]
    assert (tiered.counts["filling"], tiered.counts["leased"]) == (0, 0)
    assert tiered.look(KEYS[:4]).wait is None
    tiered.store_blocks(KEYS[14:16])
    assert not tiered.store.pools[0].writes


# -- purges -----------------------------------------------------------------------------------------------------------


def test_while_blocks_are_purged_none_goes_from_the_pool_to_the_store_or_back() -> None:
    tiered = TieredPool(slots=400)
    tiered.put(KEYS[:4])
    tiered.tier.begin_purge()
    tiered.store_blocks(KEYS[10:12])
    tiered.use(KEYS[10:12])
    assert tiered.look(KEYS[:4]).wait is None
    assert not tiered.store.pools[0].writes
    done: list[Purged] = []
    tiered.tier.purge(PurgeWish(), done.append)
    tiered.run()
    tiered.tier.end_purge()
    assert done == [Purged(4)]
    tiered.use(KEYS[10:12])
    tiered.run()
    assert tiered.in_store(KEYS[10:12]) == [True, True]


# -- the next service -------------------------------------------------------------------------------------------------


def test_the_slots_of_a_store_that_may_still_move_are_kept_until_its_processes_end() -> None:
    tiered = TieredPool(slots=40)
    tiered.put(KEYS[:4])
    tiered.look(KEYS[:4])
    tiered.store_blocks(KEYS[10:12])
    tiered.tier.session.lose("the service ends")
    assert (tiered.counts["quarantined"], tiered.counts["leased"]) == (4, 2)
    tiered.pool.process_died("store")
    assert (tiered.counts["quarantined"], tiered.counts["leased"]) == (0, 0)


def test_hosts_without_a_store_have_none() -> None:
    assert Host().pool.tier is None


def test_an_operator_s_purge_covers_the_store_and_waits_until_it_cannot_come_back() -> None:
    tiered = TieredPool(slots=400)
    tiered.store_blocks(KEYS[:4])
    tiered.put(KEYS[10:14])
    tiered.run()
    sweep = tiered.pool.admin.purge(everything=True)
    sweep.run()
    assert sweep.waiting
    assert not sweep.finished
    assert tiered.in_store(KEYS[:4] + KEYS[10:14]) == [False] * 8
    tiered.run()
    sweep.run()
    assert (sweep.finished, sweep.evicted_slots, sweep.stored_blocks) == (True, 4, 8)
    assert tiered.look(KEYS[10:14]).wait is None


def test_a_dry_run_of_a_purge_counts_what_the_store_has_and_a_cancelled_one_lets_the_store_be_used_again() -> None:
    tiered = TieredPool(slots=400)
    tiered.put(KEYS[:4])
    sweep = tiered.pool.admin.purge(keys=KEYS[:3], dry_run=True)
    sweep.run()
    tiered.run()
    sweep.run()
    assert (sweep.stored_blocks, tiered.in_store(KEYS[:4])) == (3, [True] * 4)
    sweep = tiered.pool.admin.purge(everything=True)
    sweep.step()
    assert tiered.look(KEYS[:4]).wait is None
    sweep.cancel()
    assert tiered.fetch(KEYS[:4]) == 4


def test_what_a_context_has_used_is_purged_from_the_store() -> None:
    tiered = TieredPool(slots=400)
    tiered.store_blocks(KEYS[:6])
    tiered.run()
    with pytest.raises(NotFoundError, match="the store below the pool may have blocks of it"):
        tiered.pool.admin.purge(context=CONTEXT)
    end_in_context(tiered, KEYS[:4])
    sweep = tiered.pool.admin.purge(context=CONTEXT)
    sweep.run()
    tiered.run()
    sweep.run()
    assert "blocks of its earlier requests may be left in the store" in sweep.notice
    assert tiered.in_store(KEYS[:6]) == [False] * 4 + [True] * 2
