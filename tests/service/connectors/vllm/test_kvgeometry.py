"""Geometry: of every layout that vLLM gives its KV cache, a block is exactly its bytes, and as few pages as they allow.

What a block's bytes are is asked of torch: each layer's view of the block is written, and the storage is looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstow.errors import ConfigError
from kvstow_service.connectors.vllm.rankdataplane import KVGeometry, kv_geometry

BLOCKS, LAYERS, HEADS, TOKENS, WIDTH = 5, 3, 2, 4, 6
LOGICAL = "BHNC"
SIZES = {"L": LAYERS, "B": BLOCKS, "H": HEADS, "N": TOKENS, "C": WIDTH}

Select = Callable[[torch.Tensor, int], torch.Tensor]


class Case(NamedTuple):
    caches: dict[str, Any]
    select: Select = lambda tensor, block: tensor[block]


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def per_layer(make: Callable[[], Any]) -> dict[str, Any]:
    return {f"layer.{number}": make() for number in range(LAYERS)}


def arena(order: str, kernel_blocks: int = 1) -> dict[str, torch.Tensor]:
    """All layers in one storage, whose dimensions lie in this order."""
    sizes = SIZES | {"B": BLOCKS * kernel_blocks, "N": TOKENS // kernel_blocks}
    storage = zeros(*(sizes[name] for name in order))
    logical = storage.permute(*(order.index(name) for name in "L" + LOGICAL))
    return {f"layer.{number}": logical[number] for number in range(LAYERS)}


def packed(page: int, stride: int) -> dict[str, torch.Tensor]:
    """Layers' pages of `page` elements side by side in a block of `stride` elements."""
    storage = zeros(BLOCKS * stride)
    return {
        f"layer.{number}": storage.as_strided((BLOCKS, page), (stride, 1), number * page) for number in range(LAYERS)
    }


def with_state() -> dict[str, Any]:
    """A recurrent layer keeps two tensors of unlike types in one page, with room to spare; another layer has pages."""
    raw = torch.zeros(BLOCKS * 64, dtype=torch.uint8)
    conv = raw.view(torch.bfloat16).as_strided((BLOCKS, 3, 4), (32, 4, 1), 0)
    ssm = raw.view(torch.float32).as_strided((BLOCKS, 5), (16, 1), 6)
    return {"mamba": [conv, ssm], "attention": zeros(BLOCKS, 7), "empty": zeros(0)}


def overlaid() -> dict[str, torch.Tensor]:
    """Layers of two groups in the same memory: a block belongs to one of them at a time."""
    full = zeros(BLOCKS, HEADS, TOKENS, WIDTH)
    return {"full": full, "window": full.view(BLOCKS, 1, 2 * TOKENS, WIDTH), "shared": full[:, 0]}


def of_kernel_blocks(tensor: torch.Tensor, block: int) -> torch.Tensor:
    return tensor[2 * block : 2 * block + 2]


def behind_k_and_v(tensor: torch.Tensor, block: int) -> torch.Tensor:
    return tensor[:, block]


CASES: dict[str, Callable[[], Case]] = {
    "HND": lambda: Case(per_layer(lambda: zeros(BLOCKS, HEADS, TOKENS, WIDTH))),
    "NHD": lambda: Case(per_layer(lambda: zeros(BLOCKS, TOKENS, HEADS, WIDTH).permute(0, 2, 1, 3))),
    "K and V within a block": lambda: Case(per_layer(lambda: zeros(BLOCKS, 2, TOKENS, HEADS, WIDTH))),
    "K and V outermost": lambda: Case(per_layer(lambda: zeros(2, BLOCKS, TOKENS, HEADS, WIDTH)), behind_k_and_v),
    "MLA": lambda: Case(per_layer(lambda: zeros(BLOCKS, TOKENS, WIDTH, dtype=torch.uint8))),
    "packed": lambda: Case(packed(page=10, stride=30)),
    "packed and padded": lambda: Case(packed(page=10, stride=33)),
    "pages with gaps": lambda: Case(per_layer(lambda: zeros(BLOCKS, 16)[:, 3:13])),
    "tokens with gaps": lambda: Case(per_layer(lambda: zeros(BLOCKS, TOKENS, HEADS, WIDTH + 2)[..., :WIDTH])),
    "LBHNC": lambda: Case(arena("LBHNC")),
    "LBNHC": lambda: Case(arena("LBNHC")),
    "LHBNC": lambda: Case(arena("LHBNC")),
    "BLHNC": lambda: Case(arena("BLHNC")),
    "BLNHC": lambda: Case(arena("BLNHC")),
    "BHLNC": lambda: Case(arena("BHLNC")),
    "kernel blocks": lambda: Case(arena("LBHNC", 2), of_kernel_blocks),
    "kernel blocks and split heads": lambda: Case(arena("LHBNC", 2), of_kernel_blocks),
    "kernel blocks behind K and V": lambda: Case(
        per_layer(lambda: zeros(2, 2 * BLOCKS, TOKENS, WIDTH)), lambda tensor, block: tensor[:, 2 * block :][:, :2]
    ),
    "states": lambda: Case(with_state()),
    "overlaid groups": lambda: Case(overlaid()),
}


def storages(caches: dict[str, Any]) -> list[torch.Tensor]:
    """Each storage as bytes."""
    tensors = [one for value in caches.values() for one in (value if isinstance(value, list) else [value])]
    found = {one.untyped_storage().data_ptr(): one.untyped_storage() for one in tensors if one.numel()}
    return [torch.empty(0, dtype=torch.uint8).set_(storage) for storage in found.values()]


