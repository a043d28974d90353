"""The worker half of an attached engine: a rank that maps memory of the node service, and makes its copies itself."""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from kvstow.attach.calls import (
    Desired,
    Detach,
    ExtentSlots,
    GrantedExtents,
    PopulatedExtents,
    RegisteredExtents,
    ReleasedExtents,
    Report,
    RevokedExtents,
    listed,
)
from kvstow.attach.channel import Channel, Frame, close_fds
from kvstow.attach.connection import AttachConnection, Call
from kvstow.attach.hello import GateHold, Hello, RankSession, SessionTicket, Welcome, number_of
from kvstow.attach.wire import Kind
from kvstow.errors import AttachError, KvstowError, LoadRefusedError, PinError
from kvstow.messageorder import is_news
from kvstow.messages import Completion, DesiredState, Op, RankReport, StepPlan

if TYPE_CHECKING:
    from kvstow.dataplane import DataPlane
    from kvstow.devices.base import Fence, LayeredLoad
    from kvstow.memory.mappedpool import MappedPool


REPORT_SECONDS = 1.0
"""The longest pause between two reports of a rank."""
GAP_SECONDS = 0.05
"""The pause between two checks of the slots that the pool has registered. On a busy host, each check costs a handover
of the interpreter."""
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
_REFUSED = "the session of this op has ended"
"""The error of an op that the gate does not let through."""

logger = logging.getLogger("kvstow.attach")


class OpGate:
    """Lets ops of one session through, and fails all others, because their slots may lie in other memory by now, or
    hold other bytes. It also starts loads by layer, as the `layered` of a data plane does.

    Once the gate is shut and `is_quiet`, no op of the session is under way on this rank, and none will be. A `GateHold`
    for the present session keeps the gate open after the session's end. A hold has no effect on a gate that is shut, or
    open for another session, and `hold` then stays 0.

    Thread-safe. Its lock is never held for long.
    """

    def __init__(self, plane: DataPlane, *, stores: bool) -> None:
        """`stores` is False if another rank stores the same bytes for this one."""
        self._plane, self._stores = plane, stores
        self._lock = threading.Lock()
        self._number = 0
        """The number of the session whose ops are let through. 0 while the gate is shut."""
        self._starting = 0
        """How many calls of `load` are starting loads."""
        self.hold = 0
        """The number of the `GateHold` that keeps the gate open, or 0."""
        self._refused: list[Completion] = []

    def open(self, number: int) -> None:
        """Let ops of the session with this number through."""
        with self._lock:
            self._number, self.hold = number, 0

    def shut(self) -> None:
        """Let no ops through."""
        self.open(0)

    def keep_open(self, hold: GateHold) -> None:
        """Replace the present hold by this one. `NO_HOLD` withdraws it."""
        with self._lock:
            self.hold = hold.number if hold.session == self._number else 0

    def shut_unless_held(self) -> bool:
        """Shut the gate if no hold keeps it open. Returns whether it is shut."""
        with self._lock:
            if not self.hold:
                self._number = 0
            return not self._number

    def is_quiet(self) -> bool:
        """Whether no op is under way."""
        with self._lock:
            return not self._starting and self._plane.pending_ops == 0

    def submit(self, plan: StepPlan, after: Fence | None) -> None:
        """Submit the ops that the gate lets through, and fail the others. Never blocks or raises: see
        `DataPlane.submit`."""
        own_ops = [op for op in plan.ops if self._stores or op.direction == "load"]
        with self._lock:
            ops = tuple([op for op in own_ops if number_of(op.op_id) == self._number])
            self._refused += [Completion(op.op_id, "failed", _REFUSED) for op in own_ops if op not in ops]
            if ops:  # under the lock, because no op may enter after `shut`
                self._plane.submit(StepPlan(ops), after)

    def load(self, ops: Sequence[Op], after: Fence | None) -> LayeredLoad | None:
        """Start loads that a computation waits for. If the gate does not let all of them through, all of them fail, and
        this raises `LoadRefusedError`.

        Starting takes long if the loads do not go layer by layer. So the lock is not held meanwhile, but the gate is
        not quiet until they have started.
        """
        assert self._plane.layered is not None
        with self._lock:
            if any(number_of(op.op_id) != self._number for op in ops):
                self._refused += [Completion(op.op_id, "failed", _REFUSED) for op in ops]
                raise LoadRefusedError(_REFUSED)
            self._starting += 1
        try:
            return self._plane.layered.load(ops, after)
        finally:
            with self._lock:
                self._starting -= 1

    @property
    def num_parts(self) -> int:
        return 0 if self._plane.layered is None else self._plane.layered.num_parts

    @property
    def failure(self) -> str | None:
        return None if self._plane.layered is None else self._plane.layered.failure

    def take_completions(self) -> list[Completion]:
        with self._lock:
            refused, self._refused = self._refused, []
        return refused + self._plane.take_completions()


