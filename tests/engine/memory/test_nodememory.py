from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from kvstow.errors import PinError
from kvstow.memory.budget import MemoryBudget
from kvstow.memory.budgetsteps import Close, Create, Give, Recall, TakeBack
from kvstow.memory.extents import Extent
from kvstow.memory.limits import MemoryLimits
from kvstow.memory.nodememory import NodeMemory
from kvstow.memory.populator import Populator
from kvstow.memory.rows import PoolLayout, RankLayout

MIB = 1 << 20
EXTENT = 4 * MIB

Eventually = Callable[[Callable[[], object]], None]


class Held(NamedTuple):
    fd: int
    info: str


class FakeKeeper:
    """Has duplicates, like the real one."""

    def __init__(self) -> None:
        self.held: dict[str, Held] = {}

    def put(self, extents: Mapping[str, tuple[int, str]]) -> None:
        for name, (fd, info) in extents.items():
            self.drop([name])
            self.held[name] = Held(os.dup(fd), info)

    def drop(self, names: Collection[str]) -> None:
        for name in names:
            if name in self.held:
                os.close(self.held.pop(name).fd)

    def take_all(self) -> dict[str, Held]:
        return {name: Held(os.dup(held.fd), held.info) for name, held in self.held.items()}

    @property
    def resident_bytes(self) -> int:
        return sum(os.fstat(held.fd).st_blocks * 512 for held in self.held.values())


@pytest.fixture
def keeper() -> Iterator[FakeKeeper]:
    keeper = FakeKeeper()
    yield keeper
    keeper.drop(list(keeper.held))


MakeNode = Callable[..., NodeMemory]


@pytest.fixture
def make(tmp_path: Path, keeper: FakeKeeper) -> Iterator[MakeNode]:
    made: list[NodeMemory] = []
    (tmp_path / "meminfo").write_text(f"MemAvailable: {1 << 30} kB\n")
    limits = MemoryLimits(tmp_path / "meminfo", tmp_path / "cgroup", tmp_path / "fs")

    def make(extents: int = 4) -> NodeMemory:
        populator = Populator(limits, pause=0)
        populator.start()
        made.append(NodeMemory(MemoryBudget(extents * EXTENT, EXTENT), populator, keeper=keeper))
        return made[-1]

    yield make
    for node in made:
        node.close()


def add_pool(node: NodeMemory, name: str = "a", *, owner: int = 1, session: str | None = "s") -> None:
    node.budget.add_pool(name, PoolLayout(owner, (RankLayout(MIB), RankLayout(MIB)), EXTENT))
    if session:
        node.budget.attach(name, session)


def number_of(node: NodeMemory, extent: int) -> tuple[int, int]:
    found = node.extent(extent)
    assert found is not None
    return os.fstat(found.fd).st_dev, os.fstat(found.fd).st_ino


def test_memory_is_populated_before_there_is_a_pool_and_then_given(
    make: MakeNode, keeper: FakeKeeper, eventually: Eventually
) -> None:
    node = make()
    assert node.apply() == [Create(number, EXTENT, None) for number in (1, 2, 3, 4)]
    eventually(lambda: node.populator.status().state == "ready")
    assert keeper.resident_bytes == 4 * EXTENT
    add_pool(node)
    node.apply()
    assert node.populated_slots("a") == {0: 4, 1: 4}
    assert keeper.resident_bytes == 4 * EXTENT


def rows_waited_for(node: NodeMemory) -> dict[int, int | None]:
    return {number: found.row for number in range(1, 9) if (found := node.extent(number)) is not None}


def test_the_populator_knows_which_rows_wait_for_extents(make: MakeNode, keeper: FakeKeeper) -> None:
    node = make()
    node.budget.add_pool("a", PoolLayout(1, (RankLayout(MIB), RankLayout(MIB)), EXTENT))
    node.apply()
    assert rows_waited_for(node) == {1: None, 2: None, 3: None, 4: None}
    node.budget.attach("a", "s", 4)
    node.apply()
    given = node.budget.rows("a")[0].extents
    assert rows_waited_for(node) == {number: 0 if number in given else None for number in (1, 2, 3, 4)}
    again = make()
    add_pool(again, session=None)
    again.restore(keeper.take_all())
    assert rows_waited_for(again) == rows_waited_for(node)
    node.budget.record_mapping("client", given[0])
    node.budget.detach("a", "s")
    node.budget.remove_pool("a")
    (recall,) = (step for step in node.apply() if isinstance(step, Recall))
    assert recall.extents == given
    assert set(rows_waited_for(node).values()) == {None}, "nobody waits for a row that was recalled"


def test_extents_that_are_created_for_a_row_know_it(make: MakeNode) -> None:
    node = make()
    add_pool(node)
    node.apply()
    assert sorted(str(row) for row in rows_waited_for(node).values()) == ["0", "0", "1", "1"]


def test_slots_are_usable_as_far_as_every_rank_is_populated(make: MakeNode) -> None:
    node = make()
    node.populator.set_paused(True)
    add_pool(node)
    node.apply()
    assert node.populated_slots("a") == {0: 0, 1: 0}
    first, second = (node.extent(number) for number in node.budget.rows("a")[0].extents)
    assert first is not None
    assert second is not None
    first.populated_bytes, second.populated_bytes = 4 * MIB, 3 * MIB
    assert node.populated_slots("a")[0] == 3


