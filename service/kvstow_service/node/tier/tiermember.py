"""The node's own transfers as a client of a pool's memory, like the workers of an engine."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable
from threading import Lock

from kvstow.attach.hello import Hello
from kvstow.attach.peer import Peer
from kvstow.control.attachedsession import TierSession
from kvstow_service.node.attach.sessionhost import SessionLink
from kvstow_service.node.pools.nodepool import KnownNamespace, NodePool
from kvstow_service.node.pools.nodesession import NodeSession

ENGINE = "fleet tier"


class TierMember(NodeSession):
    """Gets the pool's extents, lets go of them when they are recalled, and is recorded for the next service. It is no
    engine: the host does not list it, and it asks for no memory.

    `control` has the processes, and `add` gives it more sessions, one for each namespace, with the same memory. What
    processes may use memory is set before they get any. `add` and `discard` may be called from any thread.
    """

    is_engine = False

    def __init__(
        self, pool: NodePool, namespace: KnownNamespace, control: TierSession, make_link: Callable[[str], SessionLink]
    ) -> None:
        session_id = secrets.token_hex(8)
        hello = Hello(
            role="scheduler",
            engine=ENGINE,
            host=socket.gethostname(),
            pid=os.getpid(),
            pool=pool.identity,
            namespace=namespace.identity,
            token=secrets.token_hex(16),
        )
        peer = Peer(os.getpid(), os.geteuid(), os.getegid(), None)
        super().__init__(session_id, hello, peer, make_link(session_id), pool, namespace, control)
        control.name, control.label = ENGINE, f"{ENGINE}: "
        self.tier_ranks = sorted(pool.storing_ranks)
        """Those that have objects of their own in the store."""
        self._lock = Lock()
        self._controls: list[TierSession] = [control]
        self._clients: set[str] = set()
        self._registered = self._applied = 0

    def wanted_slots(self) -> int:
        """As few as can be said: it uses what the engines have."""
        return 1

    def worker_hello(self, rank: int) -> Hello:
        return Hello(
            role="worker", engine=ENGINE, host=self.hello.host, pid=self.pid, rank=rank, token=self.hello.token
        )

    def add(self, control: TierSession) -> None:
        """A session of another namespace."""
        with self._lock:
            for client in self._clients:
                control.map_memory(client)
            self._controls.append(control)
            control.set_registered(self._registered, self._applied)

    def discard(self, control: TierSession) -> None:
        with self._lock:
            self._controls.remove(control)

    def controls(self) -> list[TierSession]:
        with self._lock:
            return list(self._controls)

    def note_client(self, client: str) -> None:
        """It will get memory."""
        with self._lock:
            self._clients.add(client)
            for control in self._controls:
                control.map_memory(client)

    def _tell_control(self, rank: int) -> None:
        memories = [self._follow_pool(one) for one in self.tier_ranks]
        with self._lock:
            self._registered = min(memory.registered_slots for memory in memories)
            self._applied = min(memory.applied for memory in memories)
            for control in self._controls:
                control.set_registered(self._registered, self._applied)
