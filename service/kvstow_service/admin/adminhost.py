"""What every host of the admin server has, embedded or in the node service: its options, its periodic work, and its
description for the API.

Importing this module imports neither FastAPI nor uvicorn nor prometheus_client: an engine that embeds the server does
that late, on a thread.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import kvstow
from kvstow.errors import ConfigError, SettingError
from kvstow.memory.limits import HugePageLimits, MemoryLimits, limits_of
from kvstow_api.directory import Directory, HostMemory, OrphanedMemory
from kvstow_api.hostsettings import INFORMATIONAL_CHECKS, TokenFile, is_loopback, parse_host_names, require_token
from kvstow_service.admin.sockets import AdminSockets
from kvstow_service.admin.tls import ServerTls, TlsFiles

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from kvstow_api.host import ApiHost, HealthCheck

logger = logging.getLogger("kvstow.ticker")

_OVERDUE_SECONDS = 10.0
_JOIN_SECONDS = 1.0
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_CHOSEN = re.compile(r"\[(\w+)\]")


@dataclass(frozen=True, slots=True)
class AdminOptions:
    """Where the server listens and which credentials it accepts. Reads the files, but does not touch the network.

    `port`: 0 takes any free one. `token_file`: tokens for requests over TCP that change anything; without it or client
    certificates such requests are refused, and `host` must be a loopback address. `viewer_token_file`:
    tokens for reading; without it reading is open. `tls`: TCP connections use TLS. `readiness_require`: the
    informational checks that fail `/readyz`. `allowed_hosts`: host names, besides those of loopback, that a server on
    loopback accepts.

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
        """Whether a client's certificate counts as an admin's token."""
        return self.tls is not None and self.tls.client_ca is not None


class Ticked(Protocol):
    """An engine, or a node of many."""

    def tick(self) -> object: ...


class Ticker:
    """Ticks the host every `interval` seconds until `stop`, which is idempotent. No exception ends the thread.

    `renew_tls` is called as often, on a separate thread: it reads files, and a file system may block.
    """

    def __init__(
        self,
        host: Ticked,
        *,
        interval: float = 1.0,
        renew_tls: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stopping = threading.Event()
        self._threads = [_Repeating("the ticker", host.tick, interval, self._stopping, clock)]
        if renew_tls is not None:
            self._threads.append(_Repeating("the check of the TLS files", renew_tls, interval, self._stopping, clock))

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def check(self) -> str | None:
        """Health check: which periodic work has stopped."""
        return next(filter(None, (thread.failure() for thread in self._threads)), None)


class _Repeating:
    """A thread that repeats a call, whatever it raises, and knows when the call last returned."""

    def __init__(
        self,
        name: str,
        act: Callable[[], object],
        interval: float,
        stopping: threading.Event,
        clock: Callable[[], float],
    ) -> None:
        self._name, self._act, self._interval = name, act, interval
        self._stopping = stopping
        self._clock = clock
        self._last = clock()
        self._thread = threading.Thread(target=self._run, name="kvstow-ticker", daemon=True)

    def start(self) -> None:
        self._last = self._clock()
        self._thread.start()

    def join(self) -> None:
        """Waits for a second at most; the thread is a daemon."""
        if self._thread.ident is not None:
            self._thread.join(_JOIN_SECONDS)

    def failure(self) -> str | None:
        """How the work has stopped, or None."""
        if not self._thread.is_alive():
            return f"{self._name} has stopped"
        age = self._clock() - self._last
        return f"{self._name} has not run for {age:.0f} s" if age > _OVERDUE_SECONDS + self._interval else None

    def _run(self) -> None:
        while not self._stopping.wait(self._interval):
            try:
                self._act()
            except Exception:
                logger.exception("%s failed", self._name)
            self._last = self._clock()


def make_api_host(
    directory: Directory,
    ticker: Ticker,
    sockets: AdminSockets,
    options: AdminOptions,
    *,
    mode: str,
    agent_token: str | None = None,
    tls: ServerTls | None = None,
    settings: Mapping[str, Any] | None = None,
    build: Mapping[str, str] | None = None,
    live_checks: Mapping[str, HealthCheck] | None = None,
    startup_checks: Mapping[str, HealthCheck] | None = None,
    orphaned_memory: Callable[[], Sequence[OrphanedMemory]] = tuple,
    attach: str | None = None,
) -> ApiHost:
    """What the API serves on `sockets`. Every reader sees `settings`: no secrets, no paths. `startup_checks` are also
    checks of readiness.

    Host names are restricted on loopback only: elsewhere any name may lead to the server.
    """
    from kvstow_api.host import ApiHost

    settings = settings or {}
    return ApiHost(
        directory=directory,
        version=kvstow.__version__,
        mode=mode,
        addresses=sockets.addresses,
        settings=settings,
        token_file=options.token_file,
        viewer_token_file=options.viewer_token_file,
        allowed_hosts=options.allowed_hosts if sockets.host and is_loopback(sockets.host) else None,
        client_certificates=options.has_certificates,
        certificate_ends=None if tls is None else tls.ends,
        host_memory=partial(measure_memory, limits_of(settings.get("huge_pages", "advised"))),
        orphaned_memory=orphaned_memory,
        attach=attach,
        agent_token=agent_token,
        readiness_require=options.readiness_require,
        live_checks=live_checks or {},
        ready_checks={"ticker": ticker.check, **(startup_checks or {})},
        startup_checks=startup_checks or {},
        build=build or {},
        registry=_registry(),
    )


def measure_memory(limits: MemoryLimits | None = None, huge_pages: Path = _HUGE_PAGES) -> HostMemory:
    """Read the kernel's files on each call, in less than a millisecond. `limits` apply to the pools; the default is
    memory in general. `huge_pages` is a parameter for tests."""
    limits = limits or MemoryLimits()
    headroom = limits.headroom()
    return HostMemory(
        headroom_bytes=None if headroom is None else headroom.num_bytes,
        limit="" if headroom is None else headroom.limit,
        reserve_bytes=limits.reserve_bytes,
        huge_pages="reserved" if isinstance(limits, HugePageLimits) else _chosen(huge_pages),
    )


def _chosen(path: Path) -> str:
    """The word in brackets, as in `always [madvise] never`; empty where the kernel has no such file."""
    try:
        match = _CHOSEN.search(path.read_text())
    except OSError:
        return ""
    return match[1] if match else ""


def _registry() -> CollectorRegistry:
    """Metrics of this process; the API adds the engine's."""
    from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector

    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    GCCollector(registry=registry)
    return registry
