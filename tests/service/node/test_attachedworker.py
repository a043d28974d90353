"""The worker half of an engine over a real attach server: real extents and threads, a fake control plane and device."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.doubles.fakes import FakeDevice, FakeRegistrar, FakeTicket, rests
from tests.service.node.attach.test_sessionlife import quiet
from tests.service.node.conftest import DEADLINE_SECONDS, NAMESPACE, POOL, Node, figures_of, wait_until
from tests.service.node.fakehost import FakeSession

from kvstow.attach.calls import (
    Desired,
    ExtentBytes,
    ExtentGrant,
    GrantedExtents,
    PopulatedExtents,
    RegisteredExtents,
    RevokedExtents,
)
from kvstow.attach.channel import Frame, close_fds
from kvstow.attach.connection import AttachConnection
from kvstow.attach.engine import AttachedEngine
from kvstow.attach.hello import NO_HOLD, GateHold, RankSession, SessionTicket, unique_id
from kvstow.attach.peer import Peer
from kvstow.attach.worker import LONGEST_GRACE_SECONDS, AttachedWorker
from kvstow.dataplane import DataPlane
from kvstow.devices.base import LayeredLoad
from kvstow.errors import LoadRefusedError, PinError
from kvstow.memfd import create_memfd
from kvstow.memory.extents import EXTENT_NAME
from kvstow.memory.mappedpool import MappedPool
from kvstow.memory.pinning import FixedPace
from kvstow.messages import Completion, DesiredState, Direction, LayerFigures, Op, StepPlan

MIB = 1 << 20
SLOT = 4096
EXTENT_SLOTS = 2 * MIB // SLOT


class Service:
    """What the fake control plane does for workers: it grants its extents to each rank that joins."""

    def __init__(self, node: Node, extents: Sequence[int] = ()) -> None:
        self.host = node.host
        self.fds = list(extents)
        self.links: list[FakeSession] = []
        node.next_peer = lambda: Peer(os.getpid(), 1000, 1000, os.pidfd_open(os.getpid()))
        self.host.on_join = self._join

    def _join(self, link: FakeSession, rank: int) -> None:
        self.links.append(link)
        grants = tuple(map(self._grant, range(len(self.fds))))
        link.push(GrantedExtents(SLOT, grants, is_all=True), rank=rank, fds=self.fds)

    def _grant(self, number: int) -> ExtentGrant:
        first = EXTENT_SLOTS * number
        return ExtentGrant(1 + number, number, first, EXTENT_SLOTS, 2 * MIB, 2 * MIB)

    def revoke(self, extent_id: int) -> None:
        self.links[-1].push(RevokedExtents((extent_id,)), rank=0)

    def registered(self) -> dict[int, int]:
        return {extent_id: slots for _, said in self.host.registered for extent_id, slots in said}


class CountingClock:
    """The time, with what a test lets pass, and how often it was read."""

    def __init__(self) -> None:
        self.passed, self.readings = 0.0, 0

    def __call__(self) -> float:
        self.readings += 1
        return time.monotonic() + self.passed


class CountingPlane(DataPlane):
    """Counts how often it was asked whether ops are under way."""

    questions = 0

    @property
    def pending_ops(self) -> int:
        self.questions += 1
        return super().pending_ops


class FakeLayers:
    """Loads by layer whose copies end when the test says so."""

    num_parts, layer_figures = 1, LayerFigures()

    def __init__(self) -> None:
        self.ticket = FakeTicket()

    def load_layers(self, *_: object) -> Any:
        return SimpleNamespace(ticket=self.ticket, wait=lambda part: None)

    def load_now(self, *_: object) -> None:
        pytest.fail("it went another way")


class Rank:
    """A rank with a device whose copies end when the test says so."""

    def __init__(self, path: Path, rank: int = 0, **options: Any) -> None:
        self.registrar = FakeRegistrar()
        self.pool = MappedPool(SLOT, self.registrar, pace=partial(FixedPace, 512 << 10, 0.0))
        self.device, self.layers = FakeDevice(), FakeLayers()
        self.plane = CountingPlane(rank, self.pool, self.device, layers=self.layers)
        self.clock = CountingClock()
        self.worker = AttachedWorker(path, self.plane, self.pool, engine="test", clock=self.clock, **options)
        self.worker.start()
        self.said: list[Completion] = []

    def wait_for_a_look(self) -> None:
        """At a session that is over. The worker reads its clock once in each."""
        before = self.clock.readings
        wait_until(lambda: self.clock.readings > before + 3)

    def submit(self, op_id: int, slot: int = 0, direction: Direction = "load") -> int:
        self.worker.submit(StepPlan((Op(op_id, direction, (1,), (slot,)),)))
        return op_id

    def load_by_layer(self, op_id: int, slot: int = 0) -> LayeredLoad | None:
        assert self.worker.layered is not None
        return self.worker.layered.load((Op(op_id, "load", (1,), (slot,)),), None)

    def ended(self, op_id: int) -> str | None:
        """The mark of an op, once it has ended; a failure with its reason."""
        self.said += self.worker.take_completions()
        found = [done for done in self.said if done.op_id == op_id]
        return None if not found else f"{found[-1].mark} {found[-1].error or ''}".strip()


@pytest.fixture
def extents(stack: ExitStack) -> list[int]:
    """Two of 2 MiB, which have memory."""
    fds = [create_memfd(EXTENT_NAME, 2 * MIB) for _ in range(2)]
    for fd in fds:
        stack.callback(os.close, fd)
        os.posix_fallocate(fd, 0, 2 * MIB)
    return fds


@pytest.fixture
def service(node: Node, extents: list[int]) -> Service:
    return Service(node, extents)


@pytest.fixture
def engine(node: Node, service: Service, stack: ExitStack) -> AttachedEngine:
    made = AttachedEngine(node.path, engine="test", pool=POOL, namespace=NAMESPACE)
    stack.callback(made.close)
    wait_until(lambda: made.is_attached, made.step)
    return made


@pytest.fixture
def rank(node: Node, engine: AttachedEngine, service: Service, stack: ExitStack) -> Rank:
    """It has registered both extents."""
    return join(node, engine, service, stack)


def join(node: Node, engine: AttachedEngine, service: Service, stack: ExitStack, **options: Any) -> Rank:
    made = Rank(node.path, **options)
    stack.callback(made.worker.close)
    made.worker.join(engine.ticket)
    wait_until(lambda: service.registered() == {1: EXTENT_SLOTS, 2: EXTENT_SLOTS})
    return made


def next_session(engine: AttachedEngine, node: Node) -> SessionTicket:
    """The service has dropped the session, and the engine has another one."""
    before = engine.ticket
    assert engine.welcome is not None
    node.server.detach(engine.welcome.session_id)
    wait_until(lambda: engine.ticket not in (None, before), engine.step)
    assert engine.ticket is not None
    return engine.ticket


def test_a_worker_says_what_it_has_registered_and_applies_what_it_is_told(rank: Rank, service: Service) -> None:
    wait_until(lambda: rank.plane.applied.capacity_slots == 100)
    assert rank.registrar.locked_bytes == 4 * MIB
    assert (rank.worker.problem, rank.worker.faults) == (None, 0)
    service.links[-1].push(PopulatedExtents((ExtentBytes(2, 2 * MIB),)), rank=0)
    service.links[-1].push(Desired(DesiredState("engine-1", 7, number=2)), rank=0)
    wait_until(lambda: rank.plane.applied.capacity_slots == 7)


@pytest.mark.parametrize("by_layer", [False, True])
def test_an_extent_that_is_revoked_stays_until_its_copies_have_ended(
    rank: Rank, service: Service, node: Node, by_layer: bool
) -> None:
    op = unique_id(1, 5)
    if by_layer:
        assert rank.load_by_layer(op, EXTENT_SLOTS + 3) is not None
        ticket = rank.layers.ticket
    else:
        ticket = rank.device.ticket(rank.submit(op, EXTENT_SLOTS + 3))
    service.revoke(2)
    wait_until(lambda: service.registered()[2] == 0)
    wait_until(lambda: rests(rank.pool))
    assert not node.events("released")
    assert rank.registrar.locked_bytes > 2 * MIB
    ticket.finish()
    node.wait_for_event("released")
    assert rank.registrar.locked_bytes == 2 * MIB
    wait_until(lambda: rank.ended(op) == "done")


def test_what_is_revoked_while_the_service_closes_is_let_go_of_although_sending_fails_first(
    rank: Rank, service: Service, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, waits, has_closed = list[bool](), threading.Event(), threading.Event()
    poll = AttachConnection.poll

    def send_first(connection: AttachConnection) -> list[Frame]:
        if connection.state == "attached" and not sent:
            waits.set()
            assert has_closed.wait(DEADLINE_SECONDS)
            sent.append(connection.send(RegisteredExtents(())))
        return poll(connection)

    monkeypatch.setattr(AttachConnection, "poll", send_first)
    wait_until(waits.is_set)
    pushed = threading.Event()
    service.revoke(2)
    node.server.post(pushed.set)
    assert pushed.wait(DEADLINE_SECONDS)
    node.server.close()
    has_closed.set()
    wait_until(lambda: sent == [False])
    wait_until(lambda: rank.registrar.locked_bytes == 2 * MIB)
    assert rank.worker.faults == 0


def test_a_worker_joins_the_next_session_when_its_copies_have_ended_and_says_that_they_have(
    node: Node, engine: AttachedEngine, rank: Rank
) -> None:
    assert engine.ticket is not None
    first = engine.ticket
    rank.worker.keep_open(GateHold(first.number, 1))
    under_way = rank.submit(unique_id(first.number, 5))
    ticket = rank.device.ticket(under_way)
    new = next_session(engine, node)
    wait_until(lambda: not rank.worker.is_attached)
    assert rank.worker.session.hold == 1
    before_the_ticket = rank.submit(unique_id(first.number, 6), slot=EXTENT_SLOTS)
    last = rank.device.ticket(before_the_ticket)
    rank.worker.join(new)
    wait_until(lambda: not rank.worker.session.hold)
    late = rank.submit(unique_id(first.number, 7))
    assert rank.ended(late) == "failed the session of this op has ended"
    ticket.finish()
    wait_until(lambda: rank.ended(under_way) == "done")
    assert (len(node.events("joined")), node.events("ended")) == (1, [])
    last.finish()
    wait_until(lambda: len(node.events("joined")) == 2)
    wait_until(lambda: rank.ended(before_the_ticket) == "done")
    assert len(node.events("ended")) == len(node.events("over")) == 1, "the process lives, and has said it"


def test_memory_of_which_the_next_service_has_nothing_goes(
    node: Node, engine: AttachedEngine, rank: Rank, service: Service
) -> None:
    service.fds = []
    rank.worker.join(next_session(engine, node))
    wait_until(lambda: rank.registrar.locked_bytes == 0)
    wait_until(lambda: rank.pool.status().resident_bytes == 0)
    assert not node.events("released"), "the next service waits for nothing"
    assert rank.worker.is_attached


def test_memory_of_an_earlier_session_goes_although_what_was_granted_cannot_be_used(
    node: Node, engine: AttachedEngine, rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(stride: int, grants: Sequence[ExtentGrant], fds: Sequence[int]) -> None:
        close_fds(fds)
        raise PinError("out_of_memory", "no address space")

    monkeypatch.setattr(rank.pool, "grant", refuse)
    rank.worker.join(next_session(engine, node))
    wait_until(lambda: rank.registrar.locked_bytes == 0)
    wait_until(lambda: "no address space" in str(rank.worker.problem))


def test_only_the_newest_ticket_counts(engine: AttachedEngine, rank: Rank, node: Node) -> None:
    old = engine.ticket
    new = next_session(engine, node)
    rank.worker.join(new)
    rank.worker.join(old)
    rank.worker.join(None)
    wait_until(lambda: len(node.events("joined")) == 2)
    rank.worker.join(new)
    wait_until(lambda: rank.worker.is_attached)


def test_an_error_in_the_worker_is_counted_and_ends_its_session_only(
    engine: AttachedEngine, rank: Rank, service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(extent_ids: Sequence[int]) -> None:
        raise RuntimeError("injected")

    revoke, rank.pool.revoke = rank.pool.revoke, fail  # type: ignore[method-assign,assignment]
    service.revoke(2)
    wait_until(lambda: "injected" in str(rank.worker.problem))
    assert rank.worker.faults == 1
    assert "injected" in caplog.text
    rank.pool.revoke = revoke  # type: ignore[method-assign]
    wait_until(lambda: engine.num_sessions == 2 and engine.ticket is not None, engine.step)
    rank.worker.join(engine.ticket)
    wait_until(lambda: rank.worker.is_attached)


def test_a_word_of_the_service_that_cannot_be_right_ends_the_session_and_is_told(
    rank: Rank, service: Service, extents: list[int]
) -> None:
    overlapping = ExtentGrant(9, 0, 5, EXTENT_SLOTS, 2 * MIB, 2 * MIB)
    service.links[-1].push(GrantedExtents(SLOT, (overlapping,), True), rank=0, fds=extents[:1])
    wait_until(lambda: "both have slots from" in str(rank.worker.problem))
    assert rank.worker.faults == 0


def test_a_worker_that_closes_gives_everything_back_and_says_so(rank: Rank, node: Node) -> None:
    assert rank.worker.close()
    assert rank.worker.close()
    wait_until(lambda: node.events("ended"))
    assert (rank.registrar.locked_bytes, rank.worker.is_attached) == (0, False)
    assert str(rank.ended(rank.submit(unique_id(1, 9)))).startswith("failed")


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker says again and again that its copies have ended."""
    monkeypatch.setattr("kvstow.attach.worker.FAREWELL_SECONDS", 0.01)


