"""Who is at the other end, and how its end shows."""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kvstow.attach import peer
from kvstow.attach.peer import Peer, PeerCredentials, peer_of
from kvstow.errors import AttachRefusedError


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "s"))
        listening.listen()
        yield listening


class Child:
    """A process that connects to a socket and waits for its end."""

    def __init__(self, listener: socket.socket) -> None:
        self.pid = os.fork()
        if self.pid == 0:
            with suppress(BaseException), socket.socket(socket.AF_UNIX) as connecting:
                connecting.connect(listener.getsockname())
                connecting.recv(1)
            os._exit(0)
        self.connected, _ = listener.accept()

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


@pytest.fixture
def child(listener: socket.socket) -> Iterator[Child]:
    child = Child(listener)
    with child.connected:
        yield child
    with suppress(ProcessLookupError, ChildProcessError):
        child.kill()


def readable(fd: int, seconds: float) -> bool:
    return bool(select.select([fd], [], [], seconds)[0])


SO_PEERPIDFD = 77


def refuse_peer_pidfds(patch: pytest.MonkeyPatch, code: int) -> None:
    """From now on, the kernel refuses to give the pidfd of a peer."""
    getsockopt = socket.socket.getsockopt

    def refusing(connected: socket.socket, level: int, option: int, *size: int) -> int | bytes:
        if option == SO_PEERPIDFD:
            raise OSError(code, os.strerror(code))
        return getsockopt(connected, level, option, *size)

    patch.setattr(socket.socket, "getsockopt", refusing)


@pytest.fixture
def old_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_peer_pidfds(monkeypatch, errno.ENOPROTOOPT)


@pytest.fixture(params=["peer pidfd", "pidfd by number"])
def way(request: pytest.FixtureRequest) -> str:
    if request.param == "pidfd by number":
        request.getfixturevalue("old_kernel")
    else:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            try:
                os.close(ours.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD))
            except OSError:
                pytest.skip("needs Linux 6.5")
    return str(request.param)


def test_the_end_of_the_process_makes_its_pidfd_readable(child: Child, way: str) -> None:
    found = peer_of(child.connected)
    assert (found.pid, found.uid, found.gid) == (child.pid, os.getuid(), os.getgid())
    assert found.pidfd is not None
    assert not os.get_inheritable(found.pidfd)
    assert not found.has_ended()
    child.kill()
    assert readable(found.pidfd, 10)
    assert found.has_ended()
    assert not found.kill()
    found.close()
    found.close()
    assert not found.has_ended()


def test_the_peer_can_be_killed(child: Child) -> None:
    found = peer_of(child.connected)
    assert found.kill()
    assert os.waitpid(child.pid, 0)[1] == signal.SIGKILL
    assert found.has_ended()
    found.close()


Sent = list[tuple[int, int]]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    """The signals that would have been sent."""
    found: Sent = []
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda pidfd, number: found.append((pidfd, number)))
    return found


def test_this_process_is_not_killed_whoever_names_it(sent: Sent) -> None:
    """As when something has put the service's own pidfd among the records of workers."""
    own = Peer(0, os.geteuid(), os.getegid(), os.pidfd_open(os.getpid()))
    assert not own.kill()
    assert sent == []
    own.close()


def test_a_process_of_another_user_is_not_killed(child: Child, sent: Sent) -> None:
    recorded = Peer(child.pid, os.geteuid() + 1, os.getegid(), os.pidfd_open(child.pid))
    assert not recorded.kill()
    assert sent == []
    recorded.close()


