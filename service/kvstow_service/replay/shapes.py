"""Shapes of well-known models' KV caches, so that a replay moves pages as large, and as many, as theirs."""

from __future__ import annotations

from dataclasses import dataclass

from kvstow.errors import ConfigError
from kvstow.layout import KVLayout, Region

_EVEN_LAYERS = 4  # enough to exercise gathering from several regions


@dataclass(frozen=True, slots=True)
class Shape:
    """One rank's KV cache: `layers` regions with a page of `page_bytes` per block, say of 16 tokens."""

    name: str
    layers: int
    page_bytes: int

    @property
    def slot_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self.layers * self.page_bytes

    def layout(self, num_blocks: int) -> KVLayout:
        names = (f"layer.{layer}" for layer in range(self.layers))
        return KVLayout(tuple(Region(name, num_blocks, self.page_bytes, self.page_bytes) for name in names))


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("llama-3-8b", layers=32, page_bytes=64 << 10),  # 8 KV heads x 128 x K and V, bf16, 16 tokens
        Shape("llama-3-70b-tp8", layers=80, page_bytes=8 << 10),  # the same on each of 8 ranks: one KV head
        Shape("mla-18k", layers=61, page_bytes=18 << 10),  # DeepSeek-V3: 576 values a token, bf16, 16 tokens
        Shape("gpt-oss-32k", layers=36, page_bytes=32 << 10),  # gpt-oss-120b: 8 KV heads x 64 x K and V, bf16
    )
}


def shape_named(name: str) -> Shape:
    """Raises `ConfigError` for a name that is not in `SHAPES`."""
    if name not in SHAPES:
        raise ConfigError("--shape", name, " or ".join(SHAPES))
    return SHAPES[name]


def even_shape(slot_bytes: int) -> Shape:
    """`slot_bytes` over four equal layers, or one where four do not divide it."""
    layers = _EVEN_LAYERS if slot_bytes % _EVEN_LAYERS == 0 else 1
    return Shape("even", layers, slot_bytes // layers)
