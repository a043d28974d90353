"""Where a request comes from, as digests that do not reveal the names behind them.

Salts are secrets, and names of adapters and sessions may say whose they are. What is sent, counted and shown are
digests with a key that each pool has for itself, and that ends with the process.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple

_DIGEST_BYTES = 8


class Source(NamedTuple):
    """Where a request comes from, as digests; empty for what it does not have."""

    lora: bytes = b""
    salt: bytes = b""
    session: bytes = b""


NO_SOURCE = Source()


def source_of(key: bytes, *, lora: str | None, salt: str | None, session: str | None) -> Source:
    """The digests of these names; empty ones count as none."""
    return Source(_digest(key, b"lora", lora), _digest(key, b"salt", salt), _digest(key, b"session", session))


def _digest(key: bytes, kind: bytes, name: str | None) -> bytes:
    if not name:
        return b""
    return blake2b(name.encode(errors="surrogatepass"), digest_size=_DIGEST_BYTES, key=key, person=kind).digest()
