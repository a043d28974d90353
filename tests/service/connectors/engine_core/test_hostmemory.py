"""The memory of the machine, and waiting until a pool has its part of it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from tests.doubles.fakes import FakeRegistrar
from tests.service.connectors.engine_core.processes import make_process

from kvstow.errors import InsufficientMemoryError
from kvstow.memory.hostpool import HostPool
from kvstow.memory.limits import RESERVE_BYTES, HugePageLimits, MemoryLimits
from kvstow_service.connectors.engine_core import workerside
from kvstow_service.connectors.engine_core.options import ConnectorOptions
from kvstow_service.connectors.engine_core.workerside import require_memory, wait_until_pinned

PAGE = 4096


@pytest.fixture
def available(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 1 GiB of memory beside the reserve, which a test may change, and 16 MiB in reserved pages."""
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemAvailable: {((1 << 30) + RESERVE_BYTES) // 1024} kB\n")
    for name, pages in {"free_hugepages": 8, "resv_hugepages": 0}.items():
        (tmp_path / name).write_text(str(pages))
    limits = {
        "advised": MemoryLimits(meminfo, tmp_path / "none", tmp_path),
        "reserved": HugePageLimits(meminfo, tmp_path / "none", tmp_path, tmp_path),
    }
    monkeypatch.setattr(workerside, "limits_of", limits.__getitem__)
    return meminfo


@pytest.mark.usefixtures("available")
def test_pools_of_a_node_that_fit_together_may_have_all_that_it_can_give() -> None:
    options = ConnectorOptions(cpu_bytes_to_use=1 << 29)
    assert require_memory(options, make_process(num_ranks=2, ranks_per_node=2)) == 1 << 30
    assert require_memory(options, make_process(num_ranks=4, ranks_per_node=2)) == 1 << 30


@pytest.mark.usefixtures("available")
def test_pools_of_a_node_that_do_not_fit_together_are_refused() -> None:
    options = ConnectorOptions(cpu_bytes_to_use_per_rank=600 << 20)
    assert require_memory(options, make_process(num_ranks=1, ranks_per_node=1)) == 1 << 30
    with pytest.raises(InsufficientMemoryError, match="2 x 600 MiB of pool cannot fit"):
        require_memory(options, make_process(num_ranks=2, ranks_per_node=2))
    assert require_memory(options, make_process(num_ranks=2, ranks_per_node=1)) == 1 << 30


@pytest.mark.usefixtures("available")
def test_pools_of_a_node_share_its_reserved_huge_pages() -> None:
    process = make_process(num_ranks=2, ranks_per_node=2)
    options = ConnectorOptions(cpu_bytes_to_use_per_rank=7 << 20, huge_pages="reserved")
    assert require_memory(options, process) == 16 << 20
    options = ConnectorOptions(cpu_bytes_to_use_per_rank=9 << 20, huge_pages="reserved")
    with pytest.raises(InsufficientMemoryError, match="2 x 9 MiB of pool cannot fit: 20 MiB are needed in reserved"):
        require_memory(options, process)


def test_without_a_readable_limit_the_available_memory_is_unknown(available: Path) -> None:
    available.unlink()
    assert require_memory(ConnectorOptions(cpu_bytes_to_use=1000), make_process()) == 0


def make_pool(registrar: FakeRegistrar) -> HostPool:
    options = ConnectorOptions(pin_chunk=2 * PAGE, pin_pause=0.0)
    return HostPool(options.pool_config(2 * PAGE, 10 * PAGE, 0), registrar)


def test_waiting_ends_with_the_last_chunk() -> None:
    registrar = FakeRegistrar(wait_at=2)
    pool = make_pool(registrar)
    pool.start()
    waiter = threading.Thread(target=wait_until_pinned, args=(pool,))
    waiter.start()
    assert registrar.waiting.wait(60)
    assert waiter.is_alive()
    registrar.go_on.set()
    waiter.join(60)
    assert not waiter.is_alive()
    assert pool.status().pinned_slots == 5
    pool.close()


def test_waiting_ends_where_the_pool_stops_growing() -> None:
    pool = make_pool(FakeRegistrar({1: RuntimeError("no more")}))
    pool.start()
    waiter = threading.Thread(target=wait_until_pinned, args=(pool,))
    waiter.start()
    waiter.join(60)
    assert not waiter.is_alive()
    assert pool.status().pinned_slots < 5
    pool.close()
