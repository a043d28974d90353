"""The fleet tier of one host, as its operators see and change it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from typing import NamedTuple, Protocol

from kvstow.control.administration import check_ttl
from kvstow.control.fleettier import FleetTier
from kvstow.control.tiersettings import TierSettings
from kvstow.errors import ConfigError, ConflictError, InvalidRequestError, MissingPackageError, NotFoundError
from kvstow.tier.store import TierStore
from kvstow.tier.writepolicy import WriteMode
from kvstow_api.tiercontrol import (
    AttachedStore,
    HostedTier,
    TierBypass,
    TierClient,
    TierLabels,
    TierMeasurements,
    TierTotals,
)
from kvstow_service.tiers.storeaddress import measure_store, shown_url
from kvstow_service.tiers.stores import open_store
from kvstow_service.tiers.tierpurge import TierPurge

logger = logging.getLogger("kvstow.tier")

_MAX_NAME = 100


class TierChoice(NamedTuple):
    """A store and how it is written. `url` is as it was given: it may name files."""

    url: str
    store: TierStore
    write: WriteMode

    @classmethod
    def of(cls, url: str, write: WriteMode | None = None, *, allows_memory: bool = False) -> TierChoice:
        """Opens no connection. `allows_memory`: see `open_store`. Raises `ConfigError`, or `MissingPackageError` if the
        store's library is missing."""
        return cls(url, open_store(url, allows_memory=allows_memory), TierSettings().write if write is None else write)


class TierClients(Protocol):
    """What a host does when an operator attaches or detaches a store. Both are called on the operator's thread, one at
    a time, and may wait there; neither may touch what belongs to the host's own threads but by handing it over."""

    def open(self, choice: TierChoice) -> None:
        """Open the clients of all ranks, make a `FleetTier` for each namespace, and `TierHost.add` them. On an error
        nothing stays open, and nothing added."""

    def close(self) -> None:
        """`TierHost.remove` every `FleetTier`, close it, and then all clients. Returns when nothing touches any slot
        for the store and all its ops have ended, so that another store can be attached (`end_transfers` does that
        where the transfers are in this process). Must not depend on a step of the engine, which may be idle.
        Idempotent."""


