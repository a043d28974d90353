"""A client's connection comes, goes and comes back, and its host is never surprised."""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.descriptors import all_closed_again
from tests.engine.attach.fakeservice import FakeService

from kvstow.attach.calls import (
    BeginLoad,
    ExtentGrant,
    Found,
    GrantedExtents,
    Lookup,
    Reset,
    ResetDone,
    RevokedExtents,
    SettledOps,
)
from kvstow.attach.channel import Frame
from kvstow.attach.connection import (
    FIRST_PAUSE_SECONDS,
    HELLO_SECONDS,
    LONGEST_PAUSE_SECONDS,
    REFUSED_PAUSE_SECONDS,
    Answer,
    AttachConnection,
    socket_path,
)
from kvstow.attach.hello import CallError, Hello, Refused, Welcome
from kvstow.attach.wire import Kind, Message
from kvstow.errors import AttachError, CallFailedError, ConfigError, DisconnectedError, ProtocolError

HELLO = Hello(role="worker", engine="test", host="here", pid=os.getpid(), token="t")
WELCOME = Welcome(session_id="s1", service="test")
KEYS = [b"k" * 34]


class Client:
    """A connection with a clock of its own, and what it told its host."""

    def __init__(self, path: Path) -> None:
        self.now = 100.0
        self.attempts = 0
        self.heard: list[str] = []
        self.connection = AttachConnection(
            path,
            self._make_hello,
            accepts_fds=True,
            on_attached=lambda welcome: self.heard.append(welcome.session_id),
            on_lost=lambda: self.heard.append("lost"),
            clock=lambda: self.now,
            jitter=lambda: 0.0,
        )

    def _make_hello(self) -> Hello:
        self.attempts += 1
        return HELLO

    def pauses(self, seconds: float) -> None:
        """The next attempt comes after this time, and not before."""
        attempts = self.attempts
        self.now += seconds - 0.001
        assert (self.connection.poll(), self.attempts) == ([], attempts)
        self.now += 0.002
        assert (self.connection.poll(), self.attempts) == ([], attempts + 1)

    def attach(self, service: FakeService) -> None:
        assert self.connection.poll() == []
        self.greet(service)

    def greet(self, service: FakeService) -> None:
        """After an attempt."""
        assert service.accept() == HELLO
        service.send(WELCOME)
        assert self.connection.poll() == []
        assert self.connection.state == "attached"


@pytest.fixture(autouse=True)
def no_descriptor_left() -> Iterator[None]:
    with all_closed_again():
        yield


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "attach.sock"


@pytest.fixture
def service(no_descriptor_left: None, path: Path) -> Iterator[FakeService]:
    service = FakeService(path)
    yield service
    service.close()


@pytest.fixture
def client(no_descriptor_left: None, path: Path) -> Iterator[Client]:
    client = Client(path)
    yield client
    client.connection.close()
    client.connection.close()
    assert client.connection.state == "closed"


def test_it_attaches_and_calls(client: Client, service: FakeService) -> None:
    connection = client.connection
    client.attach(service)
    assert (connection.welcome, connection.problem, client.heard) == (WELCOME, None, ["s1"])
    call = connection.call(Lookup(KEYS))
    with pytest.raises(AttachError, match="not arrived yet"):
        call.unpack(Found)
    asked = service.receive()
    assert Lookup.unpack(asked.payload) == Lookup(KEYS)
    service.send(SettledOps(()))
    service.send(Found(7, ((0, 1),)), asked.request_id)
    assert connection.wait(call, 10)
    assert call.unpack(Found) == Found(7, ((0, 1),))
    (pushed,) = connection.poll()
    assert pushed.kind == Kind.SETTLED


def test_a_call_that_is_not_answered_in_time_is_answered_later(client: Client, service: FakeService) -> None:
    client.attach(service)
    first, second = client.connection.call(Reset()), client.connection.call(Reset())
    assert not client.connection.wait(first, 0.0)
    for name in ("a", "b"):
        service.send(ResetDone(name), service.receive().request_id)
    assert client.connection.wait(second, 10)
    assert [first.unpack(ResetDone).namespace, second.unpack(ResetDone).namespace] == ["a", "b"]


