"""The engine in this process, with the fleet tier under its pool."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from hashlib import blake2b
from typing import NamedTuple

from kvstow.control.engine import OffloadEngine
from kvstow.control.fleettier import FleetTier
from kvstow.control.tiersettings import TierSettings
from kvstow.control.tierwait import TierWait
from kvstow.keys import BlockKey
from kvstow.messages import TierCompletion
from kvstow.results import Awaited, Given, Lease
from kvstow.tier.objectname import names_of_rank
from kvstow.tier.ranktransfers import RankTransfers
from kvstow.tier.store import LookupClient, TransferClient
from kvstow_api.tiercontrol import TierClient
from kvstow_api.views.pools import POOL_NAME
from kvstow_service.replay.offload import EmbeddedOffload, PoolFigures
from kvstow_service.replay.ranks import LocalRank
from kvstow_service.replay.shapes import Shape
from kvstow_service.replay.trace import BLOCK_TOKENS
from kvstow_service.tiers.tierend import end_transfers
from kvstow_service.tiers.tierhost import TierChoice, TierHost

_CONTENT = "blake2b-1"
"""Changes with `kvstow_service.replay.pattern`."""
_CONNECT_SECONDS = 30.0
_POLL = 0.01
_TURN = 0.0005  # how often the tier is looked at while a copy is waited for


def fingerprint_of(shape: Shape, num_ranks: int) -> str:
    """All replays of the same shape on as many ranks share objects: equal ids are equal prefixes everywhere."""
    parts = (_CONTENT, str(BLOCK_TOKENS), str(shape.layers), str(shape.page_bytes), str(num_ranks))
    return blake2b("/".join(parts).encode(), digest_size=8).hexdigest()


class _Found:
    """The answer to a request that waits for the tier: what the pool has when the wait is over."""

    error = None

    def __init__(
        self, offload: TieredOffload, tier: FleetTier, keys: Sequence[BlockKey], lease: Lease, wait: TierWait
    ) -> None:
        self._offload, self._tier, self._keys, self._lease, self._wait = offload, tier, keys, lease, wait
        self._is_over = False

    @property
    def done(self) -> bool:
        if not self._is_over and self._tier.is_over(self._wait):
            self._is_over = True
            self._lease = self._offload.find_again(self._keys, self._lease)
        return self._is_over

    @property
    def value(self) -> Lease:
        return self._lease


class _InUse(NamedTuple):
    """A store that is attached."""

    tier: FleetTier
    transfers: Sequence[RankTransfers]
    clients: Sequence[tuple[str, TransferClient | LookupClient]]
    """By their purpose."""


class TieredOffload(EmbeddedOffload):
    """Used by one thread, except what the threads of the tier do, and `open` and `close`, which operators call
    (`TierClients`)."""

    def __init__(
        self,
        engine: OffloadEngine,
        ranks: Sequence[LocalRank],
        settings: TierSettings,
        fingerprint: str,
        *,
        hint_clock: Callable[[], float] | None = None,
    ) -> None:
        """Has no store until `open`. `hint_clock`: see `FleetTier`."""
        super().__init__(engine)
        self.host = TierHost(self, allows_memory=True)
        """What operators see and do of the tier."""
        self._ranks, self._settings, self._fingerprint = ranks, settings, fingerprint
        self._hint_clock = hint_clock
        self._now: _InUse | None = None
        self._news = threading.Event()
        """Set when the tier has something to take in the next step."""

    def open(self, choice: TierChoice) -> None:
        store, clients = choice.store, list[tuple[str, TransferClient | LookupClient]]()
        with ExitStack() as undo:
            transfers: list[RankTransfers] = []
            for number, rank in enumerate(self._ranks):
                client = store.open_transfers(number)
                clients.append((f"transfers of rank {number}", client))
                with ExitStack() as undo_client:
                    undo_client.callback(client.close)
                    client.add_memory(rank.pool.memory_range)
                    moving = RankTransfers(
                        rank.pool, client, names_of_rank(number, len(self._ranks)), on_news=self._news.set
                    )
                    undo_client.pop_all()
                undo.callback(moving.close)
                transfers.append(moving)
            lookups = store.open_lookups()
            clients.append(("look-ups", lookups))
            tier = FleetTier(
                self._engine,
                lookups,
                replace(self._settings, write=choice.write),
                self._fingerprint,
                name=store.name,
                hint_clock=self._hint_clock,
                on_news=self._news.set,
            )
            undo.pop_all()
        self._now = now = _InUse(tier, transfers, clients)
        self.host.add(tier, pool=POOL_NAME, namespace=POOL_NAME, clients=lambda: _clients(now))

    def close(self) -> None:
        now, self._now = self._now, None
        if now is not None:
            self.host.remove(now.tier)
            end_transfers(now.tier, now.transfers, self._complete)

    def _complete(self, rank: int, completions: list[TierCompletion]) -> None:
        self._engine.complete(rank, self._ranks[rank].worker.boot_id, completions)

    def wait_connected(self, stop: threading.Event) -> None:
        """Until the store is connected, so that figures repeat; until `stop` is set; or for 30 s."""
        deadline = time.monotonic() + _CONNECT_SECONDS
        clients = [] if self._now is None else [client for _, client in self._now.clients]
        while any(client.health().state == "connecting" for client in clients):
            if time.monotonic() >= deadline or stop.wait(_POLL):
                break

    def step(self) -> None:
        """Take what the tier has done, and give the ranks what is to be done."""
        self._advance()

    def _advance(self) -> bool:
        """`step`; whether anything has come that a request may wait for."""
        has_news = self._news.is_set()
        self._news.clear()
        now = self._now
        if now is None:
            return has_news
        for rank, transfers in enumerate(now.transfers):
            if completions := transfers.take_completions():
                self._complete(rank, completions)
        now.tier.step()
        for rank, op in now.tier.take_plans():
            now.transfers[rank].submit(op)
        return has_news

    def wait(self, seconds: float) -> None:
        """Wait until a rank or the tier has news."""
        deadline = time.monotonic() + seconds
        if self._advance():
            return
        workers = [rank.worker for rank in self._ranks]
        while not any(worker.wait_completions(0.0) for worker in workers):
            left = deadline - time.monotonic()
            copying = next((worker for worker in workers if worker.pending_ops), None)
            if left <= 0 or self._news.wait(left if copying is None else 0.0):
                return
            if copying is not None and copying.wait_completions(min(_TURN, left)):
                return

    def settle(self, stop: threading.Event) -> None:
        """Wait until everything is put that is to be put, or `stop` is set."""
        while not stop.is_set():
            self.step()
            if self._now is None or self._now.tier.is_idle:
                return
            self._news.wait(_TURN)

    def find(self, keys: Sequence[BlockKey]) -> Awaited[Lease]:
        if self._now is None:
            return super().find(keys)
        tier = self._now.tier
        lease = self._engine.acquire(keys, count=False)
        tier.note_used(lease.keys)
        wait = tier.look_for(keys, len(lease.keys)) if len(lease.keys) < len(keys) else None
        if wait is not None:
            return _Found(self, tier, keys, lease, wait)
        self._engine.count_lookup(len(keys), len(lease.keys))
        return Given(lease)

    def find_again(self, keys: Sequence[BlockKey], before: Lease) -> Lease:
        """Look up what has arrived. Ends the lease of before."""
        lease = self._engine.acquire(keys)
        self._engine.release_lease(before)
        return lease

    def figures(self) -> PoolFigures:
        now = self._now
        return super().figures()._replace(tier=None if now is None else now.tier.status())


@contextmanager
def tiered_offload(
    engine: OffloadEngine,
    ranks: Sequence[LocalRank],
    choice: TierChoice,
    settings: TierSettings,
    fingerprint: str,
    *,
    stop: threading.Event,
    hint_clock: Callable[[], float] | None = None,
) -> Iterator[TieredOffload]:
    """The engine, whose `ranks` are in this process, with blocks in a store. Returns when that is connected: see
    `TieredOffload.wait_connected`. At the end nothing touches the ranks' memory any more."""
    offload = TieredOffload(engine, ranks, settings, fingerprint, hint_clock=hint_clock)
    with ExitStack() as stack:
        offload.open(choice)
        stack.callback(offload.host.end)
        offload.host.begin(choice)
        offload.wait_connected(stop)
        yield offload


def _clients(now: _InUse) -> list[TierClient]:
    return [TierClient(purpose, client.health(), client.stats()) for purpose, client in now.clients]
