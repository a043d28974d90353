"""KV events for cache-aware routers: what host memory holds, as vLLM's own events.

An `EventFeed` learns which blocks requests load and store, and is asked for events once per step.
"""

from __future__ import annotations

import inspect
import logging
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby, islice
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from kvstow.attach.calls import BlockChange, EventPage
from kvstow.attach.connection import Answer
from kvstow.descriptions import BlockDescription
from kvstow.keys import GROUP_BYTES, group_of
from kvstow.results import Awaited, Given, StoreGrant
from kvstow_service.connectors.engine_core.controlplane import AttachedControl
from kvstow_service.connectors.engine_core.knownblocks import BlockPlace, ExtraKeys, KnownBlocks, unpacked
from kvstow_service.connectors.engine_core.kvgroups import KVGroups
from kvstow_service.connectors.engine_core.trackedrequests import TrackedRequest

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

    awaits_news = False
    is_behind = False
    can_look_up = True

    def __init__(self, engine: OffloadEngine) -> None:
        self._engine = engine
        self._cursor = engine.events.last_sequence

    def ask_news(self) -> None: ...

    def take_news(self) -> BlockNews:
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

    @property
    def awaits_news(self) -> bool:
        """Whether news were asked for, and have not been taken."""
        return self._asked is not None

    def ask_news(self) -> None:
        """Ask for news if it is time, unless some are awaited."""
        control = self._control
        if self._asked is None and control.is_attached and (self.is_behind or self._clock() >= self._due):
            self._due = self._clock() + PERIOD_SECONDS
            self._stored = control.moved_blocks["store"]
            self._asked = control.read_events(self._cursor)

    def take_news(self) -> BlockNews:
        """The news that were asked for, if they have arrived."""
        control, (session, _) = self._control, self._life
        if control.life != self._life:
            self._life, self._asked, self._cursor, self._has_more = control.life, None, 0, True
            if session:
                return BlockNews(gone=True)
        if self._asked is None or not self._asked.done:
            return BlockNews()
        page, self._asked = self._asked.value, None
        self._cursor, self._has_more = page.cursor, page.has_more
        return BlockNews(page.changes, page.lost)

    @property
    def can_look_up(self) -> bool:
        return self._control.finds_hits and self._has_all_memory()

    def look_up(self, keys: Sequence[bytes]) -> Answer[list[bool]]:
        """Which of these blocks are present. An answer with an `error` says nothing."""
        return self._control.present(keys)


BlockSource = EmbeddedBlocks | AttachedBlocks

MEDIUM, LOCALITY = "CPU", "LOCAL"
_GROUP = itemgetter(slice(GROUP_BYTES))
"""Returns the beginning of a key that names its group."""
_CHECKS_PER_TAKE = 256
"""How many blocks are looked up per step, which takes 0.8 ms, and as many are described of those that were loaded."""
_WITHDRAWN_PER_TAKE = 1024
"""How many announcements are withdrawn per step after all blocks have gone at once."""


class Vocabulary(NamedTuple):
    """The event classes of this version of vLLM. `external_hash` converts a block's hash to the form that events carry,
    and `extra_keys` returns extra keys in that form."""

    stored: Callable[..., Any]
    removed: Callable[..., Any]
    external_hash: Callable[[bytes], Any]
    extra_keys: ExtraKeys


class GroupKind(NamedTuple):
    """How vLLM classifies a KV group."""

    name: str | None = None
    sliding_window: int | None = None


class _Run(NamedTuple):
    """Consecutive blocks of one group, and their hashes in vLLM. Their keys begin with `group`."""

    group: bytes
    blocks: list[BlockDescription]
    hashes: list[bytes]


class _Use(NamedTuple):
    """Blocks that a request has loaded. `next`: how many of them were looked at."""

    tracked: TrackedRequest
    places: Sequence[BlockPlace]
    next: int = 0


def event_feed(vllm_config: Any, source: BlockSource, specs: Sequence[Any]) -> EventFeed | None:
    """The feed of an engine whose KV events are on; otherwise None. `specs`: vLLM's `KVCacheSpec` of each group."""
    config = vllm_config.kv_events_config
    if config is None or not config.enable_kv_cache_events:
        return None
    return EventFeed(source, _kinds(specs), _vocabulary())


