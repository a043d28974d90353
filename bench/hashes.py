"""Block hashes for both sides of a comparison: the same bytes in the same order. It imports neither side."""

from __future__ import annotations

import random

HASH_BYTES = 32


class Hashes:
    """`count` random hashes, which are equal in every process. Each call returns new objects, as each request of an
    inference engine makes its own. So no lookup finds its key by identity, and no key has a cached hash value."""

    def __init__(self, count: int) -> None:
        self._bytes = random.Random(9595).randbytes(HASH_BYTES * count)

    def run(self, start: int, count: int) -> list[bytes]:
        """Return `count` hashes, from number `start` on."""
        data = self._bytes
        first, end = start * HASH_BYTES, (start + count) * HASH_BYTES
        return [data[at : at + HASH_BYTES] for at in range(first, end, HASH_BYTES)]
