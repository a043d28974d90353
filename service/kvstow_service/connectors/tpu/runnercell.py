"""The KV cache of tpu-inference's model runner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import jax

from kvstow.devices.jax.shards import ShardedKV
from kvstow.errors import ConfigError


class Runner(Protocol):
    """The part of tpu-inference's `TPUModelRunner` that is used. `kv_caches`: one array for each layer, or group of
    layers that share memory; each step replaces the list. `kv_cache_manager` frees and makes the arrays."""

    kv_caches: list[jax.Array]
    kv_cache_manager: Any


class RunnerCell:
    """A `KVCell`. The arrays stay with the runner, and its next step takes them from there."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def peek(self) -> Sequence[jax.Array]:
        return self._runner.kv_caches

    def take(self) -> Sequence[jax.Array]:
        return self._runner.kv_caches

    def put(self, arrays: Sequence[jax.Array]) -> None:
        self._runner.kv_caches = list(arrays)


def has_cache(runner: Runner) -> bool:
    """Whether the runner has a KV cache now. It may have freed the cache."""
    return bool(runner.kv_caches) and not any(array.is_deleted() for array in jax.tree.leaves(runner.kv_caches))


def read_cache(runner: Runner, num_blocks: int) -> ShardedKV:
    """How the runner's KV cache lies on the devices. Raises `ConfigError` for a layout that KVStow does not support."""
    for number, array in enumerate(runner.kv_caches):
        if not isinstance(array, jax.Array):
            raise ConfigError(f"KV cache {number}", type(array).__name__, "one array for each layer")
        if array.shape[0] != num_blocks:
            raise ConfigError(f"KV cache {number}: blocks", array.shape[0], f"{num_blocks}, as the scheduler has")
    return ShardedKV.of(runner.kv_caches)
