"""The table of keys: it finds what was put into it, and no call of the control plane rebuilds a table."""

from __future__ import annotations

import gc
import random
from array import array
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from tests.doubles.rank import make_ranks, store_keys, use_keys

from kvstow.control.engine import OffloadEngine
from kvstow.control.keytable import SlotTable
from kvstow.control.namespaces import hashes_of, mix_of
from kvstow.control.pool import Pool
from kvstow.hints import Hints, context_id

MakeEngine = Callable[..., OffloadEngine]


def linked(table: SlotTable, hashes: Sequence[int]) -> dict[int, int]:
    """What the table has of these hashes, asked all at once and one by one."""
    indices, slots = table.find(np.array(hashes, np.int64))
    found = {hashes[index]: slot for index, slot in zip(indices, slots, strict=True)}
    assert found == {hashed: slot for hashed in hashes if (slot := next(table.slots(hashed), None)) is not None}
    return found


def make_hashes(count: int, seed: int) -> list[int]:
    """Some of them meet in one bucket of a table of any size."""
    choose = random.Random(seed)
    return [choose.choice((choose.getrandbits(63), choose.getrandbits(31) << 32)) for _ in range(count)]


@pytest.mark.parametrize("seed", range(4))
def test_the_table_is_a_dictionary_while_its_buckets_are_split(seed: int) -> None:
    choose, table, model = random.Random(seed), SlotTable(), dict[int, int]()
    hashes = list(dict.fromkeys(make_hashes(200, seed)))
    table.grow(200)
    steps: Iterator[None] = iter(())
    for turn in range(120):
        free = [number for number in range(len(hashes)) if hashes[number] not in model]
        some = choose.sample(free, min(len(free), choose.randrange(40)))
        table.link(np.array([hashes[number] for number in some], np.int64), some)
        model |= {hashes[number]: number for number in some}
        gone = choose.sample(sorted(model), min(len(model), choose.randrange(30)))
        table.unlink([model.pop(hashed) for hashed in gone])
        assert linked(table, hashes) == model
        assert table.num_linked == len(model)
        if turn % 40 == 10:
            steps = table.fit(20 * turn)
        next(steps, None)


def test_keys_that_meet_in_one_bucket_are_all_there() -> None:
    table = SlotTable()
    table.grow(300)
    hashes = [number << 40 for number in range(300)]
    table.link(np.array(hashes, np.int64), range(300))
    for _ in table.fit(300):
        assert linked(table, hashes) == dict(zip(hashes, range(300), strict=True))
    table.unlink(range(100, 200))
    assert sorted(linked(table, hashes).values()) == [*range(100), *range(200, 300)]


def test_a_bucket_is_split_in_steps_of_bounded_length() -> None:
    """At most 512 buckets in each step."""
    table, hashes = SlotTable(), [number * 7919 for number in range(1 << 14)]
    table.grow(1 << 14)
    table.link(np.array(hashes, np.int64), range(1 << 14))
    assert sum(1 for _ in table.fit(1 << 14)) >= (1 << 15) / 512
    assert sorted(linked(table, hashes).values()) == list(range(1 << 14))


def test_the_buckets_of_an_empty_table_are_made_in_steps_of_bounded_length() -> None:
    assert sum(1 for _ in SlotTable().fit(1 << 20)) >= (1 << 21) / (1 << 16)


def test_equal_keys_of_two_namespaces_have_different_hashes() -> None:
    keys = [b"a", b"b"]
    by_tag = [tuple(hashes_of(keys, mix_of(tag)).tolist()) for tag in range(1 << 10)]
    assert len(set(by_tag)) == 1 << 10
    assert all(-(1 << 63) <= mix_of(tag) < 1 << 63 for tag in (0, 1, 2, 1 << 15, (1 << 16) - 1))
    assert [hash(key) ^ mix_of(3) for key in keys] == list(by_tag[3])


def test_another_key_with_the_same_hash_is_not_taken_for_it(
    make_host: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstow.control.namespaces.hash", lambda key: 5, raising=False)
    engine = make_host(slots=32)
    keys = [b"key%02d" % number for number in range(16)]
    store_keys(engine, make_ranks(engine), keys)
    others = [b"other%02d" % number for number in range(16)]
    assert engine.contains([*keys, *others]) == [True] * 16 + [False] * 16
    assert engine.contains(others[:3]) == [False] * 3
    assert engine.lookup(keys[::-1]) == 16
    engine.check_integrity()


# -- no table is rebuilt -----------------------------------------------------------------------------------------------

_SLOTS, _MOST_ENTRIES = 12_288, 8192


def tables_of(pool: Pool) -> Iterator[object]:
    """All dictionaries and sets that belong to a pool."""
    seen, left = set[int](), [pool]
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, type | type(gc) | type(make_hashes) | array | np.ndarray):
            continue
        seen.add(id(one))
        if isinstance(one, dict | set | frozenset):
            yield one
        left += gc.get_referents(one)


def largest_table(pool: Pool) -> int:
    return max(len(one) for one in tables_of(pool))  # type: ignore[arg-type]


def test_no_table_that_grows_with_the_pool_is_rebuilt_in_one_call(make_engine: MakeEngine) -> None:
    """Whatever the slots are used for, no dictionary and no set has an entry for each of them: to grow, it would copy
    all of them in one call, which keeps every other thread waiting."""
    engine = make_engine(slots=_SLOTS)
    pool, (rank,) = engine.pool, make_ranks(engine)
    keys = [b"%016d" % number for number in range(_SLOTS)]
    pieces = [keys[start : start + 512] for start in range(0, _SLOTS, 512)]
    ops = [engine.begin_store(piece, range(len(piece))).op for piece in pieces]
    assert pool.index.num_filling == _SLOTS
    assert largest_table(pool) <= _MOST_ENTRIES, "filling"
    for op in ops:
        rank.submit(op)
    rank.run_all()
    assert pool.index.num_cached == _SLOTS
    assert largest_table(pool) <= _MOST_ENTRIES, "cached"
    for number, piece in enumerate(pieces):
        use_keys(engine, piece, hints=Hints(context_id(str(number)), resume_in=60.0))
    assert largest_table(pool) <= _MOST_ENTRIES, "used"
    leases = [engine.acquire(piece) for piece in [*pieces, *pieces]]
    assert len(pool.index.held) == _SLOTS
    assert largest_table(pool) <= _MOST_ENTRIES, "leased twice"
    engine.admin.purge(everything=True).run()
    assert largest_table(pool) <= _MOST_ENTRIES, "leased without a key"
    for lease in leases:
        engine.release_lease(lease)
    ops = [engine.begin_store(piece, range(len(piece))).op for piece in pieces]
    pool.index.quarantined.add(range(_SLOTS))
    assert largest_table(pool) <= _MOST_ENTRIES, "in quarantine"
    pool.index.quarantined.discard(range(_SLOTS))
    engine.check_integrity()


def test_the_collector_visits_no_list_of_slots(make_engine: MakeEngine) -> None:
    """It would look at the object in each slot, which took 37 ms for a million of them."""
    engine = make_engine(slots=_SLOTS)
    make_ranks(engine)
    assert len(engine.pool.index.slot_keys.key_of) == _SLOTS
    assert [len(one) for one in gc.get_objects() if type(one) is list and len(one) == _SLOTS] == []
