from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import pytest
from tests.seeds import few_and_many

from kvstow.errors import ConfigError, ConflictError, InvalidRequestError, NotFoundError
from kvstow.memory.budget import Close, Create, Give, MemoryBudget, Recall, RowExtent, Step, TakeBack
from kvstow.memory.rows import UNIT_BYTES, BookedPool, PoolLayout, RankLayout

MIB, GIB = 1 << 20, 1 << 30


def layout(*strides: int, owner: int = 1000, nodes: tuple[int | None, ...] = (), extent: int = GIB) -> PoolLayout:
    ranks = zip(strides, nodes or (None,) * len(strides), strict=True)
    return PoolLayout(owner, tuple(RankLayout(stride, node) for stride, node in ranks), extent)


def settle(budget: MemoryBudget) -> list[Step]:
    steps = budget.plan()
    budget.check_integrity()
    assert budget.plan() == [], "planning twice decides nothing more"
    return steps


def held(budget: MemoryBudget, pool: str) -> int:
    return sum(row.num_bytes for row in budget.pool(pool).rows.values() if not row.recalled)


@pytest.mark.parametrize(
    ("strides", "slots", "row", "one"),
    [
        ((3 * MIB, 3 * MIB), 21, [64 * MIB, 64 * MIB], [4 * MIB, 4 * MIB]),
        ((4 * MIB, 3 * MIB), 16, [64 * MIB, 48 * MIB], [4 * MIB, 4 * MIB]),
        ((65 * MIB,), 1, [66 * MIB], [66 * MIB]),
    ],
)
def test_a_whole_row_is_an_extent_for_each_rank_with_as_many_slots(
    strides: tuple[int, ...], slots: int, row: list[int], one: list[int]
) -> None:
    pool = layout(*strides, extent=64 * MIB)
    assert (pool.row_slots, pool.sizes(slots), pool.sizes(1), pool.row_bytes) == (slots, row, one, sum(row))


@pytest.mark.parametrize("strides", [(4096,), (3 * MIB + 512, MIB), (64 * MIB,), (100 * MIB, 1)])
def test_slots_within_is_the_most_that_fit(strides: tuple[int, ...]) -> None:
    pool = layout(*strides, extent=64 * MIB)
    for size in range(0, pool.row_bytes + 4 * MIB, 6 * MIB):
        slots = pool.slots_within(size)
        assert slots == 0 or sum(pool.sizes(slots)) <= size
        assert slots == pool.row_slots or sum(pool.sizes(slots + 1)) > size


def test_extents_exist_before_there_is_a_pool_and_the_last_one_is_smaller() -> None:
    budget = MemoryBudget(2 * GIB + 6 * MIB, numa_nodes=(0, 1))
    assert settle(budget) == [Create(1, GIB, 0), Create(2, GIB, 1), Create(3, 6 * MIB, 0)]


def test_a_pool_gets_the_extents_that_are_there_and_in_their_order() -> None:
    budget = MemoryBudget(4 * GIB)
    settle(budget)
    budget.add_pool("a", layout(2 * MIB, 2 * MIB))
    budget.attach("a", "s1")
    assert settle(budget) == [
        Give(1, "a", 0, 0, 0, 512),
        Give(2, "a", 1, 0, 0, 512),
        Give(3, "a", 0, 1, 512, 512),
        Give(4, "a", 1, 1, 512, 512),
    ]


def test_the_last_row_takes_what_is_left_in_whole_huge_pages() -> None:
    budget = MemoryBudget(3 * GIB)
    settle(budget)
    budget.add_pool("a", layout(3 * MIB, 3 * MIB))
    budget.attach("a", "s1")
    steps = settle(budget)
    assert steps[2:] == [
        Close(3),
        Create(4, 510 * MIB, None),
        Give(4, "a", 0, 1, 341, 170),
        Create(5, 510 * MIB, None),
        Give(5, "a", 1, 1, 341, 170),
        Create(6, 4 * MIB, None),
    ]
    assert budget.allocated_bytes == 3 * GIB


def test_a_pool_gets_no_more_than_it_has_use_for() -> None:
    budget = MemoryBudget(8 * GIB)
    budget.add_pool("a", layout(2 * MIB))
    budget.attach("a", "s1")
    budget.pool("a").wanted = 512
    settle(budget)
    assert held(budget, "a") == GIB
    budget.pool("a").wanted = 513
    settle(budget)
    assert held(budget, "a") == GIB + 2 * MIB
    budget.pool("a").wanted = None
    settle(budget)
    assert held(budget, "a") == 7 * GIB + 2 * MIB, "one row is not whole"


