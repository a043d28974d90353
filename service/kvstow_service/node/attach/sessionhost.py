"""What the attach server requires of the control plane."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from kvstow.attach.calls import (
    BeginLoad,
    BeginStore,
    Completions,
    CountLookup,
    EventPage,
    ExtentSlots,
    Found,
    LoadBegun,
    Lookup,
    LookupPrompt,
    Pending,
    Prefill,
    ReadEvents,
    ResetDone,
    StoreBegun,
    Use,
)
from kvstow.attach.hello import Hello
from kvstow.attach.peer import Peer
from kvstow.attach.wire import Message
from kvstow.messages import DesiredState, RankReport

Later = Callable[[Callable[[], Found | Pending]], object]
"""Answers a lookup that was `Pending` with what the given call returns. `Pending` means that it takes more time.

Makes the call at once, or never if the client has gone. An error in the call is answered like one in the lookup itself.
Raises nothing."""


class SessionGrant(NamedTuple):
    """What a new session receives: see `Welcome`."""

    engine_id: str
    pool: str
    namespace: str
    sharing_off: tuple[str, ...] = ()


class SessionLink(Protocol):
    """Sends messages to a session's connections. Thread-safe. Never waits."""

    def push(self, message: Message, *, rank: int | None = None, fds: Sequence[int] = ()) -> None:
        """Send a message to the worker of `rank`, or to the scheduler half. Messages to one receiver arrive in the
        order of the calls. A message is dropped if the receiver is not connected. The caller keeps its descriptors. A
        worker to which descriptors are sent holds memory from then on: see `HostedSession.end_worker`. Raises
        `OSError`, and sends nothing, if this process can have no more descriptors."""


class HostedSession(Protocol):
    """One engine incarnation in the control plane.

    The attach server calls all methods on its one thread. All engines wait for that thread, so no method may wait.

    A call may raise a `KvstowError`: the engine gets its code and message, and the session continues. The client may
    have made up the ops, leases and extents in a call, so the session refuses those that are not its own.
    """

    def join_worker(self, hello: Hello, peer: Peer) -> None:
        """The worker of `hello.rank` attaches. It has the session's token and uid, and no other worker has the rank.
        Push its extents. Raises `AttachRefusedError` to refuse it."""

    def lookup(self, call: Lookup | LookupPrompt, later: Later | None = None) -> Found | Pending:
        """If this call returns `Pending`, the session calls `later` with the answer, on the attach server's thread. It
        is None for a client that needs the answer at once."""

    def release_leases(self, lease_ids: Sequence[int]) -> None: ...

    def begin_load(self, call: BeginLoad) -> LoadBegun: ...

    def begin_store(self, call: BeginStore) -> StoreBegun: ...

    def complete(self, call: Completions) -> None:
        """Push `SettledOps` for what became final. A worker can report only its own rank in `call.rank`."""

    def use(self, call: Use) -> None: ...

    def count_lookup(self, call: CountLookup) -> None: ...

    def note_prefill(self, call: Prefill) -> None: ...

    def read_events(self, call: ReadEvents) -> EventPage: ...

    def take_report(self, report: RankReport) -> DesiredState: ...

    def registered(self, rank: int, extents: Sequence[ExtentSlots]) -> None:
        """The worker can copy to and from the given slots of its extents."""

    def released(self, rank: int, extent_ids: Sequence[int]) -> None:
        """The worker no longer has anything of these extents mapped."""

    def lose(self, reason: str) -> None:
        """A connection of the session has ended. Its leases and the slots that it is filling go into quarantine, and it
        makes no more calls. Its processes may still read and write their slots."""

    def end_worker(self, rank: int) -> None:
        """The worker's process has ended, or has reported that it has nothing mapped and no copy under way. Called
        after `lose`, only for workers that received descriptors."""


class SessionHost(Protocol):
    """Opens and ends sessions. The attach server calls it on its one thread, and no method may wait.

    The calls for each session come in this order: `open_session`; the engine's calls; `HostedSession.lose` once;
    `session_over` once. No call mentions the session after that. Its id is never reused.
    """

    def open_session(
        self, session_id: str, hello: Hello, peer: Peer, link: SessionLink
    ) -> tuple[HostedSession, SessionGrant]:
        """A scheduler half attaches. `hello` is what it claims. `peer.uid` comes from the kernel, and is part of
        the pool's identity. Raises `AttachRefusedError` to refuse it."""

    def reset(self, session_id: str) -> ResetDone: ...

    def session_over(self, session_id: str) -> None:
        """All workers that received memory have released it, so nothing of the session can reach memory. Free all it
        holds."""

    def next_deadline(self) -> float | None:
        """When to call `expire`, in seconds of the server's clock. None if no lookup waits. Called often: cheap."""

    def expire(self) -> None:
        """Answer the lookups that have waited long enough. Called now and then, also before the deadline."""
