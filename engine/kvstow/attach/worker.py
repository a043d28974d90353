"""The worker half of an attached engine: a rank that maps memory of the node service, and makes its copies itself."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from kvstow.attach.calls import Desired, Detach, GrantedExtents, PopulatedExtents, RevokedExtents
from kvstow.attach.channel import Channel, Frame, close_fds
from kvstow.attach.connection import AttachConnection
from kvstow.attach.hello import GateHold, Hello, RankSession, SessionTicket, Welcome
from kvstow.attach.opgate import OpGate
from kvstow.attach.rankreports import RankReports
from kvstow.attach.wake import Wake
from kvstow.attach.wire import Kind
from kvstow.errors import AttachError, KvstowError, PinError
from kvstow.messages import Completion, DesiredState, RankReport, StepPlan

if TYPE_CHECKING:
    from kvstow.dataplane import DataPlane
    from kvstow.devices.base import Fence
    from kvstow.memory.mappedpool import MappedPool

logger = logging.getLogger("kvstow.attach")

DETACHED_SECONDS = 0.1
"""The pause between two attempts while the service is absent."""
LEAVING_SECONDS = 0.005
"""The pause between two checks whether the copies of the session that the rank leaves have ended."""
IDLE_SECONDS = 60.0
"""How long the thread rests without a session to join. A ticket wakes it up."""
LONGEST_GRACE_SECONDS = 60.0
"""How long after the end of a session a rank keeps a `GateHold`, if its host can take back a load that was refused. A
host that takes this long for a step hangs."""
FAREWELL_SECONDS = 5.0
"""The pause between two reports that all copies of an ended session have ended."""
FAULT_SECONDS = 1.0
"""The pause after an unexpected error."""

_MAX_SETTLED = 16
"""How many tokens of settled sessions a hello has at most."""
_NO_TICKET = SessionTicket(0, "")


@dataclass(slots=True)
class _JoinedSession:
    """The session of the ticket that a rank has joined, or is about to join. Each ticket has a new one."""

    ticket: SessionTicket
    reports: RankReports | None = None
    """The rank's reports, once it is in the session."""
    memory_problem: str | None = None
    """The reason why granted memory cannot be used, as a sentence."""
    revoked_at_end: tuple[int, ...] = ()
    """Extents that the service has revoked at its end, while the host may still start loads from them."""
    end_time: float | None = None
    """When the session ended."""
    next_farewell: float = 0.0
    """When to report next that all copies of the ended session have ended."""

    @property
    def is_over(self) -> bool:
        return self.end_time is not None


