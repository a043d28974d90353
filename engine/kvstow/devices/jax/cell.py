"""The KV cache of a JAX program: arrays that each step replaces, kept in a cell that holds the current ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import jax

from kvstow.errors import CopyError


class KVCell(Protocol):
    """Owns the current KV arrays, one per layer. Nobody else keeps arrays, shards or numpy views of them: a step
    donates their memory to its outputs, and with a view alive it would copy the whole cache instead.

    Used by the host's thread alone."""

    def peek(self) -> Sequence[jax.Array]:
        """The arrays, for a program that only reads them and is launched before the next `take`."""

    def take(self) -> Sequence[jax.Array]:
        """The arrays, for a program that replaces them. The cell is empty until `put`."""

    def put(self, arrays: Sequence[jax.Array]) -> None:
        """The arrays that the program has returned."""


class ArrayCell:
    """A `KVCell` for hosts that keep their KV arrays nowhere else. Raises `CopyError` if it is used while empty: two
    programs that replace the same arrays would lose the writes of one."""

    def __init__(self, arrays: Sequence[jax.Array]) -> None:
        self._arrays: tuple[jax.Array, ...] | None = tuple(arrays)

    def peek(self) -> tuple[jax.Array, ...]:
        if self._arrays is None:
            raise CopyError("the KV arrays were taken, and not put back yet")
        return self._arrays

    def take(self) -> tuple[jax.Array, ...]:
        arrays = self.peek()
        self._arrays = None
        return arrays

    def put(self, arrays: Sequence[jax.Array]) -> None:
        if self._arrays is not None:
            raise CopyError("the KV arrays were put back without being taken")
        self._arrays = tuple(arrays)
