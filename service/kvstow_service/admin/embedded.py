"""The admin server inside a host process, such as an inference engine.

Importing this module imports neither FastAPI nor uvicorn. They take half a second, and no host should wait for that.
"""

from __future__ import annotations

import gc
import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from kvstow.control.engine import OffloadEngine
from kvstow.errors import ConflictError, KvstowError
from kvstow_api.hostsettings import is_loopback
from kvstow_service.admin.adminhost import AdminOptions, Ticker, make_api_host
from kvstow_service.admin.agent import AdminAddress
from kvstow_service.admin.ranksocket import RankSocket
from kvstow_service.admin.rendezvous import ADMIN, Rendezvous
from kvstow_service.admin.sockets import AdminSockets, PortTakenError, TcpAddress, tcp_url
from kvstow_service.admin.tls import ServerTls
from kvstow_service.process.logwriter import LogWriter
from kvstow_service.process.switchinterval import short_switch_interval

if TYPE_CHECKING:
    from kvstow_service.admin.server import AdminServer

logger = logging.getLogger("kvstow.admin")

_PORTS = 16  # how many ports are tried, from the requested one on: enough for two hosts with eight engines each
_OPENING_SECONDS = 30.0  # how long `stop` waits for the import of FastAPI, which takes seconds on a cold disk
_HEAD_START_SECONDS = (
    0.01  # an import that began at once would hold the GIL, and `start` would take 5 ms instead of 0.5
)
_ANY_ADDRESS = ("0.0.0.0", "::")


