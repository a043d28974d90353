"""A pool of the node service: a shared pool with its identity, its namespaces and its place in the node's memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace

import msgspec

from kvstow.attach.identity import Identity, NamespaceIdentity, PoolIdentity, difference, slug
from kvstow.config import EngineConfig
from kvstow.control.attachedsession import AttachedSession
from kvstow.control.engine import PoolFacade
from kvstow.control.indexjournal import IndexJournal
from kvstow.control.namespaces import NamespaceLabel
from kvstow.control.sharedpool import SharedPool
from kvstow.errors import AttachRefusedError, ConfigError, ConflictError, NotFoundError
from kvstow.status import NamespaceStatus
from kvstow_service.node.survival.roster import PoolRecord

_DIGITS = 6

MAX_RANKS = 64
"""How many ranks an engine may have. All of them are on this node, and each takes 2 KiB of the service's memory in each
session."""
_MAX_REASONS = 4
"""How many sentences `sharing_off` returns at most."""


def unique_name(identity: Identity, model: str, taken: Container[str]) -> str:
    """Return a name: the model as a slug, and six hex digits of the identity, or more if that name is taken."""
    digest = identity.digest.hex()
    names = (f"{slug(model)}-{digest[:length]}" for length in range(_DIGITS, len(digest) + 1))
    return next(name for name in names if name not in taken)


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """Settings that all pools of a node share. Times are in seconds. The slots of a new pool begin at multiples of
    `slot_alignment` bytes."""

    policy: str = "auto"
    curve: bool = True
    transfer_timeout: float = 30.0
    report_timeout: float = 5.0
    event_buffer: int = 4096
    slot_alignment: int = 1


@dataclass(slots=True)
class KnownNamespace:
    """A namespace and its name in the pool. For `sharing_off`, see `NamespaceStatus`."""

    name: str
    identity: NamespaceIdentity
    sharing_off: tuple[str, ...]

    @property
    def is_reset(self) -> bool:
        """Whether it belongs to a session that has reset its cache. The name must say it, because the journal gets the
        name before the node learns of the reset. `SharedPool` adds an @, which `unique_name` never uses."""
        return "@" in self.name


class NodePool(SharedPool):
    """A pool: one memory layout of one owner. The admin API uses its `facade`.

    `known` is used under the lock of the `NodeHost`.
    """

    def __init__(
        self,
        name: str,
        identity: PoolIdentity,
        model: str,
        settings: PoolSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(config_of(identity, settings), clock=clock)
        self.name = name
        self.identity = identity
        self.model = model
        self._slot_alignment = settings.slot_alignment
        self.facade = PoolFacade(self)
        self.known: dict[str, KnownNamespace] = {}
        self.grow_above = -1
        """The pool can use more memory if it uses more slots than this. The memory thread sets it."""
        self.granted_bytes = self.due_bytes = 0
        """How many bytes of the node's memory the pool has, and how many it should have: its fair share, or less if it
        can use less. The memory thread sets both."""

    def begin_journal(self, journal: IndexJournal) -> None:
        """Record from now on what the slots hold. Call this before the pool has slots. The caller still owns the
        journal. The journal of an earlier service stays unchanged until it was recovered."""
        with self.lock:
            self.journal = journal
            if any(self.index.namespaces):
                self.journal_namespaces()

    def end_journal(self) -> None:
        """Stop recording. Call this before the journal is closed."""
        while self.journal_pasts():
            pass
        with self.lock:
            self.journal = None

    def namespace_label(self, name: str) -> NamespaceLabel:
        known = self.known.get(name)
        return NamespaceLabel(name, None if known is None else msgspec.to_builtins(known.identity))

    @property
    def stored_slot_bytes(self) -> tuple[int, ...]:
        """How many bytes each rank's slot takes: see `PoolIdentity`."""
        return self.identity.stored_slot_bytes

    def place_of(self, rank: int) -> int:
        """Return the index of the rank's extent in a row."""
        return 0 if self.identity.replicated else rank

    def record(self, owner: int, extent_bytes: int) -> PoolRecord:
        return PoolRecord(self.name, self.model, owner, self.identity, extent_bytes, self._slot_alignment)

    def namespace_of(self, identity: NamespaceIdentity) -> KnownNamespace:
        """Return the namespace of this identity. If there is none, make one, without adding it to `known`."""
        alive = self._forget_ended()
        for known in self.known.values():
            if known.identity == identity and not known.is_reset:
                return known
        return KnownNamespace(unique_name(identity, identity.model, alive), identity, ())

    def enter(self, engine: str, namespace: KnownNamespace) -> AttachedSession:
        self.known[namespace.name] = namespace
        return self.attach(engine, namespace.name)

    def enter_fresh(self, former: KnownNamespace, name: str) -> KnownNamespace:
        """Add the namespace `name`, to which a session of the namespace `former` has moved by a reset."""
        self._forget_ended()
        reason = "the engine has reset its cache, so its blocks are in a namespace of their own until it attaches again"
        fresh = self.known[name] = KnownNamespace(name, former.identity, (reason,))
        return fresh

    def identities(self) -> list[str]:
        """Return the names of the namespaces that were not made by a reset."""
        self._forget_ended()
        return [name for name, known in self.known.items() if not known.is_reset]

    def idle_namespaces(self) -> list[str]:
        """Return those of the `identities` that no session uses, the longest unused first."""
        with self.lock:
            unused = [one.name for one in self.index.namespaces.unused() if not one.is_dropped]
        identities = set(self.identities())
        return [name for name in unused if name in identities]

    def drop(self, name: str) -> None:
        """Forget a namespace that no session uses. Its blocks are the first to be evicted."""
        with suppress(NotFoundError):  # the pool forgets a namespace when its last block is evicted
            self.drop_namespace(name)
        self.known.pop(name, None)

    def _forget_ended(self) -> set[str]:
        """Drop the namespaces that the pool has dropped or forgotten, and return the names of the others."""
        alive = {one.name for one in self.namespaces() if not one.dropped} if self.known else set[str]()
        self.known = {name: one for name, one in self.known.items() if name in alive}
        return alive

    def hosted_namespaces(self) -> list[NamespaceStatus]:
        return [self._hosted(one) for one in self.namespaces()]

    def _hosted(self, namespace: NamespaceStatus) -> NamespaceStatus:
        known = self.known.get(namespace.name)
        if known is None:
            return replace(namespace, model=self.model)
        return replace(
            namespace,
            model=known.identity.model,
            weights_id=known.identity.weights_id,
            weights_source=known.identity.weights_source,
            sharing_off=known.sharing_off,
        )

    def check_size(self, capacity_slots: int) -> None:
        raise ConflictError(
            f"pool {self.name} cannot be resized: it has what its engines use, up to the node's memory and to what "
            "they ask for; change --memory of the service, or what the engines ask for"
        )


