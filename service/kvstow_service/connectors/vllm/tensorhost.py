"""The worker's half as a vLLM process hosts it: a rank's data plane, either with an agent or attached to the node
service."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from kvstow.attach.hello import RankSession
from kvstow.attach.identity import RegionIdentity
from kvstow.attach.worker import AttachedWorker
from kvstow.devices.base import Fence
from kvstow.memory.mappedpool import MappedPool
from kvstow.memory.pinning import PopulateOnly, Registrar, pace_of
from kvstow_service.connectors.engine_core.metadata import KVStowMetadata, LoadedFiles, RankHello, RankUpdate
from kvstow_service.connectors.engine_core.options import ConnectorOptions
from kvstow_service.connectors.engine_core.vllmprocess import VLLMProcess, this_node
from kvstow_service.connectors.engine_core.workerhost import PoolWorkerHost, WorkerHost
from kvstow_service.connectors.engine_core.workerside import RankDataPlane
from kvstow_service.connectors.vllm.rankdataplane import (
    KVGeometry,
    build_plane,
    fence_of,
    kv_geometry,
    plane_around,
)

_REPORT_SECONDS = 0.5
"""How many seconds pass between two reports of more memory."""


class _TensorHost(WorkerHost):
    def __init__(self, options: ConnectorOptions, process: VLLMProcess, num_blocks: int) -> None:
        super().__init__(options, process)
        self._num_blocks = num_blocks
        self._regions: tuple[RegionIdentity, ...] = ()

    def _read_geometry(self, kv_cache: Mapping[str, Any]) -> KVGeometry:
        geometry = kv_geometry(kv_cache, self._num_blocks)
        pairs = zip(geometry.layout.regions, geometry.contents, strict=True)
        self.side.waits.part_of = geometry.part_of
        self._regions = tuple([RegionIdentity(region.name, region.page_bytes, content) for region, content in pairs])
        return geometry

    def _fence_of(self, kv_cache: Mapping[str, Any]) -> Callable[[], Fence | None]:
        return fence_of(kv_cache)


class EmbeddedWorkerHost(_TensorHost, PoolWorkerHost):
    def _make_plane(self, geometry: KVGeometry) -> RankDataPlane:
        pool_bytes = self._options.bytes_of_rank(self._process.num_ranks)
        return build_plane(self._process.rank, pool_bytes, self._max_bytes, self._options, geometry)

    def _make_hello(self, slot_bytes: int) -> RankHello:
        return replace(super()._make_hello(slot_bytes), regions=self._regions)


def _urgent_part(session: RankSession) -> tuple[int, bool, int]:
    return session.number, session.slots > 0, session.hold


class AttachedWorkerHost(_TensorHost):
    def __init__(
        self, options: ConnectorOptions, process: VLLMProcess, num_blocks: int, loaded: LoadedFiles | None = None
    ) -> None:
        """`loaded`: see `RankHello`."""
        super().__init__(options, process, num_blocks)
        self._loaded = loaded
        self._reported = RankSession()
        self._report_at = 0.0

    def follow(self, metadata: KVStowMetadata) -> None:
        plane = self.side.plane
        if isinstance(plane, AttachedWorker):
            plane.join(metadata.ticket)
            plane.keep_open(metadata.hold)

    def news(self) -> RankUpdate:
        """The session of this rank, if it has changed. A new session, its first memory and its hold are reported at
        once, and more memory twice a second."""
        plane = self.side.plane
        session = plane.session if isinstance(plane, AttachedWorker) else RankSession()
        if session == self._reported:
            return RankUpdate()
        now = time.monotonic()
        is_new = _urgent_part(session) != _urgent_part(self._reported)
        if not is_new and now < self._report_at:
            return RankUpdate()
        self._reported, self._report_at = session, now + _REPORT_SECONDS
        return RankUpdate(session=session)

    def _make_plane(self, geometry: KVGeometry) -> RankDataPlane:
        slot_bytes, options, process = geometry.layout.slot_bytes, self._options, self._process
        config = options.pool_config(slot_bytes, slot_bytes, slot_bytes)
        numa: list[int | None] = []

        def make_pool(registrar: Registrar, numa_node: int | None) -> MappedPool:
            numa.append(numa_node)
            return MappedPool(slot_bytes, registrar if config.lock else PopulateOnly(), pace=partial(pace_of, config))

        plane = plane_around(process.rank, geometry, config, options, make_pool)
        assert isinstance(plane.pool, MappedPool)
        assert options.attach is not None
        return AttachedWorker(
            options.attach,
            plane,
            plane.pool,
            engine=process.engine_id,
            replicated=process.replicated,
            numa_node=numa[0],
            may_refuse=process.takes_steps_back,
        )

    def _make_hello(self, slot_bytes: int) -> RankHello:
        process, regions = self._process, self._regions
        return RankHello(
            process.rank, slot_bytes, 0, this_node(), 0, regions, loaded=self._loaded, is_alone=process.is_alone
        )
