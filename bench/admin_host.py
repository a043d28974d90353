"""The process whose admin server is measured. It has a full pool, its ranks' agents, and traffic on a separate thread.

`python -m bench.admin_host SLOTS RANKS` prints `{"port": n}`. Then it obeys JSON commands, one on each line. `traffic`
is `idle`, `steps`, or `replay` with `rate`, which is requests per second, or null for as many as possible. The command
ends the traffic before it, whose figures are the answer. The process ends with its input.
"""

from __future__ import annotations

import gc
import json
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.embeddedreplay import EmbeddedOffload, LocalRanks, replay_driver

from bench.hashes import Hashes
from bench.kvstow_subject import EngineSubject
from bench.subject import CHAIN_BLOCKS, STORE_BLOCKS
from kvstow_api.app import create_app
from kvstow_api.directory import EmbeddedDirectory
from kvstow_api.host import ApiHost
from kvstow_service.admin.adminhost import Ticker
from kvstow_service.admin.agent import AdminAddress, RankAgent
from kvstow_service.admin.server import AdminServer
from kvstow_service.admin.sockets import AdminSockets, TcpAddress
from kvstow_service.replay.driver import blocks_needed
from kvstow_service.replay.trace import ReplayOptions, TraceShape, generate_trace

_AGENT_TOKEN = "bench"
ADMIN_TOKEN = "of-the-benchmark"
_STEP_SECONDS = 0.02  # a step of the inference engine, which waits for the GPU in that time


class Host:
    """The engine, the server and the agents of one process, connected as in an inference engine."""

    def __init__(self, slots: int, ranks: int, running: ExitStack) -> None:
        self.subject = EngineSubject(slots, ranks=ranks)
        self.hashes = Hashes(2 * slots)
        self.slots = slots
        self.trace = generate_trace(TraceShape(sessions=500))
        for start in range(0, slots, STORE_BLOCKS):
            self.subject.store(self.subject.keys(self.hashes.run(start, min(STORE_BLOCKS, slots - start))))
        engine = self.subject.engine
        listeners = AdminSockets(TcpAddress.resolve("127.0.0.1", 0))
        running.callback(listeners.close)
        folder = Path(running.enter_context(TemporaryDirectory()))
        tokens = folder / "token"
        tokens.touch(0o600)
        tokens.write_text(ADMIN_TOKEN)
        context = ApiHost(
            directory=EmbeddedDirectory(engine, slots),
            version="bench",
            mode="bench",
            agent_token=_AGENT_TOKEN,
            token_file=tokens,
        )
        server = AdminServer(create_app(context), listeners.sockets, lambda reason: print(reason, file=sys.stderr))
        server.start()
        running.callback(server.stop)
        ticker = Ticker(engine.tick)
        ticker.start()
        running.callback(ticker.stop)
        for rank, worker in enumerate(self.subject.workers):
            agent = RankAgent(rank, worker, find=lambda: None)
            agent.offer(AdminAddress(listeners.url, _AGENT_TOKEN))
            agent.start()
            running.callback(agent.stop)
        self.port = listeners.port
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._figures: dict[str, Any] = {}

    def switch(self, traffic: str, rate: float | None) -> dict[str, Any]:
        """End the present traffic, and start another. Returns the figures of the former."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._stop, self._thread, figures = threading.Event(), None, self._figures
        self._figures = {}
        if traffic != "idle":
            work = self._step if traffic == "steps" else lambda: self._replay(rate)
            self._thread = threading.Thread(target=work, name="traffic", daemon=True)
            self._thread.start()
        return figures

    def _replay(self, rate: float | None) -> None:
        """Run the driver of `kvstow replay` without bytes, again and again. Contents differ each time, so stores
        evict."""
        subject = self.subject
        options = ReplayOptions(concurrency=8, rate=rate)
        kv_blocks = blocks_needed(self.trace, options.concurrency)
        done = first = 0
        started = time.perf_counter()
        while not self._stop.is_set():
            requests = [one._replace(hash_ids=tuple([first + block for block in one.hash_ids])) for one in self.trace]
            first += 1 << 32
            offload = EmbeddedOffload(subject.engine, subject.workers)
            driver = replay_driver(offload, LocalRanks(subject.workers), requests, options, kv_blocks=kv_blocks)
            done += driver.run(self._stop).requests
        self._figures = {"requests_per_second": done / (time.perf_counter() - started)}

    def _step(self) -> None:
        """Make the steps of a busy scheduler. Each waits for the GPU, looks up and leases a long prefix, and stores 128
        blocks in place of 128 others."""
        subject, new = self.subject, self.slots
        calls, steps = [], []
        while not self._stop.is_set():
            chain = subject.keys(self.hashes.run(self.slots // 2 // CHAIN_BLOCKS * CHAIN_BLOCKS, CHAIN_BLOCKS))
            fresh = subject.keys(self.hashes.run(new, STORE_BLOCKS))
            new = self.slots + (new + STORE_BLOCKS) % (self.slots - STORE_BLOCKS)
            began = time.perf_counter()
            time.sleep(_STEP_SECONDS)
            called = time.perf_counter()
            subject.use(chain)
            subject.store(fresh)
            ended = time.perf_counter()
            calls.append(ended - called)
            steps.append(ended - began)
        self._figures = {"calls": calls, "steps": steps}


def main(slots: int, ranks: int) -> None:
    gc.freeze()  # what was imported, as `kvstow serve` and vLLM do
    with ExitStack() as running:
        host = Host(slots, ranks, running)
        print(json.dumps({"port": host.port}), flush=True)
        for line in sys.stdin:
            command = json.loads(line)
            print(json.dumps(host.switch(command["traffic"], command.get("rate"))), flush=True)
        host.switch("idle", None)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
