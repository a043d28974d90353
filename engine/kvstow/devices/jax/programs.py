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

    On the CPU gathers write to columns of earlier ones: new memory would take four times as long as the copies, because
    the kernel has to clear it.
    """

    def __init__(self, kv: ShardedKV, device: jax.Device, buckets: Sequence[int], *, packed: bool) -> None:
        """Compiles nothing; `compile_all` does."""
        self.device = device
        self._kv, self._buckets, self._packed = kv, buckets, packed
        self._on_cpu = device.platform == "cpu"
        self.reuses_columns = self._on_cpu and not _is_small_float(kv.dtype)
        self._gathers: dict[int, jax.stages.Compiled] = {}
        self._scatters: dict[int, jax.stages.Compiled] = {}

    @property
    def widths(self) -> tuple[int, ...]:
        """Elements of one block in each column."""
        return (sum(self._kv.page_elements),) if self._packed else self._kv.page_elements

    def gather(self, shards: Shards, blocks: Sequence[int], columns: Sequence[jax.Array] = ()) -> list[jax.Array]:
        """The columns of these blocks. Any program that is launched later may overwrite the blocks. `columns`: of an
        earlier gather of this bucket, which nothing uses any more; they are deleted. Without them, or where
        `reuses_columns` is not set, in new memory of the device."""
        bucket = bucket_of(self._buckets, len(blocks))
        if not self.reuses_columns:
            return list(self._gathers[bucket](shards, _padded(blocks, bucket, blocks[0]), []))
        indices = _padded(blocks, bucket, self._kv.num_blocks)
        return list(self._gathers[bucket](shards, indices, list(columns) or self._new_columns(bucket)))

    def scatter(self, shards: Shards, blocks: Sequence[int], columns: Sequence[jax.Array]) -> tuple[Shards, jax.Array]:
        """New arrays with these blocks written, in the memory of `shards`, which are deleted; and the witness: a small
        array of its own, ready when the blocks are written. (The new arrays cannot say so: the next step deletes them.)
        """
        bucket = columns[0].shape[0]
        indices = _padded(blocks, bucket, self._kv.num_blocks)
        written, witness = self._scatters[bucket](shards, indices, list(columns))
        return list(written), witness

    def _compile_gather(self, bucket: int) -> None:
        shards, indices, columns = self._arguments(bucket)
        reused = columns if self.reuses_columns else []
        self._gathers[bucket] = _GATHER.lower(shards, indices, reused, packed=self._packed).compile()

    def _compile_scatter(self, bucket: int) -> None:
        lowered = _SCATTER.lower(*self._arguments(bucket), packed=self._packed, row_by_row=self._on_cpu)
        self._scatters[bucket] = lowered.compile()

    def _new_columns(self, bucket: int) -> list[jax.Array]:
        """Memory that is not JAX's own: the gather makes a copy of it, which is."""
        columns = [np.zeros((bucket, width), self._kv.dtype) for width in self.widths]
        return list(jax.device_put(columns, SingleDeviceSharding(self.device)))

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


def _is_small_float(dtype: np.dtype) -> bool:
    """XLA on the CPU converts whole arrays of them to copy a page (JAX 0.10; 0.11 does so with 8 bits)."""
    return dtype.itemsize < 4 and not np.issubdtype(dtype, np.integer)


def _gather(shards: list[jax.Array], indices: jax.Array, columns: list[jax.Array], *, packed: bool) -> list[jax.Array]:
    """`columns`: to be written, or none."""
    if columns:
        return _read_rows(shards, indices, columns, packed=packed)
    pages = [jnp.take(shard, indices, axis=0, mode="clip").reshape(len(indices), -1) for shard in shards]
    return [jnp.concatenate(pages, axis=1)] if packed else pages


def _scatter(
    shards: list[jax.Array], indices: jax.Array, columns: list[jax.Array], *, packed: bool, row_by_row: bool
) -> tuple[list[jax.Array], jax.Array]:
    """`row_by_row`: for XLA on the CPU, which scatters pages of 64 KiB at 3 % of the speed of a loop of copies, and
    gathers them at a sixth."""
    if row_by_row:
        written = _write_rows(shards, indices, columns, packed=packed)
    else:
        written = [
            shard.at[indices].set(columns[column][:, start:end].reshape(len(indices), *shard.shape[1:]), mode="drop")
            for shard, (column, start, end) in zip(shards, _places(shards, packed), strict=True)
        ]
    return written, jnp.stack([shard[(0,) * shard.ndim] for shard in written])


def _places(shards: Sequence[jax.Array], packed: bool) -> list[tuple[int, int, int]]:
    """Where the pages of each layer are: the column, and from where to where in it."""
    widths = [math.prod(shard.shape[1:]) for shard in shards]
    if packed:
        return [(0, start, end) for start, end in pairwise(accumulate(widths, initial=0))]
    return [(number, 0, width) for number, width in enumerate(widths)]


# Loops of copies, page by page. Padding is at the end of `indices`.


def _read_rows(
    shards: list[jax.Array], indices: jax.Array, columns: list[jax.Array], *, packed: bool
) -> list[jax.Array]:
    def read(row: jax.Array, columns: list[jax.Array]) -> list[jax.Array]:
        columns = list(columns)
        for shard, (column, start, _) in zip(shards, _places(shards, packed), strict=True):
            page = jax.lax.dynamic_index_in_dim(shard, indices[row], keepdims=True).reshape(1, -1)
            columns[column] = jax.lax.dynamic_update_slice(columns[column], page, (row, np.int32(start)))
        return columns

    return list(jax.lax.fori_loop(0, _count(shards, indices), read, columns))


def _write_rows(
    shards: list[jax.Array], indices: jax.Array, columns: list[jax.Array], *, packed: bool
) -> list[jax.Array]:
    def write(row: jax.Array, shards: list[jax.Array]) -> list[jax.Array]:
        written = []
        for shard, (column, start, end) in zip(shards, _places(shards, packed), strict=True):
            page = jax.lax.dynamic_slice(columns[column], (row, np.int32(start)), (1, end - start))
            page = page.reshape(1, *shard.shape[1:])
            written.append(jax.lax.dynamic_update_slice_in_dim(shard, page, indices[row], axis=0))
        return written

    return list(jax.lax.fori_loop(0, _count(shards, indices), write, shards))


def _count(shards: list[jax.Array], indices: jax.Array) -> jax.Array:
    return jnp.sum(indices < shards[0].shape[0], dtype=jnp.int32)


# One object each: the devices share what JAX has traced.
_GATHER = jax.jit(_gather, static_argnames="packed", donate_argnums=2)
_SCATTER = jax.jit(_scatter, static_argnames=("packed", "row_by_row"), donate_argnums=0)
