"""Every byte comes back, whatever the layout and however it travels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

MakeRank = Callable[..., Any]
CheckDone = Callable[[Any], None]

_STRATEGIES: dict[str, dict[str, Any]] = {
    "staged": {"strategy": "staged"},
    "direct": {"strategy": "direct"},
    "mixed": {"strategy": "auto", "threshold_bytes": 2048},
}
strategies = pytest.mark.parametrize("strategy", _STRATEGIES)


def _round_trip(rank: Any, check_done: CheckDone, sources: Sequence[int], slots: Sequence[int], targets: Any) -> None:
    """Store, scramble the whole KV cache, load elsewhere: the blocks are there, and no other byte has changed."""
    expected = rank.blocks(sources)
    check_done(rank.store(sources, slots))
    np.testing.assert_array_equal(rank.slots(slots), expected)
    rank.scramble()
    untouched = [memory.clone() for memory in rank.storage]
    check_done(rank.load(slots, targets))
    np.testing.assert_array_equal(rank.blocks(targets), expected)
    index = torch.tensor(list(targets), device="cuda")
    for memory, before, tensor in zip(rank.storage, untouched, rank.tensors, strict=True):
        before[index, : tensor.shape[1]] = tensor[index]
        assert torch.equal(memory, before)


@strategies
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_layouts_come_back(
    strategy: str, make_closed_rank: MakeRank, check_done: CheckDone, data: st.DataObject
) -> None:
    size = st.integers(1, 5000) | st.sampled_from([16, 1024, 4096, 32768, 40000])
    regions = data.draw(st.lists(st.tuples(size, st.integers(0, 64) | st.just(4096)), min_size=1, max_size=6))
    pages, gaps = zip(*regions, strict=True)
    count = data.draw(st.integers(1, 24))
    sources, slots, targets = (data.draw(st.permutations(range(24)))[:count] for _ in range(3))
    options = _STRATEGIES[strategy] | {"staging_bytes": data.draw(st.sampled_from([1, 20_000, 1 << 20]))}
    with make_closed_rank(pages, gaps, blocks=24, slots=24, **options) as rank:
        _round_trip(rank, check_done, sources, slots, targets)


@strategies
@pytest.mark.parametrize(
    "pages", [[64], [1, 3, 17, 4097, 33_000], [4096, 1000] * 100], ids=["1 region", "odd sizes", "200 regions"]
)
def test_few_and_many_regions_come_back(
    strategy: str, pages: list[int], make_rank: MakeRank, check_done: CheckDone
) -> None:
    rank = make_rank(pages, blocks=64, slots=64, **_STRATEGIES[strategy])
    _round_trip(rank, check_done, range(64), range(63, -1, -1), range(64))


@strategies
def test_k_and_v_in_one_tensor_come_back(strategy: str, make_rank: MakeRank, check_done: CheckDone) -> None:
    """Page and gap of one region are gap and page of the next."""
    rank = make_rank([6144], blocks=32, slots=32, **_STRATEGIES[strategy])
    (memory,) = rank.storage
    assert memory.stride(0) == 6144
    _round_trip(rank, check_done, range(0, 32, 2), range(16), range(1, 32, 2))


@strategies
def test_a_slot_larger_than_the_staging_buffer_comes_back(
    strategy: str, make_rank: MakeRank, check_done: CheckDone
) -> None:
    rank = make_rank([300_000, 1_000, 300_001], staging_bytes=64 << 10, **_STRATEGIES[strategy])
    _round_trip(rank, check_done, range(16), range(16), range(15, -1, -1))


def test_more_blocks_than_one_launch_takes_come_back(make_rank: MakeRank, check_done: CheckDone) -> None:
    rank = make_rank([48, 16], blocks=3000, slots=3000, strategy="staged")
    _round_trip(rank, check_done, range(2999, -1, -1), range(3000), range(3000))


@strategies
def test_ops_of_both_directions_share_the_device(strategy: str, make_rank: MakeRank, check_done: CheckDone) -> None:
    rank = make_rank([4096] * 8, blocks=256, slots=256, staging_bytes=256 << 10, **_STRATEGIES[strategy])
    first, second = rank.blocks(range(128)), rank.blocks(range(128, 256))
    check_done(rank.store(range(128), range(128)))
    tickets = [
        rank.store(range(128, 256), range(128, 256)),
        rank.load(range(64), range(64, 128)),
        rank.load(range(64, 128), range(64)),
    ]
    for ticket in tickets:
        check_done(ticket)
    np.testing.assert_array_equal(rank.slots(range(128, 256)), second)
    np.testing.assert_array_equal(rank.blocks(range(128)), np.roll(first, 64, axis=0))


def test_an_op_of_no_blocks_is_done(make_rank: MakeRank, check_done: CheckDone) -> None:
    rank = make_rank()
    check_done(rank.store([], []))
    check_done(rank.load([], []))


def test_the_page_size_is_calibrated(make_rank: MakeRank, check_done: CheckDone) -> None:
    rank = make_rank([4 << 20, 4096], blocks=4, slots=4)
    _round_trip(rank, check_done, range(4), range(4), range(4))


def test_two_devices_work_in_one_process(make_rank: MakeRank, check_done: CheckDone) -> None:
    ranks = [make_rank([4096] * 10, blocks=128, slots=128, staging_bytes=64 << 10) for _ in range(2)]

    def work(rank: Any) -> None:
        for _ in range(10):
            _round_trip(rank, check_done, range(128), range(127, -1, -1), range(128))

    with ThreadPoolExecutor() as threads:
        list(threads.map(work, ranks))


def test_a_device_can_be_closed_and_opened_again(make_rank: MakeRank, check_done: CheckDone) -> None:
    rank = make_rank()
    expected = rank.blocks(range(16))
    check_done(rank.store(range(16), range(16)))
    rank.device.close()
    rank.device.close()
    rank.device = rank.new_device()
    rank.scramble()
    check_done(rank.load(range(16), range(16)))
    np.testing.assert_array_equal(rank.blocks(range(16)), expected)
