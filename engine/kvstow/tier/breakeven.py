"""Whether reading blocks from the store below the pool pays: its expected time against that of computing them."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import NamedTuple

from kvstow.prefill import PrefillCost, PromptPart
from kvstow.tier.blockstore import Expectation

FIRST_PROBE_SECONDS, PROBE_SECONDS = 1.0, 30.0
"""The first and the longest time between reads that only measure the store while no read pays. Each time is twice the
one before."""
PROBE_BLOCKS = 16
GATE = 0.8
"""Reads begin when they are expected to take less than this share of the time to compute."""
_RECENT_BLOCKS = 64
"""About how many of the last blocks that were read say how many of the next ones will come."""


class Estimate(NamedTuple):
    """Whether a read pays, and the reason. Times are in seconds, and None if they have not been measured yet."""

    read_seconds: float | None
    compute_seconds: float | None
    pays: bool
    reason: str


class BreakEven:
    """Knows what prompts cost the engines of a namespace, and decides whether reads pay. Not locked.

    The store says how long a read would take, with everything that is queued before it. So a store that is fast enough
    for some requests is used for as many as it can serve, and the others compute. A store that loses blocks saves only
    the share that comes. While no read pays, nothing measures the store, so a few blocks are read now and then, for
    which no request waits.
    """

    def __init__(self, block_tokens: int | None, clock: Callable[[], float]) -> None:
        """`block_tokens`: by how many tokens each block lengthens a hit; None if that is unknown. Then every read
        pays."""
        self._block_tokens, self._clock = block_tokens, clock
        self.prefill: PrefillCost | None = None
        """The cost of computing prompts. None until an engine has reported it, and until then every read pays."""
        self.last: Estimate | None = None
        self._arriving = 1.0
        """Which share of the blocks that were read lately has come, and was intact."""
        self._probe_at = -inf
        self._probe_pause = FIRST_PROBE_SECONDS

    @property
    def may_pay(self) -> bool:
        """Whether the last decision was for a read, or there was none. Otherwise no request waits for the answer of a
        store that cannot say at once what it has."""
        return self.last is None or self.last.pays

    def compute_seconds(self, blocks: int, behind: int = 0) -> float | None:
        """Return the seconds that it takes to compute `blocks` blocks that follow `behind` others of their prompt. None
        if that is unknown."""
        size = self._block_tokens
        if self.prefill is None or size is None:
            return None
        return self.prefill.seconds(PromptPart.between(behind * size, (behind + blocks) * size))

    def decide(self, expected: Expectation, read: int, computed: int, behind: int = 0) -> Estimate:
        """Decide whether to read `read` blocks instead of computing `computed` blocks, which follow `behind` others of
        their prompt. `expected`: how long the store expects the read to take."""
        compute, seconds = self.compute_seconds(computed, behind), expected.seconds
        if compute is None:
            estimate = Estimate(seconds, None, True, "the prefill speed is not known")
        elif seconds is None:
            estimate = Estimate(None, compute, False, "the store has not been measured yet")
        else:
            pays = seconds < GATE * compute * self._arriving
            queued = f", {expected.queued_seconds:.3f} s of it in the queue" if expected.queued_seconds else ""
            lost = "" if self._arriving > 0.99 else f", but only {self._arriving:.0%} of the blocks read lately came"
            estimate = Estimate(
                seconds,
                compute,
                pays,
                f"{read} blocks take {seconds:.3f} s to read{queued}, and {compute:.3f} s to compute{lost}: "
                f"reading them {'pays' if pays else 'does not pay'}",
            )
        if estimate.pays:
            self._probe_pause = FIRST_PROBE_SECONDS
        self.last = estimate
        return estimate

    def note_read(self, come: int, lost: int) -> None:
        """Note that of the blocks that were read, `come` have come and `lost` have not. A store that loses what it
        should have costs the time of its reads and saves nothing."""
        if come + lost:
            keep = (1 - 1 / _RECENT_BLOCKS) ** (come + lost)
            self._arriving = keep * self._arriving + (1 - keep) * come / (come + lost)

    def wants_probe(self) -> bool:
        """Whether to measure the store now, by a read of `PROBE_BLOCKS` for which no request waits. Call this when a
        read does not pay."""
        now = self._clock()
        if now < self._probe_at:
            return False
        self._probe_at = now + self._probe_pause
        self._probe_pause = min(PROBE_SECONDS, 2 * self._probe_pause)
        return True
