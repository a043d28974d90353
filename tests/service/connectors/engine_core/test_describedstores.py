"""KV events of stores of every kind: what a router learns of blocks whose request has ended when they are stored."""

from __future__ import annotations

from typing import Any

import pytest
from tests.service.connectors.engine_core.router import LaterBlocks, Router, indexed, make_feed
from tests.service.connectors.engine_core.vllmhost import (
    ONE_GROUP,
    WITH_SHORT_WINDOW,
    WITH_WINDOW,
    FakeRequest,
    VllmHost,
    keys_of,
)

from kvstow.keys import group_of
from kvstow_service.connectors.engine_core.kvevents import EmbeddedBlocks, EventFeed
from kvstow_service.connectors.engine_core.kvgroups import KVGroups

PROMPT, OTHER = "abcdefghijkl", "abcdmnopqrst"


class RoutedHost(VllmHost):
    def __init__(self, groups: KVGroups = ONE_GROUP, **options: Any) -> None:
        source: Any = LaterBlocks()
        self.feed: EventFeed = make_feed(source, len(groups.groups))
        super().__init__(groups, events=self.feed, **options)
        source.blocks = EmbeddedBlocks(self.engine)
        self.router = Router()

    def serve(self, prompt: str, steps: int = 8) -> FakeRequest:
        request = FakeRequest(prompt, prompt)
        self.ask(request)
        self.run(request)
        self.finish(request)
        for _ in range(steps):
            self.step()
        self.router.follow(self.feed.take_events())
        return request

    def check(self, *prompts: str) -> None:
        """The router knows all that the pool has, and what it holds. Blocks of all groups have one hash each here."""
        expected = {key[2:]: block for prompt in prompts for key, block in indexed(prompt).items()}
        assert self.router.blocks.keys() == self.stored()
        assert {key: expected[key[2:]] for key in self.router.blocks} == self.router.blocks


@pytest.mark.parametrize("groups", [ONE_GROUP, WITH_WINDOW, WITH_SHORT_WINDOW], ids=["full", "window", "short"])
@pytest.mark.parametrize("lazy_blocks", [None, 32], ids=["backlog", "lazy"])
def test_blocks_of_requests_that_have_ended_are_announced_with_their_tokens(
    groups: KVGroups, lazy_blocks: int | None
) -> None:
    host = RoutedHost(groups, lazy_blocks=lazy_blocks, step_blocks=2)
    host.serve(PROMPT)
    host.serve(OTHER)
    host.check(PROMPT, OTHER)
    assert {group_of(key) for key in host.router.blocks} == {group.index for group in groups.groups}
    assert host.engine.admin.purge(keys=keys_of(PROMPT)[2:]).run().finished
    host.router.follow(host.feed.take_events())
    host.check(PROMPT, OTHER)


def test_a_block_that_left_its_window_while_its_request_runs_is_described() -> None:
    """A lazy store finds it in the GPU's free queue, and no request has ended."""
    host = RoutedHost(WITH_SHORT_WINDOW, lazy_blocks=32)
    request = FakeRequest("r", PROMPT)
    host.admit(request, 8)
    host.step({request: 8})
    for _ in range(3):
        host.step({request: 1})
    host.step({request: 1})
    host.router.follow(host.feed.take_events())
    assert host.router.blocks
    host.check(PROMPT)


def test_preempted_blocks_are_announced_with_their_tokens() -> None:
    host = RoutedHost(lazy_blocks=32)
    request = FakeRequest("r", PROMPT)
    host.run(request)
    host.preempt(request)
    for _ in range(3):
        host.step()
    host.router.follow(host.feed.take_events())
    assert len(host.router.blocks) == 6
    host.check(PROMPT)


@pytest.mark.parametrize("lazy_blocks", [None, 32], ids=["eager", "lazy"])
def test_blocks_that_the_pool_has_already_are_announced_when_a_request_computes_them(lazy_blocks: int | None) -> None:
    """The pool has them from elsewhere, and nobody has said what they hold."""
    host = RoutedHost(lazy_blocks=lazy_blocks)
    host.store(*keys_of(PROMPT))
    assert host.feed.take_events() == []
    host.serve(PROMPT)
    host.check(PROMPT)


def test_blocks_that_a_request_loads_are_announced() -> None:
    host = RoutedHost(lazy_blocks=1)
    host.store(*keys_of(PROMPT))
    assert host.feed.take_events() == []
    request = FakeRequest("r", PROMPT + "uv")
    load = host.ask(request)
    assert load == 12
    host.admit(request, load=load)
    host.step()
    host.router.follow(host.feed.take_events())
    host.check(PROMPT)
