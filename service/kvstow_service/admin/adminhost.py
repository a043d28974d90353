"""The parts that every host of the admin server needs, embedded or in the node service: its options, its periodic work,
and its description for the API.

Importing this module imports neither FastAPI nor uvicorn nor prometheus_client. An engine that embeds the server
imports them late, on a thread.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kvstow
from kvstow.errors import ConfigError, SettingError
from kvstow.memory.limits import HugePageLimits, MemoryLimits, limits_of
from kvstow_api.directory import Directory, HostMemory
from kvstow_api.hostsettings import INFORMATIONAL_CHECKS, TokenFile, is_loopback, parse_host_names, require_token
from kvstow_service.admin.sockets import AdminSockets
from kvstow_service.admin.tls import ServerTls, TlsFiles

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from kvstow_api.host import ApiHost, HealthCheck

logger = logging.getLogger("kvstow.ticker")

_OVERDUE_SECONDS = 10.0
"""Periodic work has stopped if it has not returned for this long and an interval."""
_JOIN_SECONDS = 1.0
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_CHOSEN = re.compile(r"\[(\w+)\]")


@dataclass(frozen=True, slots=True)
class AdminOptions:
    """Where the server listens, and which credentials it accepts. The constructor reads the files, but does not touch
    the network.

    Port 0 stands for any free port. `token_file` has the tokens with which requests over TCP may make changes. Without
    it and without client certificates, such requests are refused, and `host` must be a loopback address.
    `viewer_token_file` has the tokens for reading. Without it, reading is open. With `tls`, TCP connections use TLS.
    `readiness_require` names informational checks that are to fail `/readyz`. `allowed_hosts` are host names, besides
    those of loopback, that a server on loopback accepts.

    Raises `ConfigError`.
    """

    host: str = "127.0.0.1"
    port: int = 9595
    token_file: Path | None = None
    viewer_token_file: Path | None = None
    tls: TlsFiles | None = None
    readiness_require: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if type(self.port) is not int or not 0 <= self.port < 1 << 16:
            raise ConfigError("port", self.port, "0 (any free port) to 65535")
        if not set(self.readiness_require) <= set(INFORMATIONAL_CHECKS):
            raise ConfigError("readiness_require", self.readiness_require, " and ".join(INFORMATIONAL_CHECKS))
        parse_host_names("allowed_hosts", self.allowed_hosts)
        require_token(self.host, self.token_file, certificates=self.has_certificates)
        for path in (self.token_file, self.viewer_token_file):
            if path is not None:
                TokenFile(path)
        if self.viewer_token_file is not None and self.token_file is None and not self.has_certificates:
            raise SettingError("viewer_token_file", self.viewer_token_file, "needs token_file or tls_client_ca")
        if self.tls is not None:
            self.tls.read()

    @property
    def has_certificates(self) -> bool:
        """Whether a client certificate counts as an admin's token."""
        return self.tls is not None and self.tls.client_ca is not None


class Ticker:
    """Calls `tick` every `interval` seconds until `stop`. It calls `renew_tls` as often, on another thread, because
    that reads files and a file system may block. No exception ends these threads."""

    def __init__(
        self,
        tick: Callable[[], object],
        *,
        interval: float = 1.0,
        renew_tls: Callable[[], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._interval, self._clock = interval, clock
        self._stopping = threading.Event()
        work = {"the ticker": tick, "the check of the TLS files": renew_tls}
        self._threads = {
            name: threading.Thread(target=self._repeat, args=(name, act), name="kvstow-ticker", daemon=True)
            for name, act in work.items()
            if act is not None
        }
        self._returned = dict.fromkeys(self._threads, clock())
        """When each kind of periodic call last returned."""

    def start(self) -> None:
        self._returned = dict.fromkeys(self._threads, self._clock())
        for thread in self._threads.values():
            thread.start()

    def stop(self) -> None:
        """End the calls. Waits for a second at most, because the threads are daemons. Idempotent."""
        self._stopping.set()
        for thread in self._threads.values():
            if thread.ident is not None:
                thread.join(_JOIN_SECONDS)

    def check(self) -> str | None:
        """Return which periodic work has stopped, or None. This is a health check."""
        for name, thread in self._threads.items():
            if thread.ident is None:
                continue  # the thread was not started yet: the server answers before its host has started
            if not thread.is_alive():
                return f"{name} has stopped"
            if (age := self._clock() - self._returned[name]) > _OVERDUE_SECONDS + self._interval:
                return f"{name} has not run for {age:.0f} s"
        return None

    def _repeat(self, name: str, act: Callable[[], object]) -> None:
        while not self._stopping.wait(self._interval):
            try:
                act()
            except Exception:
                logger.exception("%s failed", name)
            self._returned[name] = self._clock()


def make_api_host(
    directory: Directory,
    ticker: Ticker,
    sockets: AdminSockets,
    options: AdminOptions,
    *,
    tls: ServerTls | None = None,
    settings: Mapping[str, Any] | None = None,
    startup_checks: Mapping[str, HealthCheck] | None = None,
    **given: Any,
) -> ApiHost:
    """Describe the host for an API that is served on `sockets`. Every reader can see `settings`, so they must have no
    secrets and no paths. `startup_checks` are checks of readiness, too. `given` are other fields of `ApiHost`.

    Host names are restricted on loopback only, because elsewhere any name may lead to the server.
    """
    from kvstow_api.host import ApiHost

    settings = settings or {}
    return ApiHost(
        directory=directory,
        version=kvstow.__version__,
        addresses=sockets.addresses,
        settings=settings,
        token_file=options.token_file,
        viewer_token_file=options.viewer_token_file,
        allowed_hosts=options.allowed_hosts if sockets.host and is_loopback(sockets.host) else None,
        client_certificates=options.has_certificates,
        certificate=None if tls is None else tls.state,
        host_memory=partial(measure_memory, limits_of(settings.get("huge_pages", "advised"))),
        readiness_require=options.readiness_require,
        ready_checks={"ticker": ticker.check, **(startup_checks or {})},
        startup_checks=startup_checks or {},
        registry=_registry(),
        **given,
    )


def measure_memory(limits: MemoryLimits | None = None, huge_pages: Path = _HUGE_PAGES) -> HostMemory:
    """Measure the memory of the host, by reading files of the kernel in less than a millisecond. `limits` are those of
    the memory for the pools; the default is memory in general. Tests set `huge_pages`."""
    limits = limits or MemoryLimits()
    headroom = limits.headroom()
    return HostMemory(
        headroom_bytes=None if headroom is None else headroom.num_bytes,
        limit="" if headroom is None else headroom.limit,
        reserve_bytes=limits.reserve_bytes,
        huge_pages="reserved" if isinstance(limits, HugePageLimits) else _chosen(huge_pages),
    )


def _chosen(path: Path) -> str:
    """Return the word in brackets, as in `always [madvise] never`. Empty if the kernel has no such file."""
    try:
        match = _CHOSEN.search(path.read_text())
    except OSError:
        return ""
    return match[1] if match else ""


def _registry() -> CollectorRegistry:
    """Make a registry with the metrics of this process. The API adds those of the engine."""
    from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector

    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    GCCollector(registry=registry)
    return registry