def test_all_that_has_arrived_is_read_up_to_the_end_of_the_connection(client: Client, service: FakeService) -> None:
    """An answer, a message nobody asked for, and the end. The first alone would say that the session lives."""
    client.attach(service)
    asked = client.connection.call(Reset())
    service.send(ResetDone("a"), service.receive().request_id)
    service.send(SettledOps(()))
    service.hang_up()
    client.connection.drain()
    assert asked.unpack(ResetDone).namespace == "a"
    assert (client.connection.state, client.heard[-1]) == ("detached", "lost")
    assert [frame.kind for frame in client.connection.take_pushed()] == [Kind.SETTLED]
    client.connection.drain()
    assert client.connection.state == "detached"


def test_without_a_service_nothing_raises_and_the_pauses_grow(client: Client, path: Path) -> None:
    connection = client.connection
    connection.poll()
    for doublings in range(8):
        assert connection.problem == f"cannot connect to unix:{path}: No such file or directory"
        assert connection.state == "detached"
        client.pauses(min(FIRST_PAUSE_SECONDS * 2**doublings, LONGEST_PAUSE_SECONDS))
    call = connection.call(Lookup(KEYS))
    assert call.done
    assert connection.wait(call, 10)
    with pytest.raises(DisconnectedError, match="cannot connect"):
        call.unpack(Found)
    assert not connection.send(Reset())
    assert client.heard == []


def test_the_end_of_the_service_fails_open_calls_and_the_next_life_is_another_session(
    client: Client, service: FakeService
) -> None:
    connection = client.connection
    client.attach(service)
    call = connection.call(Lookup(KEYS))
    request_id = service.receive().request_id
    service.send(SettledOps(()))
    service.hang_up()
    connection.poll()
    assert connection.poll() == []
    assert (connection.state, connection.welcome) == ("detached", None)
    with pytest.raises(DisconnectedError, match="has closed the connection"):
        call.unpack(Found)
    client.now += FIRST_PAUSE_SECONDS
    client.attach(service)
    service.send(Found(7, ()), request_id)  # an answer to a call of the life before
    again = connection.call(Lookup(KEYS))
    connection.poll()
    assert not again.done
    assert client.heard == ["s1", "lost", "s1"]


def test_pauses_grow_until_a_connection_has_lasted(client: Client, service: FakeService) -> None:
    client.attach(service)
    for doublings in range(8):
        client.now += LONGEST_PAUSE_SECONDS - 0.1
        service.hang_up()
        client.connection.poll()
        client.pauses(min(FIRST_PAUSE_SECONDS * 2**doublings, LONGEST_PAUSE_SECONDS))
        client.greet(service)
    client.now += LONGEST_PAUSE_SECONDS + 0.1
    service.hang_up()
    client.connection.poll()
    client.pauses(FIRST_PAUSE_SECONDS)


def test_a_refusal_says_why_and_waits_longer(client: Client, service: FakeService) -> None:
    connection = client.connection
    connection.poll()
    service.accept()
    service.send(Refused("version", "upgrade the engine"))
    service.hang_up()
    connection.poll()
    assert (connection.state, connection.refusal, connection.problem) == ("detached", "version", "upgrade the engine")
    client.now += REFUSED_PAUSE_SECONDS - 0.01
    connection.poll()
    assert connection.state == "detached"
    connection.retry_now()
    client.attach(service)
    assert connection.refusal is None
    assert client.heard == ["s1"]


