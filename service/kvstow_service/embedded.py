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
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstow.control.engine import OffloadEngine
from kvstow.errors import ConfigError, ConflictError, KvstowError
from kvstow_api.checks import INFORMATIONAL_CHECKS
from kvstow_api.hostnames import parse_host_names
from kvstow_api.tokens import TokenFile, is_loopback, require_token
from kvstow_service.agent import AdminAddress
from kvstow_service.rendezvous import Rendezvous
from kvstow_service.sockets import AdminSockets, PortTakenError, TcpAddress, tcp_url
from kvstow_service.switchinterval import short_switch_interval
from kvstow_service.ticker import Ticker
from kvstow_service.tls import ServerTls, TlsFiles

if TYPE_CHECKING:
    from kvstow_api.context import ApiContext
    from kvstow_service.server import AdminServer

logger = logging.getLogger("kvstow.admin")

_PORTS = 16  # tried from the one wanted on: two hosts of eight engines each on one machine
_OPENING_SECONDS = 30.0  # importing FastAPI cannot be interrupted; it takes seconds on a cold disk
_HEAD_START_SECONDS = 0.01  # an import that begins at once holds the interpreter: `start` would take 5 ms, not 0.5
_ANY_ADDRESS = ("0.0.0.0", "::")


@dataclass(frozen=True, slots=True)
class EmbeddedOptions:
    """Where the server listens, and whom it obeys; checked when made, without touching the network.

    `admin_port`: the first of 16 that are tried; 0 takes any. `admin_uds`: a Unix socket as well, for people.
    `token_file`: tokens that requests which change anything need; not optional where `admin_host` is not loopback.
    `viewer_token_file`: tokens that are enough for reading, which then needs one. `tls`: TCP speaks TLS; ranks of
    other nodes are told which certificate to trust. `readiness_require`: of pool and pinned, what must be well before
    `/readyz` is. `allowed_hosts`: names, beside those of loopback, under which a server on loopback may be asked.
    """

    admin_host: str = "127.0.0.1"
    admin_port: int = 9595
    admin_uds: Path | None = None
    token_file: Path | None = None
    readiness_require: tuple[str, ...] = ()
    viewer_token_file: Path | None = None
    tls: TlsFiles | None = None
    allowed_hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if type(self.admin_port) is not int or not 0 <= self.admin_port < 1 << 16:
            raise ConfigError("admin_port", self.admin_port, "0 (any free port) to 65535")
        if not set(self.readiness_require) <= set(INFORMATIONAL_CHECKS):
            raise ConfigError("readiness_require", self.readiness_require, " and ".join(INFORMATIONAL_CHECKS))
        parse_host_names("allowed_hosts", self.allowed_hosts)
        require_token(self.admin_host, self.token_file, certificates=self.has_certificates)
        for path in (self.token_file, self.viewer_token_file):
            if path is not None:
                TokenFile(path)
        if self.viewer_token_file is not None and self.token_file is None and not self.has_certificates:
            raise ConfigError("viewer_token_file", str(self.viewer_token_file), "a file only beside a token_file")
        if self.tls is not None:
            self.tls.read()

    @property
    def has_certificates(self) -> bool:
        """Whether a client's certificate counts as an admin's token."""
        return self.tls is not None and self.tls.client_ca is not None


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
        options: EmbeddedOptions,
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
        self._listeners = AdminSockets(secure=options.tls is not None)
        self._rendezvous = Rendezvous(identity, environ)
        self._server: AdminServer | None = None

        def make() -> ApiContext:
            # Only now: whoever imports prometheus_client decides for its whole process how its metrics are kept.
            from kvstow_service.adminhost import make_context

            return make_context(
                engine,
                self._ticker,
                self._listeners,
                mode=mode,
                max_capacity_slots=max_capacity_slots,
                settings=settings or {},
                agent_token=self._token,
                token_file=options.token_file,
                viewer_token_file=options.viewer_token_file,
                client_certificates=options.has_certificates,
                certificate_ends=None if self._tls is None else self._tls.ends,
                readiness_require=options.readiness_require,
                allowed_hosts=options.allowed_hosts,
                build=build,
            )

        self._make_context = make
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
        return self._listeners.addresses if self._server is not None and self.failure is None else ()

    @property
    def address_for_remote_ranks(self) -> AdminAddress | None:
        """How agents on other nodes reach it; None where, or as long as, they cannot. Ask only if there are some: an
        `admin_host` on which they never can is warned of, once. Reads no file: hosts ask in every step, which is how
        agents learn of a renewed certificate."""
        host = self._listeners.host
        if is_loopback(host or self._options.admin_host):
            self._warn_of_loopback()
            return None
        if not self.addresses or host is None:
            return None
        routable = (self._node_host or socket.gethostname()) if host in _ANY_ADDRESS else host
        if self._tls is None:
            return AdminAddress(tcp_url(routable, self._listeners.port), self._token)
        url = tcp_url(routable, self._listeners.port, "https")
        return AdminAddress(url, self._token, certificate=self._tls.certificates)

    def _warn_of_loopback(self) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "ranks on other nodes cannot report to %s: set token_file, and admin_host to an address they can reach",
                self._options.admin_host,
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
            logger.info("KVStow admin server on %s", " and ".join(self._listeners.addresses))

    def _make_server(self) -> AdminServer:
        from kvstow_api.app import create_app
        from kvstow_service.server import AdminServer

        self._tls = None if self._options.tls is None else ServerTls(self._options.tls)
        self._listen()  # only now: who connects is answered at once
        tls = None if self._tls is None else self._tls.context
        return AdminServer(
            create_app(self._make_context()),
            self._listeners.sockets,
            self._fail,
            tls=tls,
            on_lost_line=partial(self._engine.count_error, "log_line_dropped"),
        )

    def _renew_tls(self) -> None:
        if self._tls is not None:
            self._tls.renew()

    def _listen(self) -> None:
        """On every socket that can be had. Raises `ConflictError` for none."""
        options, listeners = self._options, self._listeners
        self._try(self._listen_on_tcp, "without TCP")
        self._try(lambda: self._rendezvous.publish(listeners, self._token), "out of reach of the ranks of this machine")
        if options.admin_uds is not None:
            self._try(partial(listeners.listen_unix, options.admin_uds), "without admin_uds")
        if not listeners.sockets:
            raise ConflictError("no socket can be had; the log says why")

    def _try(self, listen: Callable[[], None], without: str) -> None:
        try:
            listen()
        except (KvstowError, OSError) as error:
            self._engine.count_error("admin_server")
            logger.warning("the admin server stays %s: %s", without, error)

    def _listen_on_tcp(self) -> None:
        wanted = TcpAddress.resolve(self._options.admin_host, self._options.admin_port)
        ports = range(wanted.port, min(wanted.port + _PORTS, 1 << 16)) if wanted.port else (0,)
        for port in ports:
            with suppress(PortTakenError):
                self._listeners.listen_tcp(replace(wanted, port=port))
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
        self._listeners.close()
        self._rendezvous.withdraw()
