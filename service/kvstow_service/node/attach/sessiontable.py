"""Sessions as the wire sees them: which processes belong to one, and whether any of them can still reach memory."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Literal, NamedTuple

from kvstow.attach.hello import Hello, digest_of
from kvstow.attach.peer import Peer
from kvstow.errors import AttachRefusedError

SessionState = Literal["attached", "lost", "over"]

_ID_BYTES, _TOKEN_BYTES = 8, 16


class Member:
    """A process of a session: its scheduler half (`rank` is None) or the worker of a rank.

    `has_memory`: it was sent descriptors, so the service must wait until it ends or says that it has let go.
    `has_ended`: that has happened.
    """

    __slots__ = ("has_ended", "has_memory", "hello", "is_connected", "peer", "rank", "session")

    def __init__(self, session: Session, hello: Hello, peer: Peer) -> None:
        self.session = session
        self.hello = hello
        self.peer = peer
        self.rank = None if hello.role == "scheduler" else hello.rank
        self.is_connected = True
        self.has_memory = False
        self.has_ended = False

    @property
    def is_awaited(self) -> bool:
        return self.has_memory and not self.has_ended


class Session:
    """One engine incarnation: the connection of its scheduler half and one for the worker of each rank."""

    def __init__(self, session_id: str, token: str, hello: Hello, peer: Peer, *, token_digest: str = "") -> None:
        """`token_digest` is set for a session of the previous service, whose token this service does not know."""
        self.session_id = session_id
        self.token = token
        self.token_digest = token_digest or digest_of(token)
        self.hello = hello
        self.uid = peer.uid
        self.state: SessionState = "attached"
        self.members: list[Member] = []
        """Includes members that have ended."""

    @property
    def num_ranks(self) -> int:
        return 0 if self.hello.pool is None else self.hello.pool.num_ranks

    def member_of(self, rank: int | None) -> Member | None:
        """The connected member."""
        return next((member for member in self.members if member.rank == rank and member.is_connected), None)

    @property
    def is_awaited(self) -> bool:
        """Whether any process of the session may still reach memory."""
        return any(member.is_awaited for member in self.members)


class MemberView(NamedTuple):
    """A process of a session, for display. `rank` is None for the scheduler half. `pid` is 0 if it is not visible."""

    rank: int | None
    pid: int
    uid: int
    device: str
    is_connected: bool
    has_memory: bool


class SessionView(NamedTuple):
    """A session, for display."""

    session_id: str
    state: SessionState
    engine: str
    engine_version: str
    host: str
    members: tuple[MemberView, ...]


class SessionTable:
    """The sessions that are not over. Used by one thread. Any thread may use `views`."""

    def __init__(self) -> None:
        self._by_id: dict[str, Session] = {}
        self._by_token: dict[str, Session] = {}
        """By the digest of the token."""

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_id.values()))

    def get(self, session_id: str) -> Session | None:
        return self._by_id.get(session_id)

    def of_token(self, token: str) -> Session | None:
        return self._by_token.get(digest_of(token))

    def new_session(self, hello: Hello, peer: Peer) -> Session:
        """A session that still has to be added with `add`."""
        return Session(secrets.token_hex(_ID_BYTES), secrets.token_urlsafe(_TOKEN_BYTES), hello, peer)

    def add(self, session: Session) -> None:
        self._by_id[session.session_id] = session
        self._by_token[session.token_digest] = session

    def remove(self, session: Session) -> None:
        session.state = "over"
        self._by_id.pop(session.session_id, None)
        self._by_token.pop(session.token_digest, None)

    def session_to_join(self, hello: Hello, peer: Peer) -> Session:
        """The session that a worker joins. Raises `AttachRefusedError` if the worker may not join it."""
        session = self.of_token(hello.token)
        if session is None or session.state != "attached":
            raise AttachRefusedError(
                "unknown_token", "no attached session has this token: wait for the one of the scheduler half's session"
            )
        if peer.uid != session.uid:
            raise AttachRefusedError("uid", f"the session belongs to uid {session.uid}, the worker runs as {peer.uid}")
        if hello.rank >= session.num_ranks:
            raise AttachRefusedError("rank", f"rank {hello.rank} of a session with {session.num_ranks} ranks")
        if session.member_of(hello.rank) is not None:
            raise AttachRefusedError("rank", f"rank {hello.rank} of the session is attached already")
        return session

    def views(self) -> list[SessionView]:
        return [_view(session) for session in self]


def _view(session: Session) -> SessionView:
    members = tuple(
        MemberView(
            member.rank, member.peer.pid, member.peer.uid, member.hello.device, member.is_connected, member.has_memory
        )
        for member in list(session.members)
    )
    hello = session.hello
    return SessionView(session.session_id, session.state, hello.engine, hello.engine_version, hello.host, members)
