"""What the connector reads from the vLLM that makes it, and what its hooks return."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tests.service.connectors.engine_core.blockpool import FakeBlockPool
from tests.service.connectors.engine_core.connectorhosts import (
    give_rank_host,
    give_scheduler_host,
    rank_host_of,
    scheduler_host_of,
)
from tests.vllm.harness.host import NoThread
from tests.vllm.harness.setup import Setup, make_geometry, make_vllm_config
from vllm.config import KVTransferConfig, VllmConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvstow.errors import ConfigError, CopyError
from kvstow.messages import LoadLaunch, StepPlan
from kvstow_service.admin.agent import AdminAddress
from kvstow_service.connectors.engine_core import connector as shared
from kvstow_service.connectors.engine_core import embeddedschedulerhost
from kvstow_service.connectors.engine_core.kvgroups import KVGroup, KVGroups
from kvstow_service.connectors.engine_core.metadata import KVStowMetadata, KVStowWorkerMetadata, RankHello, RankUpdate
from kvstow_service.connectors.engine_core.stepplan import BootCompletions, PlannedStep
from kvstow_service.connectors.engine_core.vllmprocess import this_node
from kvstow_service.connectors.vllm import connector, tensorhost

pytestmark = pytest.mark.vllm

MODULE = "kvstow_service.connectors.vllm"
CHILD = {
    "kv_connector": "KVStowConnector",
    "kv_connector_module_path": MODULE,
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 20},
}


def make_config(setup: Setup, **extra: Any) -> VllmConfig:
    return make_vllm_config(setup, MODULE, {"cpu_bytes_to_use": 1 << 20, **extra})


def make_scheduler(**varied: Any) -> Any:
    """The scheduler's half, of a `Setup` with these fields."""
    setup = Setup("scheduler", **varied)
    return make(make_config(setup), setup, KVConnectorRole.SCHEDULER)


def make(config: VllmConfig, setup: Setup, role: KVConnectorRole) -> Any:
    return KVConnectorFactory.create_connector(
        config=config, role=role, kv_cache_config=make_geometry(setup, config).workers
    )


@pytest.mark.parametrize(("role", "frees_late"), [("kv_both", True), ("kv_producer", False)])
def test_a_child_of_multiconnector_follows_the_settings_of_its_parent(
    monkeypatch: pytest.MonkeyPatch, role: Any, frees_late: bool
) -> None:
    """vLLM defers frees for consumers, and reads the role and the policy of the connector that it knows."""
    facts: list[Any] = []

    def rank(options: Any, process: Any, num_blocks: int) -> SimpleNamespace:
        facts.append(process)
        return SimpleNamespace(hello=RankHello(0, 1024, 9, this_node(), 0, is_alone=process.is_alone))

    monkeypatch.setattr(tensorhost, "EmbeddedWorkerHost", rank)
    setup = Setup("child", asynchronous=True)
    config = make_vllm_config(setup, MODULE, {})
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role=role,
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"connectors": [CHILD]},
    )
    with set_current_vllm_config(config):
        multi = make(config, setup, KVConnectorRole.WORKER)
    assert isinstance(multi, MultiConnector)
    assert [(each.frees_late, each.recomputes) for each in facts] == [(frees_late, True)]
    assert multi.get_handshake_metadata() is None, "vLLM would give it to the other children, too"


def test_a_vllm_that_cannot_report_failed_loads_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """In such a version (before 0.30), a request whose load has failed waits until its client gives up."""
    monkeypatch.delattr(base, "KVConnectorTransferResults")
    with pytest.raises(ConfigError, match=r"0\.30 or newer: upgrade vLLM"):
        make_scheduler()


def test_a_cache_requires_no_delivery_and_supports_sleep_mode() -> None:
    """Otherwise vLLM drops a preempted request's output, or refuses sleep mode (0.33)."""
    made = make_scheduler()
    assert not made.requires_kv_delivery
    assert made.supports_sleep_mode(None)


def test_ranks_of_all_stages_are_known_and_other_metadata_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's default refuses ranks of later pipeline stages; beside other connectors, theirs may come too."""
    monkeypatch.setattr(embeddedschedulerhost, "EmbeddedAdmin", NoThread)
    made = make_scheduler(ranks=2)
    made.bind_gpu_block_pool(FakeBlockPool(8))
    hellos = [RankHello(rank, 1024 << rank, 9, this_node(), 0) for rank in range(2)]
    made.set_xfer_handshake_metadata_pp_aware({(0, 0): hellos[0], (0, 1): object()})
    assert made.build_connector_meta(None) == KVStowMetadata()
    made.set_xfer_handshake_metadata_pp_aware({(1, 0): hellos[1]})
    assert scheduler_host_of(made).engine.config.rank_slot_bytes == (1024, 2048)
    made.shutdown()
    assert scheduler_host_of(made).engine.readiness().state == "stopped"


