"""The process that runs the admin API: its pools, its settings, and its own health checks."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from kvstow.errors import ConfigError, SettingError
from kvstow_api.directory import Directory, HostMemory, OrphanedMemory
from kvstow_api.hostsettings import INFORMATIONAL_CHECKS

HealthCheck = Callable[[], str | None]
"""Describes the problem; None if there is none. Called on the event loop: it must not block."""


@dataclass(frozen=True, slots=True)
class ApiHost:
    """What `create_app` needs to know of its host.

    `addresses`: where the server listens. `attach`: where engines attach, as they need it in their `attach`; None where
    none can. `host_name`: the machine's, or the pod's. `settings`: shown, like them, to every reader of `/v1/info`, so
    it must not contain secrets. `build`: labels of `kvstow_build_info` (revision, torch, vllm...). `token_file`: if
    set, requests that change anything need one of its tokens. `viewer_token_file`: if set, reading needs one of its
    tokens or an admin's. `allowed_hosts`: Host names, besides those of loopback, that the server accepts over TCP;
    None accepts any. `client_certificates`: the server verifies them, and a valid one counts as an admin's token.
    `certificate_ends`: when the server's own certificate expires, in seconds since the epoch; None without TLS.
    `agent_token`: lets a rank's agent report and do nothing else; without it only an admin may report.
    `readiness_require`: checks of `INFORMATIONAL_CHECKS` that fail `/readyz`. `startup_grace`: seconds for which a
    rank may be silent before its first report. `live_checks` fail `/livez`: only for problems that a restart fixes,
    such as a dead thread; `ready_checks` and `startup_checks` fail the probes of their name. `host_memory` measures
    the memory of the host's machine, and `orphaned_memory` what node services have left in it; both are called on a
    thread.
    """

    directory: Directory
    version: str
    mode: str
    addresses: tuple[str, ...] = ()
    attach: str | None = None
    host_name: str = field(default_factory=socket.gethostname)
    settings: Mapping[str, Any] = field(default_factory=dict)
    build: Mapping[str, str] = field(default_factory=dict)
    token_file: Path | None = None
    viewer_token_file: Path | None = None
    allowed_hosts: tuple[str, ...] | None = None
    client_certificates: bool = False
    certificate_ends: Callable[[], float] | None = None
    agent_token: str | None = field(default=None, repr=False)
    readiness_require: tuple[str, ...] = ()
    startup_grace: float = 10.0
    live_checks: Mapping[str, HealthCheck] = field(default_factory=dict)
    host_memory: Callable[[], HostMemory] | None = None
    orphaned_memory: Callable[[], Sequence[OrphanedMemory]] = tuple
    ready_checks: Mapping[str, HealthCheck] = field(default_factory=dict)
    startup_checks: Mapping[str, HealthCheck] = field(default_factory=dict)
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        unknown = sorted(set(self.readiness_require) - set(INFORMATIONAL_CHECKS))
        if unknown:
            raise ConfigError("readiness.require", unknown, f"any of {', '.join(INFORMATIONAL_CHECKS)}")
        if self.viewer_token_file is not None and self.token_file is None and not self.client_certificates:
            needed = "needs token_file or client certificates: else anyone may change what only viewers may read"
            raise SettingError("viewer_token_file", str(self.viewer_token_file), needed)
        if self.agent_token == "":
            raise ConfigError("agent_token", "", "a non-empty string, or none")
        if not 0 <= self.startup_grace < float("inf"):
            raise ConfigError("startup_grace", self.startup_grace, "0 or more seconds")
