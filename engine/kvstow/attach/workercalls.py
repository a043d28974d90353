"""What a worker and the node service say to each other in one session."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvstow.attach.channel import close_fds
from kvstow.attach.connection import AttachConnection, Call
from kvstow.attach.extentcalls import (
    Desired,
    ExtentSlots,
    GrantedExtents,
    PopulatedExtents,
    RegisteredExtents,
    ReleasedExtents,
    Report,
    RevokedExtents,
)
from kvstow.attach.frames import Frame
from kvstow.attach.kinds import Kind
from kvstow.attach.rank import ExtentPool, RankPlane
from kvstow.errors import AttachError, PinError
from kvstow.messageorder import is_news
from kvstow.messages import RankReport

REPORT_SECONDS = 1.0
GAP_SECONDS = 0.05
"""The pause between two checks of what the pool has registered. On a busy host, each check costs a handover of the
interpreter."""

logger = logging.getLogger("kvstow.attach")


class WorkerCalls:
    """Used by the worker's thread alone, except `is_changed`.

    An order matters: the worker reports that slots are no longer used, and the state that the rank has applied, before
    it lets go of their extents.
    """

    def __init__(
        self, connection: AttachConnection, plane: RankPlane, pool: ExtentPool, clock: Callable[[], float]
    ) -> None:
        self.is_changed = False
        """The pool or the rank has changed since the last check."""
        self.problem: str | None = None
        """Why granted memory is missing, as a sentence."""
        self._connection, self._plane, self._pool, self._clock = connection, plane, pool, clock
        self._has_ended = False
        """From now on, only what the service wants back counts."""
        self._reports: list[Call] = []
        self._reported: RankReport | None = None
        self._registered: dict[int, int] = {}
        self._next_look = self._next_report = float("-inf")

    def begin_session(self) -> None:
        """The connection is attached to a new session."""
        self._has_ended = False
        self._reports, self._reported, self._registered = [], None, {}
        self._next_look = self._next_report = float("-inf")
        self.problem = None

    def end_session(self) -> None:
        """The connection has ended. Messages received in it may still arrive."""
        self._has_ended = True

    # -- hearing --------------------------------------------------------------------------------------------

    def take(self, frame: Frame) -> None:
        """Handle a frame, and own its descriptors. Raises `ProtocolError`."""
        if frame.kind == Kind.DESIRED:
            self._plane.apply(Desired.unpack(frame.payload).desired)
            return
        self.is_changed = True
        if frame.kind == Kind.REVOKED:  # also after the end: there may be no session in which it is asked for again
            self._pool.revoke(RevokedExtents.unpack(frame.payload).extent_ids)
        elif frame.kind == Kind.EXTENTS and not self._has_ended:
            self._take_grants(frame)
        elif frame.kind == Kind.POPULATED and not self._has_ended:
            self._pool.set_populated(PopulatedExtents.unpack(frame.payload).extents)
        else:
            close_fds(frame.fds)

    def advance(self) -> None:
        """Take the answers that have arrived. Raises `AttachError`."""
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
            self.problem = str(error)
        if granted.is_all:  # last: what was granted again stays mapped
            self._pool.drop_earlier()

    # -- speaking -------------------------------------------------------------------------------------------

    def speak(self) -> float:
        """Report what has changed and what is due. Returns the seconds until there may be more to report."""
        now = self._clock()
        if now >= (self._next_look if self.is_changed else self._next_report):
            self.is_changed = False  # before the check: a change after that is for the next check
            self._look(now)
            self._next_look = now + GAP_SECONDS if any(self._registered.values()) else now  # the first slots are urgent
        return max(0.0, (self._next_look if self.is_changed else self._next_report) - now)

    def _look(self, now: float) -> None:
        registered, released = dict(self._pool.registered_slots()), self._pool.take_released()
        news = [ExtentSlots(one, slots) for one, slots in registered.items() if self._registered.get(one, 0) != slots]
        self._registered = registered
        if news:
            self._connection.tell(RegisteredExtents(tuple(news)))
        report = self._plane.report()
        if released or now >= self._next_report or is_news(report, self._reported):
            self._next_report, self._reported = now + REPORT_SECONDS, report
            self._reports.append(self._connection.call(Report(report)))
        if released:
            self._connection.tell(ReleasedExtents(tuple(released)))