def test_ranks_get_extents_of_their_device_s_node_first() -> None:
    budget = MemoryBudget(8 * GIB, numa_nodes=(0, 1))
    created = {step.extent: step.numa_node for step in settle(budget) if isinstance(step, Create)}
    budget.add_pool("a", layout(2 * MIB, nodes=(1,)))
    budget.attach("a", "s1", 6 * 512)
    given = [created[step.extent] for step in settle(budget) if isinstance(step, Give)]
    assert given == [1, 1, 1, 1, 0, 0]


def test_ranks_of_an_unknown_node_are_spread() -> None:
    budget = MemoryBudget(8 * GIB, numa_nodes=(0, 1))
    created = {step.extent: step.numa_node for step in settle(budget) if isinstance(step, Create)}
    budget.add_pool("a", layout(2 * MIB))
    budget.attach("a", "s1", 4 * 512)
    given = Counter(created[step.extent] for step in settle(budget) if isinstance(step, Give))
    assert given == {0: 2, 1: 2}


def test_what_was_not_asked_for_on_a_node_is_made_there() -> None:
    budget = MemoryBudget(4 * GIB, numa_nodes=(0, 1))
    settle(budget)
    budget.add_pool("a", layout(2 * MIB, nodes=(1,)))
    budget.attach("a", "s1", 10)
    assert Create(5, 20 * MIB, 1) in settle(budget)


