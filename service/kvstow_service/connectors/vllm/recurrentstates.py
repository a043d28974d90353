"""States: blocks of recurrent layers (Mamba), which hold no tokens but what all tokens before them came to."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from kvstow_service.connectors.vllm.gpublocks import BlockPool
from kvstow_service.connectors.vllm.offers import Offer, keys_of


class RecurrentStates:
    """Stores the states that vLLM hands over at block boundaries (vLLM 0.30, `mamba_cache_mode` "align").

    vLLM hands a state over with the step that computes it, so it is read one step later; until then it is referenced.
    A request's block table tells nothing of states: their blocks are taken as they are handed over, under the hash that
    vLLM caches them by. Used by the scheduler's thread.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.hash_bytes = 0
        """Length of a request's block hash; 0 until a request came."""
        self._pool = pool
        self._waiting: list[tuple[Any, bytes]] = []  # blocks, and their hashes when they were handed over

    def __len__(self) -> int:
        """States that wait for the step that computes them."""
        return len(self._waiting)

    def take_computed(self, store: Callable[[Offer], None]) -> None:
        """Offer to `store` what the step before handed over, as far as vLLM still caches it."""
        waiting, self._waiting = self._waiting, []
        cached = [(block, block_hash) for block, block_hash in waiting if block.block_hash == block_hash]
        keys = keys_of((block_hash for _, block_hash in cached), self.hash_bytes)
        store(Offer(keys, [block.block_id for block, _ in cached]))
        self._release(waiting)  # those being stored have references of their own by now

    def forget(self) -> None:
        """What waits is of a model that is no more."""
        waiting, self._waiting = self._waiting, []
        self._release(waiting)

    def hand_over(self, states: Mapping[str, Sequence[tuple[int, int, int]]], gone: Collection[str]) -> None:
        """Take the states of this step: by request (group, block, tokens). Those of requests that are `gone` may be
        anybody's blocks by now."""
        if not self.hash_bytes:
            return
        blocks = [
            self._pool.blocks[block_id]
            for request_id, entries in states.items()
            if request_id not in gone
            for _, block_id, _ in entries
        ]
        kept = [block for block in blocks if not block.is_null and block.block_hash is not None]
        self._pool.touch(kept)
        self._waiting += [(block, block.block_hash) for block in kept]

    def _release(self, waiting: Sequence[tuple[Any, bytes]]) -> None:
        self._pool.free_blocks([block for block, _ in waiting])