class AttachedWorker:
    """Owns a rank's data plane and its connection to the node service. It runs on a thread of its own.

    The host uses the worker like the data plane, and gives it each ticket of its `AttachedEngine` (`join`).

    A session ends with its connection. Ops that were submitted before end as usual, and the memory stays mapped. After
    the session's end, or after the host has withdrawn its `GateHold`, the worker refuses ops of that session, waits for
    its copies to end, and reports their end to the service. It does so before it gets the next ticket, because an
    engine without requests makes no steps and so sends none, and until then the service could not reuse the session's
    slots. Memory that the service grants again, as it does after a restart with a keeper, stays mapped. The worker
    releases the rest.

    Only `close` waits. No call raises because the service is absent. Thread-safe. No error ends the thread. Each error
    is logged, counted in `faults`, and ends the session.
    """

    def __init__(
        self,
        path: Path,
        plane: DataPlane,
        pool: MappedPool,
        *,
        engine: str,
        replicated: bool = False,
        numa_node: int | None = None,
        may_refuse: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`pool` is the pool of `plane`. For `engine` and `numa_node`, see `Hello`, and for `replicated`, see
        `PoolIdentity`. With `may_refuse`, the host can take back a load by layer that was refused. Otherwise the worker
        keeps each `GateHold` until the host withdraws it, however long that takes."""
        self.faults = 0
        """How many unexpected errors have ended a session."""
        self._longest_grace = LONGEST_GRACE_SECONDS if may_refuse else inf
        self._path = path
        self._plane, self._pool = plane, pool
        self._hello = Hello(
            role="worker",
            engine=engine,
            host=socket.gethostname(),
            pid=os.getpid(),
            rank=plane.rank,
            numa_node=numa_node,
        )
        self._gate = OpGate(plane, stores=not replicated or plane.rank == 0)
        self._connection = AttachConnection(
            path,
            self._make_hello,
            accepts_fds=True,
            on_attached=self._begin_session,
            on_lost=self._end_session,
            clock=clock,
        )
        self._newest = _NO_TICKET
        """The newest ticket of the engine, which the thread joins next."""
        self._joined = _JoinedSession(_NO_TICKET)
        self._clock = clock
        self._settled: tuple[str, ...] = ()
        """The tokens of the newest sessions whose copies have ended here. They are sent in each session, because a
        service that has received them may be killed before it records them."""
        self._stopping = False
        self._ended: bool | None = None
        """What `close` has returned."""
        self._closing = threading.Lock()
        self._wake = Wake()
        self._thread = threading.Thread(target=self._run, name=f"kvstow-attach-{plane.rank}", daemon=True)
        plane.add_listener(self._on_change)

    # -- for the host ---------------------------------------------------------------------------------------

    def start(self, *, at_ease: bool = False) -> None:
        """Start to attach, and to map and register the memory that the service grants. Idempotent. For `at_ease`, see
        `DataPlane.start`."""
        self._plane.start(at_ease=at_ease)
        if self._thread.ident is None and not self._stopping:
            self._thread.start()

    def join(self, ticket: SessionTicket | None) -> None:
        """Join this session of the engine, unless a newer one is known. Cheap enough to repeat in every step."""
        if ticket is not None and ticket.number > self._newest.number:
            self._newest = ticket
            self._wake.set()

    def keep_open(self, hold: GateHold) -> None:
        """Let ops of the hold's session through even after the session has ended, until the host passes another hold.
        `NO_HOLD` withdraws the present one. `session` says whether the rank keeps the hold. Cheap enough to repeat in
        every step, before the ops of the step."""
        had = self._gate.hold
        self._gate.keep_open(hold)
        if had and not self._gate.hold and self._joined.is_over:
            self._wake.set()

    def submit(self, plan: StepPlan, after: Fence | None = None) -> None:
        """Submit the ops of a step, as `DataPlane.submit` does. Ops of a session that this rank is not in fail. Stores
        that rank 0 makes for all ranks are left out."""
        self._gate.submit(plan, after)

    def take_completions(self) -> list[Completion]:
        """Return all completions since the last call, for `AttachedEngine.complete`. Also works after `close`."""
        return self._gate.take_completions()

    def apply(self, desired: DesiredState) -> None:
        """Does nothing: the service's desired state is applied when it arrives."""

    @property
    def layered(self) -> OpGate | None:
        """Starts loads by layer, if the device can do that."""
        return None if self._plane.layered is None else self._gate

    @property
    def boot_id(self) -> str:
        return self._plane.boot_id

    @property
    def is_pinning(self) -> bool:
        return self._plane.is_pinning

    def begin_step(self) -> None:
        self._plane.begin_step()

    def launched(self, work: Fence | None = None) -> None:
        self._plane.launched(work)

    def end_step(self) -> None:
        self._plane.end_step()

    def drive(self) -> None:
        self._plane.drive()

    def report(self) -> RankReport:
        return self._plane.report()

    def add_listener(self, callback: Callable[[], None]) -> None:
        self._plane.add_listener(callback)

    @property
    def applied(self) -> DesiredState:
        return self._plane.applied

    @property
    def is_attached(self) -> bool:
        return self._connection.state == "attached"

    @property
    def session(self) -> RankSession:
        hold = self._gate.hold
        if not self.is_attached:
            return RankSession(hold=hold)
        return RankSession(self._joined.ticket.number, self._pool.pinned_slots, not self._plane.is_pinning, hold)

    @property
    def problem(self) -> str | None:
        """The reason why it is not attached, or has less memory than the service has granted, as a sentence."""
        return self._connection.problem or self._joined.memory_problem

    def close(self, timeout: float = 5.0) -> bool:
        """End the session. Lets copies under way finish for `timeout` seconds, then releases the memory and reports
        that to the service. Returns False if a copy hangs: the memory then stays mapped, and the service waits for this
        process to end. Idempotent."""
        with self._closing:
            if self._ended is None:
                self._ended = self._close(timeout)
            return self._ended

    def _close(self, timeout: float) -> bool:
        self._stopping = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._gate.shut()
        ended = self._plane.close(timeout)
        self._connection.close(*([Detach("the worker has stopped")] if ended else []))
        if ended and self._joined.reports is not None:
            self._report_settled()
        self._wake.close()
        return ended

    def _report_settled(self) -> None:
        """Report on a second connection that nothing is under way here, without waiting for an answer. The
        `Detach` on the first connection is lost if the engine or another worker has already ended the session. See
        `Hello.is_farewell`."""
        hello = replace(self._make_hello(), settled_tokens=(*self._settled, self._joined.ticket.token))
        connecting = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with closing(connecting), suppress(OSError, AttachError):
            connecting.setblocking(False)
            connecting.connect(str(self._path))
            Channel(connecting).send(hello.KIND, hello.pack())

    # -- the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping:
            try:
                seconds = self._turn()
            except Exception as error:
                self.faults += 1
                logger.exception("rank %d: an error of the attached worker ends its session", self._plane.rank)
                self._connection.disconnect(f"the worker has failed: {error!r}")
                seconds = FAULT_SECONDS
            self._wake.wait(self._connection.fileno(), seconds)

    def _turn(self) -> float:
        """Do the work that is due. Returns the seconds until there may be more work."""
        if not self.is_attached:
            self._take(deque(self._connection.take_pushed()))  # a session that has ended may have left messages
        if self._newest.number > self._joined.ticket.number and not self._leave():
            return LEAVING_SECONDS
        if self._joined.is_over:
            return self._settle()
        if not self._joined.ticket.number:
            return IDLE_SECONDS
        try:
            self._take(deque(self._connection.poll()))
            if not self.is_attached or (reports := self._joined.reports) is None:
                return DETACHED_SECONDS
            reports.apply_answers()
            seconds = reports.send_due()
            return seconds if self.is_attached else 0.0
        except KvstowError as error:
            self._connection.disconnect(str(error))
            return 0.0

    def _take(self, frames: deque[Frame]) -> None:
        try:
            while frames:
                self._take_frame(frames.popleft())
        finally:
            for frame in frames:
                close_fds(frame.fds)

    def _on_change(self) -> None:
        """Let the thread check the pool. The data plane calls this. It wakes the thread only once for each check."""
        reports = self._joined.reports
        if reports is not None and not reports.is_changed:
            reports.is_changed = True
            self._wake.set()

    # -- messages of the service ----------------------------------------------------------------------------

    def _take_frame(self, frame: Frame) -> None:
        """Handle a frame, and own its descriptors. Raises `ProtocolError`."""
        if frame.kind == Kind.DESIRED:
            self._plane.apply(Desired.unpack(frame.payload).desired)
            return
        joined = self._joined
        if joined.reports is not None:
            joined.reports.is_changed = True
        if frame.kind == Kind.REVOKED:  # also after the session's end, because no later session may revoke it again
            revoked = RevokedExtents.unpack(frame.payload)
            if revoked.at_end and self._gate.hold:
                joined.revoked_at_end = revoked.extent_ids
            else:
                self._pool.revoke(revoked.extent_ids)
        elif frame.kind == Kind.EXTENTS and not joined.is_over:
            self._take_grants(frame)
        elif frame.kind == Kind.POPULATED and not joined.is_over:
            self._pool.set_populated(PopulatedExtents.unpack(frame.payload).extents)
        else:
            close_fds(frame.fds)

    def _take_grants(self, frame: Frame) -> None:
        try:
            granted = GrantedExtents.unpack(frame.payload)
            if len(granted.extents) != len(frame.fds):
                raise AttachError(f"{len(granted.extents)} extents came with {len(frame.fds)} file descriptors")
        except AttachError:
            close_fds(frame.fds)
            raise
        try:
            self._pool.grant(granted.slot_stride, granted.extents, frame.fds)
        except PinError as error:
            logger.warning("rank %d cannot use memory that it was granted: %s", self._plane.rank, error)
            self._joined.memory_problem = str(error)
        if granted.is_all:  # after `grant`, because extents that were granted again stay mapped
            self._pool.drop_earlier()

    # -- sessions -------------------------------------------------------------------------------------------

    def _leave(self) -> bool:
        """Leave the current session for the one of the newest ticket. Returns False while copies are under way."""
        self._gate.shut()
        if self._connection.state != "detached":
            self._connection.disconnect("the engine has another session")
        if not self._gate.is_quiet():
            return False
        self._release_rest()
        if self._joined.reports is not None:
            self._settled = (*self._settled, self._joined.ticket.token)[-_MAX_SETTLED:]
            self._pool.begin_session()
        self._joined = _JoinedSession(self._newest)
        self._connection.retry_now()
        return True

    def _settle(self) -> float:
        """Report that the copies of the ended session have ended, while there is no new ticket. The report is repeated,
        because the service does not answer it, and may start later. Returns the seconds until the next one."""
        joined, now = self._joined, self._clock()
        assert joined.end_time is not None
        if now < joined.next_farewell:
            return joined.next_farewell - now
        grace = joined.end_time + self._longest_grace - now
        if grace <= 0:
            self._gate.shut()
        elif not self._gate.shut_unless_held():
            return min(grace, IDLE_SECONDS)
        if not self._gate.is_quiet():
            return DETACHED_SECONDS
        self._release_rest()
        self._report_settled()
        joined.next_farewell = self._clock() + FAREWELL_SECONDS
        return FAREWELL_SECONDS

    def _release_rest(self) -> None:
        """Release the extents that the service has revoked at its end. No copy is under way any more."""
        revoked, self._joined.revoked_at_end = self._joined.revoked_at_end, ()
        if revoked:
            self._pool.revoke(revoked)

    def _make_hello(self) -> Hello:
        device = self._plane.report().device or ""
        return replace(self._hello, token=self._joined.ticket.token, device=device, settled_tokens=self._settled)

    def _begin_session(self, welcome: Welcome) -> None:
        self._joined.reports = RankReports(self._connection, self._plane, self._pool, self._clock)
        self._gate.open(self._joined.ticket.number)

    def _end_session(self) -> None:
        self._joined.end_time = self._joined.next_farewell = self._clock()
