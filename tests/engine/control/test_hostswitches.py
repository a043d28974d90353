"""Drain and bypass of a host with several pools."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.doubles.fakes import FakeClock

from kvstow.config import EngineConfig
from kvstow.control.administration import Administrator, HostSwitches
from kvstow.control.sharedpool import SharedPool
from kvstow.errors import InvalidRequestError
from kvstow.status import BypassStatus


class Pools:
    """Administrators of pools, which a test adds one by one."""

    def __init__(self, clock: FakeClock, count: int) -> None:
        self._clock = clock
        self.admins: list[Administrator] = []
        self.switches = HostSwitches(lambda: self.admins, clock=clock)
        for _ in range(count):
            self.add()

    def add(self) -> Administrator:
        pool = SharedPool(EngineConfig(slot_bytes=64, capacity_slots=4), clock=self._clock)
        self.admins.append(pool.admin)
        self.switches.apply_to(pool.admin)
        return pool.admin


@pytest.mark.parametrize("count", [0, 3])
def test_a_drain_is_of_all_pools_and_of_those_to_come(clock: FakeClock, count: int) -> None:
    pools = Pools(clock, count)
    assert pools.switches.drain("stop_stores", 10.0).drained
    clock.advance(4.0)
    later = pools.add()
    expected = pools.switches.drain_status
    assert (expected.mode, expected.deadline_seconds_left) == ("stop_stores", 6.0)
    assert [admin.drain_status for admin in pools.admins] == [expected] * (count + 1)
    assert not pools.switches.undrain().active
    assert not any(admin.drain_status.active for admin in pools.admins)
    assert not pools.add().drain_status.active
    assert later in pools.admins


@pytest.mark.parametrize("ttl", [None, 10.0])
def test_a_bypass_is_of_all_pools_and_of_those_to_come(clock: FakeClock, ttl: float | None) -> None:
    pools = Pools(clock, 1)
    status = pools.switches.set_bypass(load=True, store=False, ttl_seconds=ttl)
    assert status == BypassStatus(load=True, store=False, ttl_seconds_left=ttl)
    clock.advance(4.0)
    pools.add()
    left = None if ttl is None else 6.0
    assert [admin.bypass for admin in pools.admins] == [replace(status, ttl_seconds_left=left)] * 2
    clock.advance(6.0)
    assert pools.switches.bypass.load == pools.add().bypass.load == (ttl is None)


def test_what_is_in_flight_in_any_pool_is_counted(clock: FakeClock) -> None:
    pools = Pools(clock, 2)
    pools.switches.drain("all", None)
    assert pools.switches.drain_status.drained
    shared = SharedPool(EngineConfig(slot_bytes=64, capacity_slots=4), clock=clock)
    pools.admins.append(shared.admin)
    session = shared.attach("engine")
    shared.add_extent(2)
    shared.set_populated(2)
    assert pools.switches.drain_status.leases == 0
    with shared.lock:
        session.leases.grant((0,))
    status = pools.switches.drain_status
    assert (status.leases, status.drained) == (1, False)


@pytest.mark.parametrize("count", [0, 1])
def test_a_refused_value_changes_nothing(clock: FakeClock, count: int) -> None:
    pools = Pools(clock, count)
    with pytest.raises(InvalidRequestError):
        pools.switches.drain("all", -1.0)
    with pytest.raises(InvalidRequestError):
        pools.switches.set_bypass(load=True, store=True, ttl_seconds=0.0)
    assert not pools.switches.drain_status.active
    assert not pools.switches.bypass.load
