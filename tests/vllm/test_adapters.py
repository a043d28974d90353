"""LoRA adapters in real engines: an answer uses the KV of the version that its engine has loaded, and of no other."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.vllm.engineprocess import attached_engine
from tests.vllm.engines import A_HIT, A, Adapter, Answer, Setup, assert_same, distance, running
from tests.vllm.models import write_adapter
from tests.vllm.nodeservice import NodeService

pytestmark = pytest.mark.vllm

LORA = {"enable_lora": True, "max_lora_rank": 8}
NUMBER = 7


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    """What vLLM alone answers to `A` with the adapters of seeds 1 and 2, and without one."""
    folder = tmp_path_factory.mktemp("adapters")
    adapters = [Adapter(str(seed), seed, str(write_adapter(folder / str(seed), seed))) for seed in (1, 2)]
    with running(Setup(model, settings=LORA)) as engine:
        answers = [*engine.ask(A, adapter=adapters[0]), *engine.ask(A, adapter=adapters[1]), *engine.ask(A)]
    assert min(distance(answers[0], other) for other in answers[1:]) > 0.1
    return answers


def test_an_adapter_that_was_trained_further_at_its_path_is_another_one(
    model: Path, service: NodeService, tmp_path: Path, expected: list[Answer]
) -> None:
    adapter = Adapter("french", NUMBER, str(write_adapter(tmp_path / "french", seed=1)))
    with attached_engine(model, service, tmp_path / "engines", LORA) as first:
        assert_same(first.ask(A, adapter=adapter), expected[:1])
        first.forget_gpu()
    write_adapter(tmp_path / "french", seed=2)
    for cached in (0, A_HIT):  # the second of these engines finds what the first has stored
        with attached_engine(model, service, tmp_path / "engines", LORA) as engine:
            (answer,) = engine.ask(A, adapter=adapter)
            assert_same([answer], expected[1:2])
            assert answer.cached == cached
            engine.forget_gpu()
