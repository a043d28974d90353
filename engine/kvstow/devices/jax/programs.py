"""The programs that read blocks from the KV arrays of one device, and write blocks to them.

A program is compiled for a number of blocks (a bucket). Smaller ops are padded: a padded gather reads a block twice,
and a padded scatter has indices beyond the last block, which are dropped. So a device has at most 16 programs, all
compiled before the first op. They run on one device and exchange nothing with others.
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

MAX_BUCKETS = 8
"""Buckets per direction at most."""

_RAMPED = 8
"""Long ops begin with smaller pieces if a piece may have this many blocks or more."""


def buckets_up_to(num_blocks: int, *, pads_free: bool = False) -> tuple[int, ...]:
    """The numbers of blocks to compile for, ascending: powers of two, the largest at most `num_blocks`. Only every
    other power if padding takes a program no time (`pads_free`)."""
    largest = num_blocks.bit_length() - 1
    powers = range(largest, max(-1, largest - MAX_BUCKETS), -2 if pads_free else -1)
    return tuple(1 << power for power in reversed(powers))


def bucket_of(buckets: Sequence[int], num_blocks: int) -> int:
    """The smallest bucket that holds this many blocks."""
    return next(bucket for bucket in buckets if bucket >= num_blocks)


def pieces_of(num_blocks: int, most: int) -> list[range]:
    """The pieces of an op, each of up to `most` blocks. The first ones of a long op are smaller, so that the second
    stage begins a millisecond or two earlier."""
    sizes = [most // 4, most // 4, most // 2] if num_blocks > most >= _RAMPED else []
    left = num_blocks - sum(sizes)
    sizes += [most] * (left // most) + [left % most] * bool(left % most)
    return [range(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]


class DevicePrograms:
    """The programs of one device. `gather` and `scatter` launch them without waiting, on the host's thread.

    The blocks travel as *rows*: an array `[bucket, width]` with the pages of all layers of a block in a row.

    On the CPU, a gather writes to rows of an earlier one, because new memory would take four times as long as the
    copies: the kernel has to clear it.
    """

    def __init__(self, kv: ShardedKV, device: jax.Device, buckets: Sequence[int]) -> None:
        """Compiles nothing; `compile_all` does."""
        self.device = device
        self._kv, self._buckets = kv, buckets
        self.reuses_rows = copies_rows(kv)
        self._compiler_options = {"xla_disable_hlo_passes": _float_pass(kv.dtype)} if self.reuses_rows else None
        self._gathers: dict[int, jax.stages.Compiled] = {}
        self._scatters: dict[int, jax.stages.Compiled] = {}

    @property
    def sharding(self) -> SingleDeviceSharding:
        return SingleDeviceSharding(self.device)

    @property
    def width(self) -> int:
        """Elements of one block."""
        return sum(self._kv.page_elements)

    def gather(self, shards: Shards, blocks: Sequence[int], reused: jax.Array | None = None) -> jax.Array:
        """The rows of these blocks. Any program that is launched later may overwrite the blocks. `reused`: rows of an
        earlier gather of this bucket, which nothing uses any more. They are deleted, and the new rows take their
        memory. Without them, or if `reuses_rows` is False, the rows are in new memory of the device."""
        bucket = bucket_of(self._buckets, len(blocks))
        rows: jax.Array
        if self.reuses_rows:
            indices = _padded(blocks, bucket, self._kv.num_blocks)
            # This memory is not JAX's own, so the gather copies it to memory that is.
            new = np.zeros((bucket, self.width), self._kv.dtype) if reused is None else reused
            rows = self._gathers[bucket](shards, indices, new)
        else:
            rows = self._gathers[bucket](shards, _padded(blocks, bucket, blocks[0]), None)
        return rows

    def scatter(self, shards: Shards, blocks: Sequence[int], rows: jax.Array) -> tuple[Shards, jax.Array]:
        """Write these blocks. Returns new arrays in the memory of `shards`, which are deleted, and the witness, a small
        array that is ready when the blocks are written. (The new arrays cannot show that, because the next step deletes
        them.)"""
        bucket = rows.shape[0]
        indices = _padded(blocks, bucket, self._kv.num_blocks)
        written, witness = self._scatters[bucket](shards, indices, rows)
        return list(written), witness

    def _compile_gather(self, bucket: int) -> None:
        shards, indices, rows = self._arguments(bucket)
        self._gathers[bucket] = _GATHER.lower(shards, indices, rows if self.reuses_rows else None).compile(
            self._compiler_options
        )

    def _compile_scatter(self, bucket: int) -> None:
        self._scatters[bucket] = _SCATTER.lower(*self._arguments(bucket), row_by_row=self.reuses_rows).compile(
            self._compiler_options
        )

    def _arguments(self, bucket: int) -> tuple[list[jax.ShapeDtypeStruct], jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        def argument(shape: tuple[int, ...], dtype: np.dtype) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=self.sharding)

        shards = [argument(part, self._kv.dtype) for part in self._kv.parts]
        return shards, argument((bucket,), np.dtype(np.int32)), argument((bucket, self.width), self._kv.dtype)


def copies_rows(kv: ShardedKV) -> bool:
    """Whether programs are loops of copies, which skip the padding, as on the CPU."""
    platform: str = kv.devices[0].platform
    return platform == "cpu"


def _float_pass(dtype: np.dtype) -> str:
    """The pass of XLA that widens narrow floats and narrows them again. It converts whole arrays to copy a page of them
    (bfloat16 with JAX 0.10, floats of 8 bits with all versions so far), and the programs here only copy, so it is
    disabled. Integer views would not avoid it: made in the program, they are copies of the arrays, too."""
    return f"float-normalization-{dtype.name.replace('bfloat', 'bf').replace('float', 'f').replace('_', '')}"


def compile_all(programs: Sequence[DevicePrograms], buckets: Sequence[int], threads: int) -> None:
    """Compile for all buckets, on `threads` threads at once: XLA releases the interpreter while it compiles. The
    threads do not inherit a mesh that the host has set for its own programs."""
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
    """The block numbers, padded to the bucket. Each launch has an array of its own, because XLA on the CPU reads it in
    place, and later."""
    indices = np.full(bucket, padding, np.int32)
    indices[: len(blocks)] = blocks
    return indices


def _gather(shards: list[jax.Array], indices: jax.Array, rows: jax.Array | None) -> jax.Array:
    """The rows of the blocks, written to `rows` if given."""
    if rows is not None:
        return _read_rows(shards, indices, rows)
    pages = [jnp.take(shard, indices, axis=0, mode="clip").reshape(len(indices), -1) for shard in shards]
    return jnp.concatenate(pages, axis=1)


def _scatter(
    shards: list[jax.Array], indices: jax.Array, rows: jax.Array, *, row_by_row: bool
) -> tuple[list[jax.Array], jax.Array]:
    """`row_by_row`: whether to write in a loop of copies. XLA on the CPU scatters pages of 64 KiB at 3 % of the speed
    of such a loop, and gathers them at a sixth of it."""
    if row_by_row:
        written = _write_rows(shards, indices, rows)
    else:
        written = [
            shard.at[indices].set(rows[:, start:end].reshape(len(indices), *shard.shape[1:]), mode="drop")
            for shard, (start, end) in zip(shards, _places(shards), strict=True)
        ]
    return written, jnp.stack([shard[(0,) * shard.ndim] for shard in written])


def _places(shards: Sequence[jax.Array]) -> list[tuple[int, int]]:
    """The start and the end of each layer's page in a row, in elements."""
    widths = [math.prod(shard.shape[1:]) for shard in shards]
    return list(pairwise(accumulate(widths, initial=0)))


