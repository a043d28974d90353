from __future__ import annotations

import pytest

from kvstow.errors import ConfigError
from kvstow_service.replay.trace import SHAPES, even_shape, shape_named


def test_the_shapes_are_those_of_the_models() -> None:
    sizes = {name: (shape.layers, shape.page_bytes >> 10) for name, shape in SHAPES.items()}
    assert sizes == {"llama-3-8b": (32, 64), "llama-3-70b-tp8": (80, 8), "mla-18k": (61, 18), "gpt-oss-32k": (36, 32)}


@pytest.mark.parametrize("name", SHAPES)
def test_a_slot_holds_a_page_of_each_layer(name: str) -> None:
    shape = shape_named(name)
    layout = shape.layout(num_blocks=5)
    assert (len(layout.regions), layout.num_blocks, layout.slot_bytes) == (shape.layers, 5, shape.slot_bytes)


@pytest.mark.parametrize(("slot_bytes", "layers"), [(4096, 4), (4097, 1)])
def test_other_sizes_are_spread_evenly(slot_bytes: int, layers: int) -> None:
    shape = even_shape(slot_bytes)
    assert (shape.layers, shape.slot_bytes) == (layers, slot_bytes)


def test_an_unknown_shape_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="--shape is 'gpt-2'; allowed: llama-3-8b or "):
        shape_named("gpt-2")
