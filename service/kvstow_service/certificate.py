"""What is read off certificates: who one is of, and when it ends."""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime

_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
_VERSION, _UTC_TIME = 0xA0, 0x17  # tags; a time of another one has four digits of the year


def certificates_in(text: str) -> list[str]:
    """Each certificate of a PEM file, without what else is in it, such as a key."""
    return _PEM.findall(text)


def end_of(pem: str) -> float:
    """When a certificate ends, in seconds since the epoch. What `ssl` tells of those that others show, it does not
    tell of one's own. Raises no error for one that `ssl` has taken."""
    ((_, certificate),) = _values(ssl.PEM_cert_to_DER_cert(pem))
    (_, body), *_ = _values(certificate)
    _, _, _, validity, *_ = (content for tag, content in _values(body) if tag != _VERSION)  # number, algorithm, issuer
    _, (tag, end) = _values(validity)
    form = "%y%m%d%H%M%SZ" if tag == _UTC_TIME else "%Y%m%d%H%M%SZ"
    return datetime.strptime(end.decode(), form).replace(tzinfo=UTC).timestamp()


def _values(der: bytes) -> Iterator[tuple[int, bytes]]:
    """Tag and content of each of the DER values that follow one another."""
    while der:
        tag, length, start = der[0], der[1], 2
        if length >= 0x80:  # the length has so many bytes of its own
            start += length - 0x80
            length = int.from_bytes(der[2:start])
        yield tag, der[start : start + length]
        der = der[start + length :]


def subject_of(certificate: dict[str, object]) -> str:
    """Who a verified certificate was made out to: its common name, or all of the subject; in ASCII, in one line."""
    names = [pair for part in certificate.get("subject", ()) for pair in part]  # type: ignore[attr-defined]
    common = [value for name, value in names if name == "commonName"]
    text = str(common[0]) if common else ",".join(f"{name}={value}" for name, value in names)
    return ascii(text)[1:-1].replace(" ", "_")[:100]
