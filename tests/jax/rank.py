"""A rank on JAX: a KV cache whose model writes random blocks, its data plane, and what the KV cache should hold."""

from __future__ import annotations

import ctypes
import math
import threading
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvstow.config import EngineConfig, PoolConfig
from kvstow.control.engine import OffloadEngine
from kvstow.control.launchorder import LaunchOrder
from kvstow.dataplane import DataPlane
from kvstow.devices.jax import ArrayCell, JaxDevice, JaxOptions, ShardedKV
from kvstow.memory.hostpool import HostPool
from kvstow.memory.limits import MemoryLimits
from kvstow.memory.pinning import PopulateOnly
from kvstow.messages import Completion, Op, StepPlan

DEADLINE = 60.0
_NO_LIMITS = MemoryLimits(Path("/nonexistent"), Path("/nonexistent"), Path("/nonexistent"))
_STEP_BLOCKS = 8  # that one step of the model writes at most


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()), ("model",))


class JaxRank:
    """`reference` is what the KV cache holds after all programs that were launched. All methods belong to the thread
    that has made the rank."""

    def __init__(
        self,
        *,
        layers: Sequence[tuple[int, ...]] = ((4, 4, 8), (4, 4, 8), (2, 8)),
        num_blocks: int = 24,
        num_slots: int = 32,
        dtype: Any = np.uint16,
        seed: int = 0,
        rank: int = 0,
        **options: Any,
    ) -> None:
        """`layers`: the shape of a block in each; the second axis is divided among the devices of all processes, which
        make the same calls."""
        self.generator = np.random.default_rng(seed)
        self.dtype, self.num_blocks = np.dtype(dtype), num_blocks
        self.shapes = [(num_blocks, *shape) for shape in layers]
        self.reference = [self._random(shape) for shape in self.shapes]
        self.shardings = [NamedSharding(mesh(), PartitionSpec(None, None, "model")) for _ in self.shapes]
        replicated = NamedSharding(mesh(), PartitionSpec())
        self._step = jax.jit(_overwrite, donate_argnums=0, out_shardings=(self.shardings, replicated))
        self.cell = ArrayCell(_in_jax_memory(self.reference, self.shardings))
        self.kv = ShardedKV.of(self.cell.peek())
        self.slot_bytes = self.kv.layout.slot_bytes
        self.number, self.num_slots = rank, num_slots
        self.options = JaxOptions(**{"piece_bytes": 4 * self.slot_bytes, "copy_threads": 2} | options)
        self.op_ids = count(1)
        self.completed: dict[int, list[Completion]] = {}
        self.staged: set[int] = set()
        self.boot()

    def boot(self) -> None:
        """A pool, a device and a data plane, with nothing in them."""
        config = PoolConfig(self.slot_bytes, self.slot_bytes * self.num_slots, pause=0.0)
        self.pool = HostPool(config, PopulateOnly(), limits=_NO_LIMITS)
        try:
            self.device = JaxDevice(self.pool, self.cell, self.options)
        except BaseException:
            self.pool.close()
            raise
        self.plane = DataPlane(self.number, self.pool, self.device, launcher=self.device)
        self.order = LaunchOrder(1)
        self.plane.start()
        self.wait_until(lambda: self.pool.pinned_slots == self.num_slots)

    def overwrite(self, blocks: Sequence[int]) -> None:
        """One step of the model: it replaces the KV cache, and writes random bytes to these blocks."""
        for start in range(0, max(1, len(blocks)), _STEP_BLOCKS):
            some = list(blocks[start : start + _STEP_BLOCKS])
            values = [self._random((_STEP_BLOCKS, *shape[1:])) for shape in self.shapes]
            for reference, value in zip(self.reference, values, strict=True):
                reference[some] = value[: len(some)]
            indices = np.full(_STEP_BLOCKS, self.num_blocks, np.int32)
            indices[: len(some)] = some
            arrays, total = self._step(self.cell.take(), indices, values)
            self.cell.put(arrays)
            if jax.process_count() > 1:
                # Two such steps in flight can use up the CPU backend's threads and then wait for each other.
                total.block_until_ready()

    def store(self, blocks: Sequence[int], slots: Sequence[int]) -> Op:
        return self.submit("store", blocks, slots)

    def load(self, blocks: Sequence[int], slots: Sequence[int]) -> Op:
        return self.submit("load", blocks, slots)

    def submit(self, direction: Any, blocks: Sequence[int], slots: Sequence[int]) -> Op:
        op = Op(next(self.op_ids), direction, tuple(blocks), tuple(slots))
        self.order.expect((op,))
        self.plane.submit(StepPlan((op,)))
        return op

    def turn(self) -> None:
        self.collect()
        self.launch()

    def launch(self) -> None:
        """The host launches the loads of which `collect` has heard that they are staged."""
        self.plane.submit(StepPlan(launches=self.order.take()))

    def collect(self) -> list[Completion]:
        completions, staged = self.plane.take_completions(), self.plane.take_staged()
        self.order.note(0, staged, completions)
        self.staged |= {load.op_id for load in staged}
        for completion in completions:
            self.completed.setdefault(completion.op_id, []).append(completion)
        return completions

    def has_staged(self, *ops: Op) -> bool:
        """Whether a piece of each of these loads is in staging memory."""
        self.collect()
        return self.staged.issuperset(op.op_id for op in ops)

    def marks(self, op: Op) -> list[str]:
        self.collect()
        return [completion.mark for completion in self.completed.get(op.op_id, [])]

    def has_ended(self, op: Op) -> bool:
        return bool({"done", "failed"} & set(self.marks(op)))

    def finish(self, *ops: Op) -> list[Completion]:
        """The final completions of these ops. The host makes turns meanwhile."""

        self.wait_until(lambda: all(self.has_ended(op) for op in ops), self.turn)
        return [self.completed[op.op_id][-1] for op in ops]

    def done(self, *ops: Op) -> None:
        for completion in self.finish(*ops):
            assert completion.mark == "done", completion

    def failure(self, op: Op) -> str:
        (completion,) = self.finish(op)
        assert completion.mark == "failed"
        assert completion.error is not None
        return completion.error

    def blocks(self, blocks: Sequence[int]) -> list[np.ndarray]:
        """What the reference holds in these blocks, layer by layer."""
        return [reference[list(blocks)] for reference in self.reference]

    def put(self, blocks: Sequence[int], contents: list[np.ndarray]) -> None:
        """A load has written these blocks."""
        for reference, content in zip(self.reference, contents, strict=True):
            reference[list(blocks)] = content

    def wrong_elements(self, blocks: Sequence[int] | None = None) -> int:
        """Elements of these blocks, or of all, that differ from the reference on the devices of this process."""
        looked_at = slice(None) if blocks is None else list(blocks)
        return sum(
            int((np.array(shard.data)[looked_at] != reference[shard.index][looked_at]).sum())
            for array, reference in zip(self.cell.peek(), self.reference, strict=True)
            for shard in array.addressable_shards
        )

    def slot(self, slot: int) -> bytes:
        return ctypes.string_at(self.pool.address + slot * self.pool.slot_stride, self.slot_bytes)

    def scribble(self, slot: int) -> None:
        ctypes.memset(self.pool.address + slot * self.pool.slot_stride, 0xA5, self.slot_bytes)

    def wait_until(self, condition: Callable[[], object], turn: Callable[[], object] = lambda: None) -> None:
        """`turn` is called before each look at the condition."""
        deadline = time.monotonic() + DEADLINE
        turn()
        while not condition():
            assert time.monotonic() < deadline, "the condition did not come true"
            threading.Event().wait(0.0005)
            turn()

    def close(self) -> None:
        self.plane.close(0)

    def _random(self, shape: tuple[int, ...]) -> np.ndarray:
        if jnp.issubdtype(self.dtype, jnp.floating):
            floats: np.ndarray = self.generator.standard_normal(shape).astype(self.dtype)
            return floats
        num_bytes = math.prod(shape) * self.dtype.itemsize
        values: np.ndarray = self.generator.integers(0, 256, num_bytes, np.uint8).view(self.dtype)
        return values.reshape(shape)


