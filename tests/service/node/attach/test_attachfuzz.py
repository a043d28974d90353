"""What no honest engine sends: it is refused and counted, memory stays bounded, and other sessions notice nothing."""

from __future__ import annotations

import os
import random
import resource
import select
import socket
import struct
from array import array
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
from msgspec.structs import replace
from tests.descriptors import open_descriptors
from tests.doubles.fakes import FakeClock
from tests.service.node.conftest import (
    HELLO,
    WORKER,
    AttachFigures,
    MakeNode,
    Node,
    ask,
    attached,
    connect,
    figures_of,
    refusal_by,
    wait_until,
)

from kvstow.attach.calls import (
    BeginLoad,
    BeginStore,
    Completions,
    DescribeStore,
    Found,
    LoadBegun,
    Lookup,
    RegisteredExtents,
    Release,
    StoreBegun,
)
from kvstow.attach.channel import MAX_HELLO_BYTES, Channel, Frame, encode_header
from kvstow.attach.connection import AttachConnection
from kvstow.attach.hello import Refused
from kvstow.attach.wire import Kind, Message
from kvstow.errors import DisconnectedError
from kvstow.messages import Completion
from kvstow_service.node.attach import clients

KEYS = [bytes([number]) * 34 for number in range(8)]
ROUNDS = 300


