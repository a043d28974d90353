"""The engine in this process, with the fleet tier under its pool."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from hashlib import blake2b

from kvstow.control.engine import OffloadEngine
from kvstow.control.fleettier import FleetTier, TierSettings, TierWait
from kvstow.keys import BlockKey
from kvstow.results import Awaited, Given, Lease
from kvstow.tier.objectname import ObjectName
from kvstow.tier.ranktransfers import RankTransfers
from kvstow.tier.store import LookupClient, TierStore, TransferClient
from kvstow_service.replay.driver import RankWorker
from kvstow_service.replay.offload import EmbeddedOffload, PoolFigures
from kvstow_service.replay.ranks import LocalRank
from kvstow_service.replay.shapes import Shape
from kvstow_service.replay.trace import BLOCK_TOKENS

_CONTENT = "blake2b-1"
"""Changes with `kvstow_service.replay.pattern`."""
_CONNECT_SECONDS = 30.0
_POLL = 0.01
_TURN = 0.0005  # how often the copies are looked at while the tier is waited for


def fingerprint_of(shape: Shape, num_ranks: int) -> str:
    """All replays of the same shape on as many ranks share objects: equal ids are equal prefixes everywhere."""
    parts = (_CONTENT, str(BLOCK_TOKENS), str(shape.layers), str(shape.page_bytes), str(num_ranks))
    return blake2b("/".join(parts).encode(), digest_size=8).hexdigest()


class _Found:
    """The answer to a request that waits for the tier: what the pool has when the wait is over."""

    error = None

    def __init__(self, offload: TieredOffload, keys: Sequence[BlockKey], lease: Lease, wait: TierWait) -> None:
        self._offload, self._keys, self._lease, self._wait = offload, keys, lease, wait
        self._is_over = False

    @property
    def done(self) -> bool:
        if not self._is_over and self._offload.tier.is_over(self._wait):
            self._is_over = True
            self._lease = self._offload.find_again(self._keys, self._lease)
        return self._is_over

    @property
    def value(self) -> Lease:
        return self._lease


class TieredOffload(EmbeddedOffload):
    """Used by one thread, except what the threads of the tier do."""

    def __init__(
        self, engine: OffloadEngine, tier: FleetTier, transfers: Sequence[RankTransfers], workers: Sequence[RankWorker]
    ) -> None:
        super().__init__(engine)
        self.tier = tier
        self._transfers, self._workers = transfers, workers
        self.news = threading.Event()
        """Set when the tier has something to take in the next step."""

    def step(self) -> None:
        """Take what the tier has done, and give the ranks what is to be done."""
        self._advance()

    def _advance(self) -> bool:
        """`step`; whether anything has come that a request may wait for."""
        has_news = self.news.is_set()
        self.news.clear()
        for rank, (transfers, worker) in enumerate(zip(self._transfers, self._workers, strict=True)):
            completions = transfers.take_completions()
            if completions:
                self._engine.complete(rank, worker.boot_id, completions)
        self.tier.step()
        for rank, op in self.tier.take_plans():
            self._transfers[rank].submit(op)
        return has_news

    def wait(self, seconds: float) -> None:
        """Wait until a rank or the tier has news."""
        deadline = time.monotonic() + seconds
        if self._advance():
            return
        while not self.news.wait(_TURN):
            if any(worker.wait_completions(0.0) for worker in self._workers) or time.monotonic() >= deadline:
                return

    def settle(self, stop: threading.Event) -> None:
        """Wait until everything is put that is to be put, or `stop` is set."""
        while not stop.is_set():
            self.step()
            if self.tier.is_idle:
                return
            self.news.wait(_TURN)

    def find(self, keys: Sequence[BlockKey]) -> Awaited[Lease]:
        lease = self._engine.acquire(keys, count=False)
        self.tier.note_used(lease.keys)
        wait = self.tier.look_for(keys) if len(lease.keys) < len(keys) else None
        if wait is not None:
            return _Found(self, keys, lease, wait)
        self._engine.count_lookup(len(keys), len(lease.keys))
        return Given(lease)

    def find_again(self, keys: Sequence[BlockKey], before: Lease) -> Lease:
        """Look up what has arrived. Ends the lease of before."""
        lease = self._engine.acquire(keys)
        self._engine.release_lease(before)
        return lease

    def figures(self) -> PoolFigures:
        return super().figures()._replace(tier=self.tier.status())


@contextmanager
def tiered_offload(
    engine: OffloadEngine,
    ranks: Sequence[LocalRank],
    store: TierStore,
    settings: TierSettings,
    fingerprint: str,
    *,
    stop: threading.Event,
    hint_clock: Callable[[], float] | None = None,
) -> Iterator[TieredOffload]:
    """The engine, whose `ranks` are in this process, with blocks in `store`. Returns when the store is connected, so
    that figures repeat; when `stop` is set; or after 30 s. At the end nothing touches the ranks' memory any more.
    `hint_clock`: see `FleetTier`."""
    news = threading.Event()
    clients: list[TransferClient | LookupClient] = []
    with ExitStack() as stack:
        transfers: list[RankTransfers] = []
        for number, rank in enumerate(ranks):
            client = store.open_transfers(number)
            clients.append(client)
            undo = stack.enter_context(ExitStack())
            undo.callback(client.close)
            client.add_memory(rank.pool.memory_range)
            moving = RankTransfers(rank.pool, client, _names(number, len(ranks)), on_news=news.set)
            undo.pop_all()
            stack.callback(moving.close)
            transfers.append(moving)
        lookups = store.open_lookups()
        clients.append(lookups)
        tier = FleetTier(
            engine,
            lookups,
            settings,
            fingerprint,
            name=store.name,
            hint_clock=hint_clock,
            on_news=news.set,
        )
        stack.callback(tier.close)
        offload = TieredOffload(engine, tier, transfers, [rank.worker for rank in ranks])
        offload.news = news
        deadline = time.monotonic() + _CONNECT_SECONDS
        while any(client.health().state == "connecting" for client in clients):
            if time.monotonic() >= deadline or stop.wait(_POLL):
                break
        yield offload


def _names(rank: int, num_ranks: int) -> Callable[[str, bytes], ObjectName]:
    return lambda fingerprint, key: ObjectName(fingerprint, key, rank, num_ranks)
