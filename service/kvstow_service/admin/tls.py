"""TLS of the admin server's TCP socket. Its Unix sockets have no TLS: their file mode protects them."""

from __future__ import annotations

import logging
import os
import re
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from kvstow.errors import ConfigError, SettingError
from kvstow_api.hostsettings import CertificateState, FileStamp, read_regular_file

logger = logging.getLogger("kvstow.tls")

_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
_NO_CHECK_TIME = 0x200000  # X509_V_FLAG_NO_CHECK_TIME of OpenSSL, for which `ssl` has no name


class TlsContent(NamedTuple):
    """The contents of the TLS files. `certificates` is PEM without the key. `ends` is when the server's own
    certificate, which is the first of them, expires, in seconds since the epoch."""

    context: ssl.SSLContext
    certificates: str
    ends: float


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of PEM files. `key` is None if `cert` contains the key. With `client_ca`, clients may present a certificate
    that one of these authorities has signed. Any other certificate is refused."""

    cert: Path
    key: Path | None = None
    client_ca: Path | None = None

    def read(self) -> TlsContent:
        """Read the files. Raises `ConfigError`, which names the unusable file."""
        cert = _content("tls_cert", self.cert)
        key = None if self.key is None else _content("tls_key", self.key)
        context = self._context(cert, key)
        if self.client_ca is not None:
            _trust(context, self.client_ca)
        certificates = certificates_in(cert.decode("ascii", "replace"))
        if not certificates:
            raise SettingError("tls_cert", str(self.cert), "has no certificate in PEM format")
        try:
            ends = end_of(context, certificates[0])
        except ssl.SSLError as error:
            raise SettingError("tls_cert", str(self.cert), f"is not a server certificate: {error}") from None
        return TlsContent(context, "\n".join(certificates), ends)

    def stamps(self) -> list[FileStamp | None]:
        """Return stamps that change with the files. None stands for a file that cannot be read."""
        stamps: list[FileStamp | None] = []
        for path in filter(None, (self.cert, self.key, self.client_ca)):
            try:
                stamps.append(FileStamp.of(path))
            except OSError:
                stamps.append(None)
        return stamps

    def _context(self, cert: bytes, key: bytes | None) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        with ExitStack() as stack:
            cert_path = stack.enter_context(in_memory(cert))
            key_path = None if key is None else stack.enter_context(in_memory(key))
            try:
                context.load_cert_chain(cert_path, key_path, password="")  # with None, OpenSSL would prompt for one
            except (OSError, ssl.SSLError) as error:
                files = str(self.cert) if self.key is None else f"{self.cert}, {self.key}"
                raise SettingError("tls_cert", files, f"is not a certificate with its key: {error}") from None
        return context


def _trust(context: ssl.SSLContext, client_ca: Path) -> None:
    """Accept client certificates that these authorities have signed."""
    try:
        context.load_verify_locations(cadata=_content("tls_client_ca", client_ca).decode("ascii", "replace"))
    except (OSError, ssl.SSLError, ValueError) as error:
        raise SettingError("tls_client_ca", str(client_ca), f"has no usable certificates: {error}") from None
    context.verify_mode = ssl.CERT_OPTIONAL  # probes have no certificate; changes need one, or a token
    context.num_tickets = 0  # no resumed sessions, because they are not checked against the present authorities


@contextmanager
def in_memory(pem: bytes) -> Iterator[str]:
    """Yield a path to these bytes. `ssl` takes only paths, and the original path may lead to another file by now."""
    with open(os.memfd_create("kvstow-tls", os.MFD_CLOEXEC), "wb") as file:
        file.write(pem)
        file.flush()
        yield f"/proc/self/fd/{file.fileno()}"


def _content(setting: str, path: Path) -> bytes:
    try:
        return read_regular_file(path)[0]
    except OSError as error:
        raise SettingError(setting, str(path), f"cannot be read: {error.strerror}") from None


class ServerTls:
    """The TLS settings of a running server. They are those of the last usable version of the files.

    Call `renew` periodically, always on the same thread. Everything else is thread-safe.
    """

    def __init__(self, files: TlsFiles) -> None:
        """Read the files. Raises `ConfigError`."""
        self._files = files
        self._stamps = files.stamps()  # before the files are read, so that the next `renew` notices a change meanwhile
        self._content = files.read()
        self._has_unusable_files = False
        """Whether the files have changed since, and cannot be used."""

    @property
    def context(self) -> ssl.SSLContext:
        """The context for the next handshake. Each version of the files has a new one, because a context cannot forget
        an authority, and loading files into it again may fail halfway."""
        return self._content.context

    @property
    def certificates(self) -> str:
        """The certificates that the server presents, as PEM."""
        return self._content.certificates

    def state(self) -> CertificateState:
        return CertificateState(self._content.ends, self._has_unusable_files)

    def renew(self) -> None:
        """Read the files if they have changed. If they are unusable, that is logged once, and the old content stays."""
        stamps = self._files.stamps()
        if stamps == self._stamps:
            return
        try:
            content = self._files.read()
        except ConfigError as error:
            self._stamps, self._has_unusable_files = stamps, True
            ends = _date(self._content.ends)
            logger.warning("the new TLS files are not usable; the old ones stay in use until %s: %s", ends, error)
            return
        if self._files.stamps() == stamps:  # otherwise the files may have changed while they were read
            self._stamps, self._content, self._has_unusable_files = stamps, content, False
            logger.info("loaded new TLS files; the certificate ends %s", _date(content.ends))


def certificates_in(text: str) -> list[str]:
    """Return the certificates of a PEM file, which may also hold a key."""
    return _PEM.findall(text)


def end_of(server: ssl.SSLContext, pem: str) -> float:
    """Return when the certificate `pem`, which `server` presents, expires, in seconds since the epoch. Raises
    `ssl.SSLError` if no client would accept it as a server's.

    `ssl` tells the date only of a peer's certificate. So this connects to the server in memory, which takes 1 ms, as a
    client that trusts only this certificate and ignores its dates.
    """
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.load_verify_locations(cadata=pem)
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | _NO_CHECK_TIME
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    connection = client.wrap_bio(to_client, to_server)
    peer = server.wrap_bio(to_server, to_client, server_side=True)
    for side in (connection, peer, connection):
        with suppress(ssl.SSLWantReadError):
            side.do_handshake()
    certificate = connection.getpeercert()
    assert certificate is not None
    return float(ssl.cert_time_to_seconds(str(certificate["notAfter"])))


def subject_of(certificate: dict[str, object]) -> str:
    """Return the common name of a verified certificate, or else its whole subject, in ASCII without blanks."""
    names = [pair for part in certificate.get("subject", ()) for pair in part]  # type: ignore[attr-defined]
    common = [value for name, value in names if name == "commonName"]
    text = str(common[0]) if common else ",".join(f"{name}={value}" for name, value in names)
    return ascii(text)[1:-1].replace(" ", "_")[:100]


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(sep=" ", timespec="minutes")
