"""Admin servers of engines in this process, as an inference engine holds them; agents here and in other processes."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from kvstow.config import EngineConfig
from kvstow.control.engine import OffloadEngine
from kvstow.errors import ConfigError
from kvstow.messages import DesiredState, RankReport
from kvstow_api import app
from kvstow_api.client import ApiError, calls
from kvstow_service.admin import adminhost
from kvstow_service.admin import embedded as embedded_module
from kvstow_service.admin.adminoptions import AdminOptions
from kvstow_service.admin.agent import RankAgent
from kvstow_service.admin.embedded import EmbeddedAdmin
from kvstow_service.admin.rendezvous import Rendezvous
from kvstow_service.admin.server import AdminServer, _EmbeddedUvicorn
from kvstow_service.admin.sockets import AdminSockets, TcpAddress
from kvstow_service.admin.tls import TlsFiles

# httpcore leaks the socket of a Unix connection that is refused
pytestmark = pytest.mark.filterwarnings(r"ignore:unclosed <socket.socket fd=\d+, family=1, type=1, proto=0>")

SLOT = 4096
CAPACITY = 8
ANY_PORT = AdminOptions(port=0)


class PinnedRank:
    """A rank that has pinned everything, and remembers what is wanted of it."""

    def __init__(self, rank: int = 0) -> None:
        num_bytes = CAPACITY * SLOT
        self._report = RankReport(
            rank=rank,
            boot_id=f"boot-{rank}",
            state="ready",
            slot_bytes=SLOT,
            pinned_slots=CAPACITY,
            target_slots=CAPACITY,
            pinned_bytes=num_bytes,
            target_bytes=num_bytes,
            sender="process",
            number=0,
        )
        self.applied: list[DesiredState] = []

    def report(self) -> RankReport:
        self._report = replace(self._report, number=self._report.number + 1)
        return self._report

    def apply(self, desired: DesiredState) -> None:
        self.applied.append(desired)

    def add_listener(self, callback: Callable[[], None]) -> None:
        """It never changes."""


@pytest.fixture(autouse=True)
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return {"XDG_RUNTIME_DIR": str(tmp_path)}


@pytest.fixture
def engine() -> OffloadEngine:
    return OffloadEngine(EngineConfig(slot_bytes=SLOT, capacity_slots=CAPACITY))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def make(engine: OffloadEngine, environ: dict[str, str], stack: ExitStack) -> Callable[..., EmbeddedAdmin]:
    """Makes servers, which are stopped at the end."""

    def make_admin(options: AdminOptions = ANY_PORT, **changes: Any) -> EmbeddedAdmin:
        given = {"identity": "engine", "mode": "vllm", "max_capacity_slots": CAPACITY, "environ": environ}
        admin = EmbeddedAdmin(changes.pop("engine", engine), options, **{**given, **changes})
        stack.callback(admin.stop)
        return admin

    return make_admin


@pytest.fixture
def launch(make: Any, eventually: Any) -> Callable[..., EmbeddedAdmin]:
    """Starts a server, and waits until it answers."""

    def launch_admin(*args: Any, **changes: Any) -> EmbeddedAdmin:
        admin: EmbeddedAdmin = make(*args, **changes)
        admin.start()
        eventually(lambda: admin.addresses or admin.failure, "an address")
        assert admin.failure is None
        return admin

    return launch_admin


@pytest.fixture
def report(environ: dict[str, str], stack: ExitStack) -> Callable[..., RankAgent]:
    """Starts an agent of a pinned rank, which looks for the server of `identity`."""

    def start_agent(identity: str = "engine", interval: float = 0.02) -> RankAgent:
        agent = RankAgent(0, PinnedRank(), Rendezvous(identity, environ), interval=interval)
        agent.start()
        stack.callback(agent.stop)
        return agent

    return start_agent


@pytest.fixture
def taken(stack: ExitStack) -> Callable[[int], None]:
    """Listens on a port for as long as the test runs."""

    def take(port: int) -> None:
        stack.callback(AdminSockets(TcpAddress.resolve("127.0.0.1", port)).close)

    return take


def over(uds: Path) -> httpx.Client:
    return httpx.Client(base_url="http://kvstow", transport=httpx.HTTPTransport(uds=str(uds)))


def uds_of(admin: EmbeddedAdmin) -> Path:
    (address,) = (address for address in admin.addresses if address.startswith("unix:"))
    return Path(address.removeprefix("unix:"))


def free_ports(count: int) -> int:
    """The first of `count` ports in a row that are free."""
    for first in range(20_000, 30_000, count):
        with ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            return first
    raise AssertionError("no free ports")


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
    create_app = app.create_app

    def create(context: Any) -> Any:
        seen.append(sys.getswitchinterval())
        return create_app(context)

    monkeypatch.setattr(adminhost, "create_app", create)
    launch()
    assert seen == [pytest.approx(0.0005)]
    assert sys.getswitchinterval() == usual


def test_start_returns_while_the_server_is_still_imported(
    make: Any, monkeypatch: pytest.MonkeyPatch, eventually: Any
) -> None:
    entered, release = threading.Event(), threading.Event()
    create_app = app.create_app

    def create_slowly(context: Any) -> Any:
        entered.set()
        assert release.wait(30)
        return create_app(context)

    monkeypatch.setattr(adminhost, "create_app", create_slowly)
    admin = make()
    admin.start()
    assert entered.wait(30)
    assert (admin.addresses, admin.failure) == ((), None)
    release.set()
    eventually(lambda: admin.addresses, "an address")


def test_the_server_reports_its_addresses_and_versions(
    launch: Any, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.INFO, "kvstow.admin")
    admin = launch(settings={"cpu_bytes_to_use": 1}, build={"vllm": "0.32.0"})
    tcp, uds = admin.addresses
    assert f"KVStow admin server on {tcp} and {uds}" in caplog.messages
    for client in (httpx.Client(base_url=tcp), over(uds_of(admin))):
        with client:
            info = client.get("/v1/info").json()
            assert (info["mode"], info["addresses"], info["settings"]) == ("vllm", [tcp, uds], {"cpu_bytes_to_use": 1})
            assert info["build"]["vllm"] == "0.32.0"


def test_the_engine_is_ticked(launch: Any, engine: OffloadEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    ticked = threading.Event()
    monkeypatch.setattr(engine, "tick", ticked.set)
    admin = launch()
    assert ticked.wait(30)
    assert "[+]ticker ok" in httpx.get(admin.addresses[0] + "/readyz?verbose").text


def test_a_rank_that_starts_first_reports_when_the_server_is_up(
    make: Any, report: Any, engine: OffloadEngine, eventually: Any, caplog: pytest.LogCaptureFixture
) -> None:
    agent = report()
    admin = make()
    admin.start()
    eventually(lambda: engine.stats().pool.usable_slots == CAPACITY, "the rank's slots")
    assert agent.stats.failed == 0
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_rank_in_another_process_reports(
    launch: Any, engine: OffloadEngine, eventually: Any, environ: dict[str, str], stack: ExitStack
) -> None:
    code = """
