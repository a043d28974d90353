"""The scheduler's part of the fleet tier, under an embedded engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from kvstow.attach.identity import FleetWeights, NamespaceIdentity, PoolIdentity
from kvstow.control.engine import OffloadEngine
from kvstow.control.fleettier import FleetTier, TierWait
from kvstow.tier.fingerprint import Fingerprint, fingerprint, named_weights
from kvstow_service.connectors.engine_core.prefillmeter import PrefillMeter, ScheduledStep
from kvstow_service.connectors.engine_core.stepplan import TierPlan
from kvstow_service.connectors.engine_core.tierwaits import TierWaits

logger = logging.getLogger("kvstow.vllm")

_LEAST_TOKENS = 256
"""Of a step that says how fast prompts are computed, or half of the tokens that a step may have."""

T = TypeVar("T")


class TierIdentity(NamedTuple):
    """What an engine's blocks are, on every node. `weights`: as they were loaded."""

    pool: PoolIdentity
    namespace: NamespaceIdentity
    weights: FleetWeights

    def fingerprint(self) -> Fingerprint:
        return fingerprint(self.pool, self.namespace, self.weights)

    def named(self, weights_id: str) -> Fingerprint:
        """With other weights, that a user calls so on all nodes."""
        return fingerprint(self.pool, self.namespace, named_weights(weights_id, self.namespace.model))


class EngineTier:
    """Drives a `FleetTier` with vLLM's steps. Used by the scheduler's thread.

    No call waits for the store, and none raises: after an error, which is a defect, there is no tier any more.
    """

    def __init__(
        self,
        engine: OffloadEngine,
        fleet: FleetTier,
        max_step_tokens: int,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`max_step_tokens`: that vLLM computes in one step."""
        self.fleet = fleet
        self.waits = TierWaits(engine, self)
        self.has_failed = False
        self._engine = engine
        self._meter = PrefillMeter(min(_LEAST_TOKENS, max_step_tokens // 2), clock)
        self._number = 0

    # -- for each step --------------------------------------------------------------------------------------

    def plan(self, step: ScheduledStep) -> TierPlan | None:
        """What starts with this step. Call it once a step."""
        return self._safely("plan of a step", lambda: self._plan(step), None)

    def _plan(self, step: ScheduledStep) -> TierPlan:
        self._number += 1
        self._meter.planned(self._number, step)
        boots = self._engine.boot_ids()  # before the ops are taken: a rank that restarts later refuses them
        self.fleet.step()
        return TierPlan(self._number, boots, tuple(self.fleet.take_plans()))

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

    @property
    def wants_steps(self) -> bool:
        """Whether something is under way whose end steps bring, or something can be put."""
        return self._safely("work", lambda: not self.fleet.is_idle, otherwise=False)

    # -- for requests ---------------------------------------------------------------------------------------

    def look_for(self, keys: Sequence[bytes]) -> TierWait | None:
        return self._safely("look-up", lambda: self.fleet.look_for(keys), None)

    def is_over(self, wait: TierWait) -> bool:
        return self._safely("wait of a request", lambda: self.fleet.is_over(wait), otherwise=True)

    def note_used(self, keys: Sequence[bytes]) -> None:
        self._safely("use of blocks", lambda: self.fleet.note_used(keys), None)

    # -- for hosts ------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Keys mean other bytes from now on."""
        self._safely("reset", self.fleet.reset, None)

    def close(self) -> None:
        """Waits for a look-up under way, which its client gives up. Idempotent."""
        self.waits.forget_all()
        self.fleet.close()

    def _safely(self, what: str, call: Callable[[], T], otherwise: T) -> T:
        if self.has_failed:
            return otherwise
        try:
            return call()
        except Exception:
            self.has_failed = True
            logger.exception("%s: the fleet tier has failed; vLLM serves without it until it restarts", what)
            return otherwise
