"""What a host process tells the admin API about itself, embedded or standalone."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector

import kvstow
from kvstow.control.engine import OffloadEngine
from kvstow.memory.limits import HugePageLimits, MemoryLimits, limits_of
from kvstow_api.context import ApiContext
from kvstow_api.measurements import HostMemory
from kvstow_api.tokens import is_loopback
from kvstow_service.sockets import AdminSockets
from kvstow_service.ticker import Ticker

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_CHOSEN = re.compile(r"\[(\w+)\]")


def make_context(
    engine: OffloadEngine,
    ticker: Ticker,
    listeners: AdminSockets,
    *,
    mode: str,
    max_capacity_slots: int,
    settings: Mapping[str, Any],
    agent_token: str,
    token_file: Path | None = None,
    viewer_token_file: Path | None = None,
    allowed_hosts: tuple[str, ...] = (),
    client_certificates: bool = False,
    certificate_ends: Callable[[], float] | None = None,
    readiness_require: tuple[str, ...] = (),
    build: Mapping[str, str] | None = None,
) -> ApiContext:
    """The context of a server on `listeners`, with the figures of this process. `settings` are for every reader: no
    secrets, no paths. `allowed_hosts` counts on loopback only: elsewhere any name leads to the server."""
    return ApiContext(
        engine=engine,
        max_capacity_slots=max_capacity_slots,
        version=kvstow.__version__,
        mode=mode,
        addresses=listeners.addresses,
        settings=settings,
        token_file=token_file,
        viewer_token_file=viewer_token_file,
        allowed_hosts=allowed_hosts if listeners.host and is_loopback(listeners.host) else None,
        client_certificates=client_certificates,
        certificate_ends=certificate_ends,
        host_memory=partial(measure_memory, limits_of(settings.get("huge_pages", "advised"))),
        agent_token=agent_token,
        readiness_require=readiness_require,
        ready_checks={"ticker": ticker.check},
        build={"torch": _installed("torch"), **(build or {})},
        registry=_registry(),
    )


def measure_memory(limits: MemoryLimits | None = None, huge_pages: Path = _HUGE_PAGES) -> HostMemory:
    """Reads the kernel's files on each call, in less than a millisecond. `limits` apply to the pools; the default is
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


def _installed(distribution: str) -> str:
    """Its version, from the metadata: importing torch here would hold up the start."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "unknown"


def _registry() -> CollectorRegistry:
    """For figures of this process beside the engine's own."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    GCCollector(registry=registry)
    return registry
