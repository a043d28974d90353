"""What engines have said of blocks: it lives as long as the block, within a bound, and reaches other sessions only."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator

import pytest
from tests.engine.control.sharedhost import Client, Host

from kvstow.control import descriptions
from kvstow.control.descriptions import Descriptions
from kvstow.control.engine import PoolFacade
from kvstow.control.indexjournal import IndexJournal
from kvstow.control.sharedpool import SharedPool, recover
from kvstow.descriptions import BlockDescription, DescribedBlocks
from kvstow.errors import InvalidRequestError

KEYS = [bytes([number]) * 34 for number in range(1, 30)]
SECRET = b"tell" * 4


def description_of(key: bytes) -> BlockDescription:
    return BlockDescription(SECRET + key[:4])


def described(*keys: bytes) -> DescribedBlocks:
    return DescribedBlocks.of([description_of(key) for key in keys])


def begin(client: Client, *keys: bytes) -> int:
    op = client.begin_store(keys)
    assert op is not None
    client.session.describe_store(op.op_id, range(len(keys)), described(*keys))
    return op.op_id


def found(host: Host, reader: Client, *keys: bytes) -> dict[bytes, BlockDescription]:
    session, descriptions = reader.session, host.pool.events.descriptions
    return {keys[at]: each for at, each in descriptions.find(session.namespace.tag, keys, session.session_id)}


@pytest.fixture
def host() -> Host:
    return Host()


def test_another_session_learns_what_a_visible_block_holds(host: Host) -> None:
    writer, reader = host.attach(), host.attach()
    begin(writer, *KEYS[:3])
    assert found(host, reader, *KEYS[:3]) == {}, "its bytes are not there yet"
    writer.run()
    assert found(host, reader, *KEYS[:4]) == {key: description_of(key) for key in KEYS[:3]}
    assert found(host, writer, *KEYS[:3]) == {}, "it has said so itself"


def test_equal_keys_of_another_namespace_are_not_described(host: Host) -> None:
    writer, stranger = host.attach(), host.attach(namespace="other")
    begin(writer, KEYS[0])
    writer.run()
    assert found(host, stranger, KEYS[0]) == {}


@pytest.mark.parametrize("how", ["purge", "purge in flight", "eviction", "failure", "stuck", "lost"])
def test_nothing_is_left_of_blocks_that_have_gone(host: Host, how: str) -> None:
    writer, reader = host.attach(), host.attach()
    op_id = begin(writer, *KEYS[:3])
    if how in ("purge", "eviction"):
        writer.run()
    assert len(host.pool.events.descriptions) == 3
    match how:
        case "purge" | "purge in flight":
            assert PoolFacade(host.pool).admin.purge(keys=KEYS[:3]).run().finished
            writer.run()
        case "eviction":
            writer.store(KEYS[10:18])
        case "failure":
            writer.ranks[0].run(op_id, fail=True)
        case "stuck":
            host.clock.advance(1000)
            host.pool.tick()
            writer.run()
        case "lost":
            writer.session.lose("a test")
            host.pool.tick()
    assert found(host, reader, *KEYS[:3]) == {}
    assert len(host.pool.events.descriptions) == 0


def test_only_an_open_store_of_its_own_is_described_by_a_session(host: Host) -> None:
    writer, other = host.attach(), host.attach()
    op = writer.begin_store(KEYS[:2])
    assert op is not None
    other.session.describe_store(op.op_id, [0], described(KEYS[0]))
    with pytest.raises(InvalidRequestError, match="block 2 of a store is described; it has 2"):
        writer.session.describe_store(op.op_id, [2], described(KEYS[2]))
    writer.run()
    writer.session.describe_store(op.op_id, [0], described(KEYS[0]))
    lease = writer.session.acquire(KEYS[:1])
    load = writer.session.begin_load(lease, [7])
    writer.session.describe_store(load.op_id, [0], described(KEYS[0]))
    assert len(host.pool.events.descriptions) == 0


def test_descriptions_in_two_messages_are_all_kept(host: Host) -> None:
    writer, reader = host.attach(), host.attach()
    op = writer.begin_store(KEYS[:2])
    assert op is not None
    for at in range(2):
        writer.session.describe_store(op.op_id, [at], described(KEYS[at]))
    writer.run()
    assert found(host, reader, *KEYS[:2]).keys() == set(KEYS[:2])


@pytest.fixture
def journal() -> Iterator[IndexJournal]:
    made = IndexJournal.create(8, {})
    yield made
    made.close()


def test_the_journal_has_no_tokens_so_recovered_blocks_are_not_described(journal: IndexJournal) -> None:
    host = Host(journal=journal)
    writer = host.attach()
    begin(writer, *KEYS[:3])
    writer.run()
    with open(f"/proc/self/fd/{journal.fd}", "rb") as file:
        content = file.read()
    assert KEYS[0] in content
    assert SECRET not in content
    names = {one.tag: one.name for one in host.pool.index.namespaces}
    again = SharedPool(host.pool.config, clock=host.clock, journal=journal)
    again.add_extent(8)
    again.set_populated(8)
    assert recover(again, journal.recover(), names, []) == 3
    assert len(again.events.descriptions) == 0


def test_a_description_shows_no_tokens_in_text() -> None:
    description = BlockDescription(SECRET, session_id="trip")
    assert repr(description) == str(description) == f"{description}" == "BlockDescription(4 tokens)"


def test_descriptions_are_bounded_and_the_newest_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptions, "MOST_BYTES", 1 << 20)
    table = Descriptions()
    tracemalloc.start()
    keys = [number.to_bytes(34, "big") for number in range(20_000)]
    before, _ = tracemalloc.get_traced_memory()
    for start in range(0, len(keys), 100):
        slots = range(start, start + 100)
        table.describe_store(start, 1, slots, DescribedBlocks.of([BlockDescription(bytes(64), bytes(32))] * 100))
        table.show(1, keys[start : start + 100], slots, table.end_store(start))
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 1500 < len(table) < 2200
    assert after - before < 1.2 * (1 << 20), "their memory is what they count as"
    assert [at for at, _ in table.find(1, keys[-100:], 2)] == list(range(100))
    assert table.find(1, keys[:100], 2) == []


def test_stores_that_never_end_are_bounded_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptions, "MOST_BYTES", 100_000)
    table = Descriptions()
    for op_id in range(1, 300):
        table.describe_store(op_id, 1, [0], DescribedBlocks((bytes(4000),)))
    assert len(table) < 30
    assert table.end_store(1) == {}
    assert len(table.end_store(299)) == 1
