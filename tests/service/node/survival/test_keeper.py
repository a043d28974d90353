"""The keeper in this process, over its real socket, with a clock under control."""

from __future__ import annotations

import errno
import json
import os
import random
import select
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.descriptors import open_descriptors
from tests.doubles.fakes import FakeClock
from tests.service.node.keepers import ask, look
from tests.waiting import eventually

from kvstow.errors import KeeperBusyError, KeeperError
from kvstow_service.node.survival.keeper import (
    MAX_HELD,
    SOCKET,
    VERSION,
    Keeper,
    listen,
    require_state_folder,
    send,
    try_lock,
)
from kvstow_service.node.survival.keeper import connect as connect_to
from kvstow_service.node.survival.keeperclient import KeeperClient

KEEP_TIMEOUT = 600.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return require_state_folder(tmp_path / "state")


class Running:
    """A keeper whose steps another thread makes."""

    def __init__(
        self, folder: Path, clock: FakeClock, *, stays: bool = False, listener: socket.socket | None = None
    ) -> None:
        self.keeper = Keeper(listener or listen(folder), KEEP_TIMEOUT, stays=stays, clock=clock)
        self._stop = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop and self.keeper.step(0.005):
            pass

    def stop(self) -> None:
        """From now on the test makes the steps."""
        self._stop = True
        self._thread.join()

    def close(self) -> None:
        self.stop()
        self.keeper.close()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def running(folder: Path, clock: FakeClock) -> Iterator[Running]:
    running = Running(folder, clock)
    yield running
    running.close()


def connect(folder: Path, life: str = "first") -> KeeperClient:
    """A service that is welcome."""
    client = KeeperClient(folder)
    try:
        client.send_hello(life)
        assert client.has_news(5.0)
        client.take_welcome()
    except BaseException:
        client.close()
        raise
    return client


@pytest.fixture
def client(running: Running, folder: Path) -> Iterator[KeeperClient]:
    client = connect(folder)
    yield client
    client.close()


@contextmanager
def greeted(folder: Path) -> Iterator[socket.socket]:
    """The connection of a service that makes requests which `KeeperClient` never makes."""
    with connect_to(folder, 5.0) as peer:
        assert ask(peer, {"do": "hello", "version": VERSION, "life": "first"})["ok"]
        yield peer


@contextmanager
def memfd(content: bytes) -> Iterator[int]:
    fd = os.memfd_create("kvstow-test")
    os.write(fd, content)
    try:
        yield fd
    finally:
        os.close(fd)


def put(client: KeeperClient, label: str, content: bytes, *, replaces: bool = False) -> None:
    with memfd(content) as fd:
        client.put({label: fd}, replaces=replaces)


def contents(client: KeeperClient) -> dict[str, bytes]:
    taken = client.take_all()
    try:
        return {label: os.pread(fd, 100, 0) for label, fd in taken.items()}
    finally:
        for fd in taken.values():
            os.close(fd)


def test_it_holds_what_was_put_until_it_is_dropped(client: KeeperClient) -> None:
    put(client, "extent-1", b"one")
    put(client, "journal", b"index")
    assert contents(client) == {"extent-1": b"one", "journal": b"index"}
    client.drop(["extent-1", "unknown"])
    assert contents(client) == {"journal": b"index"}


def test_a_label_that_is_put_again_stands_for_the_new_one(client: KeeperClient) -> None:
    put(client, "extent-1", b"old")
    before = len(open_descriptors())
    put(client, "extent-1", b"new")
    assert contents(client) == {"extent-1": b"new"}
    assert len(open_descriptors()) == before


def test_the_descriptors_it_gives_are_closed_in_programs_that_the_service_starts(client: KeeperClient) -> None:
    put(client, "extent-1", b"")
    (fd,) = client.take_all().values()
    assert not os.get_inheritable(fd)
    os.close(fd)


def test_more_descriptors_than_select_can_watch_are_no_fault(client: KeeperClient, folder: Path) -> None:
    with memfd(b"same") as fd:
        client.put({f"extent-{number}": fd for number in range(1100)})
    client.close()
    again = connect(folder)  # whose pidfd has a number above 1,024
    with pytest.raises(KeeperBusyError):
        connect(folder, "second")
    taken = again.take_all()
    late = connect(folder)
    assert (len(taken), len(look(folder).labels)) == (1100, 1100), "several messages hold them"
    for fd in taken.values():
        os.close(fd)
    late.drop(taken)
    assert look(folder).labels == set()
    again.close()
    late.close()


