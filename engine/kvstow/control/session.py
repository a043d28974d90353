"""A session: one incarnation of an inference engine as a client of a pool."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Literal, NamedTuple, TypeVar

from kvstow.control.chains import Running
from kvstow.control.indexjournal import MAX_KEY_BYTES, fit
from kvstow.control.leases import SLOTS_OF_LEASE, LeaseBook
from kvstow.control.namespaces import Namespace, first_of_runs
from kvstow.control.ops import OP_SLOTS, OpsInFlight
from kvstow.control.pool import Pool
from kvstow.control.ranktable import RankTable
from kvstow.control.requests import INTERRUPTED
from kvstow.control.slots import values_at
from kvstow.endings import NO_ENDING, Ending
from kvstow.errors import InvalidRequestError, LeaseError
from kvstow.hints import Hints
from kvstow.messages import Completion, DesiredState, Op, RankReport
from kvstow.prefill import PrefillNews
from kvstow.results import NO_LEASE, KeyRun, Lease, Settled, StoreGrant
from kvstow.status import LoadRefusal, RankStatus, Refusal

MOST_HELD = 65_536
"""How many leases and loads one session may have under way, which take 20 MiB. No inference engine has as many
requests waiting."""
MOST_HELD_SLOTS = 4 << 20
"""How many slots these leases and loads may hold together, which take 190 MiB. A slot counts once for each of them.
With blocks of 16 tokens, 4,096 requests may wait for 16,384 tokens each."""
_OUTCOME_OF: dict[Refusal, str] = {
    "not_ready": "dropped_not_ready",
    "draining": "dropped_draining",
    "bypassed": "skipped_bypass",
}

MOST_RUNNING = 16_384
"""How many admitted requests of one session have not ended. No inference engine runs as many. If one more is
admitted, the oldest one ends."""


class _Request(NamedTuple):
    """A request between its admission and its end. `keys`: its chain as known at its admission, if its client has named
    a context; otherwise empty."""

    running: Running
    namespace: Namespace
    hints: Hints | None
    keys: Sequence[bytes]


_R = TypeVar("_R")


def result_of(steps: Generator[None, None, _R]) -> _R:
    """Make all steps at once, and return their result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: _R = end.value
            return found


class EndedRequest(NamedTuple):
    """What `end_request` returns. `is_incomplete`: whether blocks of the request have no slot, because the pool has
    given their slots to others, or has refused to store them before the end. Such blocks are worth storing now, while
    the GPU still has them. `hints` and `chain` are given only if the client has named a context."""

    is_incomplete: bool
    hints: Hints | None = None
    chain: Sequence[bytes] = ()


