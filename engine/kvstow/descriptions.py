"""What a KV event says of a block: its tokens, and which block precedes it."""

from __future__ import annotations

from typing import NamedTuple

TOKEN_BYTES = 4
MOST_BYTES = 16 << 10
"""The limit for one description. A block of 4,000 tokens fits."""


class BlockDescription(NamedTuple):
    """What a KV event says of a block, in addition to its key. A description is prompt text, so it is shown to nobody
    who may not see the block's key, and its `repr` shows none of it.

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