def test_updates_of_ranks_add_up() -> None:
    updates = [RankUpdate(hello=RankHello(rank, 1, 1, "", 0)) for rank in range(3)]
    merged = KVStowWorkerMetadata({0: [updates[0]]})
    for other in ({1: [updates[1]]}, {0: [updates[2]]}):
        merged = merged.aggregate(KVStowWorkerMetadata(other))
    assert merged.updates == {0: [updates[0], updates[2]], 1: [updates[1]]}


@pytest.mark.parametrize("answer", [True, False])
def test_hooks_return_what_the_scheduler_side_returns(monkeypatch: pytest.MonkeyPatch, answer: bool) -> None:
    """Stores under way, GPU blocks that are still referenced, and whether a reset is possible now."""
    made = make_scheduler()
    side = SimpleNamespace(has_pending_stores=answer, holds_gpu_blocks=answer, reset=lambda: answer)
    scheduler_host_of(made).side = side
    assert made.has_pending_push_work() is answer
    assert made.has_pending_block_frees() is answer
    assert made.reset_cache() is answer


@pytest.mark.parametrize(
    ("fetched", "store", "sources"),
    [
        (0, "", {CacheHitSource.HOST: 32}),
        (0, "disk", {CacheHitSource.HOST: 32}),
        (16, "disk", {CacheHitSource.HOST: 16, CacheHitSource.DISK: 16}),
        (16, "mooncake", {CacheHitSource.HOST: 16, CacheHitSource.EXTERNAL_UNSPECIFIED: 16}),
        (32, "mooncake", {CacheHitSource.EXTERNAL_UNSPECIFIED: 32}),
        (48, "disk", {CacheHitSource.DISK: 32}),
    ],
)
def test_a_hit_is_reported_by_where_it_came_from(fetched: int, store: str, sources: dict[CacheHitSource, int]) -> None:
    """From host memory, or from the store below the pool for this request."""
    made = make_scheduler()
    scheduler_host_of(made).side = SimpleNamespace(fetched_tokens=lambda request: fetched, store=store)
    assert made.get_external_cache_hit_sources(None, 32) == sources
    assert made.get_external_cache_hit_sources(None, 0) == {}


def raise_memory_error(*_: Any) -> None:
    raise MemoryError("injected")


@pytest.mark.parametrize("broken", ["update", "settle"])
def test_no_error_in_a_steps_output_reaches_vllm(broken: str) -> None:
    """It would end vLLM's process. A request whose load may have failed must not go on."""
    made = make_scheduler(layers="hybrid")
    failures: list[str] = []
    works = {"update": lambda *_: None, "settle": lambda: None}
    methods = {**works, broken: raise_memory_error}
    side = SimpleNamespace(
        measure=methods["update"],
        settle=methods["settle"],
        release_gpu_blocks=lambda: None,
        control=SimpleNamespace(fail=failures.append, complete=lambda *_: None),
    )
    scheduler_host_of(made).side = side
    output = SimpleNamespace(
        kv_connector_worker_meta=KVStowWorkerMetadata({0: [RankUpdate(completions=(BootCompletions("boot", ()),))]}),
        finished_recving={"request"},
    )
    made.update_connector_output(output)
    assert len(failures) == 1
    assert failures[0].endswith("MemoryError('injected')")
    assert output.finished_recving == (set() if broken == "continuing" else {"request"})


@pytest.mark.parametrize(
    ("hook", "arguments", "answer"),
    [
        ("on_new_request", (None,), None),
        ("get_num_new_matched_tokens", (None, 0), (0, False)),
        ("update_state_after_alloc", (None, SimpleNamespace(get_block_ids=list), 0), None),
        ("request_finished", (None, []), (False, None)),
        ("request_finished_all_groups", (None, ([],)), (False, None)),
        ("has_pending_push_work", (), False),
        ("take_events", (), ()),
        ("get_kv_connector_stats", (), None),
        ("reset_cache", (), False),
    ],
)
def test_no_error_in_the_scheduler_reaches_vllm(
    monkeypatch: pytest.MonkeyPatch, hook: str, arguments: tuple[Any, ...], answer: Any
) -> None:
    made = make_scheduler()

    class Broken(SimpleNamespace):
        expect = find_hit = admit = finish = reset = take_events = take_stats = release_gpu_blocks = staticmethod(
            raise_memory_error
        )
        has_pending_stores = property(raise_memory_error)

    failures: list[str] = []
    host = scheduler_host_of(made)
    host.side, host.stats = Broken(), Broken()
    host.side.events, host.side.control = Broken(), SimpleNamespace(fail=failures.append)
    assert getattr(made, hook)(*arguments) == answer
    assert len(failures) == 1


def test_after_an_error_in_the_plan_of_a_step_its_loads_still_start() -> None:
    made, loads, failures = make_scheduler(), PlannedStep(1, StepPlan(), StepPlan(), (), {}), list[str]()
    scheduler_host_of(made).side = SimpleNamespace(
        plan_step=raise_memory_error,
        take_planned=lambda: loads,
        release_gpu_blocks=lambda: None,
        control=SimpleNamespace(fail=failures.append),
    )
    assert made.build_connector_meta(None).plan is loads, "vLLM waits for them"
    assert len(failures) == 1


