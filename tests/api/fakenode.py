"""A directory of a node over real shared pools, whose engines say what a test has them say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from tests.doubles.fakes import FakeClock

from kvstow.config import EngineConfig
from kvstow.control.administration import HostSwitches
from kvstow.control.attachedsession import AttachedSession
from kvstow.control.engine import PoolFacade
from kvstow.control.sharedpool import SharedPool
from kvstow.errors import ConflictError, NotFoundError
from kvstow.messages import Completion, Op, RankReport
from kvstow.status import MemoryStatus, NamespaceStatus, ProcessState, SessionStatus, UserLimit
from kvstow.tier.blockstore import Purged
from kvstow_api.directory import HostedPool, HostTier

_NOTHING_PURGED = Purged(0)

SLOT_BYTES = 4096
SLOTS = 16
RANKS = 2
MODEL = "org/model"

_numbers = count(1)
_POPULATED = MemoryStatus(1 << 20, 1 << 20)


@dataclass
class Engine:
    """One engine of a pool: its control plane's session, and what its ranks report."""

    session_id: str
    pool: SharedPool
    control: AttachedSession
    pid: int
    began: float
    process: ProcessState = "running"

    def report(self, **changes: Any) -> None:
        """Every rank reports the same: by default that it has registered everything."""
        for rank in range(RANKS):
            self.report_rank(rank, **changes)

    def report_rank(self, rank: int, **changes: Any) -> None:
        given: dict[str, Any] = {
            "rank": rank,
            "sender": f"{self.session_id}-{rank}",
            "number": next(_numbers),
            "boot_id": f"{self.session_id}-{rank}",
            "engine_id": self.pool.target.desired.engine_id,
            "applied": self.pool.target.desired.number,
            "state": "ready",
            "slot_bytes": SLOT_BYTES,
            "pinned_slots": SLOTS,
            "target_slots": SLOTS,
            "pinned_bytes": SLOTS * SLOT_BYTES,
            "target_bytes": SLOTS * SLOT_BYTES,
            "host": "node",
            "pid": self.pid + 1 + rank,
            "device": f"cuda:{rank}",
        }
        self.control.report(RankReport(**{**given, **changes}))

    def begin_store(self, keys: Sequence[bytes]) -> Op:
        op = self.control.begin_store(keys, range(len(keys)), request_id="r-store").op
        assert op is not None
        return op

    def store(self, keys: Sequence[bytes]) -> None:
        op = self.begin_store(keys)
        for rank in range(RANKS):
            done = Completion(op.op_id, "done", num_bytes=len(keys) * SLOT_BYTES, seconds=0.001)
            self.control.complete(rank, f"{self.session_id}-{rank}", [done])


@dataclass
class FakeNode:
    """A `Directory` with no pool, until `attach` makes one. `detached`: the ids that it was asked for, and `kill`.
    `shares_memory`: all ranks have the same memory, as with MLA. `purged`: what a deletion says of the store below."""

    clock: FakeClock
    engine_id = "beef"
    is_node = True
    take_report = None
    tier: HostTier | None = None
    trust_eof: float | None = None
    memory_status: MemoryStatus = _POPULATED
    limits: tuple[UserLimit, ...] = ()
    sharing_off: tuple[str, ...] = ()
    errors: Counter[str] = field(default_factory=Counter)
    rejected: dict[str, int] = field(default_factory=lambda: {"identity": 0, "version": 0})
    granted_bytes: int = SLOTS * RANKS * SLOT_BYTES
    shares_memory: bool = False
    purged: Purged = _NOTHING_PURGED
    detached: list[tuple[str, bool]] = field(default_factory=list)
    engines: list[Engine] = field(default_factory=list)
    shared: dict[str, SharedPool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.switches = HostSwitches(lambda: [pool.admin for pool in self.shared.values()], clock=self.clock)

    def attach(self, pool: str, *, reports: bool = True) -> Engine:
        """An engine of the pool of this name, which has 16 slots of 4 KiB on each of two ranks."""
        shared = self.shared.get(pool)
        if shared is None:
            config = EngineConfig(slot_bytes=SLOT_BYTES, capacity_slots=1, num_ranks=RANKS, block_tokens=16)
            shared = self.shared[pool] = SharedPool(config, clock=self.clock)
            shared.name = pool
            shared.add_extent(SLOTS)
            shared.set_populated(SLOTS)
            self.switches.apply_to(shared.admin)
        number = len(self.engines) + 1
        control = shared.attach("fake", f"{pool}-keys")
        engine = Engine(f"s{number}", shared, control, 1000 * number, self.clock())
        control.set_name(engine.session_id)
        control.map_memory(engine.pid)
        self.engines.append(engine)
        if reports:
            engine.report()
        return engine

    def end(self, engine: Engine) -> None:
        """All its processes have ended."""
        engine.control.lose("it ended")
        engine.pool.process_died(engine.pid)
        self.engines.remove(engine)

    def user_limits(self) -> tuple[UserLimit, ...]:
        return self.limits

    def pools(self) -> list[HostedPool]:
        return [self._hosted(name) for name in self.shared]

    def find_pool(self, name: str) -> HostedPool | None:
        return self._hosted(name) if name in self.shared else None

    def _hosted(self, name: str) -> HostedPool:
        return HostedPool(
            name,
            PoolFacade(self.shared[name]),
            max_capacity_slots=2 * SLOTS,
            granted_bytes=self.granted_bytes,
            due_bytes=SLOTS * RANKS * SLOT_BYTES,
            model=MODEL,
            is_resizable=False,
            stored_slot_bytes=SLOT_BYTES if self.shares_memory else None,
        )

    def delete_pool(self, name: str) -> Purged:
        if name not in self.shared:
            raise NotFoundError(f"there is no pool {name!r}")
        if self.shared[name].sessions:
            raise ConflictError(f"pool {name} has sessions")
        del self.shared[name]
        return self.purged

    def sessions(self) -> list[SessionStatus]:
        return [
            replace(
                engine.control.status(),
                model=MODEL,
                host="node",
                pid=engine.pid,
                process=engine.process,
                age_seconds=self.clock() - engine.began,
            )
            for engine in self.engines
        ]

    def detach(self, session_id: str, *, kill: bool) -> bool:
        for engine in self.engines:
            if engine.session_id == session_id:
                self.detached.append((session_id, kill))
                engine.control.lose("an operator has detached it")
                return True
        return False

    def namespaces(self) -> list[NamespaceStatus]:
        return [
            replace(one, model=MODEL, weights_id="w", weights_source="snapshot", sharing_off=self.sharing_off)
            for pool in self.shared.values()
            for one in pool.namespaces()
        ]

    def memory(self) -> MemoryStatus:
        return self.memory_status

    def count_error(self, code: str) -> None:
        self.errors[code] += 1
