from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from tests.waiting import eventually

from kvstow.config import PoolConfig
from kvstow.errors import PinError
from kvstow.memory.hostpool import HostPool
from kvstow.memory.pinning import MlockRegistrar, cpu_registrar
from kvstow.memory.region import HostRegion

if TYPE_CHECKING:
    MakePool = Callable[..., HostPool]


def test_locking_is_counted_and_undone(make_pool: MakePool) -> None:
    registrar = MlockRegistrar()
    pool = make_pool(registrar)
    pool.start()
    eventually(lambda: pool.pinned_slots == 16)
    status = pool.status()
    if status.notice is not None:
        pytest.skip("this process may not lock 64 KiB")
    assert (status.pin_mode, status.locked_bytes) == ("mlock", 16 * 4096)
    pool.set_target(4)
    eventually(lambda: pool.status().locked_bytes == 4 * 4096)
    pool.close()
    assert registrar.locked_bytes == 0


def test_locking_unmapped_memory_is_an_error() -> None:
    region = HostRegion(4096)
    region.close()
    registrar = MlockRegistrar()
    with pytest.raises(PinError, match=r"mlock of 4 KiB failed: ENOMEM") as caught:
        registrar.register(region.address, 4096)
    assert caught.value.reason == "memlock"
    assert registrar.locked_bytes == 0


def test_reserved_huge_pages_count_as_locked_and_need_no_limit(make_pool: MakePool) -> None:
    registrar = cpu_registrar(PoolConfig(4096, 4096, huge_pages="reserved"))
    pool = make_pool(registrar)
    pool.start()
    eventually(lambda: pool.pinned_slots == 16)
    status = pool.status()
    assert (status.pin_mode, status.locked_bytes, status.notice) == ("hugetlb", 16 * 4096, None)
    pool.close()
    assert registrar.locked_bytes == 0
    assert isinstance(cpu_registrar(PoolConfig(4096, 4096)), MlockRegistrar)


_FORBIDDEN = """
import ctypes, os, resource, struct, sys, threading
from kvstow.config import PoolConfig
from kvstow.memory.pinning import MlockRegistrar
from kvstow.memory.hostpool import HostPool
# Give up all capabilities, and stay the user who can read the code.
header, none = struct.pack("Ii", 0x20080522, 0), bytes(24)
assert ctypes.CDLL(None, use_errno=True).capset(header, none) == 0, os.strerror(ctypes.get_errno())
hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
for limit in (0, 64 << 10):
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, hard))
    pool = HostPool(PoolConfig(4096, 96 << 10, chunk_bytes=32 << 10, pause=0.0), MlockRegistrar())
    done = threading.Event()
    pool.add_listener(lambda: done.set() if pool.pinned_slots == 24 else None)
    pool.start()
    assert done.wait(60), pool.status()
    status = pool.status()
    pool.close()
    print(status.state, status.pin_mode, status.locked_bytes, status.resident_bytes, status.notice)
"""


def test_without_permission_to_lock_the_memory_is_populated_and_the_report_says_so() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", _FORBIDDEN]
    run = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    refused, limited = run.stdout.splitlines()
    assert refused.startswith("ready populate 0 98304 mlock of 32 KiB failed: EPERM")
    assert "RLIMIT_MEMLOCK is 0 B and CAP_IPC_LOCK is missing. 0 B are locked" in refused
    assert limited.startswith("ready populate 65536 98304 mlock of 32 KiB failed: ENOMEM")
    assert "RLIMIT_MEMLOCK is 64 KiB" in limited
    assert "64 KiB are locked; the rest is populated, but the kernel may swap it out" in limited
