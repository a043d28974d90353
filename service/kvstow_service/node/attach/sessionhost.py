"""What the attach server asks of the control plane."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from kvstow.attach.calls import (
    BeginLoad,
    BeginStore,
    Completions,
    CountLookup,
    Found,
    LoadBegun,
    Lookup,
    Pending,
    Prefill,
    ResetDone,
    StoreBegun,
)
from kvstow.attach.connection import Message
from kvstow.attach.eventcalls import EventPage, ReadEvents
from kvstow.attach.extentcalls import ExtentBytes, ExtentSlots
from kvstow.attach.hello import Hello
from kvstow.attach.peer import Peer
from kvstow.messages import DesiredState, RankReport

Later = Callable[[Found], object]
"""Takes the answer to a lookup that was `Pending`."""


class SessionGrant(NamedTuple):
    """What a new session receives: see `Welcome`."""

    engine_id: str
    pool: str
    namespace: str
    sharing_off: tuple[str, ...] = ()


class SessionLink(Protocol):
    """The way to a session's connections. Thread-safe; never waits."""

    session_id: str

    def push(self, message: Message, *, rank: int | None = None, fds: Sequence[int] = ()) -> None:
        """Send a message to the worker of `rank`, or to the scheduler half. Messages to one of them arrive in the order
        of the calls. Dropped if it is not connected, or speaks a version without this kind. The caller keeps its
        descriptors. A worker to which descriptors are sent holds memory from then on: see
        `SessionHost.worker_let_go`."""


class SessionHost(Protocol):
    """The control plane, as the attach server sees it.

    All methods are called on the attach server's one thread, which all engines wait for: none may wait. A session is
    one engine incarnation and is named by its id, which is never reused. Of each session, in this order: `open_session`
    first; then calls, of this session only; `session_lost` once; `session_over` once, after which nothing mentions it.

    A call may raise a `KvstowError`: the engine gets its code and message, and the session continues. Ops, leases and
    extents of a call may be invented: the host refuses those that are not the session's.
    """

    def open_session(self, session_id: str, hello: Hello, peer: Peer, link: SessionLink) -> SessionGrant:
        """A scheduler half attaches. `hello` is what it claims; `peer.uid` is what the kernel says, and part of the
        pool's identity. Raises `AttachRefusedError` to refuse it."""

    def join_worker(self, session_id: str, hello: Hello, peer: Peer) -> None:
        """The worker of `hello.rank` attaches; it has the token and the uid of the session, and no other worker has the
        rank. Push its extents. Raises `AttachRefusedError` to refuse it."""

    def lookup(self, session_id: str, call: Lookup, later: Later | None = None) -> Found | Pending:
        """`later`: takes the answer, on the attach server's thread, if this call returns `Pending`; None for a client
        that must have it at once."""

    def release_leases(self, session_id: str, lease_ids: Sequence[int]) -> None: ...

    def begin_load(self, session_id: str, call: BeginLoad) -> LoadBegun: ...

    def begin_store(self, session_id: str, call: BeginStore) -> StoreBegun: ...

    def complete(self, session_id: str, call: Completions) -> None:
        """Push `SettledOps` for what became final. From a worker, `call.rank` is its own."""

    def refresh(self, session_id: str, keys: Sequence[bytes]) -> None: ...

    def count_lookup(self, session_id: str, call: CountLookup) -> None: ...

    def note_prefill(self, session_id: str, call: Prefill) -> None: ...

    def reset(self, session_id: str) -> ResetDone: ...

    def read_events(self, session_id: str, call: ReadEvents) -> EventPage: ...

    def take_report(self, session_id: str, rank: int, report: RankReport) -> DesiredState: ...

    def extents_registered(self, session_id: str, rank: int, extents: Sequence[ExtentSlots]) -> None: ...

    def extents_released(self, session_id: str, rank: int, extent_ids: Sequence[int]) -> None:
        """The worker has nothing of these extents mapped any more."""

    def take_back(self, session_id: str, rank: int, extents: Sequence[ExtentBytes], fds: Sequence[int]) -> list[int]:
        """A worker hands back the memory of the service before this one; returns the ids of the extents that are kept.
        The host owns the descriptors, also if it raises; it verifies each and closes what it does not keep."""

    def take_returned(self, session_id: str, names: Sequence[str], fds: Sequence[int]) -> None:
        """A worker returns what the service before this one has deposited with it, before it hands back memory. The
        host owns the descriptors, also if it raises."""

    def session_lost(self, session_id: str, reason: str) -> None:
        """A connection of the session has ended: its leases and its filling slots go into quarantine, and no call of it
        follows. Its processes may still read and write their slots."""

    def worker_let_go(self, session_id: str, rank: int) -> None:
        """The worker's process has ended, or has said that nothing is mapped or under way in it any more. Only for
        workers that got descriptors; after `session_lost`."""

    def session_over(self, session_id: str) -> None:
        """All workers that got descriptors have let go: nothing of the session can reach memory. Free all it holds."""
