"""The two halves as vLLM's processes host them: what is built when, and what stays up when something cannot be."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.service.connectors.vllm.blockpool import FakeBlockPool
from tests.service.connectors.vllm.processes import make_process

from kvstow.dataplane import DataPlane
from kvstow.errors import ConfigError, InsufficientMemoryError
from kvstow.messages import Completion, DesiredState, Op, StepPlan
from kvstow.testing.fakes import FakeClock
from kvstow.testing.rank import FakeRank
from kvstow_service.adminoptions import AdminOptions
from kvstow_service.connectors.vllm import hosting, kvgeometry, rankdataplane
from kvstow_service.connectors.vllm.hosting import SchedulerHost, WorkerHost
from kvstow_service.connectors.vllm.kvgroups import KVGroup, KVGroups
from kvstow_service.connectors.vllm.metadata import RankHello, RankNews
from kvstow_service.connectors.vllm.options import ConnectorOptions
from kvstow_service.connectors.vllm.stepplan import PlannedStep
from kvstow_service.connectors.vllm.vllmprocess import this_node
from kvstow_service.connectors.vllm.workerside import NoDataPlane

pytestmark = pytest.mark.vllm

BLOCKS, PAGE = 4, 4096
GROUPS = KVGroups((KVGroup(0, 16, 1),), 16)


def make_hello(
    rank: int, slot_bytes: int, max_slots: int, node: str | None = None, node_bytes: int = 1 << 40
) -> RankHello:
    return RankHello(rank, slot_bytes, max_slots, node or this_node(), node_bytes)


class FakeAdmin:
    """Serves nothing."""

    address_for_remote_ranks = "an address"
    made: list[FakeAdmin]

    def __init__(self, engine: Any, options: AdminOptions, **facts: Any) -> None:
        self.options, self.facts = options, facts
        self.calls: list[str] = []
        self.made.append(self)

    def start(self) -> None:
        self.calls.append("start")

    def stop(self) -> None:
        self.calls.append("stop")


@pytest.fixture
def admins(monkeypatch: pytest.MonkeyPatch) -> list[FakeAdmin]:
    monkeypatch.setattr(FakeAdmin, "made", [], raising=False)
    monkeypatch.setattr(hosting, "EmbeddedAdmin", FakeAdmin)
    return FakeAdmin.made


def scheduler_host(options: ConnectorOptions | None = None, **facts: Any) -> SchedulerHost:
    options = options or ConnectorOptions(cpu_bytes_to_use=1000)
    return SchedulerHost(options, make_process(**facts), GROUPS, build={"vllm": "1"}, make_events=lambda _: None)


# -- the scheduler's half -------------------------------------------------------------------------------------


@pytest.mark.parametrize("pool_first", [True, False])
def test_the_engine_is_made_when_every_rank_and_the_pool_are_known(admins: list[FakeAdmin], pool_first: bool) -> None:
    host = scheduler_host(num_ranks=2)
    if pool_first:
        host.bind(FakeBlockPool(8))
    for rank in (1, 1):
        host.greet(make_hello(rank, 50, 7))
    assert host.side is None
    host.greet(make_hello(0, 100, 9))
    if not pool_first:
        assert host.side is None
        host.bind(FakeBlockPool(8))
    assert host.engine is not None
    config = host.engine.config
    assert (config.capacity_slots, config.rank_slot_bytes, config.block_tokens) == (6, (100, 50), 16)
    (admin,) = admins
    assert admin.calls == ["start"]
    assert (admin.facts["identity"], admin.facts["max_capacity_slots"]) == ("hosting", 7)
    assert admin.facts["settings"]["cpu_bytes_to_use"] == 1000


def test_an_engine_is_made_once(admins: list[FakeAdmin]) -> None:
    host = scheduler_host()
    host.bind(FakeBlockPool(8))
    host.greet(make_hello(0, 100, 9))
    engine = host.engine
    host.greet(make_hello(0, 10, 9))
    host.bind(FakeBlockPool(8))
    assert host.engine is engine
    assert len(admins) == 1


def test_a_resize_may_go_as_far_as_each_node_has_room_for_the_slots_of_its_ranks(admins: list[FakeAdmin]) -> None:
    host = scheduler_host(num_ranks=3)
    host.bind(FakeBlockPool(8))
    host.greet(make_hello(0, 30, 1000, "small", 2050))
    host.greet(make_hello(1, 20, 1000, "small", 2000))
    host.greet(make_hello(2, 50, 1000, "large", 10_000))
    assert admins[0].facts["max_capacity_slots"] == 40


@pytest.mark.parametrize(("port", "wanted"), [(9000, 9003), (0, 0)])
def test_each_data_parallel_engine_looks_for_a_port_of_its_own(admins: list[FakeAdmin], port: int, wanted: int) -> None:
    host = scheduler_host(ConnectorOptions(admin_port=port), data_parallel_index=3)
    host.bind(FakeBlockPool(8))
    host.greet(make_hello(0, 100, 9))
    assert admins[0].options.port == wanted


def test_an_admin_server_open_to_other_machines_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match=r"extra_config: admin_host 0\.0\.0\.0 is reachable from other machines"):
        scheduler_host(ConnectorOptions(admin_host="0.0.0.0"))


def test_less_than_a_block_is_refused_when_its_size_is_known() -> None:
    host = scheduler_host()
    host.bind(FakeBlockPool(8))
    with pytest.raises(ConfigError, match="at least one block, 1001 bytes"):
        host.greet(make_hello(0, 1001, 9))


@pytest.mark.parametrize(("node", "address"), [(None, None), ("another", "an address")])
def test_only_ranks_of_other_nodes_are_sent_an_address(
    admins: list[FakeAdmin], node: str | None, address: str | None
) -> None:
    host = scheduler_host(num_ranks=2)
    assert host.address_for_remote_ranks is None
    host.bind(FakeBlockPool(8))
    for rank in range(2):
        host.greet(make_hello(rank, 100, 9, node if rank else None))
    assert host.address_for_remote_ranks == address
    assert bool(admins[0].facts["node_host"]) == bool(address)


@pytest.mark.usefixtures("admins")
@pytest.mark.parametrize(("lazy", "blocks"), [(False, None), (True, 2 * (63 + 32))])
def test_lazy_stores_are_two_steps_ahead_of_eviction(
    monkeypatch: pytest.MonkeyPatch, lazy: bool, blocks: int | None
) -> None:
    """1,000 tokens a step are at most 63 blocks of 16 and 32 of 32."""
    made: list[int | None] = []
    monkeypatch.setattr(hosting, "SchedulerSide", lambda *_, lazy_blocks, **__: made.append(lazy_blocks))
    groups = KVGroups((KVGroup(0, 16, 1), KVGroup(1, 32, 2)), 32)
    options = ConnectorOptions(cpu_bytes_to_use=1000, lazy_offload=lazy)
    host = SchedulerHost(options, make_process(max_batched_tokens=1000), groups, build={}, make_events=lambda _: None)
    host.bind(FakeBlockPool(8))
    host.greet(make_hello(0, 100, 9))
    assert made == [blocks]


@pytest.mark.usefixtures("admins")
def test_what_a_rank_says_reaches_the_engine() -> None:
    host = scheduler_host()
    host.bind(FakeBlockPool(8))
    early = Completion(1, "done")
    host.hear(0, RankNews((("boot", (early,)),)))  # nobody to hear it yet
    host.hear(0, RankNews(hello=make_hello(0, 100, 9)))
    assert host.engine is not None
    rank = FakeRank(host.engine)
    rank.pin(10)
    op = host.engine.begin_store([b"key"], [1]).op
    assert op is not None
    host.hear(0, RankNews(((rank.boot_id, (Completion(op.op_id, "done"),)),)))
    assert host.engine.lookup([b"key"]) == 1


@pytest.mark.usefixtures("admins")
def test_a_report_that_comes_with_a_step_counts_and_a_wrong_one_is_counted() -> None:
    host = scheduler_host()
    host.bind(FakeBlockPool(8))
    host.greet(make_hello(0, 100, 9))
    assert host.engine is not None
    rank = NoDataPlane(0, 100, "cuda", "no device")
    host.hear(0, RankNews(report=rank.report()))
    assert host.engine.boot_ids() == (rank.boot_id,)
    host.hear(0, RankNews(report=NoDataPlane(7, 100, None, None).report()))
    assert host.engine.stats().errors["rank_report"] == 1
    assert host.engine.boot_ids() == (rank.boot_id,)


@pytest.mark.usefixtures("admins")
def test_a_host_that_cannot_be_built_in_a_step_leaves_vllm_without_offload(caplog: pytest.LogCaptureFixture) -> None:
    """The handshake reaches only one of several connectors; then the news of a step bring what a rank is."""
    host = scheduler_host()
    host.bind(FakeBlockPool(8))
    for _ in range(3):
        host.hear(0, RankNews(hello=make_hello(0, 1001, 9)))
    assert host.side is None
    assert [record.message for record in caplog.records if "serves without offload" in record.message] == [
        "news of rank 0: KVStow has failed; vLLM serves without offload until it restarts"
    ]


@pytest.mark.usefixtures("admins")
@pytest.mark.parametrize("method", ["report", "complete"])
def test_what_goes_wrong_with_news_of_a_step_closes_the_gate(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    host = scheduler_host()
    host.bind(FakeBlockPool(8))
    host.greet(make_hello(0, 100, 9))
    assert host.engine is not None
    rank = FakeRank(host.engine)
    rank.pin(10)
    assert host.engine.store_room() == 10

    def fail(*_: Any) -> None:
        raise MemoryError("injected")

    monkeypatch.setattr(host.engine, method, fail)
    report = NoDataPlane(0, 100, None, None).report()
    for _ in range(2):
        host.hear(0, RankNews(((rank.boot_id, (Completion(1, "done"),)),), report=report))
    assert host.engine.store_room() == 0
    assert host.engine.stats().errors["host"] == 2
    readiness = host.engine.readiness()
    assert (readiness.state, readiness.reason) == (
        "degraded",
        "the host has failed: news of rank 0: MemoryError('injected')",
    )


def test_closing_stops_what_there_is(admins: list[FakeAdmin]) -> None:
    host = scheduler_host()
    host.close()
    host.bind(FakeBlockPool(8))
    host.greet(make_hello(0, 100, 9))
    host.close()
    host.close()
    assert host.engine is not None
    assert host.engine.readiness().state == "stopped"
    assert set(admins[0].calls) == {"start", "stop"}


# -- a worker's half ------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def rendezvous(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents look for their server where there is none."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.fixture
def worker() -> Iterator[WorkerHost]:
    """A rank with room for five slots, which pins when it is told to and makes vLLM wait for it."""
    options = ConnectorOptions(cpu_bytes_to_use=5 * PAGE, lock=False, pin_pause=0.0, async_register_cache=False)
    host = WorkerHost(options, make_process(), BLOCKS)
    yield host
    host.close()


def kv_caches() -> dict[str, torch.Tensor]:
    return {"layer": torch.zeros(BLOCKS, PAGE, dtype=torch.uint8)}


def load(number: int, boot: str) -> PlannedStep:
    op = Op(number, "load", (1,), (0,))
    return PlannedStep(number, (boot,), StepPlan(), StepPlan((op,)), ("r",), {})


def test_a_registered_rank_says_what_it_is_and_is_pinned(worker: WorkerHost) -> None:
    worker.register(kv_caches())
    assert worker.side is not None
    assert worker.hello is not None
    assert (worker.hello.rank, worker.hello.slot_bytes) == (0, PAGE)
    assert worker.hello.max_slots >= 5
    report = worker.side.plane.report()
    assert (report.state, report.pinned_slots) == ("ready", 5)


def test_ranks_of_unlike_slots_all_reach_the_capacity(admins: list[FakeAdmin]) -> None:
    """10 pages over slots of 3 and 2: two slots on each rank, although half of 10 pages is one slot of 3."""
    options = ConnectorOptions(
        cpu_bytes_to_use=10 * PAGE, max_bytes=10 * PAGE, lock=False, pin_pause=0.0, async_register_cache=False
    )
    host, workers = (
        scheduler_host(options, num_ranks=2),
        [WorkerHost(options, make_process(rank=rank, num_ranks=2), BLOCKS) for rank in (0, 1)],
    )
    try:
        for worker, pages in zip(workers, (3, 2), strict=True):
            worker.register({"layer": torch.zeros(BLOCKS, pages * PAGE, dtype=torch.uint8)})
            assert worker.hello is not None
            host.greet(worker.hello)
        host.bind(FakeBlockPool(8))
        assert host.engine is not None
        assert host.engine.config.capacity_slots == admins[0].facts["max_capacity_slots"] == 2
        for rank, worker in enumerate(workers):
            assert worker.side is not None
            worker.follow({rank: host.engine.report(worker.side.plane.report())})
            rankdataplane.wait_until_pinned(worker.side.plane.pool)  # type: ignore[attr-defined]
            host.engine.report(worker.side.plane.report())
        assert (host.engine.readiness().state, host.engine.stats().usable_slots) == ("ready", 2)
    finally:
        for worker in workers:
            worker.close()


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
    host = WorkerHost(options, make_process(), BLOCKS)
    host.register(kv_caches())
    host.close()
    assert started == [not waits]


def test_the_data_plane_closes_while_the_agent_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server may take seconds to answer it, or to refuse."""
    looking, looked = threading.Event(), threading.Event()
    closed: list[bool] = []

    def look() -> None:
        looking.set()
        assert host.side is not None
        deadline = time.monotonic() + 5
        while host.side.plane.report().state != "stopped" and time.monotonic() < deadline:
            time.sleep(0.001)
        closed.append(host.side.plane.report().state == "stopped")
        looked.set()

    monkeypatch.setattr(hosting, "Rendezvous", lambda _: look)
    host = WorkerHost(ConnectorOptions(cpu_bytes_to_use=5 * PAGE, lock=False), make_process(), BLOCKS)
    host.register(kv_caches())
    assert looking.wait(10)
    host.close()
    assert looked.wait(10)
    assert closed == [True]


