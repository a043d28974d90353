"""Loads within the step that computes with them: answers are those without KVStow, and layers that do not wait for
their blocks give others. On the CPU a part is copied when it is waited for, so a missing wait shows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.service.connectors.engine_core.connectorhosts import rank_host_of
from tests.vllm.engines import (
    A_BLOCKS,
    A_HIT,
    LONGEST,
    NEAR,
    PROMPTS,
    WHOLE,
    A,
    B,
    C,
    D,
    Engine,
    Reference,
    Setup,
    assert_same,
    distance,
    running,
)

from kvstow.devices.cpu import CpuDevice
from kvstow.errors import CopyError
from kvstow_service.connectors.engine_core.trackedrequests import Choice
from kvstow_service.connectors.engine_core.workerside import LayerWaits

pytestmark = pytest.mark.vllm

LAYER = {"load_path": "layer"}
SIZES: dict[str, dict[str, Any]] = {
    "roomy": {},
    "small": {"step_tokens": 128, "gpu_blocks": 80},
    "evicting": {"slots": 40},
    "lazy": {"extra": LAYER | {"lazy_offload": True}, "gpu_blocks": 72},
    "auto": {"extra": {"load_path": "auto"}},
    "overlapping": {"settings": {"async_scheduling": True}},
}
BY_LAYER = Choice(by_layer=True, reason="setting")


def on(*sizes: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("shared", sizes, indirect=True)


@pytest.fixture(scope="module")
def shared(request: pytest.FixtureRequest, model: Path, reference: Reference) -> Iterator[Engine]:
    reference(model)
    with running(replace(Setup(model, extra=LAYER), **SIZES[request.param])) as engine:
        yield engine


@pytest.fixture
def no_thread_is_left() -> None:
    """A shared engine may replace its threads; when it ends, `running` sees that none is left."""


@pytest.fixture
def engine(shared: Engine) -> Engine:
    """It has no requests, and its caches are empty."""
    shared.empty()
    policy = shared.scheduler_host.side.policy
    policy.counts.clear()
    policy.off = None
    return shared


def counts(engine: Engine) -> dict[Choice, int]:
    return dict(engine.scheduler_host.side.policy.counts)


def prepare(engine: Engine, *prompts: tuple[int, ...]) -> None:
    """The prompts' blocks are in host memory, and nowhere else."""
    engine.ask(*prompts)
    engine.forget_gpu()


@on("roomy", "small", "lazy", "overlapping")
def test_from_the_host(engine: Engine, reference: Reference) -> None:
    expected, loaded = reference(engine.setup.model, A, B), engine.loaded_blocks()
    prepare(engine, A)
    warm = engine.ask(A, tokens=LONGEST)
    assert [answer.cached for answer in warm] == [A_HIT]
    assert_same(warm, expected[:1])
    engine.forget_gpu()
    shared = engine.ask(B, tokens=LONGEST)
    assert [answer.cached for answer in shared] == [512]
    assert_same(shared, expected[1:])
    assert counts(engine) == {BY_LAYER: 2}
    assert engine.loaded_blocks() >= loaded + A_BLOCKS


@on("roomy", "small", "evicting", "lazy", "overlapping")
def test_all_prompts_at_once_twice(engine: Engine, reference: Reference) -> None:
    """With preemptions, in the small sizes, and requests that find on the GPU what another one loads in that step."""
    expected = reference(engine.setup.model, *PROMPTS)
    for _ in range(2):
        answers = engine.ask(*PROMPTS, tokens=LONGEST)
        engine.forget_gpu()
        assert_same(answers, expected)
    assert engine.free_blocks == engine.setup.gpu_blocks - 1
    assert counts(engine).get(BY_LAYER, 0) > 0


@on("roomy")
def test_beginning_on_the_gpu_and_the_rest_from_the_host(engine: Engine, reference: Reference) -> None:
    prepare(engine, A)
    engine.ask(A[:200], tokens=1)
    engine.settle()
    before = counts(engine).get(BY_LAYER, 0)
    answers = engine.ask(A)
    assert [answer.cached for answer in answers] == [A_HIT]
    assert counts(engine)[BY_LAYER] == before + 1
    assert_same(answers, reference(engine.setup.model, A))