def config_of(identity: PoolIdentity, settings: PoolSettings) -> EngineConfig:
    """Make the configuration of the control plane for a pool. Raises `AttachRefusedError` for an identity that no pool
    can have."""
    sizes = identity.slot_bytes
    if not 1 <= len(sizes) <= MAX_RANKS:
        raise AttachRefusedError(
            "identity", f"slot_bytes has {len(sizes)} entries; allowed: one for each of 1 to {MAX_RANKS} ranks"
        )
    if identity.replicated and len(set(sizes)) > 1:
        raise AttachRefusedError("identity", f"replicated ranks have slots of {sizes} bytes; allowed: the same for all")
    tokens = {group.block_tokens for group in identity.groups}
    try:
        return EngineConfig(
            slot_bytes=max(sizes),
            capacity_slots=1,
            num_ranks=len(sizes),
            policy=settings.policy,
            curve=settings.curve,
            block_tokens=tokens.pop() if len(tokens) == 1 else None,
            transfer_timeout=settings.transfer_timeout,
            report_timeout=settings.report_timeout,
            event_buffer=settings.event_buffer,
            rank_slot_bytes=sizes if len(set(sizes)) > 1 else (),
            replicated=identity.replicated,
        )
    except ConfigError as error:
        raise AttachRefusedError("identity", str(error)) from error


def sharing_off(pool: NodePool, namespace: KnownNamespace, pools: Iterable[NodePool]) -> tuple[str, ...]:
    """Sentences that say why a session in this namespace shares no blocks with others of its model. Empty if it may
    share.

    It may share if the namespace already existed, or if the model has no other namespace, unless its identity forbids
    sharing.
    """
    reasons = dict.fromkeys(filter(None, [namespace.identity.unshared]))
    if reasons or namespace.name in pool.known:
        return tuple(reasons)
    for other in sorted(pools, key=lambda one: one is not pool):
        for known in other.known.values():
            if known.identity.model != namespace.identity.model or known.is_reset:
                continue
            if other is pool:
                reasons[_namespace_reason(namespace.identity, known)] = None
            else:
                reasons[_pool_reason(pool.identity, other)] = None
    return tuple(reasons)[:_MAX_REASONS]


def _namespace_reason(here: NamespaceIdentity, other: KnownNamespace) -> str:
    reason = f"not shared with namespace {other.name}: {difference(here, other.identity)}"
    if here.hash_probe != other.identity.hash_probe:
        reason += "; the engines hash tokens differently: give all of them the same PYTHONHASHSEED and hash algorithm"
    return reason


def _pool_reason(here: PoolIdentity, other: NodePool) -> str:
    if here.uid != other.identity.uid:
        return f"not shared with pool {other.name}: its engines run as another user"
    return f"not shared with pool {other.name}: {difference(here, other.identity)}"
