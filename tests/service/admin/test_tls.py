"""TLS over TCP with client certificates, and Unix sockets without TLS."""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from kvstow.errors import ConfigError
from kvstow_api.auth import CERTIFICATE
from kvstow_service.admin.sockets import AdminSockets
from kvstow_service.admin.tls import ServerTls, TlsContent, TlsFiles


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


def test_tcp_uses_tls_and_the_unix_socket_does_not(
    serving: Any, authority: trustme.CA, files: TlsFiles, tmp_path: Path
) -> None:
    uds = tmp_path / "admin.sock"
    _, listeners = serving(APP, uds=uds, tls=ServerTls(files))
    assert listeners.url.startswith("https://")
    assert httpx.get(listeners.url, verify=client_context(authority)).json() == [None, "https"]
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(uds))) as client:
        assert client.get("http://kvstow/").json() == [None, "http"]
    with pytest.raises(httpx.HTTPError):
        httpx.get(listeners.url.replace("https", "http"))
    with pytest.raises(httpx.ConnectError):
        httpx.get(listeners.url, verify=client_context(trustme.CA()))


def test_a_certificate_of_another_authority_is_refused(serving: Any, authority: trustme.CA, files: TlsFiles) -> None:
    _, listeners = serving(APP, tls=ServerTls(files))
    stranger = client_context(authority, trustme.CA())
    with pytest.raises(httpx.HTTPError):
        httpx.get(listeners.url, verify=stranger)


def replace(path: Path, content: trustme.Blob) -> None:
    """In one step, as the kubelet does; times of files are too coarse for tests that write them in place."""
    content.write_to_path(f"{path}.new")
    Path(f"{path}.new").replace(path)


def shown(listeners: AdminSockets, trusted: trustme.CA) -> httpx.Response:
    """An answer to a client that trusts servers of this authority only."""
    return httpx.get(listeners.url, verify=client_context(trusted))


def test_new_connections_get_a_renewed_certificate(
    serving: Any, authority: trustme.CA, files: TlsFiles, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    tls = ServerTls(files)
    _, listeners = serving(APP, tls=tls)
    with httpx.Client(verify=client_context(authority)) as earlier:
        assert earlier.get(listeners.url).is_success
        successor = trustme.CA()
        later = datetime(2099, 1, 2, 3, 4, tzinfo=UTC)
        issued = successor.issue_cert("127.0.0.1", not_after=later)
        replace(files.cert, issued.private_key_and_cert_chain_pem)
        tls.renew()
        assert earlier.get(listeners.url).is_success, "its connection is open still"
    assert shown(listeners, successor).is_success
    with pytest.raises(httpx.ConnectError):
        shown(listeners, authority)
    assert (tls.state().ends, tls.certificates) == (
        later.timestamp(),
        issued.cert_chain_pems[0].bytes().decode().strip(),
    )
    tls.renew()
    assert caplog.messages.count("loaded new TLS files; the certificate ends 2099-01-02 03:04+00:00") == 1


def test_a_certificate_is_not_used_before_its_key_is_there(
    serving: Any, authority: trustme.CA, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cert, key = tmp_path / "tls.crt", tmp_path / "tls.key"

    first, successor = authority.issue_cert("127.0.0.1"), trustme.CA()
    first.cert_chain_pems[0].write_to_path(str(cert))
    first.private_key_pem.write_to_path(str(key))
    tls = ServerTls(TlsFiles(cert, key))
    _, listeners = serving(APP, tls=tls)
    issued = successor.issue_cert("127.0.0.1")
    replace(cert, issued.cert_chain_pems[0])
    for _ in range(2):
        tls.renew()
        assert shown(listeners, authority).is_success
    (line,) = caplog.messages
    assert "the old ones stay in use until" in line
    assert f"tls_cert {cert}, {key}" in line
    replace(key, issued.private_key_pem)
    tls.renew()
    assert shown(listeners, successor).is_success


def test_files_that_change_during_reading_are_read_again(serving: Any, authority: trustme.CA, files: TlsFiles) -> None:
    successors = [trustme.CA(), trustme.CA()]

    def write(signer: trustme.CA) -> None:
        replace(files.cert, signer.issue_cert("127.0.0.1").private_key_and_cert_chain_pem)

    class Changing(TlsFiles):
        def read(self) -> TlsContent:
            content = super().read()
            if changes:
                write(changes.pop())
            return content

    changes: list[trustme.CA] = []
    tls = ServerTls(Changing(files.cert, client_ca=files.client_ca))
    _, listeners = serving(APP, tls=tls)
    write(successors[0])
    changes.append(successors[1])
    tls.renew()
    assert shown(listeners, authority).is_success
    tls.renew()
    assert shown(listeners, successors[1]).is_success


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_removed_authority_is_no_longer_trusted(
    serving: Any, authority: trustme.CA, files: TlsFiles, version: ssl.TLSVersion
) -> None:
    tls = ServerTls(files)
    _, listeners = serving(APP, tls=tls)
    former, present = client_context(authority, authority), trustme.CA()
    former.maximum_version = version
    said, session = ask(listeners, former)
    assert said.endswith('["ops_team","https"]')
    assert files.client_ca is not None
    replace(files.client_ca, present.cert_pem)
    tls.renew()
    assert httpx.get(listeners.url, verify=client_context(authority, present)).json() == ["ops_team", "https"]
    with pytest.raises(httpx.HTTPError):
        httpx.get(listeners.url, verify=client_context(authority, authority))
    with suppress(OSError):  # refused (TLS 1.3), or nobody (1.2)
        assert "ops_team" not in ask(listeners, former, session)[0]


def test_a_resumed_session_keeps_its_client_identity(serving: Any, authority: trustme.CA, files: TlsFiles) -> None:
    _, listeners = serving(APP, tls=ServerTls(files))
    known = client_context(authority, authority)
    _, session = ask(listeners, known)
    assert ask(listeners, known, session)[0].endswith('["ops_team","https"]')


def ask(
    listeners: AdminSockets, context: ssl.SSLContext, session: ssl.SSLSession | None = None
) -> tuple[str, ssl.SSLSession | None]:
    """What the server says, and the session, which the next one may take up."""
    with (
        socket.create_connection((listeners.host, listeners.port), 20) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1", session=session) as connection,
    ):
        connection.sendall(b"GET / HTTP/1.1\r\nHost: kvstow\r\nConnection: close\r\n\r\n")
        said = b"".join(iter(lambda: connection.recv(4096), b""))
        return said.decode(), connection.session


def test_an_encrypted_key_is_refused_without_a_prompt(
    authority: trustme.CA, tmp_path: Path, child_environ: dict[str, str]
) -> None:
    issued = authority.issue_cert("127.0.0.1")
    issued.cert_chain_pems[0].write_to_path(str(tmp_path / "tls.crt"))
    key = serialization.load_pem_private_key(issued.private_key_pem.bytes(), None)
    form, secret = serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"secret")
    (tmp_path / "tls.key").write_bytes(key.private_bytes(serialization.Encoding.PEM, form, secret))
    code = (
        "import pathlib, kvstow_service.admin.tls as tls;"
        f"tls.TlsFiles(pathlib.Path({str(tmp_path / 'tls.crt')!r}), pathlib.Path({str(tmp_path / 'tls.key')!r})).read()"
    )
    # Without a terminal OpenSSL would ask on standard input.
    result = subprocess.run(
        [sys.executable, "-c", code],
        input="secret\n",
        env=child_environ,
        capture_output=True,
        text=True,
        start_new_session=True,
        check=False,
    )
    assert "SettingError: tls_cert " in result.stderr


def test_a_certificate_for_clients_only_is_refused(tmp_path: Path) -> None:
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    usage, days = x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.CLIENT_AUTH]), timedelta(days=1)
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now, now + days)
    certificate = builder.add_extension(usage, critical=False).sign(key, hashes.SHA256())
    form, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    pem = key.private_bytes(serialization.Encoding.PEM, form, plain)
    (tmp_path / "client.pem").write_bytes(pem + certificate.public_bytes(serialization.Encoding.PEM))
    with pytest.raises(ConfigError, match=r"client\.pem is not a server certificate: .*purpose"):
        TlsFiles(tmp_path / "client.pem").read()


