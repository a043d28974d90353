"""What a client says of a request: which context it belongs to, and when the next request of that context comes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

CONTEXT_BYTES = 16
"""The length of a context's id, in bytes."""
MOST_NAME_CHARS = 256
"""The longest name of a context, in characters."""
LONGEST_PAUSE = 7 * 24 * 3600.0
"""The largest `resume_in` and `keep_for`, in seconds."""


@dataclass(frozen=True, slots=True)
class Hints:
    """Hints of one request; none of them changes what it computes.

    `context`: see `context_id`; None for a request without a name. `resume_in`: how many seconds after its end the next
    request comes that continues this one; None if the client does not know. `keep_for`: for how many seconds the client
    wants the blocks kept, without saying when the next request comes; None if it does not say. `release`: whether no
    request continues this one. `store`: whether the request's blocks may be stored, which the host ensures. `name`:
    what the client calls the context, for people. `ignored`: the reasons (`HINTS_IGNORED`) why hints were left out.
    """

    context: bytes | None = None
    resume_in: float | None = None
    keep_for: float | None = None
    release: bool = False
    store: bool = True
    name: str = ""
    ignored: tuple[str, ...] = ()


def context_id(name: str, salt: str = "") -> bytes:
    """The id of the context that clients with this cache salt call `name`. Contexts of two salts never have the same
    id, or a client could release the contexts of another."""
    digest = hashlib.blake2b(digest_size=CONTEXT_BYTES)
    for part in (salt, name):
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.digest()
