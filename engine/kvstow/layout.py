"""Where a block's bytes are: its pages in the regions of the device, and their place in a host slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from kvstow.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Region:
    """A strided area of the device, `[num_blocks, page_bytes]`: block `b` is at `b * stride_bytes`."""

    name: str
    num_blocks: int
    page_bytes: int
    stride_bytes: int

    def __post_init__(self) -> None:
        if self.num_blocks < 1:
            raise ConfigError(f"region {self.name}: num_blocks", self.num_blocks, "1 or more")
        if self.page_bytes < 1:
            raise ConfigError(f"region {self.name}: page_bytes", self.page_bytes, "1 or more")
        if self.num_blocks > 1 and self.stride_bytes < self.page_bytes:
            raise ConfigError(f"region {self.name}: stride_bytes", self.stride_bytes, f"at least {self.page_bytes}")

    def require(self, dtype: str, shape: Sequence[int], strides: Sequence[int]) -> None:
        """Raises `ConfigError` unless a tensor of this type, with these strides in bytes, is the region."""
        key = f"region {self.name}"
        if dtype != "uint8":
            raise ConfigError(key, dtype, "uint8")
        if tuple(shape) != (self.num_blocks, self.page_bytes):
            raise ConfigError(key, tuple(shape), f"shape {(self.num_blocks, self.page_bytes)}")
        if self.page_bytes > 1 and strides[1] != 1:
            raise ConfigError(key, tuple(strides), "rows without gaps between their bytes")
        if self.num_blocks > 1 and strides[0] != self.stride_bytes:
            raise ConfigError(key, strides[0], f"a row stride of {self.stride_bytes} bytes")


class Span(NamedTuple):
    """Bytes `start` to `start + size` of each page of region number `region`."""

    region: int
    start: int
    size: int


Part = tuple[Span, ...]
"""What one step of a computation reads of each block, such as the KV of a layer."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """All regions of one rank. A slot holds a block's pages in this order, back to back."""

    regions: tuple[Region, ...]

    def __post_init__(self) -> None:
        if not self.regions:
            raise ConfigError("regions", self.regions, "one or more")
        counts = {region.num_blocks for region in self.regions}
        if len(counts) > 1:
            raise ConfigError("regions: num_blocks", sorted(counts), "the same number in every region")

    @property
    def num_blocks(self) -> int:
        return self.regions[0].num_blocks

    @property
    def slot_bytes(self) -> int:
        """Bytes of one block over all regions."""
        return sum(region.page_bytes for region in self.regions)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Byte offset of each region's page within a slot."""
        return tuple(accumulate((region.page_bytes for region in self.regions), initial=0))[:-1]

    @property
    def parts(self) -> tuple[Part, ...]:
        """Parts that are one region each."""
        return tuple((Span(number, 0, region.page_bytes),) for number, region in enumerate(self.regions))

    def require_parts(self, parts: Sequence[Part]) -> None:
        """Raises `ConfigError` unless the parts cover each byte of a page once."""
        ends = [0] * len(self.regions)
        for region, start, size in sorted(span for part in parts for span in part):
            if not 0 <= region < len(ends) or start != ends[region] or size < 1:
                raise ConfigError("parts", Span(region, start, size), "each byte of each region in one part")
            ends[region] = start + size
        if ends != [region.page_bytes for region in self.regions]:
            raise ConfigError("parts", ends, "each byte of each region in one part")

    def require(self, slot_bytes: int, num_tensors: int) -> None:
        """Raises `ConfigError` unless a block has exactly `slot_bytes` bytes, and there is a tensor for each region."""
        if self.slot_bytes != slot_bytes:
            raise ConfigError("slot_bytes", slot_bytes, f"{self.slot_bytes}, the sum of the layout's pages")
        if len(self.regions) != num_tensors:
            raise ConfigError("tensors", num_tensors, f"{len(self.regions)}, one per region")
