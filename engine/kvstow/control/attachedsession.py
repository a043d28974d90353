"""Sessions of a pool whose memory belongs to its host. Engines in other processes have sessions that come and go while
the pool stays, and the host has a session of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from itertools import islice
from logging import INFO
from typing import Literal

from kvstow.control.leases import SLOTS_OF_LEASE, LeaseBook
from kvstow.control.namespaces import Namespace
from kvstow.control.ops import OP_SLOTS
from kvstow.control.pool import Pool
from kvstow.control.session import Session
from kvstow.descriptions import DescribedBlocks
from kvstow.errors import ConflictError, InvalidRequestError
from kvstow.messages import RankReport
from kvstow.status import SessionState, SessionStatus


class AttachedSession(Session):
    """The session of an engine that is attached to a `SharedPool`. `SharedPool.attach` makes it.

    A rank's `pinned_slots` are the slots that it has mapped and registered. The session sees no key, and gets no slot,
    above the smallest number of them. If a rank boots anew, the session's ops fail and its leases break, but no block
    is lost, because the memory is not the rank's. Another process for the same rank needs a new session.

    When a store finds no other slot, the oldest unused leases of the session end until the others hold at most half of
    the pool's slots. No hit is longer than half of the pool either.

    A lost session does not load or store any more, and its messages are counted and ignored. Its processes may still
    read the slots of its leases and loads, and write the slots of its stores. So these slots are kept until
    `SharedPool.process_died` has been called for every process that `map_memory` has named.
    """

    owns_memory = False

    def __init__(self, pool: Pool, session_id: int, engine: str, namespace: str) -> None:
        super().__init__(pool, namespace)
        self.session_id = session_id
        self.engine = engine
        self.set_name(str(session_id))
        self.processes: set[Hashable] = set()
        self._ended_leases = LeaseBook()
        self._held: deque[tuple[int, ...]] = deque()
        """The slots of the loads and puts of a lost session."""
        self._held_slots = 0
        """How many slots `_held` has."""
        self._ending: Literal["no", "ops", "processes", "slots"] = "no"
        """What a lost session ends next, or waits for."""
        self._first_number = pool.target.desired.number
        self.adapt_to_pool()

    def set_name(self, name: str) -> None:
        """Set the name by which operators know the session. It is in logs, and in the reasons of states."""
        self.name, self.label = name, f"session {name} ({self.engine}): "

    def release_leases(self, lease_ids: Sequence[int]) -> None:
        """End the leases with these ids, unless they have ended before. O(leases given), because only a slice of their
        slots is freed at once (see `Debts`)."""
        pool = self.pool
        for start in range(0, len(lease_ids), pool.slice_slots):
            with pool.lock:
                found = map(self.leases.get, lease_ids[start : start + pool.slice_slots])
                pool.debts.owe([lease.slots for lease in found if lease is not None and self.leases.end(lease)])

    def describe_store(self, op_id: int, numbers: Sequence[int], blocks: DescribedBlocks) -> None:
        """Say what blocks of a store of this session hold: the blocks with these numbers in the store. Readers of the
        pool's events learn it when the blocks are visible. Without an effect for a store that has ended. Raises
        `InvalidRequestError` for a block that the store does not have."""
        pool = self.pool
        with pool.lock:
            entry = self.ops.get(op_id)
            if entry is None or entry.op.direction != "store" or entry.abandoned:
                return
            slots = entry.op.slots
            if (last := max(numbers, default=0)) >= len(slots):
                raise InvalidRequestError(f"block {last} of a store is described; it has {len(slots)}")
            described = [slots[number] for number in numbers]
            pool.events.descriptions.describe_store(op_id, self.session_id, described, blocks)

    # -- processes and end ----------------------------------------------------------------------------------

    def map_memory(self, process: Hashable) -> None:
        """Note that a process will get the pool's memory. `process` identifies it among all processes of the node.
        Raises `ConflictError` if the session is lost."""
        with self.pool.lock:
            if self.is_lost:
                raise ConflictError(f"{self.label}the session has ended; attach again")
            self.processes.add(process)

    def lose(self, reason: str) -> None:
        """End the session, because one of its connections has ended. Idempotent. Its ops end in steps (see
        `Debts.pay`)."""
        with self.pool.lock:
            self.end(reason)
        self.pool.write_log()

    def end(self, reason: str) -> None:
        """Do what `lose` does. The caller holds the lock and then calls `Pool.write_log` without it."""
        if self.is_lost:
            return
        self.is_lost = self.closed = True
        self._ended_leases, self.leases = self.leases, LeaseBook()
        self.leave_requests()
        self.leave_namespace()
        held, written = self._ended_leases.num_slots + self.ops.held_slots, self.ops.num_blocks["store"]
        self.pool.log(
            INFO,
            "%s%s; %d leased slots and %d half-written ones wait for the end of %d processes",
            self.label,
            reason,
            held,
            written + len(self.quarantined_slots),
            len(self.processes),
        )
        self._ending = "ops"
        self.pool.debts.end_in_steps(self._end_ops())

    def leave_namespace(self) -> None:
        """Stop counting as a session of its namespace. The caller holds the lock."""
        self.pool.index.namespaces.leave(self.namespace)

    def forget_process(self, process: Hashable) -> None:
        """Note that this process has died, and end the session if the process was one of its own. The caller holds the
        lock."""
        if process in self.processes:
            self.processes.remove(process)
            self.end("one of its processes has ended")
            if self._ending == "processes" and not self.processes:
                self.pool.debts.end_in_steps(self._free_slots())

    def _end_ops(self) -> Iterator[None]:
        while True:
            for entry in self.ops.dissolve():
                if entry.fills_slots:
                    self.quarantined_slots += entry.written
                else:
                    self._held.append(tuple(entry.kept))
                    self._held_slots += len(entry.kept)
            if not len(self.ops):
                break
            yield
        self._ending = "processes"
        if not self.processes:
            yield from self._free_slots()

    def _free_slots(self) -> Iterator[None]:
        """Free the session's slots in slices, because no process can read or write them any more."""
        pool = self.pool
        self._ending = "slots"
        if pool.earlier is not None and pool.earlier.session is self:
            pool.earlier = None
            pool.log(INFO, "all engines of the earlier service have attached again or ended; the pool evicts again")
        most = max(1, pool.slice_slots // OP_SLOTS)
        while self._ended_leases or self._held or self.quarantined_slots:
            leases = list(islice(self._ended_leases, most))
            pool.debts.owe([lease.slots for lease in leases if self._ended_leases.end(lease)])
            held = [self._held.popleft() for _ in range(min(most, len(self._held)))]
            self._held_slots -= sum(map(len, held))
            pool.debts.owe(held)
            pool.end_quarantine(self.quarantined_slots[-pool.slice_slots :])
            del self.quarantined_slots[-pool.slice_slots :]
            if self._ended_leases or self._held or self.quarantined_slots:
                yield
        pool.sessions.remove(self)
        self.note_held()

    def note_held(self) -> None:
        if self.is_lost and self.holding is not None:
            count = len(self._ended_leases) + self.ops.num_ops["load"] + len(self._held)
            slots = self._ended_leases.num_slots + self.ops.held_slots + self._held_slots
            self.holding.note(slots + SLOTS_OF_LEASE * count)
        else:
            super().note_held()

    def held_slots(self) -> Iterator[tuple[int, ...]]:
        yield from super().held_slots()
        yield from (lease.slots for lease in self._ended_leases)
        yield from self._held

    def uses_slots_from(self, low: int) -> bool:
        """Whether the session or one of its processes may still read or write a slot from `low` on. O(slots in use).
        Holds the lock for O(leases and ops), which is a millisecond for the most that a session may have."""
        with self.pool.lock:
            leases, ops = [*self.leases, *self._ended_leases], list(self.ops)
            parts: list[Sequence[int]] = [*self._held, list(self.quarantined_slots)]
        parts += [lease.slots for lease in leases]
        parts += [slots for entry in ops for slots in (entry.held, entry.op.slots)]
        return any(max(part, default=-1) >= low for part in parts)

    def reset(self, namespace: str | None = None) -> str:
        """Move the session to another namespace, by default to a fresh one, and return its name. Blocks of the former
        namespace stay there for other sessions that use it. If there are none, they are evicted before all other
        blocks. Leases break. Transfers under way end as usual, in the namespace in which they began. Raises
        `ConflictError` if the session is lost."""
        pool = self.pool
        with pool.lock:
            if self.is_lost:
                raise ConflictError(f"{self.label}the session has ended; attach again")
            is_fresh = namespace is None
            if namespace is None:
                namespace = pool.index.namespaces.fresh_name(self.namespace.name, pool.target.desired.engine_id)
            joined = pool.join_namespace(namespace)
            if is_fresh:
                joined.lookups = self.namespace.lookups
            pool.index.namespaces.leave(self.namespace)
            self.leave_requests()
            self.namespace = joined
            self.leases.break_all()
            return joined.name

    # -- ranks ----------------------------------------------------------------------------------------------

    def check_report(self, report: RankReport) -> None:
        super().check_report(report)
        if self.ranks.is_of_another_process(report):
            raise InvalidRequestError(f"{self.label}rank {report.rank} reports from another process; attach again")

    def set_memory(self, rank: int, registered_slots: int, applied: int) -> None:
        """Note what the pool's host has learned about a rank's memory between two reports: how many slots the rank has
        registered, and the number of the last desired state for which it has released memory (`applied`). Leases on
        slots that it does not have any more break. O(1)."""
        with self.pool.lock:
            if self.is_lost:
                return
            before = self.ranks.usable_slots()
            self.ranks.set_memory(rank, registered_slots, applied)
            usable = self.ranks.usable_slots()
            if usable < before:
                self.lose_slots(usable)
            self.adapt_to_pool()

    def lose_slots(self, low: int) -> None:
        self.leases.break_from(low)

    def adapt_to_pool(self) -> None:
        registered = self.ranks.usable_slots()
        self.watermark = None if 0 < self.pool.memory_slots() <= registered else registered
        self.leases.max_slots = max(1, self.pool.slots.limit // 2)
        self.refresh_acceptance()

    def refresh_acceptance(self) -> None:
        super().refresh_acceptance()
        self.serving = self.serving and self.watermark != 0

    def out_of_reach(self, keys: Sequence[bytes]) -> list[int]:
        """Return the slots of these keys whose memory the session has not registered yet. Returns none while an
        operator has switched loads off. O(keys) until the session has registered all memory, then O(1)."""
        with self.pool.lock:
            end = self.watermark
            switches = self.pool.acceptance
            if end is None or switches.drain_mode == "all" or switches.bypasses("load", self.pool.clock()):
                return []
            return [slot for slot in self.namespace.keys.slots_of(keys) if slot is not None and slot >= end]

    def has_released(self, number: int) -> bool:
        """Whether no process of this session can still reach slots that the desired state with this number has given
        up. The caller holds the lock."""
        if not self.processes or self._first_number >= number:
            return True
        return not self.is_lost and self.ranks.have_all_applied(number)

    # -- status ---------------------------------------------------------------------------------------------

    def status(self) -> SessionStatus:
        with self.pool.lock:
            now = self.pool.clock()
            oldest = self.ops.oldest_copy()
            return SessionStatus(
                id=self.name,
                engine=self.engine,
                pool=self.pool.name,
                namespace=self.namespace.name,
                state=self._state(),
                in_flight=len(self.ops),
                oldest_seconds=0.0 if oldest is None else now - oldest.started,
                leases=len(self.leases),
                leased_slots=sum(map(len, self.held_slots())),
                registered_slots=self.ranks.usable_slots(),
                quarantined_slots=len(self.quarantined_slots),
                processes=len(self.processes),
                ranks=self.rank_statuses(now),
            )

    def _state(self) -> SessionState:
        if self.is_lost:
            return "lost"
        if self.ops.num_stuck:
            return "stuck"
        return "attached" if self.ranks.can_copy() and self.watermark != 0 else "attaching"


_BOOT = "tier"
"""The boot id of all ranks of a `TierSession`. They stand for the host's own transfers, which restart only with the
host."""


class TierSession(AttachedSession):
    """The host's own session of a pool, for transfers to and from the store below it. `SharedPool.attach_tier` makes
    it.

    Its slots are kept like those of an engine's session: until `SharedPool.process_died` was called for each process
    that `map_memory` has named. In all other respects it is no engine: its ops belong to namespaces, but the session
    itself belongs to none, and no figure about the pool's engines includes it. The journal has its number beside the
    slots that it fills, so the next service knows which they are.
    """

    is_engine = False

    def __init__(self, pool: Pool, session_id: int, namespace: Namespace) -> None:
        """`namespace`: any namespace of the pool."""
        self._any_namespace = namespace
        super().__init__(pool, session_id, "tier", namespace.name)
        self.name, self.label = "tier", "tier: "
        for rank in range(len(self.ranks)):
            report = RankReport.without_pool(rank, _BOOT, "ready", pool.config.slot_bytes_of(rank))
            self.ranks.update(report, pool.clock())
        self.adapt_to_pool()

    def join_namespace(self, name: str) -> Namespace:
        return self._any_namespace

    def leave_namespace(self) -> None:
        """Do nothing, because no namespace counts this session."""

    def set_registered(self, registered_slots: int, applied: int) -> None:
        """Call `set_memory` for every rank."""
        for rank in range(len(self.ranks)):
            self.set_memory(rank, registered_slots, applied)
