"""How commands reach their server: flags, variables, contexts, tokens, TLS, Unix sockets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trustme

from kvstow.errors import ConfigError
from kvstow_api.client import ApiError
from kvstow_api.views.problems import ProblemView
from kvstow_service.admin.tls import TlsFiles
from kvstow_service.cli.connection import Connection
from kvstow_service.cli.contexts import Context, ContextFile
from kvstow_service.cli.failures import exit_code_of

ASK = ("get", "pools")
SERVER = "http://a:1"


@pytest.fixture
def contexts(tmp_path: Path) -> dict[str, str]:
    path = tmp_path / "contexts.toml"
    ContextFile(path, {"prod": Context("http://prod:1", "/prod/token"), "dev": Context("http://dev:1")}, "prod").write()
    return {"KVSTOW_CONTEXTS": str(path)}


def chosen(given: Context, name: str | None, environ: dict[str, str]) -> Context:
    return Connection.choose(given, name, environ).context


def test_a_flag_wins_over_a_variable_and_both_over_the_current_context(contexts: dict[str, str]) -> None:
    variable = {**contexts, "KVSTOW_SERVER": "http://b:1"}
    assert chosen(Context(SERVER), None, variable).server == SERVER
    assert chosen(Context(""), None, variable).server == "http://b:1"
    assert chosen(Context(""), None, contexts).server == "http://prod:1"
    assert chosen(Context(""), None, {"HOME": "/nowhere"}).server == "http://127.0.0.1:9595"


def test_a_context_is_chosen_by_flag_or_variable(contexts: dict[str, str]) -> None:
    assert chosen(Context(""), "dev", {**contexts, "KVSTOW_SERVER": "http://b:1"}).server == "http://dev:1"
    assert chosen(Context(""), None, {**contexts, "KVSTOW_CONTEXT": "dev"}).server == "http://dev:1"
    with pytest.raises(ConfigError, match="context is 'qa'; allowed: dev, prod"):
        chosen(Context(""), "qa", contexts)
    with pytest.raises(ConfigError, match="not both"):
        chosen(Context(SERVER), "dev", contexts)


def test_a_context_is_named_with_its_server(contexts: dict[str, str]) -> None:
    assert Connection.choose(Context(""), None, contexts).server == "http://prod:1 (context prod)"
    assert Connection.choose(Context(""), "dev", contexts).server == "http://dev:1 (context dev)"
    assert Connection.choose(Context(SERVER), None, contexts).server == SERVER


def test_a_token_goes_only_to_the_server_that_it_belongs_to(contexts: dict[str, str]) -> None:
    assert chosen(Context(""), None, contexts).token_file == "/prod/token"
    assert chosen(Context(SERVER), None, contexts).token_file is None
    assert chosen(Context(SERVER), None, {**contexts, "KVSTOW_TOKEN_FILE": "/t"}).token_file == "/t"
    assert chosen(Context(SERVER, "/flag"), None, {**contexts, "KVSTOW_TOKEN_FILE": "/t"}).token_file == "/flag"


# httpcore leaves the socket that it could not connect to the garbage collector
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_contexts_are_set_used_listed_and_deleted(run: Any, host: Any, tmp_path: Path) -> None:
    token = tmp_path / 'tøken "file"'
    token.write_text("t")
    assert run("context", "set", "here", "--server", host.url, "--token-file", str(token)).exit_code == 0
    assert run("context", "set", "there", "--server", "unix:/run/there.sock").exit_code == 0
    listed = run("context", "list").stdout
    assert "*        here" in listed
    assert str(token) in listed
    assert run(*ASK).exit_code == 0
    assert run("context", "use", "there").exit_code == 0
    assert run(*ASK).exit_code == 1
    assert run(*ASK, "--context", "here").exit_code == 0
    assert run("context", "delete", "there").exit_code == 0
    assert run("context", "use", "there").exit_code == 2


@pytest.mark.parametrize("arguments", [["no spaces", "--server", SERVER], ["x", "--server", "a:1"], ["x"]])
def test_an_invalid_context_is_refused(run: Any, arguments: list[str]) -> None:
    assert run("context", "set", *arguments).exit_code == 2


@pytest.mark.parametrize(
    "text", ["nonsense", "unknown = 1", "contexts = 3", "[contexts.a]\nport = 1", '[contexts.a]\nserver = ["b"]']
)
def test_an_invalid_contexts_file_is_named(run: Any, tmp_path: Path, text: str) -> None:
    path = tmp_path / "contexts.toml"
    path.write_text(text)
    outcome = run(*ASK)
    assert outcome.exit_code == 2
    assert str(path) in outcome.stderr


def test_an_unwritable_contexts_file_is_named(run: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "contexts.toml"
    outcome = run("context", "set", "a", "--server", SERVER, environ={"KVSTOW_CONTEXTS": str(path)})
    assert outcome.exit_code == 2
    assert str(path) in outcome.stderr


def test_a_unix_socket_is_a_server(run: Any, make_host: Any, tmp_path: Path) -> None:
    make_host(uds=tmp_path / "admin.sock")
    assert run(*ASK, "--server", f"unix:{tmp_path}/admin.sock").exit_code == 0


def test_an_unreachable_server_is_named_with_a_hint(run: Any) -> None:
    outcome = run(*ASK, "--server", "http://127.0.0.1:1")
    assert outcome.exit_code == 1
    assert outcome.stderr.startswith("kvstow get pools: http://127.0.0.1:1 cannot be reached: ")
    assert "hint: check that KVStow's admin server runs there, or choose another: --server" in outcome.stderr


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


def test_server_and_client_certificates(run: Any, make_host: Any, tmp_path: Path) -> None:
    authority = trustme.CA()
    files = {name: tmp_path / name for name in ("ca", "cert", "key", "client-cert", "client-key")}
    authority.cert_pem.write_to_path(files["ca"])
    for certificate, kind in ((authority.issue_cert("127.0.0.1"), ""), (authority.issue_cert("me"), "client-")):
        certificate.cert_chain_pems[0].write_to_path(files[f"{kind}cert"])
        certificate.private_key_pem.write_to_path(files[f"{kind}key"])
    tls = TlsFiles(files["cert"], files["key"], files["ca"]).read().context
    url = make_host(tls=tls, client_certificates=True).url
    assert url.startswith("https:")
    client = ["--cert-file", str(files["client-cert"]), "--key-file", str(files["client-key"])]
    assert run("undrain", "--server", url, "--ca-file", str(files["ca"]), *client).exit_code == 0
    assert run("undrain", "--server", url, *client, environ={"KVSTOW_CA_FILE": str(files["ca"])}).exit_code == 0
    stranger = run("undrain", "--server", url, *client)
    assert stranger.exit_code == 1
    assert "CERTIFICATE_VERIFY_FAILED" in stranger.stderr
    assert run("undrain", "--server", url, "--ca-file", str(files["ca"])).exit_code == 1
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
