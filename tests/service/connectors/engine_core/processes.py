"""A vLLM process with one rank, for tests."""

from __future__ import annotations

from typing import Any

from kvstow_service.connectors.engine_core.vllmprocess import VLLMProcess


def make_process(**changes: Any) -> VLLMProcess:
    process: dict[str, Any] = {
        "engine_id": "engine",
        "model": "model",
        "rank": 0,
        "num_ranks": 1,
        "ranks_per_node": 1,
        "data_parallel_index": 0,
        "context_parallel": 1,
        "max_batched_tokens": 2048,
        "max_requests": 8,
        "frees_late": False,
        "recomputes": True,
    }
    return VLLMProcess(**(process | changes))
