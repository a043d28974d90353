"""The scheduler's half as vLLM's process hosts it: what is made when, and what an error leaves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.doubles.rank import FakeRank
from tests.service.connectors.engine_core.blockpool import FakeBlockPool
from tests.service.connectors.engine_core.processes import make_process

from kvstow.control.engine import OffloadEngine
from kvstow.dataplane import DataPlane
from kvstow.errors import ConfigError
from kvstow.messages import Completion
from kvstow_service.admin.adminhost import AdminOptions
from kvstow_service.connectors.engine_core import embeddedschedulerhost, schedulerhost
from kvstow_service.connectors.engine_core.embeddedschedulerhost import EmbeddedSchedulerHost
from kvstow_service.connectors.engine_core.kvgroups import KVGroup, KVGroups
from kvstow_service.connectors.engine_core.metadata import RankHello, RankUpdate
from kvstow_service.connectors.engine_core.options import ConnectorOptions
from kvstow_service.connectors.engine_core.schedulerhost import EXPECTING_SECONDS, EngineSetup
from kvstow_service.connectors.engine_core.schedulerside import SchedulerSide
from kvstow_service.connectors.engine_core.stepplan import BootCompletions
from kvstow_service.connectors.engine_core.vllmprocess import this_node
from kvstow_service.connectors.engine_core.workerside import wait_until_pinned
from kvstow_service.connectors.vllm.tensorhost import EmbeddedWorkerHost

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("rendezvous")]

BLOCKS, PAGE = 4, 4096
GROUPS = KVGroups((KVGroup(0, 16, 1),), 16)


def make_hello(
    rank: int = 0, slot_bytes: int = 100, max_slots: int = 9, node: str | None = None, node_bytes: int = 1 << 40
) -> RankHello:
    return RankHello(rank, slot_bytes, max_slots, node or this_node(), node_bytes)


class FakeAdmin:
    """Serves nothing."""

    address_for_ranks = "an address"
    ranks_failure: str | None = None
    made: list[FakeAdmin]

    def __init__(self, engine: Any, options: AdminOptions, **arguments: Any) -> None:
        self.options, self.arguments = options, arguments
        self.calls: list[str] = []
        self.made.append(self)

    def start(self) -> None:
        self.calls.append("start")

    def stop(self) -> None:
        self.calls.append("stop")


@pytest.fixture(autouse=True)
def admins(monkeypatch: pytest.MonkeyPatch) -> list[FakeAdmin]:
    monkeypatch.setattr(FakeAdmin, "made", [], raising=False)
    monkeypatch.setattr(embeddedschedulerhost, "EmbeddedAdmin", FakeAdmin)
    return FakeAdmin.made


def make_host(
    options: ConnectorOptions | None = None,
    groups: KVGroups = GROUPS,
    *,
    binds: bool = True,
    clock: Callable[[], float] = time.monotonic,
    **process: Any,
) -> EmbeddedSchedulerHost:
    """A host that knows no rank, and vLLM's block pool unless not `binds`."""
    options = options or ConnectorOptions(cpu_bytes_to_use=1000)
    config, cache = SimpleNamespace(kv_events_config=None), SimpleNamespace(kv_cache_groups=[])
    host = EmbeddedSchedulerHost(EngineSetup(options, make_process(**process), groups, config, cache, clock=clock))
    if binds:
        host.bind(FakeBlockPool(8))
    return host


def make_options(**given: Any) -> ConnectorOptions:
    """Of ranks that pin at once, and make vLLM wait for it."""
    return ConnectorOptions(**given, lock=False, pin_pause=0.0, async_register_cache=False)


def engine_of(host: EmbeddedSchedulerHost) -> OffloadEngine:
    assert host.engine is not None
    return host.engine


def test_the_metrics_count_blocks_that_were_lost_before_their_store(
    admins: list[FakeAdmin], monkeypatch: pytest.MonkeyPatch
) -> None:
    host = make_host()
    host.add_rank(make_hello())
    monkeypatch.setattr(SchedulerSide, "lost_blocks", 3)
    changes = host.stats.take_stats()
    assert changes is not None
    assert changes.data["blocks_lost_before_store"] == 3


