"""Every kind of frame: its number, who may send it, and since which version of the protocol.

The layout of a kind never changes. A change gets a new number, and the version says which numbers the other end knows.
An end that speaks two versions therefore knows the kinds of both. JSON payloads may gain fields, because unknown fields
are ignored.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final, Literal, NamedTuple

from kvstow.errors import AttachRefusedError

Role = Literal["scheduler", "worker"]
Sender = Literal["scheduler", "worker", "service"]


class VersionRange(NamedTuple):
    """The versions of the protocol that one end speaks."""

    oldest: int
    newest: int

    def chosen_with(self, other: VersionRange) -> int:
        """The newest version that both ends speak. Raises `AttachRefusedError` if there is none."""
        newest = min(self.newest, other.newest)
        if newest < max(self.oldest, other.oldest):
            raise AttachRefusedError(
                "version",
                f"the service speaks versions {self.oldest} to {self.newest} of the attach protocol, "
                f"the engine {other.oldest} to {other.newest}: upgrade the older of the two",
            )
        return newest


VERSIONS: Final = VersionRange(1, 4)
"""The versions that are spoken. A version is dropped only when keeping it costs something, because engines that speak
no newer one can no longer attach."""


class Kind(IntEnum):
    """What a frame is."""

    HELLO = 1
    WELCOME = 2
    REFUSED = 3
    ERROR = 4
    DETACH = 5

    LOOKUP = 16
    FOUND = 17
    RELEASE = 18
    BEGIN_LOAD = 19
    LOAD_BEGUN = 20
    BEGIN_STORE = 21
    STORE_BEGUN = 22
    COMPLETIONS = 23
    SETTLED = 24
    REFRESH = 25
    COUNT_LOOKUP = 26
    RESET = 27
    RESET_DONE = 28
    READ_EVENTS = 29
    EVENTS = 30
    PENDING = 31
    PREFILL = 32
    LOOKUP_PROMPT = 33

    REPORT = 48
    DESIRED = 49
    EXTENTS = 50
    POPULATED = 51
    REGISTERED = 52
    REVOKED = 53
    LET_GO = 54


class Rule(NamedTuple):
    """Who sends a kind, and since which version. With `takes_fds`, frames of the kind may carry descriptors."""

    senders: frozenset[Sender]
    since: int = 1
    takes_fds: bool = False


_SCHEDULER: frozenset[Sender] = frozenset({"scheduler"})
_WORKER: frozenset[Sender] = frozenset({"worker"})
_CLIENT = _SCHEDULER | _WORKER
_SERVICE: frozenset[Sender] = frozenset({"service"})

RULES: Final[dict[int, Rule]] = {
    Kind.HELLO: Rule(_CLIENT),
    Kind.WELCOME: Rule(_SERVICE),
    Kind.REFUSED: Rule(_SERVICE),
    Kind.ERROR: Rule(_SERVICE),
    Kind.DETACH: Rule(_CLIENT),
    Kind.LOOKUP: Rule(_SCHEDULER),
    Kind.FOUND: Rule(_SERVICE),
    Kind.RELEASE: Rule(_SCHEDULER),
    Kind.BEGIN_LOAD: Rule(_SCHEDULER),
    Kind.LOAD_BEGUN: Rule(_SERVICE),
    Kind.BEGIN_STORE: Rule(_SCHEDULER),
    Kind.STORE_BEGUN: Rule(_SERVICE),
    Kind.COMPLETIONS: Rule(_CLIENT),
    Kind.SETTLED: Rule(_SERVICE),
    Kind.REFRESH: Rule(_SCHEDULER),
    Kind.COUNT_LOOKUP: Rule(_SCHEDULER),
    Kind.RESET: Rule(_SCHEDULER),
    Kind.RESET_DONE: Rule(_SERVICE),
    Kind.READ_EVENTS: Rule(_SCHEDULER, since=2),
    Kind.EVENTS: Rule(_SERVICE, since=2),
    Kind.PENDING: Rule(_SERVICE, since=3),
    Kind.PREFILL: Rule(_SCHEDULER, since=3),
    Kind.LOOKUP_PROMPT: Rule(_SCHEDULER, since=4),
    Kind.REPORT: Rule(_WORKER),
    Kind.DESIRED: Rule(_SERVICE),
    Kind.EXTENTS: Rule(_SERVICE, takes_fds=True),
    Kind.POPULATED: Rule(_SERVICE),
    Kind.REGISTERED: Rule(_WORKER),
    Kind.REVOKED: Rule(_SERVICE),
    Kind.LET_GO: Rule(_WORKER),
}


def refusal_of(kind: int, sender: Sender, version: int, num_fds: int = 0) -> str | None:
    """Why this frame must not be sent, or None if it may."""
    rule = RULES.get(kind)
    if rule is None or rule.since > version:
        return f"kind {kind} does not exist in version {version}"
    if sender not in rule.senders:
        return f"{Kind(kind).name} does not come from a {sender}"
    if num_fds and not rule.takes_fds:
        return f"{Kind(kind).name} came with {num_fds} file descriptors"
    return None
