"""A replay of several nodes over one store, in which no byte is wrong, no slot leaks and no request fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Event

from kvstow.config import EngineConfig
from kvstow.control.tiersettings import TierSettings
from kvstow.stats import SlotCounts
from kvstow.tier.store import TierStore
from kvstow_service.replay.driver import blocks_needed
from kvstow_service.replay.fleet import Fleet, local_fleet
from kvstow_service.replay.pace import ReplayOptions
from kvstow_service.replay.result import ReplayResult
from kvstow_service.replay.router import Routing
from kvstow_service.replay.shapes import even_shape
from kvstow_service.replay.trace import TraceRequest

SLOT_BYTES = 512
PATIENT = TierSettings(deadline=60.0, lookup_wait=60.0)


def replay(
    requests: Sequence[TraceRequest],
    store: TierStore | None,
    settings: TierSettings = PATIENT,
    *,
    nodes: int = 3,
    slots: int = 60,
    slot_bytes: int = SLOT_BYTES,
    ranks: int = 1,
    routing: Routing = "prefix",
    prefill_rate: float | None = None,
    on_request: Callable[[Fleet, int], None] = lambda fleet, number: None,
) -> ReplayResult:
    config = EngineConfig(slot_bytes=slot_bytes, capacity_slots=slots, num_ranks=ranks, block_tokens=512)
    with local_fleet(
        config,
        nodes,
        routing,
        store,
        settings,
        ReplayOptions(prefill_rate=prefill_rate),
        kv_blocks=blocks_needed(requests, 1),
        requests=requests,
        stop=Event(),
        shape=even_shape(slot_bytes),
    ) as fleet:
        result = fleet.run(requests, Event(), lambda number: on_request(fleet, number))
        for node in fleet.nodes:
            node.session.engine.check_integrity()
            counts = node.session.engine.stats().pool.slots
            assert counts == SlotCounts(counts.free, 0, counts.cached, 0, 0, 0), "slots have leaked"
    # With messages: pytest explains the assertions of test modules alone.
    assert result.mismatches == 0, f"{result.mismatches} mismatches"
    assert result.verified_bytes == result.loaded_bytes, "bytes were loaded and not verified"
    assert (result.requests, result.failed_loads, result.failed_stores) == (len(requests), 0, 0), f"it failed: {result}"
    return result


def hits_of_an_endless_tier(requests: Sequence[TraceRequest]) -> int:
    """Each request finds the leading run of what any earlier one had, on whatever node that was."""
    seen: set[int] = set()
    hits = 0
    for request in requests:
        hits += next((at for at, one in enumerate(request.hash_ids) if one not in seen), len(request.hash_ids))
        seen.update(request.hash_ids)
    return hits