class AttachedWorker:
    """Owns a rank's data plane and its connection to the node service. It runs on a thread of its own.

    The host uses the worker like the data plane, and gives it each ticket of its `AttachedEngine` (`join`).

    A session ends with its connection. Ops that were submitted before end as usual, and the memory stays mapped. After
    the session's end, or after the host has withdrawn its `GateHold`, the worker refuses ops of that session, waits for
    its copies to end, and reports their end to the service. It does not wait for the next ticket with that: an engine
    without requests makes no steps, and the service could not reuse the session's slots for a long time. Mapped memory
    stays if the service grants it again, as it does after a restart with a keeper. The worker releases the rest.

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
        self._engine, self._numa_node = engine, numa_node
        self._gate = OpGate(plane, stores=not replicated or plane.rank == 0)
        self.layered = None if plane.layered is None else self._gate
        self.boot_id = plane.boot_id
        self.launched, self.drive, self.report = plane.launched, plane.drive, plane.report
        self.begin_step, self.end_step = plane.begin_step, plane.end_step
        self.add_listener = plane.add_listener
        self._connection = AttachConnection(
            path,
            self._make_hello,
            accepts_fds=True,
            on_attached=self._begin_session,
            on_lost=self._end_session,
            clock=clock,
        )
        self._is_changed = False
        """The pool or the rank has changed since the last check."""
        self._memory_problem: str | None = None
        """The reason why granted memory cannot be used, as a sentence."""
        self._reports: list[Call] = []
        self._reported: RankReport | None = None
        self._registered: dict[int, int] = {}
        self._next_check = self._next_report = float("-inf")
        self._ticket = self._newest = _NO_TICKET
        self._was_attached = self._is_over = False
        """Whether it has joined the session of `_ticket`, and whether that session has ended."""
        self._revoked_at_end: tuple[int, ...] = ()
        """Extents that the service has revoked at its end, while the host may still start loads from them."""
        self._clock = clock
        self._end_time = 0.0
        """When the session ended."""
        self._next_settle = 0.0
        """When to report next that all copies of the ended session have ended."""
        self._settled: tuple[str, ...] = ()
        """The tokens of the newest sessions whose copies have ended here. They are sent in each session, because a
        service that has received them may be killed before it records them."""
        self._stopping = False
        self._ended: bool | None = None
        self._closing = threading.Lock()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._waking = threading.Lock()
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
            self._wake_up()

    def keep_open(self, hold: GateHold) -> None:
        """Let ops of the hold's session through even after the session has ended, until the host passes another hold.
        `NO_HOLD` withdraws the present one. `session` says whether the rank keeps the hold. Cheap enough to repeat in
        every step, before the ops of the step."""
        had = self._gate.hold
        self._gate.keep_open(hold)
        if had and not self._gate.hold and self._is_over:
            self._wake_up()

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
    def is_pinning(self) -> bool:
        return self._plane.is_pinning

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
        return RankSession(self._ticket.number, self._pool.pinned_slots, not self._plane.is_pinning, hold)

    @property
    def problem(self) -> str | None:
        """The reason why it is not attached, or has less memory than the service has granted, as a sentence."""
        return self._connection.problem or self._memory_problem

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
        self._wake_up()
        if self._thread.ident is not None:
            self._thread.join()
        self._gate.shut()
        ended = self._plane.close(timeout)
        self._connection.close(*([Detach("the worker has stopped")] if ended else []))
        if ended and self._was_attached:
            self._report_settled()
        with self._waking:
            os.close(self._wake)
            self._wake = -1
        return ended

    def _report_settled(self) -> None:
        """Report on a second connection that nothing is under way here, without waiting for an answer. The
        `Detach` on the first connection is lost if the engine or another worker has already ended the session. See
        `Hello.is_farewell`."""
        hello = replace(self._make_hello(), settled_tokens=(*self._settled, self._ticket.token))
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
            self._wait(seconds)

    def _turn(self) -> float:
        """Do the work that is due. Returns the seconds until there may be more work."""
        if not self.is_attached:
            self._take(deque(self._connection.take_pushed()))  # a session that has ended may have left messages
        if self._newest.number > self._ticket.number and not self._leave():
            return LEAVING_SECONDS
        if self._is_over:
            return self._settle()
        if not self._ticket.number:
            return IDLE_SECONDS
        try:
            self._take(deque(self._connection.poll()))
            if not self.is_attached:
                return DETACHED_SECONDS
            self._advance()
            seconds = self._report_due()
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

    def _wait(self, seconds: float) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        socket_fd = self._connection.fileno()
        if socket_fd >= 0:
            poll.register(socket_fd, select.POLLIN)
        for fd, _ in poll.poll(1000 * seconds):
            if fd == self._wake:
                with suppress(BlockingIOError):
                    os.eventfd_read(self._wake)

    def _on_change(self) -> None:
        """Let the thread check the pool. The data plane calls this. It wakes the thread only once for each check."""
        was_changed, self._is_changed = self._is_changed, True
        if not was_changed:
            self._wake_up()

    def _wake_up(self) -> None:
        with self._waking, suppress(BlockingIOError):
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    # -- messages of the service ----------------------------------------------------------------------------

    def _take_frame(self, frame: Frame) -> None:
        """Handle a frame, and own its descriptors. Raises `ProtocolError`."""
        if frame.kind == Kind.DESIRED:
            self._plane.apply(Desired.unpack(frame.payload).desired)
            return
        self._is_changed = True
        if frame.kind == Kind.REVOKED:  # also after the session's end, because no later session may revoke it again
            revoked = RevokedExtents.unpack(frame.payload)
            if revoked.at_end and self._gate.hold:
                self._revoked_at_end = revoked.extent_ids
            else:
                self._pool.revoke(revoked.extent_ids)
        elif frame.kind == Kind.EXTENTS and not self._is_over:
            self._take_grants(frame)
        elif frame.kind == Kind.POPULATED and not self._is_over:
            self._pool.set_populated(PopulatedExtents.unpack(frame.payload).extents)
        else:
            close_fds(frame.fds)

    def _advance(self) -> None:
        """Apply the desired states in the answers that have arrived. Raises `AttachError`."""
        reports, self._reports = self._reports, []
        for call in reports:
            if call.done:
                self._plane.apply(call.answer(Desired).desired)
            else:
                self._reports.append(call)

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
            self._memory_problem = str(error)
        if granted.is_all:  # after `grant`, because extents that were granted again stay mapped
            self._pool.drop_earlier()

    def _report_due(self) -> float:
        """Report what has changed, and the rank's state if that is due. Returns the seconds until the next report.

        The order of the messages matters: the worker reports that slots are no longer registered, and the desired state
        that it has applied, before it reports their extents as released.
        """
        now = self._clock()
        if now >= (self._next_check if self._is_changed else self._next_report):
            self._is_changed = False  # before the check, so that a change during the check causes another one
            self._check(now)
            # The first slots are urgent, so there is no pause before them.
            self._next_check = now + GAP_SECONDS if any(self._registered.values()) else now
        return max(0.0, (self._next_check if self._is_changed else self._next_report) - now)

    def _check(self, now: float) -> None:
        """Send what has changed since the last check."""
        registered, released = dict(self._pool.registered_slots()), self._pool.take_released()
        news = [ExtentSlots(one, slots) for one, slots in registered.items() if self._registered.get(one, 0) != slots]
        self._registered = registered
        for piece in listed(news):
            self._connection.send(RegisteredExtents(piece))
        report = self._plane.report()
        if released or now >= self._next_report or is_news(report, self._reported):
            self._next_report, self._reported = now + REPORT_SECONDS, report
            self._reports.append(self._connection.call(Report(report)))
        for extent_ids in listed(released):
            self._connection.send(ReleasedExtents(extent_ids))

    # -- sessions -------------------------------------------------------------------------------------------

    def _leave(self) -> bool:
        """Leave the current session for the one of the newest ticket. Returns False while copies are under way."""
        self._gate.shut()
        if self._connection.state != "detached":
            self._connection.disconnect("the engine has another session")
        if not self._gate.is_quiet():
            return False
        self._release_rest()
        if self._was_attached:
            self._settled = (*self._settled, self._ticket.token)[-_MAX_SETTLED:]
            self._pool.begin_session()
        self._ticket = self._newest
        self._was_attached = self._is_over = False
        self._connection.retry_now()
        return True

    def _settle(self) -> float:
        """Report that the copies of the ended session have ended, while there is no new ticket. The report is repeated,
        because the service does not answer it, and may start later. Returns the seconds until the next one."""
        now = self._clock()
        if now < self._next_settle:
            return self._next_settle - now
        grace = self._end_time + self._longest_grace - now
        if grace <= 0:
            self._gate.shut()
        elif not self._gate.shut_unless_held():
            return min(grace, IDLE_SECONDS)
        if not self._gate.is_quiet():
            return DETACHED_SECONDS
        self._release_rest()
        self._report_settled()
        self._next_settle = self._clock() + FAREWELL_SECONDS
        return FAREWELL_SECONDS

    def _release_rest(self) -> None:
        """Release the extents that the service has revoked at its end. No copy is under way any more."""
        revoked, self._revoked_at_end = self._revoked_at_end, ()
        if revoked:
            self._pool.revoke(revoked)

    def _make_hello(self) -> Hello:
        return Hello(
            role="worker",
            engine=self._engine,
            host=socket.gethostname(),
            pid=os.getpid(),
            token=self._ticket.token,
            rank=self._plane.rank,
            device=self._plane.report().device or "",
            numa_node=self._numa_node,
            settled_tokens=self._settled,
        )

    def _begin_session(self, welcome: Welcome) -> None:
        self._was_attached = True
        self._reports, self._reported, self._registered = [], None, {}
        self._next_check = self._next_report = float("-inf")
        self._memory_problem = None
        self._gate.open(self._ticket.number)

    def _end_session(self) -> None:
        self._is_over = True
        self._end_time = self._next_settle = self._clock()