@on("roomy")
def test_a_whole_prompt_is_loaded_before_the_step(engine: Engine, reference: Reference) -> None:
    """vLLM has nothing to compute in a step that admits such a request."""
    prepare(engine, WHOLE)
    answers = engine.ask(WHOLE)
    assert [answer.cached for answer in answers] == [A_HIT]
    assert counts(engine) == {Choice(by_layer=False, reason="whole_prompt"): 1}
    assert_same(answers, reference(engine.setup.model, WHOLE))


@on("roomy")
def test_a_request_that_is_aborted_after_its_step(engine: Engine, reference: Reference) -> None:
    prepare(engine, A)
    doomed = engine.add(A)
    engine.step()
    engine.abort(doomed)
    others = engine.ask(C)
    engine.forget_gpu()
    assert engine.free_blocks == engine.setup.gpu_blocks - 1
    assert_same([*engine.ask(A), *others], reference(engine.setup.model, A, C))


@on("auto")
def test_of_many_loads_at_once_none_goes_by_layer(engine: Engine, reference: Reference) -> None:
    """A load of 0.6 MiB takes far less than the budget, so the policy is told of a slow link."""
    prepare(engine, A, C, D)
    policy = engine.scheduler_host.side.policy
    for by_layer in (True, False):
        policy.measured(16 << 20, 16.8, by_layer=by_layer)
    answers = engine.ask(A, C, D)
    assert_same(answers, reference(engine.setup.model, A, C, D))
    assert counts(engine) == {Choice(by_layer=False, reason="burst"): 3}
    engine.settle()
    assert policy._queued == 0


def waits_for_the_layer_before(waits: LayerWaits, name: str) -> None:
    part, load = waits.part_of[name], waits._load
    if load is not None and part:
        load.wait(part - 1)


def waits_for_nothing(waits: LayerWaits, name: str) -> None:
    """The hook of a layer that does not wait."""


@on("roomy")
@pytest.mark.parametrize("mutant", [waits_for_the_layer_before, waits_for_nothing])
def test_a_layer_that_does_not_wait_for_its_own_blocks_is_noticed(
    mutant: Any, engine: Engine, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(engine, A)
    monkeypatch.setattr(LayerWaits, "layer", mutant)
    (answer,) = engine.ask(A, tokens=1)
    assert answer.cached == A_HIT
    assert distance(answer, reference(engine.setup.model, A)[0]) > 10 * NEAR


@on("roomy")
@pytest.mark.parametrize("hooks_are_known_to_fail", [True, False], ids=["waits before", "control"])
def test_a_step_whose_layers_call_no_hooks_waits_before_it(
    hooks_are_known_to_fail: bool, engine: Engine, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a CUDA graph that holds the attention."""

    def start_load_kv(connector: Any, forward_context: Any, **kwargs: Any) -> None:
        rank_host_of(connector).side.load_layers(hooks_run=not hooks_are_known_to_fail)

    prepare(engine, A)
    monkeypatch.setattr(LayerWaits, "layer", waits_for_nothing)
    monkeypatch.setattr(type(engine.rank_connector), "start_load_kv", start_load_kv)
    (answer,) = engine.ask(A, tokens=1)
    assert answer.cached == A_HIT
    difference = distance(answer, reference(engine.setup.model, A)[0])
    assert difference < NEAR if hooks_are_known_to_fail else difference > 10 * NEAR


@on("roomy")
def test_after_a_failure_loads_go_before_the_step(
    engine: Engine, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> Any:
        raise CopyError("no load by layer")

    expected = reference(engine.setup.model, A)
    prepare(engine, A)
    with monkeypatch.context() as patch:
        patch.setattr(CpuDevice, "load_layers", fail)
        assert_same(engine.ask(A), expected)
    engine.forget_gpu()
    assert_same(engine.ask(A), expected)
    assert counts(engine) == {BY_LAYER: 1, Choice(by_layer=False, reason="rank"): 1}
    engine.rank_host.side.plane.layered.failure = None
