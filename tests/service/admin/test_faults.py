"""Faults of a rank as operators see them: the right readiness check turns red, in words and in the metrics, and turns
green when the fault is healed. Engine, ticker, agent and server are real; clock, device and registrar are not."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.doubles.fakes import FakeClock, FakeDevice, FakeRegistrar

from kvstow.config import EngineConfig, PoolConfig
from kvstow.control.engine import OffloadEngine
from kvstow.dataplane import DataPlane
from kvstow.errors import PinError
from kvstow.memory.hostpool import HostPool
from kvstow.messages import Op, StepPlan
from kvstow_service.admin.adminhost import AdminOptions
from kvstow_service.admin.agent import RankAgent
from kvstow_service.admin.embedded import EmbeddedAdmin
from kvstow_service.admin.rendezvous import Rendezvous

# httpcore leaks the socket of a Unix connection that is refused
pytestmark = pytest.mark.filterwarnings(r"ignore:unclosed <socket.socket fd=\d+, family=1, type=1, proto=0>")

SLOT, CAPACITY, CHUNK = 4096, 16, 4
HEALTHY: set[str] = set()


class Rank:
    """A worker on a device under control, and its agent."""

    def __init__(self, rendezvous: Rendezvous, registrar: FakeRegistrar) -> None:
        config = PoolConfig(slot_bytes=SLOT, pool_bytes=CAPACITY * SLOT, chunk_bytes=CHUNK * SLOT, pause=0.0)
        self.device = FakeDevice()
        self.worker = DataPlane(0, HostPool(config, registrar), self.device)
        self.agent = RankAgent(0, self.worker, rendezvous)
        self.agent.start()

    def stop(self) -> None:
        self.agent.stop()
        self.worker.close(0)


class Site:
    """An engine with its admin server, and one rank at a time."""

    def __init__(self, folder: Path, eventually: Any, running: ExitStack) -> None:
        self.clock = FakeClock(100.0)
        self.engine = OffloadEngine(EngineConfig(slot_bytes=SLOT, capacity_slots=CAPACITY), clock=self.clock)
        environ = {"XDG_RUNTIME_DIR": str(folder)}
        self._rendezvous = Rendezvous("faults", environ)
        self._eventually, self._running = eventually, running
        options = AdminOptions(port=0)
        admin = EmbeddedAdmin(
            self.engine, options, identity="faults", mode="vllm", max_capacity_slots=CAPACITY, environ=environ
        )
        running.callback(admin.stop)
        admin.start()
        eventually(lambda: admin.addresses or admin.failure, "the admin server")
        self._client = running.enter_context(httpx.Client(base_url=admin.addresses[0]))

    def start_rank(self, failures: dict[int, Exception] | None = None) -> Rank:
        rank = Rank(self._rendezvous, FakeRegistrar(failures))
        self._running.callback(rank.stop)
        self._eventually(lambda: rank.agent.sent, "a report")  # the first answer would be a new attempt of pinning
        rank.worker.pool.start()
        return rank

    def failing(self) -> set[str]:
        """The checks of /readyz that are red in words; the metrics, read before and after, say the same."""
        before = self._red_in_metrics()
        words = self._client.get("/readyz?verbose").text
        red = set(re.findall(r"^\[-\](\w+) failed: ", words, re.MULTILINE))
        return red if before == red == self._red_in_metrics() else {"words and metrics differ"}

    def is_ready(self) -> bool:
        return self._client.get("/readyz").status_code == 200

    def value(self, sample: str) -> float:
        """Of the sample with this name and these labels, as the exposition writes them."""
        metrics = self._client.get("/metrics").text
        return float(metrics.partition(f"\n{sample} ")[2].partition("\n")[0])

    def wait_for(self, red: set[str]) -> None:
        self._eventually(lambda: self.failing() == red, f"{red or 'none'} and no other check red")

    def begin_store(self, rank: Rank) -> Op:
        op = self.engine.begin_store([b"key"], [0]).op
        assert op is not None
        rank.worker.submit(StepPlan((op,)))
        return op

    def hear(self, rank: Rank) -> None:
        """Take what the rank says of its ops, as its host would."""
        assert rank.worker.wait_completions(10)
        self.engine.complete(0, rank.worker.boot_id, rank.worker.take_completions())

    def _red_in_metrics(self) -> set[str]:
        metrics = self._client.get("/metrics").text
        return set(re.findall(r'^kvstow_health_check\{check="(\w+)",probe="readyz"\} 0\.0$', metrics, re.MULTILINE))


@pytest.fixture
def site(tmp_path: Path, eventually: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with ExitStack() as running:
        yield Site(tmp_path, eventually, running)


def test_a_killed_copy_thread_turns_the_ranks_red_until_the_rank_is_replaced(site: Site) -> None:
    rank = site.start_rank()
    site.wait_for(HEALTHY)
    op = site.begin_store(rank)
    rank.device.ticket(op.op_id).poll_error = SystemExit("killed")
    site.wait_for({"ranks"})
    assert not site.is_ready()
    assert site.value('kvstow_rank_ready{model="",pool="host",rank="0"}') == 0
    site.hear(rank)
    assert site.value('kvstow_transfers_total{direction="store",model="",pool="host",result="error"}') == 1
    assert site.engine.begin_store([b"another"], [1]).outcomes == {"dropped_not_ready": 1}
    rank.stop()
    site.start_rank()
    site.wait_for(HEALTHY)
    assert site.is_ready()
    assert site.value('kvstow_rank_ready{model="",pool="host",rank="0"}') == 1
    assert site.value('kvstow_rank_restarts_total{model="",pool="host"}') == 1


def test_a_stuck_transfer_turns_the_transfers_red_until_it_ends(site: Site) -> None:
    rank = site.start_rank()
    site.wait_for(HEALTHY)
    op = site.begin_store(rank)
    site.clock.advance(site.engine.config.transfer_timeout + 0.1)
    site.wait_for({"transfers"})
    assert not site.is_ready()
    assert site.value('kvstow_transfers_stuck{model="",pool="host"}') == 1
    assert site.value('kvstow_errors_total{code="transfer_stuck",component="engine",model="",pool="host"}') == 1
    assert site.engine.begin_store([b"another"], [1]).outcomes == {"dropped_not_ready": 1}
    rank.device.ticket(op.op_id).finish()
    site.hear(rank)
    site.wait_for(HEALTHY)
    assert site.is_ready()
    assert site.value('kvstow_transfers_stuck{model="",pool="host"}') == 0


def test_a_failed_pin_turns_the_ranks_red_until_another_attempt_succeeds(site: Site) -> None:
    site.start_rank({2: PinError("driver", "no more pages")})
    site.wait_for({"ranks", "pinned"})
    assert not site.is_ready()
    assert site.value('kvstow_pin_failures_total{model="",pool="host",rank="0",reason="driver"}') == 1
    assert site.value('kvstow_pin_progress_ratio{model="",pool="host",rank="0"}') == 0.5
    site.engine.admin.retry_pinning()
    site.wait_for(HEALTHY)
    assert site.is_ready()
    assert site.value('kvstow_pin_failures_total{model="",pool="host",rank="0",reason="driver"}') == 1, "it is a count"
    assert site.value('kvstow_pin_progress_ratio{model="",pool="host",rank="0"}') == 1
