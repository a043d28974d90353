"""What a host process tells the admin API about itself: a node, or an engine that embeds the server."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector

import kvstow
from kvstow.memory.limits import HugePageLimits, MemoryLimits, limits_of
from kvstow_api.app import create_app
from kvstow_api.directory import Directory, HostMemory, OrphanedMemory
from kvstow_api.host import ApiHost, HealthCheck
from kvstow_api.hostsettings import is_loopback
from kvstow_service.admin.adminoptions import AdminOptions
from kvstow_service.admin.server import AdminServer
from kvstow_service.admin.sockets import AdminSockets
from kvstow_service.admin.ticker import Ticker
from kvstow_service.admin.tls import ServerTls
from kvstow_service.process.logwriter import LogWriter

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_CHOSEN = re.compile(r"\[(\w+)\]")


def make_server(
    host: ApiHost,
    sockets: AdminSockets,
    tls: ServerTls | None,
    on_failure: Callable[[str], None],
    log: LogWriter | None = None,
) -> AdminServer:
    """The server of `host` on `sockets`."""
    return AdminServer(
        create_app(host),
        sockets.sockets,
        on_failure,
        tls=None if tls is None else tls.context,
        log=log,
    )


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
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    GCCollector(registry=registry)
    return registry