def filled(*pools: str, total: int = 8 * GIB) -> MemoryBudget:
    """Each pool has had a session in turn, and as much as the others."""
    budget = MemoryBudget(total)
    for name in pools:
        budget.add_pool(name, layout(2 * MIB))
        budget.attach(name, f"{name}-1", total // len(pools) // (2 * MIB))
    settle(budget)
    return budget


def test_an_extent_changes_hands_only_after_each_client_has_let_go() -> None:
    budget = filled("a", total=2 * GIB)
    (first,), (second,) = (row.extents for row in budget.pool("a").rows.values())
    budget.record_mapping("worker", second)
    budget.record_mapping("worker", second)
    budget.record_mapping("other", second)
    budget.add_pool("new", layout(2 * MIB))
    budget.attach("new", "n", 512)
    assert settle(budget) == [Recall("a", 1, (second,))]
    with pytest.raises(ConflictError, match="recalled"):
        budget.record_mapping("late", second)
    budget.record_unmapping("worker", second)
    budget.record_death("other")
    assert settle(budget) == []
    assert budget.mappers(second) == ["worker"]
    budget.record_unmapping("worker", second)
    assert settle(budget) == [TakeBack(second, "a"), Give(second, "new", 0, 0, 0, 512)]
    budget.record_mapping("worker", first)


def test_a_client_cannot_let_go_of_what_it_has_not() -> None:
    budget = filled("a")
    with pytest.raises(InvalidRequestError, match="no mapping"):
        budget.record_unmapping("worker", 1)
    with pytest.raises(NotFoundError):
        budget.record_unmapping("worker", 999)
    budget.record_death("worker")


def test_for_memory_that_a_process_keeps_others_give_up_theirs() -> None:
    budget = MemoryBudget(4 * GIB)
    budget.add_pool("a", layout(2 * MIB, owner=1))
    budget.attach("a", "s")
    settle(budget)
    budget.add_pool("b", layout(2 * MIB, owner=2))
    budget.attach("b", "t", 512)
    assert settle(budget)[-1] == Close(4)
    budget.keep(4)
    assert budget.fair_shares() == {"a": GIB, "b": GIB}, "what is kept is a half at most"
    assert settle(budget) == [Recall("a", 2, (3,)), TakeBack(3, "a"), Close(3)]
    budget.free(3)
    assert settle(budget) == [Create(5, GIB, None), Give(5, "b", 0, 0, 0, 512)]
    assert budget.allocated_bytes == 4 * GIB
    budget.attach("b", "more")
    assert budget.fair_shares() == {"a": GIB, "b": 2 * GIB}, "the owner of what is kept pays for it"


def test_a_removed_pool_is_gone_once_clients_have_let_go() -> None:
    budget = filled("a", total=2 * GIB)
    with pytest.raises(ConflictError, match="a-1"):
        budget.remove_pool("a")
    budget.record_mapping("worker", 1)
    budget.detach("a", "a-1")
    budget.remove_pool("a")
    with pytest.raises(ConflictError, match="being removed"):
        budget.attach("a", "late")
    settle(budget)
    assert set(budget.pool("a").rows) == {0}
    budget.record_death("worker")
    settle(budget)
    with pytest.raises(NotFoundError, match="no pool a"):
        budget.pool("a")
    assert budget.spare_bytes == 2 * GIB


def test_a_lower_total_takes_memory_from_pools_and_closes_it() -> None:
    budget = filled("a", total=4 * GIB)
    budget.record_mapping("worker", 4)
    budget.total_bytes = 2 * GIB
    assert settle(budget) == [Recall("a", 3, (4,)), Recall("a", 2, (3,)), TakeBack(3, "a"), Close(3)]
    budget.record_death("worker")
    assert settle(budget) == [TakeBack(4, "a"), Close(4)]
    for extent in (3, 4):
        budget.free(extent)
    assert settle(budget) == []
    assert budget.allocated_bytes == 2 * GIB


def test_a_restart_restores_rows_and_numbers_go_on() -> None:
    budget = MemoryBudget(4 * GIB)
    budget.add_pool("a", layout(2 * MIB, 2 * MIB, owner=7))
    budget.restore_row("a", 0, 512, [RowExtent(11, GIB, 0), RowExtent(12, GIB, 1)])
    budget.restore_spare(13, GIB, None, None)
    budget.check_integrity()
    assert settle(budget) == [Create(14, GIB, None)]
    assert budget.pool("a").rows[0].extents == (11, 12)
    budget.attach("a", "s")
    assert [step.row for step in settle(budget) if isinstance(step, Give)] == [1, 1]
    with pytest.raises(ConflictError, match="twice"):
        budget.restore_spare(11, GIB, 0, 7)
    for first_slot, num_slots, sizes in ((0, 512, [GIB, GIB]), (1024, 513, [GIB, GIB]), (1024, 512, [GIB])):
        with pytest.raises(ConflictError, match="pool a cannot have a row"):
            budget.restore_row("a", first_slot, num_slots, [RowExtent(90 + n, size, 0) for n, size in enumerate(sizes)])
    budget.check_integrity()
    assert set(budget.pool("a").rows) == {0, 1}


def test_a_pool_from_before_a_restart_keeps_its_size_of_extents() -> None:
    budget = MemoryBudget(4 * GIB, 2 * GIB)
    budget.add_pool("a", layout(2 * MIB, extent=GIB))
    budget.restore_row("a", 0, 512, [RowExtent(1, GIB, None)])
    budget.attach("a", "s")
    settle(budget)
    assert [row.num_slots for row in budget.pool("a").rows.values()] == [512] * 4


def test_the_row_of_an_extent_that_is_given_up_is_taken_back_with_those_above_it() -> None:
    budget = filled("a", total=4 * GIB)
    budget.record_mapping("engine", 2)
    budget.give_up(2)
    assert settle(budget) == [
        *(Recall("a", 3, (4,)), Recall("a", 2, (3,)), Recall("a", 1, (2,))),
        *(TakeBack(3, "a"), TakeBack(4, "a")),
    ]
    budget.record_death("engine")
    steps = settle(budget)
    assert steps[:2] == [TakeBack(2, "a"), Close(2)], "nobody gets it again"
    budget.free(2)
    steps += settle(budget)
    assert [step.row for step in steps if isinstance(step, Give)] == [1, 2, 3]
    budget.check_integrity()


def test_memory_that_is_given_up_counts_until_it_is_closed() -> None:
    budget = MemoryBudget(4 * GIB)
    numbers = [budget.restore_closed(GIB) for _ in range(3)]
    assert numbers == [-1, -2, -3]
    assert settle(budget) == [Create(1, GIB, None)]
    assert budget.allocated_bytes == 4 * GIB
    for number in numbers:
        budget.free(number)
    assert len(settle(budget)) == 3


def test_more_than_the_budget_may_be_restored_and_goes_down() -> None:
    budget = MemoryBudget(GIB)
    budget.add_pool("a", layout(2 * MIB))
    for extent in (1, 2):
        budget.restore_row("a", 512 * (extent - 1), 512, [RowExtent(extent, GIB, None)])
    budget.record_mapping("engine", 2)
    assert settle(budget) == [Recall("a", 1, (2,))]
    budget.record_death("engine")
    assert settle(budget) == [TakeBack(2, "a"), Close(2)]


@pytest.mark.parametrize(
    "call",
    [
        lambda: MemoryBudget(0),
        lambda: MemoryBudget(MIB),
        lambda: MemoryBudget(GIB, 3 * MIB),
        lambda: layout(0),
        lambda: layout(),
    ],
)
def test_sizes_out_of_range_are_refused(call: Callable[[], object]) -> None:
    with pytest.raises(ConfigError, match="allowed"):
        call()


def test_names_are_taken_once_and_must_exist() -> None:
    budget = filled("a")
    with pytest.raises(ConflictError):
        budget.add_pool("a", layout(2 * MIB))
    with pytest.raises(NotFoundError):
        budget.attach("b", "s")


class Violation(Exception):
    """A guarantee of the budget does not hold."""


class Node:
    """Carries out steps, and knows for itself who has what. `budget` is told what happens here."""

    def __init__(self, budget: MemoryBudget, chance: random.Random) -> None:
        self.budget, self.chance = budget, chance
        self.extents: dict[int, int] = {}
        """The bytes of all that take memory."""
        self.closed: set[int] = set()
        self.places: dict[int, tuple[str, int, int]] = {}
        self.used_by: dict[int, int] = {}
        self.recalled: set[int] = set()
        self.maps: Counter[tuple[str, int]] = Counter()
        self.owners: dict[str, int] = {}
        self.sessions: set[tuple[str, str]] = set()
        self.slots: dict[tuple[str, int], tuple[int, int]] = {}
        self.names = iter(range(10_000))

    def follow(self, is_kept: Callable[[], bool]) -> None:
        """`is_kept`: whether a process keeps an extent that it has said to have let go of."""
        while True:
            self.carry_out(self.budget.plan())
            if self.budget.plan():
                raise Violation("planning twice decides more")
            self._require(self.closed == self.budget.closed.keys())
            closing = [extent for extent, one in self.budget.closed.items() if not one.is_kept]
            for extent in closing:
                if is_kept():
                    self.budget.keep(extent)
                else:
                    self.free(extent)
            if not closing:
                return

    def free(self, extent: int) -> None:
        self.take(extent)
        self.budget.free(extent)

    def take(self, extent: int) -> None:
        self.closed.discard(extent)
        del self.extents[extent]

    def carry_out(self, steps: list[Step]) -> None:
        for step in steps:
            self._carry_out(step)
            if not isinstance(step, Close) and sum(self.extents.values()) > self.budget.total_bytes:
                raise Violation("over budget")
        self.budget.check_integrity()

    def _carry_out(self, step: Step) -> None:
        match step:
            case Create(extent, num_bytes, _):
                self._require(extent not in self.extents and num_bytes % UNIT_BYTES == 0 and num_bytes > 0)
                self.extents[extent] = num_bytes
            case Give(extent, pool, rank, row, first_slot, num_slots):
                self._require(self.slots.setdefault((pool, row), (first_slot, num_slots)) == (first_slot, num_slots))
                self._require(first_slot == sum(self.slots[pool, below][1] for below in range(row)))
                self._require(not any(self.places[other][0] == pool for other in self.recalled))
                self._require(extent in self.extents and extent not in self.places)
                self._require((pool, rank, row) not in self.places.values())
                self._require(not self._is_mapped(extent))
                self._require(self.used_by.setdefault(extent, self.owners[pool]) == self.owners[pool])
                self.places[extent] = (pool, rank, row)
            case Recall(pool, row, extents):
                active = {place[2] for one, place in self.places.items() if place[0] == pool} - {
                    self.places[one][2] for one in self.recalled if self.places[one][0] == pool
                }
                self._require(row == max(active))
                self.recalled |= set(extents)
            case TakeBack(extent, _):
                self._require(extent in self.recalled and not self._is_mapped(extent))
                self.recalled.discard(extent)
                pool, _, row = self.places.pop(extent)
                self.slots.pop((pool, row), None)
            case Close(extent):
                self._require(extent not in self.places and not self._is_mapped(extent))
                self.closed.add(extent)
                if extent not in self.used_by:
                    self.take(extent)

    @property
    def pools(self) -> dict[str, BookedPool]:
        """The pools that have not been removed."""
        found: dict[str, BookedPool] = {}
        for name in self.owners:
            with suppress(NotFoundError):
                found[name] = self.budget.pool(name)
        return found

    @staticmethod
    def _require(condition: bool) -> None:
        if not condition:
            raise Violation

    def _is_mapped(self, extent: int) -> bool:
        return any(count and mapped == extent for (_, mapped), count in self.maps.items())

    def act(self) -> None:
        """One thing that may happen on a node."""
        chance = self.chance
        what = chance.choice(
            ("pool", "attach", "attach", "detach", "want", "map", "map", "unmap", "death", "remove", "free")
        )
        pools = sorted(self.pools)
        if what == "pool" and len(pools) < 5:
            name, owner = f"p{next(self.names)}", chance.choice((1, 2))
            strides = chance.choices((2 * MIB, 3 * MIB, 7 * MIB // 2, 40 * MIB, 4096), k=chance.choice((1, 1, 2, 3)))
            nodes = tuple(chance.choices((None, 0, 1), k=len(strides)))
            self.budget.add_pool(name, layout(*strides, owner=owner, nodes=nodes, extent=self.budget.extent_bytes))
            self.owners[name] = owner
        elif what in ("attach", "want") and pools:
            pool, slots = chance.choice(pools), chance.choice((None, None, 1, 20, 100))
            if self.pools[pool].removed:
                return
            if what == "want":
                self.budget.pool(pool).wanted = slots
            else:
                session = f"s{next(self.names)}"
                self.budget.attach(pool, session, slots)
                self.sessions.add((pool, session))
        elif what == "detach" and self.sessions:
            self.detach(chance.choice(sorted(self.sessions)))
        elif what == "remove" and (idle := [pool for pool in pools if pool not in {name for name, _ in self.sessions}]):
            self.budget.remove_pool(chance.choice(idle))
        elif what == "map" and (usable := sorted(self.places.keys() - self.recalled)):
            client, extent = chance.choice("uvwx"), chance.choice(usable)
            self.budget.record_mapping(client, extent)
            self.maps[client, extent] += 1
        elif what == "unmap" and (mapped := sorted(key for key, count in self.maps.items() if count)):
            client, extent = chance.choice(mapped)
            self.maps[client, extent] -= 1
            self.budget.record_unmapping(client, extent)
        elif what == "death":
            self.die(chance.choice("uvwx"))
        elif what == "free" and self.closed:
            self.free(chance.choice(sorted(self.closed)))

    def detach(self, session: tuple[str, str]) -> None:
        self.sessions.discard(session)
        self.budget.detach(*session)

    def die(self, client: str) -> None:
        for key in [key for key in self.maps if key[0] == client]:
            del self.maps[key]
        self.budget.record_death(client)

    def require_fairness(self) -> None:
        """Everybody has let go: each pool has something, and its share but for one row of each pool, as others keep
        the row with which they would fall below theirs."""
        pools = self.pools
        rows = sum(pool.layout.row_bytes for pool in pools.values())
        for name, share in self.budget.fair_shares().items():
            pool = pools[name]
            demand = pool.demand_slots()
            is_content = demand is not None and pool.held_slots() >= demand
            least = share - rows if pool.held_slots() else share
            if not is_content and pool.held_bytes() <= least and pool.layout.slots_within(share):
                raise Violation(f"{name} has {pool.held_bytes()} of a share of {share}")


def run(seed: int) -> None:
    chance = random.Random(seed)
    total = chance.choice((16, 64, 100, 130, 500)) * UNIT_BYTES
    budget = MemoryBudget(total, chance.choice((1, 8, 32)) * UNIT_BYTES, chance.choice(((None,), (0, 1))))
    node = Node(budget, chance)
    for _ in range(60):
        for _ in range(chance.choice((1, 1, 3))):
            node.act()
        node.follow(lambda: chance.random() < 0.1)
        if sum(node.extents.values()) != budget.allocated_bytes:
            raise Violation("books")
        if budget.allocated_bytes <= total - UNIT_BYTES:
            raise Violation("memory is left that no extent has")
    for client in "uvwx":
        node.die(client)
    for extent in sorted(node.closed):
        node.free(extent)
    node.follow(lambda: False)
    if node.recalled or budget.plan():
        raise Violation("an extent does not come back")
    node.require_fairness()


@pytest.mark.parametrize("seeds", few_and_many(30, 240))
def test_whatever_happens_the_guarantees_hold(seeds: range) -> None:
    for seed in seeds:
        try:
            run(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error
