"""Connects a pool with the store below it: decides which blocks are read and written, and what a request waits for."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from kvstow.control.attachedsession import AttachedSession
from kvstow.control.contexts import Context
from kvstow.control.duecontexts import DueContexts
from kvstow.control.indexjournal import fit
from kvstow.control.namespaces import Namespace
from kvstow.control.ops import TierOp
from kvstow.control.session import result_of
from kvstow.control.sharedpool import SharedPool
from kvstow.prefill import PrefillCost
from kvstow.results import Lease, Needed, Needs
from kvstow.tier.blockstore import (
    BlockStore,
    BlockTransfer,
    Piece,
    Purged,
    PurgeWish,
    StoredLayout,
)
from kvstow.tier.breakeven import PROBE_BLOCKS, BreakEven, Estimate
from kvstow.tier.tierstatus import TIER_FAILED, TierCounters, TierStatus

logger = logging.getLogger("kvstow.tier")

WRITING_SHARE = 0.05
"""The share of the pool's slots that writes may keep."""
STUCK_SHARE = 0.01
"""The share of the pool's slots that overdue transfers may keep. While they keep more, no block is read."""
ANSWER_SECONDS = 0.02
"""How long a request waits for a store that cannot say at once what it has."""
UNKNOWN_SECONDS = 2.0
"""How long a request waits for reads while it is unknown how long computing takes."""
LEAST_LEAD_SECONDS = 2.0
"""A prefetch begins this long before the next request of its context is expected, or earlier if reading may need
it: twice the time that the reads take."""
_COST_WEIGHT = 0.02
"""The weight of one decision in the average cost of reading."""
_MOST_NOTED = 1024
"""How many stores and uses with blocks that wait to be written are remembered."""


class LongerHit(NamedTuple):
    """A hit that is longer than the pool's own. `keys`: all keys that it needs or, if it is a leading run, its keys
    from the first one on that the pool lacks. `remote`: the keys among these that are to be read. `ops`: the reads
    under way that bring others of these. The hit saves computing `blocks` blocks of tokens, which follow `behind`
    others of the prompt."""

    keys: Sequence[bytes] = ()
    remote: Sequence[bytes] = ()
    ops: Sequence[int] = ()
    blocks: int = 0
    behind: int = 0


@dataclass(slots=True, eq=False)
class TieredNamespace:
    """A namespace of the pool, and how it uses the store. `fingerprint`: its name in the store; None if it does not
    use the store, and then `off_reason` says why. `model` and the namespace's name are for operators."""

    namespace: Namespace
    fingerprint: str | None
    off_reason: str
    model: str
    even: BreakEven
    counters: TierCounters = field(default_factory=TierCounters)
    due: DueContexts = field(default_factory=DueContexts)


@dataclass(slots=True, eq=False)
class TierWait:
    """The wait of a request that may get more blocks than the pool has. `first`: how many leading keys the pool had.
    `needs`: what a hit needs; None if it is a leading run of `keys`. `then` is called when the wait is over. `until`:
    the time at which the request continues with the blocks that have arrived. `ops`: the reads that it waits for.
    `leases`: the leases of its session on blocks that have arrived, which the caller releases."""

    of: TieredNamespace
    session: AttachedSession
    keys: Sequence[bytes]
    first: int
    needs: Needs | None
    then: Callable[[], object]
    began: float
    until: float
    ops: set[int] = field(default_factory=set)
    leases: list[Lease] = field(default_factory=list)
    is_over: bool = False


@dataclass(slots=True, eq=False)
class _Read:
    """A read under way. `worth`: how many seconds of computing each of its blocks saves. `waits`: the requests that
    wait for it. `is_cancelled`: whether it was given up, so that it says nothing about what the store loses."""

    of: TieredNamespace
    worth: float
    is_prefetch: bool
    is_cancelled: bool = False
    waits: list[TierWait] = field(default_factory=list)


class _Prefetch(NamedTuple):
    """The keys of a context that are still to be fetched. `whole`: whether the keys are of use only together."""

    of: TieredNamespace
    keys: list[bytes]
    whole: bool


