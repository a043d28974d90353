"""TLS over TCP, client certificates, and plain Unix sockets beside them."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from kvstow.errors import ConfigError
from kvstow_api.auth import CERTIFICATE
from kvstow_api.client import ApiError, Client, Endpoint, calls
from kvstow_service import server
from kvstow_service.tls import TlsFiles, subject_of


async def who(request: Request) -> JSONResponse:
    return JSONResponse([request.scope["state"].get(CERTIFICATE), request.url.scheme])


APP = Starlette(routes=[Route("/", who)])


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def files(authority: trustme.CA, tmp_path: Path) -> TlsFiles:
    """A server's certificate, and the authority that its clients' must be of."""
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "server.pem"))
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    return TlsFiles(tmp_path / "server.pem", client_ca=tmp_path / "ca.pem")


def client_context(trusted: trustme.CA, issuer: trustme.CA | None = None) -> ssl.SSLContext:
    """For a client that trusts servers of `trusted`, with a certificate from `issuer`."""
    context = ssl.create_default_context()
    trusted.configure_trust(context)
    if issuer is not None:
        issuer.issue_cert("ops@example.org", common_name="ops team").configure_cert(context)
    return context


def test_tcp_speaks_tls_and_the_unix_socket_does_not(
    serving: Any, authority: trustme.CA, files: TlsFiles, tmp_path: Path
) -> None:
    uds = tmp_path / "admin.sock"
    _, listeners = serving(APP, uds=uds, tls=files.context())
    assert listeners.url.startswith("https://")
    assert httpx.get(listeners.url, verify=client_context(authority)).json() == [None, "https"]
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(uds))) as client:
        assert client.get("http://kvstow/").json() == [None, "http"]
    with pytest.raises(httpx.HTTPError):
        httpx.get(listeners.url.replace("https", "http"))
    with pytest.raises(httpx.ConnectError):
        httpx.get(listeners.url, verify=client_context(trustme.CA()))


def test_a_clients_certificate_says_who_it_is(serving: Any, authority: trustme.CA, files: TlsFiles) -> None:
    _, listeners = serving(APP, tls=files.context())
    known = client_context(authority, authority)
    assert httpx.get(listeners.url, verify=known).json() == ["ops_team", "https"]


def test_a_certificate_of_another_authority_is_refused(serving: Any, authority: trustme.CA, files: TlsFiles) -> None:
    _, listeners = serving(APP, tls=files.context())
    stranger = client_context(authority, trustme.CA())
    with pytest.raises(httpx.HTTPError):
        httpx.get(listeners.url, verify=stranger)


def test_the_client_verifies_the_server_and_shows_its_certificate(
    serving: Any, authority: trustme.CA, files: TlsFiles
) -> None:
    _, listeners = serving(APP, tls=files.context())
    with Client(listeners.url) as nobody, pytest.raises(ApiError, match="cannot be reached"):
        nobody.send(calls.metrics())
    endpoint = Endpoint.parse(listeners.url, tls=client_context(authority, authority))
    with Client(endpoint) as known, pytest.raises(ApiError, match="status 404"):
        known.send(calls.metrics())


@pytest.mark.parametrize("broken", ["cert", "key", "client_ca"])
@pytest.mark.parametrize("content", [None, "nonsense"])
def test_a_file_that_cannot_be_used_is_named(files: TlsFiles, tmp_path: Path, broken: str, content: str | None) -> None:
    path = tmp_path / "broken.pem"
    if content is not None:
        path.write_text(content)
    given: dict[str, Any] = {"cert": files.cert, "key": files.key, "client_ca": files.client_ca, broken: path}
    with pytest.raises(ConfigError, match=r"broken\.pem"):
        TlsFiles(**given).context()


@pytest.mark.parametrize(
    ("subject", "text"),
    [
        (((("commonName", "a\nb c"),),), "a\\nb_c"),
        (((("organizationName", "o"),), (("countryName", "x"),)), "organizationName=o,countryName=x"),
        ((), ""),
    ],
)
def test_a_subject_is_one_word(subject: Any, text: str) -> None:
    assert subject_of({"subject": subject}) == text


def test_a_connection_that_never_sends_a_request_is_closed(serving: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_HEAD_SECONDS", 0.05)
    _, listeners = serving(APP)
    with socket.create_connection((listeners.host, listeners.port), 20) as silent:
        silent.sendall(b"GET / HTTP/1.1\r\nHo")
        assert silent.recv(1) == b""
