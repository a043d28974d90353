"""Random schedules of several engines on one shared pool: they attach, register memory, die at any point, hang, and
copy and speak late. The contents of blocks and slots are real, so a wrong decision shows as a wrong byte. The mutants
that name this file take one safeguard out each: the schedules notice."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

import pytest
from tests.doubles.fakes import FakeClock
from tests.doubles.rank import Content, FakeRank, use_keys, write_blocks
from tests.engine.control.verifiedloads import VerifyingHost
from tests.seeds import few_and_many

from kvstow.config import EngineConfig
from kvstow.control import namespaces
from kvstow.control.administration import Sweep
from kvstow.control.engine import PoolFacade
from kvstow.control.sharedpool import SharedPool
from kvstow.errors import LeaseError
from kvstow.hints import Hints, context_id
from kvstow.messages import Mark, Op
from kvstow.results import Lease, Settled

EXTENT_SLOTS = 3
MAX_EXTENTS = 3
MAX_CLIENTS = 4
CHAINS = [[bytes([chain, depth]) for depth in range(4)] for chain in range(3)]
NAMESPACES = ["a", "b"]
ACTIONS = {  # who: what, as often as it is named
    "engine": ["store"] * 8 + ["look up"] * 6 + ["load"] * 6 + ["look up runs", "release", "use"],
    "copy": ["copy"] * 8 + ["copy all"] * 4 + ["copy all of one"] * 3 + ["fail", "gather", "repeat"],
    "life": ["attach"] * 8
    + ["register"] * 4
    + ["report", "boot", "reset", "end", "end and copy", "end and copy later", "process dies"]
    + ["speak late", "speak late", "die", "die"],
    "host": ["pass time", "add extent", "drop extent", "swap extent", "purge", "drop"]
    + ["go on", "populate", "free owed"] * 2,
}
CHOICES = [(who, what) for who, things in ACTIONS.items() for what in things]
PICKS = 252

pytestmark = pytest.mark.usefixtures("no_log_lines")


@pytest.fixture(autouse=True, scope="module")
def runs_of_two() -> Iterator[None]:
    """Chains are short: compare the keys of neighbouring slots from two keys on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(namespaces, "_SHORT", 2)
        yield


