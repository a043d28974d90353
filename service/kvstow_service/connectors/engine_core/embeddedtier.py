"""The fleet tier of an embedded engine. Operators attach and detach its store while vLLM runs."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from kvstow.control.engine import OffloadEngine
from kvstow.control.fleettier import FleetTier
from kvstow.control.tiersettings import TierSettings
from kvstow.errors import ConflictError
from kvstow.status import HOST_NAME
from kvstow.tier.fingerprint import TIER_FAILED
from kvstow.tier.store import LookupClient
from kvstow_api.tiercontrol import TierClient
from kvstow_service.connectors.engine_core.controlplane import EmbeddedControl
from kvstow_service.connectors.engine_core.enginetier import NO_REQUEST, EngineTier
from kvstow_service.connectors.engine_core.prefillmeter import ScheduledStep
from kvstow_service.connectors.engine_core.stepplan import TierPlan
from kvstow_service.connectors.engine_core.tieridentity import TierIdentity
from kvstow_service.connectors.engine_core.workerside import RankClient
from kvstow_service.tiers.tierhost import TierChoice, TierHost

logger = logging.getLogger("kvstow.vllm")

_END_SECONDS = 60.0
"""How long to wait for the transfers under way: a call to the store may take 30 s, and an op makes several calls."""
_TURN = 0.01


class _Opened(NamedTuple):
    """A store that is attached."""

    tier: EngineTier
    lookups: LookupClient


class _Order(NamedTuple):
    """A message from an operator's thread to the scheduler's. `tier`: the tier to use from now on; None for none.
    `url`: the URL for the ranks."""

    tier: EngineTier | None
    url: str


class EmbeddedTier:
    """Used by the scheduler's thread, except `end`, and `open` and `close`, which operators call (`TierClients`).

    An operator's order takes effect in the engine's next step. An engine without requests makes no steps, so its ranks
    connect, or close their clients, with its next request.
    """

    def __init__(
        self,
        engine: OffloadEngine,
        control: EmbeddedControl,
        identity: TierIdentity,
        *,
        model: str,
        max_step_tokens: int,
        replicated: bool,
        shares_memory: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Has no store until `begin` or `open`. `shares_memory`: other processes can map the ranks' pools."""
        self.host = TierHost(self)
        """What operators see and do with the tier."""
        self._engine, self._control, self._identity = engine, control, identity
        self._model, self._max_step_tokens = model, max_step_tokens
        self._replicated, self._shares_memory = replicated, shares_memory
        self._clock = clock
        self._orders: deque[_Order] = deque()
        self._opened: _Opened | None = None
        self._ending = threading.Event()
        # Of the scheduler's thread:
        self._tier: EngineTier | None = None
        self._url = ""
        self._number = 0
        self._rank_clients: dict[int, RankClient] = {}

    # -- for each step --------------------------------------------------------------------------------------

    @property
    def tier(self) -> EngineTier | None:
        """The current tier, or the last one."""
        return self._tier

    def begin(self, choice: TierChoice) -> None:
        """Start the engine with this store."""
        self.host.begin(choice)
        self.open(choice)
        self._take_orders()

    def plan(self, step: ScheduledStep) -> TierPlan | None:
        """What starts with this step. Call it once a step. Never raises. An error is a defect and turns the tier off;
        it then returns None, and the ranks keep their store."""
        try:
            return self._plan(step)
        except Exception:
            if self._tier is None:
                logger.exception("the plan of a step of the fleet tier has failed; vLLM serves without it")
            else:
                self._tier.fail("plan of a step")
            return None

    def _plan(self, step: ScheduledStep) -> TierPlan:
        self._take_orders()
        self._number += 1
        boots = self._engine.boot_ids()  # before the ops are taken: a rank that restarts later refuses them
        ops = () if self._tier is None else self._tier.plan(self._number, step)
        return TierPlan(self._number, boots, self._url, ops)

    def ended(self, number: int) -> None:
        """The step with this number has ended."""
        if self._tier is not None:
            self._tier.ended(number)

    @property
    def wants_steps(self) -> bool:
        """Whether a transfer is under way whose end is reported by steps, or something can be put."""
        return bool(self._orders) or (self._tier is not None and self._tier.wants_steps)

    def note_client(self, rank: int, client: RankClient) -> None:
        """Take what a rank says about its client."""
        self._rank_clients[rank] = client

    def _take_orders(self) -> None:
        while self._orders:
            order = self._orders.popleft()
            self._url = order.url
            if order.tier is None:
                continue
            before, self._tier = self._tier, order.tier
            self._rank_clients = {}
            self._control.use_tier(order.tier)
            if before is not None:
                order.tier.go_on_from(before)
                before.leave()  # `close` has closed its `FleetTier`

    # -- for operators --------------------------------------------------------------------------------------

    def open(self, choice: TierChoice) -> None:
        url = choice.url
        if url.startswith("mooncake:") and not self._shares_memory:
            raise ConflictError(
                "Mooncake's processes must map this engine's pool, which is memory of its own process; start vLLM with "
                "tier set to a mooncake:// URL"
            )
        lookups = choice.store.open_lookups()
        try:
            settings = TierSettings(write=choice.write, replicated=self._replicated)
            fleet = FleetTier(
                self._engine, lookups, settings, None, off_reason=NO_REQUEST, name=choice.store.name, clock=self._clock
            )
        except BaseException:
            lookups.close()
            raise
        tier = EngineTier(self._engine, fleet, self._max_step_tokens, identity=self._identity)
        opened = self._opened = _Opened(tier, lookups)
        self.host.add(
            fleet,
            pool=HOST_NAME,
            namespace=HOST_NAME,
            model=self._model,
            clients=lambda: self._clients(opened),
            fingerprint_of=self._fingerprint_of,
        )
        self._orders.append(_Order(tier, url))

    def close(self) -> None:
        opened = self._opened
        if opened is None:
            return
        fleet = opened.tier.fleet
        fleet.set_bypassed(True)
        self._wait_ended(fleet)
        self.host.remove(fleet)
        self._opened = None
        fleet.close()
        self._wait_ended(fleet)  # of what began in the same moment
        self._orders.append(_Order(None, ""))

    def _wait_ended(self, fleet: FleetTier) -> None:
        deadline = time.monotonic() + _END_SECONDS
        while fleet.traffic.in_flight and not self._ending.is_set():
            if time.monotonic() >= deadline:
                raise ConflictError("transfers are still under way; the store is bypassed: detach it again")
            self._ending.wait(_TURN)

    def end(self) -> None:
        """Call when vLLM ends and makes no more steps. Idempotent."""
        self._ending.set()
        self._identity.close()
        self.host.end()
        if self._tier is not None:
            self._tier.close()

    def _clients(self, opened: _Opened) -> list[TierClient]:
        ranks = self._rank_clients if self._opened is opened else {}
        return [
            *[TierClient(f"transfers of rank {rank}", *client) for rank, client in sorted(ranks.copy().items())],
            TierClient("look-ups", opened.lookups.health(), opened.lookups.stats()),
        ]

    def _fingerprint_of(self, weights_id: str) -> str:
        if self._tier is None or not self._tier.has_had_request:
            raise ConflictError(NO_REQUEST)
        if self._tier.has_failed:
            raise ConflictError(TIER_FAILED)
        found = self._identity.named(weights_id)
        if found.value is None:
            raise ConflictError(found.reason)
        return found.value
