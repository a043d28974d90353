"""The first frames of a connection: who connects, and whether it may."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any, ClassVar, Final, NamedTuple, Self, cast

from kvstow.attach.identity import UNNAMED_WEIGHTS, FleetWeights, NamespaceIdentity, PoolIdentity
from kvstow.attach.payloads import VERSION, JsonObject, Kind, Role, parse_object
from kvstow.errors import AttachRefusedError, InvalidRequestError, ProtocolError
from kvstow.plaintext import MOST_NAME

_COUNT_BITS = 40


class SessionTicket(NamedTuple):
    """Lets the engine's workers join its session. `number` counts the engine's sessions from 1. `token` is a secret of
    this engine's processes."""

    number: int
    token: str


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


@dataclass(frozen=True, kw_only=True)
class Hello:
    """What a process says about itself. `pid` and `host` are for display only: the kernel says who the process is.

    The scheduler half sends both identities and receives a token, which each worker sends. `fleet_weights` names its
    weights to other nodes, if they have a name there. `wanted_bytes` is the memory that the engine
    would like on this node, over all ranks; 0 asks for all of it. `settled_tokens` are sessions that this process was
    in and whose copies in it have all ended, so the service need not wait for the process to end. A worker that lists
    its own token there joins no session: it has stopped, and gets no answer.
    """

    KIND: ClassVar[Kind] = Kind.HELLO
    role: Role
    engine: str
    host: str
    pid: int
    version: int = VERSION
    engine_version: str = ""
    pool: PoolIdentity | None = None
    namespace: NamespaceIdentity | None = None
    fleet_weights: FleetWeights = UNNAMED_WEIGHTS
    wanted_bytes: int = 0
    require_sharing: bool = False
    token: str = ""
    rank: int = 0
    device: str = ""
    numa_node: int | None = None
    settled_tokens: tuple[str, ...] = ()

    def in_session(self) -> Self:
        """What is still of use once the process is in a session. A session must not keep identities of its own: they
        take up to seven times as much memory as the frame, and those of the pool and the namespace are equal."""
        return replace(self, pool=None, namespace=None, fleet_weights=UNNAMED_WEIGHTS, settled_tokens=())

    @property
    def is_farewell(self) -> bool:
        """Whether the process only says that its copies have ended."""
        return self.role == "worker" and self.token in self.settled_tokens

    def pack(self) -> bytes:
        value = {name: shown for name, shown in vars(self).items() if shown is not None}
        value["fleet_weights"] = self.fleet_weights._asdict()
        for name, identity in (("pool", self.pool), ("namespace", self.namespace)):
            if identity is not None:
                value[name] = identity.to_json()
        return _dump(value)

    @classmethod
    def unpack(cls, payload: bytes) -> Self:
        """Raises `AttachRefusedError` for a hello of another version, whatever else is in it, and `ProtocolError`, with
        reason `malformed`, for anything that is not a hello."""
        try:
            value = parse_object(payload, "hello")
            version = value.whole("version")
            if version != VERSION:
                raise AttachRefusedError(
                    "version",
                    f"the service has version {VERSION} of the attach protocol, the engine version {version}: install "
                    "the same release of KVStow for both",
                )
            return cls._read(value)
        except InvalidRequestError as error:
            raise ProtocolError("malformed", str(error)) from error

    @classmethod
    def _read(cls, value: JsonObject) -> Self:
        role = cast(Role, value.text("role", allowed=("scheduler", "worker")))
        is_scheduler = role == "scheduler"
        pool, namespace, weights = (
            value.optional_child(name) if is_scheduler else None for name in ("pool", "namespace", "fleet_weights")
        )
        if is_scheduler and (pool is None or namespace is None):
            raise InvalidRequestError("hello of a scheduler needs hello.pool and hello.namespace")
        return cls(
            role=role,
            engine=value.text("engine", most=MOST_NAME),
            host=value.text("host", most=MOST_NAME),
            pid=value.whole("pid"),
            engine_version=value.text("engine_version", "", most=MOST_NAME),
            pool=None if pool is None else PoolIdentity.from_json(pool),
            namespace=None if namespace is None else NamespaceIdentity.from_json(namespace),
            fleet_weights=UNNAMED_WEIGHTS if weights is None else FleetWeights.from_json(weights),
            wanted_bytes=value.whole("wanted_bytes", 0),
            require_sharing=value.flag("require_sharing", False),
            token=value.text("token", ""),
            rank=value.whole("rank", 0),
            device=value.text("device", "", most=MOST_NAME),
            numa_node=value.optional_whole("numa_node"),
            settled_tokens=value.texts("settled_tokens"),
        )


@dataclass(frozen=True, kw_only=True)
class Welcome:
    """The connection now belongs to a session. `token` is for the session's workers. `sharing_off` holds sentences that
    say why this session shares no blocks with others; it is empty if it may share."""

    KIND: ClassVar[Kind] = Kind.WELCOME
    session_id: str
    service: str
    token: str = ""
    engine_id: str = ""
    pool: str = ""
    namespace: str = ""
    sharing_off: tuple[str, ...] = field(default=())

    def pack(self) -> bytes:
        return _dump(vars(self))

    @classmethod
    def unpack(cls, payload: bytes) -> Self:
        try:
            value = parse_object(payload, "welcome")
            return cls(
                session_id=value.text("session_id"),
                service=value.text("service", ""),
                token=value.text("token", ""),
                engine_id=value.text("engine_id", ""),
                pool=value.text("pool", ""),
                namespace=value.text("namespace", ""),
                sharing_off=value.texts("sharing_off"),
            )
        except InvalidRequestError as error:
            raise ProtocolError("malformed", str(error)) from error


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


@dataclass(frozen=True, slots=True)
class Refused:
    """Why the connection is closed: a word in snake case and a sentence. It is the last frame."""

    KIND: ClassVar[Kind] = Kind.REFUSED
    reason: str
    message: str

    def pack(self) -> bytes:
        return _dump({"reason": self.reason, "message": self.message})

    @classmethod
    def unpack(cls, payload: bytes) -> Self:
        return cls(*_two_texts(payload, "refusal", "reason"))


@dataclass(frozen=True, slots=True)
class CallError:
    """The answer to a request that failed: the code of an error of `kvstow.errors`, and its message."""

    KIND: ClassVar[Kind] = Kind.ERROR
    code: str
    message: str

    def pack(self) -> bytes:
        return _dump({"code": self.code, "message": self.message})

    @classmethod
    def unpack(cls, payload: bytes) -> Self:
        return cls(*_two_texts(payload, "error", "code"))


def _dump(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _two_texts(payload: bytes, what: str, first: str) -> tuple[str, str]:
    try:
        value = parse_object(payload, what)
        return value.text(first), value.sentence("message")
    except InvalidRequestError as error:
        raise ProtocolError("malformed", str(error)) from error
