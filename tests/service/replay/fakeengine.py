"""An engine's process for tests of the launcher, which does what its name says.

Run as `python -m tests.service.replay.fakeengine FD`. It "finishes" a request for each one that it is given, and counts
the request's hash ids as blocks.
"""

from __future__ import annotations

import os
import signal
import sys

from kvstow.errors import InsufficientMemoryError
from kvstow_service.replay.driver import Position
from kvstow_service.replay.launcher import Begin, EngineSpec, Finish, Progress
from kvstow_service.replay.remoteranks import Failed, parent_pipe
from kvstow_service.replay.result import Tally


def progress(spec: EngineSpec, finished: int, in_flight: tuple[int, ...], *, is_last: bool) -> Progress:
    """`finished` counts from the first request that is not in flight."""
    tally = Tally(requests=finished, blocks=sum(len(one.hash_ids) for one in spec.requests), first_blocks=7)
    position = Position(in_flight, finished + len(in_flight))
    return Progress(tally, position, 1.0, 100, 1, 0.0, None, 0, is_last)


def main() -> None:
    pipe = parent_pipe()
    spec: EngineSpec = pipe.recv()
    count = len(spec.requests)
    if spec.is_held:
        assert isinstance(pipe.recv(), Begin)
    match spec.name:
        case "dies with 1 and 3 in flight" if count == 10:
            pipe.send(progress(spec, 3, (1, 3), is_last=False))
            os.kill(os.getpid(), signal.SIGKILL)
        case "dies at once":
            print("dying", flush=True)
            sys.exit(3)
        case "cannot work":
            pipe.send(Failed(InsufficientMemoryError("1 TiB of KV cache do not fit")))
            sys.exit(1)
        case "waits to be finished":
            pipe.send(progress(spec, 0, (), is_last=False))
            assert isinstance(pipe.recv(), Finish)
            pipe.send(progress(spec, 0, (), is_last=True))
            sys.exit(0)
    pipe.send(progress(spec, count, (), is_last=True))


if __name__ == "__main__":
    main()
