"""Admin servers of engines in this process, as an inference engine holds them; agents here and in other processes."""

from __future__ import annotations

import logging
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.service.admin.embedded.conftest import (
    CAPACITY,
    SLOT,
    free_ports,
    over,
    uds_of,
)
from tests.waiting import eventually

from kvstow.config import EngineConfig
from kvstow.control.engine import OffloadEngine
from kvstow.errors import ConfigError
from kvstow_api import app as app_module
from kvstow_service.admin.adminhost import AdminOptions
from kvstow_service.admin.embedded import EmbeddedAdmin
from kvstow_service.admin.server import AdminServer
from kvstow_service.admin.sockets import AdminSockets, TcpAddress

# httpcore leaks the socket of a Unix connection that is refused
pytestmark = pytest.mark.filterwarnings(r"ignore:unclosed <socket.socket fd=\d+, family=1, type=1, proto=0>")


def test_the_import_waits_for_the_hosts_head_start(make: Any) -> None:
    admin = make(head_start=3600.0)
    admin.start()
    assert admin.addresses == ()
    admin.stop()
    assert admin.addresses == ()
    assert admin.failure is None


@pytest.mark.parametrize("freezes", [True, False])
def test_the_heap_is_frozen_only_if_the_host_asks_for_it(
    launch: Any, monkeypatch: pytest.MonkeyPatch, freezes: bool
) -> None:
    frozen: list[bool] = []
    monkeypatch.setattr("gc.freeze", lambda: frozen.append("fastapi" in sys.modules))
    admin = launch(freezes_heap=freezes)
    assert httpx.get(f"{admin.addresses[0]}/livez").status_code == 200
    assert frozen == [True] * freezes


