"""How commands reach their server: flags, variables, tokens, TLS, Unix sockets."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import trustme

from kvstow_api.answers import ProblemView
from kvstow_api.client import ApiError
from kvstow_service.admin.tls import ServerTls, TlsFiles
from kvstow_service.cli.connection import Connection
from kvstow_service.cli.failures import exit_code_of

ASK = ("get", "pools")
SERVER = "http://a:1"


def chosen(environ: dict[str, str], **given: str) -> Connection:
    flags = dict.fromkeys(("server", "token_file", "ca_file", "cert_file", "key_file"))
    return Connection.take({**flags, "request_timeout": 1.0, **given}, environ)


def test_a_flag_wins_over_a_variable_and_both_over_the_default() -> None:
    environ = {"KVSTOW_SERVER": "http://b:1", "KVSTOW_TOKEN_FILE": "/t", "KVSTOW_CA_FILE": "/c"}
    assert chosen(environ, server=SERVER).server == SERVER
    assert chosen(environ).server == "http://b:1"
    assert chosen({}).server == chosen({"KVSTOW_SERVER": ""}).server == "http://127.0.0.1:9595"
    assert (chosen(environ).token_file, chosen(environ).ca_file) == ("/t", "/c")
    assert chosen(environ, token_file="/flag").token_file == "/flag"
    assert (chosen({}).token_file, chosen({"KVSTOW_CA_FILE": ""}).ca_file) == (None, None)


@pytest.mark.parametrize("server", ["a:1", "ftp://a:1", "unix:"])
def test_a_server_that_is_no_url_is_refused(run: Any, server: str) -> None:
    outcome = run(*ASK, "--server", server)
    assert outcome.exit_code == 2
    assert server in outcome.stderr


def test_an_unreachable_server_is_named_with_a_hint(run: Any) -> None:
    outcome = run(*ASK, "--server", "http://127.0.0.1:1")
    assert outcome.exit_code == 1
    assert outcome.stderr.startswith("kvstow get pools: http://127.0.0.1:1 cannot be reached: ")
    assert "hint: check that KVStow's admin server runs there and is not stopped" in outcome.stderr


def test_changes_need_an_admins_token(run: Any, make_host: Any, tmp_path: Path) -> None:
    admin, viewer = tmp_path / "admin", tmp_path / "viewer"
    admin.write_text("a-token")
    viewer.write_text("v-token")
    url = make_host(token_file=admin, viewer_token_file=viewer).url
    assert run(*ASK, "--server", url).exit_code == 1
    assert run(*ASK, "--server", url, "--token-file", str(viewer)).exit_code == 0
    outcome = run("undrain", "--server", url, environ={"KVSTOW_TOKEN_FILE": str(viewer)})
    assert outcome.exit_code == 1
    assert "Forbidden" in outcome.stderr
    assert "hint: use an admin's token" in outcome.stderr
    assert run("undrain", "--server", url, environ={"KVSTOW_TOKEN_FILE": str(admin)}).exit_code == 0
    assert run("undrain", "--server", url, "--token-file", str(tmp_path / "none")).exit_code == 2


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_without_a_token_changes_go_through_the_socket_that_the_server_names(
    run: Any, make_host: Any, address: str
) -> None:
    if address == "::1" and not socket.has_dualstack_ipv6():
        pytest.skip("needs IPv6")
    assert run("bypass", "--load", "--server", make_host(address=address).url).exit_code == 0


def test_what_only_admins_see_comes_through_that_socket_too(run: Any, make_host: Any) -> None:
    outcome = run("describe", "context", "trip", "--server", make_host().url)
    assert "there is no context" in outcome.stderr, outcome.stderr


def test_the_socket_of_another_server_is_not_used(run: Any, make_host: Any, tmp_path: Path) -> None:
    """A forwarded port leads to a server of another machine, which may name a path that exists here, too."""
    uds = tmp_path / "admin.sock"
    here = make_host(uds=uds)
    elsewhere = make_host(addresses=("http://127.0.0.1:9595", f"unix:{uds}"))
    outcome = run("bypass", "--load", "--server", elsewhere.url)
    assert outcome.exit_code == 1
    assert "Forbidden: this server takes no changes over TCP, because it has no token for them; " in outcome.stderr
    assert "hint: use an admin's token, --token-file or KVSTOW_TOKEN_FILE, or the server's socket" in outcome.stderr
    assert not here.engine.admin.bypass.load


def test_the_socket_of_another_user_is_not_used(
    run: Any, make_host: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever listens on a port may name any socket, and pass on what it says."""
    uds = tmp_path / "admin.sock"
    host, stat = make_host(uds=uds), Path.stat

    def of_another(path: Path, **how: bool) -> os.stat_result:
        found = stat(path, **how)
        return os.stat_result((*found[:4], 4711, *found[5:])) if path == uds else found

    monkeypatch.setattr(Path, "stat", of_another)
    assert run("bypass", "--load", "--server", host.url).exit_code == 1
    assert not host.engine.admin.bypass.load


def test_server_and_client_certificates(run: Any, make_host: Any, tmp_path: Path) -> None:
    authority = trustme.CA()
    files = {name: tmp_path / name for name in ("ca", "cert", "key", "client-cert", "client-key")}
    authority.cert_pem.write_to_path(files["ca"])
    for certificate, kind in ((authority.issue_cert("127.0.0.1"), ""), (authority.issue_cert("me"), "client-")):
        certificate.cert_chain_pems[0].write_to_path(files[f"{kind}cert"])
        certificate.private_key_pem.write_to_path(files[f"{kind}key"])
    tls = ServerTls(TlsFiles(files["cert"], files["key"], files["ca"]))
    url = make_host(tls=tls, client_certificates=True).url
    assert url.startswith("https:")
    client = ["--cert-file", str(files["client-cert"]), "--key-file", str(files["client-key"])]
    assert run("undrain", "--server", url, "--ca-file", str(files["ca"]), *client).exit_code == 0
    assert run("undrain", "--server", url, *client, environ={"KVSTOW_CA_FILE": str(files["ca"])}).exit_code == 0
    stranger = run("undrain", "--server", url, *client)
    assert stranger.exit_code == 1
    assert "CERTIFICATE_VERIFY_FAILED" in stranger.stderr
    assert "hint: give the certificate of the authority" in stranger.stderr
    plain = run("doctor", "--server", url.replace("https:", "http:"))
    assert "hint: if the server uses TLS, its address begins with https://" in plain.stderr
    assert run("undrain", "--server", url, "--ca-file", str(files["ca"])).exit_code == 0, "through the Unix socket"
    assert run("undrain", "--server", url, "--key-file", str(files["key"])).exit_code == 2
    assert run("undrain", "--server", url, "--ca-file", str(files["key"])).exit_code == 2


def test_a_timeout_of_zero_is_refused(run: Any) -> None:
    assert run(*ASK, "--request-timeout", "0").exit_code == 2


@pytest.mark.parametrize(("status", "code"), [(400, 2), (404, 4), (409, 5), (412, 5), (422, 2), (500, 1), (503, 3)])
def test_each_status_has_its_exit_code(status: int, code: int) -> None:
    problem = ProblemView(
        type="t", title="t", status=status, detail="d", instance="i", code="c", errors=[], retry_after=None
    )
    assert exit_code_of(ApiError("t: d", problem)) == code
    assert exit_code_of(ApiError("no word that can be understood", status=status)) == 1