class Honest:
    """An engine that stores and loads all the time, and counts what it got."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.connection = node.attach()
        self.loaded = 0

    def work(self) -> None:
        """Store a block if it is absent, look it up, load it."""
        connection = self.connection
        begun = ask(connection, BeginStore(KEYS), StoreBegun)
        if begun.op_id:
            for rank in range(2):
                connection.send(Completions(rank, "boot", (Completion(begun.op_id, "done"),)))
        found = ask(connection, Lookup(KEYS), Found)
        assert found.runs == ((0, 8),)
        loading = ask(connection, BeginLoad(found.lease_id, 0, 8), LoadBegun)
        assert len(loading.slots) == 8
        for rank in range(2):
            connection.send(Completions(rank, "boot", (Completion(loading.op_id, "done"),)))
        connection.poll()
        self.loaded += 1


@pytest.fixture
def honest(node: Node) -> Iterator[Honest]:
    honest = Honest(node)
    honest.work()
    yield honest
    honest.work()
    assert honest.connection.state == "attached"
    assert node.server.failure is None
    session_id = honest.connection.welcome.session_id if honest.connection.welcome else ""
    wait_until(lambda: not node.host.sessions[session_id].ops)
    assert node.host.sessions[session_id].leases == {}


def read_to_the_end(connected: socket.socket) -> list[Frame]:
    """All that the service says until it closes."""
    channel, frames = Channel(connected), list[Frame]()
    with suppress(DisconnectedError):
        while True:
            assert select.select([channel], [], [], 20)[0]
            frames += channel.receive()
    channel.close()
    return frames


def refusal_of(connected: socket.socket) -> str:
    last = read_to_the_end(connected)[-1]
    assert last.kind == Kind.REFUSED
    return Refused.unpack(last.payload).reason


def send_quietly(connected: socket.socket, data: bytes) -> None:
    with suppress(OSError):  # it may have been closed for the first bytes
        connected.sendall(data)


def figures_without_others(node: Node) -> AttachFigures:
    """When all connections but one are gone, and their sessions."""
    wait_until(lambda: (figures := figures_of(node)).clients == figures.sessions == 1)
    return figures_of(node)


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


# -- garbage -----------------------------------------------------------------------------------------------------


def garbage(rng: random.Random) -> bytes:
    return rng.randbytes(rng.randint(1, 4000))


def garbage_in_a_frame(rng: random.Random) -> bytes:
    payload = rng.randbytes(rng.randint(0, 200))
    return encode_header(rng.choice([*Kind, 0, 999, 65535]), len(payload), rng.randint(0, 3)) + payload


FRAMES: list[Message] = [
    Lookup(KEYS),
    BeginStore(KEYS, "r"),
    DescribeStore(1, (0,), (b"tell",)),
    BeginLoad(1, 0, 1, "r"),
    Completions(0, "boot", (Completion(1, "done"),)),
    Release((1, 2)),
]


def a_frame_that_was_changed_a_little(rng: random.Random) -> bytes:
    message = rng.choice(FRAMES)
    payload = message.pack()
    changed = bytearray(encode_header(message.KIND, len(payload), 5) + payload)
    for _ in range(rng.randint(1, 3)):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


@pytest.mark.parametrize(
    ("greeted", "make", "reasons"),
    [
        (False, garbage, set()),
        (True, garbage, set()),
        (True, garbage_in_a_frame, {"malformed", "unexpected"}),
        (True, a_frame_that_was_changed_a_little, set()),
    ],
)
def test_garbage_is_no_internal_error_and_no_other_session_notices_it(
    node: Node, honest: Honest, greeted: bool, make: Callable[[random.Random], bytes], reasons: set[str]
) -> None:
    rng = random.Random(9595)
    for _ in range(ROUNDS):
        connected = attached(node) if greeted else connect(node)
        send_quietly(connected, make(rng))
        connected.shutdown(socket.SHUT_WR)
        read_to_the_end(connected)
        if rng.random() < 0.1:
            honest.work()
    figures = figures_without_others(node)
    assert sum(figures.refused.values()) >= ROUNDS // 4
    assert reasons <= figures.refused.keys()
    assert figures.errors["internal"] == 0


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (encode_header(Kind.LOOKUP, 0), "no_hello"),
        (encode_header(Kind.HELLO, 2) + b"[]", "malformed"),
        (struct.pack("<IHHQ", 1 << 30, Kind.HELLO, 0, 0), "too_long"),
        (struct.pack("<IHHQ", MAX_HELLO_BYTES + 1, Kind.HELLO, 0, 0), "too_long"),
        (struct.pack("<IHHQ", 0, Kind.HELLO, 65535, 0), "too_many_fds"),
    ],
)
def test_what_is_no_hello_is_refused_and_counted(node: Node, honest: Honest, first: bytes, reason: str) -> None:
    connected = connect(node)
    connected.sendall(first)
    assert refusal_of(connected) == reason
    assert figures_of(node).refused == {reason: 1}


def test_a_second_hello_ends_the_session(node: Node, honest: Honest) -> None:
    connected = attached(node)
    payload = HELLO.pack()
    connected.sendall(encode_header(Kind.HELLO, len(payload)) + payload)
    assert refusal_of(connected) == "unexpected"


# -- lengths and half frames -------------------------------------------------------------------------------------


def test_half_frames_take_bounded_memory(node: Node, honest: Honest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "MAX_PARTIAL_BYTES", 8 << 20)
    greedy = [attached(node) for _ in range(4)]
    for connected in greedy:
        with suppress(OSError):
            connected.sendall(encode_header(Kind.LOOKUP, 6 << 20, 1) + bytes(3 << 20))
    wait_until(lambda: figures_of(node).refused["memory"] >= 1)
    wait_until(lambda: figures_of(node).partial_bytes <= 8 << 20)
    honest.work()
    for connected in greedy:
        connected.close()
    wait_until(lambda: figures_of(node).clients == 1)
    wait_until(lambda: figures_of(node).partial_bytes == 0)


def test_a_hello_that_never_ends_is_given_up(make_node: MakeNode) -> None:
    clock = FakeClock()
    node = make_node(clock=clock)
    honest = Honest(node)
    connected = connect(node)
    connected.sendall(encode_header(Kind.HELLO, 1000) + b"{")
    wait_until(lambda: figures_of(node).strangers == 1)
    clock.advance(clients.HELLO_SECONDS + 0.1)
    honest.work()
    assert refusal_of(connected) == "hello_timeout"
    assert honest.connection.state == "attached"


# -- floods ------------------------------------------------------------------------------------------------------


def test_ten_thousand_connections(node: Node, honest: Honest) -> None:
    """No more than `max_strangers` are ever open, and an engine that attaches in their midst is served."""
    before = resident_bytes()
    highest = 0
    opened: list[socket.socket] = []
    for number in range(10_000):
        opened.append(connect(node))
        if len(opened) > 100:
            opened.pop(0).close()
        if number % 1000 == 0:
            honest.work()
            highest = max(highest, figures_of(node).strangers)
    late = node.attach()
    assert late.state == "attached"
    for connected in opened:
        connected.close()
    wait_until(lambda: figures_of(node).clients == 2)
    figures = figures_of(node)
    assert 1 <= highest <= node.clients.max_strangers
    assert figures.accepted == 10_002
    assert figures.refused["too_many_strangers"] > 0
    assert resident_bytes() - before < 32 << 20


def test_connections_beyond_the_limit_are_refused_while_all_are_sessions(make_node: MakeNode) -> None:
    node = make_node(limit=4)

    def attach_as(uid: int) -> AttachConnection:
        node.process(uid=uid)
        return node.attach()

    sessions = [attach_as(uid) for uid in range(4)]
    assert refusal_of(connect(node)) == "too_many_clients"
    sessions.pop().close()
    wait_until(lambda: figures_of(node).clients == 3)
    assert node.attach().state == "attached"
    assert [session.poll() for session in sessions] == [[], [], []]


def test_without_descriptors_accepting_pauses_and_goes_on(make_node: MakeNode) -> None:
    clock = FakeClock()
    node = make_node(clock=clock)
    honest = Honest(node)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    waiting = socket.socket(socket.AF_UNIX)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (waiting.fileno() + 1, limits[1]))
        waiting.connect(str(node.path))
        wait_until(lambda: figures_of(node).refused["no_descriptors"])
        honest.work()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert figures_of(node).accepted == 1
    clock.advance(1.1)
    honest.work()
    wait_until(lambda: figures_of(node).accepted == 2)
    waiting.close()


# -- what belongs to others --------------------------------------------------------------------------------------


def test_a_scheduler_half_may_not_speak_as_a_worker_nor_a_worker_as_a_scheduler(node: Node, honest: Honest) -> None:
    scheduler = node.attach()
    worker = node.attach_worker(scheduler)
    worker.call(Lookup(KEYS))
    assert refusal_by(worker) == "unexpected: LOOKUP does not come from a worker"
    other = node.attach()
    other.send(RegisteredExtents(()))
    assert refusal_by(other) == "unexpected: REGISTERED does not come from a scheduler"
    assert node.host.registered == []


@pytest.mark.parametrize("announced", [0, 3])
def test_descriptors_of_a_client_never_enter_the_service(node: Node, honest: Honest, announced: int) -> None:
    """Whichever process sends them: nothing that an engine hands over is believed to be anybody's memory or process."""
    null = os.open("/dev/null", os.O_RDONLY)
    worker = attached_worker(node)
    before = len(open_descriptors())
    for connected in (connect(node), attached(node), worker):
        frame = encode_header(Kind.REGISTERED, 0, 1, announced)
        connected.sendmsg([frame], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [null] * 3))])
        assert refusal_of(connected) == "fds_unwanted"
    wait_until(lambda: len(open_descriptors()) <= before)
    os.close(null)
    assert figures_of(node).refused == {"fds_unwanted": 3}


def attached_worker(node: Node) -> socket.socket:
    welcome = node.attach().welcome
    assert welcome is not None
    return attached(node, replace(WORKER, token=welcome.token))


def test_descriptors_that_are_announced_and_do_not_come_end_the_connection(node: Node, honest: Honest) -> None:
    worker = attached_worker(node)
    payload = RegisteredExtents(()).pack()
    worker.send(encode_header(Kind.REGISTERED, len(payload), 0, 2) + payload)
    assert refusal_of(worker) == "fds_missing"
