"""The whole service in this process: run on the main thread, watched and stopped by another."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
from tests.service.node.keepers import end_keeper, kinds_held
from tests.service.node.rawengine import RawEngine, key_of
from tests.waiting import eventually

from kvstow.errors import InsufficientMemoryError
from kvstow.memory.limits import RESERVE_BYTES, HugePageLimits, MemoryLimits
from kvstow_service.admin.adminhost import Ticker
from kvstow_service.admin.server import AdminServer
from kvstow_service.node import nodeprocess
from kvstow_service.node.node import Node
from kvstow_service.node.nodeprocess import public_settings, require_memory, run_service
from kvstow_service.node.settings import Settings
from kvstow_service.process.runningclock import RunningClock

pytestmark = pytest.mark.usefixtures("process_state")

MIB = 1 << 20


@pytest.fixture
def base(tmp_path: Path) -> dict[str, Any]:
    """Settings of a small service that listens below `tmp_path` and on a free port."""
    return {
        "memory": "4MiB",
        "port": 0,
        "admin_socket": tmp_path / "admin.sock",
        "attach_socket": tmp_path / "node" / "attach.sock",
        "pin_pause": "0",
        "shutdown_delay": "0",
        "log_format": "json",
    }


class Watcher(threading.Thread):
    """Waits until the service answers on its Unix socket, then runs `visit`, then sends SIGTERM. With `stops_itself`,
    `visit` sends it, unless it fails before."""

    def __init__(self, uds: Path, visit: Callable[[httpx.Client], None], *, stops_itself: bool) -> None:
        super().__init__()
        self._uds, self._visit, self._stops_itself = uds, visit, stops_itself
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with httpx.Client(base_url="http://kvstow", transport=httpx.HTTPTransport(uds=str(self._uds))) as client:
                eventually(lambda: _listens(self._uds), "the Unix socket")
                eventually(lambda: _answers(client), "an answer of the service")
                self._visit(client)
        except BaseException as error:  # noqa: BLE001 - raised again on the test's thread
            self.error = error
        if self.error is not None or not self._stops_itself:
            os.kill(os.getpid(), signal.SIGTERM)


def _listens(uds: Path) -> bool:
    """Asked first: httpcore leaks the socket of a connection that is refused."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(uds)) == 0


def _answers(client: httpx.Client) -> bool:
    try:
        return client.get("/livez").status_code == 200
    except httpx.HTTPError:
        return False


def run_and_visit(settings: Settings, visit: Callable[[httpx.Client], None], *, stops_itself: bool = False) -> int:
    watcher = Watcher(settings.admin_path, visit, stops_itself=stops_itself)
    watcher.start()
    status = run_service(settings)
    watcher.join()
    if watcher.error is not None:
        raise watcher.error
    return status


def memory_of(client: httpx.Client) -> dict[str, int]:
    found: dict[str, int] = client.get("/v1/readiness").json()["memory"]
    return found


def extents() -> list[str]:
    """The memfds of this process that are extents."""
    found = (os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.exists(entry.path))
    return [target for target in found if "kvstow-extent" in target]


def test_it_serves_until_a_signal_and_leaves_nothing_behind(
    base: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = Settings(**base, allowed_hosts=("ops.example",))

    def visit(client: httpx.Client) -> None:
        eventually(lambda: memory_of(client)["populated_bytes"] == 4 * MIB, "populated memory")
        assert memory_of(client)["target_bytes"] == 4 * MIB
        eventually(lambda: client.get("/readyz").status_code == 200, "readiness")
        assert extents()
        assert base["attach_socket"].is_socket()
        info = client.get("/v1/info").json()
        assert (info["mode"], info["settings"]["memory"]) == ("node", 4 * MIB)
        assert info["addresses"][1:] == [f"unix:{tmp_path / 'admin.sock'}"]
        assert str(tmp_path) not in json.dumps(info["settings"])
        for name, status in (("evil.example", 421), ("ops.example", 200), ("localhost", 200)):
            assert httpx.get(f"{info['addresses'][0]}/livez", headers={"Host": name}).status_code == status

    assert run_and_visit(settings, visit) == 0
    assert not (tmp_path / "admin.sock").exists()
    assert not base["attach_socket"].exists()
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("kvstow")] == []
    assert extents() == []
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    messages = [line["message"] for line in lines]
    assert "changes are taken through the Unix socket, and not over TCP" in messages
    assert f"engines attach at unix:{base['attach_socket']}" in messages
    assert "memory: 4 MiB, populated in the background" in messages
    assert "stopping: SIGTERM" in messages
    assert messages[-1] == "stopped"
    assert not [line for line in lines if line["level"] in ("warning", "error")]


