"""A replay on the CUDA device, by the calls of `kvstow replay --device cuda`; needs neither FastAPI nor pydantic."""

from __future__ import annotations

from threading import Event

import pytest

from kvstow.config import EngineConfig
from kvstow_service.replay.driver import ReplayDriver, blocks_needed
from kvstow_service.replay.generate import TraceShape, generate_trace
from kvstow_service.replay.offload import EmbeddedOffload
from kvstow_service.replay.pace import ReplayOptions
from kvstow_service.replay.place import Place
from kvstow_service.replay.session import local_session
from kvstow_service.replay.shapes import SHAPES


@pytest.mark.parametrize("name", SHAPES)
def test_every_loaded_byte_is_right(name: str) -> None:
    shape, options = SHAPES[name], ReplayOptions(concurrency=3)
    requests = list(generate_trace(TraceShape(sessions=4, turns=3, shared_prompts=1)))
    blocks = blocks_needed(requests, options.concurrency)
    config = EngineConfig(slot_bytes=shape.slot_bytes, capacity_slots=64, num_ranks=2)
    with local_session(config, kv_blocks=blocks, stop=Event(), place=Place("cuda", shape)) as session:
        driver = ReplayDriver(
            EmbeddedOffload(session.engine), session.workers, session.kv, requests, options, kv_blocks=blocks
        )
        result = driver.run(Event())
    assert (result.mismatches, result.failed_loads, result.failed_stores, result.abandoned) == (0, 0, 0, 0)
    assert result.verified_bytes == result.loaded_bytes > 0
