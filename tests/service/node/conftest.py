from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast
from weakref import WeakKeyDictionary

import pytest
from msgspec.structs import replace
from tests.descriptors import all_closed_again
from tests.service.node import rawengine
from tests.service.node.fakehost import FakeHost
from tests.service.node.hostbench import HostBench
from tests.service.node.rawengine import HELLO as RAW_HELLO
from tests.service.node.rawengine import RawEngine
from tests.service.node.wholenode import whole_node

from kvstow.attach.channel import HEADER_BYTES, Frame, close_fds, encode_header
from kvstow.attach.connection import AttachConnection
from kvstow.attach.hello import Hello
from kvstow.attach.identity import GroupIdentity, NamespaceIdentity, PoolIdentity, RegionIdentity
from kvstow.attach.peer import Peer, peer_of
from kvstow.attach.wire import Kind, Message
from kvstow_service.node.attach.attachserver import AttachServer, AttachSocket
from kvstow_service.node.attach.clients import Clients
from kvstow_service.node.node import Node as WholeNode
from kvstow_service.node.nodehost import NodeHost

POOL = PoolIdentity(
    slot_bytes=(4096, 4096),
    regions=(RegionIdentity("layer.0", 4096),),
    kv_cache_dtype="bfloat16",
    groups=(GroupIdentity("full", 16, 16),),
    tensor_parallel=2,
)
NAMESPACE = NamespaceIdentity(model="m", weights_id="w", weights_source="files", hash_probe="p")
HELLO = Hello(role="scheduler", engine="test", host="here", pid=1, pool=POOL, namespace=NAMESPACE)
WORKER = Hello(role="worker", engine="test", host="here", pid=1)
DEADLINE_SECONDS = 60.0


_early: WeakKeyDictionary[AttachConnection, list[Frame]] = WeakKeyDictionary()
"""What came with the welcome."""


def wait_until(condition: Callable[[], object], step: Callable[[], object] = lambda: None) -> None:
    """Fails after a deadline that no healthy run comes near."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        step()
        time.sleep(0.001)


class AttachFigures(NamedTuple):
    """Of an attach server. It counts what it `refused` by reason, `errors` by code and `frames` by kind."""

    clients: int
    strangers: int
    sessions: int
    partial_bytes: int
    accepted: int
    frames: Counter[str]
    refused: Counter[str]
    errors: Counter[str]


def figures_of(node: Node) -> AttachFigures:
    tally, clients = node.server.tally, node.clients
    return AttachFigures(
        clients=len(clients),
        strangers=sum(client.member is None for client in clients),
        sessions=len(node.host.sessions),
        partial_bytes=clients.partial_bytes,
        accepted=tally.accepted,
        frames=Counter({Kind(kind).name.lower(): count for kind, count in dict(tally.frames).items()}),
        refused=Counter(dict(tally.refused)),
        errors=Counter(dict(tally.errors)),
    )


class FakeProcess:
    """A process whose death a test decides: its pidfd is a pipe."""

    def __init__(self, pid: int = 0, uid: int = 1000) -> None:
        self.pid, self.uid = pid, uid
        self._reader, self._writer = os.pipe()

    def peer(self) -> Peer:
        return Peer(self.pid, self.uid, self.uid, os.dup(self._reader))

    def die(self) -> None:
        os.write(self._writer, b"x")

    def close(self) -> None:
        os.close(self._reader)
        os.close(self._writer)


class Node:
    """An attach server over a fake host. `next_peer` is who connects next, or None if the kernel is asked."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.host = FakeHost()
        self.socket = AttachSocket(path)
        self.path = path
        self.next_peer: Callable[[], Peer] | None = lambda: Peer(0, 1000, 1000, os.pidfd_open(os.getpid()))
        self.failures: list[str] = []
        options = {"find_peer": self._find_peer, "on_failure": self.failures.append} | options
        self.server = AttachServer(cast(NodeHost, self.host), self.socket.listener, **options)
        self.connections: list[AttachConnection] = []
        self.processes: list[FakeProcess] = []

    def _find_peer(self, connected: socket.socket, *, needs_pidfd: bool) -> Peer:
        return peer_of(connected, needs_pidfd=needs_pidfd) if self.next_peer is None else self.next_peer()

    @property
    def clients(self) -> Clients:
        return self.server._clients

    def process(self, pid: int = 0, uid: int = 1000) -> FakeProcess:
        """The process that connects next."""
        process = FakeProcess(pid, uid)
        self.processes.append(process)
        self.next_peer = process.peer
        return process

    def connection(self, hello: Hello, **options: Any) -> AttachConnection:
        connection = AttachConnection(self.path, lambda: hello, accepts_fds=hello.role == "worker", **options)
        self.connections.append(connection)
        return connection

    def attach(self, hello: Hello = HELLO) -> AttachConnection:
        """A connection that is attached."""
        connection = self.connection(hello)
        early = _early[connection] = list[Frame]()
        wait_until(lambda: connection.state == "attached", lambda: early.extend(connection.poll(0.01)))
        return connection

    def attach_worker(self, scheduler: AttachConnection, rank: int = 0, **fields: Any) -> AttachConnection:
        assert scheduler.welcome is not None
        return self.attach(replace(WORKER, token=scheduler.welcome.token, rank=rank, **fields))

    def events(self, *kinds: str) -> list[tuple[object, ...]]:
        return [event for event in self.host.events if not kinds or event[0] in kinds]

    def wait_for_event(self, kind: str, count: int = 1) -> None:
        wait_until(lambda: len(self.events(kind)) >= count)

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """The server's thread does nothing meanwhile."""
        entered, leave = threading.Event(), threading.Event()

        def stand() -> None:
            entered.set()
            leave.wait(DEADLINE_SECONDS)

        self.server.post(stand)
        assert entered.wait(DEADLINE_SECONDS)
        try:
            yield
        finally:
            leave.set()

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
            for frame in _early.pop(connection, []):
                close_fds(frame.fds)
        self.server.close()
        self.server.close()
        self.socket.close()
        for process in self.processes:
            process.close()


