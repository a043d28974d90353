from __future__ import annotations

import fcntl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
from hypothesis import HealthCheck, settings
from tests.doubles.fakes import FakeRegistrar

from kvstow.config import PoolConfig
from kvstow.memory.hostpool import HostPool
from kvstow.memory.limits import HugePageLimits, MemoryLimits

# Else an example that takes 200 ms, on a busy machine, fails its test.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


class MakePool(Protocol):
    def __call__(
        self,
        registrar: Any = None,
        *,
        limits: MemoryLimits | None = None,
        clock: Callable[[], float] = ...,
        cpu_clock: Callable[[], float] = ...,
        numa_node: int | None = None,
        **config: Any,
    ) -> HostPool: ...


@pytest.fixture
def make_pool(no_limits: MemoryLimits) -> Iterator[MakePool]:
    """Pools that are closed at the end. By default 16 slots of 4 KiB, 4 in a chunk, no pause, no limit on memory."""
    pools: list[HostPool] = []

    def make(
        registrar: Any = None,
        *,
        limits: MemoryLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
        numa_node: int | None = None,
        **config: Any,
    ) -> HostPool:
        settings = {"slot_bytes": 4096, "pool_bytes": 16 * 4096, "chunk_bytes": 4 * 4096, "pause": 0.0} | config
        limits, registrar = limits or no_limits, registrar or FakeRegistrar()
        pool = HostPool(
            PoolConfig(**settings), registrar, limits=limits, clock=clock, cpu_clock=cpu_clock, numa_node=numa_node
        )
        pools.append(pool)
        return pool

    yield make
    for pool in pools:
        pool.close()


@pytest.fixture
def reserve() -> Iterator[Callable[[int], None]]:
    """Make so many 2 MiB pages free until the test ends; skips without permission. The pages are the machine's: one
    test at a time has them, in whichever process, and what a killed test has left free does not count."""
    folder = HugePageLimits().pages
    total = folder / "nr_hugepages"
    try:
        held = total.open()
        fcntl.flock(held, fcntl.LOCK_EX)
        before = total.read_text()
        total.write_text(before)
    except OSError as error:
        pytest.skip(f"huge pages cannot be reserved here: {error}")
    in_use = int(before) - int((folder / "free_hugepages").read_text())

    def set_free(pages: int) -> None:
        total.write_text(str(in_use + pages))
        if int(total.read_text()) != in_use + pages:
            pytest.skip(f"the machine cannot reserve {pages} huge pages")

    yield set_free
    total.write_text(before)
    held.close()


@pytest.fixture
def no_limits() -> MemoryLimits:
    return MemoryLimits(Path("/nonexistent"), Path("/nonexistent"), Path("/nonexistent"))


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    """Every thread that a test has started must end with it."""
    before = set(threading.enumerate())
    yield
    left = [
        thread.name for thread in threading.enumerate() if thread not in before and thread.name.startswith("kvstow")
    ]
    assert left == []
