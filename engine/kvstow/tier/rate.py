"""How fast a store is, as measured, how long a call may take, and whether a fetch pays: its estimated time against that
of computing the same blocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import inf
from typing import NamedTuple

from kvstow.prefill import PrefillCost, PromptPart, weighted_median

_RECENT = 9
_FIRST_GUESS = 50e6
"""Bytes per second, for timeouts before anything was measured."""
_BASE_TIMEOUT = 0.5
_SLOWER = 4.0
"""A call may be so many times slower than the recent ones."""
_LONGEST_TIMEOUT = 30.0
"""A few small calls, whose time is latency, must not give a large one minutes."""


class RecentRate:
    """Bytes, or tokens, per second: the median of the last calls, each weighted with its amount. One slow call among
    fast ones does not change it, and neither do small calls, whose time is mostly latency. Not locked."""

    def __init__(self) -> None:
        self._calls: deque[tuple[float, int]] = deque(maxlen=_RECENT)
        self.per_second: float | None = None
        """None before the first measurement."""

    def observe(self, amount: int, seconds: float) -> None:
        """A call has moved, or computed, so many."""
        if amount > 0 and seconds > 0:
            self._calls.append((amount / seconds, amount))
            self.per_second = weighted_median(self._calls)

    def timeout(self, amount: int) -> float:
        """Seconds after which a call that moves so many is given up."""
        return min(_LONGEST_TIMEOUT, _BASE_TIMEOUT + _SLOWER * amount / (self.per_second or _FIRST_GUESS))


FIRST_PROBE_SECONDS, PROBE_SECONDS = 1.0, 30.0
"""Between fetches that only measure the store, while no fetch pays: at first, and at most. Each time is twice the one
before."""
PROBE_BLOCKS = 16
_ENTER, _LEAVE = 0.8, 1.0
"""Fetches begin when they take less than this share of the time to compute, and end above the other one."""
_LOOKUP_WEIGHT = 0.2


class Estimate(NamedTuple):
    """Times are in seconds; None: not measured yet."""

    fetch_seconds: float | None
    compute_seconds: float | None
    pays: bool
    reason: str


class BreakEven:
    """Measures the store, and decides. Not locked: one thread uses it.

    The decision has hysteresis, so a store near break-even does not switch on and off with every request. While fetches
    do not pay, nothing else measures the store, so a few blocks are fetched now and then, for which no request waits.
    """

    def __init__(
        self, slot_bytes: int, block_tokens: int | None, clock: Callable[[], float], prefill_rate: float | None = None
    ) -> None:
        """`prefill_rate`: tokens per second, if the host knows it; else engines tell what prompts cost, and until then
        every fetch pays."""
        self._slot_bytes, self._block_tokens, self._clock = slot_bytes, block_tokens, clock
        self._prefill_is_known = prefill_rate is not None
        self.prefill: PrefillCost | None = None if prefill_rate is None else PrefillCost(1 / prefill_rate)
        self.rate = RecentRate()
        """Of fetches, on the slowest rank."""
        self.lookup_seconds: float | None = None
        self.pays = True
        self._probe_at = -inf
        self._probe_pause = FIRST_PROBE_SECONDS

    @property
    def may_pay(self) -> bool:
        """Whether `decide` may find that a fetch pays. Otherwise no request needs to wait for the store's answer."""
        return self.pays and (self.rate.per_second is not None or self.compute_seconds(1) is None)

    def note_fetch(self, blocks: int, seconds: float) -> None:
        """So many blocks were fetched on every rank."""
        self.rate.observe(blocks * self._slot_bytes, seconds)

    def note_lookup(self, seconds: float) -> None:
        known = self.lookup_seconds
        self.lookup_seconds = seconds if known is None else (1 - _LOOKUP_WEIGHT) * known + _LOOKUP_WEIGHT * seconds

    def note_prefill(self, cost: PrefillCost) -> None:
        """So much it costs an engine to compute prompts."""
        if not self._prefill_is_known:
            self.prefill = cost

    def compute_seconds(self, blocks: int, behind: int = 0) -> float | None:
        """To compute so many blocks, which come behind `behind` others of their prompt."""
        size = self._block_tokens
        if self.prefill is None or size is None:
            return None
        return self.prefill.seconds(PromptPart.between(behind * size, (behind + blocks) * size))

    def decide(self, fetched: int, computed: int, queued: int, behind: int = 0) -> Estimate:
        """Whether to fetch `fetched` blocks, after `queued` ones, instead of computing `computed` ones, which come
        behind `behind` others of their prompt."""
        compute = self.compute_seconds(computed, behind)
        if compute is None:
            return Estimate(None, None, True, "the prefill speed is not known")
        rate = self.rate.per_second
        if rate is None:
            return Estimate(None, compute, False, "the store has not been measured yet")
        fetch = (self.lookup_seconds or 0.0) + (fetched + queued) * self._slot_bytes / rate
        self.pays = fetch < (_LEAVE if self.pays else _ENTER) * compute
        if self.pays:
            self._probe_pause = FIRST_PROBE_SECONDS
        verdict = "pays" if self.pays else "does not pay"
        reason = f"{fetched} blocks take {fetch:.3f} s to fetch and {compute:.3f} s to compute: a fetch {verdict}"
        return Estimate(fetch, compute, self.pays, reason)

    def wants_probe(self) -> bool:
        """Whether to measure the store now, with a fetch of `PROBE_BLOCKS` for which nothing waits. Ask when a fetch
        does not pay."""
        now = self._clock()
        if now < self._probe_at:
            return False
        self._probe_at = now + self._probe_pause
        self._probe_pause = min(PROBE_SECONDS, 2 * self._probe_pause)
        return True
