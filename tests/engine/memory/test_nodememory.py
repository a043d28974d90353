from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstow.errors import PinError
from kvstow.memory.budget import Create, MemoryBudget, Recall
from kvstow.memory.extents import Extent, Populator
from kvstow.memory.limits import MemoryLimits
from kvstow.memory.nodememory import NodeMemory
from kvstow.memory.rows import PoolLayout, RankLayout

MIB = 1 << 20
EXTENT = 4 * MIB

Eventually = Callable[[Callable[[], object]], None]
MakeNode = Callable[..., NodeMemory]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeNode]:
    made: list[NodeMemory] = []
    (tmp_path / "meminfo").write_text(f"MemAvailable: {1 << 30} kB\n")
    limits = MemoryLimits(tmp_path / "meminfo", tmp_path / "cgroup", tmp_path / "fs")

    def make(extents: int = 4) -> NodeMemory:
        populator = Populator(limits, pause=0)
        populator.start()
        made.append(NodeMemory(MemoryBudget(extents * EXTENT, EXTENT), populator))
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


def resident_bytes(node: NodeMemory) -> int:
    return sum(os.fstat(extent.fd).st_blocks * 512 for extent in (*node.extents().values(), *node.given_up))


def test_memory_is_populated_before_there_is_a_pool_and_then_given(make: MakeNode, eventually: Eventually) -> None:
    node = make()
    assert node.apply() == [Create(number, EXTENT, None) for number in (1, 2, 3, 4)]
    eventually(lambda: node.populator.status().state == "ready")
    assert resident_bytes(node) == 4 * EXTENT
    add_pool(node)
    node.apply()
    assert {number: row.extents for number, row in node.budget.rows("a").items()} == {0: (1, 2), 1: (3, 4)}
    assert resident_bytes(node) == 4 * EXTENT


def rows_waited_for(node: NodeMemory) -> dict[int, int | None]:
    return {number: found.row for number, found in node.extents().items()}


def test_the_populator_knows_which_rows_wait_for_extents(make: MakeNode) -> None:
    node = make()
    node.budget.add_pool("a", PoolLayout(1, (RankLayout(MIB), RankLayout(MIB)), EXTENT))
    node.apply()
    assert rows_waited_for(node) == {1: None, 2: None, 3: None, 4: None}
    node.budget.attach("a", "s", 4)
    node.apply()
    given = node.budget.rows("a")[0].extents
    assert rows_waited_for(node) == {number: 0 if number in given else None for number in (1, 2, 3, 4)}
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


def test_an_extent_of_before_a_restart_is_the_same_memory(make: MakeNode, eventually: Eventually) -> None:
    first = Extent.create(EXTENT)
    os.pwrite(first.fd, b"kv", 0)
    node = make(1)
    node.budget.restore_spare(7, EXTENT, None, None)
    node.restore(7, first, None)
    assert node.apply() == []
    eventually(lambda: node.populator.status().state == "ready")
    assert os.pread(node.extents()[7].fd, 2, 0) == b"kv"


def test_memory_goes_to_another_owner_only_as_fresh_memory(make: MakeNode, eventually: Eventually) -> None:
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
    assert resident_bytes(node) == 2 * EXTENT


def test_memory_that_is_given_up_counts_while_a_process_maps_it_and_is_then_closed(make: MakeNode) -> None:
    node = make(4)
    fds = [Extent.create(EXTENT).fd for _ in range(3)]
    with mmap.mmap(fds[0], EXTENT) as mapped:
        for fd in fds:
            node.give_up(fd)
        node.free_given_up()
        node.apply()
        assert (node.budget.allocated_bytes, len(node.extents())) == (4 * EXTENT, 3)
        assert not node.free_given_up()
        mapped[0] = 1
        assert os.pread(fds[0], 1, 0) == b"\1", "no hole is punched"
    assert node.free_given_up()
    node.apply()
    assert len(node.extents()) == 4


def test_an_extent_that_is_closed_while_a_process_maps_it_still_counts(make: MakeNode) -> None:
    node = make(2)
    add_pool(node, owner=1)
    node.apply()
    node.budget.detach("a", "s")
    first = node.extent(1)
    assert first is not None
    with mmap.mmap(first.fd, EXTENT):  # a process that has said that it has let go
        add_pool(node, "b", owner=2)
        node.apply()
        assert (node.given_up, node.budget.given_up_bytes) == ([first], EXTENT)
    node.free_given_up()
    assert (node.given_up, node.budget.given_up_bytes, first.is_closed) == ([], 0, True)


def test_memory_of_which_the_kernel_does_not_tell_is_closed(make: MakeNode) -> None:
    """A client has sealed its seals."""
    node = make(1)
    sealed = Extent.create(EXTENT)
    fcntl.fcntl(sealed.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
    node.give_up(sealed.fd)
    assert node.free_given_up()
    assert node.given_up == []


def test_an_extent_that_cannot_be_created_is_told_and_made_later(
    make: MakeNode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
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
        assert node.extents() == {}
        for _ in range(3):
            node.retry()
    assert caplog.text.count("an extent is missing") == 1
    node.retry()
    assert node.error is None
    assert sorted(str(row) for row in rows_waited_for(node).values()) == ["0", "0", "1", "1"]


def test_closing_leaves_no_descriptor(make: MakeNode) -> None:
    node = make()
    node.apply()
    node.give_up(Extent.create(EXTENT).fd)
    inodes = {number_of(node, extent) for extent in (1, 2, 3, 4)}
    node.close()
    node.close()
    found = [fd.stat() for fd in Path("/proc/self/fd").iterdir() if fd.exists()]
    assert not inodes & {(one.st_dev, one.st_ino) for one in found}