@pytest.mark.parametrize(
    ("reason", "pause"), [("slow_reader", REFUSED_PAUSE_SECONDS), ("too_many_clients", FIRST_PAUSE_SECONDS)]
)
def test_a_refusal_is_heard_although_sending_fails_first(
    client: Client, service: FakeService, reason: str, pause: float
) -> None:
    connection = client.connection
    client.attach(service)
    service.send(Refused(reason, "a sentence"))
    service.hang_up()
    assert not connection.send(Reset())
    assert (connection.state, connection.refusal, connection.problem) == ("detached", reason, "a sentence")
    assert client.heard == ["s1", "lost"]
    client.pauses(pause)


def test_a_service_that_does_not_answer_the_hello_is_left(client: Client, service: FakeService) -> None:
    connection = client.connection
    connection.poll()
    client.now += HELLO_SECONDS + 0.1
    connection.poll()
    assert connection.state == "detached"
    assert connection.problem == "the service has not answered the hello for 10 seconds"


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (Lookup(KEYS), "the service broke the protocol: LOOKUP does not come from a service"),
        (SettledOps(()), "SETTLED comes before the welcome"),
    ],
)
def test_what_no_service_says_ends_the_connection(
    client: Client, service: FakeService, message: Message, problem: str
) -> None:
    client.connection.poll()
    service.accept()
    service.send(message)
    client.connection.poll()
    assert client.connection.state == "detached"
    assert problem in (client.connection.problem or "")


def test_garbage_ends_the_connection_and_nothing_else(client: Client, service: FakeService) -> None:
    client.attach(service)
    service.connected.send(b"\xff" * 100)
    assert client.connection.poll() == []
    assert client.connection.problem is not None
    assert "was announced; allowed here" in client.connection.problem
    client.now += FIRST_PAUSE_SECONDS
    client.attach(service)


