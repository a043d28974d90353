"""The worker's half as a vLLM process hosts it: what is made when, and what an error leaves."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch
from tests.service.connectors.engine_core.processes import make_process

from kvstow.dataplane import DataPlane
from kvstow.errors import ConfigError, InsufficientMemoryError
from kvstow.messages import Op, StepPlan
from kvstow_service.admin.agent import AdminAddress
from kvstow_service.connectors.engine_core import workerhost as shared
from kvstow_service.connectors.engine_core.metadata import KVStowMetadata, RankUpdate
from kvstow_service.connectors.engine_core.options import ConnectorOptions
from kvstow_service.connectors.engine_core.stepplan import PlannedStep
from kvstow_service.connectors.vllm import tensorhost
from kvstow_service.connectors.vllm.tensorhost import EmbeddedWorkerHost

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("rendezvous")]

BLOCKS, PAGE = 4, 4096


@pytest.fixture
def worker() -> Iterator[EmbeddedWorkerHost]:
    """A rank with room for five slots, which pins at its registration and makes vLLM wait for it."""
    options = ConnectorOptions(cpu_bytes_to_use=5 * PAGE, lock=False, pin_pause=0.0, async_register_cache=False)
    host = EmbeddedWorkerHost(options, make_process(), BLOCKS)
    yield host
    host.close()


def kv_caches() -> dict[str, torch.Tensor]:
    return {"layer": torch.zeros(BLOCKS, PAGE, dtype=torch.uint8)}


def load(number: int, boot: str) -> PlannedStep:
    op = Op(number, "load", (1,), (0,), (boot,))
    return PlannedStep(number, StepPlan(), StepPlan((op,)), ("r",), {})


def test_a_registered_rank_introduces_itself_and_is_pinned(worker: EmbeddedWorkerHost) -> None:
    worker.register(kv_caches())
    assert worker.hello is not None
    assert (worker.hello.rank, worker.hello.slot_bytes) == (0, PAGE)
    assert worker.hello.max_slots >= 5
    report = worker.side.report()
    assert (report.state, report.pinned_slots) == ("ready", 5)


@pytest.mark.parametrize("waits", [True, False])
def test_pinning_is_at_ease_while_vllm_starts_and_does_not_wait_for_it(
    monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    started: list[bool] = []
    start = DataPlane.start

    def note(self: DataPlane, *, at_ease: bool = False) -> None:
        started.append(at_ease)
        start(self)

    monkeypatch.setattr(DataPlane, "start", note)
    options = ConnectorOptions(cpu_bytes_to_use=5 * PAGE, lock=False, pin_pause=0.0, async_register_cache=not waits)
    host = EmbeddedWorkerHost(options, make_process(), BLOCKS)
    host.register(kv_caches())
    host.close()
    assert started == [not waits]


def test_the_data_plane_closes_while_the_agent_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server may take seconds to answer it, or to refuse."""
    looking, looked = threading.Event(), threading.Event()
    closed: list[bool] = []

    def look() -> None:
        looking.set()
        deadline = time.monotonic() + 5
        while host.side.report().state != "stopped" and time.monotonic() < deadline:
            time.sleep(0.001)
        closed.append(host.side.report().state == "stopped")
        looked.set()

    monkeypatch.setattr(shared, "Rendezvous", lambda _: look)
    host = EmbeddedWorkerHost(ConnectorOptions(cpu_bytes_to_use=5 * PAGE, lock=False), make_process(), BLOCKS)
    host.register(kv_caches())
    assert looking.wait(10)
    host.close()
    assert looked.wait(10)
    assert closed == [True]


def test_a_machine_without_the_memory_refuses_before_anything_is_taken() -> None:
    with pytest.raises(InsufficientMemoryError, match="cannot fit"):
        EmbeddedWorkerHost(ConnectorOptions(cpu_bytes_to_use=1 << 50), make_process(), BLOCKS)