def test_tls_and_guarded_reading_and_a_renewed_certificate_that_needs_no_restart(
    base: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    authority = trustme.CA()
    cert, ca, viewer_token = (tmp_path / name for name in ("server.pem", "ca.pem", "viewer"))
    authority.cert_pem.write_to_path(str(ca))
    viewer_token.write_text("viewer")
    viewer = {"Authorization": "Bearer viewer"}

    def issue(issuer: trustme.CA, year: int) -> ssl.SSLContext:
        issued = issuer.issue_cert("127.0.0.1", not_after=datetime(year, 1, 1, tzinfo=UTC))
        issued.private_key_and_cert_chain_pem.write_to_path(str(cert))
        trusting = ssl.create_default_context()
        issuer.configure_trust(trusting)
        return trusting

    def expiry(client: httpx.Client) -> float:
        metrics = client.get("/metrics", headers=viewer).text
        (line,) = re.findall(r"^kvstow_tls_certificate_expiry_\S+ (.*)$", metrics, re.MULTILINE)
        return float(line)

    def visit(client: httpx.Client) -> None:
        eventually(lambda: client.get("/readyz").status_code == 200, "readiness")
        address = client.get("/v1/info", headers=viewer).json()["addresses"][0]
        assert httpx.get(f"{address}/livez", verify=first).status_code == 200
        assert httpx.get(f"{address}/v1/info", verify=first).status_code == 401
        assert httpx.delete(f"{address}/v1/drain", verify=first, headers=viewer).status_code == 403
        authority.issue_cert("ops@example.org").configure_cert(first)
        assert httpx.delete(f"{address}/v1/drain", verify=first).status_code == 200
        assert expiry(client) == datetime(2098, 1, 1, tzinfo=UTC).timestamp()
        second = issue(trustme.CA(), 2099)

        def is_known() -> bool:
            try:
                return httpx.get(f"{address}/livez", verify=second).is_success
            except httpx.ConnectError:
                return False

        eventually(is_known, "the new certificate")
        assert expiry(client) == datetime(2099, 1, 1, tzinfo=UTC).timestamp()

    first = issue(authority, 2098)
    settings = Settings(**base, tls_cert=cert, tls_client_ca=ca, viewer_token_file=viewer_token)
    assert run_and_visit(settings, visit) == 0
    assert "changes are taken through the Unix socket, and over TCP with a token" in capfd.readouterr().err


def test_a_signal_drains_while_both_servers_answer_and_a_second_one_skips_the_wait_and_not_the_clean_up(
    base: dict[str, Any], tmp_path: Path
) -> None:
    def visit(client: httpx.Client) -> None:
        eventually(lambda: client.get("/readyz").status_code == 200, "readiness")
        os.kill(os.getpid(), signal.SIGTERM)
        eventually(lambda: "drain" in client.get("/readyz").text, "the drain")
        assert client.get("/readyz").status_code == 503
        assert client.get("/v1/readiness").json()["state"] == "draining"
        assert client.get("/livez").status_code == 200
        assert _listens(base["attach_socket"])

    assert run_and_visit(Settings(**{**base, "shutdown_delay": "3600s"}), visit) == 0
    assert not (tmp_path / "admin.sock").exists()
    assert not base["attach_socket"].exists()


@pytest.mark.parametrize("ends", [True, False])
def test_a_drain_ends_with_the_last_transfer_or_at_its_deadline(
    base: dict[str, Any], stack: ExitStack, capfd: pytest.CaptureFixture[str], ends: bool
) -> None:
    deadline = "3600s" if ends else "0.1s"
    settings = Settings(**{**base, "memory": "8MiB", "extent_size": "2MiB", "drain_deadline": deadline})

    def visit(client: httpx.Client) -> None:
        eventually(lambda: client.get("/readyz").status_code == 200, "readiness")
        engine = stack.enter_context(closing(RawEngine(settings.attach_path)))
        engine.store_all([key_of(0)])
        begun = engine.begin_store([key_of(1)])
        os.kill(os.getpid(), signal.SIGTERM)
        if ends:
            eventually(lambda: "drain" in client.get("/readyz").text, "the drain")
            engine.complete(begun.op_id)

    assert run_and_visit(settings, visit, stops_itself=True) == 0
    assert ("the service stops although 1 transfers have not ended" in capfd.readouterr().err) != ends


def test_a_server_that_ends_by_itself_ends_the_service(
    base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    async def broken_tick(self: AdminServer, counter: int) -> bool:
        raise RuntimeError("the loop broke")

    monkeypatch.setattr(AdminServer, "on_tick", broken_tick)
    state = tmp_path / "state"
    assert run_service(Settings(**base, state=state)) == 1
    assert "stopping: the admin server ended: RuntimeError" in capfd.readouterr().err
    assert kinds_held(state)["roster"] == 1, "the next service finds what a killed one leaves"
    end_keeper(state)


def test_a_node_whose_thread_fails_ends_the_service(
    base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    start = Node.start

    def start_and_break(self: Node) -> None:
        start(self)
        self.server.post(lambda: exit("far too early"))

    monkeypatch.setattr(Node, "start", start_and_break)
    state = tmp_path / "state"  # with a keeper, the end does not wait for the thread that no longer answers
    assert run_service(Settings(**base, state=state)) == 1
    assert "stopping: the attach server has failed: SystemExit" in capfd.readouterr().err
    end_keeper(state)


def test_the_server_answers_while_the_node_starts(base: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, start = threading.Event(), Node.start

    def start_slowly(self: Node) -> None:
        assert go_on.wait(30)
        start(self)

    def visit(client: httpx.Client) -> None:
        assert [client.get(path).status_code for path in ("/livez", "/readyz", "/startupz")] == [200, 503, 503]
        assert "[-]node failed: the service is starting; no engine can attach yet" in client.get("/readyz").text
        assert not _listens(base["attach_socket"])
        go_on.set()
        eventually(lambda: client.get("/readyz").status_code == 200, "readiness")
        assert client.get("/startupz").status_code == 200
        assert _listens(base["attach_socket"])

    monkeypatch.setattr(Node, "start", start_slowly)
    assert run_and_visit(Settings(**base), visit) == 0


def test_the_ticker_does_not_count_a_pause_of_the_process(
    base: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    clocks: list[object] = []

    class Noted(Ticker):
        def __init__(self, tick: Callable[[], object], **given: Any) -> None:
            clocks.append(given.get("clock"))
            super().__init__(tick, **given)

    monkeypatch.setattr(nodeprocess, "Ticker", Noted)
    assert run_and_visit(Settings(**base), lambda client: None) == 0
    assert isinstance(clocks[0], RunningClock)


def test_what_cannot_start_gives_back_what_it_took(base: dict[str, Any], tmp_path: Path) -> None:
    base["attach_socket"].parent.mkdir()
    base["attach_socket"].write_text("mine")
    with pytest.raises(Exception, match="the path exists and is not a socket"):
        run_service(Settings(**base))
    assert [path.name for path in tmp_path.iterdir()] == ["node"]
    assert base["attach_socket"].read_text() == "mine"
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("kvstow")] == []
    assert extents() == []


def limits_of_machine(tmp_path: Path, available: int, shared: int) -> MemoryLimits:
    (tmp_path / "meminfo").write_text(f"MemAvailable: {available // 1024} kB\nShmem: {shared // 1024} kB\n")
    return MemoryLimits(tmp_path / "meminfo", tmp_path / "none", tmp_path)


def test_memory_that_the_machine_cannot_have_is_refused_to_the_byte(tmp_path: Path) -> None:
    limits = limits_of_machine(tmp_path, 100 * MIB, 0)
    require_memory(100 * MIB - RESERVE_BYTES, limits)
    with pytest.raises(InsufficientMemoryError, match=r"--memory 36 MiB cannot fit: .* the machine has 100 MiB"):
        require_memory(100 * MIB - RESERVE_BYTES + 1024, limits)


def test_memory_that_an_earlier_service_has_left_is_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limits = limits_of_machine(tmp_path, 100 * MIB, 200 * MIB)
    require_memory(300 * MIB - RESERVE_BYTES, limits)
    assert "memory is short until shared memory in use is handed over or freed: 236 MiB are needed" in caplog.text
    with pytest.raises(InsufficientMemoryError):
        require_memory(300 * MIB, limits)


def test_reserved_pages_are_refused_as_such(tmp_path: Path) -> None:
    for name, pages in {"free_hugepages": 8, "resv_hugepages": 0, "nr_hugepages": 8}.items():
        (tmp_path / name).write_text(str(pages))
    limits = HugePageLimits(own_cgroups=tmp_path / "none", pages=tmp_path)
    require_memory(16 * MIB, limits)
    with pytest.raises(InsufficientMemoryError, match=r"--memory 18 MiB cannot fit: 18 MiB are needed in reserved"):
        require_memory(18 * MIB, limits)


def test_without_a_readable_limit_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryLimits, "headroom", lambda self, **kind: None)
    require_memory(1 << 50, MemoryLimits())


def test_what_everybody_may_read_names_no_files(base: dict[str, Any], tmp_path: Path) -> None:
    paths = ("token_file", "viewer_token_file", "tls_cert", "tls_key", "tls_client_ca", "state")
    tier = "mooncake://somebody@cache:6379?replicas=2"
    settings = Settings(**base, **{name: tmp_path / name for name in paths}, tier=tier)
    shown = public_settings(settings)
    assert str(tmp_path) not in json.dumps(shown)
    assert shown["tier"] == "mooncake://cache:6379?replicas=2"


def test_the_loggers_belong_to_the_service(base: dict[str, Any]) -> None:
    assert run_and_visit(Settings(**base, log_level="debug"), lambda client: None) == 0
    assert logging.getLogger("kvstow").level == logging.DEBUG
