"""Names of pools and namespaces: short, and each for only one identity."""

from __future__ import annotations

from collections.abc import Container

from kvstow.attach.identity import Identity, slug

_DIGITS = 6


def unique_name(identity: Identity, model: str, taken: Container[str]) -> str:
    """The model as a slug, and six hex digits of the identity. Uses more digits if another identity has that name."""
    digest = identity.digest.hex()
    names = (f"{slug(model)}-{digest[:length]}" for length in range(_DIGITS, len(digest) + 1))
    return next(name for name in names if name not in taken)
