"""Operations on the pool of a running engine. Operations that visit many slots are sweeps, which work in slices."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from math import inf
from threading import Lock
from typing import Literal

from kvstow.config import parse_policy
from kvstow.control.contexts import Context
from kvstow.control.namespaces import Namespace
from kvstow.control.pool import Pool, PoolAcceptance
from kvstow.control.session import sessions_of
from kvstow.endings import RELEASED
from kvstow.errors import ConflictError, InvalidRequestError, NotFoundError
from kvstow.keys import format_key
from kvstow.status import BypassStatus, DrainMode, DrainStatus, LookupResult
from kvstow.tier.blockstore import Purged, PurgeWish

logger = logging.getLogger("kvstow.admin")

_LEFT_OF_CONTEXT = (
    "the service only knows which blocks the last request of the context has used; blocks of its earlier requests may "
    "be left in the store below the pool, and a purge by age or of everything removes them"
)


class Sweep:
    """Bulk work that releases the engine's lock between slices, so that no scheduler waits for all of it.

    One thread at a time uses it, and steps it to the end or cancels it, even after an error. `total` counts the slots
    or keys to visit, and `done` how many of them were visited. `evicted_slots` and `evicted_bytes` (bytes of one rank)
    count the blocks that were removed or, in a dry run, would be. `stored_blocks` counts the blocks that were removed
    from the store below the pool. For `notice`, see `Purged`. While `waiting` is true, the next slice can do nothing
    until transfers or leases end; try again later.
    """

    def __init__(
        self,
        kind: str,
        total: int,
        slot_bytes: int,
        work: Callable[[Sweep], Iterator[None]],
        undo: Callable[[], None] = lambda: None,
    ) -> None:
        """`work` does one slice up to each yield, where it holds no lock. The garbage collector may close an abandoned
        generator on a thread that holds the lock, so `work` must have no `finally` that takes it; instead, `undo` is
        called if the sweep is cancelled or fails."""
        self.kind = kind
        self.total = total
        self.done = 0
        self.evicted_slots = self.stored_blocks = 0
        self.notice = ""
        self.waiting = False
        self.finished = False
        self.cancelled = False
        self._slot_bytes = slot_bytes
        self._slices = work(self)
        self._undo = undo

    @property
    def evicted_bytes(self) -> int:
        return self.evicted_slots * self._slot_bytes

    def extend(self, work: Callable[[Iterator[None]], Iterator[None]], undo: Callable[[], None]) -> Sweep:
        """Add work to this sweep, and return the sweep. `work` gets the slices that the sweep had before and yields
        them among its own. `undo` is called, before the earlier one, if the sweep is cancelled or fails."""
        self._slices = work(self._slices)
        before = self._undo

        def undo_both() -> None:
            undo()
            before()

        self._undo = undo_both
        return self

    def step(self) -> bool:
        """Do one slice. Returns True while more is left to do."""
        if not self.finished:
            try:
                next(self._slices)
            except StopIteration:
                self.finished = True
            except BaseException:
                self.finished = True
                self._undo()
                raise
        return not self.finished

    def run(self) -> Sweep:
        """Step until the sweep is finished or has to wait. Returns the sweep."""
        while self.step() and not self.waiting:
            pass
        return self

    def cancel(self) -> None:
        """Do no further slice. Removed blocks stay removed, but a resize restores the capacity."""
        if not self.finished:
            self.cancelled = self.finished = True
            self._undo()


def purge_store(pool: Pool, sweep: Sweep, wish: PurgeWish, *, dry_run: bool, notice: str = "") -> Sweep:
    """Let the sweep purge the store below the pool, too, if the pool has one. Until both are purged, no block moves
    from one to the other. `notice`: a sentence that says what this purge cannot find in the store."""
    tier = pool.tier
    if tier is None:
        return sweep
    is_closed = ExitStack()

    def work(slices: Iterator[None]) -> Iterator[None]:
        tier.begin_purge()
        is_closed.callback(tier.end_purge)
        yield from slices
        done: list[Purged] = []
        tier.purge(wish, done.append, dry_run=dry_run)
        is_closed.close()  # from now on the store finds no purged block
        while not done:
            sweep.waiting = True
            yield
        sweep.waiting = False
        sweep.stored_blocks, store_notice = done[0]
        sweep.notice = "; ".join(filter(None, (store_notice, notice)))

    return sweep.extend(work, is_closed.close)


Wanted = Callable[[int, int], list[int]]
"""Returns the visible slots to remove, among the slots from the first number to below the second. The caller holds the
lock."""


def evict_next(pool: Pool, kind: str, reason: str, count: int, dry_run: bool) -> Sweep:
    """Remove the next `count` evictable blocks in the policy's order."""

    def work(sweep: Sweep) -> Iterator[None]:
        while sweep.done < count:
            with pool.lock:
                if dry_run:
                    found = slice_size = min(count, pool.index.num_cached)
                else:
                    slice_size = min(pool.slice_slots, count - sweep.done)
                    removal = pool.index.evict(slice_size)
                    pool.note_removal(removal, reason)
                    found = len(removal.keys)
            sweep.evicted_slots += found
            sweep.done += found
            if dry_run or found < slice_size:
                sweep.total = sweep.done
                return
            yield

    return Sweep(kind, count, pool.config.slot_bytes, work)


