"""Block hashes that both sides of a comparison get: the same bytes in the same order. Imports nothing of either."""

from __future__ import annotations

import random

HASH_BYTES = 32


class Hashes:
    """`count` random hashes, equal in every process. Each call gives fresh objects, as each request of an inference
    engine makes its own: no lookup finds its key by identity, and none has its hash value cached."""

    def __init__(self, count: int) -> None:
        self._bytes = random.Random(9595).randbytes(HASH_BYTES * count)

    def run(self, start: int, count: int) -> list[bytes]:
        """`count` hashes from number `start` on."""
        data = self._bytes
        first, end = start * HASH_BYTES, (start + count) * HASH_BYTES
        return [data[at : at + HASH_BYTES] for at in range(first, end, HASH_BYTES)]
