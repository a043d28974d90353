from __future__ import annotations

import ssl
from datetime import UTC, datetime
from typing import Any

import pytest
import trustme

from kvstow_service.admin.tls import certificates_in, end_of, subject_of

PAST = datetime(2019, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize("year", [2020, 2049, 2050, 9999])  # one that has ended; DER writes years from 2050 on in full
@pytest.mark.parametrize("key", list(trustme.KeyType))
def test_the_end_of_a_certificate(year: int, key: trustme.KeyType) -> None:
    end = datetime(year, 12, 31, 23, 59, 58, tzinfo=UTC)
    issued = trustme.CA().issue_cert("another.name", not_before=PAST, not_after=end, key_type=key)
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    issued.configure_cert(server)
    assert end_of(server, issued.cert_chain_pems[0].bytes().decode()) == end.timestamp()


def test_keys_and_text_between_certificates_are_skipped() -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("another.name")
    pems = [issued.cert_chain_pems[0].bytes().decode(), authority.cert_pem.bytes().decode()]
    text = issued.private_key_pem.bytes().decode() + "words\n".join(pems)
    assert certificates_in(text) == [pem.strip() for pem in pems]


@pytest.mark.parametrize(
    ("subject", "text"),
    [
        (((("commonName", "a\nb c"),),), "a\\nb_c"),
        (((("organizationName", "o"),), (("countryName", "x"),)), "organizationName=o,countryName=x"),
        ((), ""),
    ],
)
def test_a_subject_has_no_blanks(subject: Any, text: str) -> None:
    assert subject_of({"subject": subject}) == text
