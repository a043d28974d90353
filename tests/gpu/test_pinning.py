"""Pinning for CUDA: beside graph captures, with failures, and without anything left behind."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from kvstow.config import PoolConfig
from kvstow.devices.cuda import CudaRegistrar
from kvstow.devices.cuda.context import primary_context
from kvstow.devices.cuda.driver import DriverError
from kvstow.memory.hostpool import HostPool
from kvstow.memory.slotpool import PoolStatus

MIB = 1 << 20
CAPTURES = 300
_libc = ctypes.CDLL(None, use_errno=True)

MakePool = Callable[..., HostPool]
pytestmark = pytest.mark.usefixtures("check_torch")


@pytest.fixture
def make_pool(undo: ExitStack) -> MakePool:
    """Pools of 64 slots of 1 MiB, 8 in a chunk, closed at the end."""

    def make(registrar: CudaRegistrar | None = None, **config: Any) -> HostPool:
        settings = {"slot_bytes": MIB, "pool_bytes": 64 * MIB, "chunk_bytes": 8 * MIB, "pause": 0.0} | config
        pool = HostPool(PoolConfig(**settings), registrar or CudaRegistrar())
        undo.callback(pool.close)
        return pool

    return make


def eventually(pool: HostPool, condition: Callable[[PoolStatus], object]) -> PoolStatus:
    deadline = time.monotonic() + 60
    while not condition(status := pool.status()):
        assert time.monotonic() < deadline, status
        threading.Event().wait(0.001)
    return status


def is_registered(address: int) -> bool:
    with primary_context(0).current():
        status, _ = import_module("cuda.bindings.driver").cuMemHostGetFlags(address)
    return int(status) == 0


def capture_beside_pinning(mode: str, captures: int) -> Any:
    """Captures done, the first error of a capture, register calls, the pool's error."""
    script = Path(__file__).with_name("capture_beside_pinning.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(script), mode, str(captures)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_graphs_are_captured_while_the_pool_pins() -> None:
    done, capture_error, calls, pool_error = capture_beside_pinning("relaxed", CAPTURES)
    assert (done, capture_error, pool_error) == (CAPTURES, None, None)
    assert calls >= 100, "they ran at the same time"


def test_in_the_default_capture_mode_they_would_break_each_other() -> None:
    done, capture_error, _, pool_error = capture_beside_pinning("default", CAPTURES)
    assert done < CAPTURES
    assert capture_error is not None or "CUDA_ERROR_STREAM_CAPTURE" in pool_error


@pytest.mark.parametrize("pace", [{"chunk_bytes": 8 * MIB}, {"chunk_bytes": None, "pause": None}])
def test_the_whole_pool_is_registered_and_reachable_by_the_gpu(make_pool: MakePool, pace: dict[str, Any]) -> None:
    pool = make_pool(**pace)
    pool.start()
    status = eventually(pool, lambda status: status.state == "ready")
    assert (status.pin_mode, status.locked_bytes, status.notice) == ("cuda", 64 * MIB, None)
    assert all(is_registered(pool.address + slot * MIB) for slot in range(64))


def test_close_leaves_nothing_registered(make_pool: MakePool) -> None:
    pool = make_pool()
    pool.start()
    eventually(pool, lambda status: status.pinned_slots >= 16)
    pool.close()
    assert not any(is_registered(pool.address + slot * MIB) for slot in range(64))


def test_shrinking_unregisters_and_growing_registers_again(make_pool: MakePool) -> None:
    pool = make_pool(max_bytes=96 * MIB)
    pool.start()
    eventually(pool, lambda status: status.state == "ready")
    for slots, registered in ((20, 24), (0, 0), (96, 96), (8, 8), (64, 64)):
        pool.set_target(slots)
        eventually(pool, lambda status, end=registered: status.locked_bytes == end * MIB == status.resident_bytes)  # type: ignore[misc]
        found = [is_registered(pool.address + slot * MIB) for slot in range(96)]
        assert found == [True] * registered + [False] * (96 - registered)


def test_a_registration_that_the_driver_refuses_degrades_the_pool_alone(
    make_pool: MakePool, check_torch: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = primary_context(0).driver
    register, calls = driver.register_host, iter(range(1000))

    def refuse_the_third(address: int, num_bytes: int) -> None:
        if next(calls) == 2:
            raise DriverError("cuMemHostRegister", 2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory")
        register(address, num_bytes)

    monkeypatch.setattr(driver, "register_host", refuse_the_third)
    pool = make_pool()
    pool.start()
    status = eventually(pool, lambda status: status.state == "degraded")
    assert (status.pinned_slots, status.error_reason) == (16, "out_of_memory")
    assert "CUDA_ERROR_OUT_OF_MEMORY" in str(status.error)
    check_torch()
    pool.retry()
    eventually(pool, lambda status: status.state == "ready")


def test_memory_that_cannot_be_registered_leaves_no_error_behind(
    make_pool: MakePool, check_torch: Callable[[], None]
) -> None:
    """A real refusal of the driver: access to the third chunk was taken away."""

    class Spoiling(CudaRegistrar):
        calls = 0

        def register(self, address: int, num_bytes: int) -> None:
            if self.calls == 2:
                assert _libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), 0) == 0
            self.calls += 1
            super().register(address, num_bytes)

    pool = make_pool(Spoiling())
    pool.start()
    status = eventually(pool, lambda status: status.state == "degraded")
    check_torch()
    assert (status.pinned_slots, status.error_reason) == (16, "driver")
    assert "cuMemHostRegister failed: CUDA_ERROR_" in str(status.error)
    pool.retry()
    status = eventually(pool, lambda status: status.state == "ready")
    assert status.locked_bytes == 64 * MIB


def test_the_first_slots_are_usable_while_nearly_all_of_a_large_pool_is_address_space(make_pool: MakePool) -> None:
    pool = make_pool(pool_bytes=32 << 30, chunk_bytes=None, pause=None)
    pool.start()
    eventually(pool, lambda status: status.pinned_slots)
    assert pool.status().resident_bytes < 1 << 30


def test_two_pools_pin_side_by_side(make_pool: MakePool) -> None:
    pools = [make_pool(), make_pool()]
    for pool in pools:
        pool.start()
    for pool in pools:
        assert eventually(pool, lambda status: status.state == "ready").locked_bytes == 64 * MIB
