"""The scheduler's part of the fleet tier, under an embedded engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from kvstow.control.engine import OffloadEngine
from kvstow.control.fleettier import FleetTier, TierWait
from kvstow.messages import TierCompletion, TierOp
from kvstow.tier.fingerprint import TIER_FAILED, WEIGHTS_CHANGED, Fingerprint
from kvstow_service.connectors.engine_core.prefillmeter import LEAST_TOKENS, PrefillMeter, ScheduledStep
from kvstow_service.connectors.engine_core.tierwaits import TierWaits

logger = logging.getLogger("kvstow.vllm")

NO_REQUEST = "not_identified: the engine has had no request yet"
"""Why a tier is off at first."""

T = TypeVar("T")


class EngineTier:
    """Drives a `FleetTier` with vLLM's steps. Used by the scheduler's thread.

    No call waits for the store, and none raises: after an error, which is a defect, the tier is off.
    """

    def __init__(
        self,
        engine: OffloadEngine,
        fleet: FleetTier,
        max_step_tokens: int,
        *,
        identify: Callable[[], Fingerprint] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`max_step_tokens`: that vLLM computes in one step. `identify`: what the first request asks for, if `fleet`
        has no fingerprint yet."""
        self._engine, self.fleet = engine, fleet
        self.waits = TierWaits(engine, self)
        self.has_failed = False
        self.has_had_request = False
        """So vLLM has its block hashes."""
        self._identify = identify
        self._meter = PrefillMeter(min(LEAST_TOKENS, max_step_tokens // 2), clock)
        self._known = Fingerprint(None, WEIGHTS_CHANGED)
        """After a failure: what the next tier goes on from."""
        self._is_closed = False

    def go_on_from(self, before: EngineTier) -> None:
        """The same engine had another store before: what is known of its weights stays."""
        self.has_had_request, self._identify = before.has_had_request, before._identify
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
        """Transfers have ended: requests that wait for them go on with the next step."""
        self._safely("transfers that have ended", self.fleet.step, None)
        if self.has_failed:
            self._end_plans()  # a put goes on with rank 0 when all others have ended

    @property
    def wants_steps(self) -> bool:
        """Whether something is under way whose end steps bring, or something can be put."""
        if self.has_failed:
            return self.fleet.traffic.in_flight > 0
        return not self._is_closed and self._safely("work", lambda: not self.fleet.is_idle, otherwise=False)

    # -- for requests ---------------------------------------------------------------------------------------

    def look_for(self, keys: Sequence[bytes], first: int) -> TierWait | None:
        return self._safely("look-up", lambda: self._look_for(keys, first), None)

    def _look_for(self, keys: Sequence[bytes], first: int) -> TierWait | None:
        self.has_had_request = True
        identify, self._identify = self._identify, None
        if identify is not None:
            found = identify()
            if found.value is None:
                logger.warning("the fleet tier is off: %s", found.reason)
                self.fleet.reset(found.reason)
            else:
                self.fleet.begin_epoch(found.value)
        return self.fleet.look_for(keys, first)

    def is_over(self, wait: TierWait) -> bool:
        return self._safely("wait of a request", lambda: self.fleet.is_over(wait), otherwise=True)

    def note_used(self, keys: Sequence[bytes]) -> None:
        self._safely("use of blocks", lambda: self.fleet.note_used(keys), None)

    # -- for hosts ------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Keys mean other bytes from now on."""
        self._identify, self._known = None, Fingerprint(None, WEIGHTS_CHANGED)
        self._safely("reset", self.fleet.reset, None)

    def leave(self) -> None:
        """Another tier takes over, and requests stop waiting for this one. Does not wait; the owner of `fleet` closes
        it."""
        self._is_closed = True
        self.waits.forget_all()

    def close(self) -> None:
        """`leave`, and close `fleet`. Waits for a look-up under way, which its client gives up. Idempotent."""
        self.leave()
        self.fleet.close()

    def fail(self, what: str) -> None:
        """Go on without the tier, because of the exception that is being handled. It logs the first one, and ends the
        transfers that no rank has been given. Never raises."""
        if self.has_failed:
            return
        self.has_failed = True
        logger.exception("%s: the fleet tier has failed; vLLM serves without it", what)
        with suppress(Exception):  # its state may be broken
            self._known = Fingerprint(self.fleet.fingerprint, self.fleet.status().reason)
            self.fleet.reset(TIER_FAILED)
        self._end_plans()

    def _end_plans(self) -> None:
        """What has begun, and no rank will be given, has failed: its slots are free again."""
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
