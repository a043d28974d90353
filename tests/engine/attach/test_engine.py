"""An attached engine whose service ends the connection."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.engine.attach.fakeservice import FakeService

from kvstow.attach.calls import SettledOp, SettledOps, StoreBegun
from kvstow.attach.engine import AttachedEngine
from kvstow.attach.hello import Welcome
from kvstow.attach.identity import GroupIdentity, NamespaceIdentity, PoolIdentity, RegionIdentity
from kvstow.messages import Completion

POOL = PoolIdentity((64,), (RegionIdentity("layer.0", 64),), "uint8", (GroupIdentity("full", 16, 16),))
NAMESPACE = NamespaceIdentity("model", weights_id="w", weights_source="configured", hash_probe="p")
KEYS = [b"k" * 34]


@pytest.fixture
def service(tmp_path: Path) -> Iterator[FakeService]:
    service = FakeService(tmp_path / "attach.sock")
    yield service
    service.close()


@pytest.fixture
def engine(tmp_path: Path, service: FakeService) -> Iterator[AttachedEngine]:
    engine = AttachedEngine(tmp_path / "attach.sock", engine="test", pool=POOL, namespace=NAMESPACE)
    engine.step()
    service.accept()
    service.send(Welcome(session_id="s1", service="test"))
    engine.step()
    yield engine
    engine.close()


def step(engine: AttachedEngine, service: FakeService) -> None:
    service.hang_up()
    engine.step()


def wait(engine: AttachedEngine, service: FakeService) -> None:
    asked = engine.reset()
    service.hang_up()
    assert engine.wait(asked, seconds=10)


def write(engine: AttachedEngine, service: FakeService) -> None:
    service.hang_up()
    engine.count_lookup(1, 0)


@pytest.mark.parametrize("notices", [step, wait, write])
def test_a_result_counts_that_has_arrived_before_the_end_of_the_session(
    engine: AttachedEngine, service: FakeService, notices: Callable[[AttachedEngine, FakeService], None]
) -> None:
    """The service has stored the blocks and said so, whatever tells the engine first that the connection has ended."""
    asked = engine.begin_store(KEYS, [3])
    service.send(StoreBegun(5, (0,), (7,)), service.receive().request_id)
    engine.step()
    op = asked.value.op
    assert op is not None
    engine.complete(0, "boot", [Completion(op.op_id, "done")])
    assert [settled.mark for settled in engine.take_settled()] == ["source_free"]
    service.receive()
    service.send(SettledOps((SettledOp(5, "store", "done"),)))
    notices(engine, service)
    engine.step()
    assert not engine.is_attached
    assert [(settled.mark, settled.error) for settled in engine.take_settled()] == [("done", None)]