@pytest.mark.parametrize(("rank", "recomputes", "lines"), [(0, False, 1), (1, False, 0), (0, True, 0)])
def test_a_policy_that_fails_requests_is_warned_of_once(
    own_log: None, caplog: pytest.LogCaptureFixture, rank: int, recomputes: bool, lines: int
) -> None:
    EmbeddedWorkerHost(ConnectorOptions(cpu_bytes_to_use=PAGE), make_process(rank=rank, recomputes=recomputes), BLOCKS)
    assert sum("kv_load_failure_policy" in line for line in caplog.messages) == lines


def test_a_rank_whose_data_plane_cannot_be_made_reports_it_and_fails_its_loads(
    own_log: None, worker: EmbeddedWorkerHost, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no pool today")

    monkeypatch.setattr(tensorhost, "build_plane", fail)
    worker.register(kv_caches())
    report = worker.side.report()
    assert (report.state, report.slot_bytes, report.error) == ("failed", PAGE, "RuntimeError('no pool today')")
    assert "rank 0 has no data plane" in caplog.text
    worker.side.begin_step(load(1, report.boot_id))
    assert worker.side.take_finished_loads().failed == {"r"}


def test_errors_that_the_user_has_to_fix_are_raised(
    worker: EmbeddedWorkerHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise ConfigError("kv_caches", 1, "2")

    monkeypatch.setattr(tensorhost, "kv_geometry", refuse)
    with pytest.raises(ConfigError, match="kv_caches"):
        worker.register(kv_caches())


def test_a_rank_that_sleeps_fails_loads_and_wakes_as_another(worker: EmbeddedWorkerHost) -> None:
    worker.register(kv_caches())
    before = worker.side.plane.boot_id
    worker.suspend()
    asleep = worker.side.report()
    assert (asleep.state, asleep.slot_bytes, asleep.pinned_slots) == ("stopped", PAGE, 0)
    worker.side.begin_step(load(1, before))
    assert worker.side.take_finished_loads().failed == {"r"}
    worker.resume()
    awake = worker.side.report()
    assert (awake.state, awake.pinned_slots) == ("ready", 5)
    assert len({before, asleep.boot_id, awake.boot_id}) == 3


def test_a_rank_sleeps_only_when_its_data_plane_has_ended(
    own_log: None, worker: EmbeddedWorkerHost, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A new boot would tell the engine that no copy of the old one writes any more."""
    worker.register(kv_caches())
    plane, close, seen = worker.side.plane, DataPlane.close, list[str]()

    def hang(self: DataPlane, timeout: float = 5.0) -> bool:
        seen.append(worker.side.plane.boot_id)
        return False

    monkeypatch.setattr(DataPlane, "close", hang)
    worker.suspend()
    worker.resume()
    assert worker.side.plane is plane
    assert "its data plane does not end" in caplog.text
    monkeypatch.setattr(DataPlane, "close", close)
    worker.resume()
    assert worker.side.plane.boot_id != plane.boot_id
    assert seen == [plane.boot_id] * 2


@pytest.mark.parametrize(
    "error", [InsufficientMemoryError("too little memory"), ConfigError("kv_caches", 1, "2"), RuntimeError("no")]
)
def test_a_rank_that_cannot_wake_up_serves_without_offload(
    worker: EmbeddedWorkerHost, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object) -> None:
        raise error

    worker.register(kv_caches())
    worker.suspend()
    monkeypatch.setattr(tensorhost, "kv_geometry", fail)
    worker.resume()
    report = worker.side.report()
    assert (report.state, report.slot_bytes, report.error) == ("failed", PAGE, repr(error))


def test_a_rank_that_was_never_registered_neither_sleeps_nor_wakes(worker: EmbeddedWorkerHost) -> None:
    worker.suspend()
    worker.resume()
    worker.close()
    assert worker.news() == RankUpdate()


def test_the_address_that_comes_with_a_step_reaches_the_agent(
    worker: EmbeddedWorkerHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, offered = AdminAddress("http://node-0:9595", "token"), list[AdminAddress]()
    worker.follow(KVStowMetadata(admin=address))  # there is no agent yet
    worker.register(kv_caches())
    monkeypatch.setattr(worker.agent, "offer", offered.append)
    for metadata in (KVStowMetadata(), KVStowMetadata(admin=address)):
        worker.follow(metadata)
    assert offered == [address]
