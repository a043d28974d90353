"""The attach server's connections: limits for their number and memory, and counters of what they do."""

from __future__ import annotations

import logging
import resource
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator

from kvstow.attach.channel import MAX_HELLO_BYTES, Channel, Frame
from kvstow.attach.peer import credentials_of
from kvstow.attach.wire import Kind, Message
from kvstow.owners import most_of
from kvstow.status import UserLimit
from kvstow_api.journal import LimitedLog
from kvstow_service.node.pools.nodesession import Member, Steps

logger = logging.getLogger("kvstow.attach")

REASONS = (
    *("hello_timeout", "identity", "memory", "no_descriptors", "no_pidfd", "peer_ended", "rank", "sharing_off"),
    *("too_many_clients", "too_many_lost", "too_many_strangers", "uid", "unknown_token", "user_limit"),
    "version",
    *("fds_missing", "fds_unwanted", "internal", "malformed", "no_hello", "slow_reader", "too_long", "too_many_fds"),
    "unexpected",
)
"""The reasons for which connections are refused, up to `version`, and those for which they are ended, from
`fds_missing` on."""

_LINES_A_MINUTE = 10
"""How many refusals, and how many faults, are logged in a minute at most."""

HELLO_SECONDS = 5.0
"""How long a connection may take to send its hello."""
MAX_PARTIAL_BYTES = 128 << 20
"""How many bytes of incomplete frames all connections together may have."""
_MAX_CLIENTS = 1024
_MIN_CLIENTS = 16
_MAX_STRANGERS = 64
_SHARE_OF_DESCRIPTORS = 8  # each client takes a socket and a pidfd; extents and the admin server need the rest


