"""The whole service in this process: run on the main thread, watched and stopped by another."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from kvstow.devices.cuda import DriverUnavailableError
from kvstow.errors import InsufficientMemoryError
from kvstow.memory.limits import HugePageLimits, MemoryLimits
from kvstow_service import standalone
from kvstow_service.replay import ranks
from kvstow_service.replay.driver import ReplayDriver
from kvstow_service.server import _EmbeddedUvicorn
from kvstow_service.settings import Settings
from kvstow_service.sockets import AdminSockets, TcpAddress
from kvstow_service.standalone import _meet_agents, public_settings, require_memory, run_service

pytestmark = pytest.mark.usefixtures("process_state")

BASE: dict[str, Any] = {
    "port": 0,
    "pool_size": "512KiB",
    "slot_size": "16KiB",
    "pin_pause": "0",
    "shutdown_delay": "0",
    "log_format": "json",
}


class Watcher(threading.Thread):
    """Waits until the service answers on its Unix socket, then runs `visit`, then sends SIGTERM."""

    def __init__(self, uds: Path, visit: Callable[[httpx.Client], None], eventually: Any) -> None:
        super().__init__()
        self._uds, self._visit, self._eventually = uds, visit, eventually
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with httpx.Client(base_url="http://kvstow", transport=httpx.HTTPTransport(uds=str(self._uds))) as client:
                self._eventually(lambda: _listens(self._uds), "the Unix socket")
                self._eventually(lambda: _answers(client), "an answer of the service")
                self._visit(client)
        except BaseException as error:  # noqa: BLE001 - raised again on the test's thread
            self.error = error
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


def run_and_visit(settings: Settings, visit: Callable[[httpx.Client], None], eventually: Any) -> int:
    assert settings.uds is not None
    watcher = Watcher(settings.uds, visit, eventually)
    watcher.start()
    status = run_service(settings)
    watcher.join()
    if watcher.error is not None:
        raise watcher.error
    return status


def write_trace(path: Path, requests: int) -> Path:
    lines = [
        {"timestamp": number, "input_length": 2048, "output_length": 8, "hash_ids": [0, 1, 2 + number, 1000 + number]}
        for number in range(requests)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_it_serves_until_a_signal_and_leaves_nothing_behind(
    tmp_path: Path, eventually: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    names = {"allowed_hosts": ("ops.example",), "readiness_require": ("pinned",)}
    settings = Settings(**BASE, **names, uds=tmp_path / "admin.sock", ranks=2)

    def visit(client: httpx.Client) -> None:
        eventually(lambda: client.get("/readyz").status_code == 200, "a pinned pool")
        readiness = client.get("/v1/readiness").json()
        assert (readiness["state"], readiness["usable_slots"], len(readiness["ranks"])) == ("ready", 32, 2)
        info = client.get("/v1/info").json()
        assert info["settings"]["pool_size"] == 512 << 10
        assert info["addresses"][1:] == [f"unix:{tmp_path / 'admin.sock'}"]
        assert str(tmp_path) not in json.dumps(info["settings"])
        for name, status in (("evil.example", 421), ("ops.example", 200), ("localhost", 200)):
            assert httpx.get(f"{info['addresses'][0]}/livez", headers={"Host": name}).status_code == status

    assert run_and_visit(settings, visit, eventually) == 0
    assert not (tmp_path / "admin.sock").exists()
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("kvstow")] == []
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    messages = [line["message"] for line in lines]
    assert "changes through it need no token: loopback only" in messages
    assert "pool: 2 ranks x 512 KiB in 32 slots, locked in memory (mlock)" in messages
    assert messages[-2:] == ["stopping: SIGTERM", "stopped"]
    assert "rank 1 is ready: 512 KiB of 512 KiB pinned (mlock)" in messages
    assert not [line for line in lines if line["level"] in ("warning", "error")]


def test_with_tls_and_guarded_reading_the_ranks_still_report(
    tmp_path: Path, eventually: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    authority = trustme.CA()
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "server.pem"))
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    (tmp_path / "viewer").write_text("viewer")
    files = {"tls_cert": tmp_path / "server.pem", "tls_client_ca": tmp_path / "ca.pem"}
    settings = Settings(
        **BASE,
        **files,
        uds=tmp_path / "admin.sock",
        viewer_token_file=tmp_path / "viewer",
        readiness_require=("pinned",),
    )
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)

    def visit(client: httpx.Client) -> None:
        eventually(lambda: client.get("/readyz").status_code == 200, "a pinned pool")
        viewer = {"Authorization": "Bearer viewer"}
        address = client.get("/v1/info", headers=viewer).json()["addresses"][0]
        assert httpx.get(f"{address}/livez", verify=trusting).status_code == 200
        assert httpx.get(f"{address}/v1/info", verify=trusting).status_code == 401
        assert httpx.delete(f"{address}/v1/drain", verify=trusting, headers=viewer).status_code == 403
        authority.issue_cert("ops@example.org").configure_cert(trusting)
        assert httpx.delete(f"{address}/v1/drain", verify=trusting).status_code == 200

    assert run_and_visit(settings, visit, eventually) == 0
    assert "changes through it need a token" in capfd.readouterr().err


def test_a_renewed_certificate_needs_no_restart(tmp_path: Path, eventually: Any) -> None:
    cert = tmp_path / "server.pem"

    def issue(year: int) -> ssl.SSLContext:
        authority, trusting = trustme.CA(), ssl.create_default_context()
        issued = authority.issue_cert("127.0.0.1", not_after=datetime(year, 1, 1, tzinfo=UTC))
        issued.private_key_and_cert_chain_pem.write_to_path(str(cert))
        authority.configure_trust(trusting)
        return trusting

    def told(client: httpx.Client) -> float:
        (line,) = re.findall(r"^kvstow_tls_certificate_expiry_\S+ (.*)$", client.get("/metrics").text, re.MULTILINE)
        return float(line)

    def visit(client: httpx.Client) -> None:
        address = client.get("/v1/info").json()["addresses"][0]
        assert httpx.get(f"{address}/livez", verify=first).is_success
        assert told(client) == datetime(2098, 1, 1, tzinfo=UTC).timestamp()
        second = issue(2099)

        def is_known() -> bool:
            try:
                return httpx.get(f"{address}/livez", verify=second).is_success
            except httpx.ConnectError:
                return False

        eventually(is_known, "the new certificate")
        assert told(client) == datetime(2099, 1, 1, tzinfo=UTC).timestamp()

    first = issue(2098)
    assert run_and_visit(Settings(**BASE, tls_cert=cert, uds=tmp_path / "admin.sock"), visit, eventually) == 0


def test_where_tcp_speaks_tls_the_ranks_have_a_socket_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with ExitStack() as running:
        listeners = AdminSockets(TcpAddress.resolve("127.0.0.1", 0), secure=True)
        running.callback(listeners.close)
        settings = Settings(**BASE, tls_cert=tmp_path / "server.pem")
        reached = _meet_agents(settings, listeners, running)
        assert reached.uds is not None
        assert reached.uds.is_relative_to(tmp_path)
        assert reached.uds.is_socket()
    assert list(reached.uds.parent.iterdir()) == []


def test_a_replay_can_be_the_end_and_prints_its_result(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", 40)
    assert run_service(Settings(**BASE, replay=trace, exit_after_replay=True)) == 0
    result = json.loads(capfd.readouterr().out)
    assert (result["requests"], result["blocks"], result["mismatches"]) == (40, 160, 0)
    assert result["hit_blocks"] > 0
    assert result["verified_bytes"] == result["loaded_bytes"] > 0


def test_a_signal_ends_a_replay_that_is_under_way(
    tmp_path: Path, eventually: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", 2000)
    settings = Settings(
        **{**BASE, "log_format": "text"}, uds=tmp_path / "admin.sock", replay=trace, replay_rate=20, ranks=2
    )

    def visit(client: httpx.Client) -> None:
        eventually(lambda: client.get("/v1/stats").json()["lookups"]["query_blocks"] >= 8, "traffic of the replay")

    assert run_and_visit(settings, visit, eventually) == 0
    out, err = capfd.readouterr()
    assert "mismatches      0 blocks" in out
    assert "replaying 2000 requests" in err


def test_the_service_outlives_its_replay(tmp_path: Path, eventually: Any, capfd: pytest.CaptureFixture[str]) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", 2)
    settings = Settings(**BASE, uds=tmp_path / "admin.sock", replay=trace)
    text = ""

    def ended() -> bool:
        nonlocal text
        text += capfd.readouterr().err
        return "the replay has ended; the service continues" in text

    def visit(client: httpx.Client) -> None:
        eventually(ended, "the end of the replay")
        assert client.get("/readyz").status_code == 200

    assert run_and_visit(settings, visit, eventually) == 0


def test_a_replay_that_cannot_run_is_the_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(*args: Any) -> None:
        raise InsufficientMemoryError("someone else took it")

    monkeypatch.setattr(ranks, "build_rank", refuse)
    trace = write_trace(tmp_path / "trace.jsonl", 2)
    assert run_service(Settings(**BASE, replay=trace, exit_after_replay=True)) == 1
    err = capfd.readouterr().err
    assert "rank 0 cannot be built: someone else took it" in err
    assert "the replay does not run" in err


def test_a_gpu_that_is_not_there_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> None:
        raise DriverUnavailableError("no CUDA driver on this machine")

    monkeypatch.setattr(ranks, "load_driver", refuse)
    trace = write_trace(tmp_path / "trace.jsonl", 2)
    assert run_service(Settings(**BASE, device="cuda", replay=trace, exit_after_replay=True)) == 1
    assert "rank 0 cannot be built: no CUDA driver on this machine" in capfd.readouterr().err


def test_a_replay_with_a_defect_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(ReplayDriver, "run", fail)
    trace = write_trace(tmp_path / "trace.jsonl", 2)
    assert run_service(Settings(**BASE, replay=trace, exit_after_replay=True)) == 1
    assert "the replay failed: " in capfd.readouterr().err


def test_a_server_that_ends_by_itself_ends_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    async def broken_tick(self: _EmbeddedUvicorn, counter: int) -> bool:
        raise RuntimeError("the loop broke")

    monkeypatch.setattr(_EmbeddedUvicorn, "on_tick", broken_tick)
    assert run_service(Settings(**BASE)) == 1
    assert "stopping: the admin server ended: RuntimeError" in capfd.readouterr().err


def test_memory_is_counted_over_all_ranks_and_with_the_caches() -> None:
    left = require_memory(Settings(**BASE), kv_blocks=0)
    per_rank = left // 4 * 3
    settings = Settings(**{**BASE, "pool_size": per_rank})
    with pytest.raises(InsufficientMemoryError, match=r"2 x .* of pool cannot fit: .* are needed"):
        require_memory(settings.model_copy(update={"ranks": 2}), kv_blocks=0)
    with pytest.raises(InsufficientMemoryError, match=r"1 x .* of pool and .* of KV cache cannot fit: .* are needed"):
        require_memory(settings, kv_blocks=left // 2 // settings.slot_size)


def test_pools_in_reserved_pages_take_none_of_the_other_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, pages in {"free_hugepages": 8, "resv_hugepages": 0}.items():
        (tmp_path / name).write_text(str(pages))
    limits = HugePageLimits(own_cgroups=tmp_path / "none", pages=tmp_path)
    monkeypatch.setattr(standalone, "limits_of", {"reserved": limits}.__getitem__)
    settings = Settings(**{**BASE, "ranks": 2, "pool_size": "7MiB", "huge_pages": "reserved"})
    assert require_memory(settings, kv_blocks=1) == 16 << 20, "all that is free, whatever the KV cache takes"
    with pytest.raises(InsufficientMemoryError, match=r"2 x 9 MiB of pool cannot fit: 20 MiB are needed in reserved"):
        require_memory(settings.model_copy(update={"pool_size": 9 << 20}), kv_blocks=0)
    with pytest.raises(InsufficientMemoryError, match=r"of KV cache cannot fit: .* the machine has"):
        require_memory(settings, kv_blocks=1 << 40)


def test_without_a_readable_limit_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryLimits, "headroom", lambda self: None)
    settings = Settings(**{**BASE, "pool_size": 1 << 50})
    assert require_memory(settings, kv_blocks=1) == 1 << 50


def test_what_everybody_may_read_names_no_files(tmp_path: Path) -> None:
    paths = ("uds", "token_file", "viewer_token_file", "replay", "tls_cert", "tls_key", "tls_client_ca")
    settings = Settings(**BASE, **{name: tmp_path / name for name in paths})
    assert str(tmp_path) not in json.dumps(public_settings(settings))
