"""What a host sees of an embedded engine and of one that is attached to a real node: the same, on the CPU, with bytes.

Then what only attached engines live through: services that go and come back.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from tests.doubles.fakes import FakeRegistrar

from kvstow.attach.calls import Hold
from kvstow.attach.engine import AttachedEngine
from kvstow.attach.identity import GroupIdentity, NamespaceIdentity, PoolIdentity, RegionIdentity
from kvstow.attach.worker import AttachedWorker
from kvstow.config import EngineConfig, PoolConfig
from kvstow.control.engine import OffloadEngine
from kvstow.dataplane import DataPlane
from kvstow.devices.cpu import CpuDevice
from kvstow.errors import CopyError, LeaseError
from kvstow.layout import KVLayout, Region
from kvstow.memory.hostpool import HostPool
from kvstow.memory.limits import MemoryLimits
from kvstow.memory.mappedpool import MappedPool
from kvstow.messages import Op, StepPlan
from kvstow.results import KeyRun, Lease, Settled, StoreGrant
from kvstow_service.node.node import Node
from kvstow_service.node.settings import Settings

MIB = 1 << 20
PAGE = 64 << 10
SLOTS = 32
BLOCKS = 96
PATIENCE = 60.0
LAYOUT = KVLayout((Region("layer.0", BLOCKS, PAGE, PAGE),))
POOL = PoolIdentity((PAGE,), (RegionIdentity("layer.0", PAGE),), "uint8", (GroupIdentity("full", 16, 16),))
NAMESPACE = NamespaceIdentity("m", "w", "configured", "p")


def keys_of(numbers: Sequence[int]) -> list[bytes]:
    return [number.to_bytes(32, "big") for number in numbers]


class Host(ABC):
    """A rank with a KV cache, and an engine."""

    plane: DataPlane

    def __init__(self) -> None:
        self.kv = np.random.default_rng(3).integers(0, 256, (BLOCKS, PAGE), np.uint8)
        self.contents: dict[bytes, bytes] = {}
        self.settled: list[Settled] = []

    @abstractmethod
    def step(self) -> None: ...
    @abstractmethod
    def find(self, keys: list[bytes], hold: Hold = Hold.PRESENT) -> tuple[Lease, list[KeyRun]]: ...
    @abstractmethod
    def begin_load(self, lease: Lease, blocks: Sequence[int], first: int = 0) -> Op | None: ...
    @abstractmethod
    def begin_store(self, keys: list[bytes], blocks: Sequence[int]) -> StoreGrant: ...
    @abstractmethod
    def release(self, lease: Lease) -> None: ...
    @abstractmethod
    def use(self, keys: list[bytes]) -> None: ...
    @abstractmethod
    def submit(self, op: Op) -> None: ...
    @abstractmethod
    def room(self) -> int: ...
    @abstractmethod
    def close(self) -> None: ...

    def until(self, condition: Callable[[], object]) -> None:
        end = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < end, "the condition did not come true"
            self.step()
            time.sleep(0.001)

    def run(self, op: Op) -> Settled:
        """The final result of an op."""
        self.submit(op)
        found: list[Settled] = []

        def ended() -> bool:
            found.extend(one for one in self.settled if one.op_id == op.op_id and one.mark != "source_free")
            return bool(found)

        self.until(ended)
        return found[0]

    def store(self, numbers: Sequence[int]) -> StoreGrant:
        """Compute blocks for these keys, and store them."""
        keys = keys_of(numbers)
        blocks = [number % BLOCKS for number in numbers]
        for number, key in zip(blocks, keys, strict=True):
            self.kv[number] = np.frombuffer(np.random.default_rng(number).bytes(PAGE), np.uint8)
            self.contents[key] = self.kv[number].tobytes()
        grant = self.begin_store(keys, blocks)
        if grant.op is not None:
            assert self.run(grant.op).mark == "done"
        return grant

    def check(self, numbers: Sequence[int]) -> None:
        """These keys are found, and their bytes are right."""
        keys = keys_of(numbers)
        lease, runs = self.find(keys)
        assert runs == [(0, len(keys))]
        self.kv[:] = 0
        op = self.begin_load(lease, range(len(keys)))
        assert op is not None
        assert self.run(op).mark == "done"
        assert [self.kv[block].tobytes() for block in range(len(keys))] == [self.contents[key] for key in keys]


class EmbeddedHost(Host):
    def __init__(self) -> None:
        super().__init__()
        self.engine = OffloadEngine(EngineConfig(slot_bytes=PAGE, capacity_slots=SLOTS))
        pool = HostPool(PoolConfig(PAGE, SLOTS * PAGE), FakeRegistrar())
        self.plane = DataPlane(0, pool, CpuDevice(pool, LAYOUT, [self.kv]))
        self.plane.start()
        self.until(lambda: self.engine.store_room() == SLOTS)

    def step(self) -> None:
        self.plane.apply(self.engine.report(self.plane.report()))
        self.engine.complete(0, self.plane.boot_id, self.plane.take_completions())
        self.settled += self.engine.take_settled()

    def find(self, keys: list[bytes], hold: Hold = Hold.PRESENT) -> tuple[Lease, list[KeyRun]]:
        if hold == Hold.ALL:
            lease = self.engine.lease(keys)
            return (Lease(0), []) if lease is None else (lease, [KeyRun(0, len(keys))])
        return self.engine.acquire_runs(keys)

    def begin_load(self, lease: Lease, blocks: Sequence[int], first: int = 0) -> Op | None:
        try:
            return self.engine.begin_load(lease, blocks, first=first)
        except LeaseError:
            return None

    def begin_store(self, keys: list[bytes], blocks: Sequence[int]) -> StoreGrant:
        return self.engine.begin_store(keys, blocks)

    def release(self, lease: Lease) -> None:
        self.engine.release_lease(lease)

    def use(self, keys: list[bytes]) -> None:
        self.engine.end_request(self.engine.admit(keys))

    def submit(self, op: Op) -> None:
        self.plane.submit(StepPlan((op,)))

    def room(self) -> int:
        return self.engine.store_room()

    def close(self) -> None:
        self.engine.close()
        self.plane.close()


class AttachedHost(Host):
    def __init__(self, path: Path, *, slots: int = SLOTS) -> None:
        super().__init__()
        self.registrar = FakeRegistrar()
        self.pool = MappedPool(PAGE, self.registrar)
        self.plane = DataPlane(0, self.pool, CpuDevice(self.pool, LAYOUT, [self.kv]))
        self.engine = AttachedEngine(path, engine="test", pool=POOL, namespace=NAMESPACE)
        self.worker = AttachedWorker(path, self.plane, self.pool, engine="test")
        self.worker.start()
        self.until_usable(slots)

    def until_usable(self, slots: int = SLOTS) -> None:
        self.until(lambda: self.engine.is_attached and self.worker.is_attached and self.pool.pinned_slots >= slots)
        self.until(lambda: self.begin_store([], []).outcomes == {} and self.engine.store_room() >= slots)

    def step(self) -> None:
        self.engine.complete(0, self.plane.boot_id, self.worker.take_completions())
        self.engine.step()
        self.worker.join(self.engine.ticket)
        self.settled += self.engine.take_settled()

    def find(self, keys: list[bytes], hold: Hold = Hold.PRESENT) -> tuple[Lease, list[KeyRun]]:
        answer = self.engine.find(keys, hold=hold)
        self.until(lambda: answer.done)
        return answer.value.lease, list(answer.value.runs)

    def begin_load(self, lease: Lease, blocks: Sequence[int], first: int = 0) -> Op | None:
        answer = self.engine.begin_load(lease, blocks, first=first)
        self.until(lambda: answer.done)
        return answer.value

    def begin_store(self, keys: list[bytes], blocks: Sequence[int]) -> StoreGrant:
        answer = self.engine.begin_store(keys, blocks)
        self.until(lambda: answer.done)
        return answer.value

    def release(self, lease: Lease) -> None:
        self.engine.release_lease(lease)

    def use(self, keys: list[bytes]) -> None:
        self.engine.end_request(self.engine.admit(keys))

    def submit(self, op: Op) -> None:
        self.worker.submit(StepPlan((op,)))

    def room(self) -> int:
        self.begin_store([], [])  # its answer has the room
        return self.engine.store_room()

    def close(self) -> None:
        self.worker.close()
        self.engine.close()


class Nodes:
    """Services at one socket, one after the other."""

    def __init__(self, folder: Path, extents: int) -> None:
        (folder / "meminfo").write_text(f"MemAvailable: {1 << 30} kB\n")
        self.limits = MemoryLimits(folder / "meminfo", folder / "cgroup", folder / "fs")
        self.path = folder / "node" / "attach.sock"
        self.settings = Settings(memory=extents * 2 * MIB, attach_socket=self.path, extent_size=2 * MIB, pin_pause=0.0)
        self.node: Node

    def start(self) -> Node:
        self.node = Node(self.settings, limits=self.limits)
        self.node.start()
        return self.node


@pytest.fixture(params=["embedded", "attached"])
def host(request: pytest.FixtureRequest, tmp_path: Path, stack: ExitStack) -> Host:
    made: Host
    if request.param == "embedded":
        made = EmbeddedHost()
    else:
        nodes = Nodes(tmp_path, 1)
        stack.callback(nodes.start().close)
        made = AttachedHost(nodes.path)
    stack.callback(made.close)
    return made


def test_what_was_stored_is_found_wherever_it_is_and_loaded(host: Host) -> None:
    host.store([2, 3, 4])
    host.store([6])
    lease, runs = host.find(keys_of(range(8)))
    assert runs == [(2, 3), (6, 1)]
    assert lease.num_keys == 4
    op = host.begin_load(lease, [90, 91], first=2)
    assert op is not None
    assert (op.direction, op.blocks) == ("load", (90, 91))
    assert host.run(op).mark == "done"
    assert [host.kv[block].tobytes() for block in (90, 91)] == [host.contents[key] for key in keys_of([4, 6])]
    assert host.begin_load(lease, [90]) is None, "a load uses the lease"


def test_a_store_says_what_became_of_each_key(host: Host) -> None:
    host.store([1, 2])
    grant = host.store([1, 3, 3, 2, 4])
    assert grant.accepted == (1, 4)
    assert grant.outcomes == {"skipped_already_cached": 2, "skipped_duplicate": 1}
    again = host.store([1, 2, 3, 4])
    assert (again.op, again.outcomes) == (None, {"skipped_already_cached": 4})
    host.check([1, 2, 3, 4])


def test_leased_blocks_are_not_evicted(host: Host) -> None:
    host.store(range(8))
    lease, _ = host.find(keys_of(range(8)))
    host.store(range(100, 100 + SLOTS))
    host.release(lease)
    host.release(lease)
    host.check(range(8))
    host.store(range(200, 200 + SLOTS))
    assert host.find(keys_of(range(8))) == (Lease(0), [])


def test_a_block_that_was_used_is_evicted_last(host: Host) -> None:
    host.store(range(SLOTS))
    host.use(keys_of([0, 1]))
    host.store([100])
    assert host.find(keys_of([0, 1]))[1] == [(0, 2)]
    assert host.room() == SLOTS - 2, "those that the lease holds cannot be evicted"


def test_all_or_nothing(host: Host) -> None:
    host.store([1, 2])
    assert host.find(keys_of([1, 2, 3]), Hold.ALL) == (Lease(0), [])
    lease, _ = host.find(keys_of([2, 1]), Hold.ALL)
    assert lease.num_keys == 2


def test_what_failed_to_load_is_not_found_again(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.store([1, 2, 3])
    lease, _ = host.find(keys_of([1, 2]))
    op = host.begin_load(lease, [8, 9])
    assert op is not None
    with monkeypatch.context() as patch:
        patch.setattr(CpuDevice, "_move", lambda *_: (_ for _ in ()).throw(CopyError("injected")))
        settled = host.run(op)
    assert settled.mark == "failed"
    assert "injected" in str(settled.error)
    assert host.find(keys_of([1, 2, 3]))[1] == [(2, 1)]


# -- services that go and come back -----------------------------------------------------------------------------


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path, 2)
    made.start()
    yield made
    made.node.close()


def test_a_second_engine_finds_what_the_first_has_stored_also_when_that_is_gone(nodes: Nodes, stack: ExitStack) -> None:
    first = AttachedHost(nodes.path)
    first.store(range(10))
    second = AttachedHost(nodes.path)
    stack.callback(second.close)
    second.contents = first.contents
    second.check(range(10))
    first.close()
    second.check(range(10))
    second.until(lambda: len(nodes.node.host.sessions()) == 1)


def test_an_engine_that_lost_its_session_finds_its_blocks_in_the_next(nodes: Nodes, stack: ExitStack) -> None:
    host = AttachedHost(nodes.path)
    stack.callback(host.close)
    host.store(range(10))
    sessions = host.engine.num_sessions
    nodes.node.detach(nodes.node.host.sessions()[0].id)
    host.until(lambda: host.engine.num_sessions > sessions and host.engine.is_attached)
    host.until_usable()
    host.check(range(10))
    host.until(lambda: len(nodes.node.host.sessions()) == 1)


def test_an_engine_goes_on_with_another_service_that_has_nothing(nodes: Nodes, stack: ExitStack) -> None:
    host = AttachedHost(nodes.path)
    stack.callback(host.close)
    host.store(range(10))
    lease, _ = host.find(keys_of(range(10)))
    load = host.begin_load(lease, range(10))
    assert load is not None
    nodes.node.detach(nodes.node.host.sessions()[0].id)
    host.until(lambda: not host.engine.is_attached)
    host.kv[:] = 0
    assert host.run(load).mark == "done", "its bytes and slots are fixed"
    assert [host.kv[block].tobytes() for block in range(10)] == [host.contents[key] for key in keys_of(range(10))]
    nodes.node.close()
    host.until(lambda: not host.engine.is_attached)
    assert host.find(keys_of(range(10))) == (Lease(0), [])
    nodes.start()
    host.until_usable()
    assert host.find(keys_of(range(10))) == (Lease(0), [])
    host.store(range(20, 30))
    host.check(range(20, 30))


def test_an_engine_that_was_reset_does_not_come_back_to_its_old_blocks(nodes: Nodes, stack: ExitStack) -> None:
    host = AttachedHost(nodes.path)
    stack.callback(host.close)
    host.store(range(5))
    answer = host.engine.reset()
    host.until(lambda: answer.done)
    assert host.find(keys_of(range(5)))[1] == []
    nodes.node.detach(nodes.node.host.sessions()[0].id)
    host.until(lambda: host.engine.num_sessions == 2 and host.engine.is_attached)
    host.until_usable()
    assert host.find(keys_of(range(5)))[1] == []