def test_a_process_is_not_taken_for_a_later_one_with_its_number(
    child: Child, sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_text = Path.read_text

    def read_and_kill(path: Path) -> str:
        found = read_text(path)
        if path.name == "status":
            child.kill()
        return found

    monkeypatch.setattr(Path, "read_text", read_and_kill)
    recorded = Peer(child.pid, os.geteuid(), os.getegid(), os.pidfd_open(child.pid))
    assert not recorded.kill()
    assert sent == []
    recorded.close()


def test_a_process_that_is_not_visible_is_not_killed(child: Child, sent: Sent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "pid_of", lambda pidfd: 0)
    recorded = Peer(0, os.geteuid(), os.getegid(), os.pidfd_open(child.pid))
    assert not recorded.kill()
    assert sent == []
    recorded.close()


def test_a_process_that_has_ended_is_refused_or_seen_to_have_ended(child: Child, way: str) -> None:
    """A kernel may still give out the pidfd of a process that has ended."""
    child.kill()
    with suppress(AttachRefusedError):
        found = peer_of(child.connected)
        assert found.has_ended()
        found.close()


def test_a_number_that_was_given_to_another_process_is_not_believed(child: Child, old_kernel: None) -> None:
    child.kill()
    opened: list[int] = []

    def open_own(pid: int) -> int:
        opened.append(os.pidfd_open(os.getpid()))
        return opened[-1]

    with pytest.raises(AttachRefusedError, match="has ended"):
        peer_of(child.connected, open_pidfd=open_own)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened[0])


def test_without_a_pidfd_the_process_is_refused_unless_its_eof_is_trusted(child: Child, old_kernel: None) -> None:
    def forbidden(pid: int) -> int:
        raise PermissionError(errno.EPERM, "no")

    with pytest.raises(AttachRefusedError, match="--trust-eof SECONDS") as caught:
        peer_of(child.connected, open_pidfd=forbidden)
    assert caught.value.reason == "no_pidfd"
    trusted = peer_of(child.connected, needs_pidfd=False, open_pidfd=forbidden)
    assert trusted.pidfd is None
    assert not trusted.kill()


def test_a_process_of_another_pid_namespace_has_no_number(
    child: Child, old_kernel: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "credentials_of", lambda connected: PeerCredentials(0, os.geteuid(), os.getegid()))
    found = peer_of(child.connected, needs_pidfd=False)
    assert found.pidfd is None
    assert not found.has_ended()


def test_two_connections_of_one_process_are_known_as_such(listener: socket.socket, child: Child, way: str) -> None:
    """Also where its number is not visible, if each process has a pidfd inode of its own (Linux 6.9)."""
    first, again, other = peer_of(child.connected), peer_of(child.connected), Child(listener)
    stranger = peer_of(other.connected)
    try:
        assert first.is_same_process(again)
        assert not first.is_same_process(stranger)
        assert not first.is_same_process(Peer(first.pid, 0, 0, None))
        first.pid = again.pid = stranger.pid = 0
        assert not first.is_same_process(stranger)
        assert first.pidfd is not None
        assert stranger.pidfd is not None
        if os.fstat(first.pidfd).st_ino != os.fstat(stranger.pidfd).st_ino:
            assert first.is_same_process(again)
        child.kill()
        assert not first.is_same_process(again)
    finally:
        for found in (first, again, stranger):
            found.close()
        other.kill()
        other.connected.close()


def test_a_user_whom_the_kernel_cannot_name_is_refused(child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    """Users of other namespaces that have no number here all have this one, and must not meet in one pool."""
    monkeypatch.setattr(peer, "overflow_uid", os.geteuid)
    with pytest.raises(AttachRefusedError, match="stands for every user that the service's") as refused:
        peer_of(child.connected)
    assert refused.value.reason == "uid"


@pytest.mark.parametrize("way", ["peer", "open"])
def test_a_service_without_descriptors_says_so(child: Child, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """And not that the process has ended, or that the kernel is too old."""

    def full(pid: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    refuse_peer_pidfds(monkeypatch, errno.EMFILE if way == "peer" else errno.ENOPROTOOPT)
    with pytest.raises(AttachRefusedError, match="EMFILE: Too many open files") as refused:
        peer_of(child.connected, open_pidfd=full)
    assert refused.value.reason == "no_descriptors"


def test_a_process_that_has_ended_is_gone_also_for_a_peer_that_is_closed() -> None:
    with subprocess.Popen(["true"]) as process:
        peer = Peer(process.pid, os.getuid(), os.getgid(), None)
    assert (peer.has_ended(), peer.is_gone()) == (False, True)
    assert not Peer(os.getpid(), os.getuid(), os.getgid(), None).is_gone()
    assert not Peer(0, os.getuid(), os.getgid(), None).is_gone(), "nobody sees it"
