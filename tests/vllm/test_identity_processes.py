"""Answers with KVStow are those without it where the halves live in processes of their own, with two ranks.

One engine per model serves all cases; each begins with empty caches.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.vllm.engines import (
    A_BLOCKS,
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
    running,
)

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module", params=[False, True], ids=["full", "lazy-hybrid"])
def shared(request: pytest.FixtureRequest, model: Path, hybrid_model: Path, reference: Reference) -> Iterator[Engine]:
    lazy_hybrid = request.param
    used = hybrid_model if lazy_hybrid else model
    reference(used)
    with running(
        Setup(used, {"lazy_offload": lazy_hybrid}, tp=2, processes=True, step_tokens=256, gpu_blocks=96)
    ) as engine:
        yield engine


@pytest.fixture
def engine(shared: Engine) -> Engine:
    shared.empty()
    return shared


def fill_gpu(engine: Engine) -> None:
    """Have everything older evicted on the GPU, which is when lazy stores happen."""
    engine.ask(D, *SHORT)
    engine.settle()


def test_cold_and_from_the_host(engine: Engine, reference: Reference) -> None:
    expected = reference(engine.setup.model, A)
    cold = engine.ask(A)
    assert [answer.cached for answer in cold] == [0]
    fill_gpu(engine)
    engine.forget_gpu()
    loaded = engine.loaded_blocks()
    warm = engine.ask(A, tokens=LONGEST)
    assert [answer.cached for answer in warm] == [A_HIT]
    assert engine.loaded_blocks() >= loaded + A_BLOCKS
    assert_same([*cold, *warm], 2 * expected)


def test_all_prompts_at_once_twice(engine: Engine, reference: Reference) -> None:
    expected = reference(engine.setup.model, *PROMPTS)
    loaded = engine.loaded_blocks()
    for tokens in (LONGEST, 24):
        answers = engine.ask(*PROMPTS, tokens=tokens)
        fill_gpu(engine)
        engine.forget_gpu()
        assert_same(answers, expected)
    assert engine.loaded_blocks() > loaded
    assert max(answer.cached for answer in answers) >= A_HIT


def test_aborts_and_purges_in_the_middle(engine: Engine, reference: Reference) -> None:
    expected = reference(engine.setup.model, A, B, C)
    engine.ask(A, B, C)
    fill_gpu(engine)
    for steps in range(4):
        engine.forget_gpu()
        doomed = [engine.add(each) for each in (A, B)]
        last = engine.add(C)
        answers: dict[str, Answer] = {}
        for _ in range(steps):
            answers |= engine.step()
        for name in doomed:
            engine.abort(name)
        engine.purge()
        answers |= engine.run()
        assert_same([answers[last]], expected[2:])
        assert_same(engine.ask(A, B, C), expected)
    assert engine.stats("evictions")["purge"] > 0


def test_every_rank_reports(engine: Engine) -> None:
    ranks = engine.admin.get("/v1/ranks").raise_for_status().json()["items"]
    assert [rank["rank"] for rank in ranks] == list(range(engine.setup.tp))
    assert {rank["state"] for rank in ranks} == {"ready"}
    assert sum(rank["pinned_bytes"] for rank in ranks) == engine.setup.pool_bytes
