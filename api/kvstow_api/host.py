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
from kvstow_api.hostsettings import INFORMATIONAL_CHECKS, CertificateState

HealthCheck = Callable[[], str | None]
"""Returns a sentence about the problem, or None if there is none. The event loop calls it, so it must not block."""


@dataclass(frozen=True, slots=True)
class ApiHost:
    """What `create_app` needs to know of its host.

    `addresses` are those at which the server listens. `attach` is the value that engines need as their `attach`, or
    None if no engine can attach. `host_name` is that of the machine or the pod. Every reader of `/v1/info` sees these
    and `settings`, so `settings` must not contain secrets. `build` has labels of `kvstow_build_info` (revision, torch,
    vllm...).

    If `token_file` is set, requests that change anything need one of its tokens. If `viewer_token_file` is set, reading
    needs one of its tokens or an admin's. `allowed_hosts` are Host names, besides those of loopback, that the server
    accepts over TCP. None accepts any name. With `client_certificates`, the server verifies these, and a valid one
    counts as an admin's token. `certificate` returns the state of the server's own. It is None without TLS.
    `agent_token` lets a rank's agent report and do nothing else. Without it, only an admin may report.

    `readiness_require` are the checks of `INFORMATIONAL_CHECKS` that fail `/readyz`. `startup_grace` is for how many
    seconds a rank may be silent before its first report. `live_checks` fail `/livez`, so they are only for problems
    that a restart fixes, such as a dead thread. `ready_checks` and `startup_checks` fail the probes of their names.
    `host_memory` measures the memory of the host's machine, and `orphaned_memory` finds what node services have left in
    it. Both are called on a thread.
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
    certificate: Callable[[], CertificateState] | None = None
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
