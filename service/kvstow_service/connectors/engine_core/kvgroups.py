"""KV groups: which blocks of a request each group of layers needs in order to continue at a given token, and the
longest hit among blocks that are known to be present, for all groups of a model together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from math import lcm
from typing import TYPE_CHECKING, Any, TypeVar

from kvstow.errors import ConfigError
from kvstow.results import Needed

if TYPE_CHECKING:
    from kvstow.control.engine import OffloadEngine

T = TypeVar("T")

_FULL = {"FullAttentionSpec", "MLAAttentionSpec", "TQFullAttentionSpec", "SinkFullAttentionSpec"}
_WINDOW = {"SlidingWindowSpec", "SlidingWindowMLASpec"}
_CHUNKED = {"ChunkedLocalAttentionSpec"}
_STATE = "MambaSpec"
_UNIFORM = "UniformTypeKVCacheSpecs"

SERVED = frozenset({*_FULL, *_WINDOW, *_CHUNKED, _STATE})
"""Kinds of KV cache that are kept, except in groups whose blocks vLLM itself does not find by prefix."""
REFUSED = {
    "CrossAttentionSpec": "a decoder without an encoder: KV of an encoder's output has no prefix",
    "EncoderOnlyAttentionSpec": "a decoder: KV of an encoder has no prefix",
    "HiddenStateCacheSpec": "a model from which no hidden states are extracted (extract_hidden_states)",
    "HiSparseHotSpec": "a model without HiSparse, which has blocks in host memory of its own",
    "HiSparseResidentSpec": "a model without HiSparse, which has blocks in host memory of its own",
    "RSWASpec": "another kind: KV of generated tokens, which see a part of the answer only, serves no later prompt",
}
"""Kinds with which no engine starts, and what is allowed instead."""


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share a block table. All sizes are in tokens.

    `hashes_per_block`: how many of a request's hash blocks one block of this group covers. The last one's hash names
    the block, because hashes are chained. `window`: the token at position `p` attends to `p - window + 1` and later.
    `chunk`: a token attends to no token before its own chunk. `is_state`: the group needs only its block at the end of
    a prefix. A group with none of these attends to all tokens. `late_tokens`: vLLM may cache a block only when this
    many tokens after it are computed.
    """

    index: int
    block_tokens: int
    hashes_per_block: int
    window: int | None = None
    chunk: int | None = None
    is_state: bool = False
    late_tokens: int = 0

    @property
    def is_full(self) -> bool:
        return self.window is None and self.chunk is None and not self.is_state

    def first_block(self, num_tokens: int) -> int:
        """The first block that computing the token after `num_tokens` tokens reads."""
        if self.window is not None:
            return max(0, num_tokens - self.window + 1) // self.block_tokens
        if self.is_state:
            return num_tokens // self.block_tokens - 1
        if self.chunk is not None:
            return num_tokens // self.chunk * self.chunk // self.block_tokens
        return 0


