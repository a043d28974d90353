"""KV events for cache-aware routers: what host memory holds, as vLLM's own events.

An `EventFeed` learns of stores when they are offered and granted, and is asked for events once per step.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any, NamedTuple

from kvstow.attach.calls import BlockChange, EventPage
from kvstow.attach.connection import Answer
from kvstow.keys import GROUP_BYTES, group_of
from kvstow.results import Awaited, Given
from kvstow_service.connectors.engine_core.controlplane import AttachedControl
from kvstow_service.connectors.engine_core.kvgroups import KVGroup

if TYPE_CHECKING:
    from kvstow.control.engine import OffloadEngine

logger = logging.getLogger("kvstow.vllm")

_BATCHES_PER_READ = 256
"""How many batches of the engine's events are read per step."""
PERIOD_SECONDS = 0.1
"""The interval, in seconds, at which the service is asked what others have stored and what was removed. The service is
asked about own stores at once."""


class BlockNews(NamedTuple):
    """What has happened since the last news. `lost`: more has happened, but it is unknown. `gone`: blocks of earlier
    news can no longer be found, until later news or a lookup says otherwise."""

    changes: Sequence[BlockChange] = ()
    lost: bool = False
    gone: bool = False


class EmbeddedBlocks:
    """The blocks of the engine in this process."""

    def __init__(self, engine: OffloadEngine) -> None:
        self._engine = engine
        self._cursor = engine.events.last_sequence

    def read(self) -> BlockNews:
        log = self._engine.events
        if log.last_sequence == self._cursor:
            return BlockNews()
        page = log.read(self._cursor, _BATCHES_PER_READ)
        self._cursor = page.cursor
        return BlockNews([BlockChange(event.kind, event.keys) for event in page.events], page.lost > 0)

    def look_up(self, keys: Sequence[bytes]) -> Given[list[bool]]:
        return Given([self._engine.block(key) is not None for key in keys])