class Host:
    """The real control plane over a rank."""

    def __init__(self, rank: JaxRank, num_slots: int) -> None:
        self.rank = rank
        self.engine = OffloadEngine(EngineConfig(slot_bytes=rank.slot_bytes, capacity_slots=num_slots))
        for _ in range(2):  # the second report says that the desired state is applied
            rank.plane.apply(self.engine.report(rank.plane.report()))

    def collect(self) -> None:
        self.engine.complete(0, self.rank.plane.boot_id, self.rank.collect())

    def turn(self) -> None:
        self.collect()
        self.rank.launch()

    def settle(self) -> None:
        self.rank.wait_until(lambda: not self.engine.open_transfers, self.turn)


def _in_jax_memory(arrays: Sequence[np.ndarray], shardings: Any) -> list[jax.Array]:
    """Made by a program: what `device_put` makes of numpy arrays cannot be donated in place."""
    copy = jax.jit(lambda arrays: [array + 0 for array in arrays], out_shardings=list(shardings))
    return list(jax.block_until_ready(copy(list(arrays))))


def _overwrite(arrays: Any, indices: jax.Array, values: Any) -> tuple[list[jax.Array], jax.Array]:
    """The second result needs all devices: a model exchanges something in each step."""
    written = [
        array.at[indices].set(jnp.asarray(value), mode="drop") for array, value in zip(arrays, values, strict=True)
    ]
    return written, written[0].astype(jnp.uint32).sum()
