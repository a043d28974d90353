"""The process of `kvstow serve`: a node, the thread that ticks it, and its admin server."""

from __future__ import annotations

import logging
import os
import threading
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from kvstow.attach.peer import overflow_uid
from kvstow.bytesize import format_size
from kvstow.errors import ConflictError, InsufficientMemoryError
from kvstow.memory.limits import MemoryLimits, limits_of
from kvstow.tier.blockstore import BlockStore
from kvstow_api.app import create_app
from kvstow_api.directory import Directory
from kvstow_service.admin.adminhost import Ticker, make_api_host
from kvstow_service.admin.server import AdminServer
from kvstow_service.admin.sockets import AdminSockets, TcpAddress, group_id, require_folder
from kvstow_service.admin.tls import ServerTls
from kvstow_service.node.node import Node
from kvstow_service.node.settings import Settings
from kvstow_service.node.survival.orphanedmemory import find_orphaned_memory, running_services
from kvstow_service.process.logwriter import QueuedLog, configure_logs
from kvstow_service.process.runningclock import RunningClock
from kvstow_service.process.stop import StopRequests
from kvstow_service.process.switchinterval import short_switch_interval
from kvstow_service.stores.disk.diskstore import DiskStore
from kvstow_service.stores.disk.startcheck import check_paths
from kvstow_service.stores.stores import open_store, shown_url

logger = logging.getLogger("kvstow.service")

_DRAIN_POLL_SECONDS = 0.02


def run_service(settings: Settings) -> int:
    """Serve until a signal or a failure. Returns the exit status.

    It owns the process's signals and its loggers, so call it on the main thread. Raises `ConfigError` or another
    `KvstowError` if it cannot start. It has then given back everything that it had taken.
    """
    log = configure_logs(settings.log_format, settings.log_level)
    try:
        return _serve(settings, log)
    finally:
        log.stop()


def _serve(settings: Settings, log: QueuedLog) -> int:
    with ExitStack() as running:
        stops = running.enter_context(StopRequests())
        address = TcpAddress.resolve(settings.host, settings.port)  # checks come before anything is taken
        admin = settings.admin_options(address.host)
        tls = None if admin.tls is None else ServerTls(admin.tls)
        attach_group, admin_group = (
            None if name is None else group_id(setting, name)
            for setting, name in (("attach_group", settings.attach_group), ("admin_group", settings.admin_group))
        )
        store = _store_below(settings)
        require_memory(settings.budget_bytes, limits_of(settings.huge_pages))
        if tls is not None:
            stops.on_reload = tls.renew

        sockets = AdminSockets(address, secure=tls is not None)
        running.callback(sockets.close)
        clock = RunningClock()
        node = Node(
            settings,
            attach_group=attach_group,
            store=store,
            on_failure=lambda reason: stops.request(reason, 1),
            clock=clock,
        )
        running.callback(node.close)
        log.queue.on_drop = partial(node.count_error, "log_line_dropped")
        _listen_for_changes(sockets, settings.admin_path, admin_group, node)
        ticker = Ticker(node.tick, renew_tls=None if tls is None else tls.renew, clock=clock)

        host = make_api_host(
            node,
            ticker,
            sockets,
            admin,
            mode="node",
            tls=tls,
            settings=public_settings(settings),
            live_checks={"node": node.live_failure},
            startup_checks={"node": node.start_failure},
            orphaned_memory=lambda: find_orphaned_memory(running_services()),
            attach=f"unix:{settings.attach_path}",
        )
        server = AdminServer(create_app(host), sockets.sockets, lambda reason: stops.request(reason, 1), tls=tls)
        server.start()  # before the node, so that it answers while the node recovers what an earlier service has left
        running.callback(server.stop)
        with short_switch_interval():  # so that the admin server answers while the node recovers a million blocks
            node.start()
        clock.watch()
        for each in (ticker, Ticker(clock.watch)):  # two, as `Node.tick` may take longer than the clock may wait
            each.start()
            running.callback(each.stop)
        _announce(settings, sockets)

        stop = stops.wait()
        logger.info("stopping: %s", stop.reason)
        _drain(node, settings, stops.hurried)
        if not stop.status and not settings.keep_on_stop:  # otherwise the next service takes everything over
            node.give_back()
    logger.info("stopped")
    return stop.status


