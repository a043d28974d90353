"""The KV cache of a JAX program: how its arrays lie on the devices of this process, and the cell that holds the current
ones, because each step replaces them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import jax
import numpy as np

from kvstow.errors import ConfigError, CopyError
from kvstow.layout import KVLayout, Region

Shards = list[jax.Array]
"""One device's part of each KV array."""


@dataclass(frozen=True)
class ShardedKV:
    """Shapes and placement of the KV arrays, which stay the same while the arrays are replaced.

    Array `i` is `[num_blocks, ...]`, and each device of this process has a part of every block (or all of it). A slot
    holds the parts device by device, each with its layers in order, so one device's part of a block is contiguous.
    """

    devices: tuple[jax.Device, ...]
    dtype: np.dtype
    shapes: tuple[tuple[int, ...], ...]
    shardings: tuple[jax.sharding.Sharding, ...]
    parts: tuple[tuple[int, ...], ...]
    """The shape of each array's part on one device."""

    @classmethod
    def of(cls, arrays: Sequence[jax.Array]) -> ShardedKV:
        """Describe these arrays. Raises `ConfigError` if they are no KV cache that KVStow can offload."""
        if not arrays:
            raise ConfigError("KV arrays", 0, "one or more")
        first = arrays[0]
        devices = tuple(sorted(first.sharding.addressable_devices, key=lambda device: device.id))
        for number, array in enumerate(arrays):
            _check(f"KV array {number}", array, first, devices)
        return cls(
            devices,
            np.dtype(first.dtype),
            tuple(array.shape for array in arrays),
            tuple(array.sharding for array in arrays),
            tuple(array.sharding.shard_shape(array.shape) for array in arrays),
        )

    @property
    def num_blocks(self) -> int:
        return self.shapes[0][0]

    @cached_property
    def page_elements(self) -> tuple[int, ...]:
        """Elements of one block in each array's part."""
        return tuple(math.prod(part[1:]) for part in self.parts)

    @cached_property
    def part_bytes(self) -> int:
        """Bytes of one block on one device."""
        return sum(self.page_elements) * self.dtype.itemsize

    @cached_property
    def layout(self) -> KVLayout:
        """The layout of a slot."""
        sizes = [elements * self.dtype.itemsize for elements in self.page_elements]
        return KVLayout(
            tuple(
                Region(f"{device.id}/{layer}", self.num_blocks, size, size)
                for device in self.devices
                for layer, size in enumerate(sizes)
            )
        )

    def split(self, arrays: Sequence[jax.Array]) -> list[Shards]:
        """The parts of `arrays` by device. Raises `CopyError` if they are not the KV cache any more: a program that is
        given deleted arrays may end the process."""
        if len(arrays) != len(self.shapes):
            raise CopyError(f"the KV cache has {len(arrays)} arrays; it was registered with {len(self.shapes)}")
        split: list[Shards] = [[] for _ in self.devices]
        for number, array in enumerate(arrays):
            self._check_current(number, array)
            if len(split) == 1:  # takes a quarter of the time of the general way below
                split[0].append(array.addressable_data(0))
                continue
            by_device = {shard.device: shard.data for shard in array.addressable_shards}
            for shards, device in zip(split, self.devices, strict=True):
                shards.append(by_device[device])
        return split

    def join(self, split: Sequence[Shards]) -> list[jax.Array]:
        """The opposite of `split`. Launches nothing and talks to no other process."""
        return [
            jax.make_array_from_single_device_arrays(shape, sharding, [shards[number] for shards in split])
            for number, (shape, sharding) in enumerate(zip(self.shapes, self.shardings, strict=True))
        ]

    def _check_current(self, number: int, array: jax.Array) -> None:
        if array.is_deleted():
            raise CopyError(f"KV array {number} was deleted: its memory was donated or freed")
        if array.shape != self.shapes[number] or array.dtype != self.dtype:
            expected = f"{self.shapes[number]} {self.dtype}"
            raise CopyError(f"KV array {number} is {array.shape} {array.dtype}; it was registered as {expected}")
        expected_sharding = self.shardings[number]
        if array.sharding is not expected_sharding and not array.sharding.is_equivalent_to(
            expected_sharding, len(array.shape)
        ):
            raise CopyError(
                f"KV array {number} is sharded as {array.sharding}; it was registered as {expected_sharding}"
            )


def _check(key: str, array: jax.Array, first: jax.Array, devices: Sequence[jax.Device]) -> None:
    if array.ndim < 2 or 0 in array.shape:
        raise ConfigError(key, array.shape, "a shape [num_blocks, ...] without a 0")
    if array.shape[0] != first.shape[0]:
        raise ConfigError(f"{key}: blocks", array.shape[0], f"{first.shape[0]}, as in KV array 0")
    if array.dtype != first.dtype:
        raise ConfigError(f"{key}: dtype", str(array.dtype), f"{first.dtype}, as in KV array 0")
    if array.sharding.addressable_devices != set(devices):
        raise ConfigError(f"{key}: devices", str(array.sharding), "the devices of KV array 0")
    if array.sharding.shard_shape(array.shape)[0] != array.shape[0]:
        raise ConfigError(f"{key}: sharding", str(array.sharding), "every block on every device, whole or in part")


class KVCell(Protocol):
    """Owns the current KV arrays, one per layer. No other object keeps arrays, shards or numpy views of them, because a
    step donates their memory to its outputs, and would copy the whole cache instead if a view were alive.

    Only the host's thread uses it."""

    def peek(self) -> Sequence[jax.Array]:
        """The arrays, for a program that only reads them and is launched before the next `take`."""

    def take(self) -> Sequence[jax.Array]:
        """The arrays, for a program that replaces them. The cell is empty until `put`."""

    def put(self, arrays: Sequence[jax.Array]) -> None:
        """Put back the arrays that the program has returned."""


class ArrayCell:
    """A `KVCell` for hosts that keep their KV arrays nowhere else. Raises `CopyError` if it is used while empty: two
    programs that replace the same arrays would lose the writes of one."""

    def __init__(self, arrays: Sequence[jax.Array]) -> None:
        self._arrays: tuple[jax.Array, ...] | None = tuple(arrays)

    def peek(self) -> tuple[jax.Array, ...]:
        if self._arrays is None:
            raise CopyError("the KV arrays were taken and not put back: call `put` with the arrays of that program")
        return self._arrays

    def take(self) -> tuple[jax.Array, ...]:
        arrays = self.peek()
        self._arrays = None
        return arrays

    def put(self, arrays: Sequence[jax.Array]) -> None:
        if self._arrays is not None:
            raise CopyError("the KV arrays were put back without being taken")
        self._arrays = tuple(arrays)
