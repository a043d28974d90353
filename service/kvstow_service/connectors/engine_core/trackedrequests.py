"""What the scheduler side knows about one request of the inference engine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from typing import NamedTuple, Protocol

from kvstow.control.shares import digest_of_salt
from kvstow.hints import Hints
from kvstow.keys import make_key
from kvstow.messages import Op
from kvstow.results import Awaited, Lease
from kvstow_service.connectors.engine_core.adapters import Adapter
from kvstow_service.connectors.engine_core.kvgroups import KVGroup, KVGroups, in_token_order


class Request(Protocol):
    """The part of vLLM's `Request` that is read."""

    num_computed_tokens: int

    @property
    def request_id(self) -> str: ...

    @property
    def num_tokens(self) -> int: ...

    @property
    def num_output_placeholders(self) -> int: ...

    @property
    def skip_reading_prefix_cache(self) -> bool: ...

    @property
    def block_hashes(self) -> Sequence[bytes]: ...


class Choice(NamedTuple):
    """Which way a load goes, and why."""

    by_layer: bool
    reason: str
    """One of setting, alone, budget, burst, rate, trial, whole_prompt, no_room, engine, rank."""

    @property
    def label(self) -> str:
        """One of `LOAD_CHOICES`."""
        return f"{'layer' if self.by_layer else 'async'}_{self.reason}"


class Hit(NamedTuple):
    """Host blocks that are held for a request: `KVGroups.places(start, end)`, in that order, starting at number `first`
    of the lease. `fetched`: the tokens of the blocks that the fleet tier has brought for this lookup; the ranges may
    overlap."""

    start: int
    end: int
    lease: Lease
    first: int = 0
    fetched: tuple[range, ...] = ()

    def fetched_tokens(self, start: int, end: int) -> int:
        count, at = 0, start
        for tokens in sorted(self.fetched, key=lambda each: each.start):
            first, last = max(at, tokens.start), min(end, tokens.stop)
            if first < last:
                count, at = count + last - first, last
        return count


class BegunLoad(NamedTuple):
    """A load by layer of the tokens from `start` to the end of `hit`, in `num_blocks` blocks. Its slots were requested
    at the time `at`, which has used up the hit's lease."""

    start: int
    hit: Hit
    answer: Awaited[Op | None]
    choice: Choice
    num_blocks: int
    at: float


@dataclass(slots=True)
class RequestLoad:
    """What is looked up and loaded for a request, in three states. While it waits, `hit` is the hit that is held for
    the next admission; or `begun` is the load by layer that was requested instead of holding a hit. Once it was
    admitted, `is_under_way` says whether the admission began with a load, which its blocks wait for.

    `start`: how many tokens were on the GPU when the hit was looked up. `choice`: the way of the load that vLLM was
    given last. `had_no_room`: whether a load by layer was promised to vLLM, which then had no blocks for it. `wait`:
    the wait for another request's load that has begun since the last admission. `deferred_at`: when the look-up was
    first deferred to a later step; None if it is not deferred. `tokens`: those that the last admission loads;
    `fetched_tokens` of them came from the store below the pool. `has_failed`: whether some of them were not written.
    """

    start: int = 0
    hit: Hit | None = None
    begun: BegunLoad | None = None
    choice: Choice | None = None
    had_no_room: bool = False
    wait: LoadWait | None = None
    deferred_at: float | None = None
    tokens: range = range(0)
    fetched_tokens: int = 0
    is_under_way: bool = False
    has_failed: bool = False


