"""What a block holds, in the words of KV events: its tokens, and what precedes it."""

from __future__ import annotations

from typing import NamedTuple

TOKEN_BYTES = 4
MOST_BYTES = 16 << 10
"""The limit for one description. A block of 4,000 tokens fits."""


class BlockDescription(NamedTuple):
    """What a KV event says of a block, besides its key. It is prompt text, so whoever may not see a block's key must
    not see this either, and no text that is made of it shows any of it.

    `tokens`: their ids, `TOKEN_BYTES` each, in the byte order of this machine. `parent`: the hash of the block before
    it; empty for the first one of a prompt. `block_hash`: the engine's hash of the block; empty if the block's key
    contains it. `extra_keys`: what the hash covers besides tokens, packed by the engine; empty if that is nothing.
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
        names = len(self.lora_name or "") + len(self.session_id or "")
        return len(self.tokens) + len(self.parent) + len(self.block_hash) + len(self.extra_keys) + names