# Loops of copies, page by page. Padding is at the end of `indices`.


def _read_rows(shards: list[jax.Array], indices: jax.Array, rows: jax.Array) -> jax.Array:
    def read(row: jax.Array, rows: jax.Array) -> jax.Array:
        for shard, (start, _) in zip(shards, _places(shards), strict=True):
            page = jax.lax.dynamic_index_in_dim(shard, indices[row], keepdims=True).reshape(1, -1)
            rows = jax.lax.dynamic_update_slice(rows, page, (row, np.int32(start)))
        return rows

    read_rows: jax.Array = jax.lax.fori_loop(0, _count(shards, indices), read, rows)
    return read_rows


def _write_rows(shards: list[jax.Array], indices: jax.Array, rows: jax.Array) -> list[jax.Array]:
    def write(row: jax.Array, shards: list[jax.Array]) -> list[jax.Array]:
        written = []
        for shard, (start, end) in zip(shards, _places(shards), strict=True):
            page = jax.lax.dynamic_slice(rows, (row, np.int32(start)), (1, end - start))
            page = page.reshape(1, *shard.shape[1:])
            written.append(jax.lax.dynamic_update_slice_in_dim(shard, page, indices[row], axis=0))
        return written

    return list(jax.lax.fori_loop(0, _count(shards, indices), write, shards))


def _count(shards: list[jax.Array], indices: jax.Array) -> jax.Array:
    return jnp.sum(indices < shards[0].shape[0], dtype=jnp.int32)


# All devices use these two functions, so that they share what JAX has traced.
_GATHER = jax.jit(_gather, donate_argnums=2)
_SCATTER = jax.jit(_scatter, static_argnames="row_by_row", donate_argnums=0)
