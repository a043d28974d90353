from __future__ import annotations

import socket
import stat
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvstow.errors import ConfigError, ConflictError
from kvstow_service.admin.sockets import AdminSockets, TcpAddress

ANY_PORT = TcpAddress.resolve("127.0.0.1", 0)


def listeners_on(uds: Path) -> AdminSockets:
    sockets = AdminSockets(ANY_PORT)
    with ExitStack() as undo:
        undo.callback(sockets.close)
        sockets.listen_unix(uds)
        undo.pop_all()
    return sockets


def connect(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def test_port_zero_takes_a_free_port_that_listens_at_once() -> None:
    listeners = AdminSockets(ANY_PORT)
    with socket.create_connection(("127.0.0.1", listeners.port)):
        pass
    assert listeners.url == f"http://127.0.0.1:{listeners.port}"
    listeners.close()
    listeners.close()


def test_a_name_resolves_to_ipv4_first() -> None:
    assert TcpAddress.resolve("localhost", 80).host == "127.0.0.1"


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"host is 'no\.such\.host\.invalid'; allowed: an address or a name"):
        TcpAddress.resolve("no.such.host.invalid", 80)


def test_a_taken_port_is_named() -> None:
    first = AdminSockets(ANY_PORT)
    try:
        with pytest.raises(ConflictError, match=f"cannot listen on 127.0.0.1:{first.port}: Address already in use"):
            AdminSockets(TcpAddress.resolve("127.0.0.1", first.port))
    finally:
        first.close()


def test_a_bind_to_all_addresses_is_reached_over_loopback() -> None:
    listeners = AdminSockets(TcpAddress.resolve("0.0.0.0", 0))
    assert listeners.url == f"http://127.0.0.1:{listeners.port}"
    assert listeners.addresses == (f"http://0.0.0.0:{listeners.port}",)
    listeners.close()


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")
def test_ipv6_addresses_are_written_in_brackets() -> None:
    listeners = AdminSockets(TcpAddress.resolve("::1", 0))
    assert listeners.url == f"http://[::1]:{listeners.port}"
    assert listeners.addresses == (listeners.url,)
    listeners.close()


def test_the_unix_socket_is_private_and_removed_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    listeners = listeners_on(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    connect(path)
    assert listeners.addresses[1] == f"unix:{path}"
    listeners.close()
    assert not path.exists()


def test_the_socket_of_a_killed_process_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    listeners = listeners_on(path)
    connect(path)
    listeners.close()


def test_a_live_unix_socket_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    first = listeners_on(path)
    with pytest.raises(ConflictError, match=f"cannot listen on unix:{path}: another process is listening there"):
        listeners_on(path)
    connect(path)
    first.close()


def test_a_file_that_is_no_socket_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_text("precious")
    with pytest.raises(ConflictError, match="exists and is not a socket"):
        listeners_on(path)
    assert path.read_text() == "precious"


@pytest.mark.parametrize("name", ["no/such/folder.sock", "x" * 120])
def test_a_path_that_cannot_be_bound_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConflictError, match="cannot listen on unix:"):
        listeners_on(tmp_path / name)


def test_closing_keeps_the_socket_of_a_successor(tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    first = listeners_on(path)
    path.unlink()
    second = listeners_on(path)
    first.close()
    connect(path)
    second.close()
