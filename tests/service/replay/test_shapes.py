from __future__ import annotations

import pytest

from kvstow_service.replay.trace import SHAPES, even_shape, shape_named


@pytest.mark.parametrize("name", SHAPES)
def test_a_slot_holds_a_page_of_each_layer(name: str) -> None:
    shape = shape_named(name)
    layout = shape.layout(num_blocks=5)
    assert (len(layout.regions), layout.num_blocks, layout.slot_bytes) == (shape.layers, 5, shape.slot_bytes)


@pytest.mark.parametrize(("slot_bytes", "layers"), [(4096, 4), (4097, 1)])
def test_other_sizes_are_spread_evenly(slot_bytes: int, layers: int) -> None:
    shape = even_shape(slot_bytes)
    assert (shape.layers, shape.slot_bytes) == (layers, slot_bytes)
