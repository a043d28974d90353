"""Which call of the session host each kind of frame is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvstow.attach.calls import (
    BeginLoad,
    BeginStore,
    Completions,
    CountLookup,
    Lookup,
    LookupPrompt,
    Prefill,
    ReadEvents,
    Release,
    Reset,
    Use,
)
from kvstow.attach.channel import Frame
from kvstow.attach.connection import Message
from kvstow.attach.extentcalls import Desired, RegisteredExtents, ReleasedExtents, Report
from kvstow.attach.payloads import Kind
from kvstow.errors import InvalidRequestError
from kvstow_service.node.attach.sessionhost import Later, SessionHost
from kvstow_service.node.attach.sessiontable import Member


def answer_to(host: SessionHost, member: Member, frame: Frame, later: Later | None = None) -> Message | None:
    """Make the call and return its answer, if its kind has one. `later`: see `SessionHost`.

    Raises what the host raises. Raises `ProtocolError` for a payload that is not a message of its kind.
    """
    if frame.kind == Kind.LOOKUP:
        return host.lookup(member.session.session_id, Lookup.unpack(frame.payload), later)
    if frame.kind == Kind.LOOKUP_PROMPT:
        return host.lookup_prompt(member.session.session_id, LookupPrompt.unpack(frame.payload), later)
    return _CALLS[frame.kind](host, member, frame)


def _release(host: SessionHost, member: Member, frame: Frame) -> None:
    host.release_leases(member.session.session_id, Release.unpack(frame.payload).lease_ids)


def _begin_load(host: SessionHost, member: Member, frame: Frame) -> Message:
    return host.begin_load(member.session.session_id, BeginLoad.unpack(frame.payload))


def _begin_store(host: SessionHost, member: Member, frame: Frame) -> Message:
    return host.begin_store(member.session.session_id, BeginStore.unpack(frame.payload))


def _complete(host: SessionHost, member: Member, frame: Frame) -> None:
    call = Completions.unpack(frame.payload)
    if call.rank >= member.session.num_ranks or member.rank not in (None, call.rank):
        raise InvalidRequestError(f"the sender may not report completions of rank {call.rank}")
    host.complete(member.session.session_id, call)


def _use(host: SessionHost, member: Member, frame: Frame) -> None:
    host.use(member.session.session_id, Use.unpack(frame.payload))


def _count_lookup(host: SessionHost, member: Member, frame: Frame) -> None:
    host.count_lookup(member.session.session_id, CountLookup.unpack(frame.payload))


def _note_prefill(host: SessionHost, member: Member, frame: Frame) -> None:
    host.note_prefill(member.session.session_id, Prefill.unpack(frame.payload))


def _reset(host: SessionHost, member: Member, frame: Frame) -> Message:
    Reset.unpack(frame.payload)
    return host.reset(member.session.session_id)


def _read_events(host: SessionHost, member: Member, frame: Frame) -> Message:
    return host.read_events(member.session.session_id, ReadEvents.unpack(frame.payload))


def _report(host: SessionHost, member: Member, frame: Frame) -> Message:
    report = Report.unpack(frame.payload).report
    rank = _rank_of(member)
    if report.rank != rank:
        raise InvalidRequestError(f"a report of rank {report.rank}, from rank {rank}")
    return Desired(host.take_report(member.session.session_id, rank, report))


def _registered(host: SessionHost, member: Member, frame: Frame) -> None:
    extents = RegisteredExtents.unpack(frame.payload).extents
    host.extents_registered(member.session.session_id, _rank_of(member), extents)


def _released(host: SessionHost, member: Member, frame: Frame) -> None:
    extent_ids = ReleasedExtents.unpack(frame.payload).extent_ids
    host.extents_released(member.session.session_id, _rank_of(member), extent_ids)


def _rank_of(member: Member) -> int:
    assert member.rank is not None, "the kinds of workers come from workers"
    return member.rank


_CALLS: Final[dict[int, Callable[[SessionHost, Member, Frame], Message | None]]] = {
    Kind.RELEASE: _release,
    Kind.BEGIN_LOAD: _begin_load,
    Kind.BEGIN_STORE: _begin_store,
    Kind.COMPLETIONS: _complete,
    Kind.USE: _use,
    Kind.COUNT_LOOKUP: _count_lookup,
    Kind.PREFILL: _note_prefill,
    Kind.RESET: _reset,
    Kind.READ_EVENTS: _read_events,
    Kind.REPORT: _report,
    Kind.REGISTERED: _registered,
    Kind.LET_GO: _released,
}