import sys
from kvstow_service.admin.agent import RankAgent
from kvstow_service.admin.rendezvous import Rendezvous
from kvstow_service.replay.simulated import SimulatedWorker
class Rank(SimulatedWorker):
    def add_listener(self, callback): pass
RankAgent(0, Rank(0, 4096, 8), Rendezvous("engine"), interval=0.02).start()
sys.stdin.read()
"""
    path = ":".join(filter(None, sys.path))
    child = subprocess.Popen([sys.executable, "-c", code], env={**environ, "PYTHONPATH": path}, stdin=subprocess.PIPE)
    stack.callback(child.communicate)
    launch()
    eventually(lambda: engine.readiness().usable_slots == 8, "the other process's report")


def test_the_ranks_need_no_tcp_and_no_token_of_the_file(
    launch: Any, report: Any, eventually: Any, tmp_path: Path
) -> None:
    """The server listens where agents do not look, and everybody else needs the file's token."""
    token = tmp_path / "token"
    token.write_text("of-people")
    admin = launch(AdminOptions(host="0.0.0.0", port=0, token_file=token))
    agent = report()
    eventually(lambda: agent.stats.sent, "a report")
    with over(uds_of(admin)) as client:
        refused = client.put("/v1/drain", json={})
        allowed = client.put("/v1/drain", json={}, headers={"Authorization": "Bearer of-people"})
        agents = Rendezvous("engine", {"XDG_RUNTIME_DIR": str(tmp_path)})()
        assert agents is not None
        forbidden = client.put("/v1/drain", json={}, headers={"Authorization": f"Bearer {agents.token}"})
    assert (refused.status_code, forbidden.status_code) == (401, 403)
    assert allowed.status_code in (200, 202)


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
    launch: Any, taken: Any, report: Any, eventually: Any, engine: OffloadEngine, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_ports(16)
    for number in range(16):
        taken(port + number)
    admin = launch(AdminOptions(port=port))
    assert [address.partition(":")[0] for address in admin.addresses] == ["unix"]
    agent = report()
    eventually(lambda: agent.stats.sent, "a report")
    words = f"the admin server has no TCP socket: ports {port} to {port + 15} of 127.0.0.1 are taken"
    assert words in caplog.messages
    assert engine.stats().faults.errors["admin_server"] == 1


