"""TLS of the admin server's TCP socket; its Unix sockets stay plain, guarded by their mode."""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass
from pathlib import Path

from kvstow.errors import ConfigError

_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files. `key` may be in `cert`. With `client_ca`, a client may show a certificate that one of these
    authorities has signed; one that is shown and is not is refused."""

    cert: Path
    key: Path | None = None
    client_ca: Path | None = None

    def context(self) -> ssl.SSLContext:
        """Raises `ConfigError` naming the file that cannot be used."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(self.cert, self.key)
        except (OSError, ssl.SSLError) as error:
            files = str(self.cert) if self.key is None else f"{self.cert}, {self.key}"
            raise ConfigError("tls_cert", files, f"a certificate and its key, as PEM ({error})") from None
        if self.client_ca is not None:
            try:
                context.load_verify_locations(self.client_ca)
            except (OSError, ssl.SSLError) as error:
                raise ConfigError(
                    "tls_client_ca", str(self.client_ca), f"certificates of authorities, as PEM ({error})"
                ) from None
            context.verify_mode = ssl.CERT_OPTIONAL  # probes have none; what changes anything needs one, or a token
        return context

    def certificates(self) -> str:
        """The certificates in `cert`, without a key that may be there, too."""
        return "\n".join(_CERTIFICATE.findall(self.cert.read_text()))


def subject_of(certificate: dict[str, object]) -> str:
    """Who a verified certificate was made out to: its common name, or all of the subject; in ASCII, in one line."""
    names = [pair for part in certificate.get("subject", ()) for pair in part]  # type: ignore[attr-defined]
    common = [value for name, value in names if name == "commonName"]
    text = str(common[0]) if common else ",".join(f"{name}={value}" for name, value in names)
    return ascii(text)[1:-1].replace(" ", "_")[:100]
