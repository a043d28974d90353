"""What an engine reads of the events of its namespace."""

from __future__ import annotations

from typing import Literal

import pytest
from msgspec.structs import replace
from tests.service.node.conftest import MakeBench
from tests.service.node.hostbench import ROW_SLOTS, Engine, HostBench
from tests.service.node.rawengine import HELLO, NAMESPACE, key_of

from kvstow.attach.calls import BlockChange, DescribeStore
from kvstow.descriptions import BlockDescription, DescribedBlocks
from kvstow_service.node.pools.nodepool import PoolSettings

OTHER = replace(HELLO, namespace=replace(NAMESPACE, weights_id="others"))


def describe(engine: Engine, op_id: int, *blocks: BlockDescription) -> None:
    engine.session.describe_store(DescribeStore(op_id, tuple(range(len(blocks))), *DescribedBlocks.of(blocks)))


def change(kind: Literal["stored", "removed"], *numbers: int) -> BlockChange:
    return BlockChange(kind, [key_of(number) for number in numbers])


def read_all(engine: Engine, after: int = 0) -> list[BlockChange]:
    found = list[BlockChange]()
    while True:
        page = engine.read_events(after)
        found += page.changes
        after = page.cursor
        if not page.has_more:
            return found


def purge(engine: Engine, *numbers: int) -> None:
    assert engine.pool.facade.admin.purge(keys=[key_of(number) for number in numbers]).run().finished


def test_engines_of_one_namespace_read_what_each_of_them_has_stored(bench: HostBench) -> None:
    first, second = bench.start(), bench.start()
    first.store(1, 2)
    second.store(3)
    purge(first, 1)
    expected = [change("stored", 1, 2), change("stored", 3), change("removed", 1)]
    assert read_all(first) == read_all(second) == expected


def test_a_cursor_goes_on_where_the_page_before_has_ended(bench: HostBench) -> None:
    engine = bench.start()
    engine.store(1)
    cursor = engine.read_events().cursor
    assert engine.read_events(cursor).changes == ()
    engine.store(2)
    assert engine.read_events(cursor).changes == (change("stored", 2),)
    assert engine.read_events(1 << 60).changes == (), "a cursor that nobody was given"


def test_equal_keys_of_another_namespace_are_other_blocks(bench: HostBench) -> None:
    first, other = bench.start(), bench.start(OTHER)
    assert other.pool is first.pool
    first.store(1)
    other.store(1, 2)
    assert read_all(first) == [change("stored", 1)]
    assert read_all(other) == [change("stored", 1, 2)]
    keys = first.pool.index.slot_keys
    (slot,) = [slot for slot, key in keys.between(0, 100) if keys.tag_of[slot] and key == key_of(1)]
    with first.pool.lock:
        first.pool.remove_blocks([slot], "capacity")
    assert read_all(other)[1:] == [change("removed", 1)]
    assert read_all(first) == [change("stored", 1)]
    assert first.has(1) == 1


def test_blocks_that_are_evicted_for_others_are_told_to_their_own_namespace(bench: HostBench) -> None:
    first, other = bench.start(), bench.start(OTHER)
    first.store(*range(20))
    for number in range(0, 2 * first.pool.populated_slots, 16):
        other.store(*range(number, number + 16))
    told = read_all(first)
    gone = {key for change in told if change.kind == "removed" for key in change.keys}
    there = {key for change in told if change.kind == "stored" for key in change.keys}
    assert gone <= there == {key_of(number) for number in range(20)}
    assert len(gone) == 20 - first.has(*range(20)) > 0


def test_after_a_reset_only_the_fresh_namespace_is_told(bench: HostBench) -> None:
    engine = bench.start()
    engine.store(1)
    bench.host.reset(engine.session_id)
    assert read_all(engine) == []
    engine.store(2)
    assert read_all(engine) == [change("stored", 2)]


@pytest.mark.parametrize(("keys_of_event", "num_events", "on_first_page"), [(1024, 3, 2), (1, 70, 64)])
def test_a_page_is_bounded_in_keys_and_in_events(
    bench: HostBench, keys_of_event: int, num_events: int, on_first_page: int
) -> None:
    engine = bench.start()
    for _ in range(num_events):
        engine.pool.events.append("removed", tuple(map(key_of, range(keys_of_event))))
    page = engine.read_events()
    assert (len(page.changes), page.has_more) == (on_first_page, True)
    assert len(read_all(engine)) == num_events


def test_events_that_are_no_longer_kept_are_said_to_be_lost(make_bench: MakeBench) -> None:
    engine = make_bench(settings=PoolSettings(event_buffer=2)).start()
    for _ in range(4 * ROW_SLOTS):
        engine.store(1)
        purge(engine, 1)
    page = engine.read_events()
    assert page.lost
    assert not engine.read_events(page.cursor).lost


def test_keys_of_several_lengths_fit_in_one_page(bench: HostBench) -> None:
    engine = bench.start()
    engine.store(1, 2)
    engine.pool.events.append("removed", (key_of(1), b"short", b"brief", key_of(2)))
    page = engine.read_events()
    assert [len(change.keys) for change in page.changes] == [2, 4]
    assert type(page).unpack(page.pack()) == page


def test_what_an_engine_says_of_its_blocks_reaches_the_others_of_its_namespace(bench: HostBench) -> None:
    first, second, other = bench.start(), bench.start(), bench.start(OTHER)
    begun = first.begin_store(1, 2)
    block = BlockDescription(b"tell", b"parent")
    describe(first, begun.op_id, block)
    first.complete(begun.op_id)
    other.store(1, 2)
    assert read_all(second) == [change("stored", 1, 2)._replace(described=((0, block),))]
    assert read_all(first) == read_all(other) == [change("stored", 1, 2)]
    purge(first, 1)
    assert read_all(second) == [change("stored", 1, 2), change("removed", 1)]


def test_a_page_with_descriptions_is_bounded(bench: HostBench) -> None:
    first, second = bench.start(), bench.start()
    for number in range(0, 12, 2):
        begun = first.begin_store(number, number + 1)
        describe(first, begun.op_id, *[BlockDescription(bytes(300 << 10))] * 2)
        first.complete(begun.op_id)
    page = second.read_events()
    assert len(page.changes) == 2
    assert page.has_more
    assert len(read_all(second)) == 6
