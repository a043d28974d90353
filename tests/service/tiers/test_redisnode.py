"""Node services that share a real Redis."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.service.node.noderunner import put_blocks
from tests.service.node.rawengine import RawEngine, key_of
from tests.service.tiers.redisserver import Server

from kvstow_service.node.node import Node

pytestmark = [
    pytest.mark.tier,
    pytest.mark.usefixtures("patient"),
    pytest.mark.skipif(
        find_spec("redis") is None or shutil.which("redis-server") is None,
        reason="redis-py or redis-server is not installed: make test-tier",
    ),
]


def test_what_one_node_has_stored_another_one_hits(
    make_tiered_node: Callable[[str], Node], engines: Callable[[Path], RawEngine], serve: Callable[..., Server]
) -> None:
    url = f"redis://127.0.0.1:{serve().port}"
    here, there = make_tiered_node(url), make_tiered_node(url)
    keys = [key_of(number) for number in range(12)]  # a lease holds half of a pool at most
    first = engines(here.settings.attach_path)
    first.store_until_found(keys)
    first.wait_for(lambda: put_blocks(here) >= len(keys))  # a block that was evicted and stored again is put again
    second = engines(there.settings.attach_path)
    second.wait_for(lambda: second.load(keys) == len(keys))  # every byte of both ranks is verified
    for node in (here, there):
        for pool in node.host.pools():
            pool.facade.check_integrity()


def test_a_redis_that_ends_costs_hits_and_no_answer_and_its_successor_is_used(
    make_tiered_node: Callable[[str], Node], engines: Callable[[Path], RawEngine], serve: Callable[..., Server]
) -> None:
    server = serve()
    node = make_tiered_node(f"redis://127.0.0.1:{server.port}")
    engine = engines(node.settings.attach_path)
    server.kill()
    engine.store_until_found([key_of(number) for number in range(6)])

    def tier_state() -> str:
        engine.lookup([key_of(99)])
        assert node.tier is not None
        (one,) = node.tier.tiers()
        return one.state

    engine.wait_for(lambda: tier_state() == "down")
    server.start_again()
    engine.wait_for(lambda: tier_state() == "on")
    more = [key_of(number) for number in range(20, 24)]
    engine.store_until_found(more)
    engine.wait_for(lambda: put_blocks(node) >= len(more))
