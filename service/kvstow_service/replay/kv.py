"""The KV caches of a replay: of one rank, of all ranks, and none for a replay that moves no bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from kvstow.keys import BlockKey


class Mismatch(NamedTuple):
    """A block on one rank whose bytes are not those of its key."""

    key: BlockKey
    rank: int
    region: int
    block: int


class Verification(NamedTuple):
    """`num_bytes` were looked at; one entry in `mismatches` per wrong block and rank."""

    num_bytes: int
    mismatches: tuple[Mismatch, ...]

    @classmethod
    def of_ranks(cls, found: Sequence[Verification]) -> Verification:
        """What all ranks have found together."""
        mismatches = tuple(wrong for one in found for wrong in one.mismatches)
        return cls(sum(one.num_bytes for one in found), mismatches)


class RankKV(Protocol):
    """The device KV cache of one rank, used by one thread, block by block.

    Stands in for the model: what it writes for a key is what computing that key's block would have written.
    """

    def write(self, keys: Sequence[BlockKey], blocks: Sequence[int]) -> None:
        """Write the bytes of `keys[i]` into block `blocks[i]`."""

    def check(self, keys: Sequence[BlockKey], blocks: Sequence[int]) -> Verification:
        """Compare every byte of block `blocks[i]` with those of `keys[i]`."""

    def scrub(self, blocks: Sequence[int]) -> None:
        """Overwrite freed blocks: a store that still reads them, or a load that writes nothing, shows as a mismatch."""


class KVCache(Protocol):
    """The KV caches of all ranks, used by one thread. Each rank does what it is given in the order of the calls."""

    def compute(self, keys: Sequence[BlockKey], blocks: Sequence[int]) -> None:
        """`RankKV.write` on every rank."""

    def verify(self, keys: Sequence[BlockKey], blocks: Sequence[int]) -> None:
        """`RankKV.check` on every rank; see `take_verifications`."""

    def scrub(self, blocks: Sequence[int]) -> None:
        """`RankKV.scrub` on every rank."""

    def take_verifications(self) -> list[Verification]:
        """What all ranks have found together, for each call of `verify`, in order; since the last call."""

    @property
    def is_verifying(self) -> bool:
        """Whether a rank has yet to say what it found."""


class LocalKV:
    """The KV caches of ranks in this process."""

    is_verifying = False

    def __init__(self, ranks: Sequence[RankKV]) -> None:
        self._ranks = ranks
        self._found: list[Verification] = []

    def compute(self, keys: Sequence[BlockKey], blocks: Sequence[int]) -> None:
        for rank in self._ranks:
            rank.write(keys, blocks)

    def verify(self, keys: Sequence[BlockKey], blocks: Sequence[int]) -> None:
        self._found.append(Verification.of_ranks([rank.check(keys, blocks) for rank in self._ranks]))

    def scrub(self, blocks: Sequence[int]) -> None:
        for rank in self._ranks:
            rank.scrub(blocks)

    def take_verifications(self) -> list[Verification]:
        found, self._found = self._found, []
        return found


class NoKV(LocalKV):
    """No cache: for a replay of the control plane alone."""

    def __init__(self) -> None:
        super().__init__(())


class FreeBlocks:
    """The free list of the KV cache's blocks, which all ranks share. First in, first out, so that a block is
    reused as late as possible, as in an inference engine."""

    def __init__(self, num_blocks: int) -> None:
        self._blocks = deque(range(num_blocks))

    def __len__(self) -> int:
        return len(self._blocks)

    def take(self, count: int) -> list[int]:
        """`count` free blocks; the caller has seen that there are so many."""
        return [self._blocks.popleft() for _ in range(count)]

    def give_back(self, blocks: Iterable[int]) -> None:
        self._blocks.extend(blocks)
