"""A model in two stages: each stage stores the KV of its own layers, and a hit needs both."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.vllm.engines import A_HIT, LONGEST, A, B, C, Reference, Setup, assert_same, eventually, running
from tests.vllm.nodeservice import is_attached, running_service

pytestmark = pytest.mark.vllm

STAGES = {"pipeline_parallel_size": 2, "worker_extension_cls": "tests.vllm.pipelinestage.PipelineStage"}


def test_answers_of_two_stages_that_are_attached(model: Path, reference: Reference, tmp_path: Path) -> None:
    expected = reference(model, A, B, C)
    with (
        running_service(tmp_path) as service,
        running(Setup(model, {"attach": service.attach}, processes=True, gpu_blocks=96, settings=STAGES)) as engine,
    ):
        eventually(lambda: is_attached(service), "an attached engine")
        assert_same(engine.ask(A, B, C), expected)
        eventually(lambda: service.sessions()[0]["in_flight"] == 0, "the end of all stores")
        eventually(engine.llm.reset_prefix_cache, "a reset of the prefix cache")
        warm = engine.ask(A, B, C, tokens=LONGEST)
        assert warm[0].cached == A_HIT
        assert_same(warm, expected)
        (session,) = service.sessions()
        assert len({rank["pid"] for rank in session["ranks"]}) == 2
