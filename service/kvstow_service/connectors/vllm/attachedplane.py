"""The data plane of a rank that uses the node service's memory.

Importing this module imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from kvstow.attach.hello import SessionTicket
from kvstow.attach.worker import AttachedWorker
from kvstow.dataplane import DataPlane
from kvstow.devices.base import Fence, LayeredLoad
from kvstow.layeredloads import LayeredLoads
from kvstow.memory.mappedpool import MappedPool
from kvstow.memory.pinning import PopulateOnly, Registrar, pace_of
from kvstow.messageorder import ReportSequence
from kvstow.messages import Completion, DesiredState, Op, RankReport, StepPlan
from kvstow_service.connectors.engine_core.options import ConnectorOptions
from kvstow_service.connectors.engine_core.workerside import RankSession
from kvstow_service.connectors.vllm.kvgeometry import KVGeometry
from kvstow_service.connectors.vllm.rankdataplane import plane_around


class SessionLoads:
    """`LayeredLoads` of a rank's session."""

    def __init__(self, loads: LayeredLoads, worker: AttachedWorker) -> None:
        self._loads, self._worker = loads, worker
        self.num_parts = loads.num_parts

    @property
    def failure(self) -> str | None:
        return self._loads.failure

    def load(self, ops: Sequence[Op], after: Fence | None) -> LayeredLoad | None:
        return self._worker.load_now(ops, lambda: self._loads.load(ops, after))


class AttachedPlane:
    """A `DataPlane` and the `AttachedWorker` that manages its ops and its memory. Used like a `DataPlane`."""

    def __init__(self, plane: DataPlane, worker: AttachedWorker) -> None:
        self._plane, self._worker = plane, worker
        self._ticket = SessionTicket(0, "")
        self.layered = None if plane.layered is None else SessionLoads(plane.layered, worker)

    def join(self, ticket: SessionTicket) -> None:
        """Join a session, unless it is the current one or older."""
        if ticket.number > self._ticket.number:
            self._ticket = ticket
        self._worker.join(ticket)

    @property
    def session(self) -> RankSession:
        if not self._worker.is_attached:
            return RankSession()
        pool = self._plane.pool
        return RankSession(self._ticket.number, pool.pinned_slots, not pool.steps.is_pinning)

    @property
    def problem(self) -> str | None:
        return self._worker.problem

    @property
    def boot_id(self) -> str:
        return self._plane.boot_id

    @property
    def is_pinning(self) -> bool:
        return self._plane.is_pinning

    @property
    def applied(self) -> DesiredState:
        return self._plane.applied

    def start(self, *, at_ease: bool = False) -> None:
        self._worker.start(at_ease=at_ease)

    def begin_step(self) -> None:
        self._worker.begin_step()
        self._plane.begin_step()

    def launched(self, work: Fence | None = None) -> None:
        self._plane.launched(work)

    def end_step(self) -> None:
        self._plane.end_step()
        self._worker.end_step()

    def submit(self, plan: StepPlan, after: Fence | None = None) -> None:
        self._worker.submit(plan, after)

    def drive(self) -> None:
        self._plane.drive()

    def take_completions(self) -> list[Completion]:
        return self._worker.take_completions()

    def report(self) -> RankReport:
        return self._plane.report()

    def apply(self, desired: DesiredState) -> None:
        """Does nothing: the worker applies the service's desired state."""

    def add_listener(self, callback: Callable[[], None]) -> None:
        self._plane.add_listener(callback)

    def close(self, timeout: float = 5.0) -> bool:
        return self._worker.close(timeout)


def build_attached_plane(
    rank: int,
    socket: Path,
    options: ConnectorOptions,
    kv: KVGeometry,
    *,
    engine: str,
    replicated: bool,
    sender: ReportSequence | None = None,
) -> AttachedPlane:
    """A rank's data plane around `kv`. It does not connect or map anything yet. Leaves nothing behind if it raises a
    `KvstowError`."""
    slot_bytes = kv.layout.slot_bytes
    config = options.pool_config(slot_bytes, slot_bytes, slot_bytes)
    numa: list[int | None] = []

    def make_pool(registrar: Registrar, numa_node: int | None) -> MappedPool:
        numa.append(numa_node)
        return MappedPool(slot_bytes, registrar if config.lock else PopulateOnly(), pace=partial(pace_of, config))

    plane = plane_around(rank, kv, config, options, make_pool, sender)
    pool = plane.pool
    assert isinstance(pool, MappedPool)
    worker = AttachedWorker(socket, plane, pool, engine=engine, replicated=replicated, numa_node=numa[0])
    return AttachedPlane(plane, worker)
