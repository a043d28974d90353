"""What a host sees of an engine that is attached to a real node, on the CPU, with bytes: also of services that go and
come back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from tests.doubles.fakes import FakeRegistrar
from tests.service.node.conftest import wait_until
from tests.service.node.wholenode import whole_node

from kvstow.attach.calls import Hold
from kvstow.attach.engine import AttachedEngine
from kvstow.attach.identity import GroupIdentity, NamespaceIdentity, PoolIdentity, RegionIdentity
from kvstow.attach.worker import AttachedWorker
from kvstow.dataplane import DataPlane
from kvstow.devices.cpu import CpuDevice
from kvstow.errors import CopyError
from kvstow.layout import KVLayout, Region
from kvstow.memory.mappedpool import MappedPool
from kvstow.messages import Op, StepPlan
from kvstow.results import KeyRun, Lease, Settled, StoreGrant

MIB = 1 << 20
PAGE = 64 << 10
SLOTS = 32
BLOCKS = 96
LAYOUT = KVLayout((Region("layer.0", BLOCKS, PAGE, PAGE),))
POOL = PoolIdentity((PAGE,), (RegionIdentity("layer.0", PAGE),), "uint8", (GroupIdentity("full", 16, 16),))
NAMESPACE = NamespaceIdentity("m", "w", "configured", "p")


def keys_of(numbers: Sequence[int]) -> list[bytes]:
    return [number.to_bytes(32, "big") for number in numbers]


class AttachedHost:
    """An engine, and its rank with a KV cache."""

    def __init__(self, path: Path) -> None:
        self.kv = np.random.default_rng(3).integers(0, 256, (BLOCKS, PAGE), np.uint8)
        self.contents: dict[bytes, bytes] = {}
        self.settled: list[Settled] = []
        self.pool = MappedPool(PAGE, FakeRegistrar())
        self.plane = DataPlane(0, self.pool, CpuDevice(self.pool, LAYOUT, [self.kv]))
        self.engine = AttachedEngine(path, engine="test", pool=POOL, namespace=NAMESPACE)
        self.worker = AttachedWorker(path, self.plane, self.pool, engine="test")
        self.worker.start()
        self.until_usable()

    def until(self, condition: Callable[[], object]) -> None:
        wait_until(condition, self.step)

    def until_usable(self) -> None:
        self.until(lambda: self.engine.is_attached and self.worker.is_attached and self.pool.pinned_slots >= SLOTS)
        self.until(lambda: self.begin_store([], []).outcomes == {} and self.engine.store_room() >= SLOTS)

    def step(self) -> None:
        self.engine.complete(0, self.plane.boot_id, self.worker.take_completions())
        self.engine.step()
        self.worker.join(self.engine.ticket)
        self.settled += self.engine.take_settled()

    def find(self, numbers: Sequence[int]) -> tuple[Lease, list[KeyRun]]:
        answer = self.engine.find(keys_of(numbers), hold=Hold.PRESENT)
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

    def run(self, op: Op) -> Settled:
        """The final result of an op."""
        self.worker.submit(StepPlan((op,)))
        found: list[Settled] = []

        def ended() -> bool:
            found.extend(one for one in self.settled if one.op_id == op.op_id and one.mark != "source_free")
            return bool(found)

        self.until(ended)
        return found[0]

    def store(self, numbers: Sequence[int]) -> None:
        """Compute blocks for these keys, and store them."""
        keys = keys_of(numbers)
        for number, key in zip(numbers, keys, strict=True):
            self.kv[number] = np.frombuffer(np.random.default_rng(number).bytes(PAGE), np.uint8)
            self.contents[key] = self.kv[number].tobytes()
        grant = self.begin_store(keys, numbers)
        assert grant.op is not None
        assert self.run(grant.op).mark == "done"

    def check(self, numbers: Sequence[int]) -> None:
        """These keys are found, and their bytes are right."""
        lease, runs = self.find(numbers)
        assert runs == [(0, len(numbers))]
        self.kv[:] = 0
        op = self.begin_load(lease, range(len(numbers)))
        assert op is not None
        assert self.run(op).mark == "done"
        assert [self.kv[block].tobytes() for block in range(len(numbers))] == [
            self.contents[key] for key in keys_of(numbers)
        ]

    def close(self) -> None:
        self.worker.close()
        self.engine.close()


class Nodes:
    """Services at one socket, one after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.start()
        self.path = self.node.settings.attach_path

    def start(self) -> None:
        self.node = whole_node(self.folder, extents=2)
        self.node.start()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path)
    yield made
    made.node.close()