def require_memory(num_bytes: int, limits: MemoryLimits) -> None:
    """Raise `InsufficientMemoryError` if this machine or its cgroup can never have that much memory.

    Shared memory in use counts as available here. It may belong to an earlier service: its keeper hands it over, or
    its engines release it when they attach. The populator checks each of its steps against the memory that is available
    at that time.
    """
    if shortage := limits.shortage(num_bytes, beside_shared=True):
        raise InsufficientMemoryError(f"--memory {format_size(num_bytes)} cannot fit: {shortage.message}")
    if shortage := limits.shortage(num_bytes):
        logger.warning("memory is short until shared memory in use is handed over or freed: %s", shortage.message)


_PATHS = {
    "token_file",
    "viewer_token_file",
    "tls_cert",
    "tls_key",
    "tls_client_ca",
    "admin_socket",
    "attach_socket",
    "state",
}


def public_settings(settings: Settings) -> dict[str, Any]:
    """Return the settings that every reader of /v1/info may see. Paths of this machine and the user of the store are
    left out."""
    shown: dict[str, Any] = settings.model_dump(mode="json", exclude=_PATHS)
    return shown if settings.tier is None else {**shown, "tier": shown_url(settings.tier)}


def _listen_for_changes(sockets: AdminSockets, path: Path, group: int | None, directory: Directory) -> None:
    """Open the admin socket. If that fails, the service still serves engines and answers all reading requests."""
    if os.geteuid() == overflow_uid():
        logger.warning(
            "this service runs as uid %d, the kernel's overflow uid, which also stands for every user that this "
            "container does not map: the admin socket takes changes only from root, and engines of this user cannot "
            "attach",
            os.geteuid(),
        )
    try:
        require_folder(path.parent, 0o700 if group is None else 0o750, group)
        sockets.listen_unix(path, group)
    except ConflictError as error:
        directory.count_error("admin_server")
        logger.warning("there is no admin socket, so changes need a token: %s; --admin-socket names another", error)


def _announce(settings: Settings, sockets: AdminSockets) -> None:
    logger.info("admin server on %s", " and ".join(sockets.addresses))
    guarded = settings.token_file or settings.tls_client_ca
    over_tcp = "and over TCP with a token" if guarded else "and not over TCP"
    if any(address.startswith("unix:") for address in sockets.addresses):  # otherwise a warning has named the reason
        logger.info("changes are taken through the Unix socket, %s", over_tcp)
    logger.info("engines attach at unix:%s", settings.attach_path)
    pages = "in reserved huge pages" if settings.huge_pages == "reserved" else "populated in the background"
    logger.info("memory: %s, %s", format_size(settings.budget_bytes), pages)


def _drain(node: Directory, settings: Settings, hurried: threading.Event) -> None:
    """Let readiness fail, then let transfers finish while both servers still answer. Ends early once `hurried` is
    set."""
    node.switches.drain("all", settings.drain_deadline)
    hurried.wait(settings.shutdown_delay)
    deadline = time.monotonic() + settings.drain_deadline
    while not (status := node.switches.drain_status).drained and time.monotonic() < deadline:
        if hurried.wait(_DRAIN_POLL_SECONDS):
            break
    if not status.drained:
        logger.warning("the service stops although %d transfers have not ended", status.pending_transfers)


def _store_below(settings: Settings) -> BlockStore | None:
    """Open the store below the pools, if there is one. Waits for disks for a few seconds at most. Raises as
    `check_paths` and `open_store`."""
    if settings.disk:
        paths = check_paths(settings.disk, settings.disk_size)
        return DiskStore(paths, settings.disk_size, settings.disk_writes)
    return None if settings.tier is None else open_store(settings.tier)
