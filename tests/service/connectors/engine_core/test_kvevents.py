"""KV events: what routers learn about host memory, with stand-ins for the event classes of vLLM."""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from tests.doubles.rank import make_ranks

from kvstow.config import EngineConfig
from kvstow.control.engine import OffloadEngine
from kvstow.keys import make_key
from kvstow_service.connectors.engine_core.kvevents import EmbeddedBlocks, EventFeed, GroupKind, Vocabulary
from kvstow_service.connectors.engine_core.kvgroups import KVGroup, KVGroups
from kvstow_service.connectors.engine_core.trackedrequests import TrackedRequest

SLOT = 4096
HASHES = [bytes([i]) * 32 for i in range(1, 13)]
FULL = KVGroup(0, 2, 1)
WINDOW = KVGroup(1, 4, 2, window=8)
GROUPS = KVGroups((FULL, WINDOW), 4)


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

    def __init__(
        self,
        stored: type[Stored] = Stored,
        slots: int = 16,
        event_buffer: int = 64,
        most: int = 100,
        extra_keys: Callable[..., Any] = lambda *span: span[1:],
    ) -> None:
        config = EngineConfig(slot_bytes=SLOT, capacity_slots=slots, event_buffer=event_buffer)
        self.engine = OffloadEngine(config)
        (self.rank,) = make_ranks(self.engine)
        vocabulary = Vocabulary(stored, Removed, lambda block_hash: block_hash[0], extra_keys)
        self.feed = EventFeed(EmbeddedBlocks(self.engine), [GroupKind("full"), GroupKind("window", 8)], vocabulary)
        self.requests: dict[str, TrackedRequest] = {}
        self.feed.follow_requests(GROUPS, self.requests, most)

    def tracked(self, request: Request) -> TrackedRequest:
        """The request, which runs from now on."""
        found = self.requests[str(len(self.requests))] = TrackedRequest(cast(Any, request), 2)
        return found

    def store(self, first: int, end: int, request: Request | None = None, group: KVGroup = FULL) -> None:
        """Blocks of a request that ends before they are announced."""
        request = request or Request()
        self.feed.known.follow(TrackedRequest(cast(Any, request), 2))
        step = group.hashes_per_block
        keys = [make_key(group.index, request.block_hashes[(i + 1) * step - 1]) for i in range(first, end)]
        grant = self.engine.begin_store(keys, range(len(keys)))
        self.feed.granted(keys, grant)
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
    host.feed.known.follow(host.tracked(Request()))
    grant = host.engine.begin_store(keys, [0])
    host.feed.granted(keys, grant)
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
    assert {1, 3} <= gone
    assert 2 not in gone, "it has come back, and a router still has it"


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


def test_a_block_that_was_found_is_not_announced_again_by_the_log() -> None:
    """A step reads 256 batches of the log, and its last one comes with the next step."""
    host = Host(event_buffer=300)
    for _ in range(100):
        lose_events(host)
    host.store(0, 1)
    host.store(1, 2)
    (found,) = [event for event in host.feed.take_events() if 2 in event.block_hashes]
    assert found.token_ids == [100, 101, 102, 103]
    later = host.feed.take_events()
    assert later, "the rest of the log"
    assert not [event for event in later if 2 in event.block_hashes]


MANY = 600


def long_request() -> Request:
    """It has more blocks than one step looks at."""
    hashes = [number.to_bytes(32, "little") for number in range(MANY)]
    return Request(hashes, list(range(2 * MANY)))


def test_announced_blocks_are_checked_slice_by_slice() -> None:
    host = Host(slots=MANY, event_buffer=2, most=2 * MANY)
    host.store(0, MANY, long_request())
    host.feed.take_events()
    host.purge()
    lose_events(host)
    gone: list[int] = []
    while told := host.feed.take_events():
        gone.append(sum(len(event.block_hashes) for event in told if isinstance(event, Removed)))
    assert sum(gone) >= MANY
    assert len(gone) >= 3


def test_a_request_is_not_kept_by_what_is_known_of_its_blocks(host: Host) -> None:
    request = Request()
    host.store(0, 2, request)
    alive = weakref.ref(request)
    host.requests.clear()
    del request
    assert alive() is None
    assert host.feed.take_events()[0].token_ids == [100, 101, 102, 103]


