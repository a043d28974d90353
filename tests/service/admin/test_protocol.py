"""What a stranger with a raw socket can do to the server's HTTP."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
import threading
from asyncio import constants
from collections.abc import AsyncIterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import httpx
import pytest
import trustme
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from tests.doubles.fakes import FakeClock
from tests.waiting import eventually

from kvstow_api.auth import ACTOR
from kvstow_service.admin import server as server_module
from kvstow_service.admin.server import MAX_HEAD_BYTES, MAX_HEADERS, AdminProtocol, AdminServer, RequestQueue, Wait
from kvstow_service.admin.sockets import AdminSockets, TcpAddress
from kvstow_service.admin.tls import ServerTls, TlsFiles

_SOCKET_SECONDS = 60.0
_LARGE = 32 << 20  # more than the buffers of both sockets hold
_GET = b"GET / HTTP/1.1\r\nHost: kvstow\r\n\r\n"


async def hello(request: Request) -> Response:
    return PlainTextResponse(f"hello {request.client.host if request.client else '-'}")


async def large(request: Request) -> Response:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(_LARGE >> 16):
            yield bytes(1 << 16)

    return StreamingResponse(pieces())


async def whole(request: Request) -> Response:
    return Response(bytes(_LARGE), headers={"Connection": "close"})


async def forever(request: Request) -> Response:
    async def nothing() -> AsyncIterator[bytes]:
        yield b"begins\n"
        await asyncio.Event().wait()

    return StreamingResponse(nothing())


async def login(request: Request) -> Response:
    request.scope[ACTOR] = "admin"
    return PlainTextResponse("welcome")


async def refuse(request: Request) -> Response:
    return PlainTextResponse("refused", 401)


_begun: list[str] = []


async def counted(request: Request) -> Response:
    _begun.append(request.url.path)
    return PlainTextResponse("counted")


async def read(request: Request) -> Response:
    body = await request.body()
    return PlainTextResponse(f"{len(body)} {crc32(body)}")


APP = Starlette(
    routes=[
        Route("/", hello),
        Route("/livez", hello),
        Route("/counted", counted),
        Route("/large", large),
        Route("/whole", whole),
        Route("/forever", forever, methods=["GET", "POST"]),
        Route("/login", login),
        Route("/refuse", refuse, methods=["POST"]),
        Route("/read", read, methods=["POST"]),
    ]
)


class Served(NamedTuple):
    server: AdminServer
    listeners: AdminSockets
    clock: FakeClock

    @property
    def open(self) -> int:
        return len(self.server.admitted.open)

    @property
    def waits(self) -> list[Wait | None]:
        return [connection.wait for connection in list(self.server.admitted.open)]

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.listeners.port), _SOCKET_SECONDS)

    def get(self, path: str = "/") -> httpx.Response:
        return httpx.get(f"{self.listeners.url}{path}", timeout=_SOCKET_SECONDS)


@pytest.fixture
def served(serving: Any, monkeypatch: pytest.MonkeyPatch) -> Served:
    """A server whose clock stands still; at most 8 connections."""
    monkeypatch.setattr(server_module, "connection_limit", lambda: 8)
    clock = FakeClock(0.0)
    server, listeners = serving(APP, clock=clock)
    return Served(server, listeners, clock)


def read_to_end(client: socket.socket) -> bytes:
    """What comes until the server hangs up."""
    received = bytearray()
    while True:
        try:
            data = client.recv(1 << 16)
        except ConnectionResetError:
            return bytes(received)
        if not data:
            return bytes(received)
        received += data


def read_answer(client: socket.socket) -> bytes:
    """One answer with a Content-Length."""
    received = b""
    while b"\r\n\r\n" not in received:
        data = client.recv(1 << 16)
        assert data, received
        received += data
    head, _, body = received.partition(b"\r\n\r\n")
    (length,) = (int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    while len(body) < length:
        body += client.recv(1 << 16)
    return head + b"\r\n\r\n" + body


BEGUN = b"GET / HTTP/1.1\r\nHost: kvstow\r\n"


@pytest.mark.parametrize(
    ("head", "detail"),
    [
        (BEGUN + b"X-Flood: " + b"x" * (2 * MAX_HEAD_BYTES), b"is too large; allowed: 16384 bytes"),
        (b"GET /" + b"x" * (2 * MAX_HEAD_BYTES), b"is too large; allowed: 16384 bytes"),
        (BEGUN + (b"x: y\r\n" * MAX_HEAD_BYTES)[: 2 * MAX_HEAD_BYTES], b"has too many lines; allowed: 100 headers"),
        (BEGUN + b"x: y\r\n" * MAX_HEADERS + b"\r\n", b"has too many lines; allowed: 100 headers"),
        (BEGUN + b"x:\n" * MAX_HEADERS + b"\r\n", b"has too many lines; allowed: 100 headers"),
    ],
    ids=["a header that does not end", "a URL that does not end", "headers that do not end", "headers", "short lines"],
)
def test_a_head_beyond_a_limit_is_refused_while_it_arrives(served: Served, head: bytes, detail: bytes) -> None:
    with served.connect() as client:
        client.sendall(head)
        answer = read_to_end(client)
    assert answer.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
    assert b'"detail": "the request head ' in answer
    assert detail in answer
    assert b"connection: close\r\n" in answer.lower()


def test_only_the_lines_of_a_head_count_as_headers(served: Served) -> None:
    """Not those of its body, nor those of the next request."""
    head = b"POST /read HTTP/1.1\r\nHost: kvstow\r\nContent-Length: 500\r\n" + b"x: y\r\n" * (MAX_HEADERS - 2)
    with served.connect() as client:
        client.sendall((head + b"\r\n" + b"\n" * 500) * 3)
        client.sendall(b"GET / HTTP/1.1\r\nHost: kvstow\r\nConnection: close\r\n\r\n")
        answers = read_to_end(client)  # several may come at once
    assert answers.count(b"HTTP/1.1 200 OK\r\n") == 4


class Held:
    """The queue of strangers' requests, of which only probes get through until `release`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waiting = 0
        self._released = threading.Event()
        wait = RequestQueue.wait

        async def hold(queue: RequestQueue, *, probe: bool) -> None:
            if not probe:
                self.waiting += 1
                while not self._released.is_set():
                    await asyncio.sleep(0.001)
            await wait(queue, probe=probe)

        monkeypatch.setattr(RequestQueue, "wait", hold)

    def hold(self) -> None:
        self._released.clear()

    def release(self) -> None:
        self._released.set()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    return Held(monkeypatch)