def test_a_restarted_service_has_the_same_memory_in_the_same_places(
    make: MakeNode, keeper: FakeKeeper, eventually: Eventually
) -> None:
    node = make()
    add_pool(node)
    node.apply()
    eventually(lambda: node.populator.status().state == "ready")
    places = {number: row.extents for number, row in node.budget.rows("a").items()}
    identities = {extent: number_of(node, extent) for extent in (1, 2, 3, 4)}
    extent = node.extent(places[1][0])
    assert extent is not None
    os.pwrite(extent.fd, b"kv", MIB)
    node.close()

    again = make()
    add_pool(again, session=None)
    again.restore({**keeper.take_all(), "journal": Held(-1, "")})
    assert again.apply() == []
    assert {number: row.extents for number, row in again.budget.rows("a").items()} == places
    assert {extent: number_of(again, extent) for extent in (1, 2, 3, 4)} == identities
    restored = again.extent(places[1][0])
    assert restored is not None
    assert os.pread(restored.fd, 2, MIB) == b"kv"
    assert again.populated_slots("a") == {0: 4, 1: 4}, "without populating again"
    assert keeper.resident_bytes == 4 * EXTENT


def test_spare_memory_keeps_its_last_owner_across_a_restart(make: MakeNode, keeper: FakeKeeper) -> None:
    node = make(2)
    add_pool(node, owner=7)
    node.apply()
    node.budget.detach("a", "s")
    node.budget.remove_pool("a")
    assert [type(step) for step in node.apply()] == [Recall, TakeBack, TakeBack]
    node.close()
    again = make(2)
    again.restore(keeper.take_all())
    add_pool(again, "b", owner=8)
    assert [type(step) for step in again.apply()] == [Close, Create, Give, Close, Create, Give]


def test_memory_goes_to_another_owner_only_as_fresh_memory(
    make: MakeNode, keeper: FakeKeeper, eventually: Eventually
) -> None:
    node = make(2)
    add_pool(node, owner=1)
    node.apply()
    eventually(lambda: node.populator.status().state == "ready")
    before = {number_of(node, extent) for extent in (1, 2)}
    first = node.extent(1)
    assert first is not None
    os.pwrite(first.fd, b"secret", 0)
    node.budget.detach("a", "s")
    add_pool(node, "b", owner=2)
    node.apply()
    now = node.budget.rows("b")[0].extents
    assert not before & {number_of(node, extent) for extent in now}
    eventually(lambda: node.populator.status().state == "ready")
    for number in now:
        extent = node.extent(number)
        assert extent is not None
        assert os.pread(extent.fd, EXTENT, 0) == bytes(EXTENT)
    assert keeper.resident_bytes == 2 * EXTENT


def test_what_the_keeper_has_is_not_believed_blindly(make: MakeNode, keeper: FakeKeeper) -> None:
    node = make()
    add_pool(node)
    node.apply()
    node.close()
    kept = keeper.take_all()
    label = json.loads(kept["extent-1"].info)
    texts = {
        "extent-1": json.dumps([label[0] + 2 * MIB, *label[1:]]),
        "extent-2": "[]",
        "extent-3": json.dumps([*label[:3], [1, 2, 3], label[4]]),
        "extent-x": kept["extent-4"].info,
    }
    os.close(kept.pop("extent-4").fd)
    forged = {name: Held(kept[name].fd if name in kept else os.dup(0), text) for name, text in texts.items()}
    before = len(os.listdir("/proc/self/fd"))
    again = make()
    add_pool(again, session=None)
    again.restore(forged)
    assert again.budget.allocated_bytes == 0
    assert again.foreign_extents == 4
    assert len(os.listdir("/proc/self/fd")) < before - 4, "theirs, and the keeper's"


def test_an_extent_of_a_pool_that_nobody_knows_any_more_is_dropped(make: MakeNode, keeper: FakeKeeper) -> None:
    node = make(2)
    add_pool(node)
    node.apply()
    node.close()
    again = make(2)
    again.restore(keeper.take_all())
    assert keeper.held == {}


def test_an_extent_that_cannot_be_created_is_told_and_made_later(
    make: MakeNode, keeper: FakeKeeper, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    def refuse(*_: object) -> Extent:
        raise PinError("out_of_memory", "EMFILE")

    node = make()
    with monkeypatch.context() as patch:
        patch.setattr(Extent, "create", refuse)
        add_pool(node)
        node.apply()
        assert node.error is not None
        assert node.error.reason == "out_of_memory"
        assert node.populated_slots("a") == {0: 0, 1: 0}
    node.retry()
    assert node.error is None
    eventually(lambda: node.populated_slots("a") == {0: 4, 1: 4})
    assert len(keeper.held) == 4


def test_a_smaller_budget_after_a_restart_gives_memory_back(make: MakeNode, keeper: FakeKeeper) -> None:
    node = make(4)
    add_pool(node)
    node.apply()
    node.close()
    again = make(2)
    add_pool(again, session=None)
    again.restore(keeper.take_all())
    again.apply()
    assert again.budget.allocated_bytes == 2 * EXTENT
    assert len(keeper.held) == 2


def test_closing_leaves_no_descriptor(make: MakeNode, keeper: FakeKeeper) -> None:
    node = make()
    node.apply()
    keeper.drop(list(keeper.held))
    inodes = {number_of(node, extent) for extent in (1, 2, 3, 4)}
    node.close()
    node.close()
    found = [fd.stat() for fd in Path("/proc/self/fd").iterdir() if fd.exists()]
    assert not inodes & {(one.st_dev, one.st_ino) for one in found}
