"""KV events: what routers learn about host memory, with stand-ins for the event classes of vLLM."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.doubles.rank import make_ranks

from kvstow.config import EngineConfig
from kvstow.control.engine import OffloadEngine
from kvstow.keys import make_key
from kvstow_service.connectors.engine_core import kvevents
from kvstow_service.connectors.engine_core.kvevents import EmbeddedBlocks, EventFeed, GroupKind, Vocabulary
from kvstow_service.connectors.engine_core.kvgroups import KVGroup

SLOT = 4096
HASHES = [bytes([i]) * 32 for i in range(1, 13)]
FULL = KVGroup(0, 2, 1)
WINDOW = KVGroup(1, 4, 2, window=8)


@dataclass(frozen=True)
class Stored:
    """Has no `session_id`, as in vLLM 0.26."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


@dataclass(frozen=True)
class StoredOfSession(Stored):
    session_id: str | None = None


@dataclass(frozen=True)
class Removed:
    block_hashes: list[int]
    medium: str
    group_idx: int | None = None


@dataclass(frozen=True)
class Lora:
    adapter_id: int
    name: str


@dataclass
class Request:
    block_hashes: list[bytes] = field(default_factory=lambda: HASHES)
    all_token_ids: list[int] = field(default_factory=lambda: list(range(100, 124)))
    lora_request: Lora | None = None
    session_id: str | None = None


class Host:
    """An engine with one rank, and what a scheduler does with its feed."""

    def __init__(self, stored: type[Stored] = Stored, slots: int = 16, event_buffer: int = 64) -> None:
        config = EngineConfig(slot_bytes=SLOT, capacity_slots=slots, event_buffer=event_buffer)
        self.engine = OffloadEngine(config)
        (self.rank,) = make_ranks(self.engine)
        vocabulary = Vocabulary(stored, Removed, lambda block_hash: block_hash[0], lambda *span: span[1:])
        self.feed = EventFeed(EmbeddedBlocks(self.engine), [GroupKind("full"), GroupKind("window", 8)], vocabulary)

    def store(self, first: int, end: int, request: Request | None = None, group: KVGroup = FULL) -> None:
        request = request or Request()
        step = group.hashes_per_block
        keys = [make_key(group.index, request.block_hashes[(i + 1) * step - 1]) for i in range(first, end)]
        self.feed.offered(request, group, first, keys)
        grant = self.engine.begin_store(keys, range(len(keys)))
        self.feed.granted([keys[i] for i in grant.accepted], self.feed.take_offered())
        if grant.op:
            self.rank.send(grant.op.op_id, "done")

    def purge(self) -> None:
        assert self.engine.admin.purge(everything=True).run().finished


@pytest.fixture
def host() -> Host:
    return Host()


def test_consecutive_blocks_are_one_event(host: Host) -> None:
    host.store(0, 3)
    (event,) = host.feed.take_events()
    assert event == Stored(
        block_hashes=[1, 2, 3],
        parent_block_hash=None,
        token_ids=[100, 101, 102, 103, 104, 105],
        block_size=2,
        lora_id=None,
        medium="CPU",
        lora_name=None,
        extra_keys=[(0, 2), (2, 4), (4, 6)],
        group_idx=0,
        kv_cache_spec_kind="full",
    )
    assert host.feed.take_events() == []


def test_a_block_names_its_parent_and_its_lora(host: Host) -> None:
    host.store(2, 3, Request(lora_request=Lora(7, "french")))
    (event,) = host.feed.take_events()
    assert (event.parent_block_hash, event.token_ids, event.lora_id, event.lora_name) == (2, [104, 105], 7, "french")


def test_a_block_of_several_hash_blocks_has_the_hash_of_the_last(host: Host) -> None:
    host.store(1, 3, group=WINDOW)
    (event,) = host.feed.take_events()
    assert (event.block_hashes, event.parent_block_hash) == ([4, 6], 2)
    assert (event.token_ids, event.block_size) == (list(range(104, 112)), 4)
    assert (event.group_idx, event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window) == (1, "window", 8)


def test_blocks_that_are_not_consecutive_are_separate_events(host: Host) -> None:
    host.store(1, 2)
    host.feed.take_events()
    host.store(0, 4)
    first, last = host.feed.take_events()
    assert (first.block_hashes, first.parent_block_hash) == ([1], None)
    assert (last.block_hashes, last.parent_block_hash) == ([3, 4], 2)


def test_the_session_is_announced_where_vllm_has_sessions() -> None:
    host = Host(StoredOfSession)
    host.store(0, 1, Request(session_id="chat"))
    assert host.feed.take_events()[0].session_id == "chat"


def test_a_block_is_announced_when_its_bytes_are_there(host: Host) -> None:
    keys = [make_key(0, HASHES[0])]
    host.feed.offered(Request(), FULL, 0, keys)
    grant = host.engine.begin_store(keys, [0])
    host.feed.granted(keys, host.feed.take_offered())
    assert grant.op is not None
    assert host.feed.take_events() == []
    host.rank.send(grant.op.op_id, "failed")
    assert host.feed.take_events() == []


