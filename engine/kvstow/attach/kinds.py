"""Every kind of frame: its number, and who may send it.

Both ends of a connection have the same version of the protocol. Any change of a frame is a new version, and a service
refuses engines of another one. For that, every version has the same frame header, the kinds `HELLO` and `REFUSED`, and
the field `version` of a hello.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final, Literal, NamedTuple

Role = Literal["scheduler", "worker"]
Sender = Literal["scheduler", "worker", "service"]


VERSION: Final = 1


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
    """Who sends a kind. With `takes_fds`, frames of the kind may carry descriptors."""

    senders: frozenset[Sender]
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
    Kind.READ_EVENTS: Rule(_SCHEDULER),
    Kind.EVENTS: Rule(_SERVICE),
    Kind.PENDING: Rule(_SERVICE),
    Kind.PREFILL: Rule(_SCHEDULER),
    Kind.LOOKUP_PROMPT: Rule(_SCHEDULER),
    Kind.REPORT: Rule(_WORKER),
    Kind.DESIRED: Rule(_SERVICE),
    Kind.EXTENTS: Rule(_SERVICE, takes_fds=True),
    Kind.POPULATED: Rule(_SERVICE),
    Kind.REGISTERED: Rule(_WORKER),
    Kind.REVOKED: Rule(_SERVICE),
    Kind.LET_GO: Rule(_WORKER),
}


def refusal_of(kind: int, sender: Sender, num_fds: int = 0) -> str | None:
    """Why this frame must not be sent, or None if it may."""
    rule = RULES.get(kind)
    if rule is None:
        return f"kind {kind} does not exist"
    if sender not in rule.senders:
        return f"{Kind(kind).name} does not come from a {sender}"
    if num_fds and not rule.takes_fds:
        return f"{Kind(kind).name} came with {num_fds} file descriptors"
    return None
