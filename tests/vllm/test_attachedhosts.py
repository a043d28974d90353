"""The two halves of the connector as an attached engine hosts them, without a service."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from tests.doubles.fakes import FakeClock
from tests.service.connectors.engine_core.blockpool import FakeBlockPool
from tests.service.connectors.engine_core.processes import make_process
from tests.service.connectors.vllm.slowservice import SlowService

from kvstow.attach.hello import RankSession, SessionTicket
from kvstow.attach.identity import UNNAMED_WEIGHTS, GroupIdentity, NamespaceIdentity, PoolIdentity, RegionIdentity
from kvstow.attach.worker import AttachedWorker
from kvstow.config import EngineConfig
from kvstow.errors import ConfigError
from kvstow_service.connectors.engine_core.controlplane import AttachedControl
from kvstow_service.connectors.engine_core.kvevents import AttachedBlocks
from kvstow_service.connectors.engine_core.kvgroups import KVGroup, KVGroups
from kvstow_service.connectors.engine_core.metadata import KVStowMetadata, RankHello, RankUpdate
from kvstow_service.connectors.engine_core.options import ConnectorOptions
from kvstow_service.connectors.engine_core.schedulerhost import EngineSetup
from kvstow_service.connectors.engine_core.schedulerside import SchedulerSide
from kvstow_service.connectors.engine_core.workerside import RankDataPlane
from kvstow_service.connectors.vllm import attachedschedulerhost, engineidentity, tensorhost
from kvstow_service.connectors.vllm.attachedschedulerhost import (
    JOINING_SECONDS,
    LOOKING_SECONDS,
    AttachedSchedulerHost,
)
from kvstow_service.connectors.vllm.tensorhost import AttachedWorkerHost

pytestmark = pytest.mark.vllm

PAGE, BLOCKS = 4096, 8
REGIONS = (RegionIdentity("0", PAGE, "a"),)


class Bench:
    """A scheduler's half whose service answers in the next step."""

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        *,
        regions: tuple[RegionIdentity, ...] = REGIONS,
        nodes: Sequence[str] = ("node",),
    ) -> None:
        """`nodes`: those of the ranks."""
        self.clock = FakeClock()
        config = EngineConfig(slot_bytes=PAGE, capacity_slots=8)
        self.service = SlowService(config, 8, clock=self.clock, delay=lambda: 1)
        self.options: dict[str, Any] = {}

        def connected(*arguments: Any, **options: Any) -> AttachedControl:
            self.options = options
            return self.service.connect(lambda: AttachedControl(*arguments, **options))

        patch.setattr(attachedschedulerhost, "AttachedControl", connected)
        group, namespace = GroupIdentity("full", 16, 16), NamespaceIdentity("model", "v1", "configured", "probe")
        identities = {
            "read_model": lambda *_: SimpleNamespace(fleet_weights=UNNAMED_WEIGHTS),
            "pool_identity": lambda *given, **_: PoolIdentity((PAGE,), given[3][0].regions, "auto", (group,)),
            "namespace_identity": lambda *_: namespace,
        }
        for name, identity in identities.items():
            patch.setattr(engineidentity, name, identity)
        self.has_all_memory: Callable[[], bool]

        def blocks(control: AttachedControl, has_all_memory: Callable[[], bool], clock: FakeClock) -> AttachedBlocks:
            self.has_all_memory = has_all_memory
            return AttachedBlocks(control, has_all_memory, clock)

        patch.setattr(attachedschedulerhost, "AttachedBlocks", blocks)
        vllm_config: Any = SimpleNamespace(kv_events_config=None)
        cache: Any = SimpleNamespace(kv_cache_groups=[], hash_block_size=16)
        options = ConnectorOptions(attach=Path("/none"), cpu_bytes_to_use=0)
        groups = KVGroups((KVGroup(0, 16, 1),), 16)
        self.host = AttachedSchedulerHost(
            EngineSetup(options, make_process(num_ranks=len(nodes)), groups, vllm_config, cache, clock=self.clock)
        )
        self.host.bind(FakeBlockPool(8))
        for rank, node in enumerate(nodes):
            self.host.add_rank(RankHello(rank, PAGE, 0, node, 0, regions))

    def step(self) -> None:
        assert self.host.side is not None
        self.host.side.control.step()

    def join(self, slots: int, number: int = 1) -> None:
        self.host.receive(0, RankUpdate(session=RankSession(number, slots, True)))

    def figures(self) -> dict[str, Any]:
        self.clock.advance(1.0)
        changes = self.host.ask("statistics", lambda _: self.host.stats.take_stats(), None)
        return {} if changes is None else changes.data


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


