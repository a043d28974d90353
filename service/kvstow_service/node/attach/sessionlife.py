"""Sessions as the attach server knows them: the processes of each, and whether any of them can still reach memory.

A hello opens a session. When one of its connections ends, the session is lost. It is over once none of its processes
can reach memory.
"""

from __future__ import annotations

import heapq
import logging
import secrets
import select
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from kvstow.attach.hello import Hello, Welcome, digest_of
from kvstow.attach.peer import Peer
from kvstow.errors import AttachRefusedError
from kvstow.owners import most_of
from kvstow.status import UserLimit
from kvstow_service.node.nodehost import NodeHost
from kvstow_service.node.pools.nodesession import Member, NodeSession, Send

logger = logging.getLogger("kvstow.attach")

_ID_BYTES, _TOKEN_BYTES = 8, 16


class _Trusted(NamedTuple):
    """A member without a pidfd, and when it counts as ended. `number` orders members of the same time."""

    ends_at: float
    number: int
    member: Member


class SessionLife:
    """Opens and ends sessions. Used only by the attach server's thread, unless a method says otherwise.

    A timeout never frees anything, except with `trust_eof`, which an operator must set. It is a number of seconds:
    processes whose end the service cannot see count as ended when their session has been lost for that long.
    """

    def __init__(
        self,
        host: NodeHost,
        epoll: select.epoll,
        disconnect: Callable[[Member], object],
        send: Send,
        *,
        max_awaited: int,
        errors: Counter[str],
        trust_eof: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`epoll` watches the pidfds of members. Call `on_pidfd` for each that it reports. `disconnect` closes a
        member's connection."""
        self.sessions: dict[str, NodeSession] = {}
        """The sessions that are not over, by id. Any thread may look one up."""
        self._by_token: dict[str, NodeSession] = {}
        """The same sessions by the digests of their tokens."""
        self._host = host
        self._epoll, self._disconnect, self._send = epoll, disconnect, send
        self._watched: dict[int, Member] = {}
        """Members by their pidfds."""
        self._service = secrets.token_hex(_ID_BYTES)
        """Identifies this run of the service."""
        self._max_awaited = max_awaited
        self._errors = errors
        self._trust_eof, self.needs_pidfd = trust_eof, trust_eof is None
        self._clock = clock
        self._trusted: list[_Trusted] = []
        """A heap."""
        self._num_trusted = 0

    # -- attaching ------------------------------------------------------------------------------------------

    def greet(self, hello: Hello, peer: Peer) -> tuple[Member, Welcome]:
        """Add a process to a session, which then owns `peer`. Raises `AttachRefusedError`."""
        self.settle(hello, peer)
        awaited = self.awaited()
        if awaited[peer.uid] >= self._most_awaited(peer.uid, awaited):
            raise AttachRefusedError(
                "too_many_lost",
                f"{awaited[peer.uid]} processes of lost sessions of uid {peer.uid} still have memory mapped, and no "
                "more are allowed beside those of others; the engine tries again, and gets in when some have ended",
            )
        if hello.role == "worker":
            return self._join(hello, peer)
        token = secrets.token_urlsafe(_TOKEN_BYTES)
        session_id, digest = secrets.token_hex(_ID_BYTES), digest_of(token)
        session, welcome = self._host.open_session(session_id, hello, peer, digest, self._send)
        self.sessions[session.session_id] = self._by_token[session.token_digest] = session
        member = self._add_member(session, hello, peer)
        logger.info("session %s begins: engine %r on host %r", session.session_id, hello.engine, hello.host)
        return member, replace(welcome, service=self._service, token=token)

    def awaited(self) -> Counter[int]:
        """Count, by user, the processes of lost sessions that may still reach memory. O(members of sessions)."""
        return Counter(one.uid for one in self.lost() for member in one.members if member.is_awaited)

    def lost(self) -> list[NodeSession]:
        """Return the sessions that are lost and not over. From any thread."""
        return [one for one in list(self.sessions.values()) if one.state == "lost"]

    def user_limits(self) -> list[UserLimit]:
        """Return the users who have reached their limit of processes of lost sessions. From any thread."""
        awaited = self.awaited()
        return [
            UserLimit(uid, "processes of lost sessions", count, most, tuple(self._lost_sessions_of(uid)))
            for uid, count in awaited.items()
            if count >= (most := self._most_awaited(uid, awaited))
        ]

    def _lost_sessions_of(self, uid: int) -> list[str]:
        mine = [one for one in self.lost() if one.uid == uid]
        mine.sort(key=lambda one: -sum(member.is_awaited for member in one.members))
        return [one.session_id for one in mine]

    def _most_awaited(self, uid: int, awaited: Counter[int]) -> int:
        return max(1, most_of(self._max_awaited, awaited.total() - awaited[uid]))

    def _join(self, hello: Hello, peer: Peer) -> tuple[Member, Welcome]:
        """Add a worker to the session of its token. Raises `AttachRefusedError` if it may not join that session."""
        session = self._by_token.get(digest_of(hello.token))
        if session is None or session.state != "attached":
            raise AttachRefusedError(
                "unknown_token", "no attached session has this token: wait until the engine's scheduler has attached"
            )
        if peer.uid != session.uid:
            raise AttachRefusedError("uid", f"the session belongs to uid {session.uid}, the worker runs as {peer.uid}")
        if hello.rank >= session.num_ranks:
            raise AttachRefusedError("rank", f"rank is {hello.rank}; the session has {session.num_ranks} ranks")
        if session.member_of(hello.rank) is not None:
            raise AttachRefusedError("rank", f"rank {hello.rank} of the session is attached already")
        session.join_worker(hello, peer)
        member = self._add_member(session, hello, peer)
        return member, Welcome(session_id=session.session_id, service=self._service)

    def _add_member(self, session: NodeSession, hello: Hello, peer: Peer) -> Member:
        member = Member(session, hello, peer)
        try:
            if peer.pidfd is not None:
                self._watch(member, peer.pidfd)
        except OSError:  # its end would go unnoticed; the host has accepted the worker before
            self.lose(session, f"{described(member)} cannot be watched")
            raise
        session.members.append(member)
        return member

    def settle(self, hello: Hello, peer: Peer) -> None:
        """End workers of lost sessions, as a hello asks for. It lists the tokens of sessions in which the same process
        took part, and whose copies in this process have all ended."""
        for token in hello.settled_tokens:
            session = self._by_token.get(digest_of(token))
            for member in session.members if session is not None and session.state == "lost" else ():
                if member.rank == hello.rank and member.is_awaited and self._is_same(member, peer):
                    self.process_ended(member, is_claim=True)

    def _is_same(self, member: Member, peer: Peer) -> bool:
        """Whether the peer is the member's process. Some workers of the previous service have no pidfd. Then the
        session's token identifies the process, because no other process of the user has it."""
        if member.peer.pidfd is None and self._trust_eof is None:
            return member.peer.uid == peer.uid
        return member.peer.is_same_process(peer)

    def restore(self, session: NodeSession, workers: Sequence[tuple[Hello, Peer]]) -> None:
        """Take over a session of the previous service as lost, with the workers that may still reach memory. It owns
        the peers. Call this before any client can name the session."""
        session.state = "lost"
        self.sessions[session.session_id] = self._by_token[session.token_digest] = session
        for hello, peer in workers:
            member = Member(session, hello, peer)
            member.is_connected, member.has_memory = False, True
            session.members.append(member)
            if peer.pidfd is not None:
                self._watch(member, peer.pidfd)
            elif self._trust_eof is not None:
                self._trust_later(member)
            else:
                logger.warning(
                    "session %s: the service cannot see when %s ends, so its memory stays in use until that process "
                    "attaches again; if the process has ended, restart the service with --trust-eof",
                    session.session_id,
                    described(member),
                )

    # -- ending ---------------------------------------------------------------------------------------------

    def lose(self, session: NodeSession, reason: str, *, expected: bool = False) -> None:
        """Mark the session as lost, because one of its connections has ended. With `expected`, the client or an
        operator asked for the end. Idempotent."""
        if session.state != "attached":
            return
        session.state = "lost"
        level = logging.INFO if expected else logging.WARNING
        logger.log(level, "session %s ends: %s", session.session_id, reason)
        for member in session.members:
            if member.is_connected:
                self._disconnect(member)
        self._guarded(partial(session.lose, reason))
        for member in session.members:
            if member.has_memory and member.has_ended:
                self._end_worker(member)
            if not member.is_awaited:
                self._forget(member)
            elif member.peer.pidfd is None:
                self._trust_later(member)
        self._end_if_over(session)

    def on_pidfd(self, fd: int) -> None:
        member = self._watched.get(fd)
        if member is not None and member.peer.has_ended():  # another pidfd may have got the number meanwhile
            self.process_ended(member)

    def process_ended(self, member: Member, *, is_claim: bool = False, expected: bool = False) -> None:
        """Note that the member's process can no longer reach memory. The kernel says so or, with `is_claim`, only the
        process itself. With `expected`, it has detached. Idempotent."""
        if member.has_ended:
            return
        member.has_ended = True
        if is_claim and member.has_memory:
            member.left_alive = self._copy_of(member.peer)
        self._forget(member)
        session = member.session
        if session.state == "attached":
            self.lose(session, f"{described(member)} has {'detached' if expected else 'ended'}", expected=expected)
        elif member.has_memory:
            self._end_worker(member)
            self._end_if_over(session)

    def expire(self) -> None:
        """End the members whose time of `trust_eof` is over."""
        now = self._clock()
        while self._trusted and self._trusted[0].ends_at <= now:
            self.process_ended(heapq.heappop(self._trusted).member)

    def next_deadline(self) -> float | None:
        """Return when `expire` next has something to do, or None."""
        return self._trusted[0].ends_at if self._trusted else None

    def close(self) -> None:
        for session in self.sessions.values():
            for member in session.members:
                self._forget(member)

    def _trust_later(self, member: Member) -> None:
        assert self._trust_eof is not None, "members without a pidfd are refused otherwise"
        self._num_trusted += 1
        heapq.heappush(self._trusted, _Trusted(self._clock() + self._trust_eof, self._num_trusted, member))

    def _end_if_over(self, session: NodeSession) -> None:
        if session.state != "lost" or any(member.is_awaited for member in session.members):
            return
        session.state = "over"
        self.sessions.pop(session.session_id, None)
        self._by_token.pop(session.token_digest, None)
        self._guarded(partial(self._host.session_over, session.session_id))

    def _end_worker(self, member: Member) -> None:
        assert member.rank is not None, "a scheduler half has no memory"
        left_alive, member.left_alive = member.left_alive, None
        self._guarded(partial(member.session.end_worker, member.rank, left_alive))

    @staticmethod
    def _copy_of(peer: Peer) -> Peer | None:
        """Duplicate a peer so that the process is watched further. Returns None if its end cannot be seen, or if there
        are too few descriptors. Its report is believed then."""
        try:
            return None if peer.pidfd is None else peer.copy()
        except OSError as error:
            logger.warning("a process that detaches is not watched any more: %s", error.strerror)
            return None

    def _watch(self, member: Member, pidfd: int) -> None:
        self._epoll.register(pidfd, select.EPOLLIN)
        self._watched[pidfd] = member

    def _forget(self, member: Member) -> None:
        pidfd = member.peer.pidfd
        if pidfd is not None:
            if self._watched.pop(pidfd, None) is not None:
                self._epoll.unregister(pidfd)
            member.peer.close()

    def _guarded(self, call: Callable[[], object]) -> None:
        """Make a call to the host. If it fails, the session's memory and slots stay in use, and other sessions
        continue."""
        try:
            call()
        except Exception:
            self._errors["internal"] += 1
            logger.exception("the end of a session has failed in the control plane: %r", call)


def described(member: Member) -> str:
    """Name a member in a sentence."""
    return "the scheduler half" if member.rank is None else f"the worker of rank {member.rank}"