@pytest.fixture
def restless(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker looks again and again at a session that is over."""
    monkeypatch.setattr("kvstow.attach.worker.IDLE_SECONDS", 0.01)


def test_a_worker_says_by_itself_that_its_copies_have_ended_when_its_engine_takes_no_step(
    often: None, engine: AttachedEngine, rank: Rank, node: Node
) -> None:
    load = rank.submit(unique_id(1, 1))
    engine.close()
    wait_until(lambda: node.events("lost") and not rank.worker.is_attached)
    before = rank.plane.questions
    wait_until(lambda: rank.plane.questions > before + 3)
    quiet(node)
    assert node.events("over") == [], "a copy is under way"
    assert str(rank.ended(rank.submit(unique_id(1, 2)))).startswith("failed"), "the gate is shut"
    rank.device.ticket(load).finish()
    wait_until(lambda: node.events("over"))
    assert rank.worker.faults == 0


def test_what_a_step_computes_with_is_let_through_until_the_host_rests(
    restless: None, engine: AttachedEngine, rank: Rank, node: Node
) -> None:
    """The step was planned in a session that has ended meanwhile, and cannot go on without its loads."""
    rank.worker.keep_open(GateHold(1, 7))
    wait_until(lambda: rank.worker.session == RankSession(1, 2 * EXTENT_SLOTS, True, 7))
    engine.close()
    wait_until(lambda: not rank.worker.is_attached)
    rank.clock.passed = LONGEST_GRACE_SECONDS / 2
    rank.wait_for_a_look()
    assert rank.worker.session == RankSession(hold=7)
    assert rank.load_by_layer(unique_id(1, 1)) is not None
    rank.worker.keep_open(NO_HOLD)
    rank.wait_for_a_look()
    assert not node.events("over"), "the copy is under way"
    rank.layers.ticket.finish()
    wait_until(lambda: node.events("over"))
    with pytest.raises(LoadRefusedError, match="the session of this op has ended"):
        rank.load_by_layer(unique_id(1, 2))
    assert rank.ended(unique_id(1, 2)) == "failed the session of this op has ended"


def test_a_hold_that_comes_too_late_or_for_another_session_is_not_kept(
    engine: AttachedEngine, rank: Rank, node: Node
) -> None:
    rank.worker.keep_open(GateHold(2, 5))
    assert rank.worker.session.hold == 0
    rank.worker.keep_open(GateHold(1, 6))
    assert rank.worker.session.hold == 6
    rank.worker.keep_open(NO_HOLD)
    engine.close()
    wait_until(lambda: node.events("over"))
    rank.worker.keep_open(GateHold(1, 7))
    assert rank.worker.session == RankSession()


def test_what_a_service_revokes_at_its_end_is_kept_for_the_loads_that_may_still_come(
    restless: None, engine: AttachedEngine, rank: Rank, service: Service
) -> None:
    rank.worker.keep_open(GateHold(1, 7))
    service.links[-1].push(RevokedExtents((1, 2), at_end=True), rank=0)
    service.links[-1].push(Desired(DesiredState("engine-1", 7, number=2)), rank=0)
    wait_until(lambda: rank.plane.applied.capacity_slots == 7)  # it has taken both
    engine.close()
    wait_until(lambda: not rank.worker.is_attached)
    rank.wait_for_a_look()
    load = unique_id(1, 1)
    assert rank.load_by_layer(load, EXTENT_SLOTS + 3) is not None
    rank.worker.keep_open(NO_HOLD)
    rank.layers.ticket.finish()
    wait_until(lambda: rank.registrar.locked_bytes == 0)
    assert rank.ended(load) == "done"


def test_what_a_service_revokes_at_its_end_is_released_by_an_idle_rank_at_once(rank: Rank, service: Service) -> None:
    service.links[-1].push(RevokedExtents((1, 2), at_end=True), rank=0)
    wait_until(lambda: rank.registrar.locked_bytes == 0)
    assert rank.worker.is_attached


@pytest.mark.parametrize("may_refuse", [True, False])
def test_a_host_that_never_rests_is_waited_for_so_long_and_no_longer_unless_it_can_take_nothing_back(
    restless: None, engine: AttachedEngine, service: Service, node: Node, stack: ExitStack, may_refuse: bool
) -> None:
    rank = join(node, engine, service, stack, may_refuse=may_refuse)
    rank.worker.keep_open(GateHold(1, 7))
    engine.close()
    wait_until(lambda: not rank.worker.is_attached)
    if may_refuse:

        def wait_longer() -> None:  # the worker may begin to wait only now
            rank.clock.passed += LONGEST_GRACE_SECONDS

        wait_until(lambda: node.events("over"), wait_longer)
        assert rank.worker.session == RankSession()
    else:
        rank.clock.passed = 1e6
        rank.wait_for_a_look()
        assert rank.load_by_layer(unique_id(1, 1)) is not None
        rank.layers.ticket.finish()


def test_a_service_that_comes_later_hears_it_too(often: None, engine: AttachedEngine, rank: Rank, node: Node) -> None:
    engine.close()
    wait_until(lambda: node.events("over"))
    before = figures_of(node).frames["hello"]
    wait_until(lambda: figures_of(node).frames["hello"] > before + 2)


def test_a_worker_closed_after_its_session_has_ended_says_so_too(
    engine: AttachedEngine, rank: Rank, node: Node
) -> None:
    rank.worker.keep_open(GateHold(1, 7))
    engine.close()
    wait_until(lambda: node.events("lost"))
    wait_until(lambda: not rank.worker.is_attached)
    assert node.events("ended") == []
    rank.worker.close()
    wait_until(lambda: node.events("over"))


def test_workers_that_close_one_after_the_other_and_then_their_engine_are_no_fault(
    engine: AttachedEngine, rank: Rank, node: Node, stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    other = Rank(node.path, 1)
    stack.callback(other.worker.close)
    other.worker.join(engine.ticket)
    wait_until(lambda: other.worker.is_attached)
    with caplog.at_level("WARNING", logger="kvstow.attach"):
        with node.standing_still():  # the first detaches, and the others have not heard that the session has ended
            assert rank.worker.close()
            assert other.worker.close()
        wait_until(lambda: figures_of(node).frames["hello"] == 3 + 2)  # both farewells, too
        wait_until(lambda: node.events("over"))
        assert engine.is_attached
        engine.close()
    assert [record.message for record in caplog.records] == []
    assert (figures_of(node).refused, figures_of(node).errors) == ({}, {})


def test_a_copy_that_hangs_keeps_the_memory_and_nothing_is_said(
    rank: Rank, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = rank.plane.close
    monkeypatch.setattr(rank.plane, "close", lambda timeout: False)
    assert not rank.worker.close()
    assert not rank.worker.close()
    wait_until(lambda: node.events("lost"))
    assert node.events("ended") == []
    monkeypatch.undo()
    close()


def test_rank_0_stores_what_all_ranks_have(
    node: Node, engine: AttachedEngine, service: Service, stack: ExitStack
) -> None:
    rank = join(node, engine, service, stack, rank=1, replicated=True)
    store, load = rank.submit(unique_id(1, 1), direction="store"), rank.submit(unique_id(1, 2))
    rank.device.ticket(load).finish()
    wait_until(lambda: rank.ended(load) == "done")
    assert (rank.device.begun, rank.ended(store)) == ((load,), None)


def test_without_a_service_a_worker_starts_and_stops(tmp_path: Path) -> None:
    made = Rank(tmp_path / "none.sock")
    made.worker.join(SessionTicket(1, "secret"))
    wait_until(lambda: made.worker.problem)
    op = made.submit(unique_id(1, 1))
    assert made.ended(op) == "failed the session of this op has ended"
    assert made.worker.close()
