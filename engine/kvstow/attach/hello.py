"""The first frames of a connection: who connects, and whether it may."""

from __future__ import annotations

from hashlib import sha256
from typing import Annotated, ClassVar, Final, NamedTuple, Self

import msgspec
from msgspec import Meta
from msgspec.structs import force_setattr, replace

from kvstow.attach.identity import UNNAMED_WEIGHTS, FleetWeights, NamespaceIdentity, PoolIdentity
from kvstow.attach.wire import MOST_LISTED, VERSION, Kind, Message, Name, Role, Text, Whole, decoded
from kvstow.errors import AttachRefusedError
from kvstow.plaintext import plain

_COUNT_BITS = 40
_MOST_SETTINGS = 16 << 10  # those of an engine take 2 KB


class SessionTicket(NamedTuple):
    """Lets the engine's workers join its session. `number` counts the engine's sessions from 1. `token` is a secret of
    this engine's processes."""

    number: int
    token: str


class RankSession(NamedTuple):
    """How far a rank is in a session. `number` is that of the session's ticket; 0 while it is in no session. `slots`:
    how many slots it can copy to and from. `is_whole`: no more slots will come. `hold`: the number of the `GateHold`
    that the rank keeps; 0 while it keeps none."""

    number: int = 0
    slots: int = 0
    is_whole: bool = False
    hold: int = 0


class GateHold(NamedTuple):
    """The host's request to a rank to let ops of a session through after the session has ended, until the host
    withdraws it. `session` is the number of the session's ticket. `number` is different for each request."""

    session: int
    number: int


NO_HOLD = GateHold(0, 0)


def digest_of(token: str) -> str:
    """Tells tokens apart without letting anybody join."""
    return sha256(token.encode()).hexdigest()


def unique_id(number: int, count: int) -> int:
    """An id of an op or a lease that is unique across all sessions of an engine. A service counts from 1, so a later
    session may repeat its numbers."""
    return number << _COUNT_BITS | count


def number_of(identifier: int) -> int:
    """The number of the session that an id belongs to."""
    return identifier >> _COUNT_BITS


def count_of(identifier: int) -> int:
    return identifier & ((1 << _COUNT_BITS) - 1)


_SOURCE_KEY = r"^(?:[0-9a-f]{2}){0,64}\Z"  # BLAKE2 takes no more
_Texts = Annotated[tuple[Text, ...], Meta(max_length=MOST_LISTED)]


class _AnyHello(msgspec.Struct):
    """What a hello has in every version."""

    version: Whole


_read_any = msgspec.json.Decoder(_AnyHello).decode


class Hello(Message, frozen=True, kw_only=True):
    """How a process introduces itself. `pid` and `host` are for display only: the kernel knows which process it is.

    The scheduler half sends both identities and receives a token, which each worker sends. `fleet_weights` names its
    weights to other nodes, if they have a name there. `wanted_bytes` is the memory that the engine
    would like on this node, over all ranks; 0 asks for all of it. `settled_tokens` are sessions that this process was
    in and whose copies in it have all ended, so the service need not wait for the process to end. A worker that lists
    its own token there joins no session: it has stopped, and gets no answer.
    """

    KIND: ClassVar = Kind.HELLO
    role: Role
    engine: Name
    host: Name
    pid: Whole
    version: Whole = VERSION
    engine_version: Name = ""
    pool: PoolIdentity | None = None
    namespace: NamespaceIdentity | None = None
    fleet_weights: FleetWeights = UNNAMED_WEIGHTS
    wanted_bytes: Whole = 0
    require_sharing: bool = False
    token: Text = ""
    rank: Whole = 0
    device: Name = ""
    numa_node: Whole | None = None
    settled_tokens: _Texts = ()

    def in_session(self) -> Self:
        """What is still of use once the process is in a session. A session must not keep identities of its own: they
        take up to seven times as much memory as the frame, and those of the pool and the namespace are equal."""
        return replace(self, pool=None, namespace=None, fleet_weights=UNNAMED_WEIGHTS, settled_tokens=())

    @property
    def is_farewell(self) -> bool:
        """Whether the process only reports that its copies have ended."""
        return self.role == "worker" and self.token in self.settled_tokens

    @classmethod
    def unpack(cls, payload: bytes) -> Self:
        """Raises `AttachRefusedError` for a hello of another version, whatever else is in it, and `ProtocolError`, with
        reason `malformed`, for anything that is not a hello."""
        version = decoded(_read_any, payload, "hello").version
        if version != VERSION:
            raise AttachRefusedError(
                "version",
                f"the service has version {VERSION} of the attach protocol, the engine version {version}: install "
                "the same release of KVStow for both",
            )
        return super().unpack(payload)

    def check(self) -> None:
        if self.role == "worker":
            for name in ("pool", "namespace"):
                force_setattr(self, name, None)
            force_setattr(self, "fleet_weights", UNNAMED_WEIGHTS)
        elif self.pool is None or self.namespace is None:
            raise ValueError("a scheduler half needs pool and namespace")
        elif sum(len(name) + len(value) for name, value in self.namespace.value_settings) > _MOST_SETTINGS:
            raise ValueError(f"the settings are long; allowed: texts of at most {_MOST_SETTINGS} characters together")
        super().check()


class Welcome(Message, frozen=True, kw_only=True):
    """The connection now belongs to a session. `token` is for the session's workers. `sharing_off` holds sentences that
    say why this session shares no blocks with others; it is empty if it may share. `source_key`: of the digests of
    sources, in hex (`source_of`). `store`: the name of the store below the pools; empty without one."""

    KIND: ClassVar = Kind.WELCOME
    session_id: Text
    service: Text = ""
    token: Text = ""
    engine_id: Text = ""
    pool: Text = ""
    namespace: Text = ""
    sharing_off: _Texts = ()
    source_key: Annotated[str, Meta(pattern=_SOURCE_KEY)] = ""
    store: Text = ""


TRANSIENT_REFUSALS: Final = frozenset(
    {
        "draining",
        "no_descriptors",
        "too_many_clients",
        "too_many_lost",
        "too_many_strangers",
        "unknown_token",
        "user_limit",
    }
)
"""Reasons that may soon no longer apply. A client tries again soon."""


class Refused(Message, frozen=True):
    """Why the connection is closed: a word in snake case and a sentence. It is the last frame."""

    KIND: ClassVar = Kind.REFUSED
    reason: Text
    message: str

    def __post_init__(self) -> None:
        force_setattr(self, "message", plain(self.message))


class CallError(Message, frozen=True):
    """The answer to a request that failed: the code of an error of `kvstow.errors`, and its message."""

    KIND: ClassVar = Kind.ERROR
    code: Text
    message: str

    def __post_init__(self) -> None:
        force_setattr(self, "message", plain(self.message))
