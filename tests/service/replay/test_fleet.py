"""Several nodes over one store: hit rates against a simulation that shares nothing with the engine, and every byte."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread

import pytest
from tests.service.replay.fleetreplay import PATIENT, SLOT_BYTES, hits_of_an_endless_tier, replay

from kvstow.errors import ConfigError, TierTimeoutError
from kvstow.testing.tier import ControlledStore
from kvstow.tier.memorystore import MemoryStore
from kvstow.tier.objectname import ObjectName
from kvstow.tier.store import GetStatus, PutStatus
from kvstow.tier.tierstatus import TierCounters
from kvstow.tier.writepolicy import WriteMode
from kvstow_service.replay.fleet import Fleet, _together
from kvstow_service.replay.offload import PoolFigures
from kvstow_service.replay.router import Router, Routing
from kvstow_service.replay.tieredoffload import TieredOffload
from kvstow_service.replay.trace import TraceRequest, read_trace
from kvstow_service.tiers.tierhost import TierHost

MOONCAKE = Path(__file__).parents[3].parent / "shared" / "data" / "conversation_trace.jsonl"


@pytest.fixture
def requests(conversations: list[TraceRequest]) -> list[TraceRequest]:
    """Far enough apart that no node remembers what the store did not have before."""
    return [one._replace(timestamp=10_000.0 * at) for at, one in enumerate(conversations[:100])]


@pytest.mark.parametrize("routing", ["prefix", "random"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_with_an_endless_tier_every_node_finds_what_any_has_stored(
    requests: list[TraceRequest], routing: Routing, ranks: int
) -> None:
    assert max(len(request.hash_ids) for request in requests) <= 60
    result = replay(requests, MemoryStore(), ranks=ranks, routing=routing)
    assert result.hit_blocks == hits_of_an_endless_tier(requests)
    assert result.tier is not None
    assert result.tier.counters.fetched_blocks > 0


def test_the_last_decision_is_that_of_the_node_that_has_fetched_most(requests: list[TraceRequest]) -> None:
    tier = replay(requests, MemoryStore()).tier
    assert tier is not None
    idle = replace(tier, decision="none", counters=TierCounters())
    together = _together([PoolFigures(1, "lru", 0, one) for one in (idle, tier)]).tier
    assert together is not None
    assert (together.decision, together.counters) == (tier.decision, tier.counters)


@pytest.mark.skipif(not MOONCAKE.exists(), reason="the production trace is not beside the checkout")
def test_the_hit_rate_of_the_production_trace_is_the_simulated_one() -> None:
    requests = read_trace(str(MOONCAKE), limit=300)
    result = replay(requests, MemoryStore(), nodes=4, slots=500)
    assert result.hit_blocks == hits_of_an_endless_tier(requests)


def test_without_a_tier_nodes_find_only_their_own(requests: list[TraceRequest]) -> None:
    result = replay(requests, None, routing="random")
    assert result.tier is None
    assert result.hit_blocks < hits_of_an_endless_tier(requests)


@pytest.mark.parametrize("write", ["selective", "back"])
def test_less_is_written_with_the_other_policies(requests: list[TraceRequest], write: WriteMode) -> None:
    result = replay(requests, MemoryStore(), replace(PATIENT, write=write))
    through = replay(requests, MemoryStore())
    assert result.tier is not None
    assert through.tier is not None
    assert 0 < result.tier.counters.put_blocks < through.tier.counters.put_blocks


def test_a_small_tier_forgets(requests: list[TraceRequest]) -> None:
    small = replay(requests, MemoryStore(100 * SLOT_BYTES))
    alone = replay(requests, None)
    assert alone.hit_blocks < small.hit_blocks < hits_of_an_endless_tier(requests)


def test_faults_of_the_store_cost_hits_and_nothing_else(requests: list[TraceRequest]) -> None:
    choose = random.Random(0)

    class FaultyStore(ControlledStore):
        """Loses, refuses and mixes up; now and then it does not answer in time."""

        @property
        def error(self) -> Exception | None:
            return TierTimeoutError("no answer in time") if choose.random() < 0.02 else None

        @error.setter
        def error(self, value: Exception | None) -> None:
            pass

    def put_status(name: ObjectName) -> PutStatus | None:
        return choose.choice(["full", "failed"]) if choose.random() < 0.05 else None

    def get_status(name: ObjectName) -> GetStatus | None:
        return choose.choice(["missing", "corrupt", "failed"]) if choose.random() < 0.1 else None

    store = FaultyStore()
    store.put_status, store.get_status = put_status, get_status
    result = replay(requests, store, ranks=2)
    assert result.failed_loads == result.failed_stores == result.abandoned == 0
    assert result.tier is not None
    assert result.tier.counters.failed_put_blocks > 0


def test_a_wrong_byte_in_the_store_would_be_seen(requests: list[TraceRequest]) -> None:
    class WrongStore(MemoryStore):
        def get(self, name: str) -> bytes | None:
            data = super().get(name)
            return None if data is None else data[:-1] + bytes([data[-1] ^ 1])

    with pytest.raises(AssertionError, match="mismatches"):
        replay(requests, WrongStore())


# -- the router ---------------------------------------------------------------------------------------------------


def request(*hash_ids: int, at: float = 0.0) -> TraceRequest:
    return TraceRequest(at, 1, 1, hash_ids)


def test_a_request_goes_where_its_longest_prefix_is() -> None:
    found = {0: 1, 1: 3, 2: 2}
    router = Router(3, "prefix", lambda node, keys: found[node])
    assert router.node_for(request(1, 2, 3)) == 1


def test_a_node_with_too_much_to_do_gets_nothing_until_time_passes() -> None:
    router = Router(2, "prefix", lambda node, keys: 1 - node)
    first = [router.node_for(request(*range(10))) for _ in range(4)]
    assert first == [0, 0, 1, 0]
    router = Router(2, "prefix", lambda node, keys: 1 - node)
    assert router.node_for(request(*range(10))) == 0
    assert router.node_for(request(*range(10), at=600_000.0)) == 0


def test_random_routing_repeats_and_uses_every_node() -> None:
    routes = [[Router(4, "random", lambda node, keys: 0).node_for(request(1)) for _ in range(3)] for _ in range(2)]
    assert routes[0] == routes[1]
    router = Router(4, "random", lambda node, keys: 0)
    assert {router.node_for(request(1)) for _ in range(100)} == {0, 1, 2, 3}


def test_an_unknown_routing_is_refused() -> None:
    with pytest.raises(ConfigError, match="routing is 'round-robin'; allowed: prefix or random"):
        Router(2, "round-robin", lambda node, keys: 0)  # type: ignore[arg-type]


def test_a_store_is_detached_in_the_middle_of_a_fetch_and_another_one_attached(requests: list[TraceRequest]) -> None:
    """By an operator: no request fails or waits for what does not come, and no slot leaks."""
    first, changed = ControlledStore(), Event()

    def change(host: TierHost, arrived: int) -> None:
        first.gets.wait_arrived(arrived)
        detaching = Thread(target=host.detach)
        detaching.start()
        while host.tiers():
            assert detaching.is_alive()
        first.gets.open()
        detaching.join(60)
        host.attach("memory:", "through")
        changed.set()

    threads: list[Thread] = []

    def on_request(fleet: Fleet, number: int) -> None:
        if number == 40:
            first.gets.shut()
            offload = fleet.nodes[0].offload
            assert isinstance(offload, TieredOffload)
            arrived = first.gets.num_arrived + 1
            threads.append(Thread(target=change, args=(offload.host, arrived)))
            threads[0].start()
        if number == 70:
            assert changed.wait(60), "the rest is for the second store"

    result = replay(requests, first, nodes=1, slots=30, ranks=2, on_request=on_request)
    threads[0].join(60)
    assert changed.is_set()
    assert result.tier is not None
    assert result.tier.counters.put_blocks > 0, "the second store was not used"
