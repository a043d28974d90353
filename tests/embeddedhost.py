"""A process that embeds an engine, as an inference engine does: ranks on the CPU, an admin server, a replayed trace.

`python -m tests.embeddedhost TRACE` prints the server's address on standard error, and ends at SIGTERM.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.embeddedreplay import ReplaySession, build_ranks

from kvstow.bytesize import parse_size
from kvstow.config import EngineConfig, PoolConfig
from kvstow.control.engine import OffloadEngine
from kvstow_service.admin.adminhost import AdminOptions
from kvstow_service.admin.agent import RankAgent
from kvstow_service.admin.embedded import EmbeddedAdmin
from kvstow_service.admin.rendezvous import Rendezvous
from kvstow_service.process.logwriter import configure_logs
from kvstow_service.process.stop import StopRequests
from kvstow_service.replay.driver import blocks_needed
from kvstow_service.replay.trace import BLOCK_TOKENS, ReplayOptions, read_trace


def run(arguments: argparse.Namespace, runtime: str) -> None:
    """Serve and replay until a signal."""
    slot_bytes, pool_bytes = parse_size(arguments.slot_size), parse_size(arguments.pool_size)
    pool = PoolConfig(slot_bytes, pool_bytes, pause=0.0)
    requests, options = read_trace(arguments.trace), ReplayOptions(concurrency=4, rate=arguments.rate)
    environ = {"XDG_RUNTIME_DIR": runtime}
    with ExitStack() as running:
        stops = running.enter_context(StopRequests())
        engine = OffloadEngine(
            EngineConfig(slot_bytes, pool_bytes // slot_bytes, num_ranks=arguments.ranks, block_tokens=BLOCK_TOKENS)
        )
        running.callback(engine.close)
        admin = EmbeddedAdmin(
            engine,
            AdminOptions(port=0),
            identity="embeddedhost",
            mode="vllm",
            max_capacity_slots=pool.max_slots,
            head_start=0.0,
            environ=environ,
        )
        admin.start()
        running.callback(admin.stop)
        ranks = build_ranks(arguments.ranks, pool, kv_blocks := blocks_needed(requests, options.concurrency))
        for number, rank in enumerate(ranks):
            running.callback(rank.worker.close)
            agent = RankAgent(number, rank.worker, Rendezvous("embeddedhost", environ))
            agent.start()
            running.callback(agent.stop)
            rank.worker.start()
        driver = ReplaySession(engine, ranks).driver(requests, options, kv_blocks=kv_blocks)
        result = driver.run(stops.requested)
        assert result.ok, result
        stops.wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("trace", type=str)
    parser.add_argument("--slot-size", default="16KiB")
    parser.add_argument("--pool-size", default="8MiB")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rate", type=float)
    configure_logs("text", "info")
    with TemporaryDirectory() as runtime:
        run(parser.parse_args(), str(Path(runtime)))


if __name__ == "__main__":
    main()