@pytest.mark.parametrize("broken", ["cert", "key", "client_ca"])
@pytest.mark.parametrize("content", [None, "nonsense"])
def test_an_unusable_file_is_named(files: TlsFiles, tmp_path: Path, broken: str, content: str | None) -> None:
    path = tmp_path / "broken.pem"
    if content is not None:
        path.write_text(content)
    given: dict[str, Any] = {"cert": files.cert, "key": files.key, "client_ca": files.client_ca, broken: path}
    with pytest.raises(ConfigError, match=r"broken\.pem"):
        TlsFiles(**given).read()


def make_huge(path: Path) -> None:
    path.touch()
    os.truncate(path, 500 << 20)


@pytest.mark.parametrize("broken", ["cert", "key", "client_ca"])
@pytest.mark.parametrize("make", [os.mkfifo, make_huge])
def test_unreadable_files_never_block(
    files: TlsFiles, tmp_path: Path, broken: str, make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither at the start, nor when it takes the place of a good one."""
    path = tmp_path / "broken.pem"
    make(path)
    given: dict[str, Any] = {"cert": files.cert, "key": files.cert, "client_ca": files.client_ca}
    with pytest.raises(ConfigError, match=r"broken\.pem cannot be read: (not a regular file|larger than)"):
        TlsFiles(**{**given, broken: path}).read()
    replaced = tmp_path / "replaced.pem"
    replaced.write_bytes(given[broken].read_bytes())
    tls = ServerTls(TlsFiles(**{**given, broken: replaced}))
    path.replace(replaced)
    before = tls.certificates
    tls.renew()
    tls.renew()
    assert (tls.certificates, tls.state().is_outdated) == (before, True)
    path.write_bytes(given[broken].read_bytes())
    path.replace(replaced)
    tls.renew()
    assert not tls.state().is_outdated, "usable files are there again"
    assert ["the new TLS files are not usable" in record.message for record in caplog.records] == [True]