class TierHost:
    """A `kvstow_api.tiercontrol.TierControl`.

    **Threads.** Every call is safe from any thread. `attach`, `detach`, `measure` and the steps of a purge wait, and
    are for a thread of their own; all others wait for nothing. A `FleetTier` belongs to the thread of its host, which
    alone steps it; what an operator orders is handed over to it (`FleetTier.set_bypassed`, `name_weights` and
    `note_purged`), and counts from its next step on. A host that is idle takes the order when it goes on.

    **Ownership.** The host opens, steps and closes its `FleetTier`s and clients. This object only knows them, from
    `add` to `remove`, so a host removes a tier before it closes it.
    """

    def __init__(
        self,
        clients: TierClients | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        allows_memory: bool = False,
    ) -> None:
        """`clients`: None where a store can be attached only when the host starts. `clock`: that of the tiers.
        `allows_memory`: operators may attach a store in this process."""
        self._clients, self._clock, self._allows_memory = clients, clock, allows_memory
        self._lock = threading.Lock()
        """Held for moments."""
        self._changing = threading.Lock()
        """Held while a store is attached or detached."""
        self._has_ended = False
        self._choice: TierChoice | None = None
        self._tiers: list[_Tier] = []
        self._ended: dict[TierLabels, TierTotals] = {}
        """What tiers had counted when they were removed."""
        self._until = -inf
        """When the bypass of the host ends; inf if it does not."""
        self._until_of: dict[str, float] = {}
        """The same for single pools."""

    # -- for the host ---------------------------------------------------------------------------------------

    def begin(self, choice: TierChoice) -> None:
        """The host has a store from its start on. It opens its clients itself, and calls `add` for each tier."""
        with self._lock:
            self._choice = choice

    def end(self) -> None:
        """The host ends: detach the store, if one is attached, and attach none any more. Waits as `detach` does, and
        for a change under way. Idempotent."""
        with self._changing:
            self._has_ended = True
            if self._clients is not None:
                self._clients.close()
            self._end()

    def add(
        self,
        tier: FleetTier,
        *,
        pool: str,
        namespace: str,
        model: str = "",
        clients: Callable[[], Sequence[TierClient]] = tuple,
        fingerprint_of: Callable[[str], str] | None = None,
    ) -> None:
        """Show this tier, and bypass it if its pool is bypassed.

        `clients`: those of this tier and of its ranks, at this moment; called on any thread, and waits for nothing. One
        that several namespaces of a pool use has the same purpose with each of them, and is shown with the first.
        `fingerprint_of`: the fingerprint that goes with a weights id, or raises `ConflictError` with the reason why
        there is none; None: the weights cannot be named here. O(1) for the caller."""
        with self._lock:
            self._tiers.append(_Tier(tier, pool, namespace, model, clients, fingerprint_of))
            left = self._bypass_until(pool) - self._clock()
            if left > 0:
                tier.set_bypassed(True, None if left == inf else left)

    def remove(self, tier: FleetTier) -> None:
        """It is not shown any more, but what it has counted stays in `totals`. Idempotent."""
        with self._lock:
            removed = [one for one in self._tiers if one.tier is tier]
            self._tiers = [one for one in self._tiers if one.tier is not tier]
            self._ended = _summed(self._ended, removed)

    def forget_pool(self, pool: str) -> None:
        """The pool was deleted, after its tiers were removed: another one of this name counts from zero."""
        with self._lock:
            self._ended = {labels: one for labels, one in self._ended.items() if labels[1] != pool}

    # -- what there is --------------------------------------------------------------------------------------

    @property
    def can_attach(self) -> bool:
        return self._clients is not None

    @property
    def store(self) -> AttachedStore | None:
        with self._lock:
            choice = self._choice
        return None if choice is None else AttachedStore(choice.store.name, shown_url(choice.url), choice.write)

    @property
    def bypass(self) -> TierBypass:
        with self._lock:
            left = self._until - self._clock()
        return TierBypass(left > 0, None if left <= 0 or left == inf else left)

    def tiers(self) -> list[HostedTier]:
        with self._lock:
            known, now = list(self._tiers), self._clock()
            left = [self._bypass_until(one.pool) - now for one in known]
        shown: set[tuple[str, str]] = set()
        return [
            HostedTier(
                pool=one.pool,
                namespace=one.namespace,
                model=one.model,
                fingerprint=one.tier.fingerprint,
                status=one.tier.status(),
                bypass_seconds_left=seconds if 0 < seconds < inf else None,
                clients=tuple(_news(one, shown)),
            )
            for one, seconds in zip(known, left, strict=True)
        ]

    def totals(self) -> dict[TierLabels, TierTotals]:
        with self._lock:  # at once, or a tier that is removed meanwhile would count twice or not at all
            known, ended = list(self._tiers), self._ended
        shown = {one.labels for one in known}
        return _summed({labels: one for labels, one in ended.items() if labels in shown}, known)

    def measure(self) -> TierMeasurements:
        """See `measure_store`."""
        with self._lock:
            choice = self._choice
        return TierMeasurements() if choice is None else measure_store(choice.url)

    # -- for operators --------------------------------------------------------------------------------------

    def attach(self, url: str, write: WriteMode | None) -> AttachedStore:
        try:
            choice = TierChoice.of(url, write, allows_memory=self._allows_memory)
        except MissingPackageError as error:
            raise ConflictError(str(error)) from None
        except ConfigError as error:
            raise (error.renamed("url") if error.key == "tier" else error) from None
        with self._change() as clients:
            if self._choice is not None:
                raise ConflictError(f"a store is attached: {shown_url(self._choice.url)}; detach it first")
            self.begin(choice)
            try:
                clients.open(choice)
            except BaseException:
                self._end()
                raise
        logger.info("an operator has attached the tier's store %s", shown_url(url))
        return AttachedStore(choice.store.name, shown_url(url), choice.write)

    def detach(self) -> None:
        with self._change() as clients:
            choice = self._choice
            if choice is None:
                raise ConflictError("no store is attached")
            clients.close()
            self._end()
        logger.info("an operator has detached the tier's store %s", shown_url(choice.url))

    def _end(self) -> None:
        with self._lock:
            self._choice = None
            self._ended = {}

    @contextmanager
    def _change(self) -> Iterator[TierClients]:
        if self._clients is None:
            raise ConflictError("this host takes its store only when it starts: change its setting, and start it again")
        if not self._changing.acquire(blocking=False):
            raise ConflictError("a store is being attached or detached; wait until that is done")
        try:
            if self._has_ended:
                raise ConflictError("the host is stopping")
            yield self._clients
        finally:
            self._changing.release()

    def set_bypass(self, *, bypassed: bool, ttl_seconds: float | None, pool: str | None) -> TierBypass:
        check_ttl(ttl_seconds)
        with self._lock:
            until = -inf if not bypassed else inf if ttl_seconds is None else self._clock() + ttl_seconds
            if pool is None:
                self._until = until
                self._until_of.clear()
            else:
                self._until_of[pool] = until
            for one in self._tiers:
                if pool in (None, one.pool):
                    one.tier.set_bypassed(bypassed, ttl_seconds)
        return self.bypass

    def _bypass_until(self, pool: str) -> float:
        return self._until_of.get(pool, self._until)

    def name_weights(self, pool: str, namespace: str | None, weights_id: str) -> None:
        if not 0 < len(weights_id) <= _MAX_NAME or not weights_id.isprintable():
            raise InvalidRequestError(f"weights_id is {weights_id!r}; allowed: 1 to {_MAX_NAME} printable characters")
        one = self._find(pool, namespace)
        if one.tier.fingerprint is not None:
            raise ConflictError(
                "the weights have a name: they can be named again when the engine has reset its prefix cache"
            )
        if one.fingerprint_of is None:
            raise ConflictError("the weights of this engine cannot be named")
        one.tier.name_weights(one.fingerprint_of(weights_id))
        logger.info("an operator has named the weights of %s %s", one.namespace, weights_id)

    def _find(self, pool: str, namespace: str | None) -> _Tier:
        with self._lock:
            found = [one for one in self._tiers if one.pool == pool and namespace in (None, one.namespace)]
        if not found:
            noun = f"pool {pool}" if namespace is None else f"namespace {namespace} of pool {pool}"
            raise NotFoundError(f"{noun} has no tier; GET /v1/tier lists those that there are")
        if len(found) > 1:
            names = ", ".join(one.namespace for one in found)
            raise ConflictError(f"pool {pool} has several namespaces: {names}; say which is meant")
        return found[0]

    def purge(self, fingerprint: str) -> TierPurge:
        with self._lock:
            choice = self._choice
        if choice is None:
            raise ConflictError("no store is attached")
        return TierPurge(choice.store, fingerprint, lambda: self._note_purged(fingerprint))

    def _note_purged(self, fingerprint: str) -> None:
        with self._lock:
            for one in self._tiers:
                if one.tier.fingerprint == fingerprint:
                    one.tier.note_purged()


def _news(one: _Tier, shown: set[tuple[str, str]]) -> Iterator[TierClient]:
    """Its clients, but those that another namespace of its pool has shown."""
    for client in one.clients():
        if (one.pool, client.purpose) not in shown:
            shown.add((one.pool, client.purpose))
            yield client


def _summed(totals: Mapping[TierLabels, TierTotals], tiers: Iterable[_Tier]) -> dict[TierLabels, TierTotals]:
    """`totals`, and what `tiers` have counted."""
    sums = dict(totals)
    for one in tiers:
        counted = TierTotals.of(one.tier.status())
        sums[one.labels] = sums[one.labels] + counted if one.labels in sums else counted
    return sums


class _Tier(NamedTuple):
    tier: FleetTier
    pool: str
    namespace: str
    model: str
    clients: Callable[[], Sequence[TierClient]]
    fingerprint_of: Callable[[str], str] | None

    @property
    def labels(self) -> TierLabels:
        return self.tier.status().store, self.pool, self.model
