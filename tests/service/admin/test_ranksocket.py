"""The socket to which the ranks of an engine report, with real connections and a real engine."""

from __future__ import annotations

import logging
import os
import socket
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.doubles.rank import ready_report
from tests.waiting import eventually

from kvstow.attach.calls import Desired, Report
from kvstow.attach.channel import Channel, Frame
from kvstow.attach.hello import CallError
from kvstow.attach.peer import PeerCredentials
from kvstow.attach.wire import Kind
from kvstow.config import EngineConfig
from kvstow.control.engine import OffloadEngine
from kvstow.errors import DisconnectedError
from kvstow.messages import DesiredState, RankReport
from kvstow_service.admin import ranksocket
from kvstow_service.admin.ranksocket import RankSocket
from kvstow_service.admin.rendezvous import Rendezvous

SLOT, SLOTS = 4096, 8


class Rank:
    """A connection to the socket, as a rank's agent has it."""

    def __init__(self, path: Path, rank: int = 0) -> None:
        connected = socket.socket(socket.AF_UNIX)
        connected.connect(str(path))
        self.channel = Channel(connected)
        connected.settimeout(60)
        self._frames: list[Frame] = []
        self.last = ready_report(SLOT, SLOTS, rank=rank, boot_id=f"boot-{rank}", sender=f"s{rank}", number=0)

    def send(self, **changes: Any) -> RankReport:
        self.last = replace(self.last, number=self.last.number + 1, **changes)
        self.channel.send(Kind.REPORT, Report.now(self.last).pack(), 7)
        return self.last

    def receive(self) -> Frame:
        """Raises `DisconnectedError` if the socket ends the connection."""
        while not self._frames:
            self._frames = self.channel.receive()
        return self._frames.pop(0)

    def desired(self) -> tuple[DesiredState, int]:
        """The next desired state, and the request that it answers."""
        frame = self.receive()
        return Desired.unpack(frame.payload).desired, frame.request_id


@pytest.fixture
def engine() -> OffloadEngine:
    return OffloadEngine(EngineConfig(slot_bytes=SLOT, capacity_slots=SLOTS, num_ranks=2))