def next_push(connection: AttachConnection) -> Frame:
    frames = _early[connection]
    wait_until(lambda: frames, lambda: frames.extend(connection.poll(0.01)))
    assert len(frames) == 1
    return frames.pop()


def connect(node: Node) -> socket.socket:
    connecting = socket.socket(socket.AF_UNIX)
    connecting.connect(str(node.path))
    connecting.settimeout(20)
    return connecting


def attached(node: Node, hello: Hello = HELLO) -> socket.socket:
    """A half that has been welcomed, as a bare socket."""
    connected = connect(node)
    payload = hello.pack()
    connected.sendall(encode_header(Kind.HELLO, len(payload)) + payload)
    header = connected.recv(HEADER_BYTES, socket.MSG_WAITALL)
    length, kind = struct.unpack_from("<IH", header)
    assert kind == Kind.WELCOME
    connected.recv(length, socket.MSG_WAITALL)
    return connected


Answer = TypeVar("Answer", bound=Message)


def ask(connection: AttachConnection, message: Message, kind: type[Answer]) -> Answer:
    call = connection.call(message)
    assert connection.wait(call, 20)
    return call.unpack(kind)


def refusal_by(connection: AttachConnection) -> str:
    """The reason for which the service refuses the connection, and its words."""
    wait_until(lambda: connection.refusal, lambda: connection.poll(0.01))
    return f"{connection.refusal}: {connection.problem}"


MakeNode = Callable[..., Node]


@pytest.fixture
def make_node(tmp_path: Path) -> Iterator[MakeNode]:
    """Nodes that are closed at the end; none leaves a descriptor open."""
    nodes: list[Node] = []

    def make(*, start: bool = True, **options: Any) -> Node:
        node = Node(tmp_path / "node" / f"attach{len(nodes)}.sock", **options)
        nodes.append(node)
        if start:
            node.server.start()
        return node

    with all_closed_again():
        yield make
        for node in nodes:
            node.close()


@pytest.fixture
def node(make_node: MakeNode) -> Node:
    return make_node()


MakeBench = Callable[..., HostBench]


@pytest.fixture
def make_bench(tmp_path: Path) -> Iterator[MakeBench]:
    """Benches that are closed at the end; none leaves a descriptor open."""
    made: list[HostBench] = []

    def make(**options: Any) -> HostBench:
        made.append(HostBench(tmp_path, **options))
        return made[-1]

    with all_closed_again():
        yield make
        for bench in made:
            bench.close()


@pytest.fixture
def bench(make_bench: MakeBench) -> HostBench:
    return make_bench()


MakeWholeNode = Callable[..., WholeNode]


@pytest.fixture
def make_whole_node(tmp_path: Path) -> Iterator[MakeWholeNode]:
    """Whole nodes, not started yet. They are closed at the end, and none leaves a descriptor open."""
    nodes: list[WholeNode] = []

    def make(**options: Any) -> WholeNode:
        nodes.append(whole_node(tmp_path, socket=f"attach{len(nodes)}", **options))
        return nodes[-1]

    with all_closed_again():
        yield make
        for node in nodes:
            node.give_back()
            node.close()
            node.close()


Engines = Callable[..., RawEngine]


@pytest.fixture
def engines(stack: ExitStack) -> Engines:
    """Engines that attach to a whole node, and are closed at the end."""

    def make(node: WholeNode, hello: Hello = RAW_HELLO) -> RawEngine:
        return stack.enter_context(closing(RawEngine(node.settings.attach_path, hello)))

    return make


EngineProcess = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def engine_process(child_environ: dict[str, str], stack: ExitStack) -> EngineProcess:
    """An engine in a process of its own that has stored some keys, and is in the middle of another store."""

    def start(socket: Path, count: int) -> subprocess.Popen[str]:
        command = [sys.executable, rawengine.__file__, str(socket), str(count)]
        process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=child_environ))
        stack.callback(process.kill)
        assert process.stdout is not None
        assert process.stdout.readline() == "stored\n"
        return process

    return start
