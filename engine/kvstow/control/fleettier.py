"""The fleet tier of one session: what is looked up, fetched and put, and what a request waits for."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from math import inf
from typing import Literal

from kvstow.control.session import Session
from kvstow.control.tiertraffic import TierTraffic
from kvstow.errors import ConfigError
from kvstow.messages import TierOp
from kvstow.results import TierSettled
from kvstow.tier.autowrite import AutoWrite
from kvstow.tier.breaker import Breaker
from kvstow.tier.breakeven import PROBE_BLOCKS, BreakEven, Estimate
from kvstow.tier.fingerprint import WEIGHTS_CHANGED
from kvstow.tier.lookups import Inquiry, Known, LookupTable
from kvstow.tier.lookupthread import LookupResult, LookupThread
from kvstow.tier.objectname import ObjectName
from kvstow.tier.putpace import PutPace
from kvstow.tier.store import MAX_BATCH_BYTES, MAX_BATCH_OBJECTS, LookupClient
from kvstow.tier.tierstatus import TierCounters, TierState, TierStatus
from kvstow.tier.writepolicy import WRITE_MODES, WriteMode, WritePolicy

logger = logging.getLogger("kvstow.tier")

NO_NAME = "the weights have no name, by which other nodes could know them"
"""Why a tier is off, unless the host knows more."""
_MAX_SEEN = 8
"""Blocks whose uses are remembered, for each slot of the pool."""
_LEAST_SEEN = 1 << 16
"""The same, for a small pool: 10 MB."""
_RESERVE = 8
"""With `back`, one slot of so many is kept free."""


@dataclass(frozen=True, slots=True)
class TierSettings:
    """How a session uses the tier. Times are in seconds.

    `deadline`: the longest that a request waits for its fetches; it never waits longer than computing the blocks would
    take. `lookup_wait`: the longest that it waits to hear what the store has. `prefill_rate`: tokens per second, if the
    host knows it (`BreakEven`). `replicated`: all ranks hold the same bytes.
    """

    write: WriteMode = "auto"
    deadline: float = 2.0
    lookup_wait: float = 0.02
    prefill_rate: float | None = None
    replicated: bool = False

    def __post_init__(self) -> None:
        if self.write not in WRITE_MODES:
            raise ConfigError("write", self.write, " or ".join(WRITE_MODES))
        for name in ("deadline", "lookup_wait"):
            if not getattr(self, name) > 0:
                raise ConfigError(name, getattr(self, name), "more than 0 seconds")
        if self.prefill_rate is not None and not 0 < self.prefill_rate < inf:
            raise ConfigError("prefill_rate", self.prefill_rate, "more than 0 tokens per second")


@dataclass(slots=True)
class TierWait:
    """A request that may find more in the tier than in the pool. `first`: how many leading keys the pool has at least.
    `until`: when it goes on with what there is. `inquiry`: what the store is asked for it, and `version` that of the
    table when it was looked at last. `ops`: the fetches that it waits for; those at the end of the list may be over."""

    keys: Sequence[bytes]
    first: int
    began: float
    until: float
    state: Literal["asking", "fetching", "over"] = "asking"
    inquiry: Inquiry | None = None
    version: int = -1
    ops: list[int] = field(default_factory=list)


class FleetTier:
    """Used by the thread of the host: it calls `step` once a step, gives what `take_plans` returns to the ranks, and
    passes their completions to the session. No call waits for the store; each is O(blocks concerned), except `close`.

    `status`, `set_bypassed`, `name_weights` and `note_purged` may be called from any thread, and wait for nothing. What
    an operator orders with them concerns what begins from the next step on; what is under way ends as usual. `close`
    may be called from any thread, too. A session has one tier at a time, until its ops have ended.
    """

    def __init__(
        self,
        session: Session,
        client: LookupClient,
        settings: TierSettings,
        fingerprint: str | None,
        *,
        off_reason: str = NO_NAME,
        name: str = "",
        most_slots: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        hint_clock: Callable[[], float] | None = None,
        on_news: Callable[[], None] | None = None,
    ) -> None:
        """`fingerprint`: see `ObjectName`; None: the tier is off until `begin_epoch`, for the `off_reason`
        (`kvstow.tier.fingerprint` gives one of them). `name`: of the store. `most_slots`: that the pool may come to
        have, by which queues are limited; None: those that it has now. `client` is closed by `close`.
        `hint_clock`: by which answers of the store become old, if not by `clock`. `on_news`: see `LookupThread`."""
        config = session.pool.config
        slots = session.pool.capacity if most_slots is None else most_slots
        self._clock, self._settings, self._name = clock, settings, name
        self.fingerprint = fingerprint
        self._off_reason = off_reason
        most = max(1, min(MAX_BATCH_OBJECTS, MAX_BATCH_BYTES // config.slot_bytes))
        self.traffic = TierTraffic(session, most=most, replicated=settings.replicated)
        self._num_ranks = 1 if settings.replicated else config.num_ranks
        self._table = LookupTable(hint_clock or clock)
        self._lookups = LookupThread(self._table, client, on_news=on_news)
        self._breaker = Breaker(clock)
        self.break_even = BreakEven(config.slot_bytes, config.block_tokens, clock, settings.prefill_rate)
        self._max_in_store = max(_LEAST_SEEN, _MAX_SEEN * slots)
        block_bytes = config.slot_bytes * self._num_ranks
        capacity = client.capacity
        pace = None if capacity is None else capacity.put_bytes_per_second
        self._writes = WritePolicy(
            settings.write,
            max(most, slots),
            self._max_in_store,
            clock,
            auto=AutoWrite(None if capacity is None else capacity.num_bytes, block_bytes, clock),
            pace=PutPace(inf if pace is None else pace / block_bytes, clock),
        )
        self._max_putting = max(most, slots // 8)
        self._session = session
        session.on_stored = self._note_stored
        self._bypassed_until = -inf
        self._resets = 0
        self._names: deque[tuple[int, str]] = deque(maxlen=1)
        """The name that an operator has given to the weights, and after how many resets."""
        self._was_purged = False
        self._is_closed = False
        self._beginning = threading.Lock()
        """Held while ops begin: none does once `close` has returned."""
        self._putting: dict[int, int] = {}
        """Blocks of each put under way."""
        self._fetching: dict[int, tuple[bytes, ...]] = {}
        self._op_of: dict[bytes, int] = {}
        """The fetch under way that each key is part of."""
        self._in_store: OrderedDict[bytes, None] = OrderedDict()
        """With `back`: keys that were put or fetched not long ago, and need not be put again."""
        self._asked = 0
        self._last: Estimate | None = None
        self._sample: TierWait | None = None
        """A request that did not wait, because fetches do not pay. Its blocks show whether they do now."""
        self.counters = TierCounters()

    # -- requests -------------------------------------------------------------------------------------------

    def look_for(self, keys: Sequence[bytes], first: int = 0) -> TierWait | None:
        """A request has these keys, which stay as they are. Not all of them are in the pool, but the `first` ones are,
        as the caller has just seen. None: there is nothing to wait for."""
        if not self._is_on() or not self._breaker.is_closed:
            return None
        now = self._clock()
        wait = TierWait(keys, first, now, now + min(self._settings.lookup_wait, self._settings.deadline))
        self.counters.requests += 1
        if self.break_even.pays:
            return None if self.is_over(wait) else wait
        if self._sample is None:
            self._sample = wait
        else:
            self.counters.declined_requests += 1
        return None

    def is_over(self, wait: TierWait) -> bool:
        """Whether the request need not wait any longer: it looks its keys up in the pool again, and computes what is
        not there. O(1) until there is an answer of the store, or a fetch ends."""
        if wait.state == "over" or self._is_closed:
            return True
        if wait.state == "asking":
            self._look(wait)
        if wait.state == "fetching":
            while wait.ops and wait.ops[-1] not in self._fetching:
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

    def note_used(self, keys: Sequence[bytes]) -> None:
        """A request has found these blocks in the pool."""
        self._writes.note_used(keys)

    def _look(self, wait: TierWait) -> None:
        """Begin to fetch, as soon as it is known what the store has."""
        inquiry, version = wait.inquiry, self._table.version
        if inquiry is not None and inquiry.is_open and version == wait.version:
            return
        wait.version = version
        end = self._end_of(wait)
        if end is None:
            return
        wait.state = "over"
        if wait.inquiry is not None:
            self._table.drop(wait.inquiry)
        wanted = wait.keys[wait.first : end]
        if not wanted:
            return
        remote = self.traffic.absent(wanted)
        wait.ops = self._fetches_of(wanted)
        self.counters.found_blocks += len(remote)
        if wait is self._sample:
            if remote:
                self._decide(remote, len(wanted))
        elif remote or wait.ops:
            self._fetch(wait, remote, len(wanted))

    def _end_of(self, wait: TierWait) -> int | None:
        """How many leading keys the pool, fetches under way and the store have; None: not known yet, and the store is
        asked about the rest. Of those, the pool has `wait.first`. Each look goes on where one of the three ends: O(keys
        that they have)."""
        keys, is_on = wait.keys, self._is_on()
        wait.first = at = self.traffic.visible_until(keys, wait.first).end
        while at < len(keys):
            begun = at
            at += len(list(takewhile(self._op_of.__contains__, islice(keys, at, None))))
            known = self._table.present_until(keys, at) if is_on else Known(at, is_final=True)
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

    def _fetches_of(self, keys: Sequence[bytes]) -> list[int]:
        """The fetches under way that these keys are part of."""
        if not self._op_of:
            return []
        ops = dict.fromkeys(map(self._op_of.get, keys))
        return [op for op in ops if op is not None]

    def _fetch(self, wait: TierWait, remote: Sequence[bytes], saved: int) -> None:
        """Fetch `remote`, if that pays for a request that need not compute `saved` blocks then."""
        estimate = self._decide(remote, saved)
        if not estimate.pays:
            return
        if self._breaker.is_closed:
            wait.ops += self._begin_fetch(remote)
        if wait.ops:
            wait.state = "fetching"
            compute = inf if estimate.compute_seconds is None else estimate.compute_seconds
            wait.until = wait.began + min(self._settings.deadline, compute)

    def _decide(self, remote: Sequence[bytes], saved: int) -> Estimate:
        """Whether to fetch `remote`. If that does not pay, a few are fetched now and then to measure the store."""
        queued = sum(map(len, self._fetching.values()))
        estimate = self._last = self.break_even.decide(len(remote), saved, queued)
        if not estimate.pays:
            self.counters.declined_requests += 1
            if self._breaker.is_closed and not self._fetching and self.break_even.wants_probe():
                self._begin_fetch(remote[:PROBE_BLOCKS])
        return estimate

    def _begin_fetch(self, keys: Sequence[bytes]) -> list[int]:
        assert self.fingerprint is not None
        with self._beginning:
            ops = [] if self._is_closed else self.traffic.begin_fetch(self.fingerprint, keys)
        for op in ops:
            self._fetching[op.op_id] = op.keys
            self._op_of.update(dict.fromkeys(op.keys, op.op_id))
        return [op.op_id for op in ops]

    @property
    def may_fetch(self) -> bool:
        """Whether `look_for` may have something to wait for. From any thread, and without a lock: the next moment may
        say otherwise."""
        return self._is_on() and self._breaker.is_closed

    # -- steps ----------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Take what has ended, and start what is due: one question to the store, and puts."""
        self._take_orders()
        for result in self._lookups.take_results():
            self._take_result(result)
        for settled in self.traffic.take_settled():
            self._take_settled(settled)
        if not self._is_on():
            self._sample = None
            return
        assert self.fingerprint is not None
        self._writes.sort_out()  # also while nothing is put: what waits stays bounded
        if self._breaker.wants_probe():
            self._lookups.probe(self.fingerprint)
            self._asked += 1
        if self._breaker.is_closed:
            if self._sample is not None:
                self._look(self._sample)
                self._sample = None if self._sample.state == "over" else self._sample
            self._asked += self._lookups.ask(self._namer(self.fingerprint))
            self._begin_puts(self.fingerprint)
        else:
            self._sample = None

    def take_plans(self) -> list[tuple[int, TierOp]]:
        """Ranks, each with an op to give to it in this step, in order."""
        return self.traffic.take_plans()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way, and nothing waits to be put that can be put now."""
        with self._session.pool.lock:
            has_news = bool(self._session.ops.tier.settled or self._session.ops.tier.plans)
        has_puts = self._is_on() and self._breaker.is_closed and self._writes.has_work
        is_busy = self._asked or self._putting or self._fetching or self._sample is not None
        return not (is_busy or has_news or has_puts)

    def _namer(self, fingerprint: str) -> Callable[[bytes], ObjectName]:
        """Names the object that answers for all ranks: it is put last."""
        num_ranks = self._num_ranks
        return lambda key: ObjectName(fingerprint, key, 0, num_ranks)

    def _begin_puts(self, fingerprint: str) -> None:
        room = self._max_putting - sum(self._putting.values())
        if room <= 0:
            return
        with self._beginning:
            if self._is_closed:
                return
            if self._settings.write == "back":
                wanted, room = self.traffic.capacity_slots // _RESERVE, self._writes.allowed(room)
                ops = self.traffic.put_coldest(fingerprint, wanted, self._in_store, most=room)
                self._writes.note_taken(sum(len(op.keys) for op in ops))
            else:
                taken = self._writes.take(room)
                if not taken:
                    return
                ops = self.traffic.begin_put(fingerprint, taken)
                self._writes.put_back(self.traffic.out_of_reach(taken))
        self._putting.update({op.op_id: len(op.keys) for op in ops})

    def _take_result(self, result: LookupResult) -> None:
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
        if settled.op_id not in self._putting and settled.op_id not in self._fetching:
            return  # of a tier that the session had before
        counters, moved = self.counters, settled.keys[: settled.moved]
        if settled.direction == "put":
            del self._putting[settled.op_id]
            counters.put_blocks += settled.moved
            counters.failed_put_blocks += len(settled.keys) - settled.moved
            if settled.full:
                self._writes.note_full()
            elif settled.moved:
                self._writes.note_put()
        else:
            for key in self._fetching.pop(settled.op_id):
                del self._op_of[key]
            counters.fetched_blocks += settled.moved
            counters.failed_fetch_blocks += len(settled.keys) - settled.moved
            counters.saved_seconds += self.break_even.compute_seconds(settled.moved) or 0.0
            self.break_even.note_fetch(settled.moved, settled.seconds)
        if settled.fingerprint == self.fingerprint:
            if settled.direction == "fetch":
                self._table.note(settled.keys[settled.moved :], present=False)
            self._table.note(moved, present=True)
            if self._settings.write == "back":
                self._note_in_store(moved)
        if settled.outage:
            self._note_outage(settled.error or "no answer")
        elif 2 * settled.failed > len(settled.keys):
            if self._breaker.note_failure(f"{settled.failed} of {len(settled.keys)} objects could not be moved"):
                self._log_opened()
        elif settled.error is None:
            self._breaker.note_success()

    def _note_in_store(self, keys: Sequence[bytes]) -> None:
        self._in_store.update(dict.fromkeys(keys))
        while len(self._in_store) > self._max_in_store:
            self._in_store.popitem(last=False)

    def _note_outage(self, reason: str) -> None:
        if self._breaker.note_outage(reason):
            self._log_opened()

    def _log_opened(self) -> None:
        logger.warning("the tier is left alone until its store answers again: %s", self._breaker.reason)

    def _note_stored(self, keys: Sequence[bytes]) -> None:
        """Called with the pool's lock held."""
        if self._is_on():
            self._writes.note_stored(keys)

    # -- epochs and operators -------------------------------------------------------------------------------

    def _is_on(self) -> bool:
        return self.fingerprint is not None and not self.is_bypassed and not self._is_closed

    @property
    def is_bypassed(self) -> bool:
        return self._clock() < self._bypassed_until

    def reset(self, reason: str = WEIGHTS_CHANGED) -> None:
        """Keys mean other bytes from now on, as after new weights: put and fetch nothing until `begin_epoch`. Fetches
        under way do not become visible. The host removes the blocks of before from the pool. `reason`: what operators
        read until then."""
        self._resets += 1
        self._off_reason = reason
        self._forget_meaning()

    def begin_epoch(self, fingerprint: str) -> None:
        """The weights have a name again. Implies `reset`."""
        self._forget_meaning()
        self.fingerprint = fingerprint

    def _forget_meaning(self) -> None:
        self.fingerprint = None
        self.traffic.cancel_fetches()
        self._writes.forget()
        self._forget_store()

    def _forget_store(self) -> None:
        """Nothing is known of what the store has."""
        self._table.forget()
        self._in_store.clear()

    def set_bypassed(self, bypassed: bool, seconds: float | None = None) -> None:
        """Leave the store alone, for so many seconds or (None) until it is to be used again. What is under way ends as
        usual, and what was stored meanwhile is not put."""
        lasts = inf if seconds is None else seconds
        self._bypassed_until = self._clock() + lasts if bypassed else -inf

    def name_weights(self, fingerprint: str) -> None:
        """An operator names the weights that the engine has now: `begin_epoch` in the next step. Does nothing if they
        have a name by then, or if keys have lost their meaning once more: the name is of weights that are gone."""
        self._names.append((self._resets, fingerprint))

    def note_purged(self) -> None:
        """Objects of this fingerprint were removed from the store."""
        self._was_purged = True

    def _take_orders(self) -> None:
        """What other threads have asked for."""
        if self._names:
            resets, fingerprint = self._names.pop()
            if self.fingerprint is None and resets == self._resets:
                self.begin_epoch(fingerprint)
        if self._was_purged:
            self._was_purged = False
            self._forget_store()
        if self.is_bypassed:
            self._writes.forget()

    def status(self) -> TierStatus:
        """A snapshot of what the tier does, and why."""
        even, last = self.break_even, self._last
        return TierStatus(
            store=self._name,
            state=self._state(),
            reason=self._reason(),
            breaker=self._breaker.state,
            write=self._settings.write,
            write_decision=self._writes.decision,
            fetch_bytes_per_second=even.rate.bytes_per_second,
            lookup_seconds=even.lookup_seconds,
            prefill_tokens_per_second=even.prefill_rate,
            decision=last.reason if last is not None else "no request has asked for a fetch yet",
            putting_blocks=sum(list(self._putting.values())),
            fetching_blocks=sum(map(len, list(self._fetching.values()))),
            waiting_blocks=len(self._writes),
            dropped_blocks=self._writes.dropped,
            opened=self._breaker.opened,
            counters=self.counters.copy(),
        )

    def _state(self) -> TierState:
        if self.fingerprint is None:
            return "off"
        if self.is_bypassed:
            return "bypassed"
        return "on" if self._breaker.is_closed else "down"

    def _reason(self) -> str:
        if self.fingerprint is None:
            named = "an operator has named the weights: it begins with the engine's next step"
            return named if self._names else self._off_reason
        if self.is_bypassed:
            return "an operator has switched it off"
        return self._breaker.reason

    def close(self) -> None:
        """End the lookups, and begin no op any more; requests wait for nothing. What is under way on the ranks is
        theirs, and so is what `take_plans` has yet to give them. Waits until the client is closed. Idempotent."""
        with self._beginning:
            if not self._is_closed:
                self._session.on_stored = None
            self._is_closed = True
        self._lookups.close()