@dataclass(slots=True, eq=False)
class TrackedRequest:
    """A request between its arrival and its end. Used by the scheduler's thread.

    `tables[group]`: its GPU blocks in order. `admitted_at`: the step that gave the tables. `has_run`: whether it was
    computed since then, so that its tokens are more than the promise of a load. `looked_up`: the tokens that the first
    admission looked up. `offered_tokens`: the blocks of the tokens before this one were offered to the pool.
    `computed_from`: it has computed no token before this one. `withheld`: whether its blocks belong to weights that
    were replaced, and must not be offered. `known_hashes`: how many of its hashes `KnownHashes` has. The blocks of its
    first `described_tokens` tokens were described to `KnownBlocks`.

    `adapter`: its LoRA adapter, which is part of its keys; None if it has none. `hints`: the hints of its client.
    `number`: its number in the pool, from its admission to its end; None if the pool does not know it. `told_tokens`:
    how many of its tokens the pool learned of at the admission.
    """

    request: Request
    num_groups: InitVar[int]
    adapter: Adapter | None = None
    hints: Hints | None = None
    load: RequestLoad = field(default_factory=RequestLoad)
    offered_tokens: int = 0
    looked_up: range = range(0)
    withheld: bool = False
    admitted_at: int = -1
    has_run: bool = False
    known_hashes: int = 0
    described_tokens: int = 0
    computed_from: int = sys.maxsize
    number: int | None = None
    told_tokens: int = 0
    tables: list[list[int]] = field(init=False)
    _keys: list[list[bytes]] = field(init=False)

    def __post_init__(self, num_groups: int) -> None:
        self.tables = [[] for _ in range(num_groups)]
        self._keys = [[] for _ in range(num_groups)]

    @property
    def confirmed_tokens(self) -> int:
        """How many tokens have KV that older steps have written. A step in flight may still reject its own tokens."""
        return self.request.num_computed_tokens - self.request.num_output_placeholders

    @property
    def salt(self) -> bytes:
        """The digest of the request's cache salt; empty without one."""
        return digest_of_salt(getattr(self.request, "cache_salt", None))

    @property
    def has_keys(self) -> bool:
        """Whether its blocks have keys. They have none if it is unknown which version of its adapter computes them."""
        return self.adapter is None or self.adapter.is_named

    @property
    def may_store(self) -> bool:
        """Whether its client lets its blocks be stored."""
        return self.hints is None or self.hints.store

    def keys(self, group: KVGroup, first: int, end: int) -> list[bytes]:
        """Keys of the group's blocks `first` to `end`, as far as they are known. Each key is made once."""
        if not self.has_keys:
            return []
        known, end = self._keys[group.index], min(end, len(self.request.block_hashes) // group.hashes_per_block)
        if len(known) < end:
            known += self._make_keys(group, len(known), end)
        return known[first:end]

    def _make_keys(self, group: KVGroup, first: int, end: int) -> list[bytes]:
        step, prefix = group.hashes_per_block, make_key(group.index, b"")
        hashes = self.request.block_hashes[(first + 1) * step - 1 : end * step : step]
        if self.adapter is None:
            return [prefix + each for each in hashes]
        return [prefix + self.adapter.mix(each) for each in hashes]

    def keys_of_places(self, groups: KVGroups, start: int, end: int) -> list[bytes]:
        known = {group.index: self.keys(group, 0, end // group.block_tokens) for group in groups.groups}
        return [known[group][number] for group, number in groups.places(start, end)]

    def keys_between(self, groups: KVGroups, start: int, end: int) -> list[bytes]:
        """Keys of all groups' blocks of the tokens `start` to `end`, in the order of the tokens that they end with.
        O(end - start), because the keys are not kept."""
        if not self.has_keys:
            return []
        first, *others = groups.groups
        run = self._make_keys(first, start // first.block_tokens, end // first.block_tokens)
        if not others:
            return run
        runs = [(each, self._make_keys(each, start // each.block_tokens, end // each.block_tokens)) for each in others]
        return in_token_order([(first, run), *runs])

    def forget_stale_keys(self, groups: KVGroups) -> None:
        """Forget the keys of a streamed request that continues with another prompt, and so has other hashes."""
        hashes = self.request.block_hashes
        for group in groups.groups:
            known = self._keys[group.index]
            last = len(known)
            if known and (
                last * group.hashes_per_block > len(hashes) or self._make_keys(group, last - 1, last) != known[-1:]
            ):
                known.clear()
                self.known_hashes = self.described_tokens = 0

    def give_tables(self, tables: Sequence[Sequence[int]], step: int) -> None:
        """Give the request these GPU blocks, and no others. None of them has been offered yet."""
        self.tables = [list(table) for table in tables]
        self.offered_tokens, self.load.wait = 0, None
        self.admitted_at, self.has_run = step, False


@dataclass(slots=True, eq=False)
class SharedLoad:
    """A load of the request's tokens `start` to `end` that other requests may wait for. `done_in`: how many steps were
    planned when it was done; None before that. `is_over`: whether all that it brings is in the GPU's cache by now, or
    will never be there."""

    request: Request
    start: int
    end: int
    done_in: int | None = None
    is_over: bool = False


class LoadWait(NamedTuple):
    """The wait of a request for `load`, which brings its tokens up to `end`. It ends at the time `deadline`."""

    load: SharedLoad
    end: int
    deadline: float
