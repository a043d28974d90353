from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from tests.engine.conftest import Eventually
from tests.engine.control.conftest import MakeEngine
from tests.engine.control.fleettier.tierednode import BLOCK_TOKENS, RANKS, MakeNode, TieredNode

from kvstow.control.fleettier import TierSettings
from kvstow.testing.fakes import FakeClock
from kvstow.testing.tier import ControlledStore


@pytest.fixture
def make_node(make_engine: MakeEngine, clock: FakeClock, eventually: Eventually) -> Iterator[MakeNode]:
    """Nodes on a fake clock, which are closed at the end. `store`: by default one of their own. `off_reason`: see
    `TieredNode`."""
    nodes: list[TieredNode] = []

    def make(
        slots: int = 12, *, store: ControlledStore | None = None, off_reason: str = "", **settings: Any
    ) -> TieredNode:
        engine = make_engine(slots, RANKS, block_tokens=BLOCK_TOKENS)
        nodes.append(TieredNode(engine, clock, TierSettings(**settings), eventually, store, off_reason))
        return nodes[-1]

    yield make
    for node in nodes:
        node.store_of_names.lookups.open()
        node.fleet.close()


@pytest.fixture
def node(make_node: MakeNode) -> TieredNode:
    return make_node()


@pytest.fixture(autouse=True)
def no_log_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "kvstow.tier")