class EmbeddedAdmin:
    """Serves the admin API of `engine`, takes the reports of its ranks, and ticks the engine, on threads of its own.
    The ranks of this host do not depend on the API: see `RankSocket`.

    `identity` is any text that no other engine on this machine uses. The ranks' agents use it for their `Rendezvous`.
    `node_host` is this machine's name or address for other nodes. It is needed if the server listens on all addresses.
    The API shows `settings`, which must have no secrets, and `build`. `options.port` is the first of 16 ports that are
    tried.

    `start` returns at once and raises nothing. Later errors do not reach the host. They are logged, counted as the
    engine's error `admin_server`, and kept in `failure`. The host keeps its signal handlers. If one of several sockets
    cannot be opened, that is logged, and the others serve. `stop` is idempotent. If a host dies without it, its
    successor replaces what it has left. Any thread may read the properties at any time.
    """

    def __init__(
        self,
        engine: OffloadEngine,
        options: AdminOptions,
        *,
        identity: str,
        mode: str,
        max_capacity_slots: int,
        settings: Mapping[str, Any] = MappingProxyType({}),
        build: Mapping[str, str] = MappingProxyType({}),
        node_host: str = "",
        head_start: float = _HEAD_START_SECONDS,
        freezes_heap: bool = False,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        """Only stores the parameters.

        `head_start` is how many seconds after `start` FastAPI is imported. The import competes with the host for the
        GIL for half a second. With `freezes_heap`, `gc.freeze()` is called after the import. Hosts that have frozen
        their own heap need that, because otherwise each full collection would walk all imported objects.
        """
        self.failure: str | None = None
        """A sentence that says why the server does not serve. None while it starts or serves, and after `stop`."""
        self._engine, self._options, self._node_host = engine, options, node_host
        self._token = secrets.token_hex(16)
        self._tls: ServerTls | None = None
        self._ticker = Ticker(engine.tick, renew_tls=None if options.tls is None else self._renew_tls)
        self._sockets = AdminSockets(secure=options.tls is not None)
        self._rendezvous = Rendezvous(identity, environ)
        self._ranks = RankSocket(engine, self._rendezvous)
        self._server: AdminServer | None = None
        self._max_capacity_slots = max_capacity_slots
        self._mode, self._settings, self._build = mode, settings, build
        self._warned_of_loopback = False
        self._failing = threading.Lock()
        self._stopping = threading.Event()
        self._opening = threading.Thread(
            target=self._open, args=(head_start, freezes_heap), name="kvstow-admin-start", daemon=True
        )

    def start(self) -> None:
        try:
            self._ranks.start()
            self._ticker.start()
            self._opening.start()
        except RuntimeError as error:  # the thread cannot be started
            self._fail(f"the admin server cannot be started: {error}")

    def stop(self) -> None:
        """Stop the server. Waits up to 2 s for responses in progress, and for a start in progress."""
        self._stopping.set()
        if self._opening.ident is not None:
            self._opening.join(_OPENING_SECONDS)
        server, self._server = self._server, None
        if server is not None:
            server.stop()
        self._sockets.close()
        self._ranks.stop()
        self._ticker.stop()

    @property
    def ranks_failure(self) -> str | None:
        """Why this host's ranks cannot report over a Unix socket; None if they can, or may soon."""
        return self._ranks.failure

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses at which it serves, such as `http://127.0.0.1:9595` and `unix:/run/...`. Empty while it does
        not serve."""
        return self._sockets.addresses if self._server is not None and self.failure is None else ()

    @property
    def address_for_ranks(self) -> AdminAddress | None:
        """The address for agents that do not find the ranks' socket. None if they cannot reach it, or cannot yet.

        Read it only if there are such agents, because an address that agents on other nodes can never reach is logged
        once as a warning. Hosts read it in every step, which is how agents learn of a renewed certificate, so it reads
        no file.
        """
        host = self._sockets.host
        if is_loopback(host or self._options.host) and self.ranks_failure is None:
            self._warn_of_loopback()
            return None
        if not self.addresses or host is None:
            return None
        routable = (self._node_host or socket.gethostname()) if host in _ANY_ADDRESS else host
        if self._tls is None:
            return AdminAddress(tcp_url(routable, self._sockets.port), self._token)
        url = tcp_url(routable, self._sockets.port, "https")
        return AdminAddress(url, self._token, certificate=self._tls.certificates)

    def _warn_of_loopback(self) -> None:
        if not self._warned_of_loopback:
            self._warned_of_loopback = True
            logger.warning(
                "ranks on other nodes cannot report to %s: set admin_host to a reachable address, and token_file",
                self._options.host,
            )

    def _open(self, head_start: float, freezes_heap: bool) -> None:
        if self._stopping.wait(head_start):
            return
        try:
            with short_switch_interval():
                server = self._make_server()
            if freezes_heap:
                gc.freeze()
            server.start()
            self._server = server
        except Exception as error:  # the host must continue without the server
            if not isinstance(error, KvstowError):
                logger.exception("the admin server cannot be started")
            self._fail(f"the admin server cannot be started: {error!r}")
        else:
            logger.info("KVStow admin server on %s", " and ".join(self._sockets.addresses))

    def _make_server(self) -> AdminServer:
        # Import late: the first import of prometheus_client decides how the whole process keeps its metrics.
        from kvstow_api.app import create_app
        from kvstow_api.directory import EmbeddedDirectory
        from kvstow_service.admin.server import AdminServer

        self._tls = None if self._options.tls is None else ServerTls(self._options.tls)
        self._listen()  # before the rest, so that clients can connect now and are answered soon
        model = str(self._settings.get("model", ""))
        host = make_api_host(
            EmbeddedDirectory(self._engine, self._max_capacity_slots, name=self._mode, model=model),
            self._ticker,
            self._sockets,
            self._options,
            tls=self._tls,
            settings=self._settings,
            agent_token=self._token,
            mode=self._mode,
            build=self._build,
        )
        log = LogWriter(partial(self._engine.count_error, "log_line_dropped"))
        return AdminServer(create_app(host), self._sockets.sockets, self._fail, tls=self._tls, log=log)

    def _renew_tls(self) -> None:
        if self._tls is not None:
            self._tls.renew()

    def _listen(self) -> None:
        """Open every socket that can be opened. Raises `ConflictError` if none can be opened."""
        sockets = self._sockets
        self._try(self._listen_on_tcp, "has no TCP socket")
        publish = partial(self._rendezvous.publish, ADMIN, sockets.listen_unix)
        self._try(publish, "has no Unix socket, so changes need a token")
        if not sockets.sockets:
            raise ConflictError("no socket can be opened; the log says why")

    def _try(self, listen: Callable[[], None], consequence: str) -> None:
        try:
            listen()
        except (KvstowError, OSError) as error:
            self._engine.count_error("admin_server")
            logger.warning("the admin server %s: %s", consequence, error)

    def _listen_on_tcp(self) -> None:
        wanted = TcpAddress.resolve(self._options.host, self._options.port)
        ports = range(wanted.port, min(wanted.port + _PORTS, 1 << 16)) if wanted.port else (0,)
        for port in ports:
            with suppress(PortTakenError):
                self._sockets.listen_tcp(replace(wanted, port=port))
                if port != wanted.port:
                    logger.warning("port %d is taken: the admin server uses port %d", wanted.port, port)
                return
        raise PortTakenError(f"ports {ports[0]} to {ports[-1]} of {wanted.host} are taken")

    def _fail(self, reason: str) -> None:
        """Keep the first reason, because a server that does not start reports twice."""
        with self._failing:
            if self.failure is None:
                self._engine.count_error("admin_server")
                logger.error("%s; the engine continues without it", reason)
                self.failure = reason
        self._sockets.close()
