"""The files of the pages, and the content security policy with which they are sent."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from importlib.resources import files


def asset(name: str) -> str:
    return files("kvstow_api.page").joinpath(name).read_text(encoding="utf-8").strip()


def headers(style: str, script: str | None = None) -> Mapping[str, str]:
    """Return headers that let the browser apply this style and run this script, which may connect to this server, and
    that forbid everything else."""
    policy = {
        "default-src": "'none'",
        "style-src": _digest(style),
        "script-src": "'none'" if script is None else _digest(script),
        "connect-src": "'none'" if script is None else "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    text = "; ".join(f"{directive} {source}" for directive, source in policy.items())
    return {"Content-Security-Policy": text, "Referrer-Policy": "no-referrer"}


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
