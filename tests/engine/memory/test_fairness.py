"""Memory is max-min fair between owners, then between the pools of each."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvstow.memory.budget import MemoryBudget
from kvstow.memory.rows import BookedExtent, PoolLayout, RankLayout, fair_shares
from kvstow.owners import most_of

MIB = 1 << 20
EXTENT = 2 * MIB
NAMES = "abcdefgh"
AMOUNTS = st.dictionaries(st.sampled_from(NAMES), st.integers(0, 60), max_size=len(NAMES))


@given(st.integers(0, 200), AMOUNTS, AMOUNTS)
def test_shares_are_max_min_fair(total: int, asked: dict[str, int], kept: dict[str, int]) -> None:
    demands = dict.fromkeys(kept, 0) | asked
    shares = fair_shares(total, demands, kept)
    assert shares.keys() == demands.keys()
    assert all(0 <= shares[name] <= demands[name] for name in demands)
    whole = {name: share + kept.get(name, 0) for name, share in shares.items()}
    given_out, wanted = sum(whole.values()), sum(demands.values()) + sum(kept.values())
    assert given_out <= max(total, sum(kept.values()))
    assert given_out >= min(total, wanted) - len(demands), "nothing is left that somebody wants"
    for poor in demands:
        if shares[poor] < demands[poor]:
            for rich in demands:
                if shares[rich]:
                    assert whole[rich] <= whole[poor] + len(demands), f"{poor} wants more, and {rich} has more"


@given(st.integers(1, 1000), st.lists(st.integers(0, 100), max_size=10))
def test_one_more_owner_always_gets_something_of_what_cannot_be_reclaimed(total: int, steps: list[int]) -> None:
    """Owners take as much as they may, in any order, and some give it back again."""
    held: Counter[int] = Counter()
    for owner in steps:
        others = held.total() - held[owner]
        held[owner] = max(held[owner], most_of(total, others))
    assert held.total() < total


def fill(budget: MemoryBudget) -> None:
    """Every client lets go at once, and the kernel takes memory back at once."""
    while budget.plan() or budget.closed:
        for number in list(budget.closed):
            budget.free(number)


def held_by(budget: MemoryBudget, owner: int) -> int:
    return budget.held_bytes()[owner]


def add(budget: MemoryBudget, name: str, owner: int, slots: int | None = None) -> None:
    budget.add_pool(name, PoolLayout(owner, (RankLayout(64 << 10),), EXTENT))
    budget.attach(name, f"session of {name}", slots)


def test_many_pools_of_one_owner_take_nothing_of_another_ones_share() -> None:
    budget = MemoryBudget(256 * MIB, EXTENT)
    add(budget, "tenant", 2)
    fill(budget)
    assert held_by(budget, 2) == 256 * MIB, "alone it may have everything"
    for number in range(15):
        add(budget, f"p{number}", 1)
        fill(budget)
        assert held_by(budget, 2) == 128 * MIB
    budget.check_integrity()


@given(
    st.integers(2, 64),
    st.lists(
        st.tuples(st.integers(1, 4), st.one_of(st.none(), st.integers(1, 200))),
        min_size=1,
        max_size=12,
    ),
    st.randoms(use_true_random=False),
)
def test_owners_have_their_share_however_many_pools_they_have(
    units: int, pools: list[tuple[int, int | None]], chance: object
) -> None:
    """In whatever order pools come. A pool may lack a row, because others keep the row with which they would fall below
    their share."""
    budget = MemoryBudget(units * EXTENT, EXTENT)
    demands: Counter[int] = Counter()
    for number, (owner, slots) in enumerate(pools):
        add(budget, f"p{number}", owner, slots)
        wanted = budget.total_bytes if slots is None else budget.pool(f"p{number}").layout.bytes_of(slots)
        demands[owner] += wanted
        fill(budget)
    shares = fair_shares(budget.total_bytes, demands)
    for owner, share in shares.items():
        assert held_by(budget, owner) >= share - len(pools) * EXTENT
        others = sum(demands.values()) - demands[owner]
        if others + demands[owner] > budget.total_bytes:
            assert held_by(budget, owner) <= share + len(pools) * EXTENT
    budget.check_integrity()


def keep_all(budget: MemoryBudget) -> None:
    while budget.plan() or any(not extent.is_kept for extent in budget.closed.values()):
        for number in budget.closed:
            budget.keep(number)


def test_who_keeps_what_it_has_given_back_comes_to_keep_half_at_most() -> None:
    """Each time, an engine takes what it may have, detaches, and keeps it. There is always some for another owner."""
    budget = MemoryBudget(256 * MIB, EXTENT)
    for number in range(6):
        add(budget, f"p{number}", 1, 32 * 16)
        keep_all(budget)
        budget.detach(f"p{number}", f"session of p{number}")
        budget.remove_pool(f"p{number}")
        for extent in [one for one, found in budget.extents.items() if found.pool == f"p{number}"]:
            budget.give_up(extent)
        keep_all(budget)
    assert 0 < budget.kept_bytes()[1] <= 128 * MIB
    add(budget, "tenant", 2)
    keep_all(budget)
    assert held_by(budget, 2) >= 128 * MIB


def test_what_an_owner_keeps_is_a_part_of_its_own_share() -> None:
    budget = MemoryBudget(12 * EXTENT, EXTENT)
    for owner in (1, 2, 3):
        add(budget, f"pool of {owner}", owner)
    budget.closed[-1] = BookedExtent(2 * EXTENT, None, owner=1, is_kept=True)
    assert list(budget.fair_shares().values()) == [2 * EXTENT, 4 * EXTENT, 4 * EXTENT]
    budget.closed[-1] = BookedExtent(6 * EXTENT, None, owner=1, is_kept=True)
    assert list(budget.fair_shares().values()) == [0, 3 * EXTENT, 3 * EXTENT], "what it keeps beyond costs all"
