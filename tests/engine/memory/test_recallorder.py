"""Which rows a pool lacks, and which rows pools lose. Whole rows have 5 slots of 2 MiB."""

from __future__ import annotations

import pytest

from kvstow.memory.budget import recall_order
from kvstow.memory.rows import BookedPool, PoolLayout, RankLayout, Row

MIB = 1 << 20
LAYOUT = PoolLayout(1, (RankLayout(2 * MIB),), 10 * MIB)


def pool(*rows: int, idle_since: int = 0, slots: int | None = None) -> BookedPool:
    """A pool with rows of so many slots, and a session that asks for `slots`."""
    made = BookedPool(LAYOUT, idle_since, requests={"s": slots})
    for number, num_slots in enumerate(rows):
        made.rows[number] = Row(made.held_slots(), num_slots, (number + 1,), num_slots * 2 * MIB)
    return made


def test_the_largest_pool_above_its_share_loses_a_row_first() -> None:
    pools = {"large": pool(5, 5, 5, 5), "small": pool(5, 5)}
    shares = dict.fromkeys(pools, 15 * MIB)
    down_to_shares = [("large", 3), ("large", 2)]
    assert recall_order(pools, shares, may_cross=False) == down_to_shares
    assert recall_order(pools, shares, may_cross=True) == [*down_to_shares, ("small", 1), ("large", 1)]
    shares["small"] = 20 * MIB
    assert recall_order(pools, shares, may_cross=True) == [*down_to_shares, ("large", 1)]


def test_pools_without_sessions_lose_all_rows_before_others_lose_any() -> None:
    pools = {"used": pool(5, 5), "left_last": pool(5, 5, idle_since=2), "left_first": pool(5, idle_since=1)}
    order = recall_order(pools, {"used": 10 * MIB}, may_cross=False)
    assert order == [("left_first", 0), ("left_last", 1), ("left_last", 0), ("used", 1)]


def test_a_pool_with_rows_waits_for_the_memory_of_a_whole_one() -> None:
    share, available = 20 * MIB, 4 * MIB
    assert pool(5).next_row_slots(share, available, whole=True) == 0
    assert pool(5).next_row_slots(share, available, whole=False) == 2
    assert pool().next_row_slots(share, available, whole=True) == 2, "it has none yet"
    assert pool(5).next_row_slots(14 * MIB, available, whole=True) == 2, "its share has no room for a whole one"
    assert pool(5).next_row_slots(share, 10 * MIB, whole=True) == 5


def test_a_pool_has_one_part_row_at_most() -> None:
    assert pool(5, 2).next_row_slots(18 * MIB, 20 * MIB, whole=False) == 0
    assert pool(5, 2).missing_bytes(18 * MIB) == 0
    assert pool(5, 2).next_row_slots(24 * MIB, 20 * MIB, whole=False) == 5
    assert pool(5, 2).missing_bytes(28 * MIB) == 10 * MIB


@pytest.mark.parametrize(("slots", "missing"), [(None, 14), (100, 14), (11, 12), (6, 2), (5, 0), (1, 0)])
def test_a_pool_lacks_what_its_sessions_ask_for_within_its_share(slots: int | None, missing: int) -> None:
    assert pool(5, slots=slots).missing_bytes(24 * MIB) == missing * MIB


def test_a_pool_gets_no_row_while_a_recalled_one_is_left() -> None:
    waiting = pool(5, 5)
    waiting.rows[1].recalled = True
    assert waiting.next_row_slots(40 * MIB, 40 * MIB, whole=True) == 0
    assert waiting.missing_bytes(40 * MIB) == 0