class Mapped(dict[int, Content]):
    """The slots of the extents that one process has mapped. It keeps them mapped when the pool gives them to others."""

    def __init__(self, extents: list[dict[int, Content]]) -> None:
        self._of_pool = extents
        self._mapped: list[dict[int, Content]] = []

    def keep(self, num_slots: int) -> None:
        """Map exactly these slots."""
        count = -(-num_slots // EXTENT_SLOTS)
        self._mapped = [*self._mapped[:count], *self._of_pool[len(self._mapped) : count]]

    def get(self, slot: int, default: Any = None) -> Any:
        return self._mapped[slot // EXTENT_SLOTS].get(slot, default)

    def update(self, contents: Any) -> None:
        for slot, content in dict(contents).items():
            self._mapped[slot // EXTENT_SLOTS][slot] = content


class MappingRank(FakeRank):
    """A rank that maps the extents of the pool."""

    def _keep(self, num_slots: int) -> None:
        super()._keep(num_slots)
        assert isinstance(self.slots, Mapped)
        self.slots.keep(num_slots)


class Engine(VerifyingHost):
    """An inference engine: its session, and one process per rank. A rank whose process is alive can still copy, also
    after the end of the session."""

    def __init__(self, pool: SharedPool, memory: list[list[dict[int, Content]]], namespace: str) -> None:
        self.pool = pool
        self.namespace = namespace
        self.session = pool.attach("engine", namespace)
        self.ranks = [MappingRank(self.session, rank, Mapped(extents)) for rank, extents in enumerate(memory)]
        self.alive = list(range(len(memory)))
        for rank in self.alive:
            self.session.map_memory((self.session.session_id, rank))
        self.leases: list[tuple[Lease, Sequence[bytes]]] = []
        self.running: list[int] = []
        self.loads: dict[int, tuple[Op, tuple[bytes, ...], list[str]]] = {}
        self.stores: dict[int, Op] = {}
        self.said: list[tuple[FakeRank, int, Mark]] = []
        self.next_block = 0

    def store(self, keys: list[bytes]) -> None:
        blocks = self.fresh_blocks(len(keys))
        write_blocks(self.ranks, blocks, self.contents(keys))
        op = self.session.begin_store(keys, blocks).op
        if op:
            self.stores[op.op_id] = op
            self.submit(op, [self.ranks[rank] for rank in self.pool.config.storing_ranks])

    def contents(self, keys: Sequence[bytes]) -> tuple[bytes, ...]:
        return tuple(self.namespace.encode() + key for key in keys)

    def load(self, lease: Lease, keys: Sequence[bytes]) -> None:
        try:
            op = self.session.begin_load(lease, self.fresh_blocks(len(lease.slots)))
        except LeaseError:
            self.session.release_lease(lease)
            return
        self.loads[op.op_id] = (op, self.contents(keys), [rank.boot_id for rank in self.ranks])
        self.submit(op, self.ranks)

    def submit(self, op: Op, ranks: Sequence[FakeRank]) -> None:
        for rank in ranks:
            rank.submit(op)

    def queued(self) -> list[tuple[FakeRank, Op]]:
        return [(self.ranks[rank], op) for rank in self.alive for op in self.ranks[rank].queue.values()]

    def copy(self, rank: FakeRank, op: Op, *, fail: bool = False) -> None:
        assert max(op.slots) < rank.pinned, "a slot was given out that the rank has not registered"
        self.said.append((rank, op.op_id, "failed" if fail else "done"))
        rank.run(op.op_id, fail=fail)
        if op.op_id in self.loads and not fail:
            read = tuple(rank.blocks[block] for block in op.blocks)
            assert read == self.loads[op.op_id][1], "a slot was reused while it was read"

    def die(self, rank: int) -> None:
        """From now on it copies and says nothing."""
        self.alive.remove(rank)
        self.ranks[rank].queue.clear()
        self.pool.process_died((self.session.session_id, rank))

    def take_settled(self) -> list[Settled]:
        return self.session.take_settled()


class Engines:
    """A shared pool, its host, and the engines that come and go."""

    pool: SharedPool
    choices: ClassVar = CHOICES

    def start(self, num_ranks: int, replicated: bool, policy: str) -> None:
        self.clock = FakeClock()
        config = EngineConfig(1, EXTENT_SLOTS, num_ranks=num_ranks, policy=policy, replicated=replicated)
        self.pool = self.make_pool(config)
        self.memory: list[list[dict[int, Content]]] = [[] for _ in range(num_ranks)]
        """The extents of each rank."""
        if replicated:
            self.memory = [self.memory[0]] * num_ranks
        self.add_extent()
        self.pool.set_populated(EXTENT_SLOTS)
        self.engines: list[Engine] = []
        self.ended: list[Engine] = []
        self.sweep: Sweep | None = None
        self.life("attach", 2)

    def make_pool(self, config: EngineConfig) -> SharedPool:
        return SharedPool(config, clock=self.clock, slice_slots=2)

    def act(self, action: tuple[str, str], pick: int) -> None:
        self.do(*action, pick)

    def do(self, who: str, what: str, pick: int) -> None:
        {"engine": self.ask, "copy": self.copy, "life": self.life, "host": self.operate}[who](what, pick)
        for engine in self.engines:
            engine.settle()

    def ask(self, what: str, pick: int) -> None:
        if not self.engines:
            return
        engine = self.engines[pick % len(self.engines)]
        chain = CHAINS[pick // 5 % len(CHAINS)]
        if what == "store":
            engine.store(chain[: 1 + pick % 4])
        elif what == "use":
            hints = Hints(context_id(str(pick % 3)), float(pick % 7), release=pick % 4 == 0)
            if pick % 3:
                use_keys(engine.session, chain, hints=hints if pick % 2 else None)
            elif engine.running and pick % 2:
                engine.session.end_request(engine.running.pop(0))
            else:
                engine.running.append(engine.session.admit(chain, hints=hints))
        elif what == "look up":
            lease = engine.session.acquire(chain)
            self.keep(engine, lease, chain[: lease.num_keys])
        elif what == "look up runs":
            lease, runs = engine.session.acquire_runs(chain)
            found = [key for first, length in runs for key in chain[first : first + length]]
            self.keep(engine, lease, found)
        elif engine.leases:
            lease, keys = engine.leases.pop(pick % len(engine.leases))
            if what == "load" and lease.slots:
                engine.load(lease, keys)
            else:
                engine.session.release_lease(lease)

    def keep(self, engine: Engine, lease: Lease, keys: Sequence[bytes]) -> None:
        assert lease.num_keys == len(lease.slots) == len(keys)
        registered = min(rank.pinned for rank in engine.ranks)
        assert all(slot < registered for slot in lease.slots), "a slot was shown that a rank has not registered"
        engine.leases.append((lease, keys))

    def copy(self, what: str, pick: int) -> None:
        everyone = [*self.engines, *self.ended]
        queued = [(engine, rank, op) for engine in everyone for rank, op in engine.queued()]
        if what == "repeat":
            said = [words for engine in everyone for words in engine.said]
            if said:
                rank, op_id, mark = said[pick % len(said)]
                rank.send(op_id, mark)
        elif queued:
            engine, rank, op = queued[pick % len(queued)]
            if what == "gather" and op.direction == "store":
                rank.gather(op.op_id)
            elif what in ("copy", "fail"):
                engine.copy(rank, op, fail=what == "fail")
            elif what != "gather":
                for each, its_rank, waiting in queued:
                    if what == "copy all" or each is engine:
                        each.copy(its_rank, waiting)

    def life(self, what: str, pick: int) -> None:
        if what == "attach":
            if len(self.engines) < MAX_CLIENTS:
                engine = Engine(self.pool, self.memory, NAMESPACES[pick % len(NAMESPACES)])
                for rank in engine.ranks:
                    rank.pin(min(pick % 5 * 2, self.pool.target.desired.capacity_slots))
                self.engines.append(engine)
        elif what in ("speak late", "die"):
            if self.ended:
                self.after_the_end(what, self.ended[pick % len(self.ended)])
        elif self.engines:
            self.change(what, self.engines[pick % len(self.engines)], pick)

    def change(self, what: str, engine: Engine, pick: int) -> None:
        rank = engine.ranks[pick % len(engine.ranks)]
        if what == "register":
            rank.pin(min(rank.pinned + 2, engine.session.desired().capacity_slots))
        elif what == "report":
            for each in engine.ranks:
                each.report()
        elif what == "reset":
            name = NAMESPACES[pick % len(NAMESPACES)] if pick % 3 else None
            engine.namespace = engine.session.reset(name)
        elif what == "boot":
            rank.restart(min(pick % 3 * 3, engine.session.desired().capacity_slots), same_process=True)
        else:
            if what == "process dies":
                engine.die(pick % len(engine.ranks))
            else:
                engine.session.lose("its connection has ended")
            self.engines.remove(engine)
            if engine.alive:
                self.ended.append(engine)
            if what == "end and copy later":
                self.operate("pass time", pick)
            if what.startswith("end and copy"):  # others take what is free, and the lost engine writes after that
                self.everyone_stores(pick)
                for its_rank, op in engine.queued():
                    engine.copy(its_rank, op)
                self.everyone_loads()

    def after_the_end(self, what: str, engine: Engine) -> None:
        if what == "speak late":  # without having copied anything
            for rank, op in engine.queued():
                rank.send(op.op_id, "done")
        else:
            engine.die(engine.alive[0])
            if not engine.alive:
                self.ended.remove(engine)

    def everyone_stores(self, pick: int) -> None:
        for engine in self.engines:
            engine.store(CHAINS[pick % len(CHAINS)])
            for rank, op in engine.queued():
                engine.copy(rank, op)
            engine.settle()

    def everyone_loads(self) -> None:
        for engine in self.engines:
            for chain in CHAINS:
                lease = engine.session.acquire(chain)
                if lease.slots:
                    engine.load(lease, chain[: lease.num_keys])
            for rank, op in engine.queued():
                engine.copy(rank, op)
            engine.settle()

    # -- the host -------------------------------------------------------------------------------------------

    def operate(self, what: str, pick: int) -> None:
        pool, chain = self.pool, CHAINS[pick % len(CHAINS)]
        if what == "pass time":
            self.clock.advance(40.0)
            pool.tick()
        elif what == "free owed":
            pool.debts.pay()
        elif what == "add extent":
            if len(pool.extents) < MAX_EXTENTS and self.sweep is None and pool.is_released:
                self.add_extent()
        elif what == "populate":
            pool.set_populated(pool.capacity)
        elif what == "drop extent":
            if len(pool.extents) > 1 and self.sweep is None:
                self.sweep = pool.drop_extents()
                self.go_on(pick)
        elif what == "swap extent":
            self.swap_extent(pick)
        elif what == "go on":
            self.go_on(pick)
        elif what == "drop":
            self.drop_namespace(pick)
        else:
            pool.admin.purge(keys=chain).run()

    def swap_extent(self, pick: int) -> None:
        """Ranks hear of the shrink and of the growth at once, and need not have let go of what is gone."""
        self.operate("drop extent", 1)
        self.operate("add extent", pick)
        self.operate("populate", pick)
        for engine in self.engines:
            for rank in engine.ranks:
                rank.pin(rank.pinned)

    def go_on(self, pick: int) -> None:
        if self.sweep:
            (self.sweep.step, self.sweep.run, self.sweep.run, self.sweep.cancel)[pick % 4]()
            self.sweep = None if self.sweep.finished else self.sweep

    def drop_namespace(self, pick: int) -> None:
        unused = [one.name for one in self.pool.namespaces() if not one.sessions and not one.dropped]
        if unused:
            sweep = self.pool.drop_namespace(unused[pick % len(unused)])
            if pick % 3:
                sweep.run()

    def add_extent(self) -> None:
        """Its memory is not that of an extent which had the same slots before."""
        count = len(self.pool.extents)
        self.pool.add_extent(EXTENT_SLOTS)
        for extents in {id(extents): extents for extents in self.memory}.values():
            extents[count:] = [{}]

    # -- what must be true ----------------------------------------------------------------------------------

    def books_balance(self) -> None:
        if hasattr(self, "engines"):
            PoolFacade(self.pool).check_integrity()

    def teardown(self) -> None:
        """Let everything end; nothing may be left behind."""
        if not hasattr(self, "engines"):
            return
        self.everyone_loads()
        for engine in self.engines:
            for lease, _ in engine.leases:
                engine.session.release_lease(lease)
            for rank, op in engine.queued():
                engine.copy(rank, op)
            engine.settle()
            assert not engine.loads, f"loads {list(engine.loads)} never settled"
            assert not engine.stores, f"stores {list(engine.stores)} never settled"
        for engine in self.ended:
            for number in list(engine.alive):
                engine.die(number)
        while self.pool.debts.pay():
            self.books_balance()
        self.books_balance()
        stats = PoolFacade(self.pool).stats()
        assert (stats.transfers.pending.loads, stats.transfers.pending.stores, stats.pool.leases) == (0, 0, 0)
        assert (stats.pool.slots.leased, stats.pool.slots.filling, stats.pool.slots.quarantined) == (0, 0, 0)
        assert len(self.pool.sessions) == len(self.engines)


def run_schedules(seeds: Iterable[int], kind: type[Engines] = Engines) -> None:
    """Run schedules that depend only on their number. Hypothesis would take ten times as long for as many."""
    for seed in seeds:
        choose = random.Random(seed)
        engines = kind()
        engines.start(choose.randint(1, 2), choose.random() < 0.3, choose.choice(["lru", "auto"]))
        for _ in range(100):
            engines.act(choose.choice(kind.choices), choose.randrange(PICKS))
            engines.books_balance()
        engines.teardown()


@pytest.mark.parametrize("seeds", few_and_many(100, 600))
def test_with_all_safeguards_nothing_goes_wrong(seeds: range) -> None:
    run_schedules(seeds)