def test_an_address_of_another_machine_leaves_the_unix_socket(launch: Any, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("t")
    admin = launch(AdminOptions(host="192.0.2.1", port=9595, token_file=token))
    assert [address.partition(":")[0] for address in admin.addresses] == ["unix"]
    assert admin.address_for_remote_ranks is None


def test_operators_can_have_their_own_unix_socket(launch: Any, tmp_path: Path) -> None:
    uds = tmp_path / "people.sock"
    launch(AdminOptions(port=0, uds=uds))
    with over(uds) as client:
        assert client.get("/livez").status_code == 200


def test_the_server_does_without_sockets_that_cannot_be_opened(
    launch: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither a place for agents nor the socket for people."""
    file = tmp_path / "file"
    file.write_text("")
    (tmp_path / f"kvstow-{os.geteuid()}").write_text("")
    admin = launch(AdminOptions(port=0, uds=file))
    assert httpx.get(admin.addresses[0] + "/livez").status_code == 200
    assert len(admin.addresses) == 1
    starts = [message.partition(":")[0] for message in caplog.messages]
    assert "the admin server cannot be reached by this machine's ranks" in starts
    assert "the admin server does not listen on admin_uds" in starts


def test_without_any_socket_the_host_continues(
    make: Any, taken: Any, eventually: Any, tmp_path: Path, engine: OffloadEngine
) -> None:
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


@pytest.mark.parametrize("error", [ModuleNotFoundError("No module named 'fastapi'"), ValueError("odd")])
def test_a_server_that_cannot_be_built_does_not_reach_the_host(
    make: Any,
    monkeypatch: pytest.MonkeyPatch,
    eventually: Any,
    engine: OffloadEngine,
    caplog: pytest.LogCaptureFixture,
    environ: dict[str, str],
    error: Exception,
) -> None:
    def fail(context: Any) -> Any:
        raise error

    monkeypatch.setattr(adminhost, "create_app", fail)
    admin = make()
    admin.start()
    eventually(lambda: admin.failure, "the failure")
    assert str(error) in admin.failure
    assert f"{admin.failure}; the engine continues without it" in caplog.messages
    assert engine.stats().faults.errors["admin_server"] == 1
    eventually(lambda: Rendezvous("engine", environ)() is None, "the end of the Unix socket")


def test_a_server_that_does_not_start_is_logged_once(
    make: Any, monkeypatch: pytest.MonkeyPatch, eventually: Any, engine: OffloadEngine, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "lifespan.startup.failed", "message": "no"})

    monkeypatch.setattr(adminhost, "create_app", lambda context: broken)
    admin = make()
    admin.start()
    eventually(lambda: admin.failure, "the failure")
    admin.stop()
    assert engine.stats().faults.errors["admin_server"] == 1
    assert sum("the engine continues without it" in message for message in caplog.messages) == 1


def test_a_server_that_dies_is_noticed_and_its_sockets_are_closed(
    launch: Any,
    report: Any,
    monkeypatch: pytest.MonkeyPatch,
    eventually: Any,
    engine: OffloadEngine,
    caplog: pytest.LogCaptureFixture,
    environ: dict[str, str],
) -> None:
    dying = threading.Event()

    async def tick(self: _EmbeddedUvicorn, counter: int) -> bool:
        if dying.is_set():
            raise RuntimeError("the loop broke")
        return self.should_exit

    monkeypatch.setattr(_EmbeddedUvicorn, "on_tick", tick)
    admin = launch()
    port = int(admin.addresses[0].rpartition(":")[2])
    agent = report()
    eventually(lambda: agent.stats.sent, "a report")
    dying.set()
    eventually(lambda: admin.failure, "the failure")
    assert admin.failure == "the admin server ended: RuntimeError('the loop broke')"
    assert admin.addresses == ()
    assert engine.stats().faults.errors["admin_server"] == 1
    eventually(lambda: agent.stats.failing, "a report that fails")
    eventually(lambda: Rendezvous("engine", environ)() is None, "the end of the Unix socket")
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
    admin = launch(AdminOptions(port=0, uds=tmp_path / "people.sock"))
    admin.stop()
    admin.stop()
    assert (admin.addresses, admin.failure) == ((), None)
    assert [path for path in tmp_path.rglob("*") if not path.is_dir()] == []
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("kvstow")] == []


def test_one_that_was_never_started_can_be_stopped(make: Any) -> None:
    make().stop()


def test_stop_waits_for_a_start_in_progress(
    make: Any, monkeypatch: pytest.MonkeyPatch, eventually: Any, tmp_path: Path
) -> None:
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
    eventually(admin._stopping.is_set)
    release.set()
    stopper.join()
    assert (admin.addresses, admin.failure) == ((), None)
    assert [path for path in tmp_path.rglob("*") if not path.is_dir()] == []
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("kvstow")] == []


def test_stop_before_the_import_opens_nothing(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded_module, "_HEAD_START_SECONDS", 60.0)
    monkeypatch.setattr(AdminSockets, "listen_unix", lambda *args: pytest.fail("it has opened a socket"))
    admin = make()
    admin.start()
    admin.stop()
    assert admin.failure is None


def test_a_killed_host_does_not_block_its_successor(
    launch: Any, environ: dict[str, str], stack: ExitStack, tmp_path: Path
) -> None:
    code = f"""
import os
from pathlib import Path
from kvstow.config import EngineConfig
from kvstow.control.engine import OffloadEngine
from kvstow_service.admin.adminoptions import AdminOptions
from kvstow_service.admin.embedded import EmbeddedAdmin
options = AdminOptions(port=0, uds=Path({str(tmp_path / "people.sock")!r}))
engine = OffloadEngine(EngineConfig(4096, 8))
admin = EmbeddedAdmin(engine, options, identity="engine", mode="vllm", max_capacity_slots=8)
admin.start()
admin._opening.join()
print(admin.addresses[0].rpartition(":")[2], flush=True)
os._exit(1)
"""
    path = ":".join(filter(None, sys.path))
    child = subprocess.run(
        [sys.executable, "-c", code],
        env={**environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 1, child.stderr
    assert (tmp_path / "people.sock").exists()
    port = int(child.stdout)
    admin = launch(AdminOptions(port=port, uds=tmp_path / "people.sock"))
    assert admin.addresses[0] == f"http://127.0.0.1:{port}"
    assert len(admin.addresses) == 3


def test_two_engines_in_one_process_have_separate_servers(
    launch: Any, report: Any, eventually: Any, engine: OffloadEngine
) -> None:
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


def test_the_hosts_signal_handlers_are_kept(launch: Any) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    admin = launch()
    admin.stop()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


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


def on_another_node() -> None:
    """Finds no server, as there is none."""


def test_ranks_on_other_nodes_get_a_reachable_address(
    launch: Any, tmp_path: Path, stack: ExitStack, engine: OffloadEngine, eventually: Any
) -> None:
    token = tmp_path / "token"
    token.write_text("of-people")
    options = AdminOptions(host="0.0.0.0", port=0, token_file=token)
    admin = launch(options, node_host="127.0.0.1")
    port = admin.addresses[0].rpartition(":")[2]
    address = admin.address_for_remote_ranks
    assert (address.url, address.uds) == (f"http://127.0.0.1:{port}", None)
    agent = RankAgent(0, PinnedRank(), on_another_node)
    stack.callback(agent.stop)
    agent.offer(address)
    agent.start()
    eventually(lambda: engine.stats().pool.usable_slots == CAPACITY, "the report over TCP")


def test_ranks_on_other_nodes_trust_the_servers_certificate(
    launch: Any, tmp_path: Path, stack: ExitStack, engine: OffloadEngine, eventually: Any
) -> None:
    authority = trustme.CA()
    authority.issue_cert("another.name").private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "server.pem"))
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    tls = TlsFiles(tmp_path / "server.pem", client_ca=tmp_path / "ca.pem")
    admin = launch(AdminOptions(host="0.0.0.0", port=0, tls=tls), node_host="127.0.0.1")
    assert admin.addresses[0].startswith("https://")
    address = admin.address_for_remote_ranks
    (tmp_path / "server.pem").unlink()  # as while certificates are renewed: scheduling asks on
    assert admin.address_for_remote_ranks == address
    assert "PRIVATE KEY" not in address.certificate
    another = replace(address, certificate=trustme.CA().cert_pem.bytes().decode())
    with another.connect() as stranger, pytest.raises(ApiError, match="CERTIFICATE_VERIFY_FAILED"):
        stranger.send(calls.info())
    with address.connect() as agents:
        assert agents.send(calls.info()).name == "kvstow"
        assert "kvstow_tls_certificate_expiry_timestamp_seconds " in agents.send(calls.metrics())
    agent = RankAgent(0, PinnedRank(), address)
    stack.callback(agent.stop)
    agent.start()
    eventually(lambda: engine.stats().pool.usable_slots == CAPACITY, "the report over TLS")


def test_ranks_on_other_nodes_learn_of_a_renewed_certificate(
    launch: Any, tmp_path: Path, stack: ExitStack, eventually: Any
) -> None:
    path, token = tmp_path / "server.pem", tmp_path / "token"
    token.write_text("of-people")

    def issue() -> None:
        trustme.CA().issue_cert("another.name").private_key_and_cert_chain_pem.write_to_path(str(path))

    issue()
    options = AdminOptions(host="0.0.0.0", port=0, token_file=token, tls=TlsFiles(path))
    admin = launch(options, node_host="127.0.0.1")
    first = admin.address_for_remote_ranks
    running, late = (RankAgent(0, PinnedRank(), on_another_node, interval=0.02) for _ in range(2))
    for agent in (running, late):
        stack.callback(agent.stop)
        agent.offer(first)
    running.start()
    eventually(lambda: running.stats.sent, "the first report")
    issue()
    eventually(lambda: admin.address_for_remote_ranks != first, "the new certificate")
    late.start()  # it has lost its connection, while no step has told it the new one
    eventually(lambda: late.stats.failed, "a report that does not arrive")
    for agent in (running, late):
        agent.offer(admin.address_for_remote_ranks)
        sent = agent.stats.sent
        eventually(lambda agent=agent, sent=sent: agent.stats.sent > sent + 2, "reports over the new certificate")
    assert running.stats.failed == 0


def test_viewers_need_their_token_if_there_is_one(launch: Any, tmp_path: Path) -> None:
    for name in ("admin", "viewer"):
        (tmp_path / name).write_text(name)
    options = AdminOptions(port=0, token_file=tmp_path / "admin", viewer_token_file=tmp_path / "viewer")
    url = launch(options).addresses[0]
    assert httpx.get(f"{url}/v1/info").status_code == 401
    assert httpx.get(f"{url}/v1/info", headers={"Authorization": "Bearer viewer"}).status_code == 200
    with pytest.raises(ConfigError, match="viewer_token_file"):
        AdminOptions(viewer_token_file=tmp_path / "viewer")


def test_a_server_on_all_addresses_is_reached_by_the_node_host_or_the_machines_name(
    launch: Any, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("of-people")
    admin = launch(AdminOptions(host="0.0.0.0", port=0, token_file=token))
    assert admin.address_for_remote_ranks.url.startswith(f"http://{socket.gethostname()}:")


def test_a_loopback_address_is_not_given_to_other_nodes_and_logged_once(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    admin = make()
    assert [admin.address_for_remote_ranks, admin.address_for_remote_ranks] == [None, None]
    assert caplog.messages == [
        "ranks on other nodes cannot report to 127.0.0.1: set admin_host to a reachable address, and token_file"
    ]


def test_other_nodes_get_no_address_before_the_server_listens(make: Any, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("of-people")
    assert make(AdminOptions(host="0.0.0.0", token_file=token)).address_for_remote_ranks is None
