"""Several nodes over one store: hit rates against a simulation that shares nothing with the engine, and every byte."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from bench.fleet import Router, Routing, replay

from kvstow.errors import TierTimeoutError
from kvstow.testing.memorystore import MemoryStore
from kvstow.testing.tier import ControlledStore
from kvstow.tier.store import GetStatus, ObjectName, PutStatus
from kvstow_service.replay.trace import TraceRequest, read_trace

MOONCAKE = Path(__file__).parents[3].parent / "shared" / "data" / "conversation_trace.jsonl"


def hits_of_an_endless_tier(requests: Sequence[TraceRequest]) -> int:
    """Each request finds the leading run of what any earlier one had, on whatever node that was."""
    seen: set[int] = set()
    hits = 0
    for request in requests:
        hits += next((at for at, one in enumerate(request.hash_ids) if one not in seen), len(request.hash_ids))
        seen.update(request.hash_ids)
    return hits


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
    result, tier = replay(requests, MemoryStore(), ranks=ranks, routing=routing)
    assert result.hit_blocks == hits_of_an_endless_tier(requests)
    assert tier is not None
    assert tier.counters.fetched_blocks > 0


@pytest.mark.skipif(not MOONCAKE.exists(), reason="the production trace is not beside the checkout")
def test_the_hit_rate_of_the_production_trace_is_the_simulated_one() -> None:
    requests = read_trace(str(MOONCAKE), limit=300)
    result, _ = replay(requests, MemoryStore(), nodes=4, slots=500)
    assert result.hit_blocks == hits_of_an_endless_tier(requests)


def test_without_a_tier_nodes_find_only_their_own(requests: list[TraceRequest]) -> None:
    result, tier = replay(requests, None, routing="random")
    assert tier is None
    assert result.hit_blocks < hits_of_an_endless_tier(requests)


def test_a_small_tier_forgets(requests: list[TraceRequest]) -> None:
    small, _ = replay(requests, MemoryStore(100 * 512))
    alone, _ = replay(requests, None)
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
    _, tier = replay(requests, store, ranks=2)
    assert tier is not None
    assert tier.counters.failed_put_blocks > 0


def test_a_wrong_byte_in_the_store_would_be_seen(requests: list[TraceRequest]) -> None:
    class WrongStore(MemoryStore):
        def get(self, name: str) -> bytes | None:
            data = super().get(name)
            return None if data is None else data[:-1] + bytes([data[-1] ^ 1])

    with pytest.raises(RuntimeError, match="the replay went wrong"):
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
