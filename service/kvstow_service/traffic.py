"""`kvstow serve --replay`: a request trace as the traffic of the running service."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TextIO

from kvstow.control.engine import OffloadEngine
from kvstow.errors import ConfigError, KvstowError
from kvstow_service.fleet import Fleet
from kvstow_service.replay.driver import ReplayDriver, blocks_needed
from kvstow_service.replay.kv import LocalKV
from kvstow_service.replay.offload import EmbeddedOffload
from kvstow_service.replay.pace import ReplayOptions
from kvstow_service.replay.result import ReplayResult
from kvstow_service.replay.trace import TraceRequest, read_trace
from kvstow_service.settings import Settings

logger = logging.getLogger("kvstow.replay")

_FIRST_SLOT_SECONDS = 10.0  # after that the replay runs without a pool, as an inference engine would
_POLL_SECONDS = 0.02


class ReplayTraffic:
    """Replays a trace on a thread of its own, once the ranks are built and a slot is usable.

    `on_end` is called on that thread, with the exit status that the replay earned: 1 for wrong bytes, or when it
    could not run. It is not called after `stop`, which is idempotent and lets what is in flight finish.
    """

    def __init__(self, settings: Settings, requests: Sequence[TraceRequest], on_end: Callable[[int], None]) -> None:
        self._options = replay_options(settings)
        self._json = settings.log_format == "json"
        self._requests = requests
        self._on_end = on_end
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, engine: OffloadEngine, fleet: Fleet) -> None:
        self._thread = threading.Thread(target=self._run, args=(engine, fleet), name="kvstow-replay", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, engine: OffloadEngine, fleet: Fleet) -> None:
        status = 1
        try:
            result = self._replay(engine, fleet)
            if result is not None:
                print_result(result, sys.stdout, as_json=self._json)
                status = 0 if result.ok else 1
        except Exception as error:  # logged, and told by the exit status
            logger.error("the replay failed: %s", error, exc_info=not isinstance(error, KvstowError))
        if not self._stopping.is_set():
            self._on_end(status)

    def _replay(self, engine: OffloadEngine, fleet: Fleet) -> ReplayResult | None:
        ranks = fleet.ranks()
        if self._stopping.is_set():
            return None
        if ranks is None:
            logger.error("the replay does not run: not every rank could be built")
            return None
        self._wait_for_slots(engine)
        kv = LocalKV([rank.kv for rank in ranks])
        workers = [rank.worker for rank in ranks]
        kv_blocks = ranks[0].layout.num_blocks
        driver = ReplayDriver(EmbeddedOffload(engine), workers, kv, self._requests, self._options, kv_blocks=kv_blocks)
        logger.info("replaying %d requests", len(self._requests))
        return driver.run(self._stopping)

    def _wait_for_slots(self, engine: OffloadEngine) -> None:
        deadline = time.monotonic() + _FIRST_SLOT_SECONDS
        while not engine.readiness().usable_slots and time.monotonic() < deadline:
            if self._stopping.wait(_POLL_SECONDS):
                return


def read_requests(settings: Settings) -> list[TraceRequest]:
    """The requests to replay, none without a trace. Raises `InvalidRequestError` for a trace that cannot be
    read and `ConfigError` for one that does not fit the KV cache."""
    if settings.replay is None:
        return []
    requests = read_trace(str(settings.replay), limit=settings.replay_requests)
    needed = blocks_needed(requests, 1)
    if settings.kv_blocks is not None and settings.kv_blocks < needed:
        raise ConfigError("kv_blocks", settings.kv_blocks, f"{needed} or more, the blocks of the largest request")
    return requests


def kv_blocks(settings: Settings, requests: Sequence[TraceRequest]) -> int:
    """The size of each rank's KV cache. Without a replay nothing uses it."""
    return settings.kv_blocks or max(1, blocks_needed(requests, settings.replay_concurrency))


def replay_options(settings: Settings) -> ReplayOptions:
    return ReplayOptions(
        concurrency=settings.replay_concurrency,
        rate=settings.replay_rate,
        time_scale=settings.replay_time_scale,
        drain_seconds=settings.drain_deadline,
    )


def print_result(result: ReplayResult, out: TextIO, *, as_json: bool) -> None:
    """One JSON object, or a table."""
    if as_json:
        print(json.dumps(result.to_json()), file=out, flush=True)
        return
    from rich.console import Console

    from kvstow_service.replay.summary import print_rows, summary_rows

    print_rows(summary_rows(result), Console(file=out), title="Replay")
