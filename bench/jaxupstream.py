"""tpu-inference's own offload of KV blocks, with which `bench.jax` compares.

It does what `TPUOffloadConnectorWorker` of tpu-inference 0.26 does (`offload/tpu_offload_connector.py`, `utils.py`).
The programs are those of its `pure_jax_*` functions, because the others run only on TPUs:

- A store stacks up to 64 blocks across the layers and splits them into an array for each block, in one program to which
  the KV cache is donated (`stack_kv_cache_cross_layers`). One `device_put` for each block brings it to pinned memory.
  Then the store waits for all of them (`_transfer_and_register_cpu_chunks`).
- A load calls `device_put` for each block, and waits for all of them. One program scatters them into the donated KV
  cache (`update_kv_caches_one`), for which the load waits again.

There is no pool. A block on the host is an array of its own, whose memory is allocated by the store. So the first store
of a chunk takes longer than one that replaces it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from kvstow.devices.jax import ArrayCell

MOST_BLOCKS = 64  # the most blocks of one program


class UpstreamOffload:
    def __init__(self, cell: ArrayCell) -> None:
        """`cell` has arrays of one shape, which are sharded alike."""
        self._cell = cell
        sharding = cell.peek()[0].sharding
        assert isinstance(sharding, NamedSharding)
        of_block = PartitionSpec(None, None, *sharding.spec[1:])
        self._on_host = NamedSharding(sharding.mesh, of_block, memory_kind="pinned_host")
        self._on_device = NamedSharding(sharding.mesh, of_block)
        self.chunks: dict[int, Any] = {}

    def store(self, blocks: Sequence[int], chunks: Sequence[int]) -> None:
        arrays, stacked = _stack(list(self._cell.take()), np.array(blocks, np.int32))
        self._cell.put(arrays)
        on_host = [jax.device_put(block, self._on_host) for block in stacked]
        jax.block_until_ready(on_host)
        self.chunks.update(zip(chunks, on_host, strict=True))

    def load(self, blocks: Sequence[int], chunks: Sequence[int]) -> None:
        stacked = [jax.device_put(self.chunks[chunk], self._on_device) for chunk in chunks]
        jax.block_until_ready(stacked)
        arrays = _update(list(self._cell.take()), stacked, np.array(blocks, np.int32))
        self._cell.put(arrays)
        jax.block_until_ready(arrays)


@partial(jax.jit, donate_argnums=0)
def _stack(arrays: list[jax.Array], blocks: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
    stacked = jnp.stack([array.at[blocks].get() for array in arrays], axis=1)
    split = jnp.split(stacked, len(blocks), axis=0)
    return jax.lax.optimization_barrier(arrays), split


@partial(jax.jit, donate_argnums=0)
def _update(arrays: list[jax.Array], stacked: list[jax.Array], blocks: jax.Array) -> list[jax.Array]:
    layers = jnp.unstack(jnp.concatenate(stacked, axis=0), axis=1)
    return [array.at[blocks].set(layer) for array, layer in zip(arrays, layers, strict=True)]
