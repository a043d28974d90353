"""Requests that arrive together and share a prefix that only host memory has: it is copied once, and the answers are
those of vLLM alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.vllm.engines import (
    A_BLOCKS,
    A_HIT,
    SLOT_BYTES,
    A,
    B,
    Engine,
    Prompt,
    Reference,
    Setup,
    assert_same,
    running,
)
from tests.vllm.nodeservice import running_service, until_attached

pytestmark = pytest.mark.vllm

COUNTS = (1, 4, 8, 50)
HYBRID_BLOCKS = A_BLOCKS + 3  # the second group needs the last 96 tokens
B_BLOCKS = 2  # of B's, that A does not have


@pytest.fixture(params=["embedded", "attached", "embedded, hybrid"])
def engine(
    request: pytest.FixtureRequest, model: Path, hybrid_model: Path, reference: Reference, tmp_path: Path
) -> Iterator[Engine]:
    """Has stored A and B."""
    hybrid = "hybrid" in request.param
    used = hybrid_model if hybrid else model
    reference(used, A)  # before this engine
    settings = {"max_num_seqs": 64} | ({"prefix_cache_retention_interval": None} if hybrid else {})
    with ExitStack() as stack:
        extra = {}
        if request.param == "attached":
            service = stack.enter_context(running_service(tmp_path))
            extra = {"attach": service.attach}
        engine = stack.enter_context(running(Setup(used, extra, gpu_blocks=512, settings=settings)))
        if extra:
            until_attached(engine, service)
        engine.ask(A, B, tokens=1)
        yield engine


def copied(engine: Engine, reference: Reference, *prompts: Prompt) -> int:
    """How many blocks these requests load together. Their answers are those of vLLM alone."""
    engine.forget_gpu()
    before = engine.counter("vllm:kv_offload_load_bytes")
    answers = engine.ask(*prompts)
    engine.settle()
    assert_same(answers, reference(engine.setup.model, *prompts))
    assert all(answer.cached >= 512 for answer in answers)
    slot_bytes = SLOT_BYTES // 2 if "hybrid" in engine.setup.model.parts[-1] else SLOT_BYTES
    return int(engine.counter("vllm:kv_offload_load_bytes") - before) // slot_bytes


def test_a_prefix_is_copied_once(engine: Engine, reference: Reference) -> None:
    blocks = HYBRID_BLOCKS if "hybrid" in engine.setup.model.parts[-1] else A_BLOCKS
    hits = engine.counter("vllm:external_prefix_cache_hits")
    assert [copied(engine, reference, *[A] * count) for count in COUNTS] == [blocks] * len(COUNTS)
    assert engine.counter("vllm:external_prefix_cache_hits") - hits == len(COUNTS) * A_HIT
    if blocks == A_BLOCKS:
        # What B adds is loaded by each of them, unless the first one does so within the step that admits it.
        assert copied(engine, reference, A, B, A, B) in (A_BLOCKS + B_BLOCKS, A_BLOCKS + B_BLOCKS * 2)
