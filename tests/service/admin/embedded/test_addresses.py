"""Where an embedded admin server listens, and what it does without."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.service.admin.embedded.conftest import free_ports
from tests.waiting import eventually

from kvstow.control.engine import OffloadEngine
from kvstow_service.admin.adminhost import AdminOptions

# httpcore leaks the socket of a Unix connection that is refused
pytestmark = pytest.mark.filterwarnings(r"ignore:unclosed <socket.socket fd=\d+, family=1, type=1, proto=0>")


def test_if_its_port_is_taken_the_server_uses_the_next(
    launch: Any, taken: Any, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_ports(16)
    taken(port)
    taken(port + 1)
    admin = launch(AdminOptions(port=port))
    assert admin.addresses[0] == f"http://127.0.0.1:{port + 2}"
    assert f"port {port} is taken: the admin server uses port {port + 2}" in caplog.messages


def test_without_a_free_port_it_serves_on_the_unix_socket_alone(
    launch: Any, taken: Any, report: Any, engine: OffloadEngine, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_ports(16)
    for number in range(16):
        taken(port + number)
    admin = launch(AdminOptions(port=port))
    assert [address.partition(":")[0] for address in admin.addresses] == ["unix"]
    agent = report()
    eventually(lambda: agent.sent, "a report")
    words = f"the admin server has no TCP socket: ports {port} to {port + 15} of 127.0.0.1 are taken"
    assert words in caplog.messages
    assert engine.stats().faults.errors["admin_server"] == 1


def test_an_address_of_another_machine_leaves_the_unix_socket(launch: Any, token: Path) -> None:
    admin = launch(AdminOptions(host="192.0.2.1", port=9595, token_file=token))
    assert [address.partition(":")[0] for address in admin.addresses] == ["unix"]
    assert admin.address_for_ranks is None


def test_without_unix_sockets_the_server_has_its_port_and_the_ranks_get_its_address(
    launch: Any, report: Any, engine: OffloadEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """There is no place for them."""
    (tmp_path / f"kvstow-{os.geteuid()}").write_text("")
    admin = launch(AdminOptions(port=0))
    assert httpx.get(admin.addresses[0] + "/livez").status_code == 200
    assert len(admin.addresses) == 1
    starts = [message.partition(":")[0] for message in caplog.messages]
    assert "the admin server has no Unix socket, so changes need a token" in starts
    eventually(lambda: admin.ranks_failure, "the failure of the ranks' socket")
    agent = report()
    agent.offer(admin.address_for_ranks)
    eventually(lambda: agent.sent, "a report over TCP")
    assert engine.readiness().usable_slots == engine.config.capacity_slots


def test_without_any_socket_the_host_continues(make: Any, taken: Any, tmp_path: Path, engine: OffloadEngine) -> None:
    (tmp_path / f"kvstow-{os.geteuid()}").write_text("")
    port = free_ports(16)
    for number in range(16):
        taken(port + number)
    admin = make(AdminOptions(port=port))
    admin.start()
    eventually(lambda: admin.failure, "the failure")
    assert "no socket can be opened" in admin.failure
    assert admin.addresses == ()
    assert engine.stats().faults.errors["admin_server"] == 3
    engine.lookup([b"key"])
