"""Real engines with a fleet tier, whose store is in this process and under the test's control."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.vllm.engines import A_BLOCKS, A_HIT, A, B, C, Engine, Reference, Setup, assert_same, eventually, running

from kvstow.errors import TierUnavailableError
from kvstow.testing.tier import ControlledStore
from kvstow_service.connectors.engine_core.enginetier import EngineTier
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


def setup(model: Path, **extra: Any) -> Setup:
    return Setup(model, extra={"tier": URL, "weights_id": "tiny", **extra})


def tier_of(engine: Engine) -> EngineTier:
    tier = engine.connector._host.tier
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


@pytest.mark.parametrize("write", ["through", "selective"])
def test_what_one_engine_has_put_another_one_hits(
    model: Path, reference: Reference, store: ControlledStore, write: str
) -> None:
    expected = reference(model, A, B)
    with running(setup(model, tier_write=write)) as engine:
        for _ in range(2):  # `selective` puts at the second use
            assert_same(engine.ask(A), expected[:1])
            put_all(engine)
            engine.forget_gpu()
    assert store.num_objects >= A_BLOCKS
    with running(setup(model)) as engine:
        answers = engine.ask(A, B)
        assert_same(answers, expected)
        assert [answer.cached for answer in answers] == [A_HIT, 512]
        assert engine.loaded_blocks() == A_BLOCKS + 16
        status = tier_of(engine).fleet.status()
        assert (status.state, status.counters.fetched_blocks) == ("on", A_BLOCKS)
        assert status.prefill_tokens_per_second is not None
