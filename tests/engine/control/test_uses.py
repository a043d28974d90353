"""Uses: what counts as one, what is remembered of evicted blocks, and the age of a pool."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstow.config import EngineConfig, parse_policy
from kvstow.control.engine import OffloadEngine
from kvstow.control.sharedpool import SharedPool
from kvstow.control.slots import SlotKeys, SlotTimes
from kvstow.control.uses import Ghosts, Hashes, Uses, hash_keys
from kvstow.errors import ConfigError
from kvstow.testing.fakes import FakeClock
from kvstow.testing.rank import FakeRank, make_ranks, store_keys

MakeEngine = Callable[..., OffloadEngine]


def make_keys(count: int, name: str = "key") -> list[bytes]:
    return [f"{name}{number:08}".encode() for number in range(count)]


def uses_of(engine: OffloadEngine, keys: Sequence[bytes]) -> list[int | None]:
    """None for those that are not there."""
    slots = engine.namespace.keys.slots_of(keys)
    return [None if slot is None else engine.pool.index.uses.counts([slot])[0] for slot in slots]


# -- the setting -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "policy"), [("auto", "auto"), ("lru", "lru"), ("4", "4"), (0.5, "0.5"), ("64.0", "64")]
)
def test_a_policy_is_a_word_or_a_number(value: object, policy: str) -> None:
    assert parse_policy(value) == policy


@pytest.mark.parametrize("value", ["arc", "", "-1", "65", "nan", "inf", None, True, [4], 10**400, "-0", -0.0, "1_0"])
def test_other_policies_are_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="allowed: auto, lru, or a number from 0 to 64") as caught:
        parse_policy(value, "pool.policy")
    assert (caught.value.key, caught.value.value) == ("pool.policy", value)
    with pytest.raises(ConfigError, match="policy"):
        EngineConfig(slot_bytes=1, capacity_slots=1, policy=value)  # type: ignore[arg-type]


# -- what is a use -----------------------------------------------------------------------------------------------------


def test_only_the_use_of_a_request_counts(make_host: MakeEngine) -> None:
    engine = make_host(slots=8)
    ranks, keys = make_ranks(engine), make_keys(4)
    store_keys(engine, ranks, keys)
    for _ in range(3):
        engine.release_lease(engine.acquire(keys))
        engine.lookup(keys)
        engine.begin_store(keys, range(4))
    lease = engine.acquire(keys)
    op = engine.begin_load(lease, range(4))
    for rank in ranks:
        rank.submit(op)
        rank.run_all()
    assert uses_of(engine, keys) == [0, 0, 0, 0]
    engine.use(keys)
    engine.use(keys[:2])
    assert uses_of(engine, keys) == [2, 2, 1, 1]
    engine.check_integrity()


def test_blocks_that_are_held_are_used_as_well(make_host: MakeEngine) -> None:
    engine = make_host(slots=4)
    keys = make_keys(3)
    store_keys(engine, make_ranks(engine), keys)
    lease = engine.acquire(keys[:1])
    for _ in range(3):
        engine.use(keys)
    engine.check_integrity()
    engine.release_lease(lease)
    engine.check_integrity()
    assert uses_of(engine, keys) == [3, 3, 3]


def test_a_chain_that_is_given_in_parts_is_one_chain(make_host: MakeEngine) -> None:
    engine = make_host(slots=8)
    ranks, keys = make_ranks(engine), make_keys(6)
    store_keys(engine, ranks, keys)
    for _ in range(3):
        engine.use(keys[4:], start=4)
        engine.use(keys[2:4], start=2)
        engine.use(keys[:2])
    assert uses_of(engine, keys) == [3] * 6
    engine.admin.purge(keys=keys[:3]).run()
    store_keys(engine, ranks, keys[:3])  # as if they had never been used
    engine.use(keys[4:], start=4)
    engine.use(keys[2:4], start=2)
    engine.use(keys[:2])
    assert uses_of(engine, keys) == [4] * 6, "whatever used the last blocks has used those before them"
    engine.use(make_keys(2, "other"))
    engine.admin.purge(everything=True).run()
    store_keys(engine, ranks, keys)
    engine.use(keys)
    assert uses_of(engine, keys) == [1] * 6, "a chain does not go on from one before it"


def test_uses_outlive_the_eviction_of_a_block(make_host: MakeEngine) -> None:
    engine = make_host(slots=4)
    ranks, keys = make_ranks(engine), make_keys(2)
    store_keys(engine, ranks, keys)
    for _ in range(5):
        engine.use(keys)
    store_keys(engine, ranks, make_keys(4, "new"))
    assert uses_of(engine, keys) == [None, None]
    store_keys(engine, ranks, keys)
    engine.use(keys)
    assert uses_of(engine, keys) == [6, 6]


def test_a_use_of_a_block_that_is_not_stored_yet_counts(make_host: MakeEngine) -> None:
    """A connector that stores what the GPU is about to evict stores it long after its first use."""
    engine = make_host(slots=4)
    ranks, keys = make_ranks(engine), make_keys(2)
    for _ in range(3):
        engine.use(keys)
    store_keys(engine, ranks, keys)
    engine.use(keys)
    assert uses_of(engine, keys) == [4, 4]


def test_uses_stop_at_255(make_host: MakeEngine) -> None:
    engine = make_host(slots=4)
    keys = make_keys(2)
    store_keys(engine, make_ranks(engine), keys)
    for _ in range(300):
        engine.use(keys)
    assert uses_of(engine, keys) == [255, 255]
    engine.check_integrity()


@pytest.mark.parametrize("k", ["lru", "1", "8"])
def test_no_block_outlives_one_that_it_depends_on(make_engine: MakeEngine, clock: FakeClock, k: str) -> None:
    """Chains that share beginnings, more than the pool holds."""
    engine = make_engine(slots=60, policy=k)
    ranks, choose = make_ranks(engine), random.Random(5)
    chains = [
        make_keys(6, f"a{number % 3}-")
        + make_keys(4, f"b{number % 9}-")
        + make_keys(choose.randint(1, 12), f"c{number}-")
        for number in range(40)
    ]
    parent = {key: before for chain in chains for before, key in pairwise(chain)}
    for _ in range(600):
        clock.advance(1.0)
        chain = chains[min(int(choose.expovariate(0.12)), 39)]
        serve(engine, ranks, chain)
        visible = set(engine.pool.index.slot_keys.key_of) - {None}
        assert [key for key in visible if key in parent and parent[key] not in visible] == []
    assert engine.stats().evictions["capacity"] > 1000
    engine.check_integrity()


def serve(engine: OffloadEngine, ranks: list[FakeRank], chain: Sequence[bytes]) -> int:
    lease = engine.acquire(chain)
    if lease.num_keys < len(chain):
        store_keys(engine, ranks, list(chain[lease.num_keys :]))
    engine.release_lease(lease)
    engine.use(chain)
    return lease.num_keys


# -- what is remembered ------------------------------------------------------------------------------------------------


def test_four_keys_a_slot_are_remembered_and_few_more() -> None:
    ghosts, keys = Ghosts(), make_keys(20_000)
    list(ghosts.fit(1000))
    assert not ghosts
    ghosts.put(hash_keys(keys), bytes([7]) * 20_000)
    found = ghosts.find(hash_keys(keys))
    assert set(found) == {0, 7}
    assert 4000 <= found.count(7) <= 4096
    assert ghosts.find(hash_keys(make_keys(1000, "other"))) == bytes(1000)


def test_what_is_evicted_block_by_block_is_hashed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of numpy costs as much for one key as for hundreds, and the pool's lock is held."""
    uses, keys = Uses(SlotTimes()), make_keys(4095)
    uses.set_num_slots(4095)
    uses.make_room(1 << 16)
    uses.count([range(4095)])
    hashed: list[int] = []

    def noted(keys: Sequence[bytes], tag: int) -> Hashes:
        hashed.append(len(keys))
        return hash_keys(keys, tag)

    monkeypatch.setattr("kvstow.control.uses.hash_keys", noted)
    for slot, key in enumerate(keys):
        uses.evict([key], [slot], slot % 2)
    assert hashed == []
    uses.admit(range(4095))
    slot_keys = SlotKeys()
    slot_keys.key_of.extend(keys)
    uses.recall([range(1)], slot_keys, 0)
    assert hashed == [2048, 2047, 1], "once for each namespace"
    assert uses.counts([0])[0] == 1
    assert uses._evicted == {}


