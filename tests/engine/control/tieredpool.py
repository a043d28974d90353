"""A shared pool with a store below it, engines that attach, and requests, all of which do what the test says."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tests.doubles.memoryblockstore import MemoryBlockStore, StoredBlock
from tests.doubles.rank import use_keys
from tests.engine.control.sharedhost import Client, Host

from kvstow.control.engine import PoolFacade
from kvstow.control.indexjournal import IndexJournal
from kvstow.control.pooltier import PoolTier, TieredNamespace, TierWait
from kvstow.control.session import result_of
from kvstow.prefill import PrefillCost
from kvstow.results import Needs
from kvstow.tier.blockstore import Expectation, StoredLayout

KEYS = [bytes([0, 0, number]) for number in range(40)]
BLOCK_TOKENS = 10
PREFILL = 1_000.0
"""Tokens per second: a block takes 10 ms."""


class TieredPool:
    """A pool whose blocks a store has as well. `run` does what the store was asked for."""

    def __init__(
        self,
        slots: int = 40,
        ranks: int = 2,
        *,
        store: MemoryBlockStore | None = None,
        knows_prefill: bool = True,
        journal: IndexJournal | None = None,
        needs_of: Callable[[Sequence[bytes]], Needs | None] | None = None,
    ) -> None:
        self.host = Host(slots, ranks, journal=journal)
        self.pool, self.clock = self.host.pool, self.host.clock
        self.store = store or MemoryBlockStore(most_in_piece=4)
        self.store.memory = self.host.memory
        self.engine = self.host.attach()
        layout = StoredLayout("pool", (64,) * ranks, "identity", "owner")
        self.answers: list[Callable[[], object]] = []
        self.tier = PoolTier(
            self.pool,
            self.engine.session.namespace,
            self.store,
            layout,
            block_tokens=BLOCK_TOKENS,
            needs_of=needs_of,
            post=self.answers.append,
        )
        self.tier.session.map_memory("store")
        self.register()
        self.of = self.enter(self.engine)
        if knows_prefill:
            self.tier.note_prefill(self.of, PrefillCost(1 / PREFILL))

    def register(self) -> None:
        self.tier.session.set_registered(self.pool.capacity, self.pool.target.desired.number)

    def enter(self, engine: Client, fingerprint: str | None = "f") -> TieredNamespace:
        return self.tier.enter(engine.session, "model", fingerprint, "" if fingerprint else "for a reason")

    def takes(self, seconds: float | None, queued: int = 0) -> None:
        """Of a read of any number of blocks."""
        self.store.expectation = lambda num_blocks: Expectation(seconds, queued, 0.0)

    def run(self) -> None:
        """Until the store has nothing more to do and all answers were given."""
        while self.store.run() or self.answers:
            while self.answers:
                self.answers.pop(0)()

    def store_blocks(self, keys: Sequence[bytes], engine: Client | None = None) -> None:
        """An engine computes and stores these blocks; nothing is written yet."""
        (engine or self.engine).store(keys)
        self.tier.write_stored()

    def use(self, keys: Sequence[bytes], engine: Client | None = None, of: TieredNamespace | None = None) -> None:
        """A request begins, and ends at once."""
        use_keys((engine or self.engine).session, keys)
        result_of(self.tier.note_use(of or self.of, keys))

    def put(self, keys: Sequence[bytes]) -> None:
        """The store has these blocks, and the pool does not."""
        for key in reversed(keys):
            self.store.put(("f", key), StoredBlock("identity", (key,) * len(self.host.memory)))

    def in_store(self, keys: Sequence[bytes]) -> list[bool]:
        return [("f", key) in self.store.blocks for key in keys]

    def look(self, keys: Sequence[bytes], *, first: int = 0, needs: Needs | None = None) -> Request:
        return Request(self, keys, first, needs)

    def fetch(self, keys: Sequence[bytes]) -> int:
        """A request comes, and everything goes well. Returns how many leading blocks it loads."""
        first = self.engine.session.lookup(keys)
        request = self.look(keys, first=first)
        self.run()
        request.end()
        return self.loaded(keys)

    def loaded(self, keys: Sequence[bytes]) -> int:
        found = self.engine.load(keys) if self.engine.session.lookup(keys) else []
        self.engine.session.take_settled()
        assert found == list(keys[: len(found)]), "wrong bytes were loaded"
        return len(found)

    @property
    def counts(self) -> dict[str, int]:
        return self.host.counts

    def check(self) -> None:
        PoolFacade(self.pool).check_integrity()


class Request:
    """One that looks in the store for what the pool lacks. `is_over`: it was told to continue."""

    def __init__(self, tiered: TieredPool, keys: Sequence[bytes], first: int, needs: Needs | None) -> None:
        self._tiered = tiered
        self.is_over = False
        session = tiered.engine.session
        self.wait: TierWait | None = result_of(
            tiered.tier.look_for(tiered.of, session, keys, self._note, first=first, needs=needs)
        )

    def _note(self) -> None:
        assert not self.is_over, "it was told twice"
        self.is_over = True

    def end(self) -> None:
        if self.wait is not None:
            assert self.is_over, "it was not told"
            self._tiered.engine.session.release_leases([lease.lease_id for lease in self.wait.leases])
