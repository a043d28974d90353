"""The control plane's facade, for hosts of the engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain

from kvstow.config import EngineConfig
from kvstow.control import snapshots
from kvstow.control.administration import Administrator
from kvstow.control.blockevents import BlockEventLog
from kvstow.control.leases import Lease
from kvstow.control.ops import Settled
from kvstow.control.placement import StoreGrant, place_store, store_room
from kvstow.control.state import ControlState
from kvstow.control.sweeps import SLICE_SLOTS
from kvstow.errors import IntegrityError, InvalidRequestError, LeaseError
from kvstow.messages import Completion, DesiredState, Op, RankReport
from kvstow.stats import EngineStats
from kvstow.status import BlockPage, BlockStatus, Readiness, TransferStatus

_NOTHING = Lease(0, (), ())
"""The lease of a miss; it holds nothing."""


class OffloadEngine:
    """Decides which block is in which slot, and tracks every copy until all ranks have finished it.

    Guarantees. A key is visible only once every rank holds its bytes. A slot is reused only when no rank may still read
    or write it. Op ids are never reused. Every call is safe from any thread.

    Cost. One lock; a call holds it for O(blocks given) in any state of the pool, and never waits. The exceptions are
    `report` when a rank has lost its memory or the number of slots changes, and `check_integrity`.

    Keys and blocks are in prefix order, root first. Times are in seconds of `clock`.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        slice_slots: int = SLICE_SLOTS,
    ) -> None:
        """`slice_slots`: how many slots bulk work visits before it releases the lock."""
        self.config = config
        self._state = ControlState(config, clock, slice_slots=slice_slots)
        self.engine_id = self._state.desired.engine_id
        self.admin = Administrator(self._state)

    @property
    def events(self) -> BlockEventLog:
        return self._state.events

    # -- look-up and load -----------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[bytes]) -> int:
        """The number of leading keys that are present. Holds nothing; see `acquire`."""
        state = self._state
        with state.lock:
            if state.acceptance.load_refusal(state.clock()):
                return 0
            return sum(map(len, state.index.keys.leading_runs(keys)))

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """For each key, whether it is present (for windows, which need no leading run). Holds nothing; see `lease`."""
        state = self._state
        with state.lock:
            if state.acceptance.load_refusal(state.clock()):
                return [False] * len(keys)
            return [slot is not None for slot in state.index.keys.slots_of(keys)]

    def acquire(self, keys: Sequence[bytes], *, count: bool = True) -> Lease:
        """Look up the leading keys that are present and keep them from eviction, in one step. The lease may be empty;
        release it, or use it for `begin_load`. With `count` false this does not count as a look-up: a host that asks
        repeatedly for one request reports the result with `count_lookup`."""
        state, counters = self._state, self._state.counters
        begun = time.perf_counter()
        with state.lock:
            now = state.clock()
            refusal = state.acceptance.load_refusal(now)
            slots: list[int] = []
            runs = None if refusal else state.index.keys.leading_runs(keys)
            if runs:
                slots = list(chain.from_iterable(runs))
                state.ages.sample_found(slots, now)
                state.index.times.mark_used(runs, now)
                state.index.hold(slots)
            hits = len(slots)
            if count:
                counters.count_lookup(len(keys), hits, refusal)
            lease = state.leases.grant(tuple(keys[:hits]), tuple(slots)) if slots else _NOTHING
            counters.lookups.seconds.observe(time.perf_counter() - begun)
        return lease

    def count_lookup(self, queried: int, hits: int) -> None:
        """Count one look-up of `queried` blocks with `hits` hits."""
        state = self._state
        with state.lock:
            state.counters.count_lookup(queried, hits, state.acceptance.load_refusal(state.clock()))

    def lease(self, keys: Sequence[bytes]) -> Lease | None:
        """Keep exactly these keys from eviction. None, and nothing is held, if one of them is absent."""
        state = self._state
        with state.lock:
            now = state.clock()
            if state.acceptance.load_refusal(now):
                return None
            slots = [slot for slot in state.index.keys.slots_of(keys) if slot is not None]
            if len(slots) < len(keys):
                return None
            state.index.times.mark_used((slots,), now)
            state.index.hold(slots)
            return state.leases.grant(tuple(keys), tuple(slots))

    def release_lease(self, lease: Lease) -> None:
        """End a lease. Idempotent, also after a load has used it."""
        state = self._state
        with state.lock:
            if state.leases.end(lease):
                state.unhold(lease.slots)

    def begin_load(self, lease: Lease, blocks: Sequence[int], *, first: int = 0, request_id: str = "") -> Op:
        """Plan to load the slots of the lease, from its `first` on, into `blocks`. Uses the lease: its slots are kept
        until the load ends.

        Raises `LeaseError` if the lease has ended, or if a rank has lost its memory since (then release it), and
        `InvalidRequestError` for no blocks, or more than the lease has from `first` on.
        """
        state = self._state
        if not blocks or first < 0 or first + len(blocks) > len(lease.slots):
            raise InvalidRequestError(
                f"load of {len(blocks)} blocks from number {first} on; "
                f"allowed: 1 or more, within the {len(lease.slots)} leased"
            )
        with state.lock:
            if not state.leases.is_open(lease):
                raise LeaseError(f"lease {lease.lease_id} was released or used up")
            if state.leases.is_broken(lease):
                raise LeaseError(f"lease {lease.lease_id} is broken: a rank has lost its memory since it was given")
            state.leases.end(lease)
            end = first + len(blocks)
            return state.ops.start(
                "load",
                tuple(blocks),
                lease.slots[first:end],
                keys=lease.keys[first:end],
                held=lease.slots,
                request_id=request_id,
                now=state.clock(),
            )

    # -- store ----------------------------------------------------------------------------------------------

    def begin_store(self, keys: Sequence[bytes], blocks: Sequence[int], *, request_id: str = "") -> StoreGrant:
        """Plan to store block `blocks[i]` under `keys[i]`, evicting as needed. Keys that are present (this counts as a
        use), in flight or repeated are skipped. If there are too few slots, the last keys are dropped.

        Raises `InvalidRequestError` if keys and blocks differ in number.
        """
        if len(keys) != len(blocks):
            raise InvalidRequestError(f"store of {len(keys)} keys and {len(blocks)} blocks; allowed: as many of each")
        with self._state.lock:
            return place_store(self._state, keys, blocks, request_id)

    def store_room(self) -> int:
        """Blocks that `begin_store` would find a slot for now; 0 while stores are refused. O(1)."""
        with self._state.lock:
            return store_room(self._state)

    def refresh(self, keys: Sequence[bytes]) -> None:
        """Mark the blocks that are present as most recently used, the first key's block last of all.

        For a prefix that was stored in several steps: without this its beginning, which all of it depends on, would be
        evicted first. Does not count as a look-up.
        """
        state = self._state
        with state.lock:
            state.index.refresh(state.index.keys.present_runs(keys), state.clock())

    # -- completion -----------------------------------------------------------------------------------------

    def complete(self, rank: int, boot_id: str, completions: Sequence[Completion]) -> None:
        """Take completions of `rank`. Idempotent: late and repeated ones, and those of a former boot, are counted and
        ignored. Raises `NotFoundError` for an unknown rank."""
        state = self._state
        with state.lock:
            if state.ranks.boot_id(rank) != boot_id:
                state.counters.faults.stale_completions += len(completions)
                return
            for completion in completions:
                state.ops.complete(rank, completion)
        state.write_log()

    def take_settled(self) -> list[Settled]:
        """All results that became final since the last call, in order, as one consistent snapshot of done and
        failed."""
        state = self._state
        with state.lock:
            settled = list(state.ops.settled)
            state.ops.settled.clear()
            return settled

    @property
    def open_transfers(self) -> int:
        """Ops that some rank has not finished, including abandoned ones. O(1)."""
        return len(self._state.ops)

    @property
    def awaited_transfers(self) -> int:
        """The `open_transfers` that are not abandoned: the host waits for them to end. O(1)."""
        return len(self._state.ops) - self._state.ops.num_abandoned

    # -- ranks ----------------------------------------------------------------------------------------------

    def report(self, report: RankReport) -> DesiredState:
        """Take a rank's report and return its desired state. A report that arrives after a newer one is counted and
        changes nothing.

        A new boot id means that the rank has lost its memory: its ops fail, leases break, and every block is removed,
        slice by slice, before anything is served again. The same applies to slots that a rank has unpinned unasked.
        That takes about 1 ms per 1,000 blocks, mostly without the lock: do not call it from an event loop. The lock is
        held for O(blocks in flight) where ops fail, and for 60 ns for each new slot.

        Raises `NotFoundError` or `InvalidRequestError` for a report of another pool.
        """
        state = self._state
        if report.engine_id != self.engine_id:
            report = replace(report, applied=0)  # it has applied no desired state of this engine
        with state.lock:
            state.ranks.check(report)
            if state.ranks.is_late(report):
                state.counters.faults.stale_reports += 1
                return state.desired
            before = state.ranks.usable_slots()
            restarted = state.ranks.update(report, state.clock())
            usable = state.ranks.usable_slots()
            if restarted:
                state.counters.faults.rank_restarts += 1
                state.counters.faults.errors["rank_restarted"] += 1
                state.lose(0)
                state.ops.fail_rank(report.rank)
            elif usable < before and usable < state.slots.top:
                state.lose(usable)
            state.apply_limit()
            state.refresh_acceptance()
        state.write_log()
        state.remove_lost()
        return self.desired()

    def boot_ids(self) -> tuple[str | None, ...]:
        """The current boot of each rank. A plan names the boots that its ops are for: after a restart its slots hold
        other bytes."""
        state = self._state
        with state.lock:
            return tuple(state.ranks.boot_id(rank) for rank in range(len(state.ranks)))

    def desired(self) -> DesiredState:
        """The desired state of every rank."""
        with self._state.lock:
            return self._state.desired

    # -- time, end, snapshots -------------------------------------------------------------------------------

    def tick(self) -> None:
        """Let time pass: protections end, transfers become stuck. Call it about once a second. O(what changes), with
        the lock held for no more than 1,024 protections, or one transfer, at a time."""
        now = self._state.clock()
        while self._end_protections(now) or self._mark_stuck(now):
            pass
        self._state.write_log()

    def _end_protections(self, now: float) -> bool:
        """One slice; True if more protections may have ended."""
        with self._state.lock:
            return self._state.index.end_protections(now, self._state.slice_slots) == self._state.slice_slots

    def _mark_stuck(self, now: float) -> bool:
        """Mark the oldest transfer that has become stuck; False if there is none."""
        state = self._state
        with state.lock:
            found = state.ops.mark_stuck(now)
            state.refresh_acceptance()
        return found

    def count_error(self, code: str) -> None:
        """Count an error of the host; `code` is one of `kvstow.stats.ERRORS`."""
        with self._state.lock:
            self._state.counters.faults.errors[code] += 1

    def fail(self, reason: str) -> None:
        """The host has lost track of its ops: nothing is served until it restarts. Transfers under way end as usual.
        Counts as error `host`; the first reason is kept."""
        state = self._state
        with state.lock:
            state.counters.faults.errors["host"] += 1
            state.host_error = state.host_error or reason
            state.refresh_acceptance()

    def close(self) -> None:
        """The host stops: nothing is served from now on. Idempotent."""
        with self._state.lock:
            self._state.acceptance.closed = True

    def stats(self) -> EngineStats:
        """One consistent copy of all counters. O(1)."""
        return snapshots.stats(self._state)

    def readiness(self) -> Readiness:
        """Whether traffic can flow, the reason if not, and the status of each rank. O(ranks)."""
        return snapshots.readiness(self._state)

    def transfers(self, limit: int = 1000) -> list[TransferStatus]:
        """Ops in flight, oldest first."""
        return snapshots.transfers(self._state, limit)

    def block(self, key: bytes) -> BlockStatus | None:
        """The visible block under `key`."""
        return snapshots.block(self._state, key)

    def blocks(self, start_slot: int = 0, limit: int = 100) -> BlockPage:
        """Visible blocks in order of their slots, from `start_slot` on. Visits 1,024 slots at most: a page may be short
        or empty and still have a `next_slot`."""
        return snapshots.blocks(self._state, start_slot, limit)

    def check_integrity(self) -> None:
        """Compare all records with each other. Raises `IntegrityError`. O(pool) with the lock held, 1 s for a million
        slots: for tests and quiet hours."""
        state = self._state
        with state.lock:
            defects = snapshots.defects(state)
            state.integrity_error = "; ".join(defects) or None
            state.counters.faults.errors["integrity"] += bool(defects)
        if defects:
            raise IntegrityError("; ".join(defects))
