"""Keys: the bytes that name a block's content.

A key is the id of the KV group (2 bytes, big endian) and a chained prefix hash. The chain covers everything that
determines the content (tokens, model inputs, LoRA, cache salt), so equal keys mean equal bytes, within one identity
(`NamespaceIdentity`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

from kvstow.errors import InvalidRequestError

BlockKey = bytes

GROUP_BYTES = 2
_DIGEST_BYTES = 32


def make_key(group: int, block_hash: bytes) -> BlockKey:
    """The key of the block with `block_hash` (a chained prefix hash) in KV group `group`."""
    return group.to_bytes(GROUP_BYTES, "big") + block_hash


def group_of(key: BlockKey) -> int:
    """The KV group of a key."""
    return int.from_bytes(key[:GROUP_BYTES], "big")


def chain_keys(payloads: Iterable[bytes], *, group: int = 0, salt: bytes = b"") -> Iterator[BlockKey]:
    """Keys of consecutive blocks with the contents `payloads`; each key covers all blocks before its own."""
    parent = hashlib.blake2b(salt, digest_size=_DIGEST_BYTES).digest()
    for payload in payloads:
        parent = hashlib.blake2b(payload, key=parent, digest_size=_DIGEST_BYTES).digest()
        yield make_key(group, parent)


def format_key(key: BlockKey) -> str:
    """`key` in lower-case hex, as in JSON and in the command line."""
    return key.hex()


def parse_key(text: str) -> BlockKey:
    """Inverse of `format_key`. Raises `InvalidRequestError` if `text` is empty or not hex."""
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if not key:
        raise InvalidRequestError(f"key {text!r} is not a non-empty string of hex digit pairs")
    return key