def scan(pool: Pool, kind: str, reason: str, dry_run: bool, wanted: Wanted) -> Sweep:
    """Visit all slots in ascending order, and remove the blocks in the slots that `wanted` selects."""
    total = pool.index.slot_keys.num_slots
    return Sweep(kind, total, pool.config.slot_bytes, lambda sweep: _scan(sweep, pool, reason, dry_run, wanted))


def _scan(sweep: Sweep, pool: Pool, reason: str, dry_run: bool, wanted: Wanted) -> Iterator[None]:
    while sweep.done < sweep.total:
        end = min(sweep.done + pool.slice_slots, sweep.total)
        with pool.lock:
            found = wanted(sweep.done, end)
            sweep.evicted_slots += len(found) if dry_run else pool.remove_blocks(found, reason)
        sweep.done = end
        yield


def purge_matching(pool: Pool, matches: Callable[[bytes], bool], dry_run: bool) -> Sweep:
    """Remove the visible blocks whose keys match, including held ones. Matching blocks that are being stored do not
    become visible."""
    index = pool.index

    def wanted(low: int, high: int) -> list[int]:
        return [slot for slot, key in index.slot_keys.between(low, high) if matches(key)]

    def work(sweep: Sweep) -> Iterator[None]:
        if not dry_run:
            with pool.lock:
                batches = [keys for namespace in index.namespaces for keys in namespace.pending_stores.batches()]
            filling = list(chain.from_iterable(batches))
            for start in range(0, len(filling), pool.slice_slots):  # the scan finds keys that become visible meanwhile
                matching = [key for key in filling[start : start + pool.slice_slots] if matches(key)]
                with pool.lock:
                    index.namespaces.disown(matching)
                yield
        yield from _scan(sweep, pool, "purge", dry_run, wanted)

    return Sweep("purge", index.slot_keys.num_slots, pool.config.slot_bytes, work)


def purge_keys(pool: Pool, keys: Sequence[bytes], dry_run: bool) -> Sweep:
    """Remove the blocks with exactly these keys, as `purge_matching` does. O(keys)."""
    wanted = list(dict.fromkeys(keys))

    def work(sweep: Sweep) -> Iterator[None]:
        while sweep.done < len(wanted):
            some = wanted[sweep.done : sweep.done + pool.slice_slots]
            with pool.lock:
                found = pool.index.namespaces.find_all(some)
                if not dry_run:
                    pool.index.namespaces.disown(some)
                    pool.remove_blocks(found, "purge")
            sweep.evicted_slots += len(found)
            sweep.done += len(some)
            yield

    return Sweep("purge", len(wanted), pool.config.slot_bytes, work)


def sweep_namespace(pool: Pool, namespace: Namespace) -> Sweep:
    """Remove the blocks of a dropped namespace. A held slot is freed when its last lease or load ends."""
    index = pool.index

    def wanted(low: int, high: int) -> list[int]:
        return index.namespaces.slots_of(namespace, low, high)

    def work(sweep: Sweep) -> Iterator[None]:
        yield from _scan(sweep, pool, "purge", False, wanted)
        with pool.lock:
            index.namespaces.forget_if_empty(namespace)

    return Sweep("purge", index.slot_keys.num_slots, pool.config.slot_bytes, work)


