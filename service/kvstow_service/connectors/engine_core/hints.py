"""Hints: what a request's client says about the future of the request's blocks.

They come in `kv_transfer_params["kvstow"]`, which any OpenAI client can send, or in an action `kvstow` of vLLM's
`kv_hints`. Without a `context` of their own, the request's `session_id` is the context:

    context      a name for what continues in later requests, such as a conversation or a branch of an agent
    resume_in    in how many seconds after the end of this request the next one is expected
    release      nothing continues after this request
    store        false: nothing of this request is stored; it may still load

No hint can fail its request. Those that are unknown or wrong are counted and ignored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from kvstow.hints import Hints

if TYPE_CHECKING:
    from kvstow_service.connectors.engine_core.trackedrequests import TrackedRequest

FIELD = "kvstow"
LONGEST_NAME = 256
"""Characters of the name of a context."""
LONGEST_PAUSE = 7 * 24 * 3600.0
"""Seconds. Nothing stays in a pool for longer because of a hint."""
_DIGEST_BYTES = 16


class RequestHints(NamedTuple):
    """`context`: the name; "" without. `ignored`: why hints were ignored, each reason once."""

    hints: Hints = Hints()
    context: str = ""
    ignored: tuple[str, ...] = ()


NO_HINTS = RequestHints()


def hints_of(request: Any) -> RequestHints:
    """The hints of vLLM's request. Never raises: its fields are what clients send."""
    given = _given(request)
    session = getattr(request, "session_id", None)
    if given is None and session is None:
        return NO_HINTS
    reader = _Reader(given, session)
    name, resume_in = reader.context(), reader.seconds("resume_in")
    release, store = reader.flag("release", otherwise=False), reader.flag("store", otherwise=True)
    if not name and (resume_in is not None or release):
        reader.ignored["no_context"] = None
        resume_in, release = None, False
    digest = context_digest(name, getattr(request, "cache_salt", None)) if name else None
    return RequestHints(Hints(digest, resume_in, release, store), name, tuple(reader.ignored))


def context_digest(name: str, cache_salt: str | None) -> bytes:
    """What names a context in a pool. Requests with different salts share no block, and no context either."""
    salt = hashlib.blake2b((cache_salt or "").encode("utf-8", "surrogatepass")).digest()
    return hashlib.blake2b(name.encode("utf-8", "surrogatepass"), key=salt, digest_size=_DIGEST_BYTES).digest()


def _given(request: Any) -> Any:
    params = getattr(request, "kv_transfer_params", None)
    if isinstance(params, Mapping) and FIELD in params:
        return params[FIELD]
    actions = getattr(getattr(request, "kv_hints", None), "actions", None)  # vLLM 0.30
    for action in actions if isinstance(actions, (list, tuple)) else ():
        if getattr(action, "action_type", None) == FIELD:
            return getattr(action, "payload", None)
    return None


class _Reader:
    """Reads one request's hints. `ignored` has the reasons for those that cannot be used, as a set in order."""

    _NAMES = ("context", "resume_in", "release", "store")

    def __init__(self, given: Any, session: Any) -> None:
        self.ignored: dict[str, None] = {}
        self._session = session
        self._given: Mapping[Any, Any] = given if isinstance(given, Mapping) else {}
        if given is not None and not isinstance(given, Mapping):
            self.ignored["malformed"] = None
        if len(self._given) > sum(name in self._given for name in self._NAMES):
            self.ignored["unknown"] = None

    def context(self) -> str:
        for name in (self._given.get("context"), self._session):
            if type(name) is str and 0 < len(name) <= LONGEST_NAME:
                return name
            if name is not None:
                self.ignored["invalid"] = None
        return ""

    def seconds(self, name: str) -> float | None:
        value = self._given.get(name)
        if type(value) in (int, float) and 0 <= value <= LONGEST_PAUSE:
            return float(value)
        if value is not None:
            self.ignored["invalid"] = None
        return None

    def flag(self, name: str, *, otherwise: bool) -> bool:
        value = self._given.get(name)
        if type(value) is bool:
            return value
        if value is not None:
            self.ignored["invalid"] = None
        return otherwise


class UnstoredHashes:
    """vLLM's hashes of what requests with `store: false` have computed. Used by the scheduler's thread.

    A block that the GPU caches may be stored long after its request has ended: from the backlog, lazily, or as a state.
    A block of such a request is left out, unless another request, which may store it, has the same prefix.
    """

    def __init__(self, most: int, hash_tokens: int) -> None:
        """`most`: how many hashes are kept, the latest; more than the GPU has blocks. `hash_tokens`: tokens that a
        hash covers beyond those of the one before."""
        self._most, self._hash_tokens = most, hash_tokens
        self._hashes: dict[bytes, None] = {}
        self._running: dict[TrackedRequest, int] = {}  # how many of its hashes were seen

    def __bool__(self) -> bool:
        return bool(self._hashes or self._running)

    def __contains__(self, block_hash: bytes) -> bool:
        """O(hashes that running requests got since the last call)."""
        for tracked in self._running:
            self._follow(tracked)
        return block_hash in self._hashes

    def begin(self, tracked: TrackedRequest) -> None:
        """A request has arrived. O(its hashes), unless nothing is kept."""
        if not tracked.hints.hints.store:
            self._running[tracked] = 0
        if not self._hashes:
            return
        for block_hash in tracked.request.block_hashes:
            if block_hash in self._hashes:
                del self._hashes[block_hash]
                if not tracked.hints.hints.store:  # it is then one of the latest
                    self._hashes[block_hash] = None

    def end(self, tracked: TrackedRequest) -> None:
        """A request ends."""
        if tracked in self._running:
            self._follow(tracked)
            del self._running[tracked]

    def _follow(self, tracked: TrackedRequest) -> None:
        hashes, known = tracked.request.block_hashes, self._hashes
        first = max(self._running[tracked], tracked.computed_from // self._hash_tokens)
        if first >= len(hashes):
            return
        for block_hash in hashes[first:]:
            known[block_hash] = None
        self._running[tracked] = len(hashes)
        while len(known) > self._most:
            del known[next(iter(known))]
