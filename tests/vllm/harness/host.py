"""Where the run takes over what surrounds the two halves of the connector: devices, fences, clocks and the network."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

import pytest
from tests.doubles.fakes import FakeClock
from tests.service.connectors.vllm.slowservice import SlowService
from tests.vllm.harness.attachment import SteppedAttachment
from tests.vllm.harness.device import SimulatedDevice
from tests.vllm.harness.setup import BLOCK_TOKENS, VALUE_BYTES, Setup
from tests.vllm.harness.stream import ComputeStream
from tests.vllm.harness.worker import SteppedWorker

from kvstow.config import EngineConfig
from kvstow.control.engine import OffloadEngine
from kvstow.devices.base import Device
from kvstow.memory.hostpool import HostPool
from kvstow_service.connectors.engine_core.controlplane import AttachedControl
from kvstow_service.connectors.engine_core.loadpolicy import LoadPolicy
from kvstow_service.connectors.engine_core.schedulerside import SchedulerSide
from kvstow_service.connectors.vllm.rankdataplane import KVGeometry, build_plane
from kvstow_service.connectors.vllm.tensorhost import AttachedWorkerHost

CONNECTOR = "kvstow_service.connectors.vllm"
SHARED = "kvstow_service.connectors.engine_core"
_STEP_SECONDS = 0.02
_SLOT_BYTES = 2 * BLOCK_TOKENS * VALUE_BYTES  # in each of the models: groups of layers lie in the same memory


class Host:
    """Holds the engine and the ranks' workers that the connector makes, and does what agents and clocks would do."""

    def __init__(self, setup: Setup, random: Random, stream: ComputeStream, patch: pytest.MonkeyPatch) -> None:
        self.extra_config: dict[str, Any] = {
            "load_path": "layer" if setup.by_layer else "async",
            "cpu_bytes_to_use": setup.slots * _SLOT_BYTES * setup.ranks,
            "lazy_offload": setup.lazy,
            "lock": False,
            "pin_pause": 0,
        }
        self.engine: Any
        """An `OffloadEngine`, or what shows the pool of the `service`."""
        self._clock = FakeClock()
        self.workers: dict[int, SteppedWorker] = {}
        # copies can overtake each other
        for name in ("kvstow.copythread._STORES_AT_ONCE", "kvstow.dataplane._AT_ONCE"):
            patch.setattr(name, 1000)
        device = partial(
            SimulatedDevice,
            random=random,
            delay=setup.delay,
            gap=setup.gap,
            failure_rate=setup.failure_rate,
            bad_slots=setup.bad_slots,
            stream=stream,
        )
        patch.setattr(f"{CONNECTOR}.rankdataplane.CpuDevice", device)
        patch.setattr(f"{CONNECTOR}.tensorhost.fence_of", lambda kv_caches: stream.fence)
        patch.setattr(f"{SHARED}.schedulerhost.SchedulerSide", partial(SchedulerSide, clock=self._clock))
        patch.setattr(f"{CONNECTOR}.rankdataplane.DataPlane", self._make_worker)
        patch.setattr(f"{SHARED}.embeddedschedulerhost.OffloadEngine", self._make_engine)
        patch.setattr(f"{SHARED}.schedulerhost.SchedulerHost._step_blocks", setup.step_blocks)
        patch.setattr(f"{SHARED}.workerhost.RankAgent", NoThread)
        patch.setattr(f"{SHARED}.embeddedschedulerhost.EmbeddedAdmin", NoThread)
        if setup.by_layer:  # with so few blocks, most requests would go the other way after their first try
            choose = LoadPolicy.choose
            always = lambda policy, *args, had_no_room, **rest: choose(policy, *args, **rest)  # noqa: E731
            patch.setattr(LoadPolicy, "choose", always)
        self.service: SlowService
        self._attached: list[SteppedAttachment] = []
        if setup.attached:
            self._attach(setup, random, patch)

    def _attach(self, setup: Setup, random: Random, patch: pytest.MonkeyPatch) -> None:
        self.extra_config["attach"] = "unix:/none"
        config = EngineConfig(slot_bytes=_SLOT_BYTES, capacity_slots=setup.slots, num_ranks=setup.ranks)
        service = SlowService(config, setup.slots, clock=self._clock, delay=lambda: random.choice(setup.answers))
        self.service = service
        self.engine = self.service.facade

        def connected(*arguments: Any, **options: Any) -> AttachedControl:
            return self.service.connect(lambda: AttachedControl(*arguments, **options))

        attached = self._attached

        class SteppedWorkerHost(AttachedWorkerHost):
            def _make_plane(self, geometry: KVGeometry) -> Any:
                num_bytes = setup.slots * geometry.layout.slot_bytes
                plane = build_plane(self._process.rank, num_bytes, num_bytes, self._options, geometry)
                attached.append(SteppedAttachment(plane, service, lambda: random.random() < setup.refusal_rate))
                return attached[-1]

        patch.setattr(f"{CONNECTOR}.attachedschedulerhost.AttachedControl", connected)
        patch.setattr(f"{CONNECTOR}.tensorhost.AttachedWorkerHost", SteppedWorkerHost)

    def exchange_reports(self) -> None:
        """Let a moment pass; every rank reports, and does what is wanted of it."""
        self._clock.advance(_STEP_SECONDS)
        self.engine.tick()
        for attachment in self._attached:
            attachment.plane.wait_pinned()
            attachment.turn()
        if self._attached:
            return
        for worker in self.workers.values():
            worker.wait_pinned()  # or what it reports, new or grown, would be a matter of threads
            worker.apply(self.engine.report(worker.report()))

    def look_at_sessions(self) -> None:
        """Let the threads of the ranks' workers have a turn."""
        for attachment in self._attached:
            attachment.turn()

    def advance(self) -> None:
        """Let a tick of all devices pass."""
        for worker in self.workers.values():
            worker.advance()

    def _make_worker(self, rank: int, pool: HostPool, device: Device, **rest: Any) -> SteppedWorker:
        self.workers[rank] = SteppedWorker(rank, pool, device, **rest)
        return self.workers[rank]

    def _make_engine(self, config: EngineConfig) -> OffloadEngine:
        engine = self.engine = OffloadEngine(config, clock=self._clock)
        return engine


class NoThread:
    """Stands for an admin server, and for an agent: `exchange_reports` brings the reports."""

    address = None
    failure = ranks_failure = None

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def start(self) -> None: ...

    def stop(self) -> None: ...