def test_the_switch_interval_is_short_while_the_server_is_made(launch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    usual, seen = sys.getswitchinterval(), list[float]()
    create_app = app_module.create_app

    def create(context: Any) -> Any:
        seen.append(sys.getswitchinterval())
        return create_app(context)

    monkeypatch.setattr(app_module, "create_app", create)
    launch()
    assert seen == [pytest.approx(0.0005)]
    assert sys.getswitchinterval() == usual


def test_the_server_reports_its_addresses_and_versions(launch: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvstow.admin")
    admin = launch(settings={"cpu_bytes_to_use": 1}, build={"vllm": "0.32.0"})
    tcp, uds = admin.addresses
    assert f"KVStow admin server on {tcp} and {uds}" in caplog.messages
    for client in (httpx.Client(base_url=tcp), over(uds_of(admin))):
        with client:
            info = client.get("/v1/info").json()
            assert (info["mode"], info["addresses"], info["settings"]) == ("vllm", [tcp, uds], {"cpu_bytes_to_use": 1})
            assert info["build"]["vllm"] == "0.32.0"


def test_the_ranks_need_no_tcp_and_no_token_of_the_file(launch: Any, report: Any, token: Path) -> None:
    """The server listens where agents do not look. People need the file's token there, and none on the Unix socket."""
    admin = launch(AdminOptions(host="0.0.0.0", port=0, token_file=token))
    agent = report()
    eventually(lambda: agent.sent, "a report")
    with over(uds_of(admin)) as client:
        local = client.put("/v1/drain", json={})
        url = f"http://127.0.0.1:{admin.addresses[0].rpartition(':')[2]}/v1/drain"
        refused = httpx.put(url, json={})
        allowed = httpx.put(url, json={}, headers={"Authorization": "Bearer of-people"})
        address = admin.address_for_ranks
        assert address is not None
        forbidden = client.put("/v1/drain", json={}, headers={"Authorization": f"Bearer {address.token}"})
    assert (refused.status_code, forbidden.status_code) == (401, 403)
    assert uds_of(admin).as_posix() in refused.json()["detail"]
    assert {local.status_code, allowed.status_code} <= {200, 202}


@pytest.mark.parametrize("error", [ModuleNotFoundError("No module named 'fastapi'"), ValueError("odd")])
def test_a_server_that_cannot_be_built_does_not_reach_the_host(
    make: Any,
    monkeypatch: pytest.MonkeyPatch,
    engine: OffloadEngine,
    caplog: pytest.LogCaptureFixture,
    report: Any,
    error: Exception,
) -> None:
    def fail(context: Any) -> Any:
        raise error

    monkeypatch.setattr(app_module, "create_app", fail)
    admin = make()
    admin.start()
    eventually(lambda: admin.failure, "the failure")
    assert str(error) in admin.failure
    assert f"{admin.failure}; the engine continues without it" in caplog.messages
    assert engine.stats().faults.errors["admin_server"] == 1
    agent = report()
    eventually(lambda: agent.sent, "a report to an engine without an admin server")


def test_a_server_that_does_not_start_is_logged_once(
    make: Any, monkeypatch: pytest.MonkeyPatch, engine: OffloadEngine, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "lifespan.startup.failed", "message": "no"})

    monkeypatch.setattr(app_module, "create_app", lambda context: broken)
    admin = make()
    admin.start()
    eventually(lambda: admin.failure, "the failure")
    admin.stop()
    assert engine.stats().faults.errors["admin_server"] == 1
    assert sum("the engine continues without it" in message for message in caplog.messages) == 1


def test_a_server_that_dies_is_noticed_and_its_sockets_are_closed(
    launch: Any, report: Any, monkeypatch: pytest.MonkeyPatch, engine: OffloadEngine
) -> None:
    dying = threading.Event()

    async def tick(self: AdminServer, counter: int) -> bool:
        if dying.is_set():
            raise RuntimeError("the loop broke")
        return self.should_exit

    monkeypatch.setattr(AdminServer, "on_tick", tick)
    admin = launch()
    port = int(admin.addresses[0].rpartition(":")[2])
    agent = report()
    eventually(lambda: agent.sent, "a report")
    dying.set()
    eventually(lambda: admin.failure, "the failure")
    assert admin.failure == "the admin server ended: RuntimeError('the loop broke')"
    assert admin.addresses == ()
    assert engine.stats().faults.errors["admin_server"] == 1
    sent = agent.sent
    eventually(lambda: agent.sent > sent + 1, "reports without the server")
    assert agent.failed == 0
    AdminSockets(TcpAddress.resolve("127.0.0.1", port)).close()
    admin.stop()


def test_a_thread_that_cannot_start_does_not_reach_the_host(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    admin = make()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        admin.start()
    assert "can't start new thread" in admin.failure


def test_stop_is_idempotent_and_leaves_nothing_behind(launch: Any, tmp_path: Path) -> None:
    admin = launch(AdminOptions(port=0))
    admin.stop()
    admin.stop()
    assert_nothing_is_left(admin, tmp_path)


def test_one_that_was_never_started_can_be_stopped(make: Any) -> None:
    make().stop()


def test_stop_waits_for_a_start_in_progress(make: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    entered, release = threading.Event(), threading.Event()
    start = AdminServer.start

    def start_slowly(server: AdminServer) -> None:
        entered.set()
        assert release.wait(30)
        start(server)

    monkeypatch.setattr(AdminServer, "start", start_slowly)
    admin = make()
    admin.start()
    assert entered.wait(30)
    stopper = threading.Thread(target=admin.stop)
    stopper.start()
    stopper.join(0.1)
    assert stopper.is_alive()
    release.set()
    stopper.join()
    assert_nothing_is_left(admin, tmp_path)


def assert_nothing_is_left(admin: EmbeddedAdmin, folder: Path) -> None:
    assert (admin.addresses, admin.failure) == ((), None)
    assert [path for path in folder.rglob("*") if not path.is_dir()] == []
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("kvstow")] == []


def test_two_engines_in_one_process_have_separate_servers(launch: Any, report: Any, engine: OffloadEngine) -> None:
    other = OffloadEngine(EngineConfig(slot_bytes=SLOT, capacity_slots=CAPACITY))
    port = free_ports(16)
    first = launch(AdminOptions(port=port), identity="e_dp0")
    second = launch(AdminOptions(port=port + 1), identity="e_dp1", engine=other)
    report("e_dp1")
    eventually(lambda: other.stats().pool.usable_slots, "the slots of the second engine")
    assert engine.stats().pool.usable_slots == 0
    ids = [httpx.get(admin.addresses[0] + "/v1/info").json()["engine_id"] for admin in (first, second)]
    assert ids == [engine.engine_id, other.engine_id]
    assert second.addresses[0].endswith(f":{port + 1}")
    first.stop()
    assert httpx.get(second.addresses[0] + "/livez").status_code == 200


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"host": "0.0.0.0"}, "host 0.0.0.0 is reachable from other machines: set token_file or tls_client_ca"),
        ({"port": 65536}, r"port is 65536; allowed: 0 \(any free port\) to 65535"),
        ({"port": True}, "port is True"),
        ({"allowed_hosts": ("ops:9595",)}, r"allowed_hosts is \('ops:9595',\); allowed: a list of host names"),
        ({"readiness_require": ("warm",)}, r"readiness_require is \('warm',\); allowed: pool and pinned"),
        ({"token_file": Path("/no/such/file")}, "token_file /no/such/file cannot be read: No such file"),
    ],
)
def test_invalid_options_are_refused_before_anything_starts(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AdminOptions(**given)
