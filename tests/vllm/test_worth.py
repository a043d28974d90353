"""What a pool is worth to real engines, embedded and attached: the seconds that loads have saved, and for whom."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.vllm.engines import A_BLOCKS, A_HIT, A, C, Engine, Setup, prompt, running
from tests.vllm.nodeservice import NodeService, running_service, until_attached

pytestmark = pytest.mark.vllm

SECRET = "a secret salt"
COLD = [prompt(602, seed) for seed in range(200, 203)]


class Worth:
    """An engine, and what the admin API says of its pool."""

    def __init__(self, engine: Engine, service: NodeService | None) -> None:
        self.engine, self._service = engine, service

    def get(self, path: str) -> Any:
        if self._service is not None:
            return self._service.get(path)
        return self.engine.admin.get(path).raise_for_status().json()

    def prefill(self) -> dict[str, float]:
        return dict(self.get("/v1/stats")["prefill"])


@pytest.fixture(params=["embedded", "attached"])
def worth(request: pytest.FixtureRequest, model: Path, tmp_path: Path) -> Iterator[Worth]:
    if request.param == "embedded":
        with running(Setup(model, {}, step_tokens=256)) as engine:
            yield Worth(engine, None)
        return
    with (
        running_service(tmp_path) as service,
        running(Setup(model, {"attach": service.attach}, step_tokens=256)) as engine,
    ):
        until_attached(engine, service)
        yield Worth(engine, service)


def cached_from_host(engine: Engine) -> float:
    """As vLLM attributes it."""
    return float(
        sum(
            metric.value
            for metric in engine.llm.get_metrics()
            if metric.name == "vllm:prompt_tokens_cached_by_source" and metric.labels["source"] == "host"
        )
    )


def test_a_pool_knows_what_it_saves_and_for_whom(worth: Worth) -> None:
    engine = worth.engine
    engine.ask(A, salt=SECRET, session="chat")
    engine.ask(C)
    engine.forget_gpu()
    (early,) = engine.ask(A, salt=SECRET, session="chat")
    assert early.cached == A_HIT
    assert worth.prefill()["hit_tokens"] == 0, "it is not known yet what prompts cost"
    engine.ask(*COLD)
    engine.forget_gpu()
    (other,) = engine.ask(A, salt="another", session="other")
    assert other.cached == 0, "the salt is part of the keys"
    engine.forget_gpu()
    (late,) = engine.ask(C)
    assert late.cached == A_HIT
    engine.settle()
    prefill = worth.prefill()
    assert prefill["hit_tokens"] == 2 * A_HIT, "each once, the one from before included"
    assert prefill["hit_seconds"] > 0
    assert prefill["load_wait_seconds"] >= 0
    assert prefill["seconds_saved"] >= prefill["hit_seconds"] - prefill["load_wait_seconds"]
    assert prefill["seconds_saved"] <= prefill["hit_seconds"]
    if hasattr_metric(engine):
        assert cached_from_host(engine) == 2 * A_HIT

    (namespace,) = worth.get("/v1/namespaces")["items"]
    assert namespace["hit_blocks"] == 2 * A_BLOCKS
    assert namespace["looked_up_blocks"] > namespace["hit_blocks"]


def hasattr_metric(engine: Engine) -> bool:
    """Whether this version of vLLM attributes hits to sources."""
    return any(metric.name == "vllm:prompt_tokens_cached_by_source" for metric in engine.llm.get_metrics())
