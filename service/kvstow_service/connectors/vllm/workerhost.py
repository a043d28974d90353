"""The worker's half as a vLLM process hosts it: a rank's data plane and its agent."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from kvstow.dataplane import DataPlane
from kvstow.errors import ConfigError, InsufficientMemoryError
from kvstow.messageorder import ReportSequence
from kvstow.messages import DesiredState, RankReport
from kvstow_service.agent import RankAgent
from kvstow_service.connectors.vllm.kvgeometry import kv_geometry
from kvstow_service.connectors.vllm.metadata import RankHello
from kvstow_service.connectors.vllm.options import ConnectorOptions
from kvstow_service.connectors.vllm.rankdataplane import (
    NoDataPlane,
    RankDataPlane,
    build_plane,
    fence_of,
    require_memory,
    wait_until_pinned,
)
from kvstow_service.connectors.vllm.vllmprocess import VLLMProcess, this_node
from kvstow_service.connectors.vllm.workerside import WorkerSide
from kvstow_service.rendezvous import Rendezvous

_REPORT_SECONDS = 1.5  # the agent reports every second

logger = logging.getLogger("kvstow.vllm")


class WorkerHost:
    """One rank's worker side and agent. Used by the worker's main thread.

    At the start it refuses what the user has to change. Any other error, then or later, leaves a rank that reports it,
    and vLLM serves without offload. Until the KV cache is registered, the rank has no data plane.
    """

    def __init__(self, options: ConnectorOptions, process: VLLMProcess, num_blocks: int) -> None:
        """Raises `InsufficientMemoryError`; takes no memory yet."""
        if not process.recomputes and process.rank == 0:
            logger.warning(
                "kv_load_failure_policy is 'fail': a request whose load fails ends with an error; with 'recompute' "
                "it is computed instead"
            )
        self._options, self._process, self._num_blocks = options, process, num_blocks
        self._node_bytes = require_memory(options, process)
        self._max_bytes = options.reserved_bytes_of_rank(self._node_bytes)
        self._rendezvous = Rendezvous(process.engine_id)
        self._sender = ReportSequence()
        self._kv_caches: Mapping[str, Any] = {}
        self.side = WorkerSide(process.rank, NoDataPlane(process.rank, 1), loads_wait=not process.frees_late)
        self.hello: RankHello | None = None
        """None until the KV cache is registered."""
        self.agent: RankAgent | None = None
        self._reports_sent = 0  # that the agent had brought to the admin server
        self._report_at = 0.0

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        """Build the data plane around vLLM's KV cache, and begin to pin. Returns before that is done, unless the user
        wants to wait."""
        self._kv_caches = kv_caches
        plane, slot_bytes = self._build(refusals=(ConfigError, InsufficientMemoryError))
        max_slots = self._max_bytes // slot_bytes
        self.hello = RankHello(self._process.rank, slot_bytes, max_slots, this_node(), self._node_bytes)
        self.side.fence = fence_of(kv_caches)
        self.side.replace_plane(plane)
        self.agent = RankAgent(self._process.rank, self.side, self._rendezvous)
        self.agent.start()
        self._start(plane)

    def report_without_agent(self) -> RankReport | None:
        """What the agent would report, once a second while it reaches no server: serving depends on none."""
        now = time.monotonic()
        if self.agent is None or now < self._report_at:
            return None
        self._report_at = now + _REPORT_SECONDS
        before, self._reports_sent = self._reports_sent, self.agent.stats.sent
        return self.side.report() if self._reports_sent == before else None

    def follow(self, desired: Mapping[int, DesiredState]) -> None:
        """Apply the answer to a report that went with a step, as the agent does with its own."""
        own = desired.get(self._process.rank)
        if own is None or self.hello is None:
            return
        try:
            self.side.apply(own)
        except Exception:  # vLLM's step goes on; the next report is answered again
            logger.exception("rank %d cannot apply the desired state", self._process.rank)

    def suspend(self) -> None:
        """vLLM is about to take its KV cache away."""
        if self.hello is not None:
            slot_bytes = self.hello.slot_bytes
            self._restart(lambda: NoDataPlane(self._process.rank, slot_bytes, sender=self._sender))

    def resume(self) -> None:
        """The KV cache is back, with nothing in it: the rank restarts."""
        if self.hello is not None and (plane := self._restart(lambda: self._build(refusals=())[0])) is not None:
            self._start(plane)

    def close(self) -> None:
        """Idempotent; vLLM does not always call it."""
        if self.agent is not None:
            self.agent.stop()
        self.side.plane.close()

    def _restart(self, make: Callable[[], RankDataPlane]) -> RankDataPlane | None:
        """Replace the data plane by the one that `make` returns. None if the present one does not end: then the rank
        stays stopped, as its engine waits for a copy that may still write."""
        if not self.side.close_plane():
            logger.error("rank %d: its data plane does not end; vLLM serves without offload", self._process.rank)
            return None
        plane = make()
        self.side.replace_plane(plane)
        return plane

    def _build(self, refusals: tuple[type[Exception], ...]) -> tuple[RankDataPlane, int]:
        """(the data plane, or its stand-in; the size of its slots). Raises the `refusals`."""
        process, slot_bytes = self._process, self.hello.slot_bytes if self.hello is not None else 1
        try:
            geometry = kv_geometry(self._kv_caches, self._num_blocks)
            slot_bytes = geometry.layout.slot_bytes
            pool_bytes = self._options.bytes_of_rank(process.num_ranks)
            plane = build_plane(process.rank, pool_bytes, self._max_bytes, self._options, geometry, self._sender)
        except refusals:
            raise
        except Exception as error:
            logger.exception("rank %d has no data plane; vLLM serves without offload", process.rank)
            reason = getattr(error, "code", "internal")
            return NoDataPlane(process.rank, slot_bytes, reason, repr(error), self._sender), slot_bytes
        return plane, slot_bytes

    def _start(self, plane: RankDataPlane) -> None:
        waits = not self._options.async_register_cache
        plane.start(at_ease=not waits)  # the rest of vLLM's start took 0.3 to 1.5 s longer beside the full pace
        if waits and isinstance(plane, DataPlane):
            wait_until_pinned(plane.pool)
