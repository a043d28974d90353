"""What a worker and the node service say to each other in one session."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from kvstow.attach.channel import close_fds
from kvstow.attach.connection import AttachConnection, Call
from kvstow.attach.deposits import DepositedDescriptors, Deposits, DroppedDescriptors, ReturnedDescriptors
from kvstow.attach.extentcalls import (
    AdoptedExtents,
    Desired,
    ExtentBytes,
    ExtentSlots,
    GrantedExtents,
    HandedBackExtents,
    PopulatedExtents,
    RegisteredExtents,
    ReleasedExtents,
    Report,
    RevokedExtents,
)
from kvstow.attach.frames import MAX_FDS, Frame
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

    Two orders matter. Memory and descriptors of an earlier session are returned and offered first, and the service's
    messages about memory wait until it has answered. The worker reports that slots are no longer used, and the state
    that the rank has applied, before it lets go of their extents.
    """

    def __init__(
        self, connection: AttachConnection, plane: RankPlane, pool: ExtentPool, clock: Callable[[], float]
    ) -> None:
        self.is_changed = False
        """The pool or the rank has changed since the last check."""
        self.problem: str | None = None
        """Why granted memory is missing, as a sentence."""
        self._connection, self._plane, self._pool, self._clock = connection, plane, pool, clock
        self.deposits = Deposits()
        self._offers: list[Call] | None = None
        """The offers of an earlier session's memory. None before they were made."""
        self._is_settled = False
        """The service has answered the offers."""
        self._early: list[Frame] = []
        """Messages that came before that answer."""
        self._has_ended = False
        """From now on, only what the service wants back counts."""
        self._reports: list[Call] = []
        self._reported: RankReport | None = None
        self._registered: dict[int, int] = {}
        self._next_look = self._next_report = float("-inf")

    def begin_session(self) -> None:
        """The connection is attached to a new session."""
        self._offers, self._is_settled, self._has_ended = None, False, False
        self._reports, self._reported, self._registered = [], None, {}
        self._next_look = self._next_report = float("-inf")
        self.problem = None

    def end_session(self) -> None:
        """The connection has ended. Messages received in it may still arrive."""
        self._has_ended = True
        early, self._early = self._early, []
        for frame in early:
            self.take(frame)

    # -- hearing --------------------------------------------------------------------------------------------

    def take(self, frame: Frame) -> None:
        """Handle a frame, and own its descriptors. Raises `ProtocolError`."""
        if frame.kind == Kind.DESIRED:
            self._plane.apply(Desired.unpack(frame.payload).desired)
            return
        if frame.kind in (Kind.DEPOSIT, Kind.DROP) and (self._has_ended or self._is_settled):
            self._take_deposits(frame)
            return
        if self._has_ended:
            close_fds(frame.fds)
            if frame.kind == Kind.REVOKED:
                self._let_go(RevokedExtents.unpack(frame.payload).extent_ids)
            return
        if not self._is_settled:
            self._early.append(frame)
            return
        self.is_changed = True
        if frame.kind == Kind.EXTENTS:
            self._take_grants(frame)
        elif frame.kind == Kind.POPULATED:
            self._pool.set_populated(PopulatedExtents.unpack(frame.payload).extents)
        elif frame.kind == Kind.REVOKED:
            self._pool.revoke(RevokedExtents.unpack(frame.payload).extent_ids)
        else:
            close_fds(frame.fds)

    def _take_deposits(self, frame: Frame) -> None:
        if frame.kind == Kind.DROP:
            self.deposits.drop(DroppedDescriptors.unpack(frame.payload).names)
            return
        try:
            word = DepositedDescriptors.unpack(frame.payload)
            if len(word.names) != len(frame.fds):
                raise AttachError(f"{len(word.names)} descriptors by name came with {len(frame.fds)}")
        except AttachError:
            close_fds(frame.fds)
            raise
        self.deposits.put(word.names, frame.fds, replaces=word.replaces)

    def _let_go(self, extent_ids: Sequence[int]) -> None:
        """Let go of extents that were revoked in a session that has ended: there may be no later session in which the
        service could ask for them again."""
        if self._is_settled:
            self._pool.revoke(extent_ids)
        else:
            self._pool.keep(one.extent_id for one in self._pool.held_extents() if one.extent_id not in extent_ids)

    def advance(self) -> None:
        """Take the answers that have arrived. Raises `AttachError`."""
        reports, self._reports = self._reports, []
        for call in reports:
            if call.done:
                self._plane.apply(call.answer(Desired).desired)
            else:
                self._reports.append(call)
        if self._offers is None:
            self._offers = self._offer()
        if not self._is_settled and all(call.done for call in self._offers):
            self._is_settled = True
            kept = [extent_id for call in self._offers for extent_id in _kept(call)]
            early, self._early = self._early, []
            try:
                while early:  # first: extents that are granted again are kept
                    self.take(early.pop(0))
            finally:
                self._early = early
            self._pool.keep(kept)

    def _offer(self) -> list[Call]:
        held = list(self._pool.held_extents())
        if held and self.deposits.held:
            self._connection.tell(ReturnedDescriptors(tuple(self.deposits.held)), list(self.deposits.held.values()))
        calls = []
        for start in range(0, len(held), MAX_FDS):
            part = held[start : start + MAX_FDS]
            sizes = tuple(ExtentBytes(extent.extent_id, extent.num_bytes) for extent in part)
            calls.append(self._connection.call(HandedBackExtents(sizes), [extent.fd for extent in part]))
        return calls

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


def _kept(call: Call) -> tuple[int, ...]:
    try:
        return call.answer(AdoptedExtents).extent_ids
    except AttachError as error:
        logger.warning("the node service does not take back memory of the previous one: %s", error)
        return ()