def test_an_engine_that_has_started_makes_steps_until_its_ranks_have_memory(bench: Bench) -> None:
    assert bench.host.wants_steps
    bench.step()
    assert bench.host.ticket == SessionTicket(1, "secret")
    assert bench.host.wants_steps, "the ranks learn of the session in a step"
    bench.join(0)
    assert bench.host.wants_steps
    bench.join(5)
    assert not bench.host.wants_steps


def test_it_looks_for_a_service_for_a_moment_only(bench: Bench) -> None:
    bench.service.is_up = False
    bench.clock.advance(60.0)  # vLLM's start takes long
    assert bench.host.wants_steps
    bench.step()
    bench.clock.advance(LOOKING_SECONDS)
    assert not bench.host.wants_steps


def test_ranks_that_do_not_join_are_waited_for_so_long(bench: Bench) -> None:
    assert bench.host.wants_steps
    bench.step()
    assert bench.host.wants_steps
    bench.clock.advance(JOINING_SECONDS)
    assert not bench.host.wants_steps


def test_another_session_is_joined_too(bench: Bench) -> None:
    bench.step()
    bench.join(5)
    assert not bench.host.wants_steps
    bench.service.lose()
    bench.step()
    assert bench.host.ticket is not None
    assert bench.host.ticket.number == 2
    assert bench.host.wants_steps
    bench.join(5, number=2)
    assert not bench.host.wants_steps


def test_what_the_engine_asks_the_service_for(bench: Bench) -> None:
    bench.step()
    assert (bench.options["wanted_bytes"], bench.options["require_sharing"]) == (0, False)
    assert bench.options["engine_version"] == f"vllm {vllm.__version__}"


def test_memory_of_a_session_before_does_not_count(bench: Bench) -> None:
    """A lookup in the new session finds nothing until its ranks have memory."""
    bench.step()
    bench.join(8)
    assert bench.has_all_memory()
    bench.service.lose()
    bench.step()
    assert not bench.has_all_memory()
    bench.join(0, number=2)
    assert not bench.has_all_memory()
    bench.join(8, number=2)
    assert bench.has_all_memory()


def test_vllms_metrics_say_whether_there_is_host_memory(bench: Bench) -> None:
    assert bench.figures()["attached"] == 0
    bench.step()
    bench.join(8)
    figures = bench.figures()
    assert figures["attached"] == 1
    assert figures["config_info"]["cpu_num_chunks"] == "8"
    assert figures["attach_state"] == {"state": "attached", "refusal": "", "sharing": "yes"}
    bench.service.is_up = False
    bench.service.lose()
    gone = {"state": "no_service", "refusal": "", "sharing": ""}
    assert bench.figures() == {"attached": 0, "attach_state": gone, "sessions_lost": 1}