def test_removal_names_group_and_medium(host: Host) -> None:
    host.store(0, 2)
    host.store(0, 1, group=WINDOW)
    host.feed.take_events()
    host.purge()
    assert host.feed.take_events() == [Removed([1, 2], "CPU", 0), Removed([2], "CPU", 1)]


def test_order_is_kept_within_one_take(host: Host) -> None:
    host.store(0, 1)
    host.purge()
    host.store(0, 1)
    assert [type(event) for event in host.feed.take_events()] == [Stored, Removed, Stored]


def test_a_store_without_a_request_is_announced_by_its_hash(host: Host) -> None:
    keys = [make_key(1, HASHES[0]), make_key(1, HASHES[1])]
    op = host.engine.begin_store(keys, [0, 1]).op
    assert op is not None
    host.feed.granted(keys, host.feed.take_offered())
    host.rank.send(op.op_id, "done")
    told = host.feed.take_events()
    assert [(event.block_hashes, event.token_ids, event.block_size) for event in told] == [([1], [], 0), ([2], [], 0)]
    assert {(event.group_idx, event.extra_keys, event.parent_block_hash) for event in told} == {(1, None, None)}


def lose_events(host: Host) -> None:
    """More batches than the log keeps."""
    for _ in range(4):
        host.store(8, 9)
        host.purge()


def test_after_lost_events_no_announcement_is_stale() -> None:
    host = Host(event_buffer=2)
    host.store(0, 3)
    host.feed.take_events()
    host.purge()
    lose_events(host)
    host.store(1, 2)
    told = host.feed.take_events()
    gone = {block for event in told if isinstance(event, Removed) for block in event.block_hashes}
    there = {block for event in told if isinstance(event, Stored) for block in event.block_hashes}
    assert {1, 3} <= gone
    assert 2 in there
    assert 2 not in gone


def test_a_removal_is_announced_once() -> None:
    host = Host(event_buffer=2)
    host.store(0, 3)
    host.feed.take_events()
    lose_events(host)
    host.store(0, 3)  # lost events took them away; the log now ends with their removal
    host.purge()
    told = host.feed.take_events()
    gone = [block for event in told if isinstance(event, Removed) for block in event.block_hashes]
    assert sorted(gone) == [1, 2, 3]


def test_after_lost_events_a_block_that_is_there_is_announced() -> None:
    host = Host(event_buffer=2)
    host.store(0, 1)
    keys = [make_key(0, HASHES[0])]
    for _ in range(3):  # blocks that come and go push the first one's event out
        host.store(8, 9)
        assert host.engine.admin.purge(keys=[make_key(0, HASHES[8])]).run().finished
    (event,) = [event for event in host.feed.take_events() if isinstance(event, Stored) and event.block_hashes == [1]]
    assert event.token_ids == [100, 101]
    assert host.engine.lookup(keys) == 1


def test_a_block_that_was_found_is_not_announced_again_by_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvevents, "_BATCHES_PER_READ", 1)
    host = Host(event_buffer=2)
    lose_events(host)
    host.store(0, 1)
    host.store(1, 2)
    (found,) = [event for event in host.feed.take_events() if 2 in event.block_hashes]
    assert found.token_ids == [102, 103]
    assert host.feed.take_events() == []


def test_announced_blocks_are_checked_slice_by_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvevents, "_CHECKS_PER_TAKE", 2)
    host = Host(event_buffer=2)
    host.store(0, 5)
    host.feed.take_events()
    host.purge()
    lose_events(host)
    gone: set[int] = set()
    takes = 0
    while told := host.feed.take_events():
        gone |= {block for event in told if isinstance(event, Removed) for block in event.block_hashes}
        takes += 1
    assert {1, 2, 3, 4, 5} <= gone
    assert takes >= 3


class Keys(list[int]):
    """Of a block, and known to be gone or not: a plain list takes no weak reference."""


def test_nothing_is_kept_of_announced_blocks() -> None:
    host = Host()
    made: list[weakref.ref[Any]] = []

    def extra_keys(request: Request, start: int, end: int) -> Keys:
        keys = Keys([start, end])
        made.append(weakref.ref(keys))
        return keys

    host.feed = EventFeed(
        EmbeddedBlocks(host.engine), [GroupKind("full")], Vocabulary(Stored, Removed, bytes.hex, extra_keys)
    )
    request = Request()
    host.store(0, 2, request)
    alive = weakref.ref(request)
    del request
    assert alive() is None
    assert len(made) == len([ref for ref in made if ref() is not None]) == 2
    host.feed.take_events()
    assert [ref for ref in made if ref() is not None] == []


def test_descriptions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvevents, "MAX_PLANNED", 2)
    host = Host()
    host.store(0, 3)
    first, rest = host.feed.take_events()
    assert (first.block_hashes, first.token_ids) == ([1], [])
    assert (rest.block_hashes, rest.token_ids) == ([2, 3], [102, 103, 104, 105])
