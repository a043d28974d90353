"""The first frames of a connection: a process introduces itself, and the service welcomes or refuses it."""

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
"""The bits of an id that count the ops or leases of one session. The bits above are the session's number."""
_MOST_SETTINGS = 16 << 10
"""How many characters the settings of a namespace may have together. Those of an engine have about 2,000."""


class SessionTicket(NamedTuple):
    """A ticket with which the engine's workers join its session. `number` counts the engine's sessions from 1. `token`
    is a secret of the engine's processes."""

    number: int
    token: str


class RankSession(NamedTuple):
    """How far a rank has come in a session."""

    number: int = 0
    """The number of the session's ticket, or 0 without a session."""
    slots: int = 0
    """How many slots the rank can copy to and from."""
    is_whole: bool = False
    """The rank will register no further slots."""
    hold: int = 0
    """The number of the `GateHold` that the rank keeps, or 0."""


class GateHold(NamedTuple):
    """A host's request to a rank: the rank lets ops of a session through even after the session has ended, until the
    host withdraws the request. `session` is the number of the session's ticket. `number` is different for each
    request."""

    session: int
    number: int


NO_HOLD = GateHold(0, 0)
"""Withdraws the present hold."""


def digest_of(token: str) -> str:
    """Return a digest that names a token. Nobody can join a session with it."""
    return sha256(token.encode()).hexdigest()


def unique_id(number: int, count: int) -> int:
    """Return an id of an op or a lease that is unique across all sessions of an engine. It joins the session's `number`
    and the service's `count`, which begins at 1 again in each session."""
    return number << _COUNT_BITS | count


def number_of(identifier: int) -> int:
    """Return the number of the session that an id belongs to."""
    return identifier >> _COUNT_BITS


def count_of(identifier: int) -> int:
    """Return the service's count in an id."""
    return identifier & ((1 << _COUNT_BITS) - 1)


_Texts = Annotated[tuple[Text, ...], Meta(max_length=MOST_LISTED)]


class _AnyHello(msgspec.Struct):
    """The field that a hello has in every version of the protocol."""

    version: Whole


_read_any = msgspec.json.Decoder(_AnyHello).decode


class Hello(Message, frozen=True, kw_only=True):
    """The first frame of a process. `pid` and `host` are for display only, because the kernel tells the service which
    process has connected.

    The scheduler half sends both identities and receives a token, which each worker sends. `fleet_weights` is the name
    of its weights on other nodes, if they have one. `wanted_bytes` is the memory that the engine would like on this
    node, over all ranks. 0 stands for all memory of the node.

    `settled_tokens` name sessions of this process in which all its copies have ended, so that the service need not wait
    for the process to end. A worker that sends its own token there joins no session: it has stopped, and gets no
    answer.
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
        """Return the hello without the fields that a session does not need. Above all it drops the identities, which
        take up to seven times the memory of the frame. The pool and the namespace have equal ones."""
        return replace(self, pool=None, namespace=None, fleet_weights=UNNAMED_WEIGHTS, settled_tokens=())

    @property
    def is_farewell(self) -> bool:
        """Whether the process only reports that its copies have ended, and joins no session."""
        return self.role == "worker" and self.token in self.settled_tokens

    @classmethod
    def unpack(cls, payload: bytes) -> Self:
        """Read a hello. Raises `AttachRefusedError` if it has another version, whatever its other fields are. Raises
        `ProtocolError` with reason `malformed` if it is no hello."""
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
            raise ValueError("the scheduler half of an engine must send pool and namespace")
        elif sum(len(name) + len(value) for name, value in self.namespace.value_settings) > _MOST_SETTINGS:
            raise ValueError(f"the settings are too long; allowed: {_MOST_SETTINGS} characters in all texts together")
        super().check()


class Welcome(Message, frozen=True, kw_only=True):
    """The answer to a hello that the service accepts. The connection now belongs to a session. The session's workers
    join it with `token`. `sharing_off` holds sentences that say why this session shares no blocks with others, and is
    empty if it may share. `store` is the name of the store below the pools, and empty without one."""

    KIND: ClassVar = Kind.WELCOME
    session_id: Text
    service: Text = ""
    token: Text = ""
    engine_id: Text = ""
    pool: Text = ""
    namespace: Text = ""
    sharing_off: _Texts = ()
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
"""Reasons of refusals that may soon no longer apply, so a client tries again soon."""


class Refused(Message, frozen=True):
    """The last frame of a connection that the service closes. `reason` is a word in snake case, and `message` a
    sentence."""

    KIND: ClassVar = Kind.REFUSED
    reason: Text
    message: str

    def __post_init__(self) -> None:
        force_setattr(self, "message", plain(self.message))


class CallError(Message, frozen=True):
    """The answer to a call that failed: the code of an error of `kvstow.errors`, and its message."""

    KIND: ClassVar = Kind.ERROR
    code: Text
    message: str

    def __post_init__(self) -> None:
        force_setattr(self, "message", plain(self.message))