def test_vllms_metrics_count_blocks_that_were_lost_before_their_store(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.step()
    bench.join(8)
    bench.figures()
    monkeypatch.setattr(SchedulerSide, "lost_blocks", 3)
    assert bench.figures()["blocks_lost_before_store"] == 3


def test_an_engine_with_a_rank_without_data_plane_does_not_attach(
    monkeypatch: pytest.MonkeyPatch, own_log: None, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(monkeypatch, regions=())
    assert bench.host.side is None
    assert not bench.host.wants_steps
    assert "rank 0 has no data plane" in caplog.text


def test_a_failed_host_has_no_session_and_no_hits(bench: Bench) -> None:
    bench.step()

    def fail(side: SchedulerSide) -> None:
        raise MemoryError("injected")

    bench.host.ask("lookup", fail, None)
    assert bench.host.ticket is None
    assert not bench.host.wants_steps
    bench.step()
    assert bench.service.session is not None
    assert bench.service.session.is_lost


@pytest.fixture
def worker(tmp_path: Path) -> Any:
    options = ConnectorOptions(attach=tmp_path / "none", lock=False)
    host = AttachedWorkerHost(options, make_process(), BLOCKS)
    yield host
    host.close()


def kv_caches() -> dict[str, torch.Tensor]:
    return {"layer": torch.zeros(BLOCKS, PAGE, dtype=torch.uint8)}


def test_a_rank_says_what_its_slots_consist_of(worker: AttachedWorkerHost) -> None:
    worker.register(kv_caches())
    assert worker.hello is not None
    assert (worker.hello.slot_bytes, len(worker.hello.regions)) == (PAGE, 1)
    assert worker.hello.regions[0].page_bytes == PAGE
    assert len(worker.hello.regions[0].layout) == 16


def test_a_rank_tells_of_a_session_at_once_and_of_more_memory_from_time_to_time(
    worker: AttachedWorkerHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock(100.0)
    monkeypatch.setattr(tensorhost, "time", SimpleNamespace(monotonic=clock))
    sessions = iter(RankSession(*each) for each in ((1, 0), (1, 4), (1, 5), (1, 6), (1, 6), (2, 6)))
    worker.register(kv_caches())
    monkeypatch.setattr(AttachedWorker, "session", property(lambda self: next(sessions)))
    told = []
    for seconds in (0.0, 0.0, 0.1, 0.5, 0.5, 0.0):
        clock.advance(seconds)
        told.append(worker.news().session)
    assert told == [RankSession(1, 0), RankSession(1, 4), None, RankSession(1, 6), None, RankSession(2, 6)]


def test_a_rank_that_sleeps_has_no_session_and_joins_the_next_one_when_it_wakes(
    worker: AttachedWorkerHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined: list[tuple[RankDataPlane, SessionTicket | None]] = []
    monkeypatch.setattr(AttachedWorker, "join", lambda plane, ticket: joined.append((plane, ticket)))
    worker.register(kv_caches())
    worker.suspend()
    worker.follow(KVStowMetadata(ticket=SessionTicket(1, "secret")))
    assert worker.news() == RankUpdate()
    assert joined == []
    worker.resume()
    worker.follow(KVStowMetadata(ticket=SessionTicket(2, "secret")))
    assert joined == [(worker.side.plane, SessionTicket(2, "secret"))]


def test_ranks_on_two_nodes_cannot_attach(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="attach"):
        Bench(monkeypatch, nodes=("node-0", "node-1"))


def test_an_identity_that_cannot_be_found_leaves_vllm_alone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, own_log: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever vLLM calls then does not ask for it again."""
    asked: list[int] = []

    def fail(*_: Any) -> NamespaceIdentity:
        asked.append(1)
        raise OSError("no such file")

    monkeypatch.setattr(engineidentity, "namespace_identity", fail)
    host = bench.host
    assert not host.ask("plan", lambda side: side.control.step(), None)
    for _ in range(2):
        host.ask("statistics", lambda _: host.stats.take_stats(), None)
        host.ask("settled", lambda side: side.settle(), None)
        host.ask("stores", lambda side: side.has_pending_stores, otherwise=False)
        assert host.ask("reset", lambda side: side.reset(), otherwise=False)
        host.receive(0, RankUpdate())
        assert host.ticket is None
    assert len(asked) == 1
    assert "no such file" in caplog.text
