"""What tests of pools ask of the kernel, and a step of their host."""

from __future__ import annotations

from tests.doubles.fakes import FakeClock

from kvstow.memory.hostpool import HostPool
from kvstow.memory.hoststeps import HostSteps


def make_step(steps: HostSteps, clock: FakeClock) -> bool:
    """The host makes a step of 10 ms, whose work is launched at its end."""
    steps.begin()
    clock.advance(0.010)
    steps.launched()
    steps.end()
    return True


def pool_bytes(pool: HostPool, *names: str) -> int:
    """What the kernel counts under these names for the pool's addresses."""
    return smaps_bytes(pool.address, pool.address + pool.max_slots * pool.slot_stride, *names)


def smaps_bytes(start: int, end: int, *names: str) -> int:
    """What the kernel counts under these names for the mappings that begin between these addresses."""
    total, inside = 0, False
    with open("/proc/self/smaps") as smaps:
        for line in smaps:
            name, _, rest = line.partition(":")
            if "-" in name:
                inside = start <= int(name.split("-")[0], 16) < end
            elif inside and name in names:
                total += int(rest.split()[0]) * 1024
    return total