def test_a_machine_without_the_memory_refuses_before_anything_is_taken() -> None:
    with pytest.raises(InsufficientMemoryError, match="cannot fit"):
        WorkerHost(ConnectorOptions(cpu_bytes_to_use=1 << 50), make_process(), BLOCKS)


@pytest.mark.parametrize(("rank", "recomputes", "lines"), [(0, False, 1), (1, False, 0), (0, True, 0)])
def test_a_policy_that_fails_requests_is_warned_of_once(
    own_log: None, caplog: pytest.LogCaptureFixture, rank: int, recomputes: bool, lines: int
) -> None:
    WorkerHost(ConnectorOptions(cpu_bytes_to_use=PAGE), make_process(rank=rank, recomputes=recomputes), BLOCKS)
    assert sum("kv_load_failure_policy" in line for line in caplog.messages) == lines


def test_a_rank_whose_data_plane_cannot_be_made_reports_it_and_fails_its_loads(
    own_log: None, worker: WorkerHost, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no pool today")

    monkeypatch.setattr(rankdataplane, "build_plane", fail)
    worker.register(kv_caches())
    assert worker.side is not None
    report = worker.side.plane.report()
    assert (report.state, report.slot_bytes, report.error) == ("failed", PAGE, "RuntimeError('no pool today')")
    assert "rank 0 has no data plane" in caplog.text
    worker.side.begin_step(load(1, report.boot_id))
    assert worker.side.take_finished_loads().failed == {"r"}


def test_what_the_user_has_to_change_is_raised(worker: WorkerHost, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ConfigError("kv_caches", 1, "2")

    monkeypatch.setattr(kvgeometry, "kv_geometry", refuse)
    with pytest.raises(ConfigError, match="kv_caches"):
        worker.register(kv_caches())


def test_a_rank_that_sleeps_fails_loads_and_wakes_as_another(worker: WorkerHost) -> None:
    worker.register(kv_caches())
    assert worker.side is not None
    before = worker.side.plane.boot_id
    worker.suspend()
    asleep = worker.side.plane.report()
    assert (asleep.state, asleep.slot_bytes, asleep.pinned_slots) == ("stopped", PAGE, 0)
    worker.side.begin_step(load(1, before))
    assert worker.side.take_finished_loads().failed == {"r"}
    worker.resume()
    awake = worker.side.plane.report()
    assert (awake.state, awake.pinned_slots) == ("ready", 5)
    assert len({before, asleep.boot_id, awake.boot_id}) == 3
    assert asleep.sender == awake.sender
    assert asleep.number < awake.number


def test_a_rank_sleeps_only_when_its_data_plane_has_ended(
    own_log: None, worker: WorkerHost, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another boot would tell the engine that no copy of this one writes any more."""
    worker.register(kv_caches())
    assert worker.side is not None
    plane, close, seen = worker.side.plane, DataPlane.close, list[str]()

    def hang(self: DataPlane, timeout: float = 5.0) -> bool:
        assert worker.side is not None
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


def test_a_rank_that_wakes_pins_what_is_wanted_by_then(worker: WorkerHost) -> None:
    worker.register(kv_caches())
    assert worker.side is not None
    worker.follow({0: DesiredState("engine", 5, number=1)})
    worker.suspend()
    worker.follow({0: DesiredState("engine", 3, number=2)})
    worker.resume()
    report = worker.side.plane.report()
    assert (report.applied, report.target_slots, report.pinned_slots) == (2, 3, 3)


@pytest.mark.parametrize(
    "error", [InsufficientMemoryError("somebody took it"), ConfigError("kv_caches", 1, "2"), RuntimeError("no")]
)
def test_a_rank_that_cannot_wake_up_serves_without_offload(
    worker: WorkerHost, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object) -> None:
        raise error

    worker.register(kv_caches())
    worker.suspend()
    monkeypatch.setattr(kvgeometry, "kv_geometry", fail)
    worker.resume()
    assert worker.side is not None
    report = worker.side.plane.report()
    assert (report.state, report.slot_bytes, report.error) == ("failed", PAGE, repr(error))


def test_a_rank_that_was_never_registered_neither_sleeps_nor_wakes(worker: WorkerHost) -> None:
    worker.suspend()
    worker.resume()
    worker.close()
    assert worker.side is None
    assert worker.report_without_agent() is None


def test_a_rank_reports_with_its_steps_while_its_agent_finds_no_server(
    worker: WorkerHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.register(kv_caches())
    assert worker.agent is not None
    worker.agent.stop()
    clock = FakeClock(100.0)
    monkeypatch.setattr(hosting, "time", SimpleNamespace(monotonic=clock))
    for _ in range(2):
        clock.advance(1.6)
        report = worker.report_without_agent()
        assert report is not None
        assert report.pinned_slots == 5
        assert worker.report_without_agent() is None
    monkeypatch.setattr(worker, "agent", SimpleNamespace(stats=SimpleNamespace(sent=1), stop=worker.agent.stop))
    clock.advance(1.6)
    assert worker.report_without_agent() is None
    clock.advance(1.6)
    assert worker.report_without_agent() is not None


def test_a_rank_whose_agent_finds_no_server_is_resized_with_the_steps(
    admins: list[FakeAdmin], worker: WorkerHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock(100.0)
    monkeypatch.setattr(hosting, "time", SimpleNamespace(monotonic=clock))
    worker.register(kv_caches())
    assert worker.agent is not None
    assert worker.side is not None
    worker.agent.stop()
    host = scheduler_host(ConnectorOptions(cpu_bytes_to_use=5 * PAGE))
    host.bind(FakeBlockPool(8))
    host.greet(make_hello(0, PAGE, 5))
    assert host.engine is not None

    def step() -> None:
        clock.advance(1.6)
        host.hear(0, RankNews(report=worker.report_without_agent()))
        worker.follow(host.take_desired())

    step()
    assert host.engine.stats().usable_slots == 5
    nothing = host.take_desired()
    host.engine.admin.resize(3).run()
    step()
    said = worker.side.plane.report()
    assert (said.target_slots, said.pinned_slots, said.applied) == (3, 3, 2)
    assert nothing == {}, "what was handed over belongs to its step"


def test_a_rank_follows_what_is_wanted_of_itself_and_lets_no_failure_into_a_step(
    own_log: None, worker: WorkerHost, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker.follow({0: DesiredState("engine", 1, number=1)})
    worker.register(kv_caches())
    assert worker.side is not None
    worker.follow({1: DesiredState("engine", 1, number=1)})
    assert worker.side.plane.report().target_slots == 5

    def fail(self: DataPlane, desired: DesiredState) -> None:
        raise RuntimeError("no such pool")

    monkeypatch.setattr(DataPlane, "apply", fail)
    worker.follow({0: DesiredState("engine", 1, number=1)})
    assert "rank 0: what is wanted of it cannot be done" in caplog.text