class AttachTally:
    """Counters of the attach server: connections that it accepted; frames that it received and allowed, by kind;
    connections that it refused or ended, by reason; and calls that failed, by error code. Only its thread writes
    them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.accepted = 0
        self.frames: Counter[int] = Counter()
        self.refused: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self._refusals = LimitedLog(logger, clock, burst=_LINES_A_MINUTE)
        self._faults = LimitedLog(logger, clock, burst=_LINES_A_MINUTE)

    def refuse(self, reason: str, who: str, sentence: str) -> None:
        """Count a connection that was refused, or ended because of what its client did, and log whose it was and
        why."""
        self.refused[reason] += 1
        self._refusals.warning("the connection of %s to the attach socket was ended (%s): %s", who, reason, sentence)

    def fault(self, error: BaseException) -> None:
        self.errors["internal"] += 1
        self._faults.log(logging.ERROR, "the attach server has failed for one client", exc_info=error)


class ClientConnection:
    """An accepted connection. It is a stranger until its hello is accepted, and a member of a session after that."""

    __slots__ = ("backlog", "channel", "interest", "member", "opened", "partial_bytes", "socket", "steps")

    def __init__(self, accepted: socket.socket, scratch: bytearray, opened: float) -> None:
        self.socket = accepted
        self.channel = Channel(accepted, scratch=scratch, limit=MAX_HELLO_BYTES)
        self.opened = opened
        self.member: Member | None = None
        self.backlog: deque[Frame] = deque()
        """Frames that were received and are not handled yet."""
        self.steps: tuple[int, Steps[Message | None]] | None = None
        """The request id and the remaining steps of a call that is made in steps."""
        self.partial_bytes = 0
        self.interest = 0
        """The epoll events that are watched."""

    def described(self) -> str:
        """Name the process in a sentence, so that people find it."""
        if self.member is not None:
            return f"process {self.member.peer.pid} (session {self.member.session.session_id})"
        pid, uid, _ = credentials_of(self.socket)
        return f"process {pid} (uid {uid})"

    @property
    def has_detached(self) -> bool:
        """Whether the last frame of the backlog is a detach. After it, the client reads no answers."""
        return bool(self.backlog) and self.backlog[-1].kind == Kind.DETACH


class Clients:
    """The open connections. Used only by the attach server's thread. Every method is O(1), unless it says otherwise."""

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self.max_strangers = min(_MAX_STRANGERS, max(1, limit // 2))
        self._clock = clock
        self._strangers: dict[int, ClientConnection] = {}
        """Connections without a hello, by descriptor, the oldest first."""
        self._members: dict[int, ClientConnection] = {}
        self.partial_bytes = 0

    def __len__(self) -> int:
        return len(self._strangers) + len(self._members)

    def __iter__(self) -> Iterator[ClientConnection]:
        yield from list(self._strangers.values())
        yield from list(self._members.values())

    def get(self, fd: int) -> ClientConnection | None:
        return self._members.get(fd) or self._strangers.get(fd)

    def oldest_stranger(self) -> ClientConnection | None:
        return next(iter(self._strangers.values()), None)

    @property
    def is_crowded(self) -> bool:
        """Whether a stranger must be dropped before another connection is accepted."""
        return len(self._strangers) >= self.max_strangers or len(self) >= self.limit

    def add(self, accepted: socket.socket, scratch: bytearray) -> ClientConnection:
        client = ClientConnection(accepted, scratch, self._clock())
        self._strangers[client.channel.fileno()] = client
        return client

    def has_place_for(self, uid: int) -> bool:
        """Whether one more process of this user may join a session: see `most_of`. O(n)."""
        counts = self._by_uid()
        return counts[uid] < self._most(uid, counts)

    def user_limits(self) -> list[UserLimit]:
        """The users who have reached their limit of connections. From any thread. O(n)."""
        counts = self._by_uid()
        return [
            UserLimit(uid, "connections", count, most, tuple(self._sessions_of(uid)))
            for uid, count in counts.items()
            if count >= (most := self._most(uid, counts))
        ]

    def _by_uid(self) -> Counter[int]:
        members = [one.member for one in list(self._members.values())]
        return Counter(member.peer.uid for member in members if member is not None)

    def _most(self, uid: int, counts: Counter[int]) -> int:
        return max(1, most_of(self.limit, counts.total() - counts[uid]))

    def _sessions_of(self, uid: int) -> list[str]:
        members = [one.member for one in list(self._members.values())]
        found = Counter(one.session.session_id for one in members if one is not None and one.peer.uid == uid)
        return [session_id for session_id, _ in found.most_common()]

    def accept_member(self, client: ClientConnection) -> None:
        fd = client.channel.fileno()
        self._members[fd] = self._strangers.pop(fd)

    def remove(self, client: ClientConnection) -> bool:
        """Remove a client, before its channel is closed. Returns False if it was already removed."""
        fd = client.channel.fileno()
        found = self._members if self._members.get(fd) is client else self._strangers
        if found.get(fd) is not client:
            return False
        del found[fd]
        self.partial_bytes -= client.partial_bytes
        return True

    def count_partial(self, client: ClientConnection) -> bool:
        """Update the count of bytes of incomplete frames. Returns False if all clients together have too many."""
        now = client.channel.buffered_bytes
        self.partial_bytes += now - client.partial_bytes
        client.partial_bytes = now
        return self.partial_bytes <= MAX_PARTIAL_BYTES

    def expired(self) -> list[ClientConnection]:
        """Return the strangers that have sent no hello in time. O(their number)."""
        latest = self._clock() - HELLO_SECONDS
        found = []
        for client in self._strangers.values():
            if client.opened > latest:
                break
            found.append(client)
        return found

    def next_deadline(self) -> float | None:
        oldest = self.oldest_stranger()
        return None if oldest is None else oldest.opened + HELLO_SECONDS


def client_limit() -> int:
    """How many connections the attach server may hold, given this process's descriptor limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    share = _MAX_CLIENTS if soft == resource.RLIM_INFINITY else soft // _SHARE_OF_DESCRIPTORS
    return max(_MIN_CLIENTS, min(_MAX_CLIENTS, share))