class EventFeed:
    """Translates what a `BlockSource` reports about stored and removed blocks. Used only by the scheduler's thread.

    A block is announced when its bytes are in host memory and its description is known: its tokens, and the hash of the
    block before it. Routers drop events without them. `KnownBlocks` has the descriptions of what this engine computes
    and stores, and the service has those of what other engines store. Nobody keeps descriptions for good. So a block
    that has come from a store below the pool, or was recovered by a service that has restarted, is announced when a
    request of this engine has used it: has loaded it, or would have stored it.

    The removal of a block is announced only if the block was, and no announcement stays stale. Events can be dropped
    before they are read: 4,096 are kept, and nothing reads them while vLLM idles. After that, every announced block is
    looked up again, slice by slice, and removed if it is gone. When the session with the node service ends, or after a
    reset, all announced blocks are removed, slice by slice. Once the engine has attached again, those are announced
    that it still finds and whose description it still has. `AllBlocksCleared` would not work: it names no medium, so a
    router would forget the GPU's blocks as well.

    The answers of the source are used in the order in which it has given them. Otherwise a block that a lookup has
    found could be announced after its removal was read.

    Memory: one reference for each announced block, which the pool bounds, and what `KnownBlocks` has.
    """

    def __init__(self, source: BlockSource, kinds: Sequence[GroupKind], vocabulary: Vocabulary) -> None:
        self._source, self._kinds, self._vocabulary = source, kinds, vocabulary
        self._stored = _known_fields(vocabulary.stored)
        self._removed = _known_fields(vocabulary.removed)
        self.known: KnownBlocks
        """Made by `follow_requests`."""
        self._hashes: dict[bytes, bytes] = {}  # those of announced blocks that keys do not contain, by key
        self._announced: set[bytes] = set()
        self._uses: deque[_Use] = deque()
        self._doubtful: dict[bytes, None] = {}
        self._checked: tuple[list[bytes], Awaited[Sequence[bool]]] | None = None
        self._withdrawn: dict[bytes, None] = {}

    def follow_requests(self, groups: KVGroups, requests: Mapping[str, TrackedRequest], most: int) -> None:
        """Learn what blocks hold from these requests. For the parameters, see `KnownBlocks`."""
        self.known = KnownBlocks(groups, requests, most, self._vocabulary.extra_keys)

    @property
    def is_behind(self) -> bool:
        """Whether steps are needed to announce what is known, or about to be."""
        is_checking = self._checked is not None or (self._doubtful and self._source.can_look_up)
        return bool(self._uses or is_checking) or self._source.is_behind

    def granted(self, keys: Sequence[bytes], grant: StoreGrant) -> list[BlockDescription | None]:
        """Note how the pool has answered the offer of blocks with these keys. Returns the descriptions of the blocks
        that it stores. Those that it has already are used."""
        accepted = [keys[index] for index in grant.accepted]
        self.known.follow_all(accepted)
        if len(accepted) + len(grant.unplaced) < len(keys):
            others = {*grant.accepted, *grant.unplaced}
            self.found([key for index, key in enumerate(keys) if index not in others])
        return self.known.renew(accepted)

    def found(self, keys: Iterable[bytes]) -> None:
        """Note that the pool seems to have these blocks. Those that were not announced are looked up, and announced if
        the pool has them."""
        announced, known = self._announced, self.known
        self._doubtful |= {key: None for key in keys if key not in announced and known.get(key) is not None}

    def used(self, tracked: TrackedRequest, start: int, end: int) -> None:
        """Note that a request loads its blocks of the tokens `start` to `end`."""
        if places := self.known.places(tracked, start, end, self._announced):
            self._uses.append(_Use(tracked, places))

    def take_events(self) -> list[Any]:
        """vLLM's events for blocks that were stored or removed since the last call, oldest first."""
        source = self._source
        events = self._follow(source.take_news())
        self._describe_used()
        if self._checked is not None and not source.awaits_news:  # it was asked after the news that have come
            events += self._take_check()
        if self._checked is None:  # newer news come later
            source.ask_news()
            self._ask_check()
            if self._checked is not None and not source.awaits_news:
                events += self._take_check()
        return events

    def _follow(self, news: BlockNews) -> list[Any]:
        if news.gone:
            self._withdraw()
        if news.lost:
            logger.warning("KV events were lost: looking %d announced blocks up again", len(self._announced))
            self._doubtful |= dict.fromkeys([*self._announced, *self.known])
        events: list[Any] = []
        for change in news.changes:
            if change.kind == "stored":
                events += self._announce(change.keys, dict(change.described))
            else:
                events += self._remove(change.keys)
        withdrawn = list(islice(self._withdrawn, _WITHDRAWN_PER_TAKE))  # those that have not come back
        for key in withdrawn:
            del self._withdrawn[key]
        return events + self._removed_events(withdrawn)

    def _withdraw(self) -> None:
        """Withdraw all announced blocks, because all have gone. Some may come back, so they are looked up again.
        O(announced blocks), once per session."""
        self._checked = None
        self._doubtful |= dict.fromkeys(self._announced)
        self._withdrawn |= dict.fromkeys(self._announced)
        self._announced = set()

    def _describe_used(self) -> None:
        """Describe some of the blocks that requests have loaded."""
        left = _CHECKS_PER_TAKE
        while self._uses and left > 0:
            tracked, places, start = self._uses.popleft()
            end = min(start + left, len(places))
            left -= end - start
            if end < len(places):
                self._uses.appendleft(_Use(tracked, places, end))
            self.known.describe_places(tracked, places[start:end])
            self.found([place.key for place in places[start:end]])

    def _ask_check(self) -> None:
        """Look up some doubtful blocks."""
        if self._doubtful and self._source.can_look_up:
            keys = list(islice(self._doubtful, _CHECKS_PER_TAKE))
            for key in keys:
                del self._doubtful[key]
            self._checked = keys, self._source.look_up(keys)

    def _take_check(self) -> list[Any]:
        """The events of the doubtful blocks that were looked up. These tell what was true then, even if the entries of
        the log that are read next tell something else."""
        assert self._checked is not None
        keys, answer = self._checked
        if not answer.done:
            return []
        self._checked = None
        if answer.error is not None:
            self._doubtful |= dict.fromkeys(keys)
            return []
        present = {key for key, is_there in zip(keys, answer.value, strict=True) if is_there}
        gone = [key for key in keys if key not in present]
        return [*self._remove(gone), *self._announce([key for key in keys if key in present], {})]

    def _announce(self, keys: Sequence[bytes], described: Mapping[int, BlockDescription]) -> list[Any]:
        """One event for each run of consecutive blocks. `described`: what the source knows of them, by the index of
        their key."""
        announced = self._announced
        if self._withdrawn:  # the router has not been told that these had gone
            back = [key for key in keys if key in self._withdrawn]
            announced.update(back)
            for key in back:
                del self._withdrawn[key]
        blocks = self.known.get_all(keys)
        for index, sent in described.items():
            blocks[index] = sent
        runs: list[_Run] = []
        group = last_hash = b""
        last: BlockDescription | None = None
        for key, block in zip(keys, blocks, strict=True):
            if block is None or key in announced:
                continue
            announced.add(key)
            block_hash = block.block_hash
            if block_hash:
                self._hashes[key] = block_hash
            else:
                block_hash = key[GROUP_BYTES:]
            is_next = block.parent == last_hash and key[:GROUP_BYTES] == group
            if last is None or not is_next or len(block.tokens) != len(last.tokens) or block[4:] != last[4:]:
                group = key[:GROUP_BYTES]
                runs.append(_Run(group, [], []))
            runs[-1].blocks.append(block)
            runs[-1].hashes.append(block_hash)
            last, last_hash = block, block_hash
        return [self._stored_event(run) for run in runs]

    def _stored_event(self, run: _Run) -> Any:
        group, external, first = group_of(run.group), self._vocabulary.external_hash, run.blocks[0]
        kind = self._kinds[group]
        tokens = array("I", b"".join([block.tokens for block in run.blocks])).tolist()
        fields = {
            "block_hashes": [external(block_hash) for block_hash in run.hashes],
            "parent_block_hash": external(first.parent) if first.parent else None,
            "token_ids": tokens,
            "block_size": len(tokens) // len(run.blocks),
            "lora_id": first.lora_id,
            "lora_name": first.lora_name,
            "medium": MEDIUM,
            "locality": LOCALITY,
            "extra_keys": [unpacked(extra) if (extra := block.extra_keys) else None for block in run.blocks],
            "group_idx": group,
            "kv_cache_spec_kind": kind.name,
            "kv_cache_spec_sliding_window": kind.sliding_window,
            "session_id": first.session_id,
        }
        return self._stored(fields)

    def _remove(self, keys: Sequence[bytes]) -> list[Any]:
        gone = [key for key in keys if key in self._announced]
        self._announced.difference_update(gone)
        return self._removed_events(gone)

    def _removed_events(self, keys: Sequence[bytes]) -> list[Any]:
        """One event for each run of blocks of one group."""
        external, hashes = self._vocabulary.external_hash, self._hashes
        events: list[Any] = []
        for group, run in groupby(keys, _GROUP):
            removed = [external(hashes.pop(key, key[GROUP_BYTES:])) for key in run]
            fields = {"block_hashes": removed, "group_idx": group_of(group), "medium": MEDIUM, "locality": LOCALITY}
            events.append(self._removed(fields))
        return events


def _known_fields(event: Callable[..., Any]) -> Callable[[Mapping[str, Any]], Any]:
    known = set(inspect.signature(event).parameters)
    return lambda fields: event(**{name: value for name, value in fields.items() if name in known})


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
