"""The worker's half on a host of TPUs: the KV cache of tpu-inference's model runner, and one data plane for all
devices of the process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import jax

from kvstow.dataplane import DataPlane
from kvstow.devices.jax import JaxDevice, JaxOptions, ShardedKV
from kvstow.errors import ConfigError
from kvstow.memory.hostpool import HostPool
from kvstow.memory.pinning import cpu_registrar
from kvstow.messages import LoadLaunch, StagedLoad, StepPlan
from kvstow_service.connectors.engine_core.vllmprocess import VLLMProcess
from kvstow_service.connectors.engine_core.workerhost import PoolWorkerHost
from kvstow_service.connectors.engine_core.workerside import RankDataPlane, rank_pool_config
from kvstow_service.connectors.tpu.support import TPUOptions

logger = logging.getLogger("kvstow.vllm")


class Runner(Protocol):
    """The part of tpu-inference's `TPUModelRunner` that is used. `kv_caches`: one array for each layer, or for each
    group of layers that share memory; each step replaces the list. `kv_cache_manager` frees and makes the arrays."""

    kv_caches: list[jax.Array]
    kv_cache_manager: Any


def has_cache(runner: Runner) -> bool:
    """Whether the runner has a KV cache now. It may have freed the cache."""
    return bool(runner.kv_caches) and not any(array.is_deleted() for array in jax.tree.leaves(runner.kv_caches))


class RunnerHost(PoolWorkerHost):
    """The worker's half of one host. The rank has no data plane while the runner has no KV cache: tpu-inference frees
    the cache and makes a new one when weights change, and calls no connector. The blocks of the old weights are dropped
    with the data plane. As a `KVCell`, this object leaves the arrays with the runner, whose next step takes them from
    there."""

    def __init__(self, options: TPUOptions, process: VLLMProcess, num_blocks: int) -> None:
        super().__init__(options, process)
        self._in_flight, self._num_blocks = options.bytes_in_flight, num_blocks
        self._device: JaxDevice | None = None
        self._thread = 0
        self._is_suspended = False

    def register(self, kv_cache: Runner) -> None:
        super().register(kv_cache)
        manager = kv_cache.kv_cache_manager
        delete, reinitialize = manager.delete_kv_cache, manager.reinitialize_kv_cache

        def suspend_and_delete(*arguments: Any, **named: Any) -> Any:
            self.suspend()
            return delete(*arguments, **named)

        def reinitialize_and_resume(*arguments: Any, **named: Any) -> Any:
            result = reinitialize(*arguments, **named)
            self.resume()
            return result

        manager.delete_kv_cache, manager.reinitialize_kv_cache = suspend_and_delete, reinitialize_and_resume

    def peek(self) -> Sequence[jax.Array]:
        arrays: Sequence[jax.Array] = self._kv_cache.kv_caches
        return arrays

    def take(self) -> Sequence[jax.Array]:
        return self.peek()

    def put(self, arrays: Sequence[jax.Array]) -> None:
        self._kv_cache.kv_caches = list(arrays)

    def suspend(self) -> None:
        self._is_suspended = True
        super().suspend()

    def resume(self) -> None:
        self._is_suspended = False
        super().resume()

    def begin_turn(self, launches: tuple[LoadLaunch, ...]) -> None:
        """Called between two steps of the runner, on their thread, which need not be the thread that registered it.
        Launches the loads that the step names. Never raises."""
        if self._kv_cache is None:
            return
        if not self._is_suspended and not has_cache(self._kv_cache):
            logger.warning("rank %d: the KV cache was deleted; its blocks in host memory go with it", self.side.rank)
            self.suspend()
        elif self._is_suspended and has_cache(self._kv_cache):
            self.resume()
        if self._device is not None and self._thread != threading.get_ident():
            self._thread = threading.get_ident()
            self._device.follow_host()
        self.side.plane.submit(StepPlan(launches=launches))

    def take_staged(self) -> tuple[StagedLoad, ...]:
        plane = self.side.plane
        return tuple(plane.take_staged()) if isinstance(plane, DataPlane) else ()

    def _read_geometry(self, kv_cache: Runner) -> ShardedKV:
        for number, array in enumerate(kv_cache.kv_caches):
            if not isinstance(array, jax.Array):
                raise ConfigError(f"KV cache {number}", type(array).__name__, "one array for each layer")
            if array.shape[0] != self._num_blocks:
                allowed = f"{self._num_blocks}, as the scheduler has"
                raise ConfigError(f"KV cache {number}: blocks", array.shape[0], allowed)
        return ShardedKV.of(kv_cache.kv_caches)

    def _make_plane(self, geometry: ShardedKV) -> RankDataPlane:
        pool_bytes = self._options.bytes_of_rank(self._process.num_ranks)
        config = rank_pool_config(self._options, geometry.layout.slot_bytes, pool_bytes, self._max_bytes)
        with ExitStack() as undo:
            pool = HostPool(config, cpu_registrar(config))
            undo.callback(pool.close)
            device = JaxDevice(pool, self, JaxOptions(bytes_in_flight=self._in_flight))
            undo.callback(device.close)
            plane = DataPlane(self._process.rank, pool, device, launcher=device)
            undo.pop_all()
        self._device, self._thread = device, threading.get_ident()
        return plane
