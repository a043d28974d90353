from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest
from tests.waiting import eventually

from kvstow.errors import PinError
from kvstow.memfd import open_for_client
from kvstow.memory.budget import Create, MemoryBudget, Recall
from kvstow.memory.extents import Extent, Populator
from kvstow.memory.limits import MemoryLimits
from kvstow.memory.nodememory import NodeMemory
from kvstow.memory.rows import PoolLayout, RankLayout

MIB = 1 << 20
EXTENT = 4 * MIB

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
    found = node.extents.get(extent)
    assert found is not None
    return os.fstat(found.fd).st_dev, os.fstat(found.fd).st_ino


def resident_bytes(node: NodeMemory) -> int:
    there = (*node.extents.values(), *node.given_up.values())
    return sum(os.fstat(extent.fd).st_blocks * 512 for extent in there)


def follow(node: NodeMemory) -> None:
    """Decide until nothing changes, as the memory thread does."""
    node.apply()
    while node.settle():
        node.apply()


def closed_bytes(node: NodeMemory) -> int:
    return sum(extent.num_bytes for extent in node.budget.closed.values())


def test_memory_is_populated_before_there_is_a_pool_and_then_given(make: MakeNode) -> None:
    node = make()
    assert node.apply() == [Create(number, EXTENT, None) for number in (1, 2, 3, 4)]
    eventually(lambda: node.populator.status().state == "ready")
    assert resident_bytes(node) == 4 * EXTENT
    add_pool(node)
    node.apply()
    assert {number: row.extents for number, row in node.budget.pool("a").rows.items()} == {0: (1, 2), 1: (3, 4)}
    assert resident_bytes(node) == 4 * EXTENT


def rows_waited_for(node: NodeMemory) -> dict[int, int | None]:
    return {number: found.row for number, found in node.extents.items()}


def test_the_populator_knows_which_rows_wait_for_extents(make: MakeNode) -> None:
    node = make()
    node.budget.add_pool("a", PoolLayout(1, (RankLayout(MIB), RankLayout(MIB)), EXTENT))
    node.apply()
    assert rows_waited_for(node) == {1: None, 2: None, 3: None, 4: None}
    node.budget.attach("a", "s", 4)
    node.apply()
    given = node.budget.pool("a").rows[0].extents
    assert rows_waited_for(node) == {number: 0 if number in given else None for number in (1, 2, 3, 4)}
    node.budget.record_mapping("client", given[0])
    node.budget.detach("a", "s")
    node.budget.remove_pool("a")
    (recall,) = (step for step in node.apply() if isinstance(step, Recall))
    assert recall.extents == given
    assert set(rows_waited_for(node).values()) == {None}, "nobody waits for a row that was recalled"


def test_an_extent_of_before_a_restart_is_the_same_memory(make: MakeNode) -> None:
    first = Extent.create(EXTENT)
    os.pwrite(first.fd, b"kv", 0)
    node = make(1)
    node.budget.restore_spare(7, EXTENT, None, None)
    node.restore(7, first)
    assert node.apply() == []
    eventually(lambda: node.populator.status().state == "ready")
    assert os.pread(node.extents[7].fd, 2, 0) == b"kv"


def test_memory_goes_to_another_owner_only_as_fresh_memory(make: MakeNode) -> None:
    node = make(2)
    add_pool(node, owner=1)
    node.apply()
    eventually(lambda: node.populator.status().state == "ready")
    before = {number_of(node, extent) for extent in (1, 2)}
    first = node.extents.get(1)
    assert first is not None
    os.pwrite(first.fd, b"secret", 0)
    node.budget.detach("a", "s")
    add_pool(node, "b", owner=2)
    follow(node)
    now = node.budget.pool("b").rows[0].extents
    assert not before & {number_of(node, extent) for extent in now}
    eventually(lambda: node.populator.status().state == "ready")
    for number in now:
        extent = node.extents.get(number)
        assert extent is not None
        assert os.pread(extent.fd, EXTENT, 0) == bytes(EXTENT)
    assert resident_bytes(node) == 2 * EXTENT


def test_memory_that_is_given_up_counts_while_a_process_maps_it_and_is_then_closed(make: MakeNode) -> None:
    node = make(4)
    fds = [Extent.create(EXTENT).fd for _ in range(3)]
    with mmap.mmap(fds[0], EXTENT) as mapped:
        for fd in fds:
            node.give_up(fd)
        node.close_given_up()
        follow(node)
        assert (node.budget.allocated_bytes, closed_bytes(node)) == (4 * EXTENT, EXTENT)
        assert len(node.extents) == 3
        mapped[0] = 1
        assert os.pread(fds[0], 1, 0) == b"\1", "no hole is punched"
    node.close_given_up()
    follow(node)
    assert len(node.extents) == 4


Keeper = Callable[[Extent], AbstractContextManager[object]]
"""What a client keeps although it says that it has let go."""


@contextmanager
def descriptor(extent: Extent) -> Iterator[None]:
    fd = open_for_client(extent.fd)
    yield
    os.close(fd)


@contextmanager
def mapping(extent: Extent) -> Iterator[None]:
    fd = open_for_client(extent.fd)
    with mmap.mmap(fd, EXTENT):
        os.close(fd)
        yield


@contextmanager
def private_mapping(extent: Extent) -> Iterator[None]:
    fd = open_for_client(extent.fd)
    with mmap.mmap(fd, EXTENT, mmap.MAP_PRIVATE, mmap.PROT_READ):
        os.close(fd)
        yield


