"""Counts what a call does while it holds the lock: O(blocks given) in any state of the pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tests.doubles.fakes import FakeClock
from tests.doubles.rank import FakeRank, make_ranks, store_keys, use_keys

from kvstow.control.engine import OffloadEngine
from kvstow.control.index import Index
from kvstow.control.namespaces import KeyMap, PendingStores
from kvstow.control.pool import SLICE_SLOTS

MakeEngine = Callable[..., OffloadEngine]


def make_keys(count: int, name: str = "key") -> list[bytes]:
    return [f"{name}{number}".encode() for number in range(count)]


def fill(engine: OffloadEngine, keys: Sequence[bytes], piece: int = 128) -> list[FakeRank]:
    """Store keys piece by piece, as prefill computes them."""
    ranks = make_ranks(engine)
    for start in range(0, len(keys), piece):
        store_keys(engine, ranks, keys[start : start + piece])
    return ranks


def count_calls(patch: pytest.MonkeyPatch, owner: type, name: str, count: Callable[..., None]) -> None:
    """Call `count` with the arguments of each call of a method, before it."""
    method = getattr(owner, name)

    def counted(self: object, *arguments: Any) -> object:
        count(*arguments)
        return method(self, *arguments)

    patch.setattr(owner, name, counted)


class Holding:
    """A count for each time that the lock is held."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def add(self, count: int) -> None:
        self.counts[-1] += count


@pytest.fixture
def count_by_holding(monkeypatch: pytest.MonkeyPatch) -> Callable[[OffloadEngine], Holding]:
    """Starts a new count whenever the engine's lock is taken."""

    def watch(engine: OffloadEngine) -> Holding:
        holding, lock = Holding(), engine.pool.lock

        class Watched:
            def __enter__(self) -> None:
                lock.acquire()
                holding.counts.append(0)

            def __exit__(self, *error: object) -> None:
                lock.release()

        monkeypatch.setattr(engine.pool, "lock", Watched())
        return holding

    return watch


@pytest.mark.parametrize("policy", ["lru", "auto"])
@pytest.mark.parametrize("slots_left", [8, 100])
def test_a_store_evicts_few_blocks_while_the_pool_shrinks(make_host: MakeEngine, policy: str, slots_left: int) -> None:
    engine = make_host(slots=4096, policy=policy)
    ranks = fill(engine, make_keys(4096))
    engine.admin.evict(slots=slots_left).run()  # the blocks that would be evicted first all lie above the limit
    store_keys(engine, ranks, make_keys(slots_left, "hot"))
    sweep = engine.admin.resize(slots_left)
    before = engine.stats().evictions["capacity"]
    grant = engine.begin_store(make_keys(16, "new"), range(16))
    assert engine.stats().evictions["capacity"] - before <= 4 * 16
    assert len(grant.accepted) + grant.outcomes.get("dropped_cpu_full", 0) == 16
    engine.check_integrity()
    for rank in ranks:
        rank.submit(grant.op)
        rank.run_all()
    sweep.run()
    assert sweep.finished
    assert len(engine.begin_store(make_keys(8, "last"), range(8)).accepted) == 8
    engine.check_integrity()


def test_a_store_finds_room_while_the_pool_shrinks_to_half(make_host: MakeEngine) -> None:
    """Every other block in the order of eviction is above the limit."""
    engine = make_host(slots=64, slice_slots=1)
    keys = make_keys(64)
    fill(engine, keys)
    for low, high in zip(keys[:32], keys[32:], strict=True):
        use_keys(engine, [high])
        use_keys(engine, [low])
    engine.admin.resize(32)
    assert len(engine.begin_store(make_keys(8, "new"), range(8)).accepted) == 8
    assert engine.stats().evictions["capacity"] == 15, "the resize has removed one block above the limit"


def test_a_store_that_finds_some_slots_evicts_no_more(make_host: MakeEngine) -> None:
    engine = make_host(slots=256, slice_slots=1)
    keys = make_keys(256)
    fill(engine, keys)
    use_keys(engine, keys[1:])  # slot 0 is the coldest, and below the limit; the next ones lie above
    engine.admin.resize(4)
    assert engine.begin_store(make_keys(16, "new"), range(16)).accepted == (0,)
    assert engine.stats().evictions["capacity"] == 4 * 16
    engine.check_integrity()


def test_a_store_of_present_blocks_holds_nothing(make_host: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_host(slots=1024, policy="auto")
    keys = make_keys(1024)
    fill(engine, keys)

    looked_up: list[int] = []
    held: list[int] = []
    count_calls(monkeypatch, KeyMap, "slots_of", looked_up.extend)
    count_calls(monkeypatch, Index, "hold", held.extend)
    grant = engine.begin_store(keys, range(1024))
    assert grant.outcomes == {"skipped_already_cached": 1024}
    assert (looked_up, held) == ([], [])


def test_stuck_transfers_are_marked_one_by_one(
    make_host: MakeEngine,
    clock: FakeClock,
    monkeypatch: pytest.MonkeyPatch,
    count_by_holding: Callable[[OffloadEngine], Holding],
) -> None:
    engine = make_host(slots=64)
    make_ranks(engine)
    for number in range(8):
        engine.begin_store(make_keys(8, f"store{number}-"), range(8))
    clock.advance(40.0)
    holding = count_by_holding(engine)
    count_calls(monkeypatch, Index, "quarantine", lambda namespace, slots: holding.add(len(slots)))
    engine.tick()
    assert sum(holding.counts) == 64
    assert max(holding.counts) == 8
    engine.check_integrity()


def test_a_purge_disowns_what_is_being_stored_slice_by_slice(
    make_host: MakeEngine, monkeypatch: pytest.MonkeyPatch, count_by_holding: Callable[[OffloadEngine], Holding]
) -> None:
    engine = make_host(slots=3000)
    (rank,) = make_ranks(engine)
    ops = [engine.begin_store(make_keys(1500, name), range(1500)).op for name in ("a", "b")]
    sweep = engine.admin.purge(key_prefixes=[b"a", b"b"])
    holding = count_by_holding(engine)
    count_calls(monkeypatch, PendingStores, "disown", lambda keys: holding.add(len(keys)))
    sweep.step()
    rank.submit(ops[1])
    rank.run_all()  # part of it becomes visible in the middle of the purge, which finds it later
    sweep.run()
    rank.submit(ops[0])
    rank.run_all()
    assert 0 < max(holding.counts) <= SLICE_SLOTS
    assert engine.stats().pool.slots.free == 3000
    engine.check_integrity()
