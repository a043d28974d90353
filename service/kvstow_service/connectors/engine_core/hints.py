"""Hints: what a request's client says about the future of the request's blocks.

They come in `kv_transfer_params["kvstow"]`, which any OpenAI client can send, or in an action `kvstow` of vLLM's
`kv_hints`. Without a `context` of their own, the request's `session_id` is the context:

    context      a name for what continues in later requests, such as a conversation or a branch of an agent
    resume_in    in how many seconds after the end of this request the next one is expected
    keep_for     for how many seconds the client wants the blocks kept; it does not say when the next request comes
    release      nothing continues after this request
    store        false if no block of this request may be stored; it may still load

`kvstow_service.connectors.otherwords` knows what others call these hints. It has one field more: `invalid`, for a word
that could not be read. No hint can fail its request. Hints that are unknown or wrong are counted and ignored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvstow.hints import LONGEST_PAUSE, MOST_NAME_CHARS, Hints, context_id
from kvstow.plaintext import is_plain
from kvstow_service.connectors.otherwords import hints_in_action

if TYPE_CHECKING:
    from kvstow_service.connectors.engine_core.trackedrequests import TrackedRequest

FIELD = "kvstow"


def hints_of(request: Any) -> Hints | None:
    """The hints of vLLM's request; None if it has none. Never raises: clients may send anything."""
    given, session = _given(request), getattr(request, "session_id", None)  # vLLM 0.28
    if given is None and session is None:
        return None
    reader = _Reader(given)
    name = reader.name("context") or reader.checked_name(session)
    return Hints(
        context_id(name, getattr(request, "cache_salt", None) or "") if name else None,
        reader.seconds("resume_in"),
        reader.seconds("keep_for"),
        reader.flag("release", otherwise=False),
        reader.flag("store", otherwise=True),
        name,
        tuple(reader.ignored),
    )


def _given(request: Any) -> Any:
    params = getattr(request, "kv_transfer_params", None)
    if params is not None and not isinstance(params, dict):
        return params  # it is counted as malformed
    if params and FIELD in params:
        return params[FIELD]
    actions = getattr(getattr(request, "kv_hints", None), "actions", None)  # vLLM 0.31
    found: dict[str, Any] | None = None
    for action in actions if isinstance(actions, (list, tuple)) else ():
        kind, payload = getattr(action, "action_type", None), getattr(action, "payload", None)
        if kind == FIELD:
            return payload
        if (hints := hints_in_action(kind, payload)) is not None:
            found = {**hints, **(found or {})}
    return found


class _Reader:
    """Reads one request's hints. `ignored` has the reasons (`HINTS_IGNORED`) why hints cannot be used, as an ordered
    set."""

    _NAMES = ("context", "resume_in", "keep_for", "release", "store", "invalid")

    def __init__(self, given: Any) -> None:
        self.ignored: dict[str, None] = {}
        self._given: dict[Any, Any] = given if isinstance(given, dict) else {}
        if given is not None and not isinstance(given, dict):
            self.ignored["malformed"] = None
        if len(self._given) > sum(name in self._given for name in self._NAMES):
            self.ignored["unknown"] = None
        if "invalid" in self._given:
            self.ignored["invalid"] = None

    def name(self, field: str) -> str:
        return self.checked_name(self._given.get(field))

    def checked_name(self, value: Any) -> str:
        return value if self._accepts(value, is_plain(value, MOST_NAME_CHARS) and value != "") else ""

    def seconds(self, field: str) -> float | None:
        value: Any = self._given.get(field)
        is_valid = type(value) in (int, float) and 0 <= value <= LONGEST_PAUSE
        return float(value) if self._accepts(value, is_valid) else None

    def flag(self, field: str, *, otherwise: bool) -> bool:
        value: Any = self._given.get(field)
        return bool(value) if self._accepts(value, type(value) is bool) else otherwise

    def _accepts(self, value: Any, is_valid: bool) -> bool:
        """Whether there is a valid value. A value that is not valid is noted in `ignored`."""
        if value is not None and not is_valid:
            self.ignored["invalid"] = None
        return is_valid


class UnstoredHashes:
    """vLLM's hashes of the blocks that requests with `store: false` have computed. Used by the scheduler's thread.

    A block that the GPU caches may be stored long after its request has ended: from the backlog, lazily, or as the
    state of recurrent layers. A block of such a request is left out, unless another request that may be stored has the
    same prefix.
    """

    def __init__(self, most: int, hash_tokens: int) -> None:
        """`most`: how many of the latest hashes are kept; more than the GPU has blocks. `hash_tokens`: how many tokens
        a hash covers beyond those of the hash before."""
        self._most, self._hash_tokens = most, hash_tokens
        self._hashes: dict[bytes, None] = {}
        self._running: dict[TrackedRequest, int] = {}  # how many of its hashes are noted

    def __bool__(self) -> bool:
        return bool(self._hashes or self._running)

    def __contains__(self, block_hash: bytes) -> bool:
        """O(hashes that running requests have got since the last call)."""
        for tracked in self._running:
            self._follow(tracked)
        return block_hash in self._hashes

    def begin(self, tracked: TrackedRequest) -> None:
        """Note that a request has arrived. O(its hashes) if any hashes are kept, O(1) otherwise."""
        if tracked.hints is not None and not tracked.hints.store:
            self._running[tracked] = 0
        if not self._hashes:
            return
        for block_hash in tracked.request.block_hashes:
            if block_hash in self._hashes:
                del self._hashes[block_hash]
                if tracked in self._running:  # so that it becomes one of the latest
                    self._hashes[block_hash] = None

    def end(self, tracked: TrackedRequest) -> None:
        """Note that a request ends."""
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
