"""The data plane of a vLLM worker, on the CPU: real pools, real copies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvstow.dataplane import DataPlane
from kvstow.devices.cpu import CpuDevice
from kvstow.errors import ConfigError
from kvstow.memory.hostpool import HostPool
from kvstow.memory.limits import HugePageLimits
from kvstow.memory.pinning import MlockRegistrar
from kvstow.messages import Completion, Op, StepPlan
from kvstow_service.connectors.engine_core.options import ConnectorOptions
from kvstow_service.connectors.engine_core.workerside import wait_until_pinned
from kvstow_service.connectors.vllm import rankdataplane
from kvstow_service.connectors.vllm.rankdataplane import KVGeometry, build_plane, fence_of, kv_geometry

BLOCKS, PAGE = 4, 4096


@pytest.fixture
def kv() -> tuple[dict[str, torch.Tensor], KVGeometry]:
    """Two layers, whose blocks hold their own number."""
    blocks = torch.arange(BLOCKS, dtype=torch.uint8).repeat_interleave(PAGE).view(BLOCKS, PAGE)
    caches = {"first": blocks, "second": blocks + 100}
    return caches, kv_geometry(caches, BLOCKS)


@pytest.fixture
def worker(kv: tuple[dict[str, torch.Tensor], KVGeometry]) -> Iterator[DataPlane]:
    options = ConnectorOptions(lock=False, pin_pause=0.0)
    worker = build_plane(3, 10 * PAGE, 16 * PAGE, options, kv[1])
    yield worker
    worker.close()


def finish(worker: DataPlane, op: Op) -> Completion:
    worker.submit(StepPlan((op,)))
    assert worker.wait_completions(10)
    (completion,) = worker.take_completions()
    return completion


def test_blocks_of_all_layers_go_to_a_slot_and_come_back(
    kv: tuple[dict[str, torch.Tensor], KVGeometry], worker: DataPlane
) -> None:
    worker.pool.start()
    wait_until_pinned(worker.pool)
    assert finish(worker, Op(1, "store", (2,), (4,))).mark == "done"
    assert finish(worker, Op(2, "load", (0,), (4,))).mark == "done"
    assert {layer: tensor[:, 0].tolist() for layer, tensor in kv[0].items()} == {
        "first": [2, 1, 2, 3],
        "second": [102, 101, 102, 103],
    }


def test_a_plane_takes_no_memory_before_its_start(worker: DataPlane) -> None:
    report = worker.report()
    assert (report.rank, report.slot_bytes, report.pinned_slots, report.target_slots) == (3, 2 * PAGE, 0, 5)
    assert worker.pool.max_slots == 8


def test_a_pool_without_room_for_a_block_is_refused(kv: tuple[dict[str, torch.Tensor], KVGeometry]) -> None:
    with pytest.raises(ConfigError, match=f"at least one block, {2 * PAGE} bytes"):
        build_plane(0, 2 * PAGE - 1, 0, ConnectorOptions(), kv[1])


def test_another_device_is_refused(kv: tuple[dict[str, torch.Tensor], KVGeometry]) -> None:
    elsewhere = kv[1]._replace(tensors=(torch.empty(BLOCKS, PAGE, dtype=torch.uint8, device="meta"),))
    with pytest.raises(ConfigError, match="device of the KV cache is 'meta'; allowed: cuda or cpu"):
        build_plane(0, 10 * PAGE, 0, ConnectorOptions(), elsewhere)


def test_a_plane_that_cannot_be_built_leaves_nothing_behind(
    kv: tuple[dict[str, torch.Tensor], KVGeometry], monkeypatch: pytest.MonkeyPatch
) -> None:
    pools: list[HostPool] = []

    def refuse(pool: HostPool, *_: object) -> None:
        pools.append(pool)
        raise RuntimeError("no device")

    monkeypatch.setattr(rankdataplane, "CpuDevice", refuse)
    with pytest.raises(RuntimeError, match="no device"):
        build_plane(0, 10 * PAGE, 0, ConnectorOptions(lock=False), kv[1])
    assert pools[0].status().state == "closed"


def test_a_worker_that_cannot_be_made_leaves_neither_device_nor_pool(
    kv: tuple[dict[str, torch.Tensor], KVGeometry], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []
    for owner in (CpuDevice, HostPool):

        def close(self: Any, name: str = owner.__name__, plain: Any = owner.close) -> None:
            closed.append(name)
            plain(self)

        monkeypatch.setattr(owner, "close", close)

    def refuse(*_: object, **__: object) -> DataPlane:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(rankdataplane, "DataPlane", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        build_plane(0, 10 * PAGE, 0, ConnectorOptions(lock=False), kv[1])
    assert closed == ["CpuDevice", "HostPool"], "a device copies from the pool until it is closed"


@pytest.mark.parametrize("layer", [torch.empty(1), [torch.empty(1)]], ids=["tensor", "states"])
def test_on_the_cpu_all_work_is_done_when_its_call_returns(layer: Any) -> None:
    assert fence_of({"layer": layer})() is None


def test_a_rank_with_large_slots_begins_with_one_where_its_equal_share_is_less(
    kv: tuple[dict[str, torch.Tensor], KVGeometry],
) -> None:
    """The others' slots may be smaller: by the size of the slots its share is larger."""
    slot_bytes = kv[1].layout.slot_bytes
    worker = build_plane(0, slot_bytes - 1, 3 * slot_bytes, ConnectorOptions(), kv[1])
    assert (worker.pool.status().target_slots, worker.pool.max_slots) == (1, 3)
    worker.close()


def test_memory_on_the_cpu_is_locked(kv: tuple[dict[str, torch.Tensor], KVGeometry]) -> None:
    worker = build_plane(0, 10 * PAGE, 0, ConnectorOptions(), kv[1])
    assert worker.report().pin_mode == MlockRegistrar().mode != "populate"
    worker.close()


def test_memory_in_reserved_huge_pages_needs_no_lock(
    kv: tuple[dict[str, torch.Tensor], KVGeometry], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HugePageLimits, "headroom", lambda self, **kind: None)
    worker = build_plane(0, 10 * PAGE, 0, ConnectorOptions(huge_pages="reserved"), kv[1])
    assert worker.report().pin_mode == "hugetlb"
    worker.close()
