"""Names of the objects in a tier's store."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvstow.keys import GROUP_BYTES, BlockKey, group_of


class ObjectName(NamedTuple):
    """One block of one rank. Equal names mean equal bytes, on every node.

    `fingerprint` covers all that the key does not: the weights, what changes KV values, the layout of a slot and the
    number of ranks. `rank` of `num_ranks`: a block that is the same on all ranks is one object, 0 of 1.
    """

    fingerprint: str
    key: BlockKey
    rank: int
    num_ranks: int

    def __str__(self) -> str:
        """The name in the store."""
        block_hash = self.key[GROUP_BYTES:].hex()
        return f"kvs1:{self.fingerprint}:{group_of(self.key)}:{block_hash}:{self.rank}of{self.num_ranks}"


def names_of_rank(rank: int, num_ranks: int) -> Callable[[str, BlockKey], ObjectName]:
    """What names this rank's object of a fingerprint and a key."""
    return lambda fingerprint, key: ObjectName(fingerprint, key, rank, num_ranks)