class BaseSwitches:
    """Drain and bypass. Every call is safe from any thread. Invalid arguments raise `InvalidRequestError` before
    anything changes."""

    _members: Callable[[], Iterable[BaseSwitches]] = tuple
    """Returns the switches to which each change is applied as well."""

    def __init__(self, state: PoolAcceptance, lock: Lock, clock: Callable[[], float]) -> None:
        self._state, self._lock, self._clock = state, lock, clock

    def drain(self, mode: DrainMode, deadline_seconds: float | None) -> DrainStatus:
        """Refuse new stores, or (mode "all") new loads too, until `undrain`. A new drain replaces an old one.
        The deadline only informs clients that wait: nothing in flight is aborted when it passes."""
        if deadline_seconds is not None and not 0 <= deadline_seconds < inf:
            raise InvalidRequestError(f"deadline_seconds is {deadline_seconds}; allowed: 0 or more, or null")
        with self._lock:
            for member in self._members():
                member.drain(mode, deadline_seconds)
            self._state.drain(mode, self._moment(deadline_seconds))
        return self.drain_status

    def undrain(self) -> DrainStatus:
        """Accept loads and stores again."""
        with self._lock:
            self._state.drain(None)
            for member in self._members():
                member.undrain()
        return self.drain_status

    @property
    def drain_status(self) -> DrainStatus:
        with self._lock:
            return self._state.drain_status(self._clock(), *self._in_flight())

    def set_bypass(self, *, load: bool, store: bool, ttl_seconds: float | None) -> BypassStatus:
        """Switch loads or stores off, for `ttl_seconds` or until they are switched on again. While loads are off,
        lookups miss."""
        if ttl_seconds is not None and not 0 < ttl_seconds < inf:
            raise InvalidRequestError(f"ttl_seconds is {ttl_seconds}; allowed: more than 0, or null")
        with self._lock:
            for member in self._members():
                member.set_bypass(load=load, store=store, ttl_seconds=ttl_seconds)
            self._state.set_bypass(load=load, store=store, until=self._moment(ttl_seconds))
        return self.bypass

    @property
    def bypass(self) -> BypassStatus:
        with self._lock:
            return self._state.bypass(self._clock())

    def _in_flight(self) -> tuple[int, int]:
        """Return how many transfers are open and how many leases there are. The caller holds the lock."""
        raise NotImplementedError

    def _moment(self, seconds: float | None) -> float:
        """Return the time on the clock in `seconds` from now, or infinity for None."""
        return inf if seconds is None else self._clock() + seconds