class Session:
    """Everything that lives as long as a client of a pool: its ranks, leases, ops in flight and their results.

    Sessions with the same namespace share blocks: all of them find a key that one has stored, and it is stored only
    once. Each session gets only the results of its own ops.

    Every call is safe from any thread. A call holds the pool's lock for O(blocks given) in any state of the pool, and
    never waits; the exception is `report` when a rank has lost its memory or the number of slots changes. Attributes
    are used with the lock held.

    Keys and blocks are in prefix order, root first. Times are in seconds of the pool's clock.
    """

    owns_memory = True
    """Whether the pool's memory belongs to the session's ranks, and is lost with them."""
    is_engine = True
    """Whether the session belongs to an engine. The session of the pool's own host counts in no figure about
    engines."""
    session_id = 0

    def __init__(self, pool: Pool, namespace: str = "") -> None:
        self.pool = pool
        self.namespace = self.join_namespace(namespace)
        self.ranks = RankTable(pool.config, pool.target.desired)
        self.leases = LeaseBook()
        self.ops = OpsInFlight(pool, self)
        self.holding = None if pool.debts.holding is None else pool.debts.holding.another()
        """The part of the limit for leases and loads of all owners that this session takes. None if there is no such
        limit."""
        self.serving = False
        """Whether every rank can copy and no transfer is stuck."""
        self.closed = False
        self.host_error: str | None = None
        self.is_lost = False
        """Whether the client has gone. Its slots are kept until its processes have ended."""
        self.quarantined_slots: list[int] = []
        """Slots that processes of a lost session may still write."""
        self.name = ""
        """The host's name for the session."""
        self.label = ""
        """The words with which sentences about this session begin."""
        self._running: dict[int, _Request] = {}
        """The running requests by number, in the order of their admission."""
        self._last_request = 0
        self.incomplete: list[int] = []
        """Numbers of running requests that have become incomplete (`Running`), which the host may take."""
        self.watermark: int | None = None
        """The session gets only slots below this number. None if it may get any slot."""
        self.on_stored: Callable[[Sequence[bytes]], None] | None = None
        """It is called with the keys that a store has made visible, for the store below the pool, with the lock
        held."""
        pool.sessions.append(self)

    def join_namespace(self, name: str) -> Namespace:
        """Return the namespace with this name, which counts this session from now on. The caller holds the lock."""
        return self.pool.join_namespace(name)

    def rank_statuses(self, now: float) -> tuple[RankStatus, ...]:
        """Return the status of each rank. The caller holds the lock."""
        return self.ranks.statuses(now, self.pool.name, self.name)

    # -- lookup and load -----------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[bytes]) -> int:
        """Return how many leading keys are present. Holds nothing; see `acquire`."""
        pool = self.pool
        with pool.lock:
            if self.refusal("load", pool.clock()):
                return 0
            runs, _ = self.namespace.keys.find(keys, self.watermark, leading=True)
            return sum(map(len, runs))

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether it is present. Windows use this, because they need no leading run. Holds nothing;
        see `lease`."""
        pool = self.pool
        with pool.lock:
            if self.refusal("load", pool.clock()):
                return [False] * len(keys)
            return [slot is not None for slot in self.namespace.keys.slots_of(keys, self.watermark)]

    def find_runs(self, keys: Sequence[bytes]) -> list[KeyRun]:
        """Return which of all the keys are present, as runs. Holds nothing; see `acquire_runs`."""
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
        """Look up all the keys, and keep the present ones from eviction. The lease has the slots of all runs."""
        return self._acquire(keys, leading=False, count=count)

    def count_lookup(self, queried: int, hits: int) -> None:
        """Count one lookup of `queried` blocks with `hits` hits."""
        pool = self.pool
        with pool.lock:
            refusal = self._lease_refusal(pool.clock()) if hits < queried else None
            pool.counters.count_lookup(queried, hits, refusal)
            self.namespace.lookups.add(queried, hits)

    def lease(self, keys: Sequence[bytes]) -> Lease | None:
        """Keep exactly these keys from eviction. Returns None, and holds nothing, if one of them is absent or the
        session may not lease so many."""
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
                self.namespace.lookups.add(len(keys), len(slots))
            counters.lookups.seconds.observe(time.perf_counter() - begun)
        return lease, found

    def _lease_refusal(self, now: float) -> LoadRefusal | None:
        """Return why a lookup may not lease anything now, or None. The limits ensure that a client that never ends its
        loads, or never releases its leases, holds a bounded amount of this process's memory. Slots that the pool has
        still to free count, too. Otherwise a client that leases and releases faster than slots are freed would have no
        bound."""
        refusal = self.refusal("load", now)
        if refusal:
            return refusal
        num_held = len(self.leases) + self.ops.num_ops["load"] + len(self.pool.debts.slots)
        slots = self.leases.num_slots + self.ops.held_slots + self.pool.debts.num_slots
        self.note_held()
        self.pool.debts.note_held()
        may_grow = self.holding is None or self.holding.may_grow
        return "too_many_leases" if num_held >= MOST_HELD or slots >= MOST_HELD_SLOTS or not may_grow else None

    def note_held(self) -> None:
        """Count what leases and loads hold for the session's owner. The caller holds the lock. O(1)."""
        if self.holding is not None:
            count = len(self.leases) + self.ops.num_ops["load"]
            self.holding.note(self.leases.num_slots + self.ops.held_slots + SLOTS_OF_LEASE * count)

    def _hold(self, slots: list[int], runs: Sequence[Sequence[int]], now: float) -> Lease:
        """Lease the slots of present keys. `runs`: the same slots as runs of neighbours."""
        self.pool.index.times.mark_used(runs, now)
        self.pool.index.hold(slots)
        return self.leases.grant(tuple(slots))

    def join_leases(self, leases: Sequence[Lease]) -> Lease:
        """Replace these leases by one lease with all their slots, in order, and return it. If one of them has ended or
        is broken, end all of them and return an empty lease."""
        pool, book = self.pool, self.leases
        with pool.lock:
            is_whole = all(book.is_open(lease) and not book.is_broken(lease) for lease in leases)
            parts = [lease.slots for lease in leases if book.end(lease)]
            if not is_whole:
                pool.end_holds(parts)
                return NO_LEASE
            return book.grant(tuple(chain.from_iterable(parts)))

    def lease_slots(self, slots: list[int], now: float) -> Lease | None:
        """Keep the visible blocks in these slots, which belong to the session's namespace, from eviction. Returns None,
        and holds nothing, if the session may not lease anything now, or has not registered all of the slots. The caller
        holds the lock."""
        if self.is_lost or self._lease_refusal(now):
            return None
        if self.watermark is not None and max(slots) >= self.watermark:
            return None
        index = self.pool.index
        index.hold(slots)
        return self.leases.grant(tuple(slots))

    def find_lease(self, lease_id: int) -> Lease:
        """Return the lease of this session with this id. Raises `LeaseError` if it has ended."""
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
        """Plan to load the slots of the lease, from its `first` on, into `blocks`. This uses up the lease, and its
        slots are kept until the load ends. `choice`: one of `LOAD_CHOICES`.

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
                fresh, hashes, present = self.namespace.select(keys, outcomes)
                wanted = keys if len(fresh) == len(keys) else [keys[index] for index in fresh]
                limits = pool.index.chains.limits(self.namespace.order, wanted)
                slots, accepted, deferred = pool.make_room_within(limits, present, now, self.watermark)
                if deferred:
                    outcomes["deferred"] = deferred
                if len(accepted) + deferred < len(fresh):
                    outcomes["dropped_cpu_full"] = len(fresh) - len(accepted) - deferred
                    pool.counters.allocation_failures += 1
                    if not deferred:
                        unplaced = fresh[len(accepted) :]
                if len(accepted) < len(fresh):
                    fresh = [fresh[index] for index in accepted]
                    wanted = [wanted[index] for index in accepted]
                    hashes = hashes[list(accepted)]
                if fresh:
                    self.namespace.pending_stores.start(wanted, slots, hashes)
                    if pool.journal is not None:
                        pool.journal.begin(slots, self.session_id)
                    moved = tuple(blocks) if len(fresh) == len(blocks) else values_at(blocks, fresh)
                    op = self.ops.start("store", moved, tuple(slots), request_id=request_id, now=now)
            for outcome, count in outcomes.items():
                pool.counters.stores[outcome] += count
        return StoreGrant(op, tuple(fresh), outcomes, unplaced)

    def store_room(self) -> int:
        """Return for how many blocks `begin_store` would find a slot now; 0 while stores are refused. O(1)."""
        with self.pool.lock:
            return self.room()

    def room(self, *, kept: int = 0) -> int:
        """Return how many slots a store can get, free or by eviction; 0 while stores are refused. `kept`: how many
        evictable blocks must stay. This is an upper bound while the session has not registered all slots, or while
        sessions lease too many slots. The caller holds the lock."""
        pool = self.pool
        if self.refusal("store", pool.clock()):
            return 0
        room = pool.slots.free
        if pool.earlier is None:
            room += pool.index.num_cached - kept + sum(one.leases.excess_slots for one in pool.sessions)
        return room if self.watermark is None else min(room, self.watermark)

    def admit(
        self,
        keys: Sequence[bytes],
        *,
        number: int | None = None,
        looked_up: tuple[int, int] | None = None,
        salt: bytes = b"",
        hints: Hints | None = None,
    ) -> int:
        """Note that a request begins to compute and uses these blocks. They are its whole chain from the root, as far
        as it is known, including blocks that the GPU has already. Only this counts as a use; lookups and stores do not.
        Until `end_request`, the pool knows that a GPU has the blocks. Returns the request's number in the session,
        which is `number` unless that is None.

        `looked_up`: the begin and end of the part of the chain in which the request has looked blocks up; None if it is
        the whole chain. `salt`: the digest of its cache salt (`digest_of_salt`), empty without one. `hints`: what its
        client has announced about the next request. Takes the lock for a slice of the chain at a time.
        """
        step = self.pool.slice_slots
        steps = self.admit_in_steps(keys, step, number=number, looked_up=looked_up, salt=salt, hints=hints)
        return result_of(steps)

    def admit_in_steps(
        self,
        keys: Sequence[bytes],
        step: int,
        *,
        number: int | None = None,
        looked_up: tuple[int, int] | None = None,
        salt: bytes = b"",
        hints: Hints | None = None,
    ) -> Generator[None, None, int]:
        """Do what `admit` does, in slices of `step` keys."""
        pool = self.pool
        chains = pool.index.chains
        with pool.lock:
            self._last_request += number is None
            number = self._last_request if number is None else number
            share = pool.requests.shares.weigh(self.namespace.tag, salt)
            running = chains.begin(self.namespace.order, pool.clock(), share, engine=id(self))
            namespace = self.namespace
            running.on_incomplete = lambda: self.incomplete.append(number)
            for reason in () if hints is None else hints.ignored:
                pool.counters.hints_ignored[reason] += 1
        for start in range(0, max(1, len(keys)), step):
            with pool.lock:
                now = pool.clock()
                some = keys if len(keys) <= step else keys[start : start + step]
                pool.index.extend(running, namespace, some, now)
            if start + step < len(keys):
                yield
        with pool.lock:
            chains.admit(running, now)
            if pool.requests.curve is not None:
                pool.requests.curve.admit(running, keys, now, looked_up, pool.counters.lookups)
            has_name = hints is not None and hints.context is not None
            request = _Request(running, namespace, hints, keys if has_name else ())
            self._add_running(number, request)
            seen, recording = chains.hazards.count_request(), pool.requests.recording
        pool.learn(seen)
        if recording is not None:
            context = None if hints is None else hints.context
            tag = request.namespace.tag
            recording.add((id(self), number), tuple(keys), tag, looked_up, now, context)
        return number

    def _add_running(self, number: int, request: _Request) -> None:
        ended = self._running.pop(number, None)
        if ended is None and len(self._running) >= MOST_RUNNING:
            ended = self._running.pop(next(iter(self._running)))
        if ended is not None:
            self.pool.requests.end(ended.running, INTERRUPTED)
        if self.is_lost:
            self.pool.requests.left.append(request.running)
        else:
            self._running[number] = request

    def end_request(
        self,
        number: int,
        ending: Ending = NO_ENDING,
        *,
        more: Sequence[bytes] = (),
        others: Sequence[bytes] = (),
    ) -> EndedRequest:
        """Note that the request with this number has ended in this way. `more`: keys of its chain that were not known
        when it was admitted. `others`: if the request has blocks that it does not need while it runs, such as those of
        windows, the keys of all its blocks, in the order of the tokens that they end with. Present ones count as used.
        Has no effect if the request has ended before or belongs to another session."""
        return result_of(self.end_in_steps(number, ending, self.pool.slice_slots, more=more, others=others))

    def end_in_steps(
        self, number: int, ending: Ending, step: int, *, more: Sequence[bytes], others: Sequence[bytes]
    ) -> Generator[None, None, EndedRequest]:
        """Do what `end_request` does, in slices of `step` keys."""
        pool, chains = self.pool, self.pool.index.chains
        with pool.lock:
            request = self._running.pop(number, None)
            if request is None:
                return EndedRequest(False)
        for start in range(0, len(more), step):
            with pool.lock:
                some = more[start : start + step]
                pool.index.extend(request.running, request.namespace, some, pool.clock())
            yield
        for start in range(0, len(others), step):
            with pool.lock:
                some = others[start : start + step]
                pool.index.absorb(request.running, request.namespace, some, pool.clock())
            yield
        hints = request.hints
        if (recording := pool.requests.recording) is not None:
            recording.end((id(self), number), ending, pool.clock())
        with pool.lock:
            if hints is not None and ending.status not in ("interrupted", "abort"):
                resume_in = hints.keep_for if hints.resume_in is None else hints.resume_in
                ending = ending._replace(resume_in=resume_in, release=hints.release)
            pool.requests.end(request.running, ending, more)
            if hints is None or hints.context is None or ending.status == "interrupted":
                return EndedRequest(request.running.is_incomplete)
            chain_keys = [*request.keys, *more]
            watches = chains.watches_of(request.running)
            pool.requests.contexts.note(request.namespace, hints, chain_keys, watches, pool.clock())
            return EndedRequest(request.running.is_incomplete, hints, chain_keys)

    def leave_requests(self) -> None:
        """Leave the running requests to `Requests.end_left`, which ends them later. The caller holds the lock."""
        self.pool.requests.left.extend([request.running for request in self._running.values()])
        self._running = {}

    def note_prefill(self, news: PrefillNews) -> None:
        """Count what loads have saved this engine, as it has computed from the cost of its prompts."""
        pool = self.pool
        with pool.lock:
            pool.counters.prefill.count(
                tokens=news.hit_tokens, seconds=news.hit_seconds, waited=news.waited, not_made=news.not_made
            )

    # -- completion -----------------------------------------------------------------------------------------

    def complete(self, rank: int, boot_id: str, completions: Sequence[Completion]) -> None:
        """Take completions of `rank`. Idempotent: late and repeated completions, and completions of a former boot, are
        counted and ignored. Raises `NotFoundError` for an unknown rank."""
        for _ in self.complete_in_steps(rank, boot_id, completions):
            pass

    def complete_in_steps(self, rank: int, boot_id: str, completions: Sequence[Completion]) -> Iterator[None]:
        """Do what `complete` does, in steps. Each step ends ops with `Pool.slice_slots` slots together, or one op."""
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
        """Return all results that have become final since the last call, in order, as one consistent snapshot of done
        and failed ops."""
        pool = self.pool
        with pool.lock:
            settled = list(self.ops.settled)
            self.ops.settled.clear()
            return settled

    @property
    def open_transfers(self) -> int:
        """How many ops some rank has not finished, including abandoned ones. O(1)."""
        return len(self.ops)

    @property
    def awaited_transfers(self) -> int:
        """How many of the `open_transfers` are not abandoned, so that the host waits for their end. O(1)."""
        return len(self.ops) - self.ops.num_abandoned

    # -- ranks ----------------------------------------------------------------------------------------------

    def report(self, report: RankReport) -> DesiredState:
        """Take a rank's report and return its desired state. A report that arrives after a newer one is counted and
        changes nothing.

        A new boot id means that the rank has lost its memory: its ops fail, leases break, and every block is removed,
        slice by slice, before anything is served again. The same applies to slots that a rank has unpinned although the
        desired state did not say so. That takes about 1 ms per 1,000 blocks, mostly without the lock: do not call it
        from an event loop. The lock is held for O(blocks in flight) where ops fail, and for 60 ns for each new slot.

        Raises `NotFoundError` or `InvalidRequestError` for a report of another pool.
        """
        for _ in self.report_in_steps(report):
            pass
        return self.desired()

    def report_in_steps(self, report: RankReport) -> Iterator[None]:
        """Do what `report` does, without a result, in steps. The ops of a rank that has restarted fail in several of
        them."""
        pool = self.pool
        failing: Iterator[None] = iter(())
        is_failing = False
        if report.engine_id != pool.target.desired.engine_id:
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
        """Return the desired state of every rank."""
        with self.pool.lock:
            return self.pool.target.desired

    def check_report(self, report: RankReport) -> None:
        """Raise `NotFoundError` or `InvalidRequestError` for a report that no rank of this session can have sent. The
        caller holds the lock."""
        self.ranks.check(report)

    def lose_slots(self, low: int) -> None:
        """Note that a rank can no longer reach its slots from `low` on. Here the contents of the slots are lost, too.
        The caller holds the lock."""
        self.pool.lose(low)

    def adapt_to_pool(self) -> None:
        """Take account of a change of the ranks, or of the number of usable slots. The caller holds the lock."""
        self.refresh_acceptance()

    # -- time and end ---------------------------------------------------------------------------------------

    def mark_stuck(self, now: float) -> bool:
        """Mark the oldest transfer that has become stuck. Returns False if there is none. The caller holds the lock."""
        found = self.ops.mark_stuck(now)
        self.refresh_acceptance()
        return found

    def held_slots(self) -> Iterator[tuple[int, ...]]:
        """Yield the slots of each lease and load. The caller holds the lock."""
        yield from (lease.slots for lease in self.leases)
        yield from (tuple(entry.kept) for entry in self.ops if entry.kept)

    def refusal(self, what: Literal["load", "store"], now: float) -> Refusal | None:
        """Return why the session may not load, or store, because of its pool or of its own state; None if it may. The
        caller holds the lock."""
        acceptance = self.pool.acceptance
        if self.closed or acceptance.drain_mode == "all" or (acceptance.drain_mode and what == "store"):
            return "draining"
        if not self.serving or self.pool.lost:
            return "not_ready"
        if acceptance.bypasses(what, now):
            return "bypassed"
        return "not_ready" if what == "store" and not self.pool.slots.limit else None

    def refresh_acceptance(self) -> None:
        """Update whether work is accepted, after a change of the ranks or of stuck ops. The caller holds the lock."""
        self.serving = self.ranks.can_copy() and not self.ops.num_stuck and not self.host_error

    def fail(self, reason: str) -> None:
        """Serve nothing until the host restarts, because it has lost track of its ops. Transfers under way end as
        usual. This counts as error `host`. The first reason is kept."""
        with self.pool.lock:
            self.pool.counters.faults.errors["host"] += 1
            self.host_error = self.host_error or reason
            self.refresh_acceptance()


def sessions_of(pool: Pool) -> list[Session]:
    """Return the sessions of a pool. The caller holds the lock."""
    return [session for session in pool.sessions if isinstance(session, Session)]
