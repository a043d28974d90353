"""vLLM's BlockPool as a subject, with the calls of its scheduler. It runs in `.venv-vllm` (`make venv-vllm`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec

_BLOCK_TOKENS = 16


class BlockPoolSubject:
    """One KV cache group with full attention, with prefix caching, and without events and metrics: the fastest setting.

    The pool itself adds the group id to each hash, at every lookup.
    """

    def __init__(self, slots: int) -> None:
        # One block more, because the pool keeps one for itself as the null block.
        self._pool = BlockPool(num_gpu_blocks=slots + 1, enable_caching=True, hash_block_size=_BLOCK_TOKENS)
        self._spec = FullAttentionSpec(block_size=_BLOCK_TOKENS, num_kv_heads=8, head_size=128, dtype=torch.float16)

    def keys(self, hashes: list[bytes]) -> list[bytes]:
        return hashes

    def lookup(self, keys: Sequence[bytes]) -> int:
        return len(self._find(keys))

    def use(self, keys: Sequence[bytes]) -> int:
        blocks = self._find(keys)
        self._pool.touch(blocks)
        self._pool.free_blocks(reversed(blocks))
        return len(blocks)

    def store(self, keys: Sequence[bytes]) -> None:
        blocks = self._allocate(keys, [])
        self._pool.free_blocks(reversed(blocks))

    def request(self, keys: Sequence[bytes]) -> int:
        found = self._find(keys)
        self._pool.touch(found)
        blocks = self._allocate(keys, found)
        self._pool.free_blocks(reversed(blocks))
        return len(found)

    def end(self, keys: Sequence[bytes]) -> None:
        """Do nothing: the order of free blocks depends only on when they are given back."""

    def own_operations(self) -> dict[str, Callable[[Sequence[bytes]], object]]:
        return {}

    def curve_seconds(self, chains: Iterable[Sequence[bytes]]) -> None:
        return None

    def store_while_shrinking(self, keys: Sequence[bytes]) -> None:
        return None

    def purge_slices(self) -> None:
        """Return None: the pool resets everything at once while nothing runs, and cannot do it in slices."""

    def _find(self, keys: Sequence[bytes]) -> list[Any]:
        found, _ = FullAttentionManager.find_longest_cache_hit(
            block_hashes=keys,
            max_length=len(keys) * _BLOCK_TOKENS,
            kv_cache_group_ids=[0],
            block_pool=self._pool,
            kv_cache_spec=self._spec,
            drop_eagle_block=False,
            alignment_tokens=_BLOCK_TOKENS,
        )
        blocks: list[Any] = found[0]
        return blocks

    def _allocate(self, keys: Sequence[bytes], found: list[Any]) -> list[Any]:
        blocks: list[Any] = found + self._pool.get_new_blocks(len(keys) - len(found))
        request = SimpleNamespace(block_hashes=keys)  # the pool reads nothing else of a request
        self._pool.cache_full_blocks(request, blocks, len(found), len(keys), _BLOCK_TOKENS, 0)
        return blocks
