"""A pool that shrinks and immediately grows again, with a real rank: the engine uses only slots that the rank has
pinned."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
import torch
from tests.waiting import eventually

from kvstow.config import EngineConfig
from kvstow.control.engine import OffloadEngine
from kvstow.dataplane import DataPlane
from kvstow.devices.cpu import CpuDevice
from kvstow.layout import KVLayout, Region
from kvstow.memory.hostpool import HostPool
from kvstow.messages import RankReport, StepPlan

if TYPE_CHECKING:
    MakePool = Callable[..., HostPool]

SLOTS, FEW = 16, 4
KEYS = [bytes([number]) for number in range(SLOTS)]


class Host:
    """An engine and its one rank, which reports when the test says so."""

    def __init__(self, pool: HostPool) -> None:
        kv = torch.zeros(SLOTS, 4096, dtype=torch.uint8)
        layout = KVLayout((Region("kv", SLOTS, 4096, 4096),))
        self.engine = OffloadEngine(EngineConfig(slot_bytes=4096, capacity_slots=SLOTS))
        self.plane = DataPlane(0, pool, CpuDevice(pool, layout, [kv]))
        pool.start()
        eventually(lambda: self.plane.report().pinned_slots == SLOTS)

    def beat(self) -> RankReport:
        report = self.plane.report()
        self.plane.apply(self.engine.report(report))
        return report

    def shrink_and_grow(self) -> None:
        """The rank receives the shrink, frees its memory, and has not received the growth."""
        self.engine.admin.resize(FEW).run()
        self.beat()
        eventually(lambda: self.plane.report().chunks_done == 1)
        self.engine.admin.resize(SLOTS).run()

    def store(self) -> tuple[int, str]:
        """Store as many blocks as fit. Returns the number of blocks and the result on the rank."""
        op = self.engine.begin_store(KEYS, range(SLOTS)).op
        assert op is not None
        self.plane.submit(StepPlan((op,)))
        while True:
            assert self.plane.wait_completions(10)
            completions = self.plane.take_completions()
            self.engine.complete(0, self.plane.boot_id, completions)
            if last := [said.error or said.mark for said in completions if said.mark != "source_free"]:
                return len(op.slots), last[0]


@pytest.fixture
def host(make_pool: MakePool) -> Iterator[Host]:
    host = Host(make_pool())
    yield host
    host.plane.close(0)


def test_freed_slots_are_not_used_before_they_are_pinned_again(host: Host) -> None:
    host.beat()
    host.shrink_and_grow()
    assert host.store() == (FEW, "done")
    host.beat()
    eventually(lambda: host.plane.report().pinned_slots == SLOTS)
    host.beat()
    host.engine.admin.purge(everything=True).run()
    assert host.store() == (SLOTS, "done")


def test_listeners_are_called_when_a_shrink_is_applied(host: Host) -> None:
    """The agent then reports at once, so the engine can count on the kept slots without delay."""
    host.beat()
    told_on: list[threading.Thread] = []
    host.plane.add_listener(lambda: told_on.append(threading.current_thread()))
    host.beat()
    assert threading.current_thread() not in told_on, "nothing has changed"
    host.engine.admin.pause_pinning(True)
    host.engine.admin.resize(SLOTS - 1).run()  # within the last chunk, which stays as it is
    host.beat()
    assert threading.current_thread() in told_on
