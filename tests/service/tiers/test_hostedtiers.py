"""What operators see of the tier of a host."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kvstow.config import EngineConfig
from kvstow.control.engine import OffloadEngine
from kvstow.control.fleettier import FleetTier, TierSettings
from kvstow.testing.memorystore import MemoryStore
from kvstow.tier.store import ClientHealth, ClientStats
from kvstow.tier.tierstatus import TierClient
from kvstow_service.tiers.hostedtiers import HostedTiers, TierChoice, measure_store, shown_url

MakeTier = Callable[..., FleetTier]


@pytest.fixture
def make_tier() -> Iterator[MakeTier]:
    made: list[FleetTier] = []

    def make(fingerprint: str | None = "f") -> FleetTier:
        engine = OffloadEngine(EngineConfig(slot_bytes=4096, capacity_slots=8, block_tokens=16))
        made.append(FleetTier(engine, MemoryStore().open_lookups(), TierSettings(), fingerprint, name="memory"))
        return made[-1]

    yield make
    for tier in made:
        tier.close()


@pytest.fixture
def host() -> HostedTiers:
    return HostedTiers(TierChoice("rediss://kvstow@cache:6379?password_file=/etc/secret", MemoryStore()))


def test_a_tier_is_shown_until_it_is_removed(host: HostedTiers, make_tier: MakeTier) -> None:
    assert (host.store, host.url, host.tiers()) == ("memory", "rediss://cache:6379", [])
    host.add(made := make_tier(), pool="a", namespace="a1", model="m")
    (tier,) = host.tiers()
    assert (tier.pool, tier.namespace, tier.model, tier.fingerprint, tier.state) == ("a", "a1", "m", "f", "on")
    host.remove(made)
    assert host.tiers() == []


def test_a_client_of_several_namespaces_is_shown_with_the_first_that_is_there(
    host: HostedTiers, make_tier: MakeTier
) -> None:
    shared = TierClient("transfers of the node", ClientHealth("connected"), ClientStats())
    tiers = [make_tier() for _ in range(3)]
    for number, (pool, tier) in enumerate(zip("aab", tiers, strict=True)):
        own = TierClient(f"look-ups {number}", ClientHealth("connected"), ClientStats())
        host.add(tier, pool=pool, namespace=str(number), clients=lambda own=own: [shared, own])  # type: ignore[misc]
    assert [len(one.clients) for one in host.tiers()] == [2, 1, 2]
    host.remove(tiers[0])
    assert [len(one.clients) for one in host.tiers()] == [2, 2]


def requests(host: HostedTiers) -> dict[str, int]:
    """How many each pool has counted."""
    return {pool: totals.requests for (_, pool, _), totals in host.totals().items()}


def test_what_a_tier_has_counted_stays_in_the_totals_of_its_pool(host: HostedTiers, make_tier: MakeTier) -> None:
    tiers = [make_tier() for _ in range(4)]
    for number, (pool, tier) in enumerate(zip("aaab", tiers, strict=True)):
        host.add(tier, pool=pool, namespace=str(number))
        tier.counters.requests = 10**number
    assert requests(host) == {"a": 111, "b": 1000}
    for tier in (tiers[0], tiers[1], tiers[1], tiers[3]):
        host.remove(tier)
    assert requests(host) == {"a": 111}, "b has no tier that shows it"
    tiers[2].counters.requests += 1
    assert requests(host) == {"a": 112}
    again = make_tier()
    host.add(again, pool="b", namespace="3")
    assert requests(host) == {"a": 112, "b": 1000}


def test_totals_end_with_the_pool(host: HostedTiers, make_tier: MakeTier) -> None:
    for pool in "ab":
        tier = make_tier()
        host.add(tier, pool=pool, namespace="1")
        tier.counters.requests = 5
        host.remove(tier)
    host.forget_pool("a")
    for pool in "ab":
        host.add(make_tier(), pool=pool, namespace="2")
    assert requests(host) == {"a": 0, "b": 5}


# -- what may be said of a store ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("mooncake://10.0.0.1:50051?protocol=rdma&replicas=2", "mooncake://10.0.0.1:50051?protocol=rdma&replicas=2"),
        ("mooncake://a:1,b:2?ha=etcd", "mooncake://a:1,b:2?ha=etcd"),
        ("rediss://kvstow@cache:6379?password_file=/etc/secret&ca_file=/etc/ca", "rediss://cache:6379"),
    ],
)
def test_a_url_is_shown_without_secrets_and_paths(url: str, shown: str) -> None:
    assert shown_url(url) == shown


def test_who_can_reach_a_store() -> None:
    public = measure_store("mooncake://8.8.8.8:50051?protocol=rdma")
    assert (public.public_addresses, public.has_access_control, public.pins_memory) == (("8.8.8.8",), False, True)
    for host in ("127.0.0.1", "10.1.2.3", "192.168.0.7", "[::1]", "[fd00::7]", "localhost"):
        found = measure_store(f"mooncake://{host}:50051")
        assert (found.public_addresses, found.pins_memory) == ((), False)
    assert measure_store("redis://u@8.8.8.8:6379?password_file=/x").has_access_control
    assert not measure_store("redis://8.8.8.8:6379").has_access_control
