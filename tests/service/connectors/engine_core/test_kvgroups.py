"""KV groups: which blocks each kind needs, and which kinds are refused."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstow.errors import ConfigError
from kvstow_service.connectors.engine_core.kvgroups import REFUSED, KVGroup, KVGroups, kv_groups


@dataclass
class FullAttentionSpec:
    block_size: int


class MLAAttentionSpec(FullAttentionSpec): ...


@dataclass
class CircularBufferSpec:
    block_size: int


@dataclass
class SlidingWindowSpec:
    """`extra_retained_tokens` since vLLM 0.28, `dcp_sharded` since 0.32."""

    block_size: int
    sliding_window: int
    extra_retained_tokens: int = 0
    dcp_sharded: bool = True


@dataclass
class ChunkedLocalAttentionSpec:
    block_size: int
    attention_chunk_size: int


@dataclass
class MambaSpec:
    block_size: int
    mamba_cache_mode: str = "align"


class NewAttentionSpec(FullAttentionSpec): ...


@dataclass
class UniformTypeKVCacheSpecs:
    block_size: int
    kv_cache_specs: dict[str, Any]


def test_each_kind_becomes_a_group() -> None:
    specs = [FullAttentionSpec(16), SlidingWindowSpec(16, 40), ChunkedLocalAttentionSpec(16, 64), MLAAttentionSpec(16)]
    groups = kv_groups(specs, 16)
    assert groups.groups == (
        KVGroup(0, 16, 1),
        KVGroup(1, 16, 1, window=40),
        KVGroup(2, 16, 1, chunk=64),
        KVGroup(3, 16, 1),
    )
    assert [group.index for group in groups.full] == [0, 3]
    assert [group.index for group in groups.partial] == [1, 2]


def test_hits_end_where_a_block_of_every_group_ends() -> None:
    groups = kv_groups([FullAttentionSpec(48), SlidingWindowSpec(32, 40)], 16)
    assert groups.alignment == 96
    assert [group.hashes_per_block for group in groups.groups] == [3, 2]


def test_context_parallel_ranks_share_a_block() -> None:
    (group,) = kv_groups([FullAttentionSpec(16)], 16, context_parallel=2).groups
    assert (group.block_tokens, group.hashes_per_block) == (32, 2)


def test_a_block_that_every_rank_holds_in_full_spans_its_own_tokens() -> None:
    specs = [FullAttentionSpec(16), SlidingWindowSpec(16, 40, dcp_sharded=False)]
    groups = kv_groups(specs, 16, context_parallel=2).groups
    assert [group.block_tokens for group in groups] == [32, 16]


def test_a_window_is_loaded_with_all_that_vllm_retains() -> None:
    """Otherwise vLLM would treat blocks as cached that were never written."""
    (group,) = kv_groups([SlidingWindowSpec(16, 33, extra_retained_tokens=16)], 16).groups
    assert group.first_block(160) == (160 - 33 + 1 - 16) // 16 == 7
    assert group.late_tokens == 16


def test_what_vllm_does_not_find_by_prefix_is_left_out_but_counts_for_where_hits_end() -> None:
    specs = [CircularBufferSpec(24), FullAttentionSpec(16), SlidingWindowSpec(16, 40), SlidingWindowSpec(32, 40)]
    groups = kv_groups(specs, 16, kept=(1, 2))
    assert groups.groups == (KVGroup(1, 16, 1), KVGroup(2, 16, 1, window=40))
    assert (groups.alignment, groups.num_tables, groups.left_out) == (96, 4, (24, 32))
    assert groups.places(0, 48) == [(1, 0), (2, 0), (1, 1), (2, 1), (1, 2), (2, 2)]


def test_with_a_group_left_out_no_request_continues_from_its_last_token() -> None:
    """That token needs what the group has of those before it."""
    assert kv_groups([FullAttentionSpec(16)], 16, kept=(0,)).is_plain
    assert not kv_groups([FullAttentionSpec(16), CircularBufferSpec(8)], 16, kept=(0,)).is_plain


def test_a_model_of_which_nothing_is_kept_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing to keep"):
        kv_groups([CircularBufferSpec(8)], 8, kept=())


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_kind_that_cannot_be_served_is_refused_by_name_and_with_the_reason(name: str) -> None:
    """Also where vLLM finds none of its blocks by prefix."""
    spec = type(name, (FullAttentionSpec,), {})(16)
    with pytest.raises(ConfigError, match=rf"KV cache group 1 is '{name}'") as caught:
        kv_groups([FullAttentionSpec(16), spec], 16, kept=(0,))
    assert caught.value.allowed == REFUSED[name]


def test_layers_of_one_type_are_one_group() -> None:
    uniform = UniformTypeKVCacheSpecs(16, {"a": SlidingWindowSpec(16, 40), "b": SlidingWindowSpec(16, 40)})
    assert kv_groups([uniform], 16).groups == (KVGroup(0, 16, 1, window=40),)


def test_a_kind_that_is_not_known_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"KV cache group 1.*NewAttentionSpec.*FullAttentionSpec"):
        kv_groups([FullAttentionSpec(16), NewAttentionSpec(16)], 16)


def test_states_are_a_group_of_their_own_and_whole_on_every_rank() -> None:
    specs = [FullAttentionSpec(16), MambaSpec(64)]
    groups = kv_groups(specs, 16, context_parallel=2, hands_states_over=True)
    assert groups.groups == (KVGroup(0, 32, 2), KVGroup(1, 64, 4, is_state=True))
    assert (groups.alignment, groups.has_states) == (64, True)
    assert groups.partial == (groups.groups[1],)
    assert groups.groups[1].first_block(128) == 1


@pytest.mark.parametrize(("mode", "hands_over"), [("align", False), ("all", True), ("none", True)])
def test_states_that_vllm_does_not_hand_over_are_refused(mode: str, hands_over: bool) -> None:
    with pytest.raises(ConfigError, match=f"mamba_cache_mode '{mode}'.*vLLM 0.30"):
        kv_groups([MambaSpec(16, mode)], 16, hands_states_over=hands_over)


def test_blocks_that_are_no_whole_number_of_hash_blocks_are_refused() -> None:
    with pytest.raises(ConfigError, match="a multiple of 16"):
        kv_groups([FullAttentionSpec(24)], 16)


def test_a_model_without_kv_cache_is_refused() -> None:
    with pytest.raises(ConfigError, match="one or more"):
        kv_groups([], 16)


@settings(deadline=None)
@given(block=st.integers(1, 7), reach=st.integers(1, 40), num_tokens=st.integers(0, 100))
def test_the_first_block_is_that_of_the_oldest_token_read(block: int, reach: int, num_tokens: int) -> None:
    """The token after `num_tokens` tokens reads itself at least."""
    window = min(position for position in range(num_tokens + 1) if num_tokens - position < reach)
    chunk = min(position for position in range(num_tokens + 1) if position // reach == num_tokens // reach)
    assert KVGroup(0, block, 1, window=reach).first_block(num_tokens) == window // block
    assert KVGroup(0, block, 1, chunk=reach).first_block(num_tokens) == chunk // block
    assert KVGroup(0, block, 1).first_block(num_tokens) == 0


def reads(group: KVGroup, token: int, end: int) -> bool:
    """Whether computing the token at `end` reads that token, or the state that it ends."""
    if group.window is not None:
        return end - token < group.window
    if group.chunk is not None:
        return token // group.chunk == end // group.chunk
    return not group.is_state or token == end - 1


@st.composite
def models(draw: st.DrawFn) -> KVGroups:
    sizes = draw(st.lists(st.sampled_from((1, 2, 3, 4, 6)), min_size=1, max_size=4))
    reach = st.integers(1, 30)
    kinds = [st.just({}), st.builds(dict, window=reach), st.builds(dict, chunk=reach), st.just({"is_state": True})]
    groups = [KVGroup(index, size, 1, **draw(st.one_of(kinds))) for index, size in enumerate(sizes)]
    return KVGroups(tuple(groups), lcm(*sizes))


@settings(deadline=None)
@given(data=st.data())
def test_places_are_the_blocks_read_in_the_order_of_their_last_tokens(data: st.DataObject) -> None:
    groups = data.draw(models(), "groups")
    unit = groups.alignment if groups.partial else 1  # hits with windows or states are aligned
    end = data.draw(st.integers(1, 48 // unit), "end") * unit
    start, later = sorted(data.draw(st.integers(0, end // unit - 1), name) * unit for name in ("start", "later"))
    places = groups.places(start, end)
    ends = [(number + 1) * groups.groups[index].block_tokens for index, number in places]
    assert ends == sorted(ends)
    assert sorted(places) == sorted(
        {
            (group.index, token // group.block_tokens)
            for group in groups.groups
            for token in range(start, end)
            if reads(group, token, end)
        }
    )
    tail = groups.places(later, end)
    assert places[len(places) - len(tail) :] == tail


def test_places_of_blocks_that_end_together_are_in_the_order_of_the_groups() -> None:
    groups = KVGroups((KVGroup(0, 2, 1), KVGroup(1, 6, 3), KVGroup(2, 2, 1, window=3)), 6)
    full, large, window = ([(index, number) for number in range(6)] for index in range(3))
    expected = [*full[:3], large[0], full[3], full[4], full[5], large[1], window[5]]
    assert groups.places(0, 12) == expected
    assert groups.places(6, 12) == expected[4:]
