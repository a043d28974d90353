"""The subject of a certificate, and when it ends."""

from __future__ import annotations

import re
import ssl
from contextlib import suppress

_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
_NO_CHECK_TIME = 0x200000  # X509_V_FLAG_NO_CHECK_TIME of OpenSSL, which `ssl` has no name for


def certificates_in(text: str) -> list[str]:
    """The certificates of a PEM file, which may also hold a key."""
    return _PEM.findall(text)


def end_of(server: ssl.SSLContext, pem: str) -> float:
    """When the certificate `pem`, which `server` presents, ends: in seconds since the epoch. Raises `ssl.SSLError` if
    no client would accept it as a server's.

    `ssl` tells the date of a peer's certificate only, so this connects to the server in memory (1 ms), as a client
    that trusts this certificate alone and ignores its dates.
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
    """The common name of a verified certificate, or else its whole subject: ASCII, without blanks."""
    names = [pair for part in certificate.get("subject", ()) for pair in part]  # type: ignore[attr-defined]
    common = [value for name, value in names if name == "commonName"]
    text = str(common[0]) if common else ",".join(f"{name}={value}" for name, value in names)
    return ascii(text)[1:-1].replace(" ", "_")[:100]