def test_probes_and_authenticated_requests_overtake_unauthenticated_ones(served: Served, held: Held) -> None:
    with httpx.Client(base_url=served.listeners.url, timeout=_SOCKET_SECONDS) as known, served.connect() as stranger:
        held.release()
        assert known.get("/login").text == "welcome"
        held.hold()
        stranger.sendall(_GET)
        eventually(lambda: held.waiting == 2)
        assert served.get("/livez").status_code == 200
        assert known.get("/").status_code == 200
        held.release()
        assert read_answer(stranger).startswith(b"HTTP/1.1 200 OK\r\n")


def test_a_request_of_a_client_that_has_left_is_not_started(
    served: Served, held: Held, caplog: pytest.LogCaptureFixture
) -> None:
    begun = _begun.copy()
    with served.connect() as client:
        client.sendall(_GET.replace(b"GET /", b"GET /counted"))
        eventually(lambda: held.waiting == 1)
    eventually(lambda: served.open == 0)
    held.release()
    eventually(lambda: not served.server.server_state.tasks)
    assert _begun == begun
    assert caplog.records == []


@pytest.mark.parametrize(
    "request_", [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00", b"hello\r\n\r\n"]
)
def test_input_that_is_not_http_is_refused_without_a_log_line(
    served: Served, request_: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with served.connect() as client:
        client.sendall(request_ + b"\r\n\r\n")
        assert b"HTTP/1.1 400 Bad Request\r\n" in read_to_end(client)
    assert caplog.records == []


def test_an_upgrade_is_ignored_without_a_log_line(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    with served.connect() as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: kvstow\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
        assert read_answer(client).startswith(b"HTTP/1.1 200 OK\r\n")
    assert caplog.records == []


def test_a_forged_forwarding_header_does_not_change_the_client(served: Served) -> None:
    answer = httpx.get(served.listeners.url, headers={"X-Forwarded-For": "192.0.2.1"})
    assert answer.text == "hello 127.0.0.1"


def test_one_read_is_small(serving: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    receive = AdminProtocol.data_received

    def spy(self: AdminProtocol, data: bytes) -> None:
        sizes.append(len(data))
        receive(self, data)

    monkeypatch.setattr(AdminProtocol, "data_received", spy)
    _, listeners = serving(APP)
    assert httpx.post(f"{listeners.url}/read", content=bytes(1 << 20)).text.startswith(str(1 << 20))
    assert max(sizes) <= 16 << 10


@pytest.mark.parametrize("begun", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: kvs"], ids=["nothing", "line", "half"])
@pytest.mark.parametrize("requests_before", [0, 1, 2])
def test_a_client_that_sends_no_head_is_dropped(served: Served, begun: bytes, requests_before: int) -> None:
    """Nor is the next one of a kept-alive connection."""
    with served.connect() as client:
        for _ in range(requests_before):
            client.sendall(_GET)
            assert read_answer(client).startswith(b"HTTP/1.1 200 OK")
        client.sendall(begun)
        eventually(lambda: served.waits == [Wait.HEAD])
        served.clock.advance(Wait.HEAD.value + 1)
        assert read_to_end(client) == b""
    assert served.open == 0


def test_a_trickle_of_bytes_does_not_extend_the_deadline_of_a_head(served: Served) -> None:
    with served.connect() as client:
        client.sendall(_GET)
        read_answer(client)
        eventually(lambda: served.waits == [Wait.HEAD])
        for byte in b"GET / HTTP":
            served.clock.advance(Wait.HEAD.value / 9)
            try:
                client.sendall(bytes([byte]))
            except ConnectionError:
                break
        assert read_to_end(client) == b""


def test_each_request_of_a_connection_has_its_own_deadline(served: Served) -> None:
    with served.connect() as client:
        for _ in range(5):
            eventually(lambda: served.waits == [Wait.HEAD])
            served.clock.advance(Wait.HEAD.value - 1)
            client.sendall(_GET)
            assert read_answer(client).startswith(b"HTTP/1.1 200 OK")


@pytest.mark.parametrize("path", ["/large", "/whole"])
def test_a_client_that_never_reads_is_dropped(served: Served, path: str) -> None:
    """While an answer waits for it, and after the server has closed its side."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", served.listeners.port))
        client.sendall(f"GET {path} HTTP/1.1\r\nHost: kvstow\r\n\r\n".encode())
        eventually(lambda: served.waits == [Wait.READER if path == "/large" else Wait.CLOSE])
        served.clock.advance(Wait.READER.value + 1)
        eventually(lambda: served.open == 0)
    assert served.get().is_success


def test_an_idle_stream_stays_open(served: Served) -> None:
    with served.connect() as client:
        client.sendall(b"GET /forever HTTP/1.1\r\nHost: kvstow\r\n\r\n")
        assert client.recv(1 << 16)
        eventually(lambda: served.waits == [None])
        served.clock.advance(3600.0)
        assert served.get().is_success
        eventually(lambda: served.waits == [None], "the end of the second connection")


def test_an_unneeded_body_is_not_read_forever(served: Served) -> None:
    with served.connect() as client:
        client.sendall(b"POST /refuse HTTP/1.1\r\nHost: kvstow\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert read_answer(client).startswith(b"HTTP/1.1 401 ")
        with pytest.raises(ConnectionError):
            client.sendall((b"4000\r\n" + bytes(1 << 14) + b"\r\n") * (_LARGE >> 14))


def test_a_small_body_after_its_response_keeps_the_connection(served: Served) -> None:
    with served.connect() as client:
        client.sendall(b"POST /refuse HTTP/1.1\r\nHost: kvstow\r\nContent-Length: 5\r\n\r\n")
        assert read_answer(client).startswith(b"HTTP/1.1 401 ")
        client.sendall(b"later" + _GET)
        assert read_answer(client).startswith(b"HTTP/1.1 200 ")


def test_a_malformed_body_after_its_response_is_no_error(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    with served.connect() as client:
        client.sendall(b"POST /refuse HTTP/1.1\r\nHost: kvstow\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert read_answer(client).startswith(b"HTTP/1.1 401 ")
        client.sendall(b"no such size\r\n")
        assert read_to_end(client).startswith(b"HTTP/1.1 400 ")
    assert caplog.records == []


def test_a_malformed_body_ends_a_response_in_progress(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    with served.connect() as client:
        client.sendall(b"POST /forever HTTP/1.1\r\nHost: kvstow\r\nTransfer-Encoding: chunked\r\n\r\n")
        answer = b""
        while b"begins" not in answer:
            answer += client.recv(1 << 16)
        client.sendall(b"no such size\r\n")
        assert b"HTTP/1.1" not in read_to_end(client)
    assert caplog.records == []


def test_more_connections_than_allowed_leave_room_for_probes(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    with ExitStack() as stack:
        clients = [stack.enter_context(served.connect()) for _ in range(300)]
        for client in clients[::2]:
            try:
                client.sendall(b"GET / HTTP/1.1\r\nHo")
            except ConnectionError:
                continue
        for _ in range(20):
            assert served.get().is_success
            assert served.open <= 8
    eventually(lambda: caplog.records, "the line of a thread that writes the log")
    assert len([record for record in caplog.records if "connections" in record.message]) == 1


def test_above_half_of_the_limit_a_connection_gets_one_request(served: Served) -> None:
    """But for those who are known."""
    with ExitStack() as stack:
        operator, stranger = (stack.enter_context(served.connect()) for _ in range(2))
        for client, path in ((operator, "/login"), (stranger, "/")):
            client.sendall(f"GET {path} HTTP/1.1\r\nHost: kvstow\r\n\r\n".encode())
            assert read_answer(client).startswith(b"HTTP/1.1 200 OK")
        for _ in range(4):
            stack.enter_context(served.connect())
        eventually(lambda: served.open == 6)
        stranger.sendall(_GET * 3)
        assert read_to_end(stranger).count(b"HTTP/1.1 200 OK") == 1
        for _ in range(3):
            operator.sendall(_GET)
            assert read_answer(operator).startswith(b"HTTP/1.1 200 OK")


def test_a_unix_socket_connects_when_untrusted_clients_hold_all_connections(
    serving: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "connection_limit", lambda: 4)
    uds = tmp_path / "admin.sock"
    _, listeners = serving(APP, uds=uds)
    served = Served(_, listeners, FakeClock(0.0))
    with ExitStack() as stack:
        agent = stack.enter_context(socket.socket(socket.AF_UNIX))
        agent.settimeout(_SOCKET_SECONDS)
        agent.connect(str(uds))
        agent.sendall(_GET)
        read_answer(agent)
        for _ in range(20):
            stack.enter_context(served.connect()).sendall(b"GET /forever HTTP/1.1\r\nHost: kvstow\r\n\r\n")
        assert served.get().is_success
        agent.sendall(_GET)
        assert read_answer(agent).startswith(b"HTTP/1.1 200 OK")


class Secured(NamedTuple):
    served: Served
    context: ssl.SSLContext


@pytest.fixture
def secured(serving: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Secured:
    """The same with TLS, and at most 4 connections; `context` is for clients."""
    monkeypatch.setattr(server_module, "connection_limit", lambda: 4)
    authority = trustme.CA()
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "server.pem"))
    clock = FakeClock(0.0)
    server, listeners = serving(APP, tls=ServerTls(TlsFiles(tmp_path / "server.pem")), clock=clock)
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return Secured(Served(server, listeners, clock), context)


def test_a_tls_handshake_that_stalls_counts_and_ends(secured: Secured, caplog: pytest.LogCaptureFixture) -> None:
    served = secured.served
    with ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(served.connect())
        eventually(lambda: served.open == 4)
        assert httpx.get(served.listeners.url, verify=secured.context).is_success
        served.clock.advance(Wait.HEAD.value + 20)
        eventually(lambda: served.open == 0)
    assert [record for record in caplog.records if record.name == "asyncio"] == []


def test_data_in_several_tls_records_is_read_completely(secured: Secured) -> None:
    pieces = [b"POST /read HTTP/1.1\r\nHost: kvstow\r\nContent-Length: 40000\r\n\r\n", *[b"x" * 10_000] * 4]
    buffer, sent = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = secured.context.wrap_bio(buffer, sent, server_hostname="127.0.0.1")
    with secured.served.connect() as client:
        done = False
        while not done:
            try:
                tls.do_handshake()
                done = True
            except ssl.SSLWantReadError:
                client.sendall(sent.read())
                buffer.write(client.recv(1 << 16))
        for piece in pieces:
            tls.write(piece)
        client.sendall(sent.read())  # all records at once: one read of the server has several
        answer = b""
        while not answer.partition(b"\r\n\r\n")[2]:
            received = client.recv(1 << 16)
            assert received, answer
            buffer.write(received)
            with suppress(ssl.SSLWantReadError):
                while data := tls.read(1 << 16):
                    answer += data
    assert answer.endswith(b"\r\n\r\n40000 %d" % crc32(b"x" * 40_000))


class _Exhausted(socket.socket):
    """A listener that finds no descriptor left for the connections that it accepts, a few times."""

    failures = 3

    def accept(self) -> tuple[socket.socket, Any]:
        if self.failures:
            self.failures -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def test_the_server_recovers_when_descriptors_are_free_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(constants, "ACCEPT_RETRY_DELAY", 0.01)
    plain = AdminSockets(TcpAddress.resolve("127.0.0.1", 0))
    first = plain.sockets[0]
    listener = _Exhausted(first.family, first.type, first.proto, fileno=first.detach())
    server = AdminServer(APP, [listener], lambda reason: pytest.fail(reason))
    server.start()
    try:
        assert httpx.get(plain.url, timeout=_SOCKET_SECONDS).is_success
    finally:
        server.stop()
    assert [record.message for record in caplog.records] == [
        "the admin server cannot accept a connection: Too many open files"
    ]


def test_the_event_loop_reports_once_a_minute(serving: Any, caplog: pytest.LogCaptureFixture) -> None:
    failed = 0

    def broken(self: AdminProtocol, data: bytes) -> None:
        nonlocal failed
        failed += 1
        raise RuntimeError("a defect that any client can reach")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AdminProtocol, "data_received", broken)
        server, listeners = serving(APP)
        for _ in range(5):
            with Served(server, listeners, FakeClock(0.0)).connect() as client:
                client.sendall(_GET)
                assert read_to_end(client) == b""
    assert failed == 5
    eventually(lambda: caplog.records, "the line of a thread that writes the log")
    assert len(caplog.records) == 1
    assert len(server.admitted.open) == 0
