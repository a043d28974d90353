"""The admin server of an engine that lives in somebody else's process.

Importing this module imports neither FastAPI nor uvicorn: that takes half a second, which no host should wait for.
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
from typing import TYPE_CHECKING, Any

from kvstow.control.engine import OffloadEngine
from kvstow.errors import ConflictError, KvstowError
from kvstow_api.tokens import is_loopback
from kvstow_service.adminoptions import AdminOptions
from kvstow_service.agent import AdminAddress
from kvstow_service.rendezvous import Rendezvous
from kvstow_service.sockets import AdminSockets, PortTakenError, TcpAddress, tcp_url
from kvstow_service.switchinterval import short_switch_interval
from kvstow_service.ticker import Ticker
from kvstow_service.tls import ServerTls

if TYPE_CHECKING:
    from kvstow_service.server import AdminServer

logger = logging.getLogger("kvstow.admin")

_PORTS = 16  # tried from the one wanted on: two hosts of eight engines each on one machine
_OPENING_SECONDS = 30.0  # importing FastAPI cannot be interrupted; it takes seconds on a cold disk
_HEAD_START_SECONDS = 0.01  # an import that begins at once holds the interpreter: `start` would take 5 ms, not 0.5
_ANY_ADDRESS = ("0.0.0.0", "::")


class EmbeddedAdmin:
    """Serves the admin API of `engine`, and ticks it, on threads of its own.

    `identity` is what the agents of the engine's ranks make their `Rendezvous` of: any text that no other engine on
    this machine has. `node_host` is this machine's name or address on other nodes, wanted where `admin_host` means all
    addresses. `settings` (no secrets) and `build` are shown by the API.

    Guarantees. `start` returns at once and raises nothing; nothing that goes wrong later reaches the host: it is
    logged, counted (error `admin_server` of the engine) and kept in `failure`. The host's signal handlers stay. One of
    several sockets that cannot be had is logged and done without. `stop` is idempotent; a host that dies without it
    leaves nothing that a successor does not replace. Properties may be read on any thread at any time.
    """

    def __init__(
        self,
        engine: OffloadEngine,
        options: AdminOptions,
        *,
        identity: str,
        mode: str,
        max_capacity_slots: int,
        settings: Mapping[str, Any] | None = None,
        build: Mapping[str, str] | None = None,
        node_host: str = "",
        head_start: float = _HEAD_START_SECONDS,
        freezes_heap: bool = False,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        """Opens nothing, starts nothing.

        `head_start`: seconds from `start` on in which the host has the interpreter for itself; then FastAPI is
        imported, which takes turns with it for half a second. `freezes_heap`: `gc.freeze()` once that has been done,
        for hosts that have frozen theirs: else full collections walk all of it, again and again.
        """
        self.failure: str | None = None
        """Why nobody is served; None while the server starts, serves or was stopped."""
        self._engine, self._options, self._node_host = engine, options, node_host
        self._head_start, self._freezes_heap = head_start, freezes_heap
        self._token = secrets.token_hex(16)
        self._tls: ServerTls | None = None
        self._ticker = Ticker(engine, checks_books=False, chore=None if options.tls is None else self._renew_tls)
        self._sockets = AdminSockets(secure=options.tls is not None)
        self._rendezvous = Rendezvous(identity, environ)
        self._server: AdminServer | None = None
        self._description: dict[str, Any] = {
            "mode": mode,
            "max_capacity_slots": max_capacity_slots,
            "settings": settings,
            "build": build,
        }
        self._warned = False
        self._failing = threading.Lock()
        self._stopping = threading.Event()
        self._opening = threading.Thread(target=self._open, name="kvstow-admin-start", daemon=True)

    def start(self) -> None:
        try:
            self._ticker.start()
            self._opening.start()
        except RuntimeError as error:  # no thread can be had
            self._fail(f"the admin server cannot be started: {error}")

    def stop(self) -> None:
        """Waits for responses under way, 2 s at most, and for a start that is under way."""
        self._stopping.set()
        if self._opening.ident is not None:
            self._opening.join(_OPENING_SECONDS)
        server, self._server = self._server, None
        if server is not None:
            server.stop()
        self._close()
        self._ticker.stop()

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where it answers, such as `http://127.0.0.1:9595` and `unix:/run/...`; empty before and after that."""
        return self._sockets.addresses if self._server is not None and self.failure is None else ()

    @property
    def address_for_remote_ranks(self) -> AdminAddress | None:
        """How agents on other nodes reach it; None where, or as long as, they cannot. Ask only if there are some: an
        `admin_host` on which they never can is warned of, once. Reads no file: hosts ask in every step, which is how
        agents learn of a renewed certificate."""
        host = self._sockets.host
        if is_loopback(host or self._options.host):
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
        if not self._warned:
            self._warned = True
            logger.warning(
                "ranks on other nodes cannot report to %s: set admin_host to a reachable address, and token_file",
                self._options.host,
            )

    def _open(self) -> None:
        if self._stopping.wait(self._head_start):
            return
        try:
            with short_switch_interval():
                server = self._make_server()
            if self._freezes_heap:
                gc.freeze()
            server.start()
            self._server = server
        except Exception as error:  # the host goes on without
            if not isinstance(error, KvstowError):
                logger.exception("the admin server cannot be started")
            self._fail(f"the admin server cannot be started: {error!r}")
        else:
            logger.info("KVStow admin server on %s", " and ".join(self._sockets.addresses))

    def _make_server(self) -> AdminServer:
        # Not earlier: the first import of prometheus_client decides how the whole process keeps its metrics.
        from kvstow_service.adminhost import make_context, make_server

        self._tls = None if self._options.tls is None else ServerTls(self._options.tls)
        self._listen()  # clients that connect now are answered soon
        context = make_context(
            self._engine,
            self._ticker,
            self._sockets,
            self._options,
            agent_token=self._token,
            tls=self._tls,
            **self._description,
        )
        return make_server(context, self._sockets, self._tls, self._fail)

    def _renew_tls(self) -> None:
        if self._tls is not None:
            self._tls.renew()

    def _listen(self) -> None:
        """On every socket that can be had. Raises `ConflictError` for none."""
        options, sockets = self._options, self._sockets
        self._try(self._listen_on_tcp, "without TCP")
        self._try(lambda: self._rendezvous.publish(sockets, self._token), "out of reach of the ranks of this machine")
        if options.uds is not None:
            self._try(partial(sockets.listen_unix, options.uds), "without admin_uds")
        if not sockets.sockets:
            raise ConflictError("no socket can be had; the log says why")

    def _try(self, listen: Callable[[], None], without: str) -> None:
        try:
            listen()
        except (KvstowError, OSError) as error:
            self._engine.count_error("admin_server")
            logger.warning("the admin server stays %s: %s", without, error)

    def _listen_on_tcp(self) -> None:
        wanted = TcpAddress.resolve(self._options.host, self._options.port)
        ports = range(wanted.port, min(wanted.port + _PORTS, 1 << 16)) if wanted.port else (0,)
        for port in ports:
            with suppress(PortTakenError):
                self._sockets.listen_tcp(replace(wanted, port=port))
                if port != wanted.port:
                    logger.warning("port %d is taken: the admin server has port %d", wanted.port, port)
                return
        raise PortTakenError(f"ports {ports[0]} to {ports[-1]} of {wanted.host} are taken")

    def _fail(self, reason: str) -> None:
        """The first reason counts: a server that does not start tells twice."""
        with self._failing:
            if self.failure is None:
                self._engine.count_error("admin_server")
                logger.error("%s; serving goes on without it", reason)
                self.failure = reason
        self._close()

    def _close(self) -> None:
        self._sockets.close()
        self._rendezvous.withdraw()