@dataclass(frozen=True, slots=True)
class KVGroups:
    """The groups of a model that are kept. Hits end at multiples of `alignment`. `left_out` has the block size, in
    tokens, of each of vLLM's groups that are not kept. vLLM does not find their blocks by prefix either: where a hit
    ends, a request needs nothing of them, or vLLM computes it anew."""

    groups: tuple[KVGroup, ...]
    alignment: int
    left_out: tuple[int, ...] = ()

    @property
    def num_tables(self) -> int:
        """Block tables that vLLM has for a request, one for each of its groups."""
        return len(self.groups) + len(self.left_out)

    @property
    def is_plain(self) -> bool:
        """Whether vLLM has one group, which attends to all tokens. If so, a request can continue after any of its
        blocks, and from its last token. Otherwise it may lack what the next token reads, because neither groups that
        are left out nor the blocks before the window at a hit's end are ever loaded."""
        return self.num_tables == 1 and self.groups[0].is_full

    @property
    def are_attention(self) -> bool:
        """Whether only attention layers read the prefix of a request, and all that they read is kept. Steps may compute
        with what they load only then, because vLLM copies recurrent states before the layers run."""
        return not self.left_out and not self.has_states

    @property
    def full(self) -> tuple[KVGroup, ...]:
        return tuple(group for group in self.groups if group.is_full)

    @property
    def partial(self) -> tuple[KVGroup, ...]:
        """The groups that need only a part of the prefix."""
        return tuple(group for group in self.groups if not group.is_full)

    @property
    def has_states(self) -> bool:
        return any(group.is_state for group in self.groups)

    def places(self, start: int, end: int) -> list[tuple[int, int]]:
        """The blocks (group, number) that are read to compute the token after `end` tokens, beyond those of the first
        `start` tokens. They are in the order of the tokens that they end with, so that all groups evict the end of a
        prefix before its beginning. The places of a later `start` are the last of these."""
        places = [
            (group.index, number)
            for group in self.groups
            for number in range(max(start // group.block_tokens, group.first_block(end)), -(-end // group.block_tokens))
        ]
        if len(self.groups) > 1:
            tokens = {group.index: group.block_tokens for group in self.groups}
            places.sort(key=lambda place: ((place[1] + 1) * tokens[place[0]], place[0]))
        return places


def kv_groups(
    specs: Sequence[Any],
    hash_tokens: int,
    context_parallel: int = 1,
    *,
    kept: Collection[int] | None = None,
    hands_states_over: bool = False,
) -> KVGroups:
    """The groups of vLLM's `KVCacheSpec`s, whose requests are hashed every `hash_tokens` tokens. `kept`: the groups of
    which vLLM finds blocks by prefix (its `prefix_cacheable_group_ids`); None: all of them. The others are left out,
    but affect where hits end, as in vLLM. `hands_states_over`: whether this vLLM hands the states of recurrent layers
    to connectors.

    With decode context parallelism, a block spans `context_parallel` times its own tokens if each rank holds a share of
    it. Ranks hold states, and some draft models (vLLM 0.32), in full. Raises `ConfigError`, which names the kinds of KV
    cache that cannot be kept.
    """
    for index, spec in enumerate(specs):
        name = type(layer_spec(spec)).__name__
        if name in REFUSED:
            raise ConfigError(f"KV cache group {index}", name, REFUSED[name])
    kept = range(len(specs)) if kept is None else kept
    groups = tuple(
        _group(index, spec, hash_tokens, context_parallel, hands_states_over)
        for index, spec in enumerate(specs)
        if index in kept
    )
    if not groups:
        raise ConfigError("the model's KV cache groups", 0, "one or more: a model without KV cache has nothing to keep")
    left_out = tuple(_block_tokens(spec, context_parallel) for index, spec in enumerate(specs) if index not in kept)
    return KVGroups(groups, lcm(*(group.block_tokens for group in groups), *left_out), left_out)


def _group(index: int, spec: Any, hash_tokens: int, context_parallel: int, hands_states_over: bool) -> KVGroup:
    kind = layer_spec(spec)
    name = type(kind).__name__
    tokens = _block_tokens(spec, context_parallel)
    if tokens % hash_tokens:
        raise ConfigError(f"block size of KV cache group {index}", tokens, f"a multiple of {hash_tokens}")
    group = KVGroup(index, tokens, tokens // hash_tokens)
    if name in _FULL:
        return group
    if name in _WINDOW:
        # No token attends to the extra tokens (vLLM 0.28), but vLLM treats them as cached once a load is done.
        extra = getattr(kind, "extra_retained_tokens", 0)
        return replace(group, window=kind.sliding_window + extra, late_tokens=extra)
    if name in _CHUNKED:
        return replace(group, chunk=kind.attention_chunk_size)
    if name == _STATE:
        if hands_states_over and kind.mamba_cache_mode == "align":
            return replace(group, is_state=True)
        mode = f"{name} in mamba_cache_mode {kind.mamba_cache_mode!r}"
        raise ConfigError(f"KV cache group {index}", mode, "mamba_cache_mode 'align', with vLLM 0.30 or later")
    allowed = ", ".join(sorted(SERVED))
    raise ConfigError(f"KV cache group {index}", name, f"{allowed}: KVStow keeps no other kind of KV cache")


def _block_tokens(spec: Any, context_parallel: int) -> int:
    """How many tokens a block of the group spans over all ranks."""
    kind = layer_spec(spec)
    is_shared = getattr(kind, "dcp_sharded", type(kind).__name__ != _STATE)
    return int(spec.block_size) * (context_parallel if is_shared else 1)


def layer_spec(spec: Any) -> Any:
    """The spec of one of a group's layers. Specs of one type differ only in sizes."""
    return next(iter(spec.kv_cache_specs.values())) if type(spec).__name__ == _UNIFORM else spec


def in_token_order(runs: Sequence[tuple[KVGroup, list[T]]]) -> list[T]:
    """The blocks of all groups, in the order of the tokens that they end with. The runs of all groups begin at the same
    token."""
    if len(runs) == 1:
        return runs[0][1]
    ends = [
        (number * group.block_tokens, group.index, block)
        for group, run in runs
        for number, block in enumerate(run, start=1)
    ]
    ends.sort(key=lambda each: each[:2])
    return [block for _, _, block in ends]


Keys = Callable[[KVGroup, int, int], list[bytes]]
"""Keys of the group's blocks from one number to another, as far as their hashes are known."""


class GroupNeeds:
    """`kvstow.results.Needs` of a request. `keys` are all keys that a hit up to `end` may consist of."""

    def __init__(self, groups: KVGroups, keys: Keys, end: int) -> None:
        self._groups = groups
        self._end = end // groups.alignment * groups.alignment
        self._keys = {group.index: keys(group, 0, self._end // group.block_tokens) for group in groups.groups}
        self.keys = list(chain.from_iterable(self._keys.values()))

    @property
    def most(self) -> int:
        return self._end // self._groups.alignment

    def __call__(self, has: Callable[[Sequence[bytes]], Sequence[bool]], most: int | None = None) -> Needed:
        end = self._end if most is None else min(self._end, most * self._groups.alignment)
        known = self._keys
        end = longest_end(
            KeyPresence(has), self._groups, lambda group, first, last: known[group.index][first:last], 0, end
        )
        if end <= 0:
            return Needed((), 0)
        keys = [known[group][number] for group, number in self._groups.places(0, end)]
        return Needed(keys, end // self._groups.alignment)


class KeyPresence:
    """Which keys are present, given one answer per key."""

    def __init__(self, has: Callable[[Sequence[bytes]], Sequence[bool]]) -> None:
        self.contains = has

    def lookup(self, keys: Sequence[bytes]) -> int:
        """How many of the keys are present, counted from the first."""
        return next((number for number, there in enumerate(self.contains(keys)) if not there), len(keys))


def longest_end(presence: OffloadEngine | KeyPresence, groups: KVGroups, keys: Keys, local: int, end: int) -> int:
    """The last aligned token up to `end` at which each group finds all that it needs beyond the first `local` tokens.
    Returns `local` or less if there is none."""
    for group in groups.full:
        wanted = keys(group, local // group.block_tokens, end // group.block_tokens)
        end = min(end, local + presence.lookup(wanted) * group.block_tokens)
    end = end // groups.alignment * groups.alignment
    partial: list[tuple[KVGroup, list[int]]] = []  # how many of a group's first `j` blocks beyond `local` are absent
    for group in groups.partial:
        there = presence.contains(keys(group, local // group.block_tokens, end // group.block_tokens))
        partial.append((group, list(accumulate((not each for each in there), initial=0))))
    while end > local and not all(_is_whole(group, absent, local, end) for group, absent in partial):
        end -= groups.alignment
    return end


def _is_whole(group: KVGroup, absent: list[int], local: int, end: int) -> bool:
    """Whether the group finds all that the token after `end` reads."""
    base = local // group.block_tokens
    first, last = max(group.first_block(end) - base, 0), end // group.block_tokens - base
    return last < len(absent) and absent[first] == absent[last]
