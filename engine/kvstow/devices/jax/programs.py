"""The programs that read blocks from the KV arrays of one device, and write blocks to them.

A program is compiled for a number of blocks (a bucket). Smaller ops are padded: a padded gather reads a block twice, a
padded scatter has indices beyond the last block, which are dropped. So a device has at most 16 programs, all compiled
before the first op. They run on one device and exchange nothing with others, so hosts may launch them in any order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from kvstow.devices.jax.shards import ShardedKV, Shards

MAX_BUCKETS = 8  # per direction


def buckets_up_to(num_blocks: int) -> tuple[int, ...]:
    """The numbers of blocks to compile for, ascending: powers of two, the largest at most `num_blocks`."""
    largest = num_blocks.bit_length() - 1
    return tuple(1 << power for power in range(max(0, largest - MAX_BUCKETS + 1), largest + 1))


def bucket_of(buckets: Sequence[int], num_blocks: int) -> int:
    """The smallest bucket that holds this many blocks."""
    return next(bucket for bucket in buckets if bucket >= num_blocks)


class DevicePrograms:
    """The programs of one device. `gather` and `scatter` launch them without waiting, on the host's thread.

    The blocks travel as *columns*: arrays `[bucket, elements]`. Packed there is one of them, with the pages of all
    layers in a row: one transfer. Else there is one for each layer, which spares the CPU a copy.
    """

    def __init__(self, kv: ShardedKV, device: jax.Device, buckets: Sequence[int], *, packed: bool) -> None:
        """Compiles nothing; `compile_all` does."""
        self.device = device
        self._kv, self._buckets, self._packed = kv, buckets, packed
        self._gathers: dict[int, jax.stages.Compiled] = {}
        self._scatters: dict[int, jax.stages.Compiled] = {}

    @property
    def widths(self) -> tuple[int, ...]:
        """Elements of one block in each column."""
        return (sum(self._kv.page_elements),) if self._packed else self._kv.page_elements

    def gather(self, shards: Shards, blocks: Sequence[int]) -> list[jax.Array]:
        """The columns of these blocks, in new memory of the device. Any program that is launched later may overwrite
        the blocks."""
        bucket = bucket_of(self._buckets, len(blocks))
        return list(self._gathers[bucket](shards, _padded(blocks, bucket, blocks[0])))

    def scatter(self, shards: Shards, blocks: Sequence[int], columns: Sequence[jax.Array]) -> tuple[Shards, jax.Array]:
        """New arrays with these blocks written, in the memory of `shards`, which are deleted; and the witness: a small
        array of its own, ready when the blocks are written. (The new arrays cannot say so: the next step deletes them.)
        """
        bucket = columns[0].shape[0]
        indices = _padded(blocks, bucket, self._kv.num_blocks)
        written, witness = self._scatters[bucket](shards, indices, list(columns))
        return list(written), witness

    def _compile_gather(self, bucket: int) -> None:
        shards, indices, _ = self._arguments(bucket)
        self._gathers[bucket] = _GATHER.lower(shards, indices, packed=self._packed).compile()

    def _compile_scatter(self, bucket: int) -> None:
        row_by_row = self.device.platform == "cpu"
        lowered = _SCATTER.lower(*self._arguments(bucket), packed=self._packed, row_by_row=row_by_row)
        self._scatters[bucket] = lowered.compile()

    def _arguments(self, bucket: int) -> tuple[list[jax.ShapeDtypeStruct], ...]:
        def argument(shape: tuple[int, ...], dtype: np.dtype) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(self.device))

        shards = [argument(part, self._kv.dtype) for part in self._kv.parts]
        columns = [argument((bucket, width), self._kv.dtype) for width in self.widths]
        return shards, argument((bucket,), np.dtype(np.int32)), columns


def compile_all(programs: Sequence[DevicePrograms], buckets: Sequence[int], threads: int) -> None:
    """Compile for all buckets. XLA releases the interpreter while it compiles, so `threads` work at once; and they do
    not inherit a mesh that the host has set for its own programs."""
    with ThreadPoolExecutor(threads, "kvstow-compile") as compilers:
        jobs = [
            compilers.submit(compile_one, bucket)
            for bucket in reversed(buckets)
            for of_device in programs
            for compile_one in (of_device._compile_scatter, of_device._compile_gather)
        ]
        for job in jobs:
            job.result()


def _padded(blocks: Sequence[int], bucket: int, padding: int) -> np.ndarray:
    """A new array for each launch: XLA on the CPU reads it in place, and later."""
    indices = np.full(bucket, padding, np.int32)
    indices[: len(blocks)] = blocks
    return indices


def _gather(shards: list[jax.Array], indices: jax.Array, *, packed: bool) -> list[jax.Array]:
    pages = [jnp.take(shard, indices, axis=0, mode="clip").reshape(len(indices), -1) for shard in shards]
    return [jnp.concatenate(pages, axis=1)] if packed else pages


def _scatter(
    shards: list[jax.Array], indices: jax.Array, columns: list[jax.Array], *, packed: bool, row_by_row: bool
) -> tuple[list[jax.Array], jax.Array]:
    """`row_by_row`: for XLA on the CPU, which scatters pages of 64 KiB at 3 % of the speed of a loop of copies."""
    if packed:
        ends = accumulate((math.prod(shard.shape[1:]) for shard in shards), initial=0)
        columns = [columns[0][:, start:end] for start, end in pairwise(ends)]
    write = _write_rows if row_by_row else _write_at_once
    written = [
        write(shard, indices, column.reshape(len(indices), *shard.shape[1:]))
        for shard, column in zip(shards, columns, strict=True)
    ]
    return written, jnp.stack([shard[(0,) * shard.ndim] for shard in written])


def _write_at_once(shard: jax.Array, indices: jax.Array, rows: jax.Array) -> jax.Array:
    return shard.at[indices].set(rows, mode="drop")


def _write_rows(shard: jax.Array, indices: jax.Array, rows: jax.Array) -> jax.Array:
    """Padding is at the end of `indices`."""

    def write(row: jax.Array, shard: jax.Array) -> jax.Array:
        page = jax.lax.dynamic_index_in_dim(rows, row, keepdims=True)
        return jax.lax.dynamic_update_slice_in_dim(shard, page, indices[row], axis=0)

    count = jnp.sum(indices < shard.shape[0])
    return jax.lax.fori_loop(0, count, write, shard)


# One object each: the devices share what JAX has traced.
_GATHER = jax.jit(_gather, static_argnames="packed")
_SCATTER = jax.jit(_scatter, static_argnames=("packed", "row_by_row"), donate_argnums=0)