def test_a_table_of_another_size_has_what_was_remembered() -> None:
    ghosts, hashes = Ghosts(), hash_keys(make_keys(100_000))
    list(ghosts.fit(20_000))
    ghosts.put(hashes, bytes(number % 255 + 1 for number in range(100_000)))
    before = ghosts.find(hashes)
    for size in (33_000, 65_536, 17_000):  # the last two keep the table
        list(ghosts.fit(size))
        assert ghosts.find(hashes) == before
    list(ghosts.fit(1000))
    few = ghosts.find(hashes)
    assert 4000 <= sum(map(bool, few)) <= 4096
    assert all(each in (0, known) for each, known in zip(few, before, strict=True))


@pytest.mark.parametrize("call", ["put", "find"])
def test_a_table_that_is_replaced_during_a_call_is_used_as_one(call: str) -> None:
    """A table is made without the pool's lock, so it may be there between any two steps of a call."""

    class Replaced(Ghosts):
        tables: list[npt.NDArray[np.uint32]]

        @property
        def _words(self) -> npt.NDArray[np.uint32]:
            return self.tables.pop(0) if len(self.tables) > 1 else self.tables[0]

        @_words.setter
        def _words(self, words: npt.NDArray[np.uint32]) -> None:
            self.tables = [words]

    ghosts, hashes = Replaced(), hash_keys(make_keys(1000))
    ghosts.put(hashes, bytes([7]) * 1000)
    ghosts.tables = [np.zeros(1024, np.uint32), np.zeros(8192, np.uint32)]
    if call == "put":
        ghosts.put(hashes, bytes([7]) * 1000)
    else:
        assert ghosts.find(hashes) == bytes(1000)


