"""The fleet tier of one session: when the store is asked, what is fetched and put, and what a request waits for."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile
from math import inf
from typing import Literal, NamedTuple

from kvstow.control.session import Session
from kvstow.control.tiertraffic import TierFetches, TierPuts, TierTraffic
from kvstow.errors import ConfigError
from kvstow.messages import TierOp
from kvstow.results import Needed, Needs, TierSettled
from kvstow.tier.lookups import Inquiry, LookupTable, LookupThread, StoreAnswers
from kvstow.tier.rate import PROBE_BLOCKS, BreakEven, Estimate
from kvstow.tier.store import MAX_BATCH_BYTES, MAX_BATCH_OBJECTS, LookupClient, ObjectName
from kvstow.tier.tierstatus import Breaker, TierCounters, TierStatus


@dataclass(frozen=True, slots=True)
class TierSettings:
    """How a session uses the tier. Times are in seconds.

    `deadline`: the longest that a request waits for its fetches; it never waits longer than computing the blocks would
    take. `lookup_wait`: the longest that it waits for what the store has. `prefill_rate`: tokens per second, if the
    host knows it (`BreakEven`). `replicated`: all ranks hold the same bytes.
    """

    deadline: float = 2.0
    lookup_wait: float = 0.02
    prefill_rate: float | None = None
    replicated: bool = False

    def __post_init__(self) -> None:
        for name in ("deadline", "lookup_wait"):
            if not getattr(self, name) > 0:
                raise ConfigError(name, getattr(self, name), "more than 0 seconds")
        if self.prefill_rate is not None and not 0 < self.prefill_rate < inf:
            raise ConfigError("prefill_rate", self.prefill_rate, "more than 0 tokens per second")


class LongerHit(NamedTuple):
    """A hit that is longer than the pool's own, which has `behind` blocks of tokens. `keys`: all that are needed of it;
    `blocks`: how many blocks of tokens longer it is; `beyond`: how many of the keys the pool's own hit does not
    need."""

    keys: Sequence[bytes]
    blocks: int
    beyond: int
    behind: int = 0


NOTHING = LongerHit((), 0, 0)


@dataclass(slots=True)
class TierWait:
    """A request that may find more in the tier than in the pool. `first`: how many leading keys the pool has at least.
    `until`: when it continues with what has arrived. `needs`: None where a hit is a leading run of `keys`. `inquiry`:
    what the store is asked for it, and `version` that of the table when it was looked at last. `ops`: the fetches that
    it waits for; those at the end of the list may be over."""

    keys: Sequence[bytes]
    first: int
    began: float
    until: float
    needs: Needs | None = None
    state: Literal["asking", "fetching", "over"] = "asking"
    inquiry: Inquiry | None = None
    version: int = -1
    ops: list[int] = field(default_factory=list)


PREFETCH_SECONDS = 60.0
"""After that a prefetch begins nothing more."""


@dataclass(slots=True)
class Prefetch:
    """What is known of the store's blocks is in `wait`, for which nobody waits. `left`: the keys that are still to be
    fetched; None while it is not known which the store has."""

    wait: TierWait
    left: list[bytes] | None = None


logger = logging.getLogger("kvstow.tier")


class FleetTier:
    """Decides for each request whether to fetch, and puts every block that is stored. `TierFetches` and `TierPuts` know
    what is under way.

    The host's thread calls `step` once a step, gives what `take_plans` returns to the ranks, and passes their
    completions to the session. No call waits for the store. Each is O(blocks concerned), except `close`.

    Any thread may call `status` and `close`. A session has one tier, until its ops have ended.
    """

    def __init__(
        self,
        session: Session,
        client: LookupClient,
        settings: TierSettings,
        fingerprint: str | None,
        *,
        off_reason: str = "",
        name: str = "",
        most_slots: int | None = None,
        block_tokens: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        hint_clock: Callable[[], float] | None = None,
        on_news: Callable[[], None] | None = None,
    ) -> None:
        """`fingerprint`: see `ObjectName`; None: the tier is off, for the `off_reason` (`kvstow.tier.fingerprint` gives
        one of them). `name`: of the store. `most_slots`: the largest size of the pool, which limits the queue of puts;
        None: its present size. `block_tokens`: by how many tokens each block lengthens a hit, where the pool's
        configuration does not have it. The caller keeps `client`. `hint_clock`: the clock by which answers of the
        store expire, if not `clock`. `on_news`: see `LookupThread`."""
        config = session.pool.config
        slots = session.pool.capacity if most_slots is None else most_slots
        self._clock, self._settings, self._name = clock, settings, name
        self.fingerprint = fingerprint
        """See `ObjectName`. None: nothing is put or fetched."""
        self._off_reason = off_reason
        self._is_closed = False
        most = max(1, min(MAX_BATCH_OBJECTS, MAX_BATCH_BYTES // config.slot_bytes))
        self.traffic = TierTraffic(session, most=most, replicated=settings.replicated)
        self._num_ranks = 1 if settings.replicated else config.num_ranks
        self._table = LookupTable(hint_clock or clock)
        self._lookups = LookupThread(self._table, client, on_news=on_news)
        self._breaker = Breaker(clock)
        self.break_even = BreakEven(
            config.slot_bytes, config.block_tokens or block_tokens, clock, settings.prefill_rate
        )
        self._puts = TierPuts(self.traffic, clock, slots=slots)
        self._fetches = TierFetches(self.traffic)
        self._session = session
        session.on_stored = self._note_stored
        self._asked = 0
        self._last: Estimate | None = None
        self._sample: TierWait | None = None
        """A request that did not wait, because fetches do not pay. Its blocks show whether they do now."""
        self.counters = TierCounters()

    # -- requests -------------------------------------------------------------------------------------------

    def look_for(self, keys: Sequence[bytes], first: int = 0, needs: Needs | None = None) -> TierWait | None:
        """A request has these keys, which stay as they are. Not all of them are in the pool, but the `first` ones are,
        as the caller has just seen. `needs`: what a hit is, if it is no leading run of them; `first` is 0 then. None:
        there is nothing to wait for."""
        if not self.may_fetch:
            return None
        now = self._clock()
        wait = TierWait(keys, first, now, now + min(self._settings.lookup_wait, self._settings.deadline), needs)
        self.counters.requests += 1
        if self.break_even.may_pay:
            return None if self.is_over(wait) else wait
        if self._sample is None:
            self._sample = wait
        else:
            self.counters.declined_requests += 1
        return None

    def is_over(self, wait: TierWait) -> bool:
        """Whether the request need not wait any longer: it looks its keys up in the pool again, and computes what is
        not there. O(1) until there is an answer of the store, or a fetch ends."""
        if self._is_closed:
            wait.state = "over"
        if wait.state == "over":
            return True
        if wait.state == "asking":
            self._look(wait)
        if wait.state == "fetching":
            while wait.ops and not self._fetches.is_under_way(wait.ops[-1]):
                wait.ops.pop()
            if not wait.ops:
                wait.state = "over"
        now = self._clock()
        if wait.state != "over" and now >= wait.until:
            self.counters.cut_waits += 1
            wait.state = "over"
        if wait.state != "over":
            return False
        self.counters.wait_seconds += now - wait.began
        return True

    def _look(self, wait: TierWait) -> None:
        """Begin to fetch, as soon as it is known what the store has."""
        found = self._find(wait)
        if found is None:
            return
        wait.state = "over"
        if not found.keys:
            return
        remote = self.traffic.absent(found.keys)
        wait.ops = self._fetches.ops_of(found.keys)
        self.counters.found_blocks += len(remote)
        if wait is self._sample:
            if remote:
                # The request did not wait. By now it may be storing most of these itself, which is no help to others.
                self._decide(remote, found, found.beyond)
        elif remote or wait.ops:
            self._fetch(wait, remote, found)

    def prefetch(self, keys: Sequence[bytes], needs: Needs | None = None) -> Prefetch:
        """Bring what the store has of these keys into the pool, though no request waits for it. See `is_prefetched`."""
        now = self._clock()
        return Prefetch(TierWait(keys, 0, now, now + PREFETCH_SECONDS, needs))

    def is_prefetched(self, prefetch: Prefetch) -> bool:
        """Go on with it. Whether it has ended: all is there, or something else needs the store or the room. One
        transfer at a time; a part of what several groups need is no hit, so it comes as a whole."""
        wait = prefetch.wait
        while wait.ops and not self._fetches.is_under_way(wait.ops[-1]):
            wait.ops.pop()
        if wait.ops:
            return False
        if not self.may_fetch or self._clock() >= wait.until:
            return True
        if prefetch.left is None:
            found = self._find(wait)
            if found is None:
                return False
            prefetch.left = list(found.keys if wait.needs is not None else self.traffic.absent(found.keys))
        count = len(prefetch.left) if wait.needs is not None else self.traffic.most
        keys, prefetch.left = prefetch.left[:count], prefetch.left[count:]
        if not keys or not self.traffic.has_room(keys):
            return True
        assert self.fingerprint is not None
        # It counts as nothing saved: nobody knows yet whether the blocks are used.
        wait.ops = self._fetches.begin(self.fingerprint, keys, 0.0, whole=wait.needs is not None)
        self.counters.prefetched_blocks += len(keys)
        return not wait.ops

    def _fetch(self, wait: TierWait, remote: Sequence[bytes], found: LongerHit) -> None:
        """Fetch `remote`, if that pays for a request that gets what it has `found` then."""
        estimate = self._decide(remote, found, len(remote))
        if not estimate.pays:
            return
        if self._breaker.is_closed:
            assert self.fingerprint is not None
            # Where groups need parts of a prefix, its other blocks must not make room for these, and a part of these is
            # no hit.
            whole = wait.needs is not None
            keys = found.keys if whole else remote
            wait.ops += self._fetches.begin(self.fingerprint, keys, self._worth(found), whole=whole)
        if wait.ops:
            wait.state = "fetching"
            compute = inf if estimate.compute_seconds is None else estimate.compute_seconds
            wait.until = wait.began + min(self._settings.deadline, compute)

    def _decide(self, remote: Sequence[bytes], found: LongerHit, fetched: int) -> Estimate:
        """Whether to fetch `fetched` blocks. If that does not pay, a few of those that are `remote` are fetched now and
        then to measure the store."""
        queued = self._fetches.num_blocks
        estimate = self._last = self.break_even.decide(fetched, found.blocks, queued, found.behind)
        if not estimate.pays:
            self.counters.declined_requests += 1
            if self._breaker.is_closed and not queued and self.break_even.wants_probe():
                assert self.fingerprint is not None
                self._fetches.begin(self.fingerprint, remote[:PROBE_BLOCKS], self._worth(found))
        return estimate

    def _worth(self, found: LongerHit) -> float:
        """How many seconds one of its keys saves computing."""
        return (self.break_even.compute_seconds(found.blocks, found.behind) or 0.0) / len(found.keys)

    @property
    def may_fetch(self) -> bool:
        """Whether `look_for` may have something to wait for. From any thread, and without a lock: it may change the
        next moment."""
        return self._is_on and self._breaker.is_closed

    @property
    def _is_on(self) -> bool:
        return self.fingerprint is not None and not self._is_closed

    # -- what a request can have of the pool, of fetches under way and of the store together --------------------

    def _find(self, wait: TierWait) -> LongerHit | None:
        """What the request can have; None: not known yet, and the store is asked."""
        needs = wait.needs
        found = self._find_leading(wait) if needs is None else self._find_needed(wait, needs)
        if found is not None and wait.inquiry is not None:
            self._table.drop(wait.inquiry)
        return found

    def _find_leading(self, wait: TierWait) -> LongerHit | None:
        """The keys from `wait.first` on that the pool, fetches under way and the store have; None: not known yet."""
        inquiry, version = wait.inquiry, self._table.version
        if inquiry is not None and inquiry.is_open and version == wait.version:
            return None
        wait.version = version
        end = self._end_of(wait)
        if end is None:
            return None
        return LongerHit(wait.keys[wait.first : end], end - wait.first, end - wait.first, wait.first)

    def _find_needed(self, wait: TierWait, needs: Needs) -> LongerHit | None:
        """What a request needs of several groups for the longest hit that the pool, fetches under way and the store
        give together, and how much longer it is than that of the pool alone; None: not known yet. O(keys) when the
        request comes and when the store has answered, and O(keys log keys) where the pool is short of slots."""
        if wait.inquiry is None:
            if needs(self.traffic.visible).blocks == needs.most:
                return NOTHING
            absent = [key for key in self.traffic.absent(wait.keys) if key not in self._fetches]
            if None in self._table.known(absent):
                wait.inquiry = self._table.want(absent, 0)
                return None
        elif wait.inquiry.is_open:
            return None
        pool = needs(self.traffic.visible)
        longest = self._longest(needs, pool.blocks)
        saved = longest.blocks - pool.blocks
        if saved <= 0:
            return NOTHING
        return LongerHit(longest.keys, saved, len(set(longest.keys).difference(pool.keys)), pool.blocks)

    def _longest(self, needs: Needs, least: int) -> Needed:
        """The longest hit that the three give together and that the pool has room for; if none is longer than `least`
        blocks, a shorter one. Bisects, so it may miss a longer hit that needs fewer slots, as with chunked attention.
        """
        longest = needs(self._has)
        if longest.blocks <= least or self.traffic.has_room(longest.keys):
            return longest
        longest, most = Needed((), 0), longest.blocks - 1
        while least < most:
            middle = (least + most + 1) // 2
            hit = needs(self._has, middle)
            if self.traffic.has_room(hit.keys):
                longest, least = hit, middle
            else:
                most = hit.blocks - 1
        return longest

    def _has(self, keys: Sequence[bytes]) -> list[bool]:
        """For each key, whether the pool, a fetch under way or the store has it. What the store has does not count
        while an engine stores the same key, because a fetch cannot fill that slot."""
        fetched = set(self.traffic.absent(keys))
        return [
            visible or key in self._fetches or (known is True and key in fetched)
            for key, visible, known in zip(keys, self.traffic.visible(keys), self._table.known(keys), strict=True)
        ]

    def _end_of(self, wait: TierWait) -> int | None:
        """How many leading keys the pool, fetches under way and the store have; None: not known yet, and the store is
        asked about the rest. Of those, the pool has `wait.first`. Each look continues where one of the three ends:
        O(keys that they have)."""
        keys = wait.keys
        wait.first = at = self.traffic.visible_until(keys, wait.first).end
        while at < len(keys):
            begun = at
            at += len(list(takewhile(self._fetches.__contains__, islice(keys, at, None))))
            known = self._table.present_until(keys, at)
            reach = self.traffic.visible_until(keys, known.end)
            at = reach.end
            if at > begun:
                continue
            if known.is_final or reach.is_filling:
                return at
            if wait.inquiry is None or not wait.inquiry.is_open:
                wait.inquiry = self._table.want(keys, at)
            return None
        return at

    # -- steps ----------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Take what has ended, and start what is due: one question to the store, and puts."""
        for result in self._lookups.take_results():
            self._take_result(result)
        for settled in self.traffic.take_settled():
            self._take_settled(settled)
        if not self._is_on:
            self._sample = None
            return
        assert self.fingerprint is not None
        self._puts.queue.sort_out()  # also while nothing is put: what waits stays bounded
        if self._breaker.wants_probe():
            self._lookups.probe(self.fingerprint)
            self._asked += 1
        if self._breaker.is_closed:
            if self._sample is not None:
                self._look(self._sample)
                self._sample = None if self._sample.state == "over" else self._sample
            fingerprint, num_ranks = self.fingerprint, self._num_ranks
            # The object of rank 0 answers for all ranks: it is put last.
            self._asked += self._lookups.ask(lambda key: ObjectName(fingerprint, key, 0, num_ranks))
            self._puts.begin(self.fingerprint)
        else:
            self._sample = None

    def take_plans(self) -> list[tuple[int, TierOp]]:
        """Ranks, each with an op to give to it in this step, in order."""
        return self.traffic.take_plans()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way, and nothing waits to be put that can be put now."""
        with self._session.pool.lock:
            has_news = bool(self._session.ops.tier_settled or self._session.ops.tier_plans)
        has_puts = self.may_fetch and self._puts.queue.has_work
        is_busy = self._asked or self._puts.num_blocks or self._fetches.num_blocks or self._sample is not None
        return not (is_busy or has_news or has_puts)

    def _take_result(self, result: StoreAnswers) -> None:
        self._asked -= 1
        if not result.keys:
            return  # the answer to an earlier question was enough
        self.counters.lookups += 1
        self.counters.asked_blocks += result.keys
        if result.is_probe:
            if self._breaker.note_probe(result.error):
                logger.info("the tier's store answers again")
        elif result.error is not None:
            self._note_outage(result.error)
        else:
            self.break_even.note_lookup(result.seconds)

    def _take_settled(self, settled: TierSettled) -> None:
        counters, moved = self.counters, settled.keys[: settled.moved]
        is_put = self._puts.is_under_way(settled.op_id)
        if is_put:
            self._puts.settle(settled)
            counters.put_blocks += settled.moved
            counters.failed_put_blocks += len(settled.keys) - settled.moved
        else:
            saved = self._fetches.settle(settled)
            counters.fetched_blocks += settled.moved
            counters.failed_fetch_blocks += len(settled.keys) - settled.moved
            counters.saved_seconds += saved
            self.break_even.note_fetch(settled.moved, settled.seconds)
            self._table.note(settled.keys[settled.moved :], present=False)
        self._table.note(moved, present=True)
        if settled.outage:
            self._note_outage(settled.error or "no answer")
        elif 2 * settled.failed > len(settled.keys):
            reason = f"{settled.failed} of {len(settled.keys)} objects could not be moved"
            self._log_opened(self._breaker.note_failure(reason))
        elif settled.error is None:
            self._breaker.note_success()

    def _note_outage(self, reason: str) -> None:
        self._log_opened(self._breaker.note_outage(reason))

    def _log_opened(self, has_opened: bool) -> None:
        if has_opened:
            logger.warning("the tier is left alone until its store answers again: %s", self._breaker.reason)

    def _note_stored(self, keys: Sequence[bytes]) -> None:
        """Called with the pool's lock held."""
        if self._is_on:
            self._puts.queue.note_stored(keys)

    # -- for hosts ------------------------------------------------------------------------------------------

    def turn_off(self, reason: str) -> None:
        """Begin nothing any more, for this reason."""
        self.fingerprint, self._off_reason = None, reason

    def status(self) -> TierStatus:
        """A snapshot of what the tier does, and why."""
        even, last, is_on = self.break_even, self._last, self._is_on
        return TierStatus(
            store=self._name,
            fingerprint=self.fingerprint,
            state="off" if not is_on else "on" if self._breaker.is_closed else "down",
            reason=self._breaker.reason if is_on else self._off_reason,
            breaker=self._breaker.state,
            fetch_bytes_per_second=even.rate.per_second,
            lookup_seconds=even.lookup_seconds,
            prefill_tokens_per_second=None if even.prefill is None else even.prefill.tokens_per_second,
            decision=last.reason if last is not None else "no request has asked for a fetch yet",
            putting_blocks=self._puts.num_blocks,
            fetching_blocks=self._fetches.num_blocks,
            waiting_blocks=len(self._puts.queue),
            counters=replace(
                self.counters, dropped_blocks=self._puts.queue.dropped, breaker_opened=self._breaker.opened
            ),
        )

    def close(self) -> None:
        """End the lookups, and begin no op any more; requests wait for nothing. What is under way on the ranks is
        theirs, and so is what `take_plans` has yet to give them. Waits for the store to answer. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self.traffic.close()
            self._session.on_stored = None
        self._lookups.close()
