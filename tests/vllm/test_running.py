"""What a real vLLM tells its pool of the requests that run, and what is stored when they end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.vllm.engines import BLOCK, Engine, Setup, assert_same, prompt, running

from kvstow.endings import PAIRS, RUNNING, STATUSES

pytestmark = pytest.mark.vllm

LONG = 12 * BLOCK


def pool_of(engine: Engine) -> Any:
    return engine.scheduler_host.engine.pool


def states_of(engine: Engine) -> set[int]:
    """Of the requests that have used the blocks of the pool last."""
    return {part.home.first_cell for part in pool_of(engine).index.chains.parts()}


def test_a_request_runs_from_its_admission_to_its_end(model: Path) -> None:
    with running(Setup(model, {}, slots=96, gpu_blocks=96)) as engine:
        hazards = pool_of(engine).index.chains.hazards
        engine.add(prompt(LONG, seed=1), 64)
        for _ in range(3):
            engine.step()
        engine.settle()
        parts = pool_of(engine).index.chains.parts()
        assert any(part.request is not None for part in parts), "a GPU computes with them"
        assert hazards.first_cell(RUNNING, 1) in states_of(engine)
        engine.run()
        engine.settle()
        parts = pool_of(engine).index.chains.parts()
        assert parts
        assert not any(part.request is not None for part in parts)
        ended = {hazards.first_cell(state, 1) for state in (*range(len(STATUSES)), *PAIRS)}
        assert states_of(engine) <= ended
        engine.scheduler_host.engine.check_integrity()


def test_an_aborted_request_has_ended(model: Path) -> None:
    with running(Setup(model, {}, slots=96, gpu_blocks=96)) as engine:
        name = engine.add(prompt(LONG, seed=2), 64)
        for _ in range(4):
            engine.step()
        engine.abort(name)
        engine.run()
        engine.settle()
        hazards = pool_of(engine).index.chains.hazards
        assert hazards.first_cell(STATUSES.index("abort"), 1) in states_of(engine)


def test_what_a_full_pool_refuses_a_running_request_is_stored_at_its_end(model: Path) -> None:
    """The pool has room for one of the prompts."""
    blocks = LONG // BLOCK
    with running(Setup(model, {}, slots=blocks + 2, gpu_blocks=96)) as engine:
        first = engine.ask(prompt(LONG, seed=3), prompt(LONG, seed=4))
        engine.settle()
        stores = engine.stats("stores")
        assert stores["deferred"] > 0
        assert stores["stored"] > blocks
        pool_of(engine).index.chains.pass_time(pool_of(engine).clock())
        engine.forget_gpu()
        assert_same(engine.ask(prompt(LONG, seed=3), prompt(LONG, seed=4)), first)
        assert engine.loaded_blocks() > 0
        engine.scheduler_host.engine.check_integrity()
