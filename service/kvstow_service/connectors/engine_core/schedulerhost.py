"""The scheduler's half as vLLM's process hosts it: the common part of embedded and attached engines."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from kvstow.attach.hello import NO_HOLD, GateHold, SessionTicket
from kvstow_service.admin.agent import AdminAddress
from kvstow_service.connectors.engine_core.adapters import Adapters, EngineStart
from kvstow_service.connectors.engine_core.controlplane import ControlPlane
from kvstow_service.connectors.engine_core.gpublocks import BlockPool
from kvstow_service.connectors.engine_core.kvevents import BlockSource, EventFeed, event_feed
from kvstow_service.connectors.engine_core.kvgroups import KVGroups
from kvstow_service.connectors.engine_core.loadpolicy import LEAST_TOKENS, LoadPolicy
from kvstow_service.connectors.engine_core.metadata import RankHello, RankUpdate
from kvstow_service.connectors.engine_core.metricsexport import StatsFeed
from kvstow_service.connectors.engine_core.options import ConnectorOptions
from kvstow_service.connectors.engine_core.schedulerside import STEP_BLOCKS, SchedulerSide
from kvstow_service.connectors.engine_core.stepplan import PlannedStep
from kvstow_service.connectors.engine_core.vllmprocess import VLLMProcess, adapter_folders, process_start

logger = logging.getLogger("kvstow.vllm")

T = TypeVar("T")
EXPECTING_SECONDS = 10.0
"""For which an engine that has just started makes steps until its ranks have introduced themselves."""
_NO_CHANGES: Mapping[int, int] = {}


class EngineSetup(NamedTuple):
    """What a scheduler's half knows of its engine from the start. `vllm_config` and `kv_cache_config` are vLLM's.
    `by_layer`: whether ranks can load layer by layer. `packages`: those besides vLLM whose versions are shown."""

    options: ConnectorOptions
    process: VLLMProcess
    groups: KVGroups
    vllm_config: Any
    kv_cache_config: Any
    by_layer: bool = True
    packages: Sequence[str] = ("torch",)
    clock: Callable[[], float] = time.monotonic


class SchedulerHost(ABC):
    """Makes the scheduler side and what it needs as soon as every rank has reported its slot size.

    Used by the scheduler's thread. Until then, every request is a miss.
    """

    _lazy_steps = 2
    """Lazy stores look ahead as far as this many steps can evict, because a store holds its GPU blocks that long."""

    def __init__(self, setup: EngineSetup) -> None:
        """Starts nothing."""
        self.side: SchedulerSide | None = None
        """The scheduler side; None until every rank is known."""
        self.stats: StatsFeed
        """The statistics, which are made with the side."""
        self._setup = setup
        self._pool: BlockPool | None = None
        self._hellos: dict[int, RankHello] = {}
        self._has_failed = False
        self.calls_asked: Callable[[], int] = lambda: 0
        """How many calls by name that may change weights this process has sent to the ranks."""
        self._weights_changed = self._unheard = ""
        self._thread = threading.get_ident()
        self._weight_changes: dict[int, int] = {}  # calls that ranks have noticed by themselves, by rank
        self._expecting_until: float | None = None
        self.num_ranks = setup.process.num_ranks
        """How many ranks there are, if vLLM's configuration does not have it. 0 until a rank has reported it."""

    # What hosts differ in.

    @abstractmethod
    def _make_side(self, pool: BlockPool, hellos: list[RankHello]) -> SchedulerSide | None:
        """Make the scheduler side and the `stats`. `hellos` are those of all ranks, in order. Returns None, after
        logging why, if there can be no offload."""

    @abstractmethod
    def close(self) -> None:
        """Idempotent; vLLM does not always call it."""

    @property
    def address_for_ranks(self) -> AdminAddress | None:
        """The admin server's address, for agents that do not find the engine on their own host."""
        return None

    @property
    def ticket(self) -> SessionTicket | None:
        """The ticket of the session with the node service, for the workers."""
        return None

    def hold_of(self, plan: PlannedStep | None) -> GateHold:
        """The hold that is sent to the ranks with this step. Call this once for each step."""
        return NO_HOLD

    @property
    def wants_steps(self) -> bool:
        """Whether vLLM should make steps although it has no requests, for reasons other than transfers. Beside another
        connector the ranks introduce themselves with a step, so an engine that has just started makes some: the pool
        and the admin server then do not wait for the first request."""
        if self.side is not None or self._has_failed:
            return False
        if self._expecting_until is None:  # vLLM's start has ended
            self._expecting_until = self._setup.clock() + EXPECTING_SECONDS
        return self._setup.clock() < self._expecting_until

    # What they have in common.

    def bind(self, pool: BlockPool) -> None:
        self._pool = pool
        self._make_when_known()

    def weights_may_change(self, reason: str) -> None:
        """Called before a call that may change the weights of the running engine. From now on the engine shares nothing
        with others, and forgets its own blocks too, now and whenever vLLM empties the GPU's cache. `reason` is a
        sentence. Never raises. A call of another thread than the scheduler's counts at the scheduler's next hook."""
        if threading.get_ident() != self._thread:
            self._unheard = reason
            return
        try:
            if not self._weights_changed:
                logger.warning("this engine shares no blocks with others from now on: %s", reason)
                self._follow_resets()
            self._weights_changed = reason
        except Exception as error:  # noqa: BLE001 - vLLM must go on
            self._fail("change of weights", error)
        self._forget()

    def expected_weight_changes(self) -> Mapping[int, int]:
        """How many such calls each rank has noticed, as far as this half knows."""
        if not ((asked := self.calls_asked()) or self._weight_changes):
            return _NO_CHANGES
        return {rank: asked + self._weight_changes.get(rank, 0) for rank in range(self.num_ranks)}

    def _forget(self) -> None:
        self.ask("change of weights", lambda side: side.reset(self._weights_changed), False)

    def _follow_resets(self) -> None:
        """Also forget blocks whenever vLLM empties only the GPU's cache, of which it does not tell the connector."""
        if self._pool is None:
            return
        reset = self._pool.reset_prefix_cache

        def reset_and_forget() -> bool:
            is_reset = reset()
            if is_reset:
                self._forget()
            return is_reset

        self._pool.reset_prefix_cache = reset_and_forget  # type: ignore[method-assign]

    def add_rank(self, hello: RankHello) -> None:
        self._hellos.setdefault(hello.rank, hello)
        self.num_ranks = hello.num_ranks or self.num_ranks
        self._make_when_known()

    def ask(self, what: str, call: Callable[[SchedulerSide], T], otherwise: T, *, admits: bool = False) -> T:
        """The result of `call`. Returns `otherwise` while a rank is unknown, or if `call` raises. The error would end
        vLLM's process, so vLLM continues without offload. Log, counter and readiness report that the error occurred in
        `what`. `admits`: whether the call is between a lookup and the admission of its request. A change of weights
        that another thread has noticed has to wait then, because it would take away a load by layer that is
        promised."""
        if self.side is None:
            return otherwise
        if self._unheard and not admits:
            reason, self._unheard, self._thread = self._unheard, "", threading.get_ident()
            self.weights_may_change(reason)
        try:
            return call(self.side)
        except Exception as error:  # noqa: BLE001 - vLLM must go on
            self._fail(what, error)
            return otherwise

    def receive(self, rank: int, update: RankUpdate) -> None:
        """Process what a rank sends after a step. Never raises."""
        try:
            self._process_update(rank, update)
        except Exception as error:  # noqa: BLE001 - vLLM must go on
            self._fail(f"update of rank {rank}", error)

    def _process_update(self, rank: int, update: RankUpdate) -> None:
        if update.hello is not None:
            self.add_rank(update.hello)
        if self.side is None:
            return
        if update.layers_off is not None:
            self.side.policy.off = f"rank {rank}: {update.layers_off}"
        for boot_id, completions in update.completions:
            self.side.measure(completions)
            self.side.control.complete(rank, boot_id, completions)
        if update.weight_changes is not None:
            noticed, reason = update.weight_changes
            own = noticed - self.calls_asked()
            if own > self._weight_changes.get(rank, 0):
                self._weight_changes[rank] = own
                self.weights_may_change(reason)
        if update.timed_step:
            self.side.step_ended(update.timed_step)

    def _fail(self, what: str, error: Exception) -> None:
        if not self._has_failed:
            logger.error("%s: KVStow has failed; vLLM serves without offload until it restarts", what, exc_info=error)
        self._has_failed = True
        if self.side is None:
            return
        self.side.control.fail(f"{what}: {error!r}")
        try:  # vLLM may be waiting for the GPU blocks of stores whose end is no longer reported
            self.side.release_gpu_blocks()
        except Exception:
            logger.exception("some GPU blocks stay referenced until vLLM restarts")

    def _make_when_known(self) -> None:
        if self.side is not None or self._pool is None or len(self._hellos) < max(1, self.num_ranks):
            return
        if self._has_failed:  # the same error would come at every step
            return
        self.side = self._make_side(self._pool, [self._hellos[rank] for rank in range(self.num_ranks)])
        if self._weights_changed:
            self._forget()

    def _event_feed(self, source: BlockSource) -> EventFeed | None:
        specs = [group.kv_cache_spec for group in self._setup.kv_cache_config.kv_cache_groups]
        return event_feed(self._setup.vllm_config, source, specs)

    @property
    def lost_blocks(self) -> int:
        return 0 if self.side is None else self.side.lost_blocks

    def _new_side(self, control: ControlPlane, pool: BlockPool, events: EventFeed | None) -> SchedulerSide:
        options, process, groups = self._setup.options, self._setup.process, self._setup.groups
        # A load within a step was tried as vLLM's only connector.
        is_alone = all(hello.is_alone for hello in self._hellos.values())
        is_possible = self._setup.by_layer and groups.are_attention and process.may_load_by_layer and is_alone
        if options.load_path == "layer" and not is_possible:
            logger.warning(
                "load_path is 'layer', and this engine loads before the step: loads by layer need a model with "
                "attention alone and one pipeline stage, and no drafter, micro-batches, sleep mode or other connector"
            )
        policy = LoadPolicy(
            options.load_path,
            options.load_step_budget,
            control.slot_bytes,
            is_possible=is_possible,
            block_tokens=groups.alignment,
            least_tokens=min(LEAST_TOKENS, process.max_batched_tokens // 2),
        )
        return SchedulerSide(
            control,
            groups,
            pool,
            lazy_blocks=self._lazy_steps * self._blocks_per_step if options.lazy_offload else None,
            events=events,
            observe=self.stats.observe,
            step_blocks=self._step_blocks,
            drafts=process.drafts,
            adapters=None if process.lora_settings is None else self._make_adapters(process.lora_settings),
            policy=policy,
        )

    def _make_adapters(self, settings: str) -> Adapters:
        """Make the adapters, before vLLM loads any."""
        folders = [Path(str(self._setup.vllm_config.model_config.model)), *adapter_folders()]
        return Adapters(settings, EngineStart.now(process_start(), folders))

    @property
    def _slot_tokens(self) -> int | None:
        groups = self._setup.groups
        return groups.alignment if len(groups.groups) == 1 else None

    @property
    def _blocks_per_step(self) -> int:
        """How many blocks one step can take from the GPU's free queue, or complete. These are the blocks of all its
        tokens, plus one for each request, whose tokens may begin in the middle of a block. Blocks that loads take are
        not included."""
        process, groups = self._setup.process, self._setup.groups
        # A probe (8 requests at once, 64 tokens a step) evicted at least 65 blocks. Lazy stores took 59 blocks without
        # those of requests, and 87 with them.
        sizes = [*(group.block_tokens for group in groups.groups), *groups.left_out]
        return sum(process.max_batched_tokens // size for size in sizes) + process.max_requests * len(sizes)

    @property
    def _step_blocks(self) -> int:
        return max(STEP_BLOCKS, 2 * self._blocks_per_step)
