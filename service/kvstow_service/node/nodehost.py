"""The control plane of a node: its pools, and the engines that are attached to them."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from threading import RLock

from msgspec.structs import replace

from kvstow.attach.calls import ResetDone
from kvstow.attach.hello import Hello, Welcome
from kvstow.attach.identity import NamespaceIdentity, PoolIdentity
from kvstow.attach.peer import Peer
from kvstow.bytesize import format_size
from kvstow.control.administration import HostSwitches
from kvstow.control.leases import SLOTS_OF_LEASE
from kvstow.control.session import MOST_HELD, MOST_HELD_SLOTS
from kvstow.errors import AttachRefusedError, ConflictError, NotFoundError
from kvstow.owners import Holding, SharedLimit
from kvstow.plaintext import plain
from kvstow.status import NamespaceStatus, SessionStatus, UserLimit
from kvstow.tier.blockstore import Purged
from kvstow_service.node.pools.memorythread import MemoryThread
from kvstow_service.node.pools.nodepool import KnownNamespace, NodePool, PoolSettings, sharing_off, unique_name
from kvstow_service.node.pools.nodesession import Later, NodeSession, Send
from kvstow_service.node.survival.roster import PoolRecord, WorkerRecord
from kvstow_service.node.tier.nodestore import NodeStore

RANKS_OF_USER = 1024
"""How many ranks all sessions of one user (uid) may have. The status of each rank takes 20 us, several times a
second."""
POOLS_OF_USER = 64
NAMESPACES_OF_USER = 256
"""How many identities of namespaces one user may have. The namespaces of engines that have reset their cache do not
count, because they share an identity. If an engine has a new hash seed at each start, each start has a new
identity."""

logger = logging.getLogger("kvstow.node")


class NodeHost:
    """The pools and sessions of a node.

    The attach server's thread opens and ends sessions, and makes the engines' calls. None of them waits: the work in a
    pool is O(blocks given) under the pool's lock, and all work on memory is left to the `MemoryThread`. All other
    methods may be called from any thread.

    The calls for a session come in this order: `open_session`; the engine's calls; `NodeSession.lose` once;
    `session_over` once. No call mentions the session after that. Its id is never reused.

    A pool is made for its first session, and only `_close_pool` ends it. It is in use while it has sessions.

    There are two kinds of locks, taken in this order: the host's own, which guards which pools and sessions exist, then
    a pool's. Both are held for microseconds, and neither is held during a system call.
    """

    def __init__(
        self,
        memory: MemoryThread,
        *,
        settings: PoolSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine_id = secrets.token_hex(8)
        self.switches = HostSwitches(lambda: [pool.facade.admin for pool in self.pools()], clock=clock)
        self._memory = memory
        self._settings = settings or PoolSettings()
        self._clock = clock
        self._lock = RLock()
        self.tier: NodeStore | None = None
        """The store below the pools, if there is one. It is set once, before an engine attaches."""
        self._pools: dict[str, NodePool] = {}
        self._closing: dict[str, NodePool] = {}
        """Pools that lookups by name no longer find, but whose names are still taken."""
        self._sessions: dict[str, NodeSession] = {}
        self.held = SharedLimit(2 * (MOST_HELD_SLOTS + SLOTS_OF_LEASE * MOST_HELD))
        """The limit for the slots that the leases of all pools hold, which take 350 MiB at most. One user may hold as
        many as one session."""
        self._waiting: set[NodeSession] = set()
        """Sessions with a lookup that waits, or waited. Used only by the attach server's thread."""

    # -- for any thread -------------------------------------------------------------------------------------

    def pools(self) -> list[NodePool]:
        """The pools, the oldest first."""
        with self._lock:
            return list(self._pools.values())

    def find_pool(self, name: str) -> NodePool | None:
        with self._lock:
            return self._pools.get(name)

    def delete_pool(self, name: str, on_purged: Callable[[Purged], object] = lambda purged: None) -> None:
        """Delete a pool and all its blocks. `on_purged` is called, from any thread, when the store below the pool has
        deleted its blocks for good. Raises `NotFoundError`. Raises `ConflictError` while the pool has sessions,
        including lost ones."""
        with self._lock:
            pool = self._pools.get(name)
            if pool is None:
                raise NotFoundError(f"there is no pool {name!r}; there are: {', '.join(self._pools) or 'none'}")
            if ids := self._sessions_of(pool):
                raise ConflictError(f"pool {name} has sessions ({', '.join(ids)}); detach them first")
            self._close_pool(pool, on_purged)

    def close_if_unused(self, pool: NodePool) -> None:
        """End a pool that has no memory and no worker of an engine, unless it has sessions."""
        with self._lock:
            if self._pools.get(pool.name) is pool and not self._sessions_of(pool):
                self._close_pool(pool)

    def _close_pool(self, pool: NodePool, on_purged: Callable[[Purged], object] | None = None) -> None:
        """End a pool. Only this method does. The pool cannot be found any more, then the store below it releases its
        memory, then the memory is given back. With `on_purged`, the store also deletes its blocks. The caller holds the
        lock."""
        self._closing[pool.name] = self._pools.pop(pool.name)
        with pool.lock:
            pool.acceptance.closed = True
        if self.tier is not None:
            self.tier.drop_pool(pool, partial(self._end_pool, pool), on_purged)
            return
        self._end_pool(pool)
        if on_purged is not None:
            on_purged(Purged(0))

    def _end_pool(self, pool: NodePool) -> None:
        """Give back the memory of a pool of which nothing else is left. Its name is free after that: the memory thread
        removes this pool before it adds another of the same name."""
        with self._lock:
            self._memory.do(self._memory.remove_pool, pool)
            del self._closing[pool.name]
        with pool.lock:
            pool.debts.close_holding()

    def has_sessions(self, pool: NodePool) -> bool:
        """Whether the pool has sessions, including lost ones."""
        with self._lock:
            return bool(self._sessions_of(pool))

    def _sessions_of(self, pool: NodePool) -> list[str]:
        return [one.session_id for one in self._sessions.values() if one.pool is pool]

    def sessions(self) -> list[SessionStatus]:
        """The sessions, the oldest first, including lost ones."""
        with self._lock:
            sessions = list(self._sessions.values())
        return [session.status() for session in sessions]

    def user_limits(self) -> list[UserLimit]:
        """Return the users whose leases hold as many slots as they may."""
        found = list[UserLimit]()
        for uid, held in self.held.owners().items():
            if not self.held.has_room(uid):
                with self._lock:
                    mine = [one for one in self._sessions.values() if one.pool.identity.uid == uid]
                mine.sort(key=lambda one: -one.control.leases.num_slots)
                ids = tuple(one.session_id for one in mine)
                found.append(UserLimit(uid, "slots in leases and loads", held, self.held.most(uid), ids))
        return found

    def namespaces(self) -> list[NamespaceStatus]:
        return [namespace for pool in self.pools() for namespace in pool.hosted_namespaces()]

    def tick(self) -> None:
        """Advance time in all pools (see `Pool.tick`), and look whether the engines' processes are stopped."""
        for pool in self.pools():
            pool.tick()
        with self._lock:
            sessions = [*self._sessions.values()]
        for session in sessions:
            session.look()

    def close(self) -> None:
        """Stop serving. Call after the threads have ended. Idempotent."""
        for pool in self.pools():
            with pool.lock:
                pool.acceptance.closed = True

    # -- what an earlier service has left: before an engine can name it ----------------------------------------

    def restore_pool(self, record: PoolRecord, namespaces: Mapping[str, NamespaceIdentity]) -> NodePool:
        pool = NodePool(record.name, record.identity, record.model, self._settings, clock=self._clock)
        pool.debts.holding = Holding(self.held, record.owner)
        pool.known.update((name, KnownNamespace(name, identity, ())) for name, identity in namespaces.items())
        with self._lock:
            self._pools[pool.name] = pool
        self.switches.apply_to(pool.facade.admin)
        return pool

    def restore_session(self, record: WorkerRecord, send: Send) -> NodeSession:
        """Restore a lost session, which its pool has recovered, from the record of one of its workers."""
        pool = self._pools[record.pool]
        unknown = NamespaceIdentity(pool.model, "", "", "")
        namespace = pool.known.get(record.namespace) or KnownNamespace(record.namespace, unknown, ())
        hello = replace(record.hello, role="scheduler", namespace=namespace.identity)
        control = pool.find_session(record.number)
        session = NodeSession(
            record.session_id,
            hello,
            Peer(0, record.uid, record.gid, None),
            record.token_digest,
            send,
            pool,
            namespace,
            control,
            self._memory,
            self._waiting,
        )
        with self._lock:
            self._sessions[record.session_id] = session
        return session

    # -- the attach server's thread -------------------------------------------------------------------------

    def open_session(
        self, session_id: str, hello: Hello, peer: Peer, token_digest: str, send: Send
    ) -> tuple[NodeSession, Welcome]:
        """Open a session for the scheduler half of an engine. `token_digest` is that of the token with which workers
        join it. `send` sends its messages. `hello` is what the engine says of itself. `peer.uid`
        comes from the kernel, and becomes part of the pool's identity. Raises `AttachRefusedError`."""
        assert hello.pool is not None, "the hello of a scheduler half has both identities"
        assert hello.namespace is not None
        identity = replace(hello.pool, uid=peer.uid)  # the kernel's uid, and not one that the engine may claim
        with self._lock:
            there = sum(len(one.ranks) for one in self._sessions.values() if one.pool.identity.uid == peer.uid)
            if there + identity.num_ranks > RANKS_OF_USER:
                raise _user_limit(f"sessions of uid {peer.uid} have {there} ranks, and {RANKS_OF_USER} are allowed")
            found = next((one for one in self._pools.values() if one.identity == identity), None)
            ending = None if found else self._pool_to_end(peer.uid)
            pools = [one for one in self._pools.values() if one is not ending]
            pool = found or self._new_pool(identity, peer.uid, hello.namespace.model)
            namespace = pool.namespace_of(hello.namespace)
            reasons = sharing_off(pool, namespace, pools)
            if reasons and hello.require_sharing:
                raise AttachRefusedError("sharing_off", "; ".join(reasons))
            dropped = list[tuple[NodePool, str]]()
            if namespace.name not in pool.known:
                dropped = self._namespaces_to_drop(peer.uid, pools)
                namespace.sharing_off = reasons
            # Nothing has changed so far, because an engine that is refused must change nothing.
            if ending is not None:
                logger.info("pool %s ends, to make room for another one of uid %d", ending.name, peer.uid)
                self._close_pool(ending)
            for former, name in dropped:
                logger.info("namespace %s ends, to make room for another one of uid %d", name, peer.uid)
                former.drop(name)
            if found is None:
                self._memory.do(self._memory.add_pool, pool, peer.uid)
                self._pools[pool.name] = pool
            hello = replace(hello.in_session(), namespace=namespace.identity, fleet_weights=hello.fleet_weights)
            control = pool.enter(hello.engine, namespace)
            session = NodeSession(
                session_id,
                hello,
                peer,
                token_digest,
                send,
                pool,
                namespace,
                control,
                self._memory,
                self._waiting,
            )
            self._sessions[session_id] = session
        if found is None:
            self.switches.apply_to(pool.facade.admin)
        self._memory.do(self._memory.add_session, session)
        if self.tier is not None:
            session.tier = self.tier.enter(session, session.hello.fleet_weights)
        return session, Welcome(
            session_id=session_id,
            engine_id=pool.facade.engine_id,
            pool=pool.name,
            namespace=namespace.name,
            sharing_off=reasons,
            store="" if self.tier is None else self.tier.store,
        )

    def _pool_to_end(self, uid: int) -> NodePool | None:
        """Return the pool that ends if the user gets one more: the oldest without sessions. None if the user may have
        one more anyway. The caller holds the lock. Raises `AttachRefusedError`."""
        mine = [pool for pool in self._pools.values() if pool.identity.uid == uid]
        if len(mine) < POOLS_OF_USER:
            return None
        in_use = {id(session.pool) for session in self._sessions.values()}
        idle = next((pool for pool in mine if id(pool) not in in_use), None)
        if idle is None:
            raise _user_limit(f"engines of uid {uid} have {len(mine)} pools, and no more are allowed")
        return idle

    def _namespaces_to_drop(self, uid: int, pools: Sequence[NodePool]) -> list[tuple[NodePool, str]]:
        """Return the namespaces that end if the user gets one more. They have no sessions, and those of the oldest pool
        come first. The caller holds the lock. Raises `AttachRefusedError`."""
        mine = [pool for pool in pools if pool.identity.uid == uid]
        excess = sum(len(pool.identities()) for pool in mine) + 1 - NAMESPACES_OF_USER
        if excess <= 0:
            return []
        idle = [(pool, name) for pool in mine for name in pool.idle_namespaces()]
        if len(idle) < excess:
            raise _user_limit(f"the pools of uid {uid} have {NAMESPACES_OF_USER} namespaces, and no more are allowed")
        return idle[:excess]

    def _new_pool(self, identity: PoolIdentity, owner: int, model: str) -> NodePool:
        """Make a pool, without adding it to the host. The caller holds the lock. Raises `AttachRefusedError`."""
        name = unique_name(identity, model, {*self._pools, *self._closing})
        pool = NodePool(name, identity, model, self._settings, clock=self._clock)
        pool.debts.holding = Holding(self.held, owner)
        slot_bytes = pool.record(owner, self._memory.budget.extent_bytes).layout.bytes_of(1)
        total_bytes = self._memory.budget.total_bytes
        if slot_bytes > total_bytes:
            raise AttachRefusedError(
                "memory",
                f"one slot on all ranks takes {format_size(slot_bytes)}, and the node service has "
                f"{format_size(total_bytes)}: give it more with --memory",
            )
        return pool

    def reset(self, session_id: str, later: Later | None = None) -> ResetDone | None:
        """Reset a session's cache. Returns None if the answer comes `later`, when the store below the pool has deleted
        the blocks of the former namespace for good."""
        session = self._sessions[session_id]
        before, namespace = session.tier, session.control.namespace
        session.control.on_stored = session.tier = None  # the same keys mean other blocks from now on
        name = session.control.reset()
        with self._lock:
            session.namespace = session.pool.enter_fresh(session.namespace, name)
        if self.tier is None or before is None:
            return ResetDone(name)
        session.tier = self.tier.enter(session, session.hello.fleet_weights)
        if namespace.num_sessions or before.of.fingerprint is None:
            return ResetDone(name)

        def answer(purged: Purged) -> None:
            if purged.notice:
                logger.warning("namespace %s was reset, but blocks of it may be left: %s", name, purged.notice)
            if later is not None:
                later(lambda: ResetDone(name, plain(purged.notice)))

        self.tier.forget_reset(before, answer)
        return None

    def next_deadline(self) -> float | None:
        """Return when to call `expire`, or None if no lookup waits. O(sessions whose lookups wait, and requests that
        wait for the store below the pools)."""
        deadlines = [session.waits.next_deadline for session in self._waiting]
        if self.tier is not None:
            deadlines.append(self.tier.next_deadline())
        return min([deadline for deadline in deadlines if deadline is not None], default=None)

    def expire(self) -> None:
        """Answer the lookups that have waited long enough. O(sessions whose lookups wait)."""
        for session in list(self._waiting):
            session.waits.expire()
            if session.waits.next_deadline is None:
                self._waiting.discard(session)
        if self.tier is not None:
            self.tier.expire()

    def follow_pool(self, pool: NodePool) -> None:
        """Let the sessions know that the pool has become smaller: see `NodeSession.follow_pool`."""
        for session in list(self._sessions.values()):
            if session.pool is pool:
                session.follow_pool()
        if self.tier is not None:
            self.tier.follow_pool(pool)
        self._memory.look_again()

    def send_settled(self) -> None:
        """Send results that became final without a call of the engine, such as those of stuck transfers."""
        for session in list(self._sessions.values()):
            session.send_settled()

    def session_over(self, session_id: str) -> None:
        """Remove a session. Its workers have released their memory, so none of its processes can reach memory."""
        session = self._sessions[session_id]
        for rank in range(len(session.ranks)):  # also ranks that were never sent descriptors
            session.end_worker(rank)
        with self._lock:  # held throughout: a pool without sessions may be deleted, which must come after `end_claims`
            del self._sessions[session_id]
            if not self._sessions_of(session.pool):
                self._memory.do(self._memory.end_claims, session.pool.name)
        self._memory.look_again()


def _user_limit(why: str) -> AttachRefusedError:
    return AttachRefusedError(
        "user_limit", f"{why}; the engine tries again, and gets in when others of this user have ended"
    )