def test_a_wait_of_microseconds_is_not_rounded_up(
    client: Client, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`poll` would make a step wait for a millisecond."""
    client.attach(service)
    call = client.connection.call(Reset())
    waits: list[float] = []

    def wait_in_vain(_read: object, _write: object, _other: object, seconds: float) -> tuple[list[int], ...]:
        waits.append(seconds)
        client.now += seconds
        return [], [], []

    monkeypatch.setattr(select, "select", wait_in_vain)
    assert not client.connection.wait(call, 0.0003)
    assert waits == [pytest.approx(0.0003)]


def test_a_descriptor_that_select_does_not_take_is_waited_for_with_poll(client: Client, service: FakeService) -> None:
    with ExitStack() as opened:
        while (fd := os.dup(0)) < 1024:
            opened.callback(os.close, fd)
        os.close(fd)
        assert client.connection.poll() == []
    assert client.connection.fileno() >= 1024
    client.greet(service)
    call = client.connection.call(Reset())
    service.send(ResetDone("a"), service.receive().request_id)
    assert client.connection.wait(call, 10)


def test_a_refused_call_leaves_the_session(client: Client, service: FakeService) -> None:
    client.attach(service)
    call = client.connection.call(Reset())
    service.send(CallError("conflict", "not now"), service.receive().request_id)
    assert client.connection.wait(call, 10)
    with pytest.raises(CallFailedError, match="not now") as caught:
        call.unpack(ResetDone)
    assert caught.value.service_code == "conflict"
    wrong = client.connection.call(Reset())
    service.send(Found(1, ()), service.receive().request_id)
    assert client.connection.wait(wrong, 10)
    with pytest.raises(ProtocolError, match="where RESET_DONE must"):
        wrong.unpack(ResetDone)
    assert client.connection.state == "attached"


def test_a_message_that_no_frame_holds_is_the_hosts_error(client: Client, service: FakeService) -> None:
    client.attach(service)
    with pytest.raises(ProtocolError, match="a payload has"):
        client.connection.call(Lookup([bytes(256)] * 40_000))
    with pytest.raises(ProtocolError, match=r"begin_load: .*surrogates not allowed"):
        client.connection.send(BeginLoad(1, 0, 1, "\ud800"))
    assert client.connection.state == "attached"


def test_descriptors_belong_to_the_host_or_are_closed(client: Client, service: FakeService) -> None:
    client.attach(service)
    fd = os.open("/dev/null", os.O_RDONLY)
    extents = GrantedExtents(4096, (ExtentGrant(1, 0, 0, 1, 4096, 0),), True)
    service.send(extents, fds=(fd,))
    (pushed,) = client.connection.poll()
    assert GrantedExtents.unpack(pushed.payload) == extents
    os.close(pushed.fds[0])
    service.send(extents, fds=(fd,))
    client.connection.wait(client.connection.call(Reset()), 0.0)  # received, and not taken by the host
    client.connection.close()
    os.close(fd)


def tell(connection: AttachConnection) -> None:
    assert not connection.send(Reset())


def receive_once(connection: AttachConnection) -> None:
    assert not connection.wait(Answer(), 0.0)


def receive_and_tell(connection: AttachConnection) -> None:
    receive_once(connection)
    assert not connection.send(Reset())


@pytest.mark.parametrize(
    ("end", "unsent"),
    [(tell, 0), (receive_once, 60_000), (receive_and_tell, 0), (AttachConnection.poll, 0)],
)
@pytest.mark.parametrize("last_word", [None, Refused("draining", "the service stops")])
@pytest.mark.parametrize("room", [0, 300_000])
def test_what_was_pushed_before_the_end_is_returned_before_the_next_session(
    client: Client,
    service: FakeService,
    end: Callable[[AttachConnection], list[Frame] | None],
    last_word: Refused | None,
    room: int,
    unsent: int,
) -> None:
    """Also if the client finds out by sending, which may be a rest that the socket did not take before: a call with
    `unsent` keys. `room`: a frame that takes more than one read."""
    client.attach(service)
    if unsent:
        client.connection.call(Lookup(KEYS * unsent))
    fd = os.open("/dev/null", os.O_RDONLY)
    service.send(GrantedExtents(4096, (ExtentGrant(1, 0, 0, 1, 4096, 0),), True), fds=(fd,))
    service.send(ResetDone("x" * 4000) if not room else RevokedExtents(tuple(range(room // 8))))
    service.send(RevokedExtents((7,)))
    if last_word is not None:
        service.send(last_word)
    service.hang_up()
    frames = list(end(client.connection) or ())
    client.now += 1000.0
    while client.connection.state == "attached" or not frames:
        frames += client.connection.poll()
    assert [frame.kind for frame in frames] == [
        Kind.EXTENTS,
        Kind.REVOKED if room else Kind.RESET_DONE,
        Kind.REVOKED,
    ]
    assert client.heard == ["s1", "lost"], "they come before there is another session"
    assert client.connection.refusal == (None if last_word is None else "draining")
    for frame in frames:
        for received in frame.fds:
            os.close(received)
    os.close(fd)
    client.now += 1000.0
    client.attach(service)


def test_a_host_that_ends_the_connection_in_a_callback_hears_no_more(path: Path, service: FakeService) -> None:
    fd = os.open("/dev/null", os.O_RDONLY)
    connection = AttachConnection(
        path, lambda: HELLO, accepts_fds=True, on_attached=lambda welcome: connection.disconnect("enough")
    )
    connection.poll()
    service.accept()
    service.send(WELCOME)
    service.send(GrantedExtents(4096, (ExtentGrant(1, 0, 0, 1, 4096, 0),), True), fds=(fd,))
    assert connection.poll() == []
    assert connection.poll() == []
    assert connection.problem == "enough"
    connection.close()
    os.close(fd)


def test_an_address_is_a_path_after_unix() -> None:
    assert socket_path("unix:/run/kvstow/attach.sock") == Path("/run/kvstow/attach.sock")
    assert socket_path("unix:///run/kvstow/attach.sock") == Path("/run/kvstow/attach.sock")
    assert socket_path("unix:here.sock") == Path("here.sock")
    for wrong in ("/run/kvstow.sock", "unix:", "tcp:host:1", "unix://host/path", "unix:////x"):
        with pytest.raises(ConfigError, match="allowed: unix:PATH or unix:///PATH"):
            socket_path(wrong)
