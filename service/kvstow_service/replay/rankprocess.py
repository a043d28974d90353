"""One rank of an attached replay: a process with a KV cache and an attached worker.

`python -m kvstow_service.replay.rankprocess FD`, started by `kvstow_service.replay.remoteranks`.
"""

from __future__ import annotations

import logging
import sys
import threading
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from typing import Any

from kvstow.attach.worker import AttachedWorker
from kvstow.dataplane import DataPlane
from kvstow.devices.cpu import CpuDevice
from kvstow.errors import KvstowError
from kvstow.memory.mappedpool import MappedPool
from kvstow.memory.pinning import PopulateOnly
from kvstow.messages import StepPlan
from kvstow_service.replay.kv import HostKV
from kvstow_service.replay.remoteranks import (
    Checked,
    CheckRank,
    Completed,
    Failed,
    Join,
    RankSpec,
    Ready,
    Scrub,
    StopRank,
    Submit,
    Usable,
    Write,
    parent_pipe,
)

_WAIT_SECONDS = 0.05  # the longest that news other than completions take


class Rank:
    """Does what the engine says on the main thread. Another thread tells the engine what is complete."""

    def __init__(self, pipe: Connection[Any, Any], spec: RankSpec, running: ExitStack) -> None:
        self._pipe, self._kv = pipe, HostKV.allocate(spec.rank, spec.layout)
        self._sending = threading.Lock()
        self._stop = threading.Event()
        # The service's memory is shared: mlock has no business there.
        self._pool = MappedPool(spec.layout.slot_bytes, PopulateOnly())
        running.callback(self._pool.close)
        device = CpuDevice(self._pool, spec.layout, self._kv.regions)
        running.callback(device.close)
        self._plane = DataPlane(spec.rank, self._pool, device)
        running.pop_all()  # they are the data plane's
        self._worker = AttachedWorker(spec.socket, self._plane, self._pool, engine=spec.engine)
        running.callback(self._worker.close)
        self._reporter = threading.Thread(target=self._report, name="kvstow-report", daemon=True)

    def run(self) -> None:
        self._worker.start()
        self._send(Ready())
        self._reporter.start()
        try:
            while self._do(self._pipe.recv()):
                pass
        finally:
            self._stop.set()
            self._reporter.join()

    def _do(self, message: object) -> bool:
        """Obey one message; False for the last one."""
        match message:
            case Join(ticket):
                self._worker.join(ticket)
            case Write(keys, blocks):
                self._kv.write(keys, blocks)
            case Submit(ops):
                self._worker.submit(StepPlan(ops))
            case CheckRank(keys, blocks):
                self._send(Checked(self._kv.check(keys, blocks)))
            case Scrub(blocks):
                self._kv.scrub(blocks)
            case StopRank():
                logging.disable(logging.WARNING)  # the other ranks leave, too
                return False
        return True

    def _report(self) -> None:
        usable = 0
        with suppress(OSError):  # the engine has gone: the main thread sees it, too
            while not self._stop.is_set():
                self._plane.wait_completions(_WAIT_SECONDS)
                completions = self._worker.take_completions()
                if completions:
                    self._send(Completed(self._plane.boot_id, completions))
                if usable != self._pool.pinned_slots:
                    usable = self._pool.pinned_slots
                    self._send(Usable(usable))

    def _send(self, message: object) -> None:
        with self._sending:
            self._pipe.send(message)


def main() -> int:
    pipe = parent_pipe()
    spec: RankSpec = pipe.recv()
    name = f"{spec.engine}, rank {spec.rank}"
    logging.basicConfig(level=logging.WARNING, format=f"{name}: %(message)s", stream=sys.stderr)
    try:
        with ExitStack() as running, suppress(EOFError, OSError):  # the engine has gone
            Rank(pipe, spec, running).run()
    except KvstowError as error:
        with suppress(OSError):
            pipe.send(Failed(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
