"""Random schedules of everything that may happen to the control plane, over ranks whose copies run late, out of
order, failing, or never. The contents of blocks and slots are real (see `FakeRank`), so a wrong decision of the
engine shows as a wrong byte. The mutants that name this file take one safeguard out each: the machine notices."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from tests.doubles.fakes import FakeClock
from tests.doubles.rank import FakeRank, make_ranks, use_keys, write_blocks
from tests.engine.control.verifiedloads import VerifyingHost
from tests.seeds import few_and_many

from kvstow.config import EngineConfig
from kvstow.control.administration import Sweep
from kvstow.control.engine import OffloadEngine
from kvstow.control.ops import OpsInFlight
from kvstow.endings import STATUSES, Ending
from kvstow.errors import LeaseError
from kvstow.hints import Hints, context_id
from kvstow.messages import Completion, Mark, Op
from kvstow.results import Lease, Settled

MAX_SLOTS = 6
CHAINS = [[bytes([chain, depth]) for depth in range(4)] for chain in range(3)]
ACTIONS = {  # who: what, as often as it is named
    "host": ["store"] * 8
    + ["look up"] * 6
    + ["load"] * 6
    + ["release", "use"]
    + ["admit", "end"] * 4
    + ["use with hints"],
    "copy": ["copy"] * 8
    + ["copy all", "copy of one rank", "copy and repeat"] * 3
    + ["fail", "gather", "gather", "repeat", "repeat all"],
    "trouble": [
        "restart",
        "restart between slices",
        "restart between slices",
        "late completions of a boot",
        "silence",
        "pin",
        "pin",
        "report",
        "report",
        "report late",
        "receive late",
        "receive late",
    ],
    "operate": ["evict", "idle", "purge", "resize", "to and fro", "policy", "gate", "context"] + ["go on"] * 3,
}
CHOICES = [(who, what) for who, things in ACTIONS.items() for what in things]
PICKS = 252

pytestmark = pytest.mark.usefixtures("no_log_lines")


class Traffic(VerifyingHost):
    """A host with a few request chains, its ranks, and an operator."""

    engine: OffloadEngine

    def start(self, num_ranks: int, slots: int, policy: str, slice_slots: int) -> None:
        self.clock = FakeClock()
        config = EngineConfig(slot_bytes=1, capacity_slots=slots, num_ranks=num_ranks, policy=policy)
        self.engine = OffloadEngine(config, clock=self.clock, slice_slots=slice_slots)
        self.ranks = make_ranks(self.engine)
        self.leases: list[tuple[Lease, tuple[bytes, ...]]] = []
        self.running: list[tuple[int, list[bytes]]] = []
        self.loads = {}
        self.stores: dict[int, Op] = {}
        self.said: list[tuple[int, str, int, Mark]] = []
        self.sweep: Sweep | None = None
        self.refusing = False
        self.next_block = 0

    def act(self, action: tuple[str, str], pick: int) -> None:
        who, what = action
        {"host": self.host, "copy": self.copy, "trouble": self.trouble, "operate": self.operate}[who](what, pick)

    def host(self, what: str, pick: int) -> None:
        chain = CHAINS[pick % len(CHAINS)]
        if what == "store":
            self.store(chain[: 1 + pick % 4])
        elif what == "use":
            use_keys(self.engine, chain)
        elif what == "admit":
            self.running.append((self.engine.admit(chain[: 1 + pick % 4]), chain))
        elif what == "end":
            self.end_request(pick)
        elif what == "use with hints":
            self.use_with_hints(pick)
        elif what == "look up":
            lease = self.engine.acquire(chain)
            assert lease.num_keys == len(lease.slots) <= len(chain)
            self.leases.append((lease, tuple(chain[: lease.num_keys])))
        elif self.leases:
            lease, keys = self.leases.pop(pick % len(self.leases))
            if what == "load" and lease.slots:
                self.load(lease, keys)
            else:
                self.engine.release_lease(lease)

    def use_with_hints(self, pick: int) -> None:
        chain, name = CHAINS[pick % len(CHAINS)][: 1 + pick % 4], context_id(str(pick % 5))
        resume_in = (None, 0.0, 1.0, 60.0, 1e9)[pick % 7 % 5]
        use_keys(self.engine, chain, hints=Hints(name, resume_in, release=pick % 6 == 0))
        self.clock.advance(pick % 3)

    def end_request(self, pick: int) -> None:
        """What it lacks is stored, as the GPU still has it."""
        self.clock.advance(pick % 5)
        if self.running:
            number, chain = self.running.pop(pick % len(self.running))
            ending = Ending(STATUSES[pick % len(STATUSES)], (pick % 11, 0) if pick % 2 else None)
            if self.engine.end_request(number, ending, more=chain[: pick % 5], others=chain[: pick % 3]).is_incomplete:
                self.store(chain)

    def store(self, keys: list[bytes]) -> None:
        blocks = self.fresh_blocks(len(keys))
        write_blocks(self.ranks, blocks, keys)
        op = self.engine.begin_store(keys, blocks).op
        if op:
            self.stores[op.op_id] = op
            self.submit(op)

    def load_all(self) -> None:
        for chain in CHAINS:
            found = self.engine.acquire(chain)
            self.load(found, tuple(chain[: found.num_keys])) if found.slots else self.engine.release_lease(found)

    def load(self, lease: Lease, keys: tuple[bytes, ...]) -> None:
        try:
            op = self.engine.begin_load(lease, self.fresh_blocks(len(lease.slots)))
        except LeaseError:
            self.engine.release_lease(lease)
            return
        self.loads[op.op_id] = (op, keys, [rank.boot_id for rank in self.ranks])
        self.submit(op)

    def copy(self, what: str, pick: int) -> None:
        queued = [(rank, op) for rank in self.ranks for op in rank.queue.values()]
        if what == "repeat" and self.said:
            self.repeat(pick % len(self.said))  # however long ago
        elif what == "repeat all":
            for at in range(len(self.said)):
                self.repeat(at)
        elif queued and what != "repeat":
            rank, op = queued[pick % len(queued)]
            if what == "gather" and op.direction == "store":
                rank.gather(op.op_id)  # read now, write the slots later
            elif what in ("copy", "fail", "copy and repeat"):
                self.copy_one(rank, op, fail=what == "fail")
                if what == "copy and repeat":
                    self.repeat(-1)
            elif what != "gather":
                for each, waiting in queued:
                    if what == "copy all" or each is rank:
                        self.copy_one(each, waiting)
        self.settle()

    def repeat(self, at: int) -> None:
        rank, boot_id, op_id, mark = self.said[at]
        self.engine.complete(rank, boot_id, [Completion(op_id, mark)])

    def copy_one(self, rank: FakeRank, op: Op, *, fail: bool = False) -> None:
        assert max(op.slots) < rank.pinned, "a slot that is not pinned was given out, or taken back in use"
        self.said.append((rank.rank, rank.boot_id, op.op_id, "failed" if fail else "done"))
        rank.run(op.op_id, fail=fail)

    def trouble(self, what: str, pick: int) -> None:
        rank = self.ranks[pick % len(self.ranks)]
        if what == "restart":
            most = self.engine.desired().capacity_slots
            rank.restart(min(pick % 3 * 3, most), same_process=bool(pick % 2))
        elif what == "restart between slices":
            if self.sweep is None:
                self.begin_sweep("resize", pick % 2)
            rank.restart(self.engine.desired().capacity_slots)
            self.settle()
            self.load_all()  # whatever is found must be right
        elif what == "late completions of a boot":
            completions = len(self.said)
            rank.restart(self.engine.desired().capacity_slots)
            self.settle()
            self.store(CHAINS[pick % len(CHAINS)])
            for at in range(completions):
                self.repeat(at)
            self.load_all()
        elif what == "silence":
            self.clock.advance(40.0)
            self.engine.tick()
        elif what == "pin":
            rank.pin(min(rank.pinned + 2, self.engine.desired().capacity_slots))
        elif what == "report late":
            self.engine.report(rank.sent[pick % len(rank.sent)])
        elif what == "receive late":
            if rank.received:
                rank.receive(rank.received[pick % len(rank.received)])
        else:
            for each in self.ranks:
                each.report()
        self.settle()

    # -- the operator ---------------------------------------------------------------------------------------

    def operate(self, what: str, pick: int) -> None:
        admin = self.engine.admin
        if self.refusing:
            self.resume()
        elif what in ("go on", "resize", "evict", "idle") and self.sweep:
            self.go_on_with_sweep(pick)
        elif what in ("resize", "evict", "idle"):
            self.begin_sweep(what, pick)
        elif what == "to and fro":
            self.shrink_and_grow(pick)
        elif what == "purge":
            self.purge(pick)
        elif what == "policy":
            admin.set_policy("lru" if pick % 2 else "auto")
        elif what == "context":
            self.steer_context(pick)
        elif what == "gate":
            self.refuse(pick)

    def steer_context(self, pick: int) -> None:
        admin, known = self.engine.admin, self.engine.contexts().contexts
        if not known:
            return
        context = bytes.fromhex(known[pick % len(known)].context or "")
        if pick % 5 == 0:
            admin.release_context(context)
        elif pick % 5 == 1:
            admin.set_context(context, float(pick % 50))
        elif pick % 5 == 2:
            admin.evict(context=context).run()
        elif pick % 5 == 3:
            admin.purge(context=context).run()

    def begin_sweep(self, what: str, pick: int) -> None:
        """Start bulk work and do one slice of it."""
        admin = self.engine.admin
        if what == "resize":
            self.sweep = admin.resize(1 + pick % MAX_SLOTS)
        elif what == "evict":
            self.sweep = admin.evict(slots=1 + pick % MAX_SLOTS)
        elif what == "idle":
            self.sweep = admin.evict(idle_seconds=10.0)
        else:
            self.sweep = admin.purge(key_prefixes=[CHAINS[pick % len(CHAINS)][0][:1]])
        if what != "resize":  # which has done its first slice
            self.sweep.step()
        self.sweep = None if self.sweep.finished else self.sweep

    def shrink_and_grow(self, pick: int) -> None:
        """A shrink that goes as far as it can, and a growth right after it. Ranks hear of the shrink, and some time
        later, or at once, of the growth."""
        for capacity in (1 + pick % 2, MAX_SLOTS):
            if self.sweep is None:
                self.begin_sweep("resize", capacity - 1)
            if self.sweep is not None:
                self.sweep.run()
                self.sweep = None if self.sweep.finished else self.sweep
            if capacity < MAX_SLOTS:
                for rank in self.ranks:
                    rank.report()
        if pick % 3:
            for rank in self.ranks:
                rank.pin(self.engine.desired().capacity_slots)

    def go_on_with_sweep(self, pick: int) -> None:
        assert self.sweep is not None
        (self.sweep.step, self.sweep.run, self.sweep.cancel)[pick % 3]()
        self.sweep = None if self.sweep.finished else self.sweep

    def resume(self) -> None:
        self.engine.admin.undrain()
        self.engine.admin.set_bypass(load=False, store=False, ttl_seconds=None)
        self.refusing = False

    def refuse(self, pick: int) -> None:
        if pick % 2:
            self.engine.admin.drain("all" if pick % 4 == 1 else "stop_stores", None)
        else:
            self.engine.admin.set_bypass(load=pick % 4 == 0, store=pick % 4 == 2, ttl_seconds=30.0)
        self.refusing = True

    def purge(self, pick: int) -> None:
        chain = CHAINS[pick % len(CHAINS)]
        if pick % 5 == 0:
            self.engine.admin.purge(everything=True).run()
            assert self.engine.stats().pool.slots.cached == 0
        elif pick % 5 < 3:
            self.engine.admin.purge(key_prefixes=[chain[0][:1]]).run()
        else:
            self.engine.admin.purge(keys=chain).run()
        if pick % 5:
            assert not any(self.engine.contains(chain))

    # -- what must be true ----------------------------------------------------------------------------------

    def books_balance(self) -> None:
        if hasattr(self, "ranks"):
            self.engine.check_integrity()
            stats = self.engine.stats()
            assert stats.pool.slots.usable == stats.pool.usable_slots

    def teardown(self) -> None:
        """Let everything end; nothing may be left behind."""
        if not hasattr(self, "ranks"):
            return
        for lease, _ in self.leases:
            self.engine.release_lease(lease)
        if self.sweep:
            self.sweep.cancel()
        for rank in self.ranks:
            rank.run_all()
        self.settle()
        stats = self.engine.stats()
        assert not self.loads, f"loads {list(self.loads)} never settled"
        assert not self.stores, f"stores {list(self.stores)} never settled"
        assert (stats.transfers.pending.loads, stats.transfers.pending.stores, stats.pool.leases) == (0, 0, 0)
        assert (stats.pool.slots.leased, stats.pool.slots.filling, stats.pool.slots.quarantined) == (0, 0, 0)
        self.books_balance()

    # -- parts ----------------------------------------------------------------------------------------------

    def submit(self, op: Op) -> None:
        for rank in self.ranks:
            assert op.op_id not in rank.queue, "an op id was reused while a rank still works on the op"
            rank.submit(op)

    def take_settled(self) -> list[Settled]:
        return self.engine.take_settled()


def run_schedules(seeds: range) -> None:
    """Run schedules that depend only on their number. Hypothesis would take ten times as long for as many."""
    for seed in seeds:
        choose = random.Random(seed)
        traffic = Traffic()
        slots, policy = choose.randint(2, MAX_SLOTS), choose.choice(["lru", "auto"])
        traffic.start(choose.randint(1, 3), slots, policy, choose.randint(1, 3))
        for _ in range(80):
            traffic.act(choose.choice(CHOICES), choose.randrange(PICKS))
            traffic.books_balance()
        traffic.teardown()


@pytest.mark.parametrize("seeds", few_and_many(150, 1000))
def test_with_all_safeguards_nothing_goes_wrong(seeds: range) -> None:
    run_schedules(seeds)


def test_dead_boots_that_are_believed_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a boot that numbers its ops from 1, as unique op ids also protect from late completions."""
    complete, fail_rank = OffloadEngine.complete, OpsInFlight.fail_rank

    def believe(self: OffloadEngine, rank: int, boot_id: str, completions: list[Completion]) -> None:
        complete(self, rank, self.ranks.boot_id(rank) or boot_id, completions)

    def number_again(self: OpsInFlight, rank: int) -> Iterator[None]:
        yield from fail_rank(self, rank)
        if self.pool.config.num_ranks == 1:
            self.pool.last_op_id = 0

    monkeypatch.setattr(OffloadEngine, "complete", believe)
    monkeypatch.setattr(OpsInFlight, "fail_rank", number_again)
    with pytest.raises((AssertionError, KeyError)):
        run_schedules(range(1000))
