"""What operators do with the store of an embedded engine, and what its ranks are told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from tests.service.connectors.engine_core.vllmhost import FakeRequest, Output, VllmHost

from kvstow.attach.identity import FleetWeights, NamespaceIdentity, PoolIdentity
from kvstow.control.fleettier import FleetTier
from kvstow.errors import ConfigError, ConflictError
from kvstow.messages import TierCompletion
from kvstow.testing.tier import ControlledStore
from kvstow.tier.fingerprint import TIER_FAILED, WEIGHTS_CHANGED
from kvstow.tier.store import ClientHealth, ClientStats
from kvstow_service.connectors.engine_core import embeddedtier
from kvstow_service.connectors.engine_core.controlplane import EmbeddedControl
from kvstow_service.connectors.engine_core.embeddedtier import EmbeddedTier
from kvstow_service.connectors.engine_core.enginetier import EngineTier
from kvstow_service.connectors.engine_core.stepplan import TierPlan
from kvstow_service.connectors.engine_core.tieridentity import TierIdentity
from kvstow_service.connectors.engine_core.workerside import RankClient
from kvstow_service.tiers import tierhost
from kvstow_service.tiers.stores import open_store
from kvstow_service.tiers.tierhost import TierChoice

FIRST, SECOND = "redis://first:1", "redis://second:1"
TOKENS = "abcdefgh"


class TieredHost(VllmHost):
    def __init__(self, weights: FleetWeights, *, shares_memory: bool = False) -> None:
        super().__init__()
        pool = PoolIdentity(slot_bytes=(64,), regions=(), kv_cache_dtype="auto", groups=())
        namespace = NamespaceIdentity("model", "v1", "configured", "probe")
        control = self.side._control
        assert isinstance(control, EmbeddedControl)
        self.control = control
        self.embedded = EmbeddedTier(
            self.engine,
            control,
            TierIdentity(pool, lambda: weights, lambda: namespace),
            model="model",
            max_step_tokens=1024,
            replicated=False,
            shares_memory=shares_memory,
            clock=self.clock,
        )

    def look_up_later(self, name: str) -> None:
        """A request comes and goes: the tier is identified from then on."""
        request = FakeRequest(name, "zyxw")
        assert self.side.find_hit(request, 0) is None
        self.side.finish(request, ())

    def step_tier(self) -> TierPlan:
        """One more step, in which the ranks move nothing."""
        plan = self.plan_tier()
        assert plan is not None
        return plan

    def plan_tier(self) -> TierPlan | None:
        self.side.plan_step(Output({}))
        return self.embedded.plan(Output({}))


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> dict[str, ControlledStore]:
    found = {FIRST: ControlledStore(), SECOND: ControlledStore(), "mooncake://m:1": ControlledStore()}
    monkeypatch.setattr(tierhost, "open_store", lambda url, **_: found[url])
    return found


@pytest.fixture
def make(stores: dict[str, ControlledStore]) -> Iterator[Callable[..., TieredHost]]:
    hosts: list[TieredHost] = []

    def make(weights: FleetWeights | None = None, **options: bool) -> TieredHost:
        host = TieredHost(weights or FleetWeights("v1"), **options)
        hosts.append(host)
        host.embedded.begin(TierChoice(FIRST, stores[FIRST], "through"))
        return host

    yield make
    for host in hosts:
        host.embedded.end()


def put_ops(host: TieredHost) -> TierPlan:
    """Compute something; the puts of the next steps."""
    request = FakeRequest("r", TOKENS)
    host.run(request)
    host.finish(request)
    host.step()
    for _ in range(3):
        plan = host.step_tier()
        if plan.ops:
            return plan
    raise AssertionError("nothing is put")


def end_ops(host: TieredHost, plan: TierPlan) -> None:
    ended = [TierCompletion(op.op_id, "done", moved=len(op.keys)) for _, op in plan.ops]
    host.control.complete(0, host.ranks[0].boot_id, ended)


def test_the_store_of_the_start_is_shown_and_told_to_the_ranks(make: Callable[..., TieredHost]) -> None:
    host = make()
    host.look_up_later("other")
    plan = host.step_tier()
    assert (plan.number, plan.url, plan.boots) == (1, FIRST, (host.ranks[0].boot_id,))
    assert host.step_tier().number == 2
    client = RankClient(ClientHealth("connected"), ClientStats(corrupt_objects=3))
    host.embedded.note_client(0, client)
    (tier,) = host.embedded.host.tiers()
    assert (tier.pool, tier.model, tier.status.state) == ("host", "model", "on")
    assert [one.purpose for one in tier.clients] == ["transfers of rank 0", "look-ups"]
    assert tier.clients[0].stats.corrupt_objects == 3


def test_a_detached_store_is_left_when_all_has_ended_and_another_one_follows(
    make: Callable[..., TieredHost], stores: dict[str, ControlledStore]
) -> None:
    host = make()
    host.look_up_later("other")
    plan = put_ops(host)
    detached = threading.Event()

    def detach() -> None:
        host.embedded.host.detach()
        detached.set()

    thread = threading.Thread(target=detach)
    thread.start()
    assert host.step_tier().url == FIRST, "puts are under way"
    assert not detached.is_set()
    end_ops(host, plan)
    thread.join(30)
    assert detached.is_set()
    assert host.embedded.wants_steps, "the ranks have to hear of it"
    assert host.step_tier().url == ""
    assert not host.embedded.wants_steps
    assert (host.embedded.host.store, host.embedded.host.tiers()) == (None, [])
    assert host.ask(FakeRequest("next", TOKENS + "ij")) == len(TOKENS), "the pool is there as ever"

    host.embedded.host.attach(SECOND, None)
    assert host.embedded.wants_steps
    plan = host.step_tier()
    assert plan.url == SECOND
    (tier,) = host.embedded.host.tiers()
    assert tier.status.state == "on", "what is known of the weights stays"
    assert host.side.find_hit(FakeRequest("again", "xyxy"), 0) is None


def test_weights_that_changed_while_no_store_was_attached_have_no_name(make: Callable[..., TieredHost]) -> None:
    host = make()
    host.look_up_later("other")
    host.embedded.host.detach()
    assert host.side.reset()
    host.embedded.host.attach(SECOND, None)
    host.step_tier()
    assert host.side.find_hit(FakeRequest("again", "xyxy"), 0) == 0
    (tier,) = host.embedded.host.tiers()
    assert (tier.status.state, tier.fingerprint) == ("off", None)
    host.embedded.host.name_weights("host", None, "v2")
    host.step_tier()
    (tier,) = host.embedded.host.tiers()
    assert tier.status.state == "on"


@pytest.mark.parametrize("is_reset", [False, True])
def test_after_a_defect_another_store_goes_on_with_the_weights_of_now(
    make: Callable[..., TieredHost], monkeypatch: pytest.MonkeyPatch, *, is_reset: bool
) -> None:
    host = make()
    host.look_up_later("other")
    failed = host.embedded.tier
    assert failed is not None

    def fail() -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(failed.fleet, "step", fail)
    host.step_tier()
    assert failed.has_failed
    with pytest.raises(ConflictError, match="tier_failed"):
        host.embedded.host.name_weights("host", None, "v2")
    assert not is_reset or host.side.reset()
    host.embedded.host.detach()
    host.embedded.host.attach(SECOND, None)
    host.step_tier()
    (tier,) = host.embedded.host.tiers()
    assert (tier.status.state, tier.status.reason) == (("off", WEIGHTS_CHANGED) if is_reset else ("on", ""))


@pytest.mark.parametrize("broken", ["boot_ids", "go_on_from", "leave", "take_plans"])
def test_a_defect_while_a_step_is_planned_switches_the_tier_off_and_nothing_else(
    make: Callable[..., TieredHost], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    """vLLM's scheduler asks for the plan, and an exception would end it."""
    host = make()
    host.look_up_later("other")
    host.embedded.host.detach()
    host.embedded.host.attach(SECOND, None)

    def fail(*_: object) -> None:
        raise RuntimeError("injected")

    with monkeypatch.context() as patch:
        for owner in (host.engine, EngineTier, FleetTier):
            if hasattr(owner, broken):
                patch.setattr(owner, broken, fail)
        for _ in range(3):
            host.plan_tier()
    assert caplog.text.count("the fleet tier has failed") == 1
    (tier,) = host.embedded.host.tiers()
    assert (tier.status.state, tier.status.reason) == ("off", TIER_FAILED)
    assert host.step_tier().ops == ()
    request = FakeRequest("r", TOKENS)
    host.run(request)
    host.finish(request)
    host.step()
    assert host.ask(FakeRequest("next", TOKENS + "ij")) == len(TOKENS), "the pool is there as ever"
    host.embedded.host.detach()
    host.embedded.host.attach(FIRST, None)
    assert host.step_tier().url == FIRST
    assert host.embedded.tier is not None
    assert not host.embedded.tier.has_failed


