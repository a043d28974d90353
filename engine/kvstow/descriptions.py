"""What a KV event says of a block: its tokens, and which block precedes it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any, NamedTuple, Self

TOKEN_BYTES = 4
MOST_BYTES = 16 << 10
"""The limit for one description. A block of 4,000 tokens fits."""


class BlockDescription(NamedTuple):
    """What a KV event says of a block, in addition to its key. A description is prompt text, so only readers who may
    see the block's key get it, and its `repr` leaves it out.

    `tokens`: the ids of the tokens, `TOKEN_BYTES` each, in the byte order of this machine. `parent`: the hash of the
    block before it, which is empty for the first block of a prompt. `block_hash`: the engine's hash of the block, which
    is empty if the block's key contains it. `extra_keys`: what the hash covers in addition to the tokens, packed by the
    engine. It is empty if the hash covers nothing else.
    """

    tokens: bytes
    parent: bytes = b""
    block_hash: bytes = b""
    extra_keys: bytes = b""
    lora_id: int | None = None
    lora_name: str | None = None
    session_id: str | None = None

    def __repr__(self) -> str:
        return f"BlockDescription({len(self.tokens) // TOKEN_BYTES} tokens)"

    @property
    def num_bytes(self) -> int:
        tokens, parent, block_hash, extra_keys, _, lora_name, session_id = self
        num_bytes = len(tokens) + len(parent) + len(block_hash) + len(extra_keys)
        return num_bytes + len(lora_name or "") + len(session_id or "") if lora_name or session_id else num_bytes


_DEFAULTS = BlockDescription(b"")


class DescribedBlocks(NamedTuple):
    """Descriptions of several blocks, field by field. To pack, check and measure a thousand blocks in this form takes a
    fraction of the time that it takes block by block.

    Each column has one field of all blocks, in the order of the blocks. It is empty if all of them have the default.
    """

    tokens: tuple[bytes, ...]
    parents: tuple[bytes, ...] = ()
    block_hashes: tuple[bytes, ...] = ()
    extra_keys: tuple[bytes, ...] = ()
    lora_ids: tuple[int | None, ...] = ()
    lora_names: tuple[str | None, ...] = ()
    session_ids: tuple[str | None, ...] = ()

    def __repr__(self) -> str:
        return f"DescribedBlocks({len(self.tokens)} blocks)"

    @classmethod
    def of(cls, blocks: Sequence[BlockDescription]) -> Self:
        """Pack these blocks by field. There must be at least one. O(blocks)."""
        columns = zip(zip(*blocks, strict=True), _DEFAULTS, strict=True)
        return cls(*[() if column.count(default) == len(blocks) else column for column, default in columns])

    def columns(self) -> list[Iterable[Any]]:
        """Return the columns in the order of the fields of a `BlockDescription`. An empty column becomes an endless
        iterator over the field's default."""
        return [column or repeat(default) for column, default in zip(self, _DEFAULTS, strict=True)]

    def sizes(self) -> list[int]:
        """The bytes of each description. Raises `UnicodeError` for a name with half a surrogate. O(blocks)."""
        tokens, parents, block_hashes, extra_keys, _, lora_names, session_ids = self
        texts: list[Sequence[bytes]] = [tokens, parents, block_hashes, extra_keys]
        texts += [[(name or "").encode() for name in column] for column in (lora_names, session_ids)]
        return list(map(sum, zip(*[map(len, column) for column in texts if column], strict=True)))