def test_known_blocks_are_bounded_and_the_oldest_are_forgotten() -> None:
    host = Host(most=20)
    host.store(0, 2)
    assert len(host.feed.known) == 18
    for number in range(20):
        host.store(0, 2, Request([bytes([number, index]) * 16 for index in range(1, 13)]))
    assert len(host.feed.known) <= 20
    told = {block for event in host.feed.take_events() if isinstance(event, Stored) for block in event.block_hashes}
    assert 19 in told
    assert 1 not in told, "it was forgotten before it was announced"


def recover(host: Host, first: int, end: int, request: Request | None = None) -> None:
    """Have the pool hold blocks that nobody has described."""
    hashes = (request or Request()).block_hashes
    keys = [make_key(0, hashes[number]) for number in range(first, end)]
    op = host.engine.begin_store(keys, range(len(keys))).op
    assert op is not None
    host.rank.send(op.op_id, "done")


def test_a_block_that_nobody_has_described_is_announced_when_a_request_loads_it(host: Host) -> None:
    recover(host, 0, 4)
    assert host.feed.take_events() == []
    host.feed.used(host.tracked(Request()), 0, 6)
    (event,) = host.feed.take_events()
    assert (event.block_hashes, event.token_ids, event.block_size) == ([1, 2, 3], list(range(100, 106)), 2)
    host.feed.used(host.tracked(Request()), 0, 6)
    assert host.feed.take_events() == []


def test_a_block_that_nobody_has_described_is_announced_when_a_request_would_store_it(host: Host) -> None:
    recover(host, 1, 3)
    assert host.feed.take_events() == []
    host.store(0, 4)
    told = [(event.block_hashes, event.parent_block_hash, event.token_ids) for event in host.feed.take_events()]
    assert sorted(told) == [([1], None, [100, 101]), ([2, 3], 1, [102, 103, 104, 105]), ([4], 3, [106, 107])]


def test_a_block_that_has_gone_before_its_use_is_told_is_not_announced(host: Host) -> None:
    recover(host, 0, 2)
    host.feed.take_events()
    host.feed.used(host.tracked(Request()), 0, 4)
    host.purge()
    assert host.feed.take_events() == []


def test_what_a_request_has_loaded_is_described_slice_by_slice() -> None:
    host, request = Host(slots=MANY, most=2 * MANY), long_request()
    recover(host, 0, MANY, request)
    host.feed.take_events()
    host.feed.used(host.tracked(request), 0, 2 * MANY)
    assert host.feed.is_behind
    told = [[len(event.block_hashes) for event in host.feed.take_events()] for _ in range(4)]
    assert told == [[256], [256], [MANY - 512], []]
    assert not host.feed.is_behind


def test_a_block_of_a_running_request_is_described_when_its_store_is_granted(host: Host) -> None:
    """Recurrent states, and blocks that have left a window."""
    host.tracked(Request())
    keys = [make_key(0, HASHES[2])]
    grant = host.engine.begin_store(keys, [0])
    (described,) = host.feed.granted(keys, grant)
    assert described is not None
    assert grant.op is not None
    host.rank.send(grant.op.op_id, "done")
    assert [event.token_ids for event in host.feed.take_events()] == [[104, 105]]


@pytest.mark.parametrize("extra", ["\ud800", object()], ids=["surrogate", "object"])
def test_a_block_whose_extra_keys_cannot_be_sent_is_not_announced(extra: Any) -> None:
    host = Host(extra_keys=lambda request, start, end: (extra,) if start == 2 else None)
    host.store(0, 3)
    first, last = host.feed.take_events()
    assert (first.block_hashes, first.extra_keys, last.block_hashes) == ([1], [None], [3])


def test_a_streamed_request_that_goes_on_with_another_prompt_is_described_anew(host: Host) -> None:
    request = Request()
    tracked = host.tracked(request)
    tracked.keys(FULL, 0, 12)
    host.feed.known.follow(tracked)
    other = [bytes([number]) * 32 for number in range(101, 113)]
    request.block_hashes, request.all_token_ids = other, list(range(200, 224))
    tracked.forget_stale_keys(GROUPS)
    host.feed.known.follow(tracked)
    known = host.feed.known.get(make_key(0, other[0]))
    assert known is not None
    assert known.tokens == array("I", [200, 201]).tobytes()
