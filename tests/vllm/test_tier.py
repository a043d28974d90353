"""Real engines with a fleet tier, whose store is in this process and under the test's control."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.vllm.engines import (
    A_BLOCKS,
    A_HIT,
    BLOCK,
    A,
    B,
    C,
    Engine,
    Reference,
    Setup,
    assert_same,
    eventually,
    running,
)
from tests.vllm.models import WINDOW

from kvstow.control.tiersettings import TierSettings
from kvstow.errors import TierUnavailableError
from kvstow.testing.tier import ControlledStore
from kvstow_service.connectors.engine_core import embeddedtier
from kvstow_service.connectors.engine_core.enginetier import EngineTier
from kvstow_service.connectors.vllm import unshared
from kvstow_service.tiers import stores

pytestmark = pytest.mark.vllm

URL = "redis://store:1"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[ControlledStore]:
    """What each engine of the test opens as its tier's store."""
    store = ControlledStore()
    monkeypatch.setattr(stores, "open_store", lambda url: store)
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    yield store
    for gate in (store.puts, store.gets, store.lookups):
        gate.open()


def setup(model: Path) -> Setup:
    """vLLM caches all blocks of a window, not only some of them."""
    settings = {"prefix_cache_retention_interval": None}
    return Setup(model, extra={"tier": URL, "weights_id": "tiny"}, settings=settings)


def tier_of(engine: Engine) -> EngineTier:
    tier = engine.connector._host.tier.tier
    assert isinstance(tier, EngineTier)
    return tier


def put_all(engine: Engine) -> None:
    """Step until all that is to be put is put."""
    eventually(lambda: engine._idle() and not tier_of(engine).wants_steps, "the end of all puts")


def fill(model: Path, *prompts: Any) -> None:
    """Another node has computed these, and put them."""
    with running(setup(model)) as engine:
        engine.ask(*prompts)
        put_all(engine)
        assert tier_of(engine).fleet.fingerprint is not None


def reset(engine: Engine) -> None:
    """As RL does when the weights are new."""
    eventually(lambda: engine._idle() and engine.llm.reset_prefix_cache(reset_connector=True), "a reset")


def test_what_one_engine_has_put_another_one_hits(
    model: Path, reference: Reference, store: ControlledStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However busy the machine is: requests wait for the store as long as it takes."""
    monkeypatch.setattr(embeddedtier, "TierSettings", partial(TierSettings, deadline=120.0, lookup_wait=120.0))
    expected = reference(model, A, B, C)
    fill(model, A)
    assert store.num_objects >= A_BLOCKS
    with running(setup(model)) as engine:
        answers = engine.ask(A)
        engine.forget_gpu()
        answers += engine.ask(B)
        assert_same(answers, expected[:2])
        assert [answer.cached for answer in answers] == [A_HIT, 512]
        assert engine.loaded_blocks() == A_BLOCKS + 16
        fleet = tier_of(engine).fleet
        status = fleet.status()
        assert (status.state, status.counters.fetched_blocks) == ("on", A_BLOCKS)
        assert_same(engine.ask(C), expected[2:])
        put_all(engine)
        assert fleet.status().prefill_tokens_per_second is not None

        # A fetch is under way when the weights change: nothing of it is ever found, and nothing else asked for.
        engine.purge()
        reset_engine(engine, store)
        engine.forget_gpu()
        before = store.num_objects
        (answer,) = engine.ask(C)
        assert_same([answer], expected[2:])
        assert answer.cached == 0
        assert (store.num_objects, fleet.status().state) == (before, "off")


def reset_engine(engine: Engine, store: ControlledStore) -> None:
    """Reset it while a request waits for a fetch, and let that one end afterwards."""
    tier = tier_of(engine)
    tier.fleet.break_even = type(tier.fleet.break_even)(1, None, lambda: 0.0)  # every fetch pays, as if just started
    engine.llm.reset_prefix_cache()
    store.gets.shut()
    name = engine.add(C)
    eventually(lambda: not engine.step() and tier.fleet.status().fetching_blocks, "a fetch")
    engine.abort(name)
    reset(engine)
    store.gets.open()
    put_all(engine)
    assert engine.admin.get("/v1/pools/host/blocks").raise_for_status().json()["items"] == []


def test_a_store_that_hangs_or_fails_costs_hits_and_nothing_else(
    model: Path, reference: Reference, store: ControlledStore
) -> None:
    expected = reference(model, A, C)
    fill(model, A, C)
    with running(setup(model)) as engine:
        store.lookups.shut()
        (answer,) = engine.ask(A)
        assert (answer.cached, engine.loaded_blocks()) == (0, 0)
        assert_same([answer], expected[:1])
        store.lookups.open()
        put_all(engine)
        store.error = TierUnavailableError("injected")
        (answer,) = engine.ask(C)
        assert_same([answer], expected[1:])
        eventually(lambda: engine._idle() and tier_of(engine).fleet.status().state == "down", "an open breaker")
        assert engine.admin.get("/readyz").status_code == 200
        assert_same(engine.ask(A), expected[:1])


def test_an_engine_whose_blocks_no_other_can_know_leaves_the_store_alone(
    model: Path, reference: Reference, store: ControlledStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = reference(model, A)
    monkeypatch.setattr(unshared, "_are_reproducible", lambda algorithm: False)
    with running(setup(model)) as engine:
        assert_same(engine.ask(A), expected)
        put_all(engine)
        status = tier_of(engine).fleet.status()
        assert status.state == "off"
        assert "PYTHONHASHSEED" in status.reason
    assert (store.num_objects, store.batches) == (0, [])


def test_a_model_of_several_groups_hits_what_another_engine_has_put(
    hybrid_model: Path, reference: Reference, store: ControlledStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the group with a window, what is fetched is the end of the hit."""
    monkeypatch.setattr(embeddedtier, "TierSettings", partial(TierSettings, deadline=120.0, lookup_wait=120.0))
    expected = reference(hybrid_model, A, B, C)
    fill(hybrid_model, A, C)
    with running(setup(hybrid_model)) as engine:
        answers = engine.ask(A)
        fetched = tier_of(engine).fleet.status().counters.fetched_blocks
        assert A_BLOCKS < fetched < A_BLOCKS + 2 * WINDOW // BLOCK
        engine.forget_gpu()
        answers += engine.ask(B)
        assert_same(answers, expected[:2])
        assert [answer.cached for answer in answers] == [A_HIT, 512]
        assert tier_of(engine).fleet.status().counters.fetched_blocks > fetched, "another end has another window"
        store.error = TierUnavailableError("injected")
        engine.forget_gpu()
        assert_same(engine.ask(C), expected[2:])