@contextmanager
def message(extent: Extent) -> Iterator[None]:
    fd = open_for_client(extent.fd)
    near, far = socket.socketpair()
    socket.send_fds(near, [b"x"], [fd])
    os.close(fd)
    yield
    near.close()
    far.close()


@contextmanager
def path_alone(extent: Extent) -> Iterator[None]:
    """A descriptor that can neither read nor write, and keeps the file all the same."""
    fd = os.open(f"/proc/self/fd/{extent.fd}", os.O_PATH)
    yield
    os.close(fd)


@contextmanager
def pinned_page(extent: Extent) -> Iterator[None]:
    """A page in a pipe, and no mapping any more."""
    fd = open_for_client(extent.fd)
    reader, writer = os.pipe()
    with mmap.mmap(fd, EXTENT) as mapped:
        os.close(fd)
        mapped[0] = 1
        vmsplice(mapped, writer)
    yield
    os.close(reader)
    os.close(writer)


def vmsplice(mapped: mmap.mmap, pipe: int) -> None:
    byte = ctypes.c_char.from_buffer(mapped)
    piece = struct.pack("PN", ctypes.addressof(byte), 1)
    assert ctypes.CDLL(None).vmsplice(pipe, piece, 1, 0) == 1


@pytest.mark.parametrize(
    "keeper", [descriptor, mapping, private_mapping, message, path_alone, pinned_page], ids=lambda found: found.__name__
)
def test_memory_goes_to_another_owner_only_when_no_process_has_it(make: MakeNode, keeper: Keeper) -> None:
    node = make(2)
    add_pool(node, owner=1)
    follow(node)
    client, extent = "session/0", node.budget.pool("a").rows[0].extents[0]
    found = node.extents.get(extent)
    assert found is not None
    node.budget.record_mapping(client, extent)
    node.budget.record_mapping("gone/0", extent)
    with keeper(found):
        for one in (client, "gone/0"):
            node.budget.record_unmapping(one, extent)
        node.budget.record_death("gone/0")
        node.budget.detach("a", "s")
        add_pool(node, "b", owner=2)
        follow(node)
        (kept,) = node.budget.closed.values()
        assert (kept.num_bytes, kept.had) == (EXTENT, {client})
        assert sum(one.num_bytes for one in node.extents.values()) == EXTENT, "nothing takes its place"
        assert node.budget.allocated_bytes == 2 * EXTENT
        assert sum(node.budget.pool("b").layout.sizes(node.budget.pool("b").rows[0].num_slots)) <= EXTENT, (
            "the pool gets the rest"
        )
        node.close_given_up()
        assert not node.settle()
    node.close_given_up()
    follow(node)
    assert (node.budget.closed, node.given_up) == ({}, {})
    assert sum(one.num_bytes for one in node.extents.values()) == 2 * EXTENT


def test_memory_that_is_pinned_while_it_is_given_up_is_not_free(make: MakeNode) -> None:
    """A page that is only read can be pinned after the seal, by who has a descriptor still."""
    node = make(1)
    extent = Extent.create(EXTENT)
    os.pwrite(extent.fd, b"x", 0)
    client = open_for_client(extent.fd)
    node.give_up(extent.fd)
    node.close_given_up()
    reader, writer = os.pipe()
    assert os.splice(client, writer, 1, offset_src=0) == 1
    os.close(client)
    node.close_given_up()
    node.settle()
    assert closed_bytes(node) == EXTENT
    os.close(reader)
    os.close(writer)
    node.close_given_up()
    node.settle()
    assert closed_bytes(node) == 0


def test_what_the_keeper_still_has_is_not_free(make: MakeNode) -> None:
    node = make(2)
    add_pool(node, owner=1)
    follow(node)
    kept = [os.dup(extent.fd) for extent in node.extents.values()]
    node.budget.detach("a", "s")
    add_pool(node, "b", owner=2)
    node.apply()
    assert node.budget.pool("b").rows == {}
    for fd in kept:
        os.close(fd)
    assert node.settle()
    node.apply()
    assert len(node.budget.pool("b").rows) == 1


def test_memory_whose_seals_a_client_has_sealed_is_kept_until_those_that_had_it_have_ended(make: MakeNode) -> None:
    node = make(2)
    add_pool(node, owner=1)
    follow(node)
    extent = node.budget.pool("a").rows[0].extents[0]
    found = node.extents.get(extent)
    assert found is not None
    node.budget.record_mapping("session/0", extent)
    fcntl.fcntl(found.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
    node.budget.record_unmapping("session/0", extent)
    node.budget.detach("a", "s")
    node.budget.remove_pool("a")
    add_pool(node, "b", owner=2)
    follow(node)
    assert closed_bytes(node) == EXTENT
    node.budget.record_death("session/0")
    node.close_given_up()
    follow(node)
    assert closed_bytes(node) == 0


def test_pinned_memory_does_not_hold_up_the_rest(make: MakeNode) -> None:
    """The kernel takes its time for each extent that is pinned."""
    node = make(12)
    extents = [Extent.create(EXTENT) for _ in range(8)]
    with ExitStack() as pinned:
        for extent in extents[:6]:
            pinned.enter_context(pinned_page(extent))
        for extent in extents:
            node.give_up(os.dup(extent.fd))
            extent.close()
        for _ in range(3):
            node.close_given_up()
        node.settle()
        assert closed_bytes(node) == 6 * EXTENT
    for _ in range(3):
        node.close_given_up()
    node.settle()
    assert closed_bytes(node) == 0


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
        assert node.extents == {}
        for _ in range(3):
            node.retry()
    assert caplog.text.count("an extent cannot be created") == 1
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
