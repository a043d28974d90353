"""A router's index of host memory, and events in vLLM's form for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from tests.service.connectors.engine_core.test_kvevents import Removed, Stored
from tests.service.connectors.engine_core.vllmhost import HASH_TOKENS, hashes_of

from kvstow.keys import make_key
from kvstow_service.connectors.engine_core.kvevents import BlockSource, EmbeddedBlocks, EventFeed, GroupKind, Vocabulary


class LaterBlocks:
    """The blocks of an engine that is made after the feed."""

    blocks: EmbeddedBlocks

    def __getattr__(self, name: str) -> Any:
        return getattr(self.blocks, name)


def make_feed(source: BlockSource, num_groups: int = 1) -> EventFeed:
    vocabulary = Vocabulary(Stored, Removed, lambda block_hash: block_hash, lambda *span: None)
    return EventFeed(source, [GroupKind("full")] * num_groups, vocabulary)


class Indexed(NamedTuple):
    """What a router knows of a block."""

    tokens: str
    parent: bytes | None
    medium: str


class Router:
    """Knows the blocks of an engine's host memory by their keys, from events alone. Like real ones, it cannot use an
    event without tokens, and takes the size of a block from it."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, Indexed] = {}

    def follow(self, events: Iterable[Any]) -> None:
        for event in events:
            group = event.group_idx
            if isinstance(event, Removed):
                hashes: list[Any] = event.block_hashes
                for block_hash in hashes:
                    del self.blocks[make_key(group, block_hash)]  # it knows each that it is told to forget
                continue
            size, parent = event.block_size, event.parent_block_hash
            assert size > 0
            assert len(event.token_ids) == size * len(event.block_hashes)
            assert event.extra_keys is not None
            assert len(event.extra_keys) == len(event.block_hashes)
            for number, block_hash in enumerate(event.block_hashes):
                tokens = "".join(map(chr, event.token_ids[number * size : (number + 1) * size]))
                self.blocks[make_key(group, block_hash)] = Indexed(tokens, parent, event.medium)
                parent = block_hash


def indexed(prompt: str) -> dict[bytes, Indexed]:
    """What a router should know of the blocks of a prompt, by their keys, in groups with one hash for each block."""
    hashes = hashes_of(prompt)
    parents = [None, *hashes]
    return {
        make_key(0, block_hash): Indexed(
            prompt[number * HASH_TOKENS : (number + 1) * HASH_TOKENS], parents[number], "CPU"
        )
        for number, block_hash in enumerate(hashes)
    }