@pytest.fixture
def host(nodes: Nodes, stack: ExitStack) -> AttachedHost:
    made = AttachedHost(nodes.path)
    stack.callback(made.close)
    return made


def test_what_was_stored_is_found_wherever_it_is_and_loaded(host: AttachedHost) -> None:
    host.store([2, 3, 4])
    host.store([6])
    lease, runs = host.find(range(8))
    assert runs == [(2, 3), (6, 1)]
    assert lease.num_keys == 4
    op = host.begin_load(lease, [90, 91], first=2)
    assert op is not None
    assert (op.direction, op.blocks) == ("load", (90, 91))
    assert host.run(op).mark == "done"
    assert [host.kv[block].tobytes() for block in (90, 91)] == [host.contents[key] for key in keys_of([4, 6])]
    assert host.begin_load(lease, [90]) is None, "a load uses the lease"


def test_what_failed_to_load_is_not_found_again(host: AttachedHost, monkeypatch: pytest.MonkeyPatch) -> None:
    host.store([1, 2, 3])
    lease, _ = host.find([1, 2])
    op = host.begin_load(lease, [8, 9])
    assert op is not None
    with monkeypatch.context() as patch:
        patch.setattr(CpuDevice, "_move", lambda *_: (_ for _ in ()).throw(CopyError("injected")))
        settled = host.run(op)
    assert settled.mark == "failed"
    assert "injected" in str(settled.error)
    assert host.find([1, 2, 3])[1] == [(2, 1)]


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


def test_an_engine_that_lost_its_session_finds_its_blocks_in_the_next(nodes: Nodes, host: AttachedHost) -> None:
    host.store(range(10))
    sessions = host.engine.num_sessions
    nodes.node.detach(nodes.node.host.sessions()[0].id)
    host.until(lambda: host.engine.num_sessions > sessions and host.engine.is_attached)
    host.until_usable()
    host.check(range(10))
    host.until(lambda: len(nodes.node.host.sessions()) == 1)


def test_an_engine_goes_on_with_another_service_that_has_nothing(nodes: Nodes, host: AttachedHost) -> None:
    host.store(range(10))
    lease, _ = host.find(range(10))
    load = host.begin_load(lease, range(10))
    assert load is not None
    nodes.node.detach(nodes.node.host.sessions()[0].id)
    host.until(lambda: not host.engine.is_attached)
    host.kv[:] = 0
    assert host.run(load).mark == "done", "its bytes and slots are fixed"
    assert [host.kv[block].tobytes() for block in range(10)] == [host.contents[key] for key in keys_of(range(10))]
    nodes.node.close()
    host.until(lambda: not host.engine.is_attached)
    assert host.find(range(10)) == (Lease(0), [])
    nodes.start()
    host.until_usable()
    assert host.find(range(10)) == (Lease(0), [])
    host.store(range(20, 30))
    host.check(range(20, 30))


def test_an_engine_that_was_reset_does_not_come_back_to_its_old_blocks(nodes: Nodes, host: AttachedHost) -> None:
    host.store(range(5))
    answer = host.engine.reset()
    host.until(lambda: answer.done)
    assert host.find(range(5))[1] == []
    nodes.node.detach(nodes.node.host.sessions()[0].id)
    host.until(lambda: host.engine.num_sessions == 2 and host.engine.is_attached)
    host.until_usable()
    assert host.find(range(5))[1] == []
