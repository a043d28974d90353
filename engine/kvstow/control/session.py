"""A session: one incarnation of an inference engine as a client of a pool."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Generic, Literal, TypeVar

from kvstow.control.indexjournal import MAX_KEY_BYTES, fit
from kvstow.control.namespaces import Namespace, first_of_runs
from kvstow.control.ops import OP_SLOTS, OpsInFlight
from kvstow.control.pool import SLOTS_OF_LEASE, LeaseBook, Pool
from kvstow.control.ranktable import RankTable
from kvstow.control.shadows import MOST_FOLLOWED, SampledPart
from kvstow.control.slots import values_at
from kvstow.control.trial import Trial, TrialPart
from kvstow.errors import InvalidRequestError, LeaseError
from kvstow.hints import Hints
from kvstow.messages import Completion, DesiredState, Op, RankReport
from kvstow.prefill import PrefillNews
from kvstow.results import NO_LEASE, KeyRun, Lease, Settled, StoreGrant
from kvstow.source import NO_SOURCE, Source
from kvstow.status import LoadRefusal, RankStatus, Refusal

MOST_HELD = 65_536
"""Leases and loads under way of one session: more than requests wait in any inference engine. 20 MiB."""
MOST_HELD_SLOTS = 4 << 20
"""Slots of all of them, a slot once for each: 190 MiB. 4,096 requests may wait for 16,384 tokens of 16-token blocks."""
_OUTCOME_OF: dict[Refusal, str] = {
    "not_ready": "dropped_not_ready",
    "draining": "dropped_draining",
    "bypassed": "skipped_bypass",
}

MOST_CLAIMED = 1 << 18
"""Blocks of a chain whose claim is made: 4 million tokens."""


P = TypeVar("P")


class _Behind(Generic[P]):
    """Parts of a chain whose beginning is still to come, the end first. Bounded, as a client may never give a
    beginning. `size`: how many keys a part has."""

    def __init__(self, size: Callable[[P], int]) -> None:
        self._size = size
        self._parts: deque[P] = deque()
        self.num_keys = 0

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[P]:
        return iter(self._parts)

    def add(self, part: P, most: int) -> None:
        """Keep the part, and no more keys than `most`."""
        if count := self._size(part):
            self._parts.append(part)
            self.num_keys += count
        while self.num_keys > most:
            self.num_keys -= self._size(self._parts.popleft())

    def take(self) -> list[P]:
        """All of them, the beginning first."""
        parts = list(reversed(self._parts))
        self.clear()
        return parts

    def clear(self) -> None:
        self._parts.clear()
        self.num_keys = 0


class Session:
    """Everything whose life is that of a client: its ranks, leases, ops in flight and their results.

    Sessions of one pool share its blocks: a key that one has stored is found by all, and is stored once. Each gets only
    the results of its own ops.

    Every call is safe from any thread. A call holds the pool's lock for O(blocks given) in any state of the pool, and
    never waits; the exception is `report` when a rank has lost its memory or the number of slots changes. Attributes
    are used with the lock held.

    Keys and blocks are in prefix order, root first. Times are in seconds of the pool's clock.
    """

    owns_memory = True
    """The pool's memory is that of the session's ranks, and is lost with them."""
    is_engine = True
    """False for a session of the pool's own host, which no figure of engines includes."""
    session_id = 0

    def __init__(self, pool: Pool, namespace: str = "") -> None:
        self.pool = pool
        self.namespace = self.join_namespace(namespace)
        self.ranks = RankTable(pool.config, pool.desired)
        self.leases = LeaseBook()
        self.ops = OpsInFlight(pool, self)
        self.holding = None if pool.holding is None else pool.holding.another()
        """What its leases and loads hold, of what those of all owners may hold."""
        self.serving = False
        """Every rank can copy and no transfer is stuck."""
        self.closed = False
        self.host_error: str | None = None
        self.is_lost = False
        """The client has gone; what is left waits for the end of its processes."""
        self.quarantined_slots: list[int] = []
        """Slots that processes of a lost session may still write."""
        self.name = ""
        """What the host calls the session."""
        self.label = ""
        """Begins the sentences about this session."""
        self.model = ""
        """What the engine computes with."""
        self._uses_behind = 0
        """Uses of the first block of the part of a chain that was given last."""
        self._parts_behind = _Behind[SampledPart](lambda part: len(part.keys))
        """What the comparison may follow of them."""
        self._tried_behind = _Behind[TrialPart](lambda sample: len(sample.keys))
        """What the trial of hints follows."""
        self._claimed_behind = _Behind[Sequence[bytes]](len)
        """Those with hints. They are of one context, and adjoin: the beginning of another chain may never have come, as
        when its hints were too many."""
        self._claim_behind: tuple[bytes | None, int] = (None, 0)
        """Their context, and how many keys come before them."""
        self.watermark: int | None = None
        """Slots from it on are not for this session; None if all are."""
        self.on_stored: Callable[[Sequence[bytes]], None] | None = None
        """Called with the lock held, with keys that a store has made visible. For the store below the pool."""
        pool.sessions.append(self)

    def join_namespace(self, name: str) -> Namespace:
        """Count as a session of this namespace. The caller holds the lock."""
        return self.pool.join_namespace(name)

    def rank_statuses(self, now: float) -> tuple[RankStatus, ...]:
        """The caller holds the lock."""
        return self.ranks.statuses(now, self.pool.name, self.name)

    # -- lookup and load -----------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[bytes]) -> int:
        """The number of leading keys that are present. Holds nothing; see `acquire`."""
        pool = self.pool
        with pool.lock:
            if self.refusal("load", pool.clock()):
                return 0
            runs, _ = self.namespace.keys.find(keys, self.watermark, leading=True)
            return sum(map(len, runs))

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """For each key, whether it is present (for windows, which need no leading run). Holds nothing; see `lease`."""
        pool = self.pool
        with pool.lock:
            if self.refusal("load", pool.clock()):
                return [False] * len(keys)
            return [slot is not None for slot in self.namespace.keys.slots_of(keys, self.watermark)]

    def find_runs(self, keys: Sequence[bytes]) -> list[KeyRun]:
        """Which of all the keys are present, as runs. Holds nothing; see `acquire_runs`."""
        pool = self.pool
        with pool.lock:
            if self.refusal("load", pool.clock()):
                return []
            return self.namespace.keys.find(keys, self.watermark)[1]

    def acquire(self, keys: Sequence[bytes], *, count: bool = True) -> Lease:
        """Look up the leading keys that are present and keep them from eviction, in one step. The lease may be empty;
        release it, or use it for `begin_load`. With `count` false this does not count as a lookup: a host that asks
        repeatedly for one request reports the result with `count_lookup`."""
        return self._acquire(keys, leading=True, count=count)[0]

    def acquire_runs(self, keys: Sequence[bytes], *, count: bool = True) -> tuple[Lease, list[KeyRun]]:
        """Look up all the keys, and keep those that are present from eviction. The lease has the slots of all runs."""
        return self._acquire(keys, leading=False, count=count)

    def count_lookup(self, queried: int, hits: int, source: Source = NO_SOURCE) -> None:
        """Count one lookup of `queried` blocks with `hits` hits."""
        pool = self.pool
        with pool.lock:
            pool.counters.count_lookup(queried, hits, self._lease_refusal(pool.clock()))
            pool.sources.count_lookup(self.model, source, queried, hits)

    def lease(self, keys: Sequence[bytes]) -> Lease | None:
        """Keep exactly these keys from eviction. None, and nothing is held, if one of them is absent."""
        pool = self.pool
        with pool.lock:
            now = pool.clock()
            if self._lease_refusal(now):
                return None
            runs, _ = self.namespace.keys.find(keys, self.watermark, leading=True)
            slots = list(chain.from_iterable(runs))
            if len(slots) < len(keys) or len(slots) > self.leases.max_slots:
                return None
            return self._hold(slots, runs, now)

    def _acquire(self, keys: Sequence[bytes], *, leading: bool, count: bool) -> tuple[Lease, list[KeyRun]]:
        pool, counters = self.pool, self.pool.counters
        begun = time.perf_counter()
        with pool.lock:
            now = pool.clock()
            refusal = self._lease_refusal(now)
            runs, found = ([], []) if refusal else self.namespace.keys.find(keys, self.watermark, leading=leading)
            slots = list(chain.from_iterable(runs))
            if len(slots) > self.leases.max_slots:
                slots = slots[: int(self.leases.max_slots)]
                runs, found = [slots], first_of_runs(found, len(slots))
            lease = NO_LEASE
            if slots:
                pool.ages.sample_found(slots, now)
                lease = self._hold(slots, runs, now)
            if count:
                counters.count_lookup(len(keys), len(slots), refusal)
                pool.sources.count_lookup(self.model, NO_SOURCE, len(keys), len(slots))
            counters.lookups.seconds.observe(time.perf_counter() - begun)
        return lease, found

    def _lease_refusal(self, now: float) -> LoadRefusal | None:
        """Why a look-up finds nothing that it may keep. A client that begins loads and never ends them, or releases no
        lease, holds a bounded amount of this process's memory. What its pool still owes counts, too, or one that
        leases and releases faster than slots are freed would have no bound."""
        refusal = self.refusal("load", now)
        if refusal:
            return refusal
        num_held = len(self.leases) + self.ops.num_ops["load"] + len(self.pool.owed)
        slots = self.leases.num_slots + self.ops.held_slots + self.pool.owed_slots
        self.note_held()
        self.pool.note_held()
        may_grow = self.holding is None or self.holding.may_grow
        return "too_many_leases" if num_held >= MOST_HELD or slots >= MOST_HELD_SLOTS or not may_grow else None

    def note_held(self) -> None:
        """Count what leases and loads hold for the session's owner. The caller holds the lock. O(1)."""
        if self.holding is not None:
            count = len(self.leases) + self.ops.num_ops["load"]
            self.holding.note(self.leases.num_slots + self.ops.held_slots + SLOTS_OF_LEASE * count)

    def _hold(self, slots: list[int], runs: Sequence[Sequence[int]], now: float) -> Lease:
        """Lease present keys; `runs` are their slots as runs of neighbours."""
        self.pool.index.times.mark_used(runs, now)
        self.pool.index.hold(slots)
        return self.leases.grant(tuple(slots))

    def join_leases(self, leases: Sequence[Lease]) -> Lease:
        """One lease in place of these, with all their slots in order. It is empty, and nothing is held any more, if one
        of them has ended or is broken."""
        pool, book = self.pool, self.leases
        with pool.lock:
            is_whole = all(book.is_open(lease) and not book.is_broken(lease) for lease in leases)
            parts = [lease.slots for lease in leases if book.end(lease)]
            if not is_whole:
                pool.end_holds(parts)
                return NO_LEASE
            return book.grant(tuple(chain.from_iterable(parts)))

    def lease_slots(self, slots: list[int], now: float) -> Lease | None:
        """Keep the visible blocks in these slots, of the session's namespace, from eviction. None, and nothing is held,
        if the session may hold nothing, or has not registered all of them. The caller holds the lock."""
        if self.is_lost or self._lease_refusal(now):
            return None
        if self.watermark is not None and max(slots) >= self.watermark:
            return None
        index = self.pool.index
        index.hold(slots)
        return self.leases.grant(tuple(slots))

    def find_lease(self, lease_id: int) -> Lease:
        """The lease of this session with this id. Raises `LeaseError` if it has ended."""
        with self.pool.lock:
            lease = self.leases.get(lease_id)
        if lease is None:
            raise LeaseError(f"lease {lease_id} was released or used up")
        return lease

    def release_lease(self, lease: Lease) -> None:
        """End a lease. Idempotent, also after a load has used it."""
        pool = self.pool
        with pool.lock:
            if self.leases.end(lease):
                pool.end_holds([lease.slots])

    def begin_load(
        self,
        lease: Lease,
        blocks: Sequence[int],
        *,
        first: int = 0,
        request_id: str = "",
        choice: str = "async_engine",
    ) -> Op:
        """Plan to load the slots of the lease, from its `first` on, into `blocks`. Uses the lease: its slots are kept
        until the load ends. `choice`: one of `LOAD_CHOICES`.

        Raises `LeaseError` if the lease has ended, or if a rank has lost its memory since (then release it), and
        `InvalidRequestError` for no blocks, or more than the lease has from `first` on.
        """
        pool = self.pool
        if not blocks or first < 0 or first + len(blocks) > len(lease.slots):
            raise InvalidRequestError(
                f"load of {len(blocks)} blocks from number {first} on; "
                f"allowed: 1 or more, within the {len(lease.slots)} leased"
            )
        with pool.lock:
            if not self.leases.is_open(lease):
                raise LeaseError(f"lease {lease.lease_id} was released or used up")
            if self.leases.is_broken(lease):
                raise LeaseError(f"lease {lease.lease_id} is broken: a rank has lost its memory since it was given")
            self.leases.end(lease)
            pool.counters.transfers.choices[choice] += 1
            end = first + len(blocks)
            return self.ops.start(
                "load",
                tuple(blocks),
                lease.slots[first:end],
                held=lease.slots,
                request_id=request_id,
                now=pool.clock(),
            )

    # -- store ----------------------------------------------------------------------------------------------

    def begin_store(self, keys: Sequence[bytes], blocks: Sequence[int], *, request_id: str = "") -> StoreGrant:
        """Plan to store block `blocks[i]` under `keys[i]`, evicting as needed. Keys that are present (this counts as a
        use), in flight or repeated are skipped. If there are too few slots, the last keys are dropped.

        Raises `InvalidRequestError` if keys and blocks differ in number, or if the pool has a journal and the keys do
        not fit into it.
        """
        if len(keys) != len(blocks):
            raise InvalidRequestError(f"store of {len(keys)} keys and {len(blocks)} blocks; allowed: as many of each")
        if self.pool.journal is not None and not fit(keys):
            widths = sorted(set(map(len, keys)))
            raise InvalidRequestError(
                f"keys of {widths} bytes; allowed: keys of one length, from 1 to {MAX_KEY_BYTES} bytes, because the "
                "pool's journal has a field of that size"
            )
        pool = self.pool
        op: Op | None = None
        fresh: list[int] = []
        outcomes: dict[str, int] = {}
        unplaced: Sequence[int] = ()
        with pool.lock:
            now = pool.clock()
            refusal = self.refusal("store", now)
            if refusal:
                outcomes[_OUTCOME_OF[refusal]] = len(keys)
                unplaced = range(len(keys))
            else:
                fresh, present = self.namespace.select(keys, outcomes)
                slots = pool.make_room(len(fresh), present, now, self.watermark)
                if len(slots) < len(fresh):
                    outcomes["dropped_cpu_full"] = len(fresh) - len(slots)
                    pool.counters.allocation_failures += 1
                    unplaced = fresh[len(slots) :]
                    del fresh[len(slots) :]
                if fresh:
                    self.namespace.begin(keys, fresh, slots)
                    if pool.journal is not None:
                        pool.journal.begin(slots, self.session_id)
                    moved = values_at(blocks, fresh)
                    op = self.ops.start("store", moved, tuple(slots), request_id=request_id, now=now)
            for outcome, count in outcomes.items():
                pool.counters.stores[outcome] += count
        return StoreGrant(op, tuple(fresh), outcomes, unplaced)

    def store_room(self) -> int:
        """Blocks that `begin_store` would find a slot for now; 0 while stores are refused. O(1)."""
        with self.pool.lock:
            return self.room()

    def room(self, *, kept: int = 0) -> int:
        """Slots for a store, free or by eviction; 0 while stores are refused. `kept`: evictable blocks that must stay.
        An upper bound while the session has not registered all slots, or leases too many. The caller holds the lock."""
        pool = self.pool
        if self.refusal("store", pool.clock()):
            return 0
        room = pool.slots.free
        if pool.earlier is None:
            room += pool.index.num_cached - kept + sum(one.leases.excess_slots for one in pool.sessions)
        return room if self.watermark is None else min(room, self.watermark)

    def use(
        self,
        keys: Sequence[bytes],
        *,
        start: int = 0,
        looked_up: tuple[int, int] | None = None,
        source: Source = NO_SOURCE,
        hints: Hints | None = None,
    ) -> Sequence[bytes] | None:
        """A request has used these blocks: its whole chain from the root, what the GPU had of it included. Call it once
        for each request, when all that it stores is stored. Nothing else counts as a use, neither look-ups nor stores:
        where it is not called, blocks are evicted in the order of their last use alone.

        Marks the blocks that are present as just used, the first key's block last of all: what was stored in several
        steps would otherwise lose its beginning first. A long chain can be given in parts, its end first; `start`: how
        many keys of the chain come before these. `looked_up`: from where to where in the chain the request has looked
        blocks up, given with the first part; None: in all of that part. `source`: see `source_of`. `hints`: the
        request's, with each part; times in them count from this call.

        Returns the whole chain of a request with a context when its beginning is given; None otherwise.
        """
        whole: Sequence[bytes] | None = None
        pool = self.pool
        with pool.lock:
            if hints is not None and not start:
                for reason in hints.ignored:
                    pool.counters.hints_ignored[reason] += 1
            if hints is not None and hints.context is None:  # the others are about a context, or the host's
                hints = None
            now, comparison, num_slots = pool.clock(), pool.comparison, pool.slots.limit
            runs, absent = self.namespace.keys.split(keys)
            new, least = pool.index.use(self.namespace, runs, absent, now, self._uses_behind)
            self._uses_behind = least if start else 0
            if pool.index.claims is not None:
                pool.index.claims.note_uses(keys, now)
            pool.sources.count_use(self.model, source, runs, new)
            recording = pool.recording
        if hints is not None:
            whole = self._claim(keys, start, hints, now)
        else:
            self._claimed_behind.clear()
        trial = pool.trial if num_slots else None
        if recording is not None:
            recording.add(id(self), keys, self.namespace.tag, start, looked_up, now)
        if trial is not None:
            self._try(trial, keys, start, looked_up, hints, now)
        if comparison is None or not num_slots:
            return whole
        part = comparison.part(keys, self.namespace.tag, start)
        if start:
            self._parts_behind.add(part, MOST_FOLLOWED)
        else:
            parts = [part, *self._parts_behind.take()] if len(self._parts_behind) else [part]
            change = comparison.use(parts, range(*(looked_up or (0, len(keys)))), now, num_slots)
            if change is not None:
                pool.apply_change(comparison, change)
        return whole

    def note_prefill(self, news: PrefillNews) -> None:
        """Count what loads have saved, by what it costs this engine to compute prompts."""
        pool = self.pool
        with pool.lock:
            pool.counters.prefill.count(tokens=news.hit_tokens, seconds=news.hit_seconds, waited=news.waited)

    def _try(
        self,
        trial: Trial,
        keys: Sequence[bytes],
        start: int,
        looked_up: tuple[int, int] | None,
        hints: Hints | None,
        now: float,
    ) -> None:
        pool = self.pool
        sample = trial.sample(keys, self.namespace.tag, start)
        if start:
            self._tried_behind.add(sample, MOST_FOLLOWED)
            return
        parts = [sample, *self._tried_behind.take()]
        k, tag = pool.index.uses.k, self.namespace.tag
        switch = trial.use(parts, range(*(looked_up or (0, len(keys)))), hints, tag, k, now)
        pool.follow(trial, switch)

    def _claim(self, keys: Sequence[bytes], start: int, hints: Hints, now: float) -> Sequence[bytes] | None:
        """Claim the blocks of a chain once its beginning is there, and return it then."""
        if self._claim_behind != (hints.context, start + len(keys)):
            self._claimed_behind.clear()
        self._claim_behind = (hints.context, start)
        if start:
            self._claimed_behind.add(keys, MOST_CLAIMED)
            return None
        chain_keys = [*keys, *chain.from_iterable(self._claimed_behind.take())]
        if len(set(chain_keys)) < len(chain_keys):  # no chain repeats a block
            return None
        pool, step = self.pool, self.pool.slice_slots
        with pool.lock:
            claims = pool.use_claims()
            renewal = claims.begin(self.namespace, hints, chain_keys, now)
        for first in range(0, len(chain_keys), step):
            with pool.lock:
                if not claims.extend(renewal, self.namespace.keys.slots_of(chain_keys[first : first + step])):
                    break
        with pool.lock:
            claims.finish(renewal)
        return chain_keys

    # -- completion -----------------------------------------------------------------------------------------

    def complete(self, rank: int, boot_id: str, completions: Sequence[Completion]) -> None:
        """Take completions of `rank`. Idempotent: late and repeated ones, and those of a former boot, are counted and
        ignored. Raises `NotFoundError` for an unknown rank."""
        for _ in self.complete_in_steps(rank, boot_id, completions):
            pass

    def complete_in_steps(self, rank: int, boot_id: str, completions: Sequence[Completion]) -> Iterator[None]:
        """`complete`; each step ends ops of `Pool.slice_slots`, or one op."""
        pool, ops, at = self.pool, self.ops, 0
        while True:
            with pool.lock:
                left = pool.slice_slots
                if self.ranks.boot_id(rank) != boot_id:
                    pool.counters.faults.stale_completions += len(completions) - at
                    return
                while at < len(completions) and left > 0:
                    if removed := ops.remove_unloadable(rank, completions[at], left):
                        left -= removed
                        continue
                    left -= OP_SLOTS + ops.num_slots(completions[at].op_id)
                    ops.complete(rank, completions[at])
                    at += 1
            pool.write_log()
            if at == len(completions):
                return
            yield

    def take_settled(self) -> list[Settled]:
        """All results that became final since the last call, in order, as one consistent snapshot of done and
        failed."""
        pool = self.pool
        with pool.lock:
            settled = list(self.ops.settled)
            self.ops.settled.clear()
            return settled

    @property
    def open_transfers(self) -> int:
        """Ops that some rank has not finished, including abandoned ones. O(1)."""
        return len(self.ops)

    @property
    def awaited_transfers(self) -> int:
        """The `open_transfers` that are not abandoned: the host waits for them to end. O(1)."""
        return len(self.ops) - self.ops.num_abandoned

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
        for _ in self.report_in_steps(report):
            pass
        return self.desired()

    def report_in_steps(self, report: RankReport) -> Iterator[None]:
        """`report`, without its result. The ops of a rank that has restarted fail in steps."""
        pool = self.pool
        failing: Iterator[None] = iter(())
        is_failing = False
        if report.engine_id != pool.desired.engine_id:
            report = replace(report, applied=0)  # it has applied no desired state of this engine
        with pool.lock:
            self.check_report(report)
            if self.is_lost or self.ranks.is_late(report):
                pool.counters.faults.stale_reports += 1
                return
            before = self.ranks.usable_slots()
            restarted = self.ranks.update(report, pool.clock())
            usable = self.ranks.usable_slots()
            if restarted:
                pool.counters.faults.rank_restarts += 1
                pool.counters.faults.errors["rank_restarted"] += 1
                self.lose_slots(0)
                failing = self.ops.fail_rank(report.rank)
                is_failing = next(failing, self) is not self
            elif usable < before and usable < pool.slots.top:
                self.lose_slots(usable)
            pool.apply_limit()
            self.adapt_to_pool()
        while is_failing:
            yield
            with pool.lock:
                is_failing = next(failing, self) is not self
        pool.write_log()
        pool.remove_lost()

    def desired(self) -> DesiredState:
        """The desired state of every rank."""
        with self.pool.lock:
            return self.pool.desired

    def check_report(self, report: RankReport) -> None:
        """Raises `NotFoundError` or `InvalidRequestError` for a report that no rank of this session can have sent. The
        caller holds the lock."""
        self.ranks.check(report)

    def lose_slots(self, low: int) -> None:
        """A rank can no longer reach its slots from `low` on; here their contents are lost with them. The caller holds
        the lock."""
        self.pool.lose(low)

    def adapt_to_pool(self) -> None:
        """The ranks or the number of usable slots have changed. The caller holds the lock."""
        self.refresh_acceptance()

    # -- time and end ---------------------------------------------------------------------------------------

    def mark_stuck(self, now: float) -> bool:
        """Mark the oldest transfer that has become stuck; False if there is none. The caller holds the lock."""
        found = self.ops.mark_stuck(now)
        self.refresh_acceptance()
        return found

    def held_slots(self) -> Iterator[tuple[int, ...]]:
        """The slots of each lease and load. The caller holds the lock."""
        yield from (lease.slots for lease in self.leases)
        yield from (tuple(entry.kept) for entry in self.ops if entry.kept)

    def refusal(self, what: Literal["load", "store"], now: float) -> Refusal | None:
        """Why the session may not load, or store: what its pool allows, and its own state. The caller holds the
        lock."""
        pool = self.pool.acceptance
        if self.closed or pool.drain_mode == "all" or (pool.drain_mode and what == "store"):
            return "draining"
        if not self.serving or pool.rebuilding:
            return "not_ready"
        if pool.bypasses(what, now):
            return "bypassed"
        return "not_ready" if what == "store" and not self.pool.slots.limit else None

    def refresh_acceptance(self) -> None:
        """Update whether work is accepted, after a change of the ranks or of stuck ops. The caller holds the lock."""
        self.serving = self.ranks.can_copy() and not self.ops.num_stuck and not self.host_error

    def fail(self, reason: str) -> None:
        """The host has lost track of its ops: nothing is served until it restarts. Transfers under way end as usual.
        Counts as error `host`; the first reason is kept."""
        with self.pool.lock:
            self.pool.counters.faults.errors["host"] += 1
            self.host_error = self.host_error or reason
            self.refresh_acceptance()


def sessions_of(pool: Pool) -> list[Session]:
    """The sessions of a pool. The caller holds the lock."""
    return [session for session in pool.sessions if isinstance(session, Session)]