@pytest.mark.parametrize("pool_first", [True, False])
def test_the_engine_is_made_when_every_rank_and_the_pool_are_known(admins: list[FakeAdmin], pool_first: bool) -> None:
    host = make_host(num_ranks=2, binds=pool_first)
    for rank in (1, 1):
        host.add_rank(make_hello(rank, 50, 7))
    assert host.side is None
    host.add_rank(make_hello())
    if not pool_first:
        assert host.side is None
        host.bind(FakeBlockPool(8))
    config = engine_of(host).config
    assert (config.capacity_slots, config.rank_slot_bytes, config.block_tokens) == (6, (100, 50), 16)
    (admin,) = admins
    assert admin.calls == ["start"]
    assert (admin.arguments["identity"], admin.arguments["max_capacity_slots"]) == ("engine", 7)
    assert admin.arguments["settings"]["cpu_bytes_to_use"] == 1000


def test_an_engine_is_made_once(admins: list[FakeAdmin]) -> None:
    host = make_host()
    host.add_rank(make_hello())
    engine = engine_of(host)
    host.add_rank(make_hello(0, 10, 9))
    host.bind(FakeBlockPool(8))
    assert engine_of(host) is engine
    assert len(admins) == 1


def test_a_resize_is_limited_by_the_room_on_each_node(admins: list[FakeAdmin]) -> None:
    host = make_host(num_ranks=3)
    host.add_rank(make_hello(0, 30, 1000, "small", 2050))
    host.add_rank(make_hello(1, 20, 1000, "small", 2000))
    host.add_rank(make_hello(2, 50, 1000, "large", 10_000))
    assert admins[0].arguments["max_capacity_slots"] == 40


@pytest.mark.parametrize(("port", "wanted"), [(9000, 9003), (0, 0)])
def test_each_data_parallel_engine_looks_for_a_port_of_its_own(admins: list[FakeAdmin], port: int, wanted: int) -> None:
    host = make_host(ConnectorOptions(admin_port=port), data_parallel_index=3)
    host.add_rank(make_hello())
    assert admins[0].options.port == wanted


def test_an_admin_server_open_to_other_machines_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match=r"extra_config: admin_host 0\.0\.0\.0 is reachable from other machines"):
        make_host(ConnectorOptions(admin_host="0.0.0.0"))


def test_less_than_a_block_is_refused_when_its_size_is_known() -> None:
    host = make_host()
    with pytest.raises(ConfigError, match="at least one block, 1001 bytes"):
        host.add_rank(make_hello(0, 1001, 9))


@pytest.mark.parametrize(("node", "address"), [(None, None), ("another", "an address")])
def test_only_ranks_of_other_nodes_are_sent_an_address(
    admins: list[FakeAdmin], node: str | None, address: str | None
) -> None:
    host = make_host(num_ranks=2)
    assert host.address_for_ranks is None
    for rank in range(2):
        host.add_rank(make_hello(rank, 100, 9, node if rank else None))
    assert host.address_for_ranks == address
    assert bool(admins[0].arguments["node_host"]) == bool(address)
    admins[0].ranks_failure = "no folder"
    assert host.address_for_ranks == "an address", "its own ranks find no socket either"


@pytest.mark.parametrize(("lazy", "blocks"), [(False, None), (True, 2 * (62 + 31 + 2 * 8))])
def test_lazy_stores_are_two_steps_ahead_of_eviction(
    monkeypatch: pytest.MonkeyPatch, lazy: bool, blocks: int | None
) -> None:
    """1,000 tokens of 8 requests are in at most 62 + 8 new blocks of 16, and 31 + 8 of 32."""
    made: list[int | None] = []
    monkeypatch.setattr(schedulerhost, "SchedulerSide", lambda *_, lazy_blocks, **__: made.append(lazy_blocks))
    groups = KVGroups((KVGroup(0, 16, 1), KVGroup(1, 32, 2)), 32)
    host = make_host(ConnectorOptions(cpu_bytes_to_use=1000, lazy_offload=lazy), groups, max_batched_tokens=1000)
    host.add_rank(make_hello())
    assert made == [blocks]


