"""What the attach server asks of the control plane."""

from __future__ import annotations

import os
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
from kvstow.attach.channel import close_fds
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
    source_key: str = ""


class SessionLink(Protocol):
    """The way to a session's connections. Thread-safe. Never waits."""

    session_id: str

    def push(self, message: Message, *, rank: int | None = None, fds: Sequence[int] = ()) -> None:
        """Send a message to the worker of `rank`, or to the scheduler half. Messages to one receiver arrive in the
        order of the calls. A message is dropped if the receiver is not connected. The caller keeps its descriptors. A
        worker to which descriptors are sent holds memory from then on: see `SessionHost.worker_released`."""


def duplicates_of(fds: Sequence[int]) -> list[int]:
    """Raises `OSError`, and makes none, if this process can have no more descriptors."""
    copies = list[int]()
    try:
        copies.extend(map(os.dup, fds))
    except OSError:
        close_fds(copies)
        raise
    return copies


class SessionHost(Protocol):
    """The control plane, as the attach server sees it.

    The attach server calls all methods on its one thread. All engines wait for that thread, so no method may wait. A
    session is one engine incarnation. Its id names it and is never reused. The calls of each session come in this
    order: `open_session`; then the engine's calls; `session_lost` once; `session_over` once. Nothing mentions the
    session after that.

    A call may raise a `KvstowError`: the engine gets its code and message, and the session continues. The client may
    have made up the ops, leases and extents in a call, so the host refuses those that are not the session's.
    """

    def open_session(self, session_id: str, hello: Hello, peer: Peer, link: SessionLink) -> SessionGrant:
        """A scheduler half attaches. `hello` is what it claims. `peer.uid` comes from the kernel, and is part of
        the pool's identity. Raises `AttachRefusedError` to refuse it."""

    def join_worker(self, session_id: str, hello: Hello, peer: Peer) -> None:
        """The worker of `hello.rank` attaches. It has the session's token and uid, and no other worker has the rank.
        Push its extents. Raises `AttachRefusedError` to refuse it."""

    def lookup(self, session_id: str, call: Lookup, later: Later | None = None) -> Found | Pending:
        """If this call returns `Pending`, the host calls `later` with the answer, on the attach server's thread. It is
        None for a client that needs the answer at once."""

    def lookup_prompt(self, session_id: str, call: LookupPrompt, later: Later | None = None) -> Found | Pending:
        """`later`: as for `lookup`."""

    def release_leases(self, session_id: str, lease_ids: Sequence[int]) -> None: ...

    def begin_load(self, session_id: str, call: BeginLoad) -> LoadBegun: ...

    def begin_store(self, session_id: str, call: BeginStore) -> StoreBegun: ...

    def complete(self, session_id: str, call: Completions) -> None:
        """Push `SettledOps` for what became final. A worker can report only its own rank in `call.rank`."""

    def use(self, session_id: str, call: Use) -> None: ...

    def count_lookup(self, session_id: str, call: CountLookup) -> None: ...

    def note_prefill(self, session_id: str, call: Prefill) -> None: ...

    def reset(self, session_id: str) -> ResetDone: ...

    def read_events(self, session_id: str, call: ReadEvents) -> EventPage: ...

    def take_report(self, session_id: str, rank: int, report: RankReport) -> DesiredState: ...

    def extents_registered(self, session_id: str, rank: int, extents: Sequence[ExtentSlots]) -> None: ...

    def extents_released(self, session_id: str, rank: int, extent_ids: Sequence[int]) -> None:
        """The worker no longer has anything of these extents mapped."""

    def session_lost(self, session_id: str, reason: str) -> None:
        """A connection of the session has ended. Its leases and the slots that it is filling go into quarantine, and it
        makes no more calls. Its processes may still read and write their slots."""

    def worker_released(self, session_id: str, rank: int) -> None:
        """The worker's process has ended, or has reported that it has nothing mapped and no copy under way. Called
        after `session_lost`, only for workers that received descriptors."""

    def next_deadline(self) -> float | None:
        """When to call `expire`, in seconds of the server's clock. None if no lookup waits. Asked often: cheap."""

    def expire(self) -> None:
        """Answer the lookups that have waited long enough. Called now and then, also before the deadline."""

    def session_over(self, session_id: str) -> None:
        """All workers that received memory have released it, so nothing of the session can reach memory. Free all it
        holds."""
