"""KVStow inside tpu-inference: its platform, worker, runner and model, and vLLM's scheduler, on two devices."""

from __future__ import annotations

import ctypes
import random
import threading
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import pytest

from kvstow.dataplane import DataPlane
from kvstow.devices.jax.hostcopies import RangeCopier

if TYPE_CHECKING:
    from tests.tpu.engine import Engine

pytestmark = pytest.mark.tpu


def test_the_whole_engine_is_that_of_tpu_inference(engine: Engine) -> None:
    from tpu_inference.platforms.tpu_platform import TpuPlatform
    from tpu_inference.runner.tpu_runner import TPUModelRunner
    from tpu_inference.worker.tpu_worker import TPUWorker
    from vllm.platforms import current_platform

    assert isinstance(current_platform, TpuPlatform)
    assert type(engine.worker.worker if hasattr(engine.worker, "worker") else engine.worker) is TPUWorker
    assert type(engine.runner) is TPUModelRunner
    assert [len(array.addressable_shards) for array in engine.runner.kv_caches] == [2, 2]


def test_a_step_keeps_its_inputs_when_the_host_writes_those_of_the_next(engine: Engine) -> None:
    """On a TPU they are copied; the stand-in has to copy them, too."""
    from tpu_inference.utils import device_array

    memory = np.zeros(1024 + 16, np.int32)
    start = -memory.ctypes.data % 64 // memory.itemsize  # the CPU backend uses aligned memory in place
    host = memory[start : start + 1024]
    (given,) = device_array(engine.runner.mesh, (host,))
    host.fill(1)
    assert not np.asarray(given).any()


def test_settle_reads_the_output_of_a_step_that_was_launched_ahead(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that is under way when the last request ends has vLLM launch one more step."""
    from tests.tpu.engine import prompts

    may_copy, start = threading.Event(), RangeCopier.start

    def wait(self: RangeCopier, ranges: Any) -> Any:
        assert may_copy.wait(60)
        return start(self, ranges)

    monkeypatch.setattr(RangeCopier, "start", wait)
    engine.ask(prompts(1, seed=6))
    assert engine.core.batch_queue
    may_copy.set()
    engine.settle()
    assert not engine.core.batch_queue


def test_a_second_pass_has_the_same_answers_and_hits_in_host_memory(engine: Engine) -> None:
    from tests.tpu.engine import prompts

    asked = prompts(4, seed=1)
    first = engine.ask(asked)
    engine.settle()
    assert len(set(first)) == 4
    before = engine.loaded_blocks
    engine.forget_gpu()
    assert engine.ask(asked) == first
    assert engine.loaded_blocks - before == 4 * 6  # the 96 tokens that fill blocks
    assert engine.offload.stats().lookups.results["full"] >= 4


def test_slots_hold_the_bytes_of_the_kv_cache(engine: Engine) -> None:
    """Of every block that is in both, stored or loaded."""
    from tests.tpu.engine import prompts

    for _ in range(2):
        engine.forget_gpu()
        engine.ask(prompts(3, seed=2))
        engine.settle()
        blocks = engine.core.scheduler.kv_cache_manager.block_pool.blocks
        cached = {block.block_hash: block.block_id for block in blocks}
        side, plane = engine.scheduler_host.side, engine.side.plane
        assert side is not None
        assert isinstance(plane, DataPlane)
        pool: Any = plane.pool
        compared = 0
        for block_hash, number in cached.items():
            if block_hash is None:
                continue
            status = engine.offload.block(side._gpu.offer_of([block_hash], [0]).keys[0])
            if status is not None:
                slot = ctypes.string_at(pool.address + status.slot * pool.slot_stride, pool.slot_bytes)
                assert slot == engine.block(number)
                compared += 1
        assert compared >= 3 * 6


def test_answers_stay_the_same_while_both_memories_evict(engine: Engine) -> None:
    from tests.tpu.engine import SLOTS, prompts

    asked = prompts(14, seed=3)  # twice as many blocks as there are in either memory
    answers = {}
    for prompt in asked:
        (answers[prompt],) = engine.ask([prompt])
    loaded, evicted = engine.loaded_blocks, sum(engine.offload.stats().evictions.values())
    source = random.Random(3)
    for _ in range(8):
        some = source.sample(asked, 5)
        assert engine.ask(some) == [answers[prompt] for prompt in some]
    engine.settle()
    assert engine.loaded_blocks > loaded
    assert sum(engine.offload.stats().evictions.values()) > evicted
    assert engine.offload.stats().pool.capacity_slots == SLOTS
    engine.offload.check_integrity()


def test_a_request_whose_load_fails_is_computed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.tpu.engine import prompts

    asked = prompts(2, seed=4)
    first = engine.ask(asked)
    engine.forget_gpu()
    failed = engine.failed_loads
    calls = []

    def fail(self: RangeCopier, ranges: Any) -> None:
        calls.append(ranges)
        raise OSError("no copy today")

    monkeypatch.setattr(RangeCopier, "start", fail)
    assert engine.ask(asked) == first
    monkeypatch.undo()
    assert calls
    assert engine.failed_loads == failed + 2
    engine.settle()


def delete_through_the_runner(engine: Engine) -> None:
    engine.runner.delete_kv_cache()
    engine.runner.reinitialize_kv_cache()


def replace_behind_its_back(engine: Engine) -> None:
    """Blocks of the same shapes, from which no hook tells that they are others."""
    for array in engine.runner.kv_caches:
        array.delete()
    engine.step()
    engine.runner.kv_caches.clear()
    manager = engine.runner.kv_cache_manager
    type(manager).reinitialize_kv_cache(manager)


@pytest.mark.parametrize("replace", [delete_through_the_runner, replace_behind_its_back])
def test_a_kv_cache_that_is_made_anew_loses_its_blocks_in_host_memory(engine: Engine, replace: Any) -> None:
    """The runner deletes its KV cache when weights change: what is stored belongs to the old ones."""
    from tests.tpu.engine import prompts

    asked = prompts(2, seed=5)
    first = engine.ask(asked)
    engine.settle()
    boot, loaded = engine.side.plane.boot_id, engine.loaded_blocks
    engine.forget_gpu()
    replace(engine)
    assert engine.ask(asked) == first
    assert engine.side.plane.boot_id != boot
    assert engine.loaded_blocks == loaded
    engine.wait_ready()
    engine.forget_gpu()
    engine.ask(asked)
    engine.forget_gpu()
    assert engine.ask(asked) == first
    assert engine.loaded_blocks > loaded
    assert not any(array.is_deleted() for array in jax.tree.leaves(engine.runner.kv_caches))