def test_the_scheduler_does_not_wait_for_the_end_of_the_store_before(
    make: Callable[..., TieredHost], monkeypatch: pytest.MonkeyPatch
) -> None:
    host = make()
    host.embedded.host.detach()
    host.embedded.host.attach(SECOND, None)
    closed_by: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(FleetTier, "close", lambda _: closed_by.append("scheduler"))
        assert host.step_tier().url == SECOND
    assert closed_by == []


def test_weights_are_named_after_the_first_request(make: Callable[..., TieredHost]) -> None:
    host = make(FleetWeights(reason="weights_unknown: set weights_id"))
    with pytest.raises(ConflictError, match="has had no request yet"):
        host.embedded.host.name_weights("host", None, "v2")
    assert host.side.find_hit(FakeRequest("first", "xyxy"), 0) == 0
    (tier,) = host.embedded.host.tiers()
    assert tier.status.reason == "weights_unknown: set weights_id"
    host.embedded.host.name_weights("host", None, "v2")
    host.step_tier()
    assert host.side.find_hit(FakeRequest("second", "xyxy"), 0) is None


def test_transfers_that_do_not_end_keep_the_store_attached_and_bypassed(
    make: Callable[..., TieredHost], monkeypatch: pytest.MonkeyPatch
) -> None:
    host = make()
    host.look_up_later("other")
    plan = put_ops(host)
    monkeypatch.setattr(embeddedtier, "_END_SECONDS", 0.0)
    with pytest.raises(ConflictError, match="still under way"):
        host.embedded.host.detach()
    (tier,) = host.embedded.host.tiers()
    assert tier.status.state == "bypassed"
    end_ops(host, plan)
    host.step_tier()
    host.embedded.host.detach()


@pytest.mark.parametrize("shares_memory", [False, True])
def test_mooncake_needs_a_pool_that_it_can_map(make: Callable[..., TieredHost], *, shares_memory: bool) -> None:
    host = make(shares_memory=shares_memory)
    host.embedded.host.detach()
    if shares_memory:
        host.embedded.host.attach("mooncake://m:1", None)
        return
    with pytest.raises(ConflictError, match="must map this engine's pool"):
        host.embedded.host.attach("mooncake://m:1", None)
    assert host.embedded.host.store is None


def test_a_store_in_one_process_is_refused(make: Callable[..., TieredHost], monkeypatch: pytest.MonkeyPatch) -> None:
    host = make()
    host.embedded.host.detach()
    monkeypatch.setattr(tierhost, "open_store", open_store)
    with pytest.raises(ConfigError, match="for replays"):
        host.embedded.host.attach("memory:", None)


def test_an_engine_that_ends_waits_for_no_transfer(make: Callable[..., TieredHost]) -> None:
    host = make()
    host.look_up_later("other")
    put_ops(host)
    host.embedded.end()
    with pytest.raises(ConflictError, match="the host is stopping"):
        host.embedded.host.attach(SECOND, None)
