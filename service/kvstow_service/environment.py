"""Environment variables: which ones belong to KVStow, and which only look as if they did."""

from __future__ import annotations

import re

ENV_PREFIX = "KVSTOW_"

SERVER = ENV_PREFIX + "SERVER"
TOKEN_FILE = ENV_PREFIX + "TOKEN_FILE"
CA_FILE = ENV_PREFIX + "CA_FILE"

CLIENT_VARIABLES = frozenset({SERVER, CA_FILE})
"""Read by the client commands; `kvstow serve` ignores them."""

_SERVICE_LINK = re.compile(r"(.*_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")


def is_service_link(name: str, value: str) -> bool:
    """Whether Kubernetes set this variable to describe a Service named kvstow or kvstow-..."""
    rest = name.removeprefix(ENV_PREFIX)
    return bool(_SERVICE_LINK.fullmatch(rest)) or (rest.split("_")[-1] == "PORT" and "://" in value)