def test_updates_of_a_rank_reach_the_engine() -> None:
    host = make_host()
    early = Completion(1, "done")
    host.receive(0, RankUpdate((BootCompletions("boot", (early,)),)))  # there is no engine yet
    host.receive(0, RankUpdate(hello=make_hello()))
    rank = FakeRank(engine_of(host))
    rank.pin(10)
    op = engine_of(host).begin_store([b"key"], [1]).op
    assert op is not None
    host.receive(0, RankUpdate((BootCompletions(rank.boot_id, (Completion(op.op_id, "done"),)),)))
    assert engine_of(host).lookup([b"key"]) == 1


def test_a_host_that_cannot_be_built_in_a_step_leaves_vllm_without_offload(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handshake reaches only one of several connectors; then a rank introduces itself with a step."""
    host, attempts, engine_config = make_host(), [], ConnectorOptions.engine_config

    def counted(*arguments: Any) -> Any:
        attempts.append(arguments)
        return engine_config(*arguments)

    monkeypatch.setattr(ConnectorOptions, "engine_config", counted)
    for _ in range(3):
        host.receive(0, RankUpdate(hello=make_hello(0, 1001, 9)))
    assert host.side is None
    assert len(attempts) == 1
    assert [record.message for record in caplog.records if "serves without offload" in record.message] == [
        "update of rank 0: KVStow has failed; vLLM serves without offload until it restarts"
    ]


def test_an_engine_whose_ranks_are_unknown_makes_steps_for_a_while() -> None:
    """Beside another connector a rank introduces itself with a step."""
    now = [100.0]
    known, silent = make_host(clock=lambda: now[0]), make_host(clock=lambda: now[0])
    assert known.wants_steps
    assert silent.wants_steps
    known.add_rank(make_hello())
    assert not known.wants_steps
    now[0] += EXPECTING_SECONDS
    assert not silent.wants_steps, "its data plane could not be made"


@pytest.mark.parametrize("is_alone", [True, False])
def test_beside_another_connector_loads_go_before_the_step(is_alone: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Only the ranks know whether there is one."""
    host = make_host(ConnectorOptions(cpu_bytes_to_use=1000, load_path="layer"), may_load_by_layer=True)
    host.add_rank(replace(make_hello(), is_alone=is_alone))
    assert host.side is not None
    assert ("this engine loads before the step" not in caplog.text) == is_alone


def test_an_error_in_an_update_closes_the_pool_and_frees_the_gpu_blocks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    host, released = make_host(), []
    host.add_rank(make_hello())
    assert host.side is not None
    monkeypatch.setattr(host.side, "release_gpu_blocks", lambda: released.append(True))
    rank = FakeRank(engine_of(host))
    rank.pin(10)
    assert engine_of(host).store_room() == 10

    def fail(*_: Any) -> None:
        raise MemoryError("injected")

    monkeypatch.setattr(host.side.control, "complete", fail)
    for _ in range(2):
        host.receive(0, RankUpdate((BootCompletions(rank.boot_id, (Completion(1, "done"),)),)))
    assert engine_of(host).store_room() == 0
    assert engine_of(host).stats().faults.errors["host"] == 2
    assert len(released) == 2
    assert caplog.text.count("serves without offload") == 1
    readiness = engine_of(host).readiness()
    assert (readiness.state, readiness.reason) == (
        "degraded",
        "the host has failed: update of rank 0: MemoryError('injected')",
    )


def test_closing_stops_server_and_engine(admins: list[FakeAdmin]) -> None:
    host = make_host()
    host.close()
    host.add_rank(make_hello())
    host.close()
    host.close()
    assert engine_of(host).readiness().state == "stopped"
    assert set(admins[0].calls) == {"start", "stop"}


# -- both halves ----------------------------------------------------------------------------------------------


def test_ranks_with_slots_of_different_sizes_all_reach_the_capacity(admins: list[FakeAdmin]) -> None:
    """10 pages over slots of 3 and 2: two slots on each rank, although half of 10 pages is one slot of 3."""
    options = make_options(cpu_bytes_to_use=10 * PAGE, max_bytes=10 * PAGE)
    host = make_host(options, num_ranks=2)
    workers = [EmbeddedWorkerHost(options, make_process(rank=rank, num_ranks=2), BLOCKS) for rank in (0, 1)]
    try:
        for worker, pages in zip(workers, (3, 2), strict=True):
            worker.register({"layer": torch.zeros(BLOCKS, pages * PAGE, dtype=torch.uint8)})
            assert worker.hello is not None
            host.add_rank(worker.hello)
        assert engine_of(host).config.capacity_slots == admins[0].arguments["max_capacity_slots"] == 2
        for worker in workers:
            worker.side.apply(engine_of(host).report(worker.side.report()))
            assert isinstance(worker.side.plane, DataPlane)
            wait_until_pinned(worker.side.plane.pool)
            engine_of(host).report(worker.side.report())
        assert (engine_of(host).readiness().state, engine_of(host).stats().pool.usable_slots) == ("ready", 2)
    finally:
        for worker in workers:
            worker.close()


# -- weights that change ----------------------------------------------------------------------------------------------

REASON = "weights_changed: a test"


class Resets:
    """Counts how often the scheduler side forgets its blocks."""

    def __init__(self, host: EmbeddedSchedulerHost, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reasons: list[str] = []
        monkeypatch.setattr(host.side, "reset", self.reset)

    def reset(self, reason: str = "") -> bool:
        self.reasons.append(reason)
        return True


class ResettingPool(FakeBlockPool):
    is_used = False

    def reset_prefix_cache(self) -> bool:
        return not self.is_used


def make_watched_host(monkeypatch: pytest.MonkeyPatch) -> tuple[EmbeddedSchedulerHost, ResettingPool, Resets]:
    host, pool = make_host(binds=False), ResettingPool(8)
    host.bind(pool)
    host.add_rank(make_hello())
    return host, pool, Resets(host, monkeypatch)


def test_a_reset_of_the_gpu_counts_once_weights_may_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    host, pool, resets = make_watched_host(monkeypatch)
    assert pool.reset_prefix_cache()
    assert not resets.reasons, "this engine has seen no change"
    host.weights_may_change(REASON)
    assert resets.reasons == [REASON]
    pool.is_used = True
    assert not pool.reset_prefix_cache()
    assert len(resets.reasons) == 1, "vLLM has reset nothing"
    pool.is_used = False
    assert pool.reset_prefix_cache()
    assert len(resets.reasons) == 2
    host.weights_may_change(REASON)
    assert pool.reset_prefix_cache()
    assert len(resets.reasons) == 4, "once each"


def test_a_change_before_the_ranks_are_known_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    host = make_host(binds=False)
    host.bind(ResettingPool(8))
    host.weights_may_change(REASON)
    forgotten: list[str] = []

    def reset(side: SchedulerSide, reason: str = "") -> bool:
        forgotten.append(reason)
        return True

    monkeypatch.setattr(SchedulerSide, "reset", reset)
    host.add_rank(make_hello())
    assert forgotten == [REASON]


def test_a_change_that_only_a_rank_has_noticed_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    host, _, resets = make_watched_host(monkeypatch)
    assert host.expected_weight_changes() == {}
    for _ in range(2):
        host.receive(0, RankUpdate(weight_changes=(1, REASON)))
    assert resets.reasons == [REASON]
    assert host.expected_weight_changes() == {0: 1}
    host.calls_asked = lambda: 2
    assert host.expected_weight_changes() == {0: 3}
    host.receive(0, RankUpdate(weight_changes=(3, REASON)))
    assert resets.reasons == [REASON], "this process has sent the others"
    host.receive(0, RankUpdate(weight_changes=(4, REASON)))
    assert len(resets.reasons) == 2


def test_an_error_while_blocks_are_forgotten_does_not_reach_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    host, pool, _ = make_watched_host(monkeypatch)

    def fail(reason: str = "") -> bool:
        raise RuntimeError("a defect")

    monkeypatch.setattr(host.side, "reset", fail)
    host.weights_may_change(REASON)
    assert pool.reset_prefix_cache()
    assert host.ask("a test", lambda side: True, False), "the side is asked, and has no engine any more"


def test_a_change_on_another_thread_counts_at_the_next_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    host, _, resets = make_watched_host(monkeypatch)
    thread = threading.Thread(target=host.weights_may_change, args=(REASON,))
    thread.start()
    thread.join()
    assert not resets.reasons, "the scheduler's thread may be using the side"
    nothing: list[str] = []
    assert host.ask("an admission", lambda side: list(resets.reasons), [REASON], admits=True) == nothing
    assert host.ask("a test", lambda side: list(resets.reasons), nothing) == [REASON]
