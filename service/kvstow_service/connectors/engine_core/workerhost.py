"""The worker's half as an engine's process hosts it: a rank's data plane, and its messages to and from the
scheduler."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from kvstow.dataplane import DataPlane
from kvstow.devices.base import Fence
from kvstow.errors import ConfigError, InsufficientMemoryError
from kvstow_service.admin.agent import RankAgent
from kvstow_service.admin.rendezvous import Rendezvous
from kvstow_service.connectors.engine_core.metadata import KVStowMetadata, RankHello, RankUpdate
from kvstow_service.connectors.engine_core.options import ConnectorOptions
from kvstow_service.connectors.engine_core.vllmprocess import VLLMProcess, this_node
from kvstow_service.connectors.engine_core.workerside import (
    NoDataPlane,
    RankDataPlane,
    WorkerSide,
    require_memory,
    wait_until_pinned,
)

logger = logging.getLogger("kvstow.vllm")


class WorkerHost(ABC):
    """One rank's worker side. Used by the worker's main thread.

    At the start, it refuses settings that the user has to change. After any other error, then or later, the rank
    reports the error, and vLLM serves without offload. The rank has no data plane until the KV cache is registered.
    """

    def __init__(self, options: ConnectorOptions, process: VLLMProcess) -> None:
        if not process.recomputes and process.rank == 0:
            logger.warning(
                "kv_load_failure_policy is 'fail': a request whose load fails ends with an error; with 'recompute' "
                "it is computed instead"
            )
        self._options, self._process = options, process
        self._kv_cache: Any = None
        self.side = WorkerSide(
            process.rank,
            NoDataPlane(process.rank, 1),
            loads_wait=not process.frees_late,
            takes_back=process.takes_steps_back,
        )
        self.hello: RankHello | None = None
        """The rank's hello; None until the KV cache is registered."""

    # What hosts differ in.

    @abstractmethod
    def _read_geometry(self, kv_cache: Any) -> Any:
        """Find out where a block's bytes lie in the engine's KV cache. The result has a `layout`, which is a
        `KVLayout`. Raises `ConfigError`."""

    def _fence_of(self, kv_cache: Any) -> Callable[[], Fence | None]:
        """Returns a function that makes a fence for the steps launched so far, or None if copies need no fence."""
        return lambda: None

    @abstractmethod
    def _make_plane(self, geometry: Any) -> RankDataPlane:
        """Make the data plane, which pins nothing yet. If it raises, it leaves nothing behind."""

    @abstractmethod
    def _make_hello(self, slot_bytes: int) -> RankHello: ...

    def _start(self, plane: RankDataPlane) -> None:
        plane.start(at_ease=True)  # at full pace, the rest of vLLM's start took 0.3 to 1.5 s longer

    @abstractmethod
    def follow(self, metadata: KVStowMetadata) -> None:
        """Handle the parts of a step's metadata other than its plan."""

    @abstractmethod
    def news(self) -> RankUpdate:
        """The update for the scheduler's half after a step, without the ops that have ended on this rank."""

    def register(self, kv_cache: Any) -> None:
        """Build the data plane around the engine's KV cache, and begin to pin. Returns before pinning is done, unless
        the user wants to wait."""
        self._kv_cache = kv_cache
        plane, slot_bytes = self._build(refusals=(ConfigError, InsufficientMemoryError))
        self.hello = self._make_hello(slot_bytes)
        self.side.fence = self._fence_of(kv_cache)
        self.side.replace_plane(plane)
        self._start(plane)

    def suspend(self) -> None:
        """Drop the data plane, because vLLM is about to take its KV cache away."""
        if self.hello is not None:
            slot_bytes = self.hello.slot_bytes
            self._restart(lambda: NoDataPlane(self._process.rank, slot_bytes))

    def resume(self) -> None:
        """Restart the rank, because the KV cache is back, with nothing in it."""
        if self.hello is not None and (plane := self._restart(lambda: self._build(refusals=())[0])) is not None:
            self._start(plane)

    def close(self) -> None:
        """Idempotent; vLLM does not always call it."""
        self.side.plane.close()

    def _restart(self, make: Callable[[], RankDataPlane]) -> RankDataPlane | None:
        """Replace the data plane with the one that `make` returns. Returns None if the present one does not end. The
        rank then stays stopped, because its engine waits for a copy that may still write."""
        if not self.side.close_plane():
            logger.error("rank %d: its data plane does not end; vLLM serves without offload", self._process.rank)
            return None
        plane = make()
        self.side.replace_plane(plane)
        return plane

    def _build(self, refusals: tuple[type[Exception], ...]) -> tuple[RankDataPlane, int]:
        """Build the data plane, or what replaces it after an error. Returns it, and the size of its slots in bytes.
        Raises the `refusals`."""
        process, slot_bytes = self._process, self.hello.slot_bytes if self.hello is not None else 1
        try:
            geometry = self._read_geometry(self._kv_cache)
            slot_bytes = geometry.layout.slot_bytes
            plane = self._make_plane(geometry)
        except refusals:
            raise
        except Exception as error:
            logger.exception("rank %d has no data plane; vLLM serves without offload", process.rank)
            reason = getattr(error, "code", "internal")
            return NoDataPlane(process.rank, slot_bytes, reason, repr(error)), slot_bytes
        return plane, slot_bytes


class PoolWorkerHost(WorkerHost):
    """A worker with a pool of its own and an agent. Raises `InsufficientMemoryError` if the pools of its node do not
    fit."""

    def __init__(self, options: ConnectorOptions, process: VLLMProcess) -> None:
        super().__init__(options, process)
        self._node_bytes = require_memory(options, process)
        self._max_bytes = options.reserved_bytes_of_rank(self._node_bytes)
        self._rendezvous = Rendezvous(process.engine_id)
        self.agent: RankAgent | None = None

    def follow(self, metadata: KVStowMetadata) -> None:
        if metadata.admin is not None and self.agent is not None:
            self.agent.offer(metadata.admin)

    def news(self) -> RankUpdate:
        return RankUpdate()  # the agent reports, also while the engine makes no steps

    def close(self) -> None:
        if self.agent is not None:
            self.agent.stop()
        super().close()

    def _make_hello(self, slot_bytes: int) -> RankHello:
        process, max_slots = self._process, self._max_bytes // slot_bytes
        return RankHello(
            process.rank,
            slot_bytes,
            max_slots,
            this_node(),
            self._node_bytes,
            num_ranks=process.num_ranks,
            is_alone=process.is_alone,
        )

    def _start(self, plane: RankDataPlane) -> None:
        if self.agent is None:
            self.agent = RankAgent(self._process.rank, self.side, self._rendezvous)
            self.agent.start()
        if self._options.async_register_cache:
            super()._start(plane)
            return
        plane.start()
        if isinstance(plane, DataPlane):
            wait_until_pinned(plane.pool)