class AttachedBlocks:
    """The blocks of the session's namespace. It asks the node service for their events, one page at a time. No call
    waits.

    A new session reads from the oldest event that the service keeps, so it also learns what other engines have stored
    lately. The reports of a session no longer hold when the session ends, and after a reset.
    """

    def __init__(
        self, control: AttachedControl, has_all_memory: Callable[[], bool], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`has_all_memory`: whether the ranks can load every block of the pool. Before that, blocks that are present
        may not be found."""
        self._control, self._has_all_memory, self._clock = control, has_all_memory, clock
        self._life = control.life
        self._asked: Answer[EventPage] | None = None
        self._cursor = 0
        self._has_more = False
        self._due = clock()
        self._stored = 0  # own blocks, when the service was last asked

    @property
    def is_behind(self) -> bool:
        """Whether steps are needed to learn that an own store has ended, or to read more known events."""
        if not self._control.is_attached:
            return False
        return self._asked is not None or self._has_more or self._stored != self._control.moved_blocks["store"]

    def read(self) -> BlockNews:
        control, news, (session, _) = self._control, BlockNews(), self._life
        if control.life != self._life:
            self._life, self._asked, self._cursor, self._has_more = control.life, None, 0, True
            if session:
                return BlockNews(gone=True)
        if self._asked is not None and self._asked.done:
            page, self._asked = self._asked.value, None
            self._cursor, self._has_more = page.cursor, page.has_more
            news = BlockNews(page.changes, page.lost)
        if self._asked is None and control.is_attached and (self.is_behind or self._clock() >= self._due):
            self._due = self._clock() + PERIOD_SECONDS
            self._stored = control.moved_blocks["store"]
            self._asked = control.read_events(self._cursor)
        return news

    def look_up(self, keys: Sequence[bytes]) -> Answer[list[bool]] | None:
        """Which of these blocks are present. An answer with an `error` says nothing. None if that cannot be found out
        now."""
        return self._control.present(keys) if self._control.finds_hits and self._has_all_memory() else None


BlockSource = EmbeddedBlocks | AttachedBlocks

MEDIUM, LOCALITY = "CPU", "LOCAL"
MAX_PLANNED = 65_536
"""How many blocks are described while their store is under way. They take 60 MiB at 16 tokens per block."""
_CHECKS_PER_TAKE = 256
"""How many blocks are looked up per step after events were lost, which takes 0.8 ms."""
_WITHDRAWN_PER_TAKE = 1024
"""How many announcements are withdrawn per step after all blocks have gone at once."""


class OfferedBlock(NamedTuple):
    """A block that may be stored: vLLM's request, and the block's group and number in it."""

    request: Any
    group: KVGroup
    number: int


Origins = dict[bytes, OfferedBlock]
"""The request and the place of each block, by key."""


class Vocabulary(NamedTuple):
    """The event classes of this version of vLLM. `extra_keys(request, start, end)` is what a block's hash covers
    besides tokens, in the form that events carry. `external_hash` converts a block's hash to the form that events
    carry."""

    stored: Callable[..., Any]
    removed: Callable[..., Any]
    external_hash: Callable[[bytes], Any]
    extra_keys: Callable[[Any, int, int], Any]


class GroupKind(NamedTuple):
    """How vLLM classifies a KV group."""

    name: str | None = None
    sliding_window: int | None = None


class _Origin(NamedTuple):
    """What all blocks of one event have in common."""

    group: int
    block_tokens: int = 0
    lora_id: int | None = None
    lora_name: str | None = None
    session_id: str | None = None


class _Block(NamedTuple):
    """What an event says about a block. `block_hash` is vLLM's. `parent` is the hash of the block before it; None for a
    request's first block."""

    origin: _Origin
    block_hash: bytes
    parent: bytes | None
    token_ids: list[int]
    extra_keys: Any


def event_feed(vllm_config: Any, source: BlockSource, specs: Sequence[Any]) -> EventFeed | None:
    """The feed of an engine whose KV events are on; otherwise None. `specs`: vLLM's `KVCacheSpec` of each group."""
    config = vllm_config.kv_events_config
    if config is None or not config.enable_kv_cache_events:
        return None
    return EventFeed(source, _kinds(specs), _vocabulary())


class EventFeed:
    """Translates what a `BlockSource` reports about stored and removed blocks. Used only by the scheduler's thread.

    The source knows keys. The tokens behind them are noted when their store is planned, and forgotten once they are
    announced. A block is announced when its bytes are in host memory. Its removal is announced only if the block was.
    For blocks of lazy stores, of the backlog and of other engines, the tokens are unknown. They are announced by hash
    alone, with no tokens and a block size of 0, as in vLLM's OffloadingConnector. A router knows the hash from the
    GPU's event.

    No announcement stays stale. Events can be dropped before they are read: 4,096 are kept, and nothing reads them
    while vLLM idles. After that, every announced block is looked up again, slice by slice, and removed if it is gone.
    When the session with the node service ends, or after a reset, all announced blocks are removed, slice by slice.
    Once the engine has attached again, the blocks that it still finds are announced by their hash. `AllBlocksCleared`
    would not work: it names no medium, so a router would forget the GPU's blocks as well.

    A key contains vLLM's hash, except for a block that an adapter has computed: there it contains a digest of the hash
    and the adapter. This engine knows the hash of a block that its own requests have. Such a block of another engine is
    announced by the digest, which no router knows, until a request of this engine has stored or computed it, too.

    Memory: one reference for each announced block, which the pool bounds, and twice `MAX_PLANNED` descriptions.
    """

    def __init__(self, source: BlockSource, kinds: Sequence[GroupKind], vocabulary: Vocabulary) -> None:
        self._source, self._kinds, self._vocabulary = source, kinds, vocabulary
        self._stored = _known_fields(vocabulary.stored)
        self._removed = _known_fields(vocabulary.removed)
        self._offered: Origins = {}
        self._planned: dict[bytes, _Block] = {}
        self._named: dict[bytes, bytes] = {}  # hashes that keys do not contain, by key
        self._hashes: dict[bytes, bytes] = {}  # the same, of announced blocks
        self._announced: set[bytes] = set()
        self._doubtful: deque[bytes] = deque()
        self._checked: tuple[list[bytes], Awaited[Sequence[bool]]] | None = None
        self._withdrawn: dict[bytes, None] = {}

    def offered(self, request: Any, group: KVGroup, first_block: int, keys: Sequence[bytes]) -> None:
        """Note that the store of these consecutive blocks of vLLM's `request`, starting at `first_block`, may be
        planned in this step."""
        for number, key in enumerate(keys, first_block):
            self._offered[key] = OfferedBlock(request, group, number)

    def name(self, key: bytes, block_hash: bytes) -> None:
        """Note that the store of the block with this key may be planned. vLLM knows the block by `block_hash`, which
        the key does not contain."""
        self._named[key] = block_hash
        while len(self._named) > MAX_PLANNED:
            del self._named[next(iter(self._named))]

    def take_offered(self) -> Origins:
        offered, self._offered = self._offered, {}
        return offered

    def granted(self, keys: Iterable[bytes], origins: Origins) -> None:
        for key in keys:
            if key in origins:
                self._planned[key] = self._describe(origins[key])
        while len(self._planned) > MAX_PLANNED:
            del self._planned[next(iter(self._planned))]

    def _describe(self, offered: OfferedBlock) -> _Block:
        request, group, number = offered
        start, end = number * group.block_tokens, (number + 1) * group.block_tokens
        step, hashes = group.hashes_per_block, request.block_hashes
        parent = hashes[number * step - 1] if number else None
        lora, session = request.lora_request, getattr(request, "session_id", None)  # vLLM 0.30 has sessions
        origin = _Origin(group.index, group.block_tokens, lora and lora.adapter_id, lora and lora.name, session)
        tokens = list(request.all_token_ids[start:end])
        return _Block(
            origin, hashes[(number + 1) * step - 1], parent, tokens, self._vocabulary.extra_keys(request, start, end)
        )

    def take_events(self) -> list[Any]:
        """vLLM's events for blocks that were stored or removed since the last call, oldest first."""
        news = self._source.read()
        if news.gone:
            self._withdraw()
        if news.lost:
            logger.warning("KV events were lost: looking %d announced blocks up again", len(self._announced))
            self._doubtful = deque(dict.fromkeys([*self._doubtful, *self._announced, *self._planned]))
        events: list[Any] = []
        for change in news.changes:
            events += self._announce(change.keys) if change.kind == "stored" else self._remove(change.keys)
        withdrawn = list(islice(self._withdrawn, _WITHDRAWN_PER_TAKE))  # those that have not come back
        for key in withdrawn:
            del self._withdrawn[key]
        events += self._removed_events(withdrawn)
        if self._doubtful or self._checked is not None:
            events += self._check()
        return events

    def _withdraw(self) -> None:
        """Withdraw all announced blocks, because all have gone. Some may come back, so they are looked up again.
        O(announced blocks), once per session."""
        self._doubtful, self._checked = deque(dict.fromkeys([*self._doubtful, *self._announced])), None
        self._withdrawn |= dict.fromkeys(self._announced)
        self._announced = set()

    def _check(self) -> list[Any]:
        """Look up some doubtful blocks, and return their events. These tell what is true now, even if later entries of
        the log tell something else."""
        if self._checked is None:
            keys = list(islice(self._doubtful, _CHECKS_PER_TAKE))
            asked = self._source.look_up(keys)
            if asked is None:
                return []
            self._checked = keys, asked
            for _ in keys:
                self._doubtful.popleft()
        keys, answer = self._checked
        if not answer.done:
            return []
        self._checked = None
        if answer.error is not None:
            self._doubtful.extendleft(reversed(keys))
            return []
        present = {key for key, is_there in zip(keys, answer.value, strict=True) if is_there}
        gone = [key for key in keys if key not in present]
        found = [key for key in keys if key in present and key not in self._announced]
        return [*self._remove(gone), *self._announce(found)]

    def _announce(self, keys: Sequence[bytes]) -> list[Any]:
        """One event for each run of consecutive blocks."""
        runs: list[list[_Block]] = []
        for key in keys:
            block = self._planned.pop(key, None)
            if block is None:
                if key in self._announced:
                    continue
                block = _Block(_Origin(group_of(key)), self._named.pop(key, _hash(key)), None, [], None)
            if block.block_hash != _hash(key):
                self._hashes[key] = block.block_hash
            last = runs[-1][-1] if runs else None
            if last is None or (block.parent, block.origin) != (last.block_hash, last.origin):
                runs.append([])
            runs[-1].append(block)
        self._announced.update(keys)
        if self._withdrawn:
            for key in keys:
                self._withdrawn.pop(key, None)
        return [self._stored_event(run) for run in runs]

    def _stored_event(self, run: list[_Block]) -> Any:
        first, external = run[0], self._vocabulary.external_hash
        origin, kind = first.origin, self._kinds[first.origin.group]
        fields = {
            "block_hashes": [external(block.block_hash) for block in run],
            "parent_block_hash": None if first.parent is None else external(first.parent),
            "token_ids": [token for block in run for token in block.token_ids],
            "block_size": origin.block_tokens,
            "lora_id": origin.lora_id,
            "lora_name": origin.lora_name,
            "medium": MEDIUM,
            "locality": LOCALITY,
            "extra_keys": [block.extra_keys for block in run] if first.token_ids else None,
            "group_idx": origin.group,
            "kv_cache_spec_kind": kind.name,
            "kv_cache_spec_sliding_window": kind.sliding_window,
            "session_id": origin.session_id,
        }
        return self._stored(fields)

    def _remove(self, keys: Sequence[bytes]) -> list[Any]:
        gone = [key for key in keys if key in self._announced]
        self._announced.difference_update(gone)
        return self._removed_events(gone)

    def _removed_events(self, keys: Sequence[bytes]) -> list[Any]:
        """One event for each run of blocks of one group."""
        external, shared = self._vocabulary.external_hash, {"medium": MEDIUM, "locality": LOCALITY}

        def block_hash(key: bytes) -> Any:
            return external(self._hashes.pop(key, _hash(key)))

        return [
            self._removed({"block_hashes": [block_hash(key) for key in run], "group_idx": group, **shared})
            for group, run in groupby(keys, group_of)
        ]


def _known_fields(event: Callable[..., Any]) -> Callable[[Mapping[str, Any]], Any]:
    known = set(inspect.signature(event).parameters)
    return lambda fields: event(**{name: value for name, value in fields.items() if name in known})


def _hash(key: bytes) -> bytes:
    return key[GROUP_BYTES:]


def _kinds(specs: Sequence[Any]) -> list[GroupKind]:
    from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

    return [GroupKind(get_kv_cache_spec_kind(spec).value, get_kv_cache_spec_sliding_window(spec)) for spec in specs]


def _vocabulary() -> Vocabulary:
    from vllm.distributed.kv_events import BlockRemoved, BlockStored
    from vllm.v1.core import kv_cache_utils

    untagged = getattr(kv_cache_utils, "to_event_extra_keys", None)  # vLLM 0.32: hashes cover tagged keys

    def extra_keys(request: Any, start: int, end: int) -> Any:
        keys, _ = kv_cache_utils.generate_block_hash_extra_keys(request, start, end, 0)
        return untagged([keys])[0] if untagged else keys

    return Vocabulary(BlockStored, BlockRemoved, kv_cache_utils.maybe_convert_block_hash, extra_keys)
