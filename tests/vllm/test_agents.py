"""Agents in a loop, with hints, in a real vLLM whose pool has room for half of their conversations."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.vllm.engines import BLOCK, Setup, prompt, running

from kvstow.hints import context_id

pytestmark = pytest.mark.vllm

AGENTS, TURNS = 10, 3
FIRST, GROWS = 8 * BLOCK, 2 * BLOCK


def test_their_conversations_are_named_and_their_ends_are_learned(model: Path) -> None:
    blocks = AGENTS * (FIRST + TURNS * GROWS) // BLOCK
    with running(Setup(model, {}, slots=blocks // 2, gpu_blocks=48)) as engine:
        for turn in range(TURNS):
            for agent in range(AGENTS):
                tokens = prompt(FIRST + turn * GROWS, seed=100 + agent)
                engine.add(tokens, 8, hints={"context": f"agent {agent}", "resume_in": 1.0, "colour": "blue"})
                engine.run()
                engine.settle()
        found = engine.admin.get("/v1/contexts").raise_for_status().json()
        assert found["total"] == AGENTS
        assert {one["name"] for one in found["items"]} == {f"agent {agent}" for agent in range(AGENTS)}
        assert {one["requests"] for one in found["items"]} == {TURNS}
        assert {one["resume_in_seconds"] is None for one in found["items"]} == {False}
        assert engine.stats("hints_ignored")["unknown"] == AGENTS * TURNS
        first = found["items"][0]["context"]
        released = engine.admin.delete(f"/v1/contexts/{first}").raise_for_status().json()
        assert released["blocks"] == found["items"][0]["blocks"] > 0


def test_nothing_of_a_request_is_stored_that_says_so(model: Path) -> None:
    with running(Setup(model, {}, slots=64, gpu_blocks=96)) as engine:
        tokens = prompt(FIRST, seed=1)
        engine.add(tokens, 8, hints={"store": False})
        engine.run()
        engine.settle()
        assert engine.stats("stores")["stored"] == 0
        engine.add(tokens, 8, hints={"context": "trip"})
        engine.run()
        engine.settle()
        assert engine.stats("stores")["stored"] > 0
        found = engine.admin.get(f"/v1/contexts/{context_id('trip').hex()}").raise_for_status().json()
        assert [one["requests"] for one in found["items"]] == [1]
