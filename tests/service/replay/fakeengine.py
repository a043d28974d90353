"""An engine's process for tests of the launcher, which does what its name says.

It "finishes" a request for each one that it is given, and counts the request's hash ids as blocks.
"""

from __future__ import annotations

import os
import signal
import sys

from kvstow.errors import InsufficientMemoryError
from kvstow_service.replay.launcher import EngineSpec, ReplayEngine
from kvstow_service.replay.processes import Pipe
from kvstow_service.replay.result import EngineLife, Position, ReplayResult


def progress(spec: EngineSpec, finished: int, in_flight: tuple[int, ...], *, end: str = "") -> EngineLife:
    """`finished` counts from the first request that is not in flight."""
    blocks = sum(len(one.hash_ids) for one in spec.requests)
    result = ReplayResult(finished, blocks, first_blocks=7, seconds=1.0, ranks=spec.num_ranks, slots=100)
    return EngineLife(result, Position(in_flight, finished + len(in_flight)), sessions=1, end=end)


def run_fake_engine(pipe: Pipe, spec: EngineSpec) -> None:
    count = len(spec.requests)
    if spec.is_held:
        assert pipe.recv() is ReplayEngine.begin
    match spec.name:
        case "dies with 1 and 3 in flight" if count == 10:
            pipe.send(progress(spec, 3, (1, 3)))
            os.kill(os.getpid(), signal.SIGKILL)
        case "dies at once":
            print("dying", flush=True)
            sys.exit(3)
        case "cannot work":
            raise InsufficientMemoryError("1 TiB of KV cache do not fit")
        case "waits to be finished":
            pipe.send(progress(spec, 0, ()))
            assert pipe.recv() is ReplayEngine.finish
            pipe.send(progress(spec, 0, (), end="finished"))
            return
    pipe.send(progress(spec, count, (), end="finished"))
