"""The standalone host: engine, data plane and admin server in one process."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from kvstow.bytesize import format_size
from kvstow.config import PoolConfig
from kvstow.control.engine import OffloadEngine
from kvstow.errors import InsufficientMemoryError
from kvstow.memory.limits import MemoryLimits, limits_of
from kvstow.memory.region import round_up
from kvstow_api.embeddeddirectory import EmbeddedDirectory
from kvstow_service.adminhost import make_api_host, make_server
from kvstow_service.adminoptions import AdminOptions
from kvstow_service.agent import AdminAddress
from kvstow_service.fleet import Fleet
from kvstow_service.logformat import configure_logs
from kvstow_service.rendezvous import Rendezvous
from kvstow_service.replay.trace import BLOCK_TOKENS, TraceRequest
from kvstow_service.settings import Settings
from kvstow_service.sockets import AdminSockets, TcpAddress
from kvstow_service.stop import StopRequests
from kvstow_service.ticker import Ticker
from kvstow_service.tls import ServerTls
from kvstow_service.traffic import ReplayTraffic, kv_blocks, read_requests

logger = logging.getLogger("kvstow.service")

_DRAIN_POLL_SECONDS = 0.02


def run_service(settings: Settings) -> int:
    """Serve until a signal, the end of a replay that was to be the end, or a failure; returns the exit status.

    Owns the process's signals and its loggers; call it on the main thread. Raises `ConfigError` or another
    `KvstowError` for what keeps it from starting; by then everything it had taken is given back.
    """
    configure_logs(settings.log_format, settings.log_level)
    with ExitStack() as running:
        stops = running.enter_context(StopRequests())
        plan = _check(settings)

        sockets = AdminSockets(plan.address, settings.uds, secure=plan.tls is not None)
        running.callback(sockets.close)

        engine = OffloadEngine(settings.engine_config(plan.block_tokens))
        running.callback(engine.close)
        ticker = Ticker(engine, renew_tls=None if plan.tls is None else plan.tls.renew)
        ticker.start()
        running.callback(ticker.stop)

        agents_reach = _meet_agents(settings, sockets, running)
        host = make_api_host(
            EmbeddedDirectory(engine, plan.pool.max_slots, name="standalone"),
            ticker,
            sockets,
            plan.admin,
            mode="standalone",
            agent_token=agents_reach.token,
            tls=plan.tls,
            settings=public_settings(settings),
        )
        server = make_server(host, sockets, plan.tls, lambda reason: stops.request(reason, 1))
        server.start()
        running.callback(server.stop)
        _announce(settings, sockets)

        fleet = Fleet(settings.ranks, plan.pool, plan.kv_blocks, agents_reach, place=settings.place)
        fleet.start()
        running.callback(fleet.close)

        traffic = ReplayTraffic(settings, plan.requests, lambda status: _on_replay_end(settings, stops, status))
        if plan.requests:
            traffic.start(engine, fleet)

        stop = stops.wait()
        logger.info("stopping: %s", stop.reason)
        _drain(engine, traffic, settings)
    logger.info("stopped")
    return stop.status


@dataclass(frozen=True, slots=True)
class _Plan:
    """What follows from the settings on this machine."""

    address: TcpAddress
    admin: AdminOptions
    requests: Sequence[TraceRequest]
    kv_blocks: int
    pool: PoolConfig
    tls: ServerTls | None

    @property
    def block_tokens(self) -> int | None:
        """Of the trace; without one nobody knows."""
        return BLOCK_TOKENS if self.requests else None


def _check(settings: Settings) -> _Plan:
    """Refuse what can be refused before anything is taken."""
    address = TcpAddress.resolve(settings.host, settings.port)
    admin = settings.admin_options(address.host)
    tls = None if admin.tls is None else ServerTls(admin.tls)
    requests = read_requests(settings)
    blocks = kv_blocks(settings, requests)
    memory_left = require_memory(settings, kv_blocks=blocks if requests else 0)
    return _Plan(address, admin, requests, blocks, settings.pool_config(memory_left), tls)


def _meet_agents(settings: Settings, sockets: AdminSockets, running: ExitStack) -> AdminAddress:
    """How the ranks of this process reach the server: over a Unix socket that is there or that TLS calls for, else over
    loopback TCP."""
    token = secrets.token_hex(16)
    if settings.uds is not None:
        return AdminAddress("http://kvstow", token, settings.uds)
    if settings.tls_cert is None:
        return AdminAddress(sockets.url, token)
    rendezvous = Rendezvous(f"serve-{os.getpid()}")
    rendezvous.publish(sockets, token)
    running.callback(rendezvous.withdraw)
    found = rendezvous()
    assert found is not None, "published, and listening"
    return found


def require_memory(settings: Settings, *, kv_blocks: int) -> int:
    """Bytes that the pools of all ranks may have together. Raises `InsufficientMemoryError` if that is too little:
    each pool checks for itself, but only together they may be too large."""
    limits = limits_of(settings.huge_pages)
    pools = settings.ranks * round_up(settings.pool_size, limits.page_bytes)
    caches = settings.ranks * kv_blocks * settings.slot_size if settings.device == "cpu" else 0
    beside = caches if settings.huge_pages == "advised" else 0  # no KV cache lies in reserved huge pages
    shortage = limits.shortage(pools + beside) or (MemoryLimits().shortage(caches) if caches else None)
    if shortage is not None:
        cache_words = f" and {format_size(caches)} of KV cache" if caches else ""
        raise InsufficientMemoryError(
            f"{settings.ranks} x {format_size(settings.pool_size)} of pool{cache_words} cannot fit: {shortage.message}"
        )
    headroom = limits.headroom()
    return pools if headroom is None else headroom.num_bytes - limits.reserve_bytes - beside


_PATHS = {"token_file", "viewer_token_file", "tls_cert", "tls_key", "tls_client_ca", "uds", "replay"}


def public_settings(settings: Settings) -> dict[str, Any]:
    """For every reader of /v1/info: paths of this machine stay out."""
    return settings.model_dump(mode="json", exclude=_PATHS)


def _announce(settings: Settings, sockets: AdminSockets) -> None:
    logger.info("admin server on %s", " and ".join(sockets.addresses))
    guarded = settings.token_file or settings.tls_client_ca
    logger.info("changes through it %s", "need a token" if guarded else "need no token: loopback only")
    each = f"{format_size(settings.pool_size)} in {settings.capacity_slots} slots"
    how = "registered with CUDA" if settings.device == "cuda" else "locked in memory (mlock)"
    pinning = how if settings.lock else "populated, not locked"
    if settings.huge_pages == "reserved":
        pinning = "in reserved huge pages" + (f", {how}" if settings.device == "cuda" else "")
    logger.info("pool: %d rank%s x %s, %s", settings.ranks, "s" if settings.ranks > 1 else "", each, pinning)


def _on_replay_end(settings: Settings, stops: StopRequests, status: int) -> None:
    if settings.exit_after_replay:
        stops.request("the replay has ended", status)
    else:
        logger.info("the replay has ended; the service continues")


def _drain(engine: OffloadEngine, traffic: ReplayTraffic, settings: Settings) -> None:
    """Fail readiness, then let traffic finish while the server still answers."""
    engine.admin.drain("all", settings.drain_deadline)
    time.sleep(settings.shutdown_delay)
    deadline = time.monotonic() + settings.drain_deadline
    traffic.stop()
    while not (status := engine.admin.drain_status).drained and time.monotonic() < deadline:
        time.sleep(_DRAIN_POLL_SECONDS)
    if not status.drained:
        logger.warning("%d transfers did not end in %g s", status.pending_transfers, settings.drain_deadline)