class Administrator(BaseSwitches):
    """Eviction, size, contexts, drain and bypass of a running engine. Every call is safe from any thread.

    Bulk work is returned as a `Sweep`: nothing happens until it is stepped or run, and it releases the engine's lock
    between slices. A dry run counts what the same call would remove now. Bytes are of one rank, times in seconds.
    Invalid arguments raise `InvalidRequestError` before anything changes.
    """

    def __init__(self, pool: Pool) -> None:
        super().__init__(pool.acceptance, pool.lock, pool.clock)
        self._pool = pool

    def _in_flight(self) -> tuple[int, int]:
        return sum(session.open_transfers for session in sessions_of(self._pool)), self._pool.num_leases

    # -- eviction -------------------------------------------------------------------------------------------

    def evict(
        self,
        *,
        slots: int | None = None,
        num_bytes: int | None = None,
        idle_seconds: float | None = None,
        context: bytes | None = None,
        dry_run: bool = False,
    ) -> Sweep:
        """Remove evictable blocks; blocks in use stay. Exactly one argument selects the blocks: the next `slots` in the
        policy's order, the next ones with at least `num_bytes`, all blocks that were last used at least `idle_seconds`
        ago, or the blocks of a `context` that no other request has used since."""
        _exactly_one(slots=slots, bytes=num_bytes, idle_seconds=idle_seconds, context=context)
        if context is not None:
            return self._sweep_context("evict", "operator", context, dry_run, alone=True)
        if idle_seconds is not None:
            return self._evict_since("evict", "operator", "used", idle_seconds, dry_run)
        return evict_next(self._pool, "evict", "operator", self._count_of(slots, num_bytes), dry_run)

    def purge(
        self,
        *,
        everything: bool = False,
        keys: Sequence[bytes] | None = None,
        key_prefixes: Sequence[bytes] | None = None,
        idle_seconds: float | None = None,
        age_seconds: float | None = None,
        slots: int | None = None,
        num_bytes: int | None = None,
        context: bytes | None = None,
        dry_run: bool = False,
    ) -> Sweep:
        """Remove blocks. Exactly one argument selects them: `everything`, exact `keys`, `key_prefixes`, blocks that
        were last used at least `idle_seconds` ago, blocks that were stored at least `age_seconds` ago, blocks that the
        last request of a `context` has used (even if others share them), or the next blocks in the policy's order, by
        `slots` or `num_bytes`.

        With `everything`, `keys`, `key_prefixes` and `context`, leased blocks are removed, too, and stores in flight do
        not become visible. A leased slot is reused only when its lease or load ends. The other arguments remove
        evictable blocks only.

        The blocks are also removed from the store below the pool, except with `slots` or `num_bytes`.
        """
        _exactly_one(
            all=everything or None,
            keys=keys,
            key_prefixes=key_prefixes,
            idle_seconds=idle_seconds,
            age_seconds=age_seconds,
            slots=slots,
            bytes=num_bytes,
            context=context,
        )
        pool, wish = self._pool, PurgeWish(keys=keys, age_seconds=age_seconds, idle_seconds=idle_seconds)
        if everything:
            sweep = purge_matching(pool, lambda key: True, dry_run)
        elif key_prefixes is not None:
            prefixes = tuple(key_prefixes)
            if not prefixes or not all(prefixes):
                raise InvalidRequestError("key_prefixes is empty or has an empty prefix; allowed: non-empty prefixes")
            sweep, wish = purge_matching(pool, lambda key: key.startswith(prefixes), dry_run), PurgeWish(None, prefixes)
        elif keys is not None:
            sweep = purge_keys(pool, keys, dry_run)
        elif context is not None:
            with pool.lock:
                used = [key for each in self._find_contexts(context) for key in each.chain]
            sweep = self._sweep_context("purge", "purge", context, dry_run, alone=False)
            return purge_store(pool, sweep, PurgeWish(keys=used), dry_run=dry_run, notice=_LEFT_OF_CONTEXT)
        elif idle_seconds is not None:
            sweep = self._evict_since("purge", "purge", "used", idle_seconds, dry_run)
        elif age_seconds is not None:
            sweep = self._evict_since("purge", "purge", "stored", age_seconds, dry_run)
        else:
            return evict_next(pool, "purge", "purge", self._count_of(slots, num_bytes), dry_run)
        return purge_store(pool, sweep, wish, dry_run=dry_run)

    def remove_block(self, key: bytes) -> None:
        """Remove one block. Raises `NotFoundError`, or `ConflictError` if it is leased or being loaded."""
        pool = self._pool
        with pool.lock:
            slots = pool.index.namespaces.find_all((key,))
            if not slots:
                raise NotFoundError(f"there is no block with key {format_key(key)}")
            if any(map(pool.index.held.count, slots)):
                raise ConflictError(f"block {format_key(key)} is leased or being loaded")
            pool.remove_blocks(slots, "operator")

    def lookup(self, keys: Sequence[bytes]) -> LookupResult:
        """Return which of the keys are in the pool, and why sessions may not load, if so. Unlike a host's lookup, this
        holds no block and is not counted."""
        pool = self._pool
        present: list[bool] = []
        for start in range(0, len(keys), pool.slice_slots):
            some = keys[start : start + pool.slice_slots]
            with pool.lock:
                key_of = pool.index.slot_keys.key_of
                found = {key_of[slot] for slot in pool.index.namespaces.find_all(some)}
            present += [key in found for key in some]
        with pool.lock:
            refusal = pool.load_refusal(pool.clock())
        return LookupResult([*present, False].index(False), present, refusal)

    def _count_of(self, slots: int | None, num_bytes: int | None) -> int:
        """Return how many slots to evict. Bytes are rounded up to whole slots, so that at least `num_bytes` are
        freed."""
        for name, value in (("slots", slots), ("bytes", num_bytes)):
            if value is not None and value < 1:
                raise InvalidRequestError(f"{name} is {value}; allowed: 1 or more")
        return slots if slots is not None else -(-(num_bytes or 0) // self._pool.config.slot_bytes)

    def _evict_since(
        self, kind: str, reason: str, what: Literal["stored", "used"], seconds: float, dry_run: bool
    ) -> Sweep:
        """Remove the evictable blocks that were stored, or last used, at least `seconds` ago."""
        if not 0 <= seconds < inf:
            name = "age_seconds" if what == "stored" else "idle_seconds"
            raise InvalidRequestError(f"{name} is {seconds}; allowed: 0 or more seconds")
        pool, index = self._pool, self._pool.index
        moment = pool.clock() - seconds
        return scan(pool, kind, reason, dry_run, lambda low, high: index.evictable_since(what, moment, low, high))

    # -- size and policy ------------------------------------------------------------------------------------

    def resize(self, capacity_slots: int) -> Sweep:
        """Give every rank `capacity_slots` slots. Growing ends immediately, and the ranks pin the new slots afterwards.
        Shrinking first removes the blocks in the slots above, and waits until none of these slots is leased or in
        flight.

        Raises `ConflictError` while another resize is under way.
        """
        self._pool.check_size(capacity_slots)
        return self.start_resize(capacity_slots)

    def start_resize(self, capacity_slots: int) -> Sweep:
        """Do what `resize` does, for the pool's host, which may choose any number of slots."""
        pool = self._pool
        with pool.lock:
            pool.target.begin_resize(capacity_slots)
            top = max(pool.slots.limit, pool.slots.top)
            if capacity_slots > pool.capacity:
                pool.want(replace(pool.target.desired, capacity_slots=capacity_slots))
            pool.apply_limit()
        logger.info("resize to %d slots", capacity_slots)
        total = max(0, top - capacity_slots)
        slot_bytes = pool.config.slot_bytes
        sweep = Sweep("resize", total, slot_bytes, lambda sweep: self._vacate(sweep, top), undo=self._undo_resize)
        sweep.step()
        return sweep

    def _vacate(self, sweep: Sweep, top: int) -> Iterator[None]:
        pool = self._pool
        low = pool.target.ceiling
        yield from pool.make_tables_in_slices(low)
        while low < top:
            with pool.lock:
                before = pool.index.num_visible
                low = pool.vacate(low, top, "resize")
                sweep.evicted_slots += before - pool.index.num_visible
            sweep.done = sweep.total - (top - low)
            yield
        while True:
            with pool.lock:
                sweep.waiting = pool.slots.leaving > 0
                if not sweep.waiting:
                    if pool.target.ceiling < pool.capacity:
                        pool.target.revision += 1
                        pool.want(replace(pool.target.desired, capacity_slots=pool.target.ceiling))
                    pool.target.is_resizing = False
                    return
            yield

    def _undo_resize(self) -> None:
        """Restore the capacity."""
        pool = self._pool
        with pool.lock:
            pool.target.undo_resize()
            pool.apply_limit()

    @property
    def settings_revision(self) -> int:
        """Grows with each change of size, policy or pausing, including one that reverts another."""
        return self._pool.target.revision

    def set_policy(self, name: str) -> None:
        """Change how the pool chooses what it evicts; see `parse_policy`. Raises `ConfigError`. O(1)."""
        name = parse_policy(name)
        with self._pool.lock:
            self._pool.target.revision += name != self._pool.policy
            self._pool.set_policy(name)

    # -- contexts -------------------------------------------------------------------------------------------

    def release_context(self, context: bytes) -> int:
        """Forget this context in all namespaces, because no further request of it will come. Blocks of it that no other
        request has used since are then evicted as all blocks are whose client has released them. Returns how many
        blocks its last request had used. Raises `NotFoundError` if there is no such context."""
        pool = self._pool
        with pool.lock:
            found, blocks = self._find_contexts(context), 0
            for each in found:
                blocks += len(each.chain)
                pool.index.chains.end_anew(each.watches, RELEASED, pool.clock())
                pool.requests.contexts.drop(each)
        return blocks

    def set_context(self, context: bytes, resume_in: float) -> None:
        """Expect the next request of this context in `resume_in` seconds. If there is a store below the pool, it
        prefetches the context's blocks shortly before then, whatever the client has announced. Nothing else changes.
        Raises `NotFoundError` if there is no such context."""
        if not 0 <= resume_in < inf:
            raise InvalidRequestError(f"resume_in is {resume_in}; allowed: 0 or more seconds")
        pool = self._pool
        with pool.lock:
            for each in self._find_contexts(context):
                each.expected = pool.clock() + resume_in
        if pool.tier is not None:
            pool.tier.expect_context(context)

    def _find_contexts(self, context: bytes) -> list[Context]:
        """Return the contexts with this id, of which there is at least one. Raises `NotFoundError`. The caller holds
        the lock."""
        found = self._pool.requests.contexts.find(context)
        if not found:
            lost = "; contexts are forgotten at a restart, so the store below the pool may have blocks of it"
            raise NotFoundError(f"there is no context {context.hex()}{lost if self._pool.tier is not None else ''}")
        return found

    def _sweep_context(self, kind: str, reason: str, context: bytes, dry_run: bool, *, alone: bool) -> Sweep:
        """Remove the blocks that the last request of a context has used. With `alone`, remove only evictable ones that
        no other request has used since. Otherwise remove all of them, and stores of them in flight do not become
        visible."""
        pool = self._pool
        with pool.lock:
            contexts = self._find_contexts(context)
            total = sum(len(each.chain) for each in contexts)

        def work(sweep: Sweep) -> Iterator[None]:
            for each in contexts:
                own: set[int] | None = None
                if alone:
                    with pool.lock:
                        own = set(pool.index.chains.still_watched(each.watches))
                for start in range(0, len(each.chain), pool.slice_slots):
                    keys = each.chain[start : start + pool.slice_slots]
                    with pool.lock:
                        found = [slot for slot in each.namespace.keys.slots_of(keys) if slot is not None]
                        if own is not None:
                            found = pool.index.unused([slot for slot in found if slot in own])
                        elif not dry_run:
                            each.namespace.pending_stores.disown(keys)
                        sweep.evicted_slots += len(found) if dry_run else pool.remove_blocks(found, reason)
                    sweep.done += len(keys)
                    yield
            if not dry_run:
                with pool.lock:
                    for each in contexts:
                        pool.requests.contexts.drop(each)

        return Sweep(kind, total, pool.config.slot_bytes, work)

    # -- memory ---------------------------------------------------------------------------------------------

    def retry_pinning(self) -> None:
        """Let ranks whose pinning has failed try again."""
        pool = self._pool
        with pool.lock:
            pool.want(replace(pool.target.desired, pin_attempt=pool.target.desired.pin_attempt + 1))

    def pause_pinning(self, paused: bool) -> None:
        """Let ranks pin no further chunk, or end this pause. Pinned slots stay usable."""
        pool = self._pool
        with pool.lock:
            pool.target.revision += paused != pool.target.desired.paused
            pool.want(replace(pool.target.desired, paused=paused))


def _exactly_one(**selectors: object) -> None:
    given = [name for name, value in selectors.items() if value is not None]
    if len(given) != 1:
        raise InvalidRequestError(f"selectors given: {given or 'none'}; allowed: exactly one of {list(selectors)}")


class HostSwitches(BaseSwitches):
    """Switches all pools of a host. When a pool is added, call `apply_to` once `admins` returns it. A switch of the
    host replaces the switches of single pools, and ending it ends theirs, too."""

    def __init__(
        self, admins: Callable[[], Iterable[Administrator]], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(PoolAcceptance(), Lock(), clock)
        self._members = admins

    def _in_flight(self) -> tuple[int, int]:
        pools = [admin.drain_status for admin in self._members()]
        return sum(one.pending_transfers for one in pools), sum(one.leases for one in pools)

    def apply_to(self, admin: Administrator) -> None:
        """Apply the host's switches to a new pool."""
        with self._lock:
            now = self._clock()
            bypass, drain = self._state.bypass(now), self._state.drain_status(now, 0, 0)
            if bypass.load or bypass.store:
                admin.set_bypass(load=bypass.load, store=bypass.store, ttl_seconds=bypass.ttl_seconds_left)
            if drain.mode is not None:
                admin.drain(drain.mode, drain.deadline_seconds_left)
