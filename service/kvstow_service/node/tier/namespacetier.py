"""The fleet tier of one namespace of a pool, for all engines that use it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain
from typing import NamedTuple

from kvstow.control.fleettier import FleetTier, TierWait
from kvstow.control.tiersession import TierSession
from kvstow.tier.fingerprint import TIER_FAILED
from kvstow_service.node.pools.nodepool import KnownNamespace
from kvstow_service.node.tier.pooltier import PoolTier

logger = logging.getLogger("kvstow.tier")


class _Request(NamedTuple):
    wait: TierWait
    then: Callable[[], object]


class NamespaceTier:
    """Engines may be there or not: transfers are the node's, in a session of its own.

    `may_have_more`, `ask`, `note_used`, `note_prefill` and `note_stored` may be called from any thread, and wait for
    nothing. The rest is for the tier's thread, which alone uses the `FleetTier`.
    """

    def __init__(
        self,
        pool_tier: PoolTier,
        namespace: KnownNamespace,
        control: TierSession,
        do: Callable[[Callable[[], object]], object],
        wake: Callable[[], object],
        post: Callable[[Callable[[], object]], object],
    ) -> None:
        """`do`: has the tier's thread call something. `post`: the attach server's thread."""
        self.pool_tier, self.namespace, self.control = pool_tier, namespace, control
        self._do, self._wake, self._post = do, wake, post
        self.fleet: FleetTier | None = None
        """None until the tier's thread has made it, and after `fail`."""
        self.failed: FleetTier | None = None
        """It is shown, as off, but not used any more."""
        self.is_closed = False
        """No engine may use it any more."""
        self._early: deque[Sequence[bytes]] = deque(maxlen=1024)
        """Stored before `fleet` was made. Used with the pool's lock held."""
        self._requests: list[_Request] = []

    # -- for any thread -------------------------------------------------------------------------------------

    @property
    def may_have_more(self) -> bool:
        """Whether it is worth to ask. Without a lock: an outage may just have begun."""
        fleet = self.fleet
        return fleet is not None and fleet.may_fetch

    def ask(self, keys: Sequence[bytes], then: Callable[[], object]) -> None:
        """A request has these keys, not all of which are in the pool. `then` is called once, on the attach server's
        thread, when nothing more is to come for it."""
        self._do(lambda: self._begin(keys, then))

    def note_used(self, keys: Sequence[bytes], runs: Sequence[tuple[int, int]]) -> None:
        """A request has found these runs of its keys in the pool."""
        fleet = self.fleet
        if fleet is not None and runs:
            fleet.note_used(list(chain.from_iterable(keys[first : first + length] for first, length in runs)))

    def note_prefill(self, tokens: int, seconds: float) -> None:
        """An engine's model has computed so many tokens of prompts."""
        self._do(lambda: None if self.fleet is None else self.fleet.break_even.note_prefill(tokens, seconds))

    def note_stored(self, keys: Sequence[bytes]) -> None:
        """An engine has stored these blocks. Called with the pool's lock held."""
        if self.control.on_stored is not None:
            self.control.on_stored(keys)
            self._wake()
        else:
            self._early.append(keys)

    # -- the tier's thread ----------------------------------------------------------------------------------

    def begin(self, fleet: FleetTier) -> None:
        """From now on there is a tier."""
        with self.control.pool.lock:
            self.fleet = fleet
            while self._early and self.control.on_stored is not None:
                self.control.on_stored(self._early.popleft())

    def _begin(self, keys: Sequence[bytes], then: Callable[[], object]) -> None:
        wait = None
        try:
            wait = None if self.fleet is None else self.fleet.look_for(keys)
        except Exception as error:  # noqa: BLE001 - the request goes on with what the pool has
            self.fail(error)
        if wait is None:
            self._post(then)
        else:
            self._requests.append(_Request(wait, then))

    def step(self) -> None:
        """Take what has ended, answer the requests that need not wait any longer, and start what is due."""
        fleet = self.fleet
        if fleet is None:
            if self.failed is not None:
                with suppress(Exception):  # its state may be broken
                    self.pool_tier.submit(self, self.failed.take_plans())  # what has begun ends as usual
            return
        fleet.step()
        over = [one for one in self._requests if fleet.is_over(one.wait)]
        if over:
            self._requests = [one for one in self._requests if one.wait.state != "over"]
            for one in over:
                self._post(one.then)
        self.pool_tier.submit(self, fleet.take_plans())

    @property
    def next_deadline(self) -> float | None:
        """When a request goes on at the latest."""
        return min((one.wait.until for one in self._requests), default=None)

    @property
    def is_idle(self) -> bool:
        return self.fleet is None or self.fleet.is_idle

    @property
    def is_obsolete(self) -> bool:
        """Whether no engine will find the namespace's blocks again, and nothing is under way."""
        with self.control.pool.lock:
            namespace = self.control.namespace
            return (
                not len(self.control.ops)
                and not namespace.num_sessions
                and (namespace.is_dropped or namespace.is_empty)
            )

    def answer_all(self) -> None:
        """Let no request wait."""
        requests, self._requests = self._requests, []
        for one in requests:
            self._post(one.then)

    def fail(self, error: Exception) -> None:
        """A defect: this namespace goes on without the tier, and operators see why. Logs it."""
        logger.error("the tier of namespace %s has failed and is off", self.namespace.name, exc_info=error)
        self.control.on_stored = None
        if self.fleet is not None:
            self.failed, self.fleet = self.fleet, None
            with suppress(Exception):  # its state may be broken
                self.failed.reset(TIER_FAILED)
        self.answer_all()