def marked(caches: dict[str, Any], mark: Callable[[], None]) -> torch.Tensor:
    """Which bytes of all storages `mark` writes."""
    for storage in storages(caches):
        storage.zero_()
    mark()
    return torch.cat([storage.ne(0) for storage in storages(caches)])


def bytes_of_layers(case: Case, block: int) -> torch.Tensor:
    def mark() -> None:
        for value in case.caches.values():
            for tensor in value if isinstance(value, list) else [value]:
                if tensor.numel():
                    case.select(tensor, block).fill_(-1.7 if tensor.is_floating_point() else 255)  # no byte of it is 0

    return marked(case.caches, mark)


def bytes_of_regions(case: Case, geometry: KVGeometry, block: int) -> torch.Tensor:
    def mark() -> None:
        for tensor in geometry.tensors:
            tensor[block].fill_(255)

    return marked(case.caches, mark)


def check(case: Case) -> KVGeometry:
    geometry = kv_geometry(case.caches, BLOCKS)
    claimed = torch.zeros_like(bytes_of_layers(case, 0), dtype=torch.int64)
    for block in range(BLOCKS):
        expected = bytes_of_layers(case, block)
        found = bytes_of_regions(case, geometry, block)
        assert torch.all(found >= expected), f"block {block} lacks bytes"
        assert torch.all(found <= expected), f"block {block} has bytes of others"
        assert geometry.layout.slot_bytes == int(expected.sum())
        claimed += found
    assert int(claimed.max()) == 1
    for region, tensor in zip(geometry.layout.regions, geometry.tensors, strict=True):
        assert tensor.dtype == torch.uint8
        assert tensor.shape == (region.num_blocks, region.page_bytes) == (BLOCKS, region.page_bytes)
        assert tensor.stride(0) == region.stride_bytes
    return geometry


def num_runs(case: Case) -> int:
    """Into how many contiguous pieces the bytes of a block fall."""
    pieces = 0
    case_bytes = bytes_of_layers(case, 1)
    for storage in storages(case.caches):
        part, case_bytes = case_bytes[: storage.numel()], case_bytes[storage.numel() :]
        ends = torch.diff(part.to(torch.int8), prepend=torch.zeros(1, dtype=torch.int8))
        pieces += int((ends == 1).sum())
    return pieces


@pytest.mark.parametrize("name", CASES)
def test_a_block_is_exactly_its_bytes_in_every_layer(name: str) -> None:
    case = CASES[name]()
    geometry = check(case)
    assert len(geometry.layout.regions) == num_runs(case)


@pytest.mark.parametrize(
    ("name", "regions"),
    [("NHD", 3), ("K and V outermost", 6), ("packed", 1), ("LHBNC", 6), ("BHLNC", 1), ("kernel blocks", 3)],
)
def test_adjacent_bytes_are_one_region(name: str, regions: int) -> None:
    assert len(kv_geometry(CASES[name]().caches, BLOCKS).layout.regions) == regions


@settings(max_examples=40, deadline=None)
@given(order=st.permutations("LBHNC"), kernel_blocks=st.sampled_from([1, 2]))
def test_any_order_of_dimensions_is_read_from_its_strides(order: list[str], kernel_blocks: int) -> None:
    select: Select = of_kernel_blocks if kernel_blocks == 2 else lambda tensor, block: tensor[block]
    case = Case(arena("".join(order), kernel_blocks), select)
    geometry = check(case)
    assert len(geometry.layout.regions) == num_runs(case)


def test_what_a_region_has_does_not_depend_on_the_number_of_blocks() -> None:
    """Engines whose GPUs have room for different numbers of blocks share the blocks in host memory."""
    found = [
        kv_geometry({"a": zeros(blocks, TOKENS, WIDTH), "b": zeros(2, blocks, TOKENS, WIDTH)}, blocks).contents
        for blocks in (BLOCKS, 7)
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("shape", [(BLOCKS + 1, 4), (4, BLOCKS), (BLOCKS + 1,), (3, BLOCKS, 4)])
def test_a_tensor_that_is_not_cut_into_blocks_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=f"KV cache of layer odd.*a first dimension of {BLOCKS} blocks"):
        kv_geometry({"even": zeros(BLOCKS, 4), "odd": zeros(*shape)}, BLOCKS)


@pytest.mark.parametrize("caches", [{}, {"empty": zeros(0)}])
def test_a_cache_without_tensors_is_refused(caches: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="one KV cache tensor or more"):
        kv_geometry(caches, BLOCKS)


def test_each_byte_belongs_to_the_first_layer_that_reads_it() -> None:
    """Layers in one storage, whose regions are joined, and a layer that shares the memory of another one."""
    caches = arena("BLHNC")
    caches["shares"] = caches["layer.1"]
    geometry = kv_geometry(caches, BLOCKS)
    geometry.layout.require_parts(geometry.parts)
    assert len(geometry.layout.regions) == 1
    assert geometry.part_of == {"layer.0": 0, "layer.1": 1, "layer.2": 2, "shares": 1}
    page = HEADS * TOKENS * WIDTH * 2
    assert [part[0].start for part in geometry.parts] == [0, page, 2 * page]


def test_each_layer_with_its_own_tensors_is_a_part() -> None:
    caches = per_layer(lambda: [zeros(BLOCKS, TOKENS, WIDTH), zeros(BLOCKS, HEADS)])
    geometry = kv_geometry(caches, BLOCKS)
    geometry.layout.require_parts(geometry.parts)
    assert [len(part) for part in geometry.parts] == [2] * LAYERS
    assert list(geometry.part_of.values()) == [0, 1, 2]