def test_what_was_put_counts_all_at_once(client: KeeperClient, folder: Path) -> None:
    put(client, "extent-1", b"one")
    before = len(open_descriptors())
    with greeted(folder) as peer, memfd(b"two") as fd:
        assert ask(peer, {"do": "put", "labels": ["extent-1", "extent-2"]}, [fd, fd])["ok"]
        assert look(folder).labels == {"extent-1"}
    client = connect(folder)
    assert contents(client) == {"extent-1": b"one"}, "nor after the connection has ended before the commit"
    client.close()
    assert len(open_descriptors()) <= before


def test_everything_is_replaced_at_once(client: KeeperClient) -> None:
    put(client, "extent-1", b"one")
    put(client, "extent-2", b"two")
    before = len(open_descriptors())
    put(client, "extent-2", b"new", replaces=True)
    assert contents(client) == {"extent-2": b"new"}
    assert len(open_descriptors()) == before - 1


def test_a_request_after_a_question_gets_its_own_answer(client: KeeperClient) -> None:
    put(client, "extent-1", b"one")
    client.ask()
    assert contents(client) == {"extent-1": b"one"}


def test_a_service_is_refused_while_the_process_before_it_lives(running: Running, folder: Path) -> None:
    connect(folder).close()  # without a word, as if killed; but this process lives
    with pytest.raises(KeeperBusyError, match="still there"):
        connect(folder, "second")


def test_a_service_that_has_lost_its_connection_comes_back(client: KeeperClient, folder: Path) -> None:
    """What it has still sent on the old one does not count."""
    put(client, "extent-1", b"one")
    again = connect(folder)
    with pytest.raises(KeeperError):
        put(client, "extent-2", b"late")
    assert contents(again) == {"extent-1": b"one"}
    again.close()


def test_a_life_that_another_one_has_followed_does_not_come_back(running: Running, folder: Path) -> None:
    first = connect(folder)
    first.leave()
    second = connect(folder, "second")
    put(second, "extent-1", b"one")
    second.leave()
    with pytest.raises(KeeperError, match="another service has taken over"):
        connect(folder, "first")
    assert look(folder).labels == {"extent-1"}


class _OldConnection(socket.socket):
    """Knows the credentials of its peer and no pidfd, as with a kernel older than 6.5."""

    def getsockopt(self, level: int, option: int, *size: int) -> Any:
        if option != socket.SO_PEERCRED:
            raise OSError(errno.ENOPROTOOPT, "Protocol not available")
        return super().getsockopt(level, option, *size)


class _OldListener(socket.socket):
    def accept(self) -> tuple[socket.socket, Any]:
        accepted, address = super().accept()
        return _OldConnection(fileno=accepted.detach()), address


@pytest.fixture
def old_kernel(folder: Path, clock: FakeClock) -> Iterator[None]:
    """A keeper at a kernel without pidfds of peers."""
    listener = _OldListener(fileno=listen(folder).detach())
    listener.setblocking(False)
    running = Running(folder, clock, listener=listener)
    yield
    running.close()


def test_a_kernel_without_peer_pidfds_is_asked_for_the_pid(old_kernel: None, folder: Path) -> None:
    connect(folder).close()
    with pytest.raises(KeeperBusyError, match="still there"):
        connect(folder, "second")


