"""What the KV cache of each rank holds, asked of the ranks themselves."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from typing import Any

import torch


class KVBytes:
    """A worker extension (`worker_extension_cls`): vLLM adds its methods to each worker, for `collective_rpc`."""

    model_runner: Any

    def kv_digests(self) -> list[str]:
        """Of every block that is not all zero, over all layers."""
        caches = [cache.contiguous().view(torch.uint8) for cache in self._kv_caches()]
        return [
            sha256(b"".join(cache[block].numpy().tobytes() for cache in caches)).hexdigest()
            for block in range(len(caches[0]))
            if any(cache[block].any() for cache in caches)
        ]

    def _kv_caches(self) -> Iterator[torch.Tensor]:
        yield from self.model_runner.kv_caches
