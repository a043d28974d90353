"""Engines that are attached to a node service: their answers are those of vLLM alone, they share what they have stored,
and either of both sides may go at any time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.vllm.engineprocess import EngineProcess
from tests.vllm.engines import (
    A_HIT,
    LONGEST,
    PROMPTS,
    SHORT,
    A,
    Answer,
    B,
    C,
    D,
    Engine,
    Reference,
    Setup,
    assert_same,
    eventually,
    prompt,
    running,
)
from tests.vllm.nodeservice import NodeService, is_attached, until_attached

from kvstow.errors import ConfigError

pytestmark = pytest.mark.vllm

StartEngine = Callable[..., EngineProcess]


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Iterator[StartEngine]:
    """Starts engines in processes of their own."""
    with ExitStack() as stack:

        def start(service: NodeService, **options: Any) -> EngineProcess:
            engine = EngineProcess(model, service.attach, tmp_path / "engines", **options)
            stack.callback(engine.kill)
            return engine

        yield start


@pytest.mark.parametrize("kind", ["eager", "lazy", "hybrid"])
def test_answers_are_those_of_vllm_alone(
    kind: str, model: Path, hybrid_model: Path, reference: Reference, service: NodeService
) -> None:
    used = hybrid_model if kind == "hybrid" else model
    expected = reference(used, *PROMPTS)
    settings = {"prefix_cache_retention_interval": None} if kind == "hybrid" else {}
    extra = {"attach": service.attach, "lazy_offload": kind == "lazy"}
    setup = Setup(used, extra, gpu_blocks=96, step_tokens=256, settings=settings)
    with running(setup) as engine:
        until_attached(engine, service)
        assert_same(engine.ask(A), expected[:1])
        for seed in range(100, 106 if kind == "lazy" else 100):
            engine.ask(prompt(602, seed))  # has the GPU evict what is older, which is when lazy stores happen
        engine.forget_gpu()
        (warm,) = engine.ask(A, tokens=LONGEST)
        assert warm.cached == A_HIT
        assert_same([warm], expected[:1])
        assert_same(engine.ask(*PROMPTS, tokens=LONGEST), expected)
        engine.forget_gpu()
        answers = engine.ask(*PROMPTS)
        assert_same(answers, expected)
        assert sum(answer.cached for answer in answers) > sum(map(len, PROMPTS)) / 2
        if kind == "eager":
            check_sleep(engine, service, expected[:1])


def check_sleep(engine: Engine, service: NodeService, expected: list[Answer]) -> None:
    """An engine that has slept attaches again, and finds what it has stored."""
    engine.forget_gpu()
    (before,) = service.sessions()
    engine.rank_connector.unregister_kv_caches()
    assert_same(engine.ask(A, tokens=1), expected)
    engine.rank_connector.restore_kv_caches()
    engine.forget_gpu()
    until_attached(engine, service)
    (warm,) = engine.ask(A)
    assert warm.cached == A_HIT
    assert_same([warm], expected)
    assert [each["id"] for each in service.sessions()] != [before["id"]]


def test_an_engine_that_could_not_start_leaves_no_connector_to_the_next_one(model: Path) -> None:
    from vllm.distributed.kv_transfer import has_kv_transfer_group

    with pytest.raises(ConfigError, match="cpu_bytes_to_use"), running(Setup(model, {"cpu_bytes_to_use": 1})):
        pass
    assert not has_kv_transfer_group()


def test_ranks_in_processes_of_their_own(model: Path, reference: Reference, service: NodeService) -> None:
    expected = reference(model, A, B, C)
    with running(Setup(model, {"attach": service.attach}, tp=2, processes=True, gpu_blocks=96)) as engine:
        eventually(lambda: is_attached(service), "an attached engine")
        (session,) = service.sessions()
        assert len({rank["pid"] for rank in session["ranks"]}) == 2
        assert_same(engine.ask(A, B, C), expected)
        eventually(lambda: service.sessions()[0]["in_flight"] == 0, "the end of all stores")
        eventually(engine.llm.reset_prefix_cache, "a reset of the prefix cache")
        warm = engine.ask(A, B, C, tokens=LONGEST)
        assert warm[0].cached == A_HIT
        assert_same(warm, expected)


def test_engines_share_what_one_has_stored_and_the_next_finds_what_a_killed_one_has_left(
    model: Path, reference: Reference, service: NodeService, start: StartEngine
) -> None:
    """All but the last, whose hashes have another seed."""
    expected = reference(model, A, C)
    first = start(service)
    eventually(lambda: is_attached(service), "an attached engine")
    assert_same(first.ask(A, C), expected)
    first.forget_gpu()
    alone = service.used_slots()
    second = start(service)
    eventually(lambda: is_attached(service, sessions=2), "two attached engines")
    answers = [*second.ask(A), *second.ask(C)]
    assert [answer.cached for answer in answers] == [A_HIT, A_HIT], "its first requests hit"
    assert_same(answers, expected)
    second.forget_gpu()
    assert service.used_slots() <= 1.05 * alone
    second.begin(D, *SHORT)  # stores are under way
    second.kill()
    first.kill()
    eventually(lambda: not service.sessions(), "the end of both sessions")
    third = start(service)
    eventually(lambda: is_attached(service), "an attached engine")
    (again,) = third.ask(A)
    assert again.cached == A_HIT
    assert_same([again], expected[:1])
    assert third.metric("vllm:kv_offload_attached") == 1
    other = start(service, environ={"PYTHONHASHSEED": "2"})
    eventually(lambda: is_attached(service, sessions=2), "two attached engines")
    (cold,) = other.ask(A)
    assert cold.cached == 0
    assert_same([cold], expected[:1])
    namespaces = service.get("/v1/namespaces")["items"]
    assert len({namespace["name"] for namespace in namespaces}) == 2


def test_an_engine_serves_before_its_service_comes_and_after_it_was_killed(
    model: Path, reference: Reference, tmp_path: Path, start: StartEngine
) -> None:
    """No request fails or differs, and what was stored is found again, as the keeper has kept it."""
    expected = reference(model, *PROMPTS)
    service = NodeService(tmp_path, "64MiB", "--state", str(tmp_path / "state"))
    engine = start(service)
    assert_same(engine.ask(A), expected[:1])
    assert engine.metric("vllm:kv_offload_attached") == 0
    service.start()
    try:
        eventually(lambda: engine.ask(B) and is_attached(service), "an engine that attaches to a new service")
        engine.ask(*PROMPTS)
        engine.forget_gpu()
        before = engine.ask(*PROMPTS)
        engine.forget_gpu()
        for _ in range(2):
            engine.begin(*PROMPTS, tokens=LONGEST)
            service.kill()
            service.start()
            assert_same(engine.finish(), expected)
            eventually(lambda: engine.ask(B) and is_attached(service), "an engine that attaches again")
            engine.forget_gpu()
        after = engine.ask(*PROMPTS)
        assert_same(after, expected)
        assert sum(answer.cached for answer in after) >= 0.99 * sum(answer.cached for answer in before)
        assert engine.metric("vllm:kv_offload_sessions_lost") >= 2
    finally:
        engine.close()
        service.stop()
