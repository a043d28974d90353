"""A replay over several nodes in this process, each with a pool of its own, which share the store of a fleet tier."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace

from kvstow.config import EngineConfig
from kvstow.control.tiersettings import TierSettings
from kvstow.tier.store import TierStore
from kvstow.tier.tierstatus import TierCounters, TierStatus
from kvstow_service.replay.driver import ReplayDriver, check_fits
from kvstow_service.replay.offload import EmbeddedOffload, Offload, PoolFigures
from kvstow_service.replay.pace import ReplayOptions
from kvstow_service.replay.result import ReplayResult, Tally
from kvstow_service.replay.router import Router, Routing
from kvstow_service.replay.session import Session, local_session
from kvstow_service.replay.shapes import Shape
from kvstow_service.replay.tieredoffload import TieredOffload, fingerprint_of, tiered_offload
from kvstow_service.replay.trace import TraceRequest
from kvstow_service.tiers.tierhost import TierChoice


class TraceClock:
    """The time of the trace, in seconds: that of the request that was started last."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True, slots=True)
class Node:
    """One node. `requests` grows while the trace goes on."""

    session: Session
    offload: Offload
    driver: ReplayDriver
    requests: list[TraceRequest]

    def serve(self, request: TraceRequest, stop: threading.Event) -> None:
        """Returns when the request is finished and what it stored is in the tier."""
        self.requests.append(request)
        self.driver.run(stop)
        if isinstance(self.offload, TieredOffload):
            self.offload.settle(stop)


class Fleet:
    """One dispatcher in the order of the trace, and one request at a time, so that figures repeat."""

    def __init__(self, nodes: Sequence[Node], routing: Routing, clock: TraceClock) -> None:
        self.nodes, self._clock = nodes, clock
        self._router = Router(len(nodes), routing, lambda node, keys: nodes[node].session.engine.lookup(keys))

    def run(
        self,
        requests: Sequence[TraceRequest],
        stop: threading.Event,
        on_request: Callable[[int], None] | None = None,
    ) -> ReplayResult:
        """Replay to the end, or until `stop` is set. Returns the figures of all nodes together."""
        started = time.monotonic()
        for number, request in enumerate(requests, start=1):
            if stop.is_set():
                break
            self._clock.now = request.timestamp / 1000
            self.nodes[self._router.node_for(request)].serve(request, stop)
            if on_request is not None:
                on_request(number)
        total = Tally()
        for node in self.nodes:
            total.add(node.driver.tally)
        figures = _together([node.offload.figures() for node in self.nodes])
        ranks = len(self.nodes[0].session.workers)
        return total.freeze(figures, seconds=time.monotonic() - started, ranks=ranks)


def _together(figures: Sequence[PoolFigures]) -> PoolFigures:
    tiers = [one.tier for one in figures if one.tier is not None]
    return PoolFigures(
        sum(one.slots for one in figures),
        figures[0].policy,
        sum(one.evicted_blocks or 0 for one in figures),
        _sum(tiers) if tiers else None,
    )


def _sum(tiers: Sequence[TierStatus]) -> TierStatus:
    """That of the node that has fetched most, with the counters and queues of all."""
    busiest = max(tiers, key=lambda one: one.counters.fetched_blocks)
    names = [field.name for field in fields(TierCounters)]
    counters = TierCounters(*[sum(getattr(one.counters, name) for one in tiers) for name in names])
    queues = ("putting_blocks", "fetching_blocks", "waiting_blocks", "dropped_blocks", "opened")
    return replace(busiest, counters=counters, **{name: sum(getattr(one, name) for one in tiers) for name in queues})


@contextmanager
def local_fleet(
    config: EngineConfig,
    num_nodes: int,
    routing: Routing,
    store: TierStore | None,
    settings: TierSettings,
    options: ReplayOptions,
    *,
    kv_blocks: int,
    requests: Sequence[TraceRequest],
    stop: threading.Event,
    shape: Shape,
    on_pinned: Callable[[int], None] | None = None,
) -> Iterator[Fleet]:
    """Nodes with ranks in this process; `config` and `kv_blocks` are those of each node. Raises what `local_session`
    raises, and `InvalidRequestError` for a request that does not fit the KV cache."""
    check_fits(requests, kv_blocks)
    clock = TraceClock()
    fingerprint = fingerprint_of(shape, config.num_ranks)
    with ExitStack() as stack:
        nodes = []
        for _ in range(num_nodes):
            session = stack.enter_context(
                local_session(
                    config, kv_blocks=kv_blocks, stop=stop, shape=shape, on_pinned=on_pinned, shared=store is not None
                )
            )
            offload: Offload = EmbeddedOffload(session.engine)
            wait = None
            if store is not None:
                tiered = stack.enter_context(
                    tiered_offload(
                        session.engine,
                        session.ranks,
                        TierChoice(store.name, store, settings.write),
                        settings,
                        fingerprint,
                        stop=stop,
                        hint_clock=clock,
                    )
                )
                offload, wait = tiered, tiered.wait
            served: list[TraceRequest] = []
            driver = ReplayDriver(offload, session.workers, session.kv, served, options, kv_blocks=kv_blocks, wait=wait)
            nodes.append(Node(session, offload, driver, served))
        yield Fleet(nodes, routing, clock)