def test_a_service_whose_death_nothing_tells_of_is_refused(
    old_kernel: None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(pid: int) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    with pytest.raises(KeeperError, match=r"older than 6\.5.*Run both in one"):
        connect(folder)


def test_who_only_looks_may_do_nothing_else(client: KeeperClient, folder: Path) -> None:
    put(client, "extent-1", b"one")
    viewer = KeeperClient(folder)
    for call in (
        viewer.take_all,
        partial(viewer.leave, gives_back=True),
        lambda: viewer.drop(["extent-1"]),
        viewer.leave,
    ):
        with pytest.raises(KeeperError, match="has sent no hello"):
            call()
    viewer.close()
    assert contents(client) == {"extent-1": b"one"}


def step_until(keeper: Keeper, condition: Callable[[], object]) -> None:
    for _ in range(100):
        if condition():
            return
        keeper.step(0.01)
    pytest.fail("the keeper has not come to it")


def test_it_ends_a_while_after_its_last_service(running: Running, folder: Path, clock: FakeClock) -> None:
    client = connect(folder)
    clock.advance(10 * KEEP_TIMEOUT)
    assert look(folder).seconds_left is None, "there is a service"
    client.close()
    eventually(lambda: look(folder).seconds_left is not None)
    clock.advance(KEEP_TIMEOUT - 1)
    assert look(folder).seconds_left == 1
    clock.advance(1)
    eventually(lambda: running.keeper.ended == "timeout")


def test_who_looks_does_not_keep_it_alive(running: Running, folder: Path, clock: FakeClock) -> None:
    with connect_to(folder, 5.0) as viewer:
        clock.advance(KEEP_TIMEOUT - 100)
        assert ask(viewer, {"do": "list", "start": 0})["seconds_left"] == 100
        running.stop()
        clock.advance(100)
        assert not running.keeper.step(0)


def test_it_ends_when_it_is_told_and_lets_go_of_everything(running: Running, folder: Path) -> None:
    before = len(open_descriptors())
    client = connect(folder)
    put(client, "extent-1", b"one")
    client.leave(gives_back=True)
    running.close()
    assert running.keeper.ended == "end"
    assert len(open_descriptors()) < before
    running.keeper.close()


@pytest.fixture
def staying(folder: Path, clock: FakeClock) -> Iterator[Running]:
    running = Running(folder, clock, stays=True)
    yield running
    running.close()


def test_a_keeper_that_stays_lets_go_a_while_after_its_last_service(
    staying: Running, folder: Path, clock: FakeClock
) -> None:
    client = connect(folder)
    put(client, "extent-1", b"one")
    client.leave()
    eventually(lambda: look(folder).seconds_left is not None)
    clock.advance(KEEP_TIMEOUT - 1)
    assert (look(folder).seconds_left, look(folder).labels) == (1.0, frozenset({"extent-1"}))
    clock.advance(1)
    eventually(lambda: not look(folder).labels)
    assert look(folder).seconds_left is None, "it sleeps until the next service comes"
    assert staying.keeper.ended is None


def test_a_keeper_that_stays_lets_go_when_it_is_told_and_serves_the_next_service(
    staying: Running, folder: Path
) -> None:
    for _ in range(2):
        client = connect(folder)
        assert contents(client) == {}
        put(client, "extent-1", b"one")
        client.leave(gives_back=True)


def test_an_answer_that_cannot_be_read_leaves_no_descriptor_open(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, open("/dev/null") as sent:
        monkeypatch.setattr("kvstow_service.node.survival.keeperclient.connect", lambda *_: ours)
        client = KeeperClient(folder)
        socket.send_fds(theirs, [b"garbage"], [sent.fileno()])
        before = len(open_descriptors())
        with pytest.raises(KeeperError, match="cannot be read"):
            client.take_welcome()
        assert len(open_descriptors()) == before
        client.close()


def exchange(folder: Path, *messages: bytes, fds: tuple[int, ...] = ()) -> bytes:
    """Its last answer to packets that no client sends; nothing where it closed the connection."""
    peer = connect_to(folder, 5.0)
    data = b""
    try:
        for message in messages:
            socket.send_fds(peer, [message], fds)
            data = peer.recv(1 << 16)
    except (BrokenPipeError, ConnectionResetError):
        data = b""
    finally:
        peer.close()
    return data


@pytest.mark.parametrize(
    "message",
    [
        b"x",
        b"KVK1",
        b"KVK1[]",
        b"KVK1" + b"[" * 20_000,
        b'KVK1{"do":"burn"}',
        b"KVK1{}",
        b'KVK1{"do":"hello","version":1}',
        b'KVK1{"do":"hello","version":1,"life":""}',
        b'KVK1{"do":"list"}',
        b'KVK1{"do":"list","start":-1}',
        b'KVK1{"do":"list","start":true}',
        b'KVK1{"do":"list","start":"0"}',
        b'KVK1{"do":"list","start":0}' + b" " * 70_000,
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 100,
    ],
)
def test_garbage_closes_the_connection_that_sent_it_and_is_counted(
    client: KeeperClient, folder: Path, message: bytes
) -> None:
    put(client, "extent-1", b"one")
    before = len(open_descriptors())
    with memfd(b"") as fd:
        assert exchange(folder, message, fds=(fd, fd)) == b""
    assert contents(client) == {"extent-1": b"one"}
    assert len(open_descriptors()) == before, "descriptors that came with it are closed"
    assert look(folder).refused == 1


@pytest.mark.parametrize(
    "request_",
    [
        {"do": "put", "labels": []},
        {"do": "put", "labels": ["a", "a"]},
        {"do": "put", "labels": ["a", "b"]},
        {"do": "hello", "version": 99, "life": "first"},
    ],
)
def test_a_request_that_contradicts_itself_is_refused_in_a_sentence(
    running: Running, folder: Path, request_: dict[str, Any]
) -> None:
    with greeted(folder) as peer:
        before = len(open_descriptors())
        answer = ask(peer, request_, [0])
        assert not answer["ok"]
        assert "labels came" in answer["error"] or "version" in answer["error"]
        assert ask(peer, {"do": "list", "start": 0})["labels"] == []
        assert len(open_descriptors()) == before


@pytest.mark.parametrize("request_", [{"labels": [1]}, {"labels": "a"}, {}])
def test_a_service_that_sends_garbage_is_cut_off(running: Running, folder: Path, request_: dict[str, Any]) -> None:
    with greeted(folder) as peer:
        assert ask(peer, {"do": "put", **request_}, [0]) == {}


def test_it_holds_no_more_than_its_limit(client: KeeperClient, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_HELD >= 4096
    monkeypatch.setattr("kvstow_service.node.survival.keeper.MAX_HELD", 2)
    for name in "aba":
        put(client, name, b"")
    with pytest.raises(KeeperError, match="at most 2"):
        put(client, "c", b"")


def test_random_bytes_do_not_end_it(client: KeeperClient, folder: Path) -> None:
    chance = random.Random(4)
    template = json.dumps({"do": "put", "labels": ["a"], "start": 0}).encode()
    for _ in range(300):
        message = bytearray(b"KVK1" + template)
        for _ in range(chance.randrange(4)):
            message[chance.randrange(len(message))] = chance.randrange(256)
        exchange(folder, bytes(message)[: chance.randrange(1, len(message))])
    assert contents(client) == {}


def test_too_many_connections_are_turned_away(client: KeeperClient, folder: Path) -> None:
    peers = [connect_to(folder, 5.0) for _ in range(7)]
    for peer in peers:
        assert ask(peer, {"do": "list", "start": 0})["ok"]
    assert exchange(folder, b"KVK1{}") == b""
    assert ask(peers[0], {"do": "list", "start": 0})["refused"] >= 1
    for peer in peers:
        peer.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_another_uid_is_turned_away(clock: FakeClock) -> None:
    code = "import socket; s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.connect({!r}); "
    code += 's.send(b\'KVK1\' + b\'{{"do":"list","start":0}}\'); print(len(s.recv(9)))'
    with ExitStack() as stack:
        outer = Path(stack.enter_context(tempfile.TemporaryDirectory()))  # others may not enter the folders of pytest
        folder = require_state_folder(outer / "state")
        running = Running(folder, clock)
        stack.callback(running.close)
        for path in (outer, folder):
            path.chmod(0o711)
        (folder / SOCKET).chmod(0o666)
        result = subprocess.run(
            ["/usr/bin/env", "python3", "-I", "-S", "-c", code.format(str(folder / SOCKET))],
            user=65534,
            group=65534,
            capture_output=True,
            text=True,
        )
        if "No such file" in result.stderr and "python3" in result.stderr:
            pytest.skip("no Python for other uids")
        assert result.stdout.strip() == "0" or "Reset" in result.stderr or "Broken" in result.stderr, result.stderr
        assert look(folder).refused == 1


def test_its_socket_and_folder_are_for_its_uid_only(client: KeeperClient, folder: Path) -> None:
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / SOCKET).stat().st_mode & 0o777 == 0o600


def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o750)
    with pytest.raises(KeeperError, match=r"mode 750 of uid .* allowed: mode 700"):
        require_state_folder(tmp_path / "open")


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(KeeperError, match="cannot be used"):
        require_state_folder(tmp_path / "file" / "state")


def test_a_long_path_works(tmp_path: Path, clock: FakeClock) -> None:
    folder = require_state_folder(tmp_path / ("x" * 120))
    running = Running(folder, clock)
    try:
        client = connect(folder)
        put(client, "extent-1", b"one")
        assert contents(client) == {"extent-1": b"one"}
        client.close()
    finally:
        running.close()


def test_the_lock_is_held_once(folder: Path) -> None:
    lock = try_lock(folder)
    assert lock is not None
    assert try_lock(folder) is None
    os.close(lock)
    again = try_lock(folder)
    assert again is not None
    os.close(again)


class _Full(socket.socket):
    """A listener of a process that can have no more descriptors."""

    is_full = False

    def accept(self) -> tuple[socket.socket, Any]:
        if self.is_full:
            raise OSError(errno.ENFILE, "too many open files in system")
        return super().accept()


def test_it_goes_on_when_the_machine_has_no_descriptor_left(folder: Path) -> None:
    listener = _Full(fileno=listen(folder).detach())
    listener.setblocking(False)
    keeper = Keeper(listener, KEEP_TIMEOUT)
    with connect_to(folder, 5.0) as peer:
        send(peer, {"do": "list", "start": 0}, [])
        listener.is_full = True
        assert keeper.step(0)
        listener.is_full = False
        step_until(keeper, lambda: select.select([peer], [], [], 0)[0])
    keeper.close()
