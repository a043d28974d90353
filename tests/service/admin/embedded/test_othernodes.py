"""Embedded admin servers that ranks and viewers on other nodes reach."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
from tests.service.admin.embedded.conftest import CAPACITY, PinnedRank
from tests.waiting import eventually

from kvstow.attach.calls import Report
from kvstow.control.engine import OffloadEngine
from kvstow.errors import ConfigError
from kvstow_service.admin.adminhost import AdminOptions
from kvstow_service.admin.agent import HttpLink, RankAgent
from kvstow_service.admin.tls import TlsFiles

# httpcore leaks the socket of a Unix connection that is refused
pytestmark = pytest.mark.filterwarnings(r"ignore:unclosed <socket.socket fd=\d+, family=1, type=1, proto=0>")


def on_another_node() -> None:
    """Finds no server, as there is none."""


def test_ranks_on_other_nodes_trust_the_servers_certificate(
    launch: Any, tmp_path: Path, stack: ExitStack, engine: OffloadEngine
) -> None:
    authority = trustme.CA()
    authority.issue_cert("another.name").private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "server.pem"))
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    tls = TlsFiles(tmp_path / "server.pem", client_ca=tmp_path / "ca.pem")
    admin = launch(AdminOptions(host="0.0.0.0", port=0, tls=tls), node_host="127.0.0.1")
    assert admin.addresses[0].startswith("https://")
    address = admin.address_for_ranks
    (tmp_path / "server.pem").unlink()  # as while certificates are renewed: scheduling asks on
    assert admin.address_for_ranks == address
    assert "PRIVATE KEY" not in address.certificate
    another = replace(address, certificate=trustme.CA().cert_pem.bytes().decode())
    stranger = HttpLink(another, 0)
    stack.callback(stranger.close)
    with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
        stranger.send(Report(PinnedRank().report()))
    with httpx.Client(base_url=address.url, verify=address.trusted()) as viewer:
        assert "kvstow_tls_certificate_expiry_timestamp_seconds " in viewer.get("/metrics").text
    agent = RankAgent(0, PinnedRank(), on_another_node)
    stack.callback(agent.stop)
    agent.offer(address)
    agent.start()
    eventually(lambda: engine.stats().pool.usable_slots == CAPACITY, "the report over TLS")


def test_ranks_on_other_nodes_learn_of_a_renewed_certificate(
    launch: Any, tmp_path: Path, token: Path, stack: ExitStack
) -> None:
    path = tmp_path / "server.pem"

    def issue() -> None:
        trustme.CA().issue_cert("another.name").private_key_and_cert_chain_pem.write_to_path(str(path))

    issue()
    options = AdminOptions(host="0.0.0.0", port=0, token_file=token, tls=TlsFiles(path))
    admin = launch(options, node_host="127.0.0.1")
    first = admin.address_for_ranks
    running, late = (RankAgent(0, PinnedRank(), on_another_node, interval=0.02) for _ in range(2))
    for agent in (running, late):
        stack.callback(agent.stop)
        agent.offer(first)
    running.start()
    eventually(lambda: running.sent, "the first report")
    issue()
    eventually(lambda: admin.address_for_ranks != first, "the new certificate")
    late.start()  # it has lost its connection, while no step has told it the new one
    eventually(lambda: late.failed, "a report that does not arrive")
    for agent in (running, late):
        agent.offer(admin.address_for_ranks)
        sent = agent.sent
        eventually(lambda agent=agent, sent=sent: agent.sent > sent + 2, "reports over the new certificate")
    assert running.failed == 0


def test_viewers_need_their_token_if_there_is_one(launch: Any, tmp_path: Path) -> None:
    for name in ("admin", "viewer"):
        (tmp_path / name).write_text(name)
    options = AdminOptions(port=0, token_file=tmp_path / "admin", viewer_token_file=tmp_path / "viewer")
    url = launch(options).addresses[0]
    assert httpx.get(f"{url}/v1/info").status_code == 401
    assert httpx.get(f"{url}/v1/info", headers={"Authorization": "Bearer viewer"}).status_code == 200
    with pytest.raises(ConfigError, match="viewer_token_file"):
        AdminOptions(viewer_token_file=tmp_path / "viewer")


def test_a_server_on_all_addresses_is_reached_by_the_node_host_or_the_machines_name(launch: Any, token: Path) -> None:
    admin = launch(AdminOptions(host="0.0.0.0", port=0, token_file=token))
    assert admin.address_for_ranks.url.startswith(f"http://{socket.gethostname()}:")


def test_a_loopback_address_is_not_given_to_other_nodes_and_logged_once(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    admin = make()
    assert [admin.address_for_ranks, admin.address_for_ranks] == [None, None]
    assert caplog.messages == [
        "ranks on other nodes cannot report to 127.0.0.1: set admin_host to a reachable address, and token_file"
    ]


def test_other_nodes_get_no_address_before_the_server_listens(make: Any, token: Path) -> None:
    assert make(AdminOptions(host="0.0.0.0", token_file=token)).address_for_ranks is None