def test_the_table_is_made_before_it_is_needed_and_without_the_lock(
    make_host: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of a large pool takes a tenth of a second."""
    engine = make_host(slots=1200)
    pool, ghosts = engine.pool, engine.pool.index.uses._ghosts
    table = ghosts._words
    assert len(table) == 8192
    ranks, keys = make_ranks(engine, pinned=300), make_keys(500)
    for rank in ranks:
        for pinned in (600, 1200):
            rank.pin(pinned)
    for _ in range(2):
        store_keys(engine, ranks, keys)
        engine.use(keys)
        store_keys(engine, ranks, make_keys(1100, "new"))
    engine.use(make_keys(10, "absent"))
    assert ghosts
    assert ghosts._words is table

    fit, made = Ghosts.fit, list[tuple[int, bool]]()

    def noted(self: Ghosts, num_slots: int) -> Iterator[None]:
        for _ in fit(self, num_slots):
            made.append((num_slots, pool.lock.locked()))
            yield

    monkeypatch.setattr(Ghosts, "fit", noted)
    if isinstance(pool, SharedPool):
        pool.add_extent(2000)
        pool.set_populated(2400)
        pool.set_populated(3200)
    else:
        engine.admin.resize(3200).run()
        for rank in ranks:
            rank.pin(3200)
    assert set(made) == {(3200, False)}
    assert len(ghosts._words) == 16_384


def test_the_table_of_a_large_pool_is_made_by_the_thread_that_sweeps(make_engine: MakeEngine) -> None:
    """In slices, between which other threads run."""
    engine = make_engine(slots=8)
    make_ranks(engine)
    ghosts = engine.pool.index.uses._ghosts
    resize = engine.admin.resize(100_000)
    assert len(ghosts._words) == 1024
    slices = 0
    while resize.step():
        slices += 1
    assert slices >= 7
    assert len(ghosts._words) == 1 << 19


@given(st.lists(st.binary(min_size=1, max_size=20), unique=True, min_size=1))
def test_keys_of_any_length_have_a_hash(keys: list[bytes]) -> None:
    assert len(hash_keys(keys)) == len(keys)
    assert hash_keys([]).tolist() == []


def test_hashes_are_even_also_for_keys_that_count() -> None:
    keys = [number.to_bytes(34, "big") for number in range(4096)]
    hashes = hash_keys(keys)
    assert len(np.unique(hashes)) == 4096
    for bits in (hashes >> np.uint64(60), hashes % np.uint64(16)):
        counts = np.bincount(bits.astype(np.int64), minlength=16)
        assert 180 < counts.min() <= counts.max() < 340
    assert len(np.unique(np.concatenate([hash_keys(keys, 1), hashes]))) == 8192, "namespaces differ"
    groups = [group.to_bytes(2, "big") + bytes(31) + b"x" for group in range(8)]
    assert len(np.unique(hash_keys(groups))) == 8, "KV groups differ"


def test_ages_are_smoothed_over_a_pool_of_evictions() -> None:
    times = SlotTimes()
    times.grow(100)
    uses = Uses(times, 2.0)
    uses.set_num_slots(100)
    times.mark_used([range(100)], 10.0)
    uses.note_ages([], 50.0)
    assert uses.age == 0.0
    uses.note_ages(range(10), 30.0)
    assert (uses.age, uses.scale) == (20.0, 40.0)
    uses.note_ages(range(100), 50.0)
    assert uses.age == pytest.approx(40 - 20 * 0.99**100)


def test_a_batch_of_ages_counts_as_much_as_one_after_the_other() -> None:
    made = []
    for step in (1, 25):
        times = SlotTimes()
        times.grow(50)
        uses = Uses(times)
        uses.set_num_slots(50)
        uses.note_ages(range(1), 5.0)
        for start in range(0, 50, step):
            uses.note_ages(range(start, start + step), 80.0)
        made.append(uses.age)
    assert made[0] == pytest.approx(made[1])
