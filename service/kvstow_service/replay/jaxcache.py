"""The KV cache of a replay on JAX, in arrays of one device. Its steps replace them, as those of an engine do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from kvstow.bytesize import format_size
from kvstow.devices.jax import ArrayCell, JaxDevice
from kvstow.errors import InsufficientMemoryError
from kvstow.keys import BlockKey
from kvstow.layout import KVLayout
from kvstow.memory.mlock import MlockRegistrar
from kvstow_service.replay.kv import Mismatch, Verification
from kvstow_service.replay.pattern import SCRUB, Page, PagePattern, seed_of
from kvstow_service.replay.rankcache import RankCache

_STEP_BLOCKS = 16  # that one program reads or writes: each other number would be another program


class JaxKV:
    """The KV cache of one rank: array `i` in `cell` is region `i`, uint8 `[num_blocks, page_bytes]`. Used by the thread
    that launches programs."""

    def __init__(self, rank: int, cell: ArrayCell) -> None:
        self._rank, self._cell = rank, cell
        self._sizes = [array.shape[1] for array in cell.peek()]
        self._num_blocks = cell.peek()[0].shape[0]
        self._patterns = {size: PagePattern(size) for size in self._sizes}
        self._write = jax.jit(_write, donate_argnums=0)
        self._fill = jax.jit(_fill, donate_argnums=0)
        self._read = jax.jit(_read)

    def write(self, keys: Sequence[BlockKey], blocks: Sequence[int]) -> None:
        for start in range(0, len(blocks), _STEP_BLOCKS):
            some = blocks[start : start + _STEP_BLOCKS]
            pages = [np.zeros((_STEP_BLOCKS, size), np.uint8) for size in self._sizes]
            for row, key in enumerate(keys[start : start + _STEP_BLOCKS]):
                for region in range(len(pages)):
                    pages[region][row] = self._page(key, region)
            self._replace(self._write, some, pages)

    def check(self, keys: Sequence[BlockKey], blocks: Sequence[int]) -> Verification:
        mismatches: list[Mismatch] = []
        for start in range(0, len(blocks), _STEP_BLOCKS):
            some = blocks[start : start + _STEP_BLOCKS]
            found = [np.asarray(pages) for pages in self._read(self._cell.peek(), self._indices(some))]
            for row, (key, block) in enumerate(zip(keys[start : start + _STEP_BLOCKS], some, strict=True)):
                regions = range(len(found))
                wrong = next((at for at in regions if not np.array_equal(found[at][row], self._page(key, at))), None)
                if wrong is not None:
                    mismatches.append(Mismatch(key, self._rank, wrong, block))
        return Verification(len(blocks) * sum(self._sizes), tuple(mismatches))

    def scrub(self, blocks: Sequence[int]) -> None:
        for start in range(0, len(blocks), _STEP_BLOCKS):
            self._replace(self._fill, blocks[start : start + _STEP_BLOCKS])

    def fence(self) -> None:
        """JAX orders programs by the arrays that they use."""

    def _page(self, key: BlockKey, region: int) -> Page:
        return self._patterns[self._sizes[region]].page(seed_of(key, self._rank, region))

    def _replace(self, program: Callable[..., Any], blocks: Sequence[int], *values: Any) -> None:
        arrays = self._cell.take()
        try:
            arrays = program(arrays, self._indices(blocks), *values)
        finally:
            self._cell.put(arrays)

    def _indices(self, blocks: Sequence[int]) -> np.ndarray:
        """Padded with an index that programs drop."""
        indices = np.full(_STEP_BLOCKS, self._num_blocks, np.int32)
        indices[: len(blocks)] = blocks
        return indices


def make_jax_cache(rank: int, layout: KVLayout) -> RankCache:
    """See `make_cache`. Ranks take the devices in turn."""
    devices = jax.local_devices()
    cell = ArrayCell(_allocate(layout, devices[rank % len(devices)]))
    return RankCache(layout, JaxKV(rank, cell), MlockRegistrar(), lambda pool: JaxDevice(pool, cell), launches=True)


def _allocate(layout: KVLayout, device: jax.Device) -> list[jax.Array]:
    """Made by a program, because only such memory can be replaced in place."""
    shapes = [(layout.num_blocks, region.page_bytes) for region in layout.regions]
    zeros = jax.jit(
        lambda: [jnp.zeros(shape, jnp.uint8) for shape in shapes], out_shardings=SingleDeviceSharding(device)
    )
    try:
        return list(jax.block_until_ready(zeros()))
    except jax.errors.JaxRuntimeError as error:
        size = format_size(layout.num_blocks * layout.slot_bytes)
        raise InsufficientMemoryError(f"{size} of KV cache do not fit on {device}: {error}") from error


def _write(arrays: Any, indices: jax.Array, pages: Any) -> list[jax.Array]:
    return [array.at[indices].set(page, mode="drop") for array, page in zip(arrays, pages, strict=True)]


def _fill(arrays: Any, indices: jax.Array) -> list[jax.Array]:
    return [array.at[indices].set(jnp.uint8(SCRUB), mode="drop") for array in arrays]


def _read(arrays: Any, indices: jax.Array) -> list[jax.Array]:
    return [jnp.take(array, indices, axis=0, mode="clip") for array in arrays]