def test_lazy_stores_of_recurrent_layers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM hands states over when they are computed, and the free queue says nothing of them."""
    groups = KVGroups((KVGroup(0, 16, 1, is_state=True),), 16)
    monkeypatch.setattr(shared, "kv_groups", lambda *_, **__: groups)
    setup = Setup("lazy states")
    config = make_config(setup, lazy_offload=True)
    with pytest.raises(ConfigError, match="lazy_offload does not work with recurrent layers"):
        make(config, setup, KVConnectorRole.SCHEDULER)


def test_groups_are_read_with_the_context_parallel_size_and_the_hash_block(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def note(*arguments: Any, **named: Any) -> KVGroups:
        calls.append((*arguments[1:], named))
        return KVGroups((KVGroup(0, 16, 1),), 16)

    monkeypatch.setattr(shared, "kv_groups", note)
    setup = Setup("groups")
    config = make_config(setup)
    geometry = make_geometry(setup, config).scheduler
    config.parallel_config.decode_context_parallel_size = 4
    connector.KVStowConnector(config, KVConnectorRole.SCHEDULER, geometry)
    assert calls == [(16, 4, {"kept": (0,), "hands_states_over": True})]


def test_a_rank_introduces_itself_with_its_first_update_and_once() -> None:
    setup = Setup("hello")
    worker, hello = make(make_config(setup, lock=False), setup, KVConnectorRole.WORKER), RankHello(0, 100, 5, "a", 1)
    assert worker.build_connector_worker_meta() is None, "its KV cache is not registered"
    rank_host_of(worker).hello = hello
    assert worker.build_connector_worker_meta() == KVStowWorkerMetadata({0: [RankUpdate(hello=hello)]})
    assert worker.build_connector_worker_meta() is None


def following(followed: list[KVStowMetadata]) -> SimpleNamespace:
    """A rank's host that notes what it follows."""
    return SimpleNamespace(follow=followed.append, side=SimpleNamespace(rank=0, stores_fail_because=None))


def test_ranks_get_the_address_for_their_reports_with_each_step() -> None:
    setup = Setup("address")
    config = make_config(setup, lock=False)
    scheduler, worker = (make(config, setup, role) for role in (KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER))
    address, followed = AdminAddress("http://node-0:9595", "token"), list[KVStowMetadata]()
    host = SimpleNamespace(
        ask=lambda what, call, otherwise: otherwise,
        address_for_ranks=address,
        expected_weight_changes=dict,
        ticket=None,
    )
    give_scheduler_host(scheduler, host)
    give_rank_host(worker, following(followed))
    for hook in (worker.handle_preemptions, worker.bind_connector_metadata):
        hook(scheduler.build_connector_meta(None))
    assert [metadata.admin for metadata in followed] == [address, address]


def test_a_step_that_cannot_load_what_it_computes_with_says_so_apart_from_launches() -> None:
    """What a rank launches for a device on JAX is another thing than why a step is lost."""
    made, worker = (
        make_scheduler(),
        make(make_config(setup := Setup("lost"), lock=False), setup, KVConnectorRole.WORKER),
    )
    scheduler_host_of(made).side = SimpleNamespace(
        plan_step=lambda step: PlannedStep(1, StepPlan(), StepPlan(), (), {}),
        find_hit=lambda request, computed: 16,
        loads_by_layer=lambda request: True,
        admit=lambda *admission: True,
    )
    request = SimpleNamespace(request_id="r")
    assert made.get_num_new_matched_tokens(request, 0) == (16, False)
    made.update_state_after_alloc(request, SimpleNamespace(get_block_ids=list), 16)
    metadata = made.build_connector_meta(None)
    assert (metadata.lost, metadata.launches) == ("the plan of the step is incomplete", ())
    followed: list[KVStowMetadata] = []
    give_rank_host(worker, following(followed))
    with pytest.raises(CopyError, match="the plan of the step is incomplete"):
        worker.bind_connector_metadata(metadata)
    assert followed == []
    whole = KVStowMetadata(launches=(LoadLaunch(1, 2, 0, 1),))
    worker.bind_connector_metadata(whole)
    assert followed == [whole]
    assert made.build_connector_meta(None).lost is None, "it was of that step alone"


def test_the_ticket_of_a_step_is_that_of_the_session_in_which_its_loads_began() -> None:
    """Planning may begin another session, and ranks leave the old one when they get its ticket."""
    made = make_scheduler()
    tickets = ["old", "new"]

    def plan(step: Any) -> PlannedStep:
        tickets.pop(0)
        return PlannedStep(1, StepPlan(), StepPlan(), (), {})

    class Host(SimpleNamespace):
        @property
        def ticket(self) -> str:
            return tickets[0]

    host = Host(ask=lambda what, call, otherwise: plan(None), address_for_ranks=None, expected_weight_changes=dict)
    give_scheduler_host(made, host)
    assert made.build_connector_meta(None).ticket == "old"


def test_cuda_graphs_stay_whole() -> None:
    """A full graph calls no hooks: its step waits for the load before the replay."""
    assert not connector.KVStowConnector.requires_piecewise_for_cudagraph({})
