"""The scheduler's part of the fleet tier, below an embedded engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol, TypeVar

from kvstow.control.engine import OffloadEngine
from kvstow.control.fleettier import FleetTier
from kvstow.control.tierneeds import Needs
from kvstow.control.tierwait import TierWait
from kvstow.messages import TierCompletion, TierOp
from kvstow.tier.fingerprint import TIER_FAILED, WEIGHTS_CHANGED, Fingerprint
from kvstow_service.connectors.engine_core.prefillmeter import LEAST_TOKENS, PrefillMeter, ScheduledStep
from kvstow_service.connectors.engine_core.tierwaits import TierWaits

logger = logging.getLogger("kvstow.vllm")

NO_REQUEST = "not_identified: the engine has had no request yet"
"""Why a new tier is off."""

T = TypeVar("T")


class Identity(Protocol):
    """What the engine's blocks are: see `TierIdentity`."""

    @property
    def is_final(self) -> bool: ...
    def fingerprint(self) -> Fingerprint: ...


class EngineTier:
    """Drives a `FleetTier` with vLLM's steps. Used by the scheduler's thread.

    No call waits for the store, and none raises. An error is a defect and turns the tier off.
    """

    def __init__(
        self,
        engine: OffloadEngine,
        fleet: FleetTier,
        max_step_tokens: int,
        *,
        identity: Identity | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`max_step_tokens`: how many tokens vLLM computes in one step at most. `identity`: asked with each request,
        from the first one on, if `fleet` has no fingerprint yet."""
        self._engine, self.fleet = engine, fleet
        self.waits = TierWaits(engine, self)
        self.has_failed = False
        self.has_had_request = False
        """From then on, vLLM has its block hashes."""
        self._identity = identity
        self._meter = PrefillMeter(min(LEAST_TOKENS, max_step_tokens // 2), clock)
        self._known = Fingerprint(None, WEIGHTS_CHANGED)
        """After a failure: the fingerprint with which the next tier starts."""
        self._is_closed = False

    def go_on_from(self, before: EngineTier) -> None:
        """Keep what `before`, the same engine's tier with another store, knew about the weights."""
        self.has_had_request, self._identity = before.has_had_request, before._identity
        fleet = before.fleet
        known = before._known if before.has_failed else Fingerprint(fleet.fingerprint, fleet.status().reason)
        if known.value is not None:
            self.fleet.begin_epoch(known.value)
        else:
            self.fleet.reset(known.reason)

    # -- for each step --------------------------------------------------------------------------------------

    def plan(self, number: int, step: ScheduledStep) -> tuple[tuple[int, TierOp], ...]:
        """What the ranks begin with this step. Call it once a step, with ascending numbers."""
        return self._safely("plan of a step", lambda: self._plan(number, step), ())

    def _plan(self, number: int, step: ScheduledStep) -> tuple[tuple[int, TierOp], ...]:
        self._meter.planned(number, step)
        self.fleet.step()
        return tuple(self.fleet.take_plans())

    def ended(self, number: int) -> None:
        """The step with this number has ended."""

        def note() -> None:
            prefill = self._meter.ended(number)
            if prefill is not None:
                self.fleet.break_even.note_prefill(prefill.tokens, prefill.seconds)

        self._safely("end of a step", note, None)

    def take_ended(self) -> None:
        """Handle ended transfers: requests that wait for them continue with the next step."""
        self._safely("transfers that have ended", self.fleet.step, None)
        if self.has_failed:
            self._end_plans()  # a put continues with rank 0 when all others have ended

    @property
    def wants_steps(self) -> bool:
        """Whether a transfer is under way whose end is reported by steps, or something can be put."""
        if self.has_failed:
            return self.fleet.traffic.in_flight > 0
        return not self._is_closed and self._safely("work", lambda: not self.fleet.is_idle, otherwise=False)

    # -- for requests ---------------------------------------------------------------------------------------

    def look_for(self, keys: Sequence[bytes], first: int, needs: Needs | None = None) -> TierWait | None:
        return self._safely("look-up", lambda: self._look_for(keys, first, needs), None)

    def _look_for(self, keys: Sequence[bytes], first: int, needs: Needs | None) -> TierWait | None:
        self.has_had_request = True
        if self._identity is not None:
            self._identify(self._identity)
        return self.fleet.look_for(keys, first, needs)

    def _identify(self, identity: Identity) -> None:
        if self.fleet.fingerprint is not None:
            self._identity = None  # an operator has named the weights
            return
        if identity.is_final:
            self._identity = None
        found = identity.fingerprint()
        if found.value is not None:
            self._identity = None
            self.fleet.begin_epoch(found.value)
        elif found.reason != self.fleet.status().reason:
            logger.warning("the fleet tier is off: %s", found.reason)
            self.fleet.reset(found.reason)

    def is_over(self, wait: TierWait) -> bool:
        return self._safely("wait of a request", lambda: self.fleet.is_over(wait), otherwise=True)

    def note_used(self, keys: Sequence[bytes]) -> None:
        self._safely("use of blocks", lambda: self.fleet.note_used(keys), None)

    # -- for hosts ------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Keys mean other bytes from now on."""
        self._identity, self._known = None, Fingerprint(None, WEIGHTS_CHANGED)
        self._safely("reset", self.fleet.reset, None)

    def leave(self) -> None:
        """Hand over to another tier: requests stop waiting for this one. Does not wait. The owner of `fleet` closes
        it."""
        self._is_closed = True
        self.waits.forget_all()

    def close(self) -> None:
        """`leave`, and close `fleet`. Waits for a look-up that is under way, which its client aborts. Idempotent."""
        self.leave()
        self.fleet.close()

    def fail(self, what: str) -> None:
        """Continue without the tier, because of the exception that is being handled. Logs the first one, and ends the
        transfers that no rank has received. Never raises."""
        if self.has_failed:
            return
        self.has_failed = True
        logger.exception("%s: the fleet tier has failed; vLLM serves without it", what)
        with suppress(Exception):  # its state may be broken
            self._known = Fingerprint(self.fleet.fingerprint, self.fleet.status().reason)
            self.fleet.reset(TIER_FAILED)
        self._end_plans()

    def _end_plans(self) -> None:
        """Fail the transfers that have begun and that no rank will receive, so that their slots are free again."""
        try:
            boots = self._engine.boot_ids()
            for rank, op in self.fleet.take_plans():
                boot_id = boots[rank]
                if boot_id is not None:
                    self._engine.complete(rank, boot_id, [TierCompletion(op.op_id, "failed", TIER_FAILED)])
        except Exception:
            logger.exception("transfers that have not begun keep their slots until vLLM restarts")

    def _safely(self, what: str, call: Callable[[], T], otherwise: T) -> T:
        if self.has_failed:
            return otherwise
        try:
            return call()
        except Exception:  # noqa: BLE001 - vLLM must go on
            self.fail(what)
            return otherwise