@pytest.fixture
def rendezvous(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> Rendezvous:
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstow-", dir="/tmp"))
    monkeypatch.setattr(tempfile, "tempdir", folder)
    return Rendezvous("engine", {"XDG_RUNTIME_DIR": folder})


@pytest.fixture
def ranks(engine: OffloadEngine, rendezvous: Rendezvous, stack: ExitStack) -> RankSocket:
    ranks = RankSocket(engine, rendezvous)
    stack.callback(ranks.stop)
    return ranks


@pytest.fixture
def connect(ranks: RankSocket, rendezvous: Rendezvous, stack: ExitStack) -> Callable[..., Rank]:
    """Connects as a rank, once the socket is open."""
    ranks.start()
    eventually(rendezvous, "the socket")
    path = rendezvous()
    assert path is not None

    def connect_rank(rank: int = 0) -> Rank:
        made = Rank(path, rank)
        stack.callback(made.channel.close)
        return made

    return connect_rank


def test_a_report_is_taken_and_answered_with_the_desired_state(connect: Any, engine: OffloadEngine) -> None:
    ranks = [connect(0), connect(1)]
    for rank in ranks:
        rank.send()
    assert [rank.desired() for rank in ranks] == [(engine.desired(), 7)] * 2
    assert engine.readiness().usable_slots == SLOTS


def test_a_change_of_the_desired_state_is_sent_at_once_and_once_to_each_rank(
    connect: Any, engine: OffloadEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = [connect(0), connect(1)]
    silent = connect(0)
    order, look, take = list[str](), engine.desired, engine.report

    def noted(name: str, call: Callable[..., DesiredState]) -> Callable[..., DesiredState]:
        def call_noted(*arguments: RankReport) -> DesiredState:
            desired = call(*arguments)
            order.append(name)  # after the call: a report looks, too, and the look that counts has its result by now
            return desired

        return call_noted

    monkeypatch.setattr(engine, "report", noted("report", take))
    monkeypatch.setattr(engine, "desired", noted("look", look))
    for rank in ranks:
        rank.send()
        rank.desired()
    eventually(lambda: order[-1] == "look", "the thread to look once more, and to wait then")
    monkeypatch.setattr(engine, "desired", look)
    engine.admin.pause_pinning(True)
    for rank in ranks:
        assert rank.desired() == (engine.desired(), 0)
        rank.send()
        assert rank.desired() == (engine.desired(), 7), "nothing came in between"
    silent.send(sender="another")
    assert silent.desired()[1] == 7, "a rank that had not reported got none"


def test_no_rank_gets_an_older_desired_state_after_a_newer_one(
    connect: Any, engine: OffloadEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state changes after a report was taken, and before it is answered."""
    rank, take = connect(), engine.report

    def change_after(report: RankReport) -> DesiredState:
        found = take(report)
        engine.admin.pause_pinning(True)
        return found

    rank.send()
    rank.desired()
    monkeypatch.setattr(engine, "report", change_after)
    rank.send()
    numbers = [rank.desired()[0].number for _ in range(2)]
    assert numbers == sorted(numbers)
    assert numbers[-1] == engine.desired().number


def test_a_report_of_another_pool_is_refused_and_the_connection_stays(
    connect: Any, engine: OffloadEngine, caplog: pytest.LogCaptureFixture
) -> None:
    rank = connect()
    rank.send(slot_bytes=64)
    refusal = CallError.unpack(rank.receive().payload)
    assert (refusal.code, "slot_bytes 64" in refusal.message) == ("invalid_request", True)
    assert engine.stats().faults.errors["rank_report"] == 1
    assert "rank 0: its report is not accepted: rank 0 reports slot_bytes 64" in caplog.text
    rank.send(slot_bytes=SLOT)
    assert rank.desired() == (engine.desired(), 7)


@pytest.mark.parametrize(
    ("kind", "payload", "words"),
    [
        (Kind.REPORT, b"\x80", "report: Expected `array`, got `object`"),
        (Kind.LOOKUP, b"", "a frame of kind 16 came instead of a report"),
        (Kind.REPORT, b"x" * (1 << 17), "a frame of 131072 bytes was announced; allowed here: 65536"),
    ],
)
def test_bad_input_ends_its_connection_alone(
    connect: Any, engine: OffloadEngine, caplog: Any, kind: Kind, payload: bytes, words: str
) -> None:
    good, bad = connect(0), connect(1)
    bad.channel.send(kind, payload)
    with pytest.raises(DisconnectedError):
        bad.receive()
    good.send()
    assert good.desired()[1] == 7
    assert words in caplog.text
    assert engine.stats().faults.errors["rank_report"] == 1
    assert "Traceback" not in caplog.text


def test_an_unexpected_error_is_logged_and_ends_only_its_connection(
    connect: Any, engine: OffloadEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(report: RankReport) -> DesiredState:
        raise RuntimeError("the engine is confused")

    rank = connect()
    with monkeypatch.context() as patch:
        patch.setattr(engine, "report", fail)
        rank.send()
        with pytest.raises(DisconnectedError):
            rank.receive()
    assert "RuntimeError: the engine is confused" in caplog.text
    again = connect()
    again.send()
    assert again.desired()[1] == 7


def test_no_error_ends_the_thread(
    connect: Any, engine: OffloadEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> DesiredState:
        monkeypatch.undo()
        raise RuntimeError("the lock is gone")

    monkeypatch.setattr(engine, "desired", fail)
    rank = connect()
    rank.send()
    assert rank.desired()[1] == 7
    assert "the ranks' socket has failed, and continues" in caplog.text
    assert engine.stats().faults.errors["rank_report"] == 1


@pytest.mark.parametrize("uid", [os.geteuid() + 1, 65534])
def test_processes_of_other_users_may_not_report(
    connect: Any, engine: OffloadEngine, monkeypatch: pytest.MonkeyPatch, caplog: Any, uid: int
) -> None:
    monkeypatch.setattr(ranksocket, "credentials_of", lambda connected: PeerCredentials(1, uid, 1))
    stranger = connect()
    with pytest.raises(DisconnectedError):
        stranger.receive()
    assert f"its process belongs to user {uid}; allowed: root and user {os.geteuid()}" in caplog.text
    assert engine.readiness().ranks[0].boot_id is None


def test_connections_have_a_bound(connect: Any, caplog: pytest.LogCaptureFixture) -> None:
    """One for each rank, and 64 more, because a rank that restarts may have two for a moment."""
    first, second, *_ = ranks = [connect(0), connect(1), *(connect() for _ in range(64))]
    for rank in ranks:
        rank.send()
        rank.desired()
    with pytest.raises(DisconnectedError):
        connect().receive()
    assert "there are 66 connections already, for 2 ranks" in caplog.text
    first.channel.close()
    second.send()
    second.desired()  # the end of the first was noticed before
    again = connect(0)
    again.send()
    assert again.desired()[1] == 7


def test_a_rank_that_reads_nothing_is_dropped_and_the_others_are_told(connect: Any, engine: OffloadEngine) -> None:
    deaf, other = connect(0), connect(1)
    for rank in (deaf, other):
        rank.send()
        rank.desired()
    deaf.channel.close()
    engine.admin.pause_pinning(True)
    assert other.desired() == (engine.desired(), 0)


def test_a_folder_that_cannot_be_used_is_counted_and_said(
    engine: OffloadEngine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(tempfile, "tempdir", "/gone")
    ranks = RankSocket(engine, Rendezvous("engine", {"XDG_RUNTIME_DIR": "/gone"}))
    ranks.start()
    eventually(lambda: ranks.failure, "the failure")
    assert "no folder can be used for the engine's sockets" in str(ranks.failure)
    assert "ranks on this host cannot report over a Unix socket: no folder" in caplog.text
    assert engine.stats().faults.errors["rank_report"] == 1
    ranks.stop()


def test_stop_is_idempotent_and_leaves_nothing_behind(
    connect: Any, ranks: RankSocket, rendezvous: Rendezvous, engine: OffloadEngine
) -> None:
    rank = connect()
    rank.send()
    rank.desired()
    ranks.stop()
    ranks.stop()
    with pytest.raises(DisconnectedError):
        rank.receive()
    assert rendezvous() is None
    engine.admin.pause_pinning(True)