class PoolTier:
    """Decides for each request whether to read from the store, takes the slots, makes the blocks that arrive visible,
    and lets the store write every block.

    Every call may come from any thread, and none waits, except for the pool's lock, which is held for O(blocks given).
    Attributes are used with that lock held. The store calls back on threads of its own; requests are answered through
    `post`. An unexpected error turns the store off for the pool, and nothing else.

    - Each block is offered to the store when it is stored, root first, and again at each use. So a block that could not
      be written is written at its next use. Writes keep at most 5 % of the pool's slots.
    - Blocks that were read are a class of their own in the pool's order of eviction, as `Pool.publish` says.
    - A block that arrives is leased to the requests that wait for it, in the moment in which it becomes visible.
    - A request waits no longer than computing would take, and then continues with the blocks that have arrived.
    """

    def __init__(
        self,
        pool: SharedPool,
        namespace: Namespace,
        store: BlockStore,
        layout: StoredLayout,
        *,
        block_tokens: int | None = None,
        needs_of: Callable[[Sequence[bytes]], Needs | None] | None = None,
        post: Callable[[Callable[[], object]], object] = lambda call: call(),
        on_taken: Callable[[], object] = lambda: None,
    ) -> None:
        """`namespace`: any namespace of the pool. `block_tokens`: by how many tokens each block lengthens a hit, if the
        pool's configuration does not say. `needs_of`: returns what a hit needs, given the keys of a prompt; None if a
        hit is a leading run. `post`: makes a call later, on the thread that answers requests. `on_taken`: called when a
        read has taken slots. Raises `ConflictError` if the pool was closed."""
        self.session = pool.attach_tier(namespace)
        self._pool, self._store = pool, store
        self._post, self._on_taken = post, on_taken
        self._block_tokens = pool.config.block_tokens or block_tokens
        self._needs_of = needs_of
        self._namespaces: dict[Namespace, TieredNamespace] = {}
        self._retired: dict[str, TierCounters] = {}
        """The counters of the former namespaces of each model, added up."""
        self._waits: dict[TierWait, None] = {}
        self._reads: dict[int, _Read] = {}
        self._filling: dict[int, int] = {}
        """The number of the read that fills each slot."""
        self._writes: dict[int, TieredNamespace] = {}
        self._num_writing = 0
        self._noted: deque[tuple[TieredNamespace, Sequence[bytes]]] = deque()
        """Blocks that engines have stored or used, and that were not written yet. The queue is bounded, so a block that
        does not fit waits for its next use."""
        self._prefetching: _Prefetch | None = None
        self._num_purges = 0
        """How many purges are under way. Meanwhile no block is read or written."""
        self.is_closed = False
        self.failure = ""
        self.stored_pool = store.join(layout, self.take_pieces)
        pool.tier = self

    # -- engines --------------------------------------------------------------------------------------------

    def enter(
        self, session: AttachedSession, model: str, fingerprint: str | None, off_reason: str = ""
    ) -> TieredNamespace:
        """Use the store for the namespace of this session, which its engine has just joined. `fingerprint`: names its
        blocks in the store; None if the namespace does not use the store, and then `off_reason` says why."""
        namespace = session.namespace
        with self._pool.lock:
            for other in [one for one in self._namespaces if one.is_dropped]:
                self._retire(self._namespaces.pop(other))
            of = self._namespaces.get(namespace)
            if of is None:
                even = BreakEven(self._block_tokens, self._pool.clock)
                of = self._namespaces[namespace] = TieredNamespace(namespace, fingerprint, off_reason, model, even)
            session.on_stored = partial(self._note_stored, of) if of.fingerprint is not None else None
        return of

    def _retire(self, of: TieredNamespace) -> None:
        self._retired[of.model] = self._retired.get(of.model, TierCounters()) + of.counters

    def is_on(self, of: TieredNamespace) -> bool:
        """Whether the store is used for this namespace. Needs no lock, but the answer may change at any moment."""
        return of.fingerprint is not None and not self.is_closed and not self.failure and not self._num_purges

    def note_prefill(self, of: TieredNamespace, cost: PrefillCost) -> None:
        """Note what it costs an engine of this namespace to compute prompts."""
        of.even.prefill = cost

    def look_for(
        self,
        of: TieredNamespace,
        session: AttachedSession,
        keys: Sequence[bytes],
        then: Callable[[], object],
        *,
        first: int = 0,
        needs: Needs | None = None,
    ) -> Generator[None, None, TierWait | None]:
        """Look for keys of a request of this session that the pool lacks. `keys` must not change afterwards. `first`:
        how many leading keys are in the pool, as the caller has just found out. `needs`: what a hit is, if it is no
        leading run; then `first` is 0.

        Returns None if there is nothing to wait for. Otherwise, `then` is called once through `post`. The request then
        looks its keys up again, computes what is not there, and releases `TierWait.leases`.

        Each step is for a slice of the keys, so that others have their turns between the steps."""
        if of.fingerprint is None or not self.is_on(of):
            return None
        of.counters.requests += 1
        asked = keys[first:] if first else keys
        has: Sequence[bool] | None = None
        try:
            if self._store.answers_at_once:
                has = yield from self._ask(of, of.fingerprint, asked, is_run=needs is None)
        except Exception as error:  # noqa: BLE001 - the request continues with what the pool has
            self.fail(error)
        if not self.is_on(of):
            return None
        now = self._pool.clock()
        wait = TierWait(of, session, keys, first, needs, then, now, now + ANSWER_SECONDS)
        if not of.even.may_pay:
            wait.is_over = True  # the request does not wait; the answer shows whether reads pay again
        with self._pool.lock:
            self._waits[wait] = None
        try:
            if has is None:
                has = self.stored_pool.has(of.fingerprint, asked, partial(self._take_answer, wait))
            if has is None:
                if wait.is_over:
                    of.counters.declined_requests += 1
            else:
                wait.is_over = False
                if self._decide(wait, has):
                    return wait
        except Exception as error:  # noqa: BLE001 - the request continues with what the pool has
            self.fail(error)
            has = ()
        if has is None and not wait.is_over:
            return wait
        with self._pool.lock:
            self._waits.pop(wait, None)
            wait.is_over = True
        return None

    def _ask(
        self, of: TieredNamespace, fingerprint: str, keys: Sequence[bytes], *, is_run: bool
    ) -> Generator[None, None, Sequence[bool]]:
        """Return which of these keys the store has, and ask it for a slice at a time. `is_run`: whether the hit is a
        leading run, so that keys after the first one that neither the store nor the pool has do not matter."""
        pool, found = self._pool, list[bool]()
        for at in range(0, len(keys), pool.slice_slots):
            if at:
                yield
            some = keys[at : at + pool.slice_slots]
            has = self.stored_pool.has(fingerprint, some, lambda answer: None)
            assert has is not None
            found += has
            if is_run and not all(has):
                with pool.lock:
                    slots = of.namespace.keys.slots_of(some)
                    lacking = [key for key, slot, one in zip(some, slots, has, strict=True) if slot is None and not one]
                    if not all(self._filled_by(of.namespace, key)[1] for key in lacking):
                        break
        return found + [False] * (len(keys) - len(found))

    def _take_answer(self, wait: TierWait, has: Sequence[bool]) -> None:
        """Take the later answer of the store, which says which of the request's keys it has."""
        try:
            if self.is_on(wait.of) and self._decide(wait, has):
                return
        except Exception as error:  # noqa: BLE001 - the store's thread goes on
            self.fail(error)
        self._finish([wait])

    def _decide(self, wait: TierWait, has: Sequence[bool]) -> bool:
        """Decide what to read for a request, now that it is known which of its keys the store has. Returns whether the
        request waits."""
        of = wait.of
        hit = self._leading(wait, has) if wait.needs is None else self._needed(wait, wait.needs, has)
        of.counters.found_blocks += len(hit.remote)
        if not hit.remote and not hit.ops:
            return False
        compute = of.even.compute_seconds(hit.blocks, hit.behind)
        if hit.remote:
            count = len(hit.remote)
            estimate = of.even.decide(self.stored_pool.expect(count), count, hit.blocks, hit.behind)
            self._note_cost(estimate)
            if not estimate.pays:
                of.counters.declined_requests += not wait.is_over
                if of.even.wants_probe():
                    self._begin_read(of, hit.remote[:PROBE_BLOCKS], 0.0)
                return False
        with self._pool.lock:
            if wait.is_over:
                return False
            wait.until = wait.began + (UNKNOWN_SECONDS if compute is None else compute)
            for op_id in hit.ops:
                self._join(wait, op_id)
        if hit.remote:
            worth = (compute or 0.0) / len(hit.remote)
            self._begin_read(of, hit.keys, worth, whole=wait.needs is not None, wait=wait)
        with self._pool.lock:
            return bool(wait.ops)

    def _note_cost(self, estimate: Estimate) -> None:
        """What the store has is worth less in the pool, the cheaper it is to read."""
        if estimate.read_seconds is None or not estimate.compute_seconds:
            return
        share = estimate.read_seconds / estimate.compute_seconds if estimate.pays else 1.0
        with self._pool.lock:
            hazards = self._pool.index.chains.hazards
            if not self.is_closed and not self.failure:
                hazards.fetch_cost += _COST_WEIGHT * (share - hazards.fetch_cost)

    def _join(self, wait: TierWait, op_id: int) -> None:
        read = self._reads.get(op_id)
        if read is not None:
            read.waits.append(wait)
            wait.ops.add(op_id)

    def _finish(self, waits: Iterable[TierWait]) -> None:
        """End the waits of these requests that have not ended before."""
        over: list[TierWait] = []
        now = self._pool.clock()
        with self._pool.lock:
            for wait in waits:
                self._waits.pop(wait, None)
                if not wait.is_over:
                    wait.is_over = True
                    wait.of.counters.wait_seconds += now - wait.began
                    over.append(wait)
        for wait in over:
            self._post(wait.then)

    # -- what the pool, reads under way and the store have together -----------------------------------------

    def _leading(self, wait: TierWait, has: Sequence[bool]) -> LongerHit:
        """Return the leading run of keys from `wait.first` on that the pool, reads under way and the store have
        together. It ends before a block that an engine is storing just now. Holds the lock for a slice of the keys at a
        time."""
        pool, keys, at = self._pool, wait.keys, wait.first
        remote: list[bytes] = []
        ops: dict[int, None] = {}
        lead = end = len(keys)
        while at < len(keys) and end == len(keys):
            some = keys[at : at + pool.slice_slots]
            with pool.lock:
                for number, slot in enumerate(wait.of.namespace.keys.slots_of(some), at):
                    if slot is not None:
                        continue
                    op_id, is_pending = self._filled_by(wait.of.namespace, keys[number])
                    if op_id is not None:
                        ops[op_id] = None
                    elif not is_pending and has[number - wait.first]:
                        remote.append(keys[number])
                    else:
                        end = number
                        break
                    lead = min(lead, number)
            at += len(some)
        return LongerHit(keys[lead:end], remote, list(ops), max(0, end - lead), lead)

    def _needed(self, wait: TierWait, needs: Needs, has: Sequence[bool]) -> LongerHit:
        """Return the longest hit of several groups that the pool, reads under way and the store give together, if it is
        longer than that of the pool alone. O(keys), or O(keys log keys) if the pool is short of slots."""
        namespace = wait.of.namespace
        stored = dict(zip(wait.keys, has, strict=True))
        pool_hit = needs(partial(self._visible, namespace))
        if pool_hit.blocks == needs.most:
            return LongerHit()
        longest = self._longest(namespace, needs, partial(self._has_any, namespace, stored), pool_hit.blocks)
        saved = longest.blocks - pool_hit.blocks
        if saved <= 0:
            return LongerHit()
        ops: dict[int, None] = {}
        remote: list[bytes] = []
        with self._pool.lock:
            for key, slot in zip(longest.keys, namespace.keys.slots_of(longest.keys), strict=True):
                op_id, is_pending = self._filled_by(namespace, key)
                if op_id is not None:
                    ops[op_id] = None
                elif slot is None and not is_pending:
                    remote.append(key)
        return LongerHit(longest.keys, remote, list(ops), saved, pool_hit.blocks)

    def _longest(
        self, namespace: Namespace, needs: Needs, has: Callable[[Sequence[bytes]], Sequence[bool]], least: int
    ) -> Needed:
        """Return the longest hit with the keys of `has` that the pool has room for. If none is longer than `least`
        blocks, return any hit that is not longer. It bisects, so it may miss a longer hit that needs fewer slots, as
        with chunked attention.
        """
        longest = needs(has)
        if longest.blocks <= least or self._has_room(namespace, longest.keys):
            return longest
        longest, most = Needed((), 0), longest.blocks - 1
        while least < most:
            middle = (least + most + 1) // 2
            hit = needs(has, middle)
            if self._has_room(namespace, hit.keys):
                longest, least = hit, middle
            else:
                most = hit.blocks - 1
        return longest

    def _visible(self, namespace: Namespace, keys: Sequence[bytes]) -> list[bool]:
        with self._pool.lock:
            return [slot is not None for slot in namespace.keys.slots_of(keys)]

    def _has_any(self, namespace: Namespace, stored: dict[bytes, bool], keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether the pool, a read under way or the store has it. What the store has does not count
        while an engine stores the same key, because a read cannot fill that slot."""
        found: list[bool] = []
        with self._pool.lock:
            for key, slot in zip(keys, namespace.keys.slots_of(keys), strict=True):
                op_id, is_pending = self._filled_by(namespace, key)
                found.append(slot is not None or op_id is not None or (not is_pending and stored.get(key, False)))
        return found

    def _filled_by(self, namespace: Namespace, key: bytes) -> tuple[int | None, bool]:
        """Return the id of the read that brings this key, or None, and whether the key is being stored or read. The
        caller holds the lock."""
        slot = namespace.pending_stores.slot_of(key)
        return (None, False) if slot is None else (self._filling.get(slot), True)

    def _has_room(self, namespace: Namespace, keys: Sequence[bytes]) -> bool:
        """Whether the pool has slots to read all of the keys that are neither visible nor being filled, without
        evicting the visible ones."""
        with self._pool.lock:
            selection = namespace.select(keys, {})
            kept = len(self._pool.index.evictable(selection.present))
            return len(selection.fresh) <= self.session.room(kept=kept)

    # -- reads ----------------------------------------------------------------------------------------------

    def _begin_read(
        self,
        of: TieredNamespace,
        keys: Sequence[bytes],
        worth: float,
        *,
        whole: bool = False,
        wait: TierWait | None = None,
        is_prefetch: bool = False,
    ) -> bool:
        """Read the keys that are neither visible nor being filled, from the first one on, as far as there are slots.
        `whole`: read all of them or none. Evicts blocks as needed, but none of these keys. `worth`: see `_Read`.
        `wait`: the request that waits for the read. Returns whether a read has begun.

        Reads nothing in a namespace that is dropped or forgotten, because no request would find the blocks, and nothing
        if the pool's journal could not publish the keys."""
        pool, session, namespace = self._pool, self.session, of.namespace
        with pool.lock:
            now = pool.clock()
            if of.fingerprint is None or not self.is_on(of) or namespace.is_dropped or session.refusal("store", now):
                return False
            if session.ops.stuck_tier_slots > STUCK_SHARE * pool.slots.limit:
                return False
            if pool.journal is not None and not fit(keys):
                return False
            fresh, hashes, present = namespace.select(keys, {})
            slots = pool.make_room(len(fresh), present, now, session.watermark)
            if (whole and len(slots) < len(fresh)) or not slots:
                pool.deallocate(slots)
                return False
            wanted = [keys[index] for index in fresh[: len(slots)]]
            namespace.pending_stores.start(wanted, slots, hashes[: len(slots)], apart=True)
            if pool.journal is not None:
                pool.journal.begin(slots, session.session_id)
            op = session.ops.start_tier("read", namespace, slots, now)
            self._reads[op.op_id] = _Read(of, worth, is_prefetch)
            self._filling.update(dict.fromkeys(slots, op.op_id))
            if wait is not None and not wait.is_over:
                self._join(wait, op.op_id)
                self._lease(wait, [slot for run in present for slot in run], now)
        self.stored_pool.read(BlockTransfer(op.op_id, of.fingerprint, wanted, op.slots))
        self._on_taken()
        return True

    def take_pieces(self, pieces: Sequence[Piece]) -> None:
        """Take slots that have come back from the store; see `BlockStore.join`."""
        try:
            for piece in pieces:
                self._finish(self._take_piece(piece))
            self.write_stored()
            self._go_on_prefetching()
        except Exception as error:  # noqa: BLE001 - the store's thread goes on
            self.fail(error)
        self._pool.write_log()

    def _take_piece(self, piece: Piece) -> list[TierWait]:
        """Take one piece. Returns the requests for which no read is under way any more."""
        with self._pool.lock:
            read = self._reads.get(piece.op_id)
            if read is None:
                self._take_written(piece)
                return []
            part = self.session.ops.end_part(piece.op_id, piece.good, piece.bad)
            if part is None:
                return []
            for slot in (*piece.good, *piece.bad):
                self._filling.pop(slot, None)
            counters = read.of.counters
            counters.read_blocks += len(piece.good)
            counters.failed_read_blocks += len(piece.bad)
            counters.saved_seconds += read.worth * len(piece.good)
            if not read.is_cancelled:
                read.of.even.note_read(len(piece.good), len(piece.bad))
            now = self._pool.clock()
            for wait in read.waits:
                self._lease(wait, list(part.visible), now)
            if not part.has_ended:
                return []
            del self._reads[piece.op_id]
            for wait in read.waits:
                wait.ops.discard(piece.op_id)
            return [wait for wait in read.waits if not wait.ops]

    def _lease(self, wait: TierWait, slots: list[int], now: float) -> None:
        """Lease blocks that are visible to a request that waits, because it needs them together with blocks that are
        still to come."""
        if slots and not wait.is_over:
            lease = wait.session.lease_slots(slots, now)
            wait.leases += [] if lease is None else [lease]

    # -- writes ---------------------------------------------------------------------------------------------

    def _note_stored(self, of: TieredNamespace, keys: Sequence[bytes]) -> None:
        """Note that an engine has stored these blocks. The caller holds the lock."""
        if keys and self.is_on(of):
            self._postpone(of, keys)

    def write_stored(self) -> None:
        """Offer the blocks that engines have stored to the store, while writes keep fewer slots than they may. Call it
        after completions."""
        while self._noted and self._num_writing < self._most_writing:
            try:
                of, keys = self._noted.popleft()
            except IndexError:  # another thread was faster
                return
            result_of(self._offer(of, keys, is_use=False))

    def _postpone(self, of: TieredNamespace, keys: Sequence[bytes]) -> None:
        """Write these blocks later. The caller holds the lock."""
        if len(self._noted) < _MOST_NOTED:
            self._noted.append((of, keys))
        else:
            of.counters.postponed_blocks += len(keys)

    @property
    def _most_writing(self) -> int:
        return max(1, int(WRITING_SHARE * self._pool.slots.limit))

    def note_use(self, of: TieredNamespace, keys: Sequence[bytes]) -> Generator[None, None, None]:
        """Note that a request that is being admitted uses these blocks, which are its whole chain from the root on.
        Each step is for a slice of the keys."""
        yield from self._offer(of, keys, is_use=True)

    def note_context(self, of: TieredNamespace, context: bytes) -> None:
        """Note that a request of this context has ended, or is expected at another time. The pool's contexts have the
        time already."""
        if of.fingerprint is not None and self.is_on(of):
            self._schedule(of, context)

    def _offer(self, of: TieredNamespace, keys: Sequence[bytes], *, is_use: bool) -> Generator[None, None, None]:
        """Offer these blocks to the store, and write the blocks that it wants and that are in the pool, as far as they
        may be written now. The end of a long chain is offered first, so that the root counts as used last. The root is
        written first."""
        fingerprint, size = of.fingerprint, self._pool.slice_slots
        if fingerprint is None or not self.is_on(of):
            return
        wanted = list[list[bytes]]()
        try:
            for start in range((len(keys) - 1) // size * size, -1, -size):
                some = keys[start : start + size]
                wanted.append([some[index] for index in self.stored_pool.offer(fingerprint, some, is_use=is_use)])
                if start:
                    yield
            for some in reversed(wanted):
                if some:
                    self._write(of, fingerprint, some)
        except Exception as error:  # noqa: BLE001 - the thread that serves engines goes on
            self.fail(error)

    def _write(self, of: TieredNamespace, fingerprint: str, keys: Sequence[bytes]) -> None:
        pool, session = self._pool, self.session
        with pool.lock:
            if not self.is_on(of) or session.refusal("load", pool.clock()):
                return
            slots = of.namespace.keys.slots_of(keys, session.watermark)
            found = [(key, slot) for key, slot in zip(keys, slots, strict=True) if slot is not None]
            room = max(0, self._most_writing - self._num_writing)
            if rest := found[room:]:
                self._postpone(of, [key for key, _ in rest])
                del found[room:]
            if not found:
                return
            pool.index.hold([slot for _, slot in found])
            op: TierOp = session.ops.start_tier("write", of.namespace, [slot for _, slot in found], pool.clock())
            self._writes[op.op_id] = of
            self._num_writing += len(found)
        self.stored_pool.write(BlockTransfer(op.op_id, fingerprint, [key for key, _ in found], op.slots))

    def _take_written(self, piece: Piece) -> None:
        part = self.session.ops.end_part(piece.op_id, piece.good, piece.bad)
        of = self._writes.get(piece.op_id)
        if part is None or of is None:
            return
        self._num_writing -= len(piece.good) + len(piece.bad)
        of.counters.written_blocks += len(piece.good)
        self._pool.index.chains.below.add(piece.good)
        of.counters.failed_write_blocks += len(piece.bad)
        if part.has_ended:
            del self._writes[piece.op_id]

    # -- contexts -------------------------------------------------------------------------------------------

    def prefetch(self, context: bytes) -> int | None:
        """Begin to read the blocks of the context that only the store has. Returns how many blocks its last request had
        used, or None if no such request is known or the store is not used."""
        with self._pool.lock:
            lasts = [(of, self._last(of, context)) for of in self._namespaces.values() if self.is_on(of)]
            found = [(of, len(last.chain)) for of, last in lasts if last is not None]
            for of, _ in found:
                of.due.add_now(context)
        self._go_on_prefetching()
        return sum(count for _, count in found) if found else None

    def expect_context(self, context: bytes) -> None:
        """Note that an operator has changed when the next request of this context is expected. The owner of `post`
        schedules the prefetch, because it waits no longer than until `next_deadline`, which may be earlier then."""
        self._post(partial(self._expect, context))

    def _expect(self, context: bytes) -> None:
        with self._pool.lock:
            namespaces = [of for of in self._namespaces.values() if self.is_on(of)]
        for of in namespaces:
            self.note_context(of, context)
        self._go_on_prefetching()

    def _last(self, of: TieredNamespace, context: bytes) -> Context | None:
        """Return the context with this id in the namespace, or None. If there are several, return the one whose request
        ended last. The caller holds the lock."""
        known = [one for one in self._pool.requests.contexts.find(context) if one.namespace is of.namespace]
        return max(known, key=lambda one: one.ended_at, default=None)

    def _schedule(self, of: TieredNamespace, context: bytes) -> None:
        """Prefetch the blocks of the context when its next request is near, or now if it is near already. Prefetched
        blocks evict blocks of others, so nothing is prefetched for a context with only one request so far."""
        pool = self._pool
        with pool.lock:
            of.due.forget(context)
            found = self._last(of, context)
            if found is None or found.requests < 2 or found.expected is None:
                return
            now = pool.clock()
            num_blocks, seconds = len(found.chain), found.expected - now
        if not 0 <= seconds < float("inf"):
            return
        expected = self.stored_pool.expect(num_blocks).seconds
        lead = max(LEAST_LEAD_SECONDS, 2 * expected if expected else 0.0)
        with pool.lock:
            if seconds <= lead:
                of.due.add_now(context)
            else:
                of.due.add_later(context, now + seconds - lead)

    def _go_on_prefetching(self) -> None:
        """Begin the next transfer of a prefetch. Only one is under way at a time, and none while the store works for a
        request."""
        pool = self._pool
        with pool.lock:
            under_way = self._prefetching
            if under_way is None and not any(of.due for of in self._namespaces.values()):
                return
            if self._waits or self._reads or self.is_closed or self.stored_pool.expect(1).queued_bytes:
                return
            if under_way is None:
                of = next(of for of in self._namespaces.values() if of.due)
                last = self._last(of, of.due.take_now())
            else:
                of, keys, whole = under_way
                count = len(keys) if whole else max(1, int(STUCK_SHARE * pool.slots.limit))
                some, rest = keys[:count], keys[count:]
                self._prefetching = _Prefetch(of, rest, whole) if rest else None
                has_room = some and len(some) <= self.session.room()
        if under_way is None:
            self._begin_prefetch(of, () if last is None else last.chain)
        elif has_room and self._begin_read(of, some, 0.0, whole=whole, is_prefetch=True):
            of.counters.prefetched_blocks += len(some)
        else:
            self._prefetching = None

    def _begin_prefetch(self, of: TieredNamespace, keys: Sequence[bytes]) -> None:
        needs = None if self._needs_of is None else self._needs_of(keys)
        if of.fingerprint is None or not keys or (needs is None and self._needs_of is not None):
            return
        keys = keys if needs is not None else keys[: self._pool.slots.limit // 2]
        wait = TierWait(of, self.session, keys, 0, needs, lambda: None, 0.0, 0.0, is_over=True)

        def begin(has: Sequence[bool]) -> None:
            hit = self._leading(wait, has) if needs is None else self._needed(wait, needs, has)
            with self._pool.lock:
                self._prefetching = _Prefetch(of, list(hit.remote), needs is not None) if hit.remote else None
            self._go_on_prefetching()

        has = self.stored_pool.has(of.fingerprint, keys, begin)
        if has is not None:
            begin(has)

    # -- time -----------------------------------------------------------------------------------------------

    @property
    def next_deadline(self) -> float | None:
        """When to call `expire`, on the pool's clock; None if there is no need. O(requests that wait)."""
        with self._pool.lock:
            waits = [wait.until for wait in self._waits]
            due = [at for of in self._namespaces.values() if (at := of.due.next_at) is not None]
        return min([*waits, *due], default=None)

    def expire(self) -> None:
        """Answer the requests that have waited as long as computing would take, cancel reads for which no request waits
        any more, and prefetch for contexts whose time has come."""
        now = self._pool.clock()
        with self._pool.lock:
            late = [wait for wait in self._waits if now >= wait.until]
            for wait in late:
                wait.of.counters.cut_waits += not wait.is_over
        self._finish(late)
        with self._pool.lock:
            op_ids = {op_id for wait in late for op_id in wait.ops}
            unwanted = [op_id for op_id in op_ids if op_id in self._reads and self._is_unwanted(self._reads[op_id])]
            for op_id in unwanted:
                self._reads[op_id].is_cancelled = True
            due = [(of, context) for of in self._namespaces.values() for context in of.due.take_due(now)]
        for op_id in unwanted:
            self.stored_pool.cancel(op_id)
        for of, context in due:
            self._schedule(of, context)
        self._go_on_prefetching()

    def _is_unwanted(self, read: _Read) -> bool:
        return not read.is_prefetch and all(wait.is_over for wait in read.waits)

    # -- operators ------------------------------------------------------------------------------------------

    def purge(self, wish: PurgeWish, then: Callable[[Purged], object], *, dry_run: bool = False) -> None:
        """Remove blocks from the store; see `StoredPool.purge`. If the pool's own blocks are purged, too, call it
        between `begin_purge` and `end_purge`."""
        self.stored_pool.purge(wish, then, dry_run=dry_run)

    def begin_purge(self) -> None:
        """Read and write nothing until `end_purge`. Otherwise a block could move from the pool to the store, or back,
        after its destination has been purged."""
        with self._pool.lock:
            self._num_purges += 1
            self._noted.clear()

    def end_purge(self) -> None:
        with self._pool.lock:
            self._num_purges -= 1

    def totals(self) -> dict[str, TierCounters]:
        """Return the counters of each model, which only grow."""
        with self._pool.lock:
            totals = dict(self._retired)
            for of in self._namespaces.values():
                totals[of.model] = totals.get(of.model, TierCounters()) + of.counters
        return totals

    def statuses(self) -> list[TierStatus]:
        """Return a status for each namespace that engines use or have used."""
        parts = self._store.parts()
        is_down = all(part.state != "on" for part in parts)
        reasons = "; ".join(dict.fromkeys(part.reason for part in parts if part.reason)) if is_down else ""
        with self._pool.lock:
            return [self._status(of, reasons, is_down=is_down) for of in self._namespaces.values()]

    def _status(self, of: TieredNamespace, reasons: str, *, is_down: bool) -> TierStatus:
        last, prefill = of.even.last, of.even.prefill
        is_off = of.fingerprint is None or bool(self.failure) or self.is_closed
        return TierStatus(
            store=self._store.name,
            pool=self._pool.name,
            namespace=of.namespace.name,
            model=of.model,
            fingerprint=None if is_off else of.fingerprint,
            state="off" if is_off else "down" if is_down else "on",
            reason=(self.failure or of.off_reason) if is_off else reasons,
            read_seconds=None if last is None else last.read_seconds,
            prefill_tokens_per_second=None if prefill is None else prefill.tokens_per_second,
            decision="no request has asked for a read yet" if last is None else last.reason,
            writing_blocks=sum(self.session.ops.num_left(op_id) for op_id, one in self._writes.items() if one is of),
            reading_blocks=sum(self.session.ops.num_left(op_id) for op_id, one in self._reads.items() if one.of is of),
            stuck_slots=self.session.ops.stuck_tier_slots,
            counters=replace(of.counters),
        )

    # -- ends -----------------------------------------------------------------------------------------------

    def fail(self, error: Exception) -> None:
        """Log a defect, and use the store no more for this pool. Its status gives the reason."""
        logger.error("the store below pool %s is off: unexpected error", self._pool.name, exc_info=error)
        with self._pool.lock:
            self.failure = TIER_FAILED
            self._pool.index.chains.hazards.fetch_cost = 1.0
            self._pool.counters.faults.errors["host"] += 1
            self._noted.clear()
            self._prefetching = None
            waits = list(self._waits)
        self._finish(waits)

    def close(self, then: Callable[[], object]) -> None:
        """Begin no further transfer, and answer the requests that wait. `then` is called when no process of the store
        touches the pool's memory any more and every slot has come back. Idempotent; only the first `then` is called."""
        with self._pool.lock:
            self.is_closed = True
            self._pool.index.chains.hazards.fetch_cost = 1.0
            self._noted.clear()
            self._prefetching = None
            for session in self._pool.attached():
                session.on_stored = None
            waits = list(self._waits)
        self._finish(waits)
        self.stored_pool.leave(then)
