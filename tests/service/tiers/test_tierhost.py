"""What operators see and do of the tier of a host, on a fake clock."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from kvstow.config import EngineConfig
from kvstow.control.engine import OffloadEngine
from kvstow.control.fleettier import FleetTier
from kvstow.control.tiersettings import TierSettings
from kvstow.errors import (
    ConfigError,
    ConflictError,
    InvalidRequestError,
    KvstowError,
    NotFoundError,
    TierUnavailableError,
)
from kvstow.testing.fakes import FakeClock
from kvstow.testing.tier import ControlledStore
from kvstow.tier.memorystore import MemoryStore
from kvstow.tier.objectname import ObjectName
from kvstow.tier.store import ClientHealth, ClientStats
from kvstow_api.tiercontrol import TierClient
from kvstow_service.tiers.storeaddress import measure_store, shown_url
from kvstow_service.tiers.tierhost import TierChoice, TierHost
from kvstow_service.tiers.tierpurge import TierPurge

MakeTier = Callable[..., FleetTier]


class Clients:
    """A host with one pool."""

    def __init__(self, make_tier: MakeTier) -> None:
        self.host = TierHost(self, allows_memory=True)
        self.make_tier = make_tier
        self.error: KvstowError | None = None
        self.opened = self.closed = 0
        self.is_blocked, self.may_close = threading.Event(), threading.Event()
        self.may_close.set()
        self.tier: FleetTier | None = None

    def open(self, choice: TierChoice) -> None:
        if self.error is not None:
            raise self.error
        self.opened += 1
        self.tier = self.make_tier(store=choice.store)
        self.host.add(self.tier, pool="a", namespace="a1", model="m")

    def close(self) -> None:
        self.is_blocked.set()
        assert self.may_close.wait(60)
        if self.tier is not None:
            self.host.remove(self.tier)
            self.tier.close()
            self.tier = None
            self.closed += 1


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(100.0)


@pytest.fixture
def make_tier(clock: FakeClock) -> Iterator[MakeTier]:
    made: list[FleetTier] = []

    def make(fingerprint: str | None = "f", store: MemoryStore | None = None) -> FleetTier:
        engine = OffloadEngine(EngineConfig(slot_bytes=4096, capacity_slots=8, block_tokens=16), clock=clock)
        lookups = (store or MemoryStore()).open_lookups()
        made.append(FleetTier(engine, lookups, TierSettings(), fingerprint, name="memory", clock=clock))
        return made[-1]

    yield make
    for tier in made:
        tier.close()


@pytest.fixture
def clients(make_tier: MakeTier) -> Clients:
    return Clients(make_tier)


@pytest.fixture
def host(clock: FakeClock) -> TierHost:
    return TierHost(clock=clock, allows_memory=True)


def states(host: TierHost) -> list[str]:
    return [one.status.state for one in host.tiers()]


# -- attach and detach -------------------------------------------------------------------------------------------------


def test_a_store_is_attached_and_detached(clients: Clients) -> None:
    host = clients.host
    assert host.store is None
    assert not host.tiers()
    assert host.can_attach
    store = host.attach("memory:1GiB", "selective")
    assert (store.name, store.url, store.write) == ("memory", "memory:1GiB", "selective")
    assert host.store == store
    (tier,) = host.tiers()
    assert (tier.pool, tier.namespace, tier.model, tier.fingerprint, tier.status.state) == ("a", "a1", "m", "f", "on")
    with pytest.raises(ConflictError, match="a store is attached: memory:1GiB; detach it first"):
        host.attach("memory:", None)
    host.detach()
    assert host.store is None
    assert not host.tiers()
    assert clients.closed == 1
    with pytest.raises(ConflictError, match="no store is attached"):
        host.detach()
    assert host.attach("memory:", None).write == TierSettings().write


def test_a_url_that_cannot_be_used_is_refused_before_anything_changes(clients: Clients) -> None:
    with pytest.raises(ConfigError, match=r"^url is 'ftp://x'") as caught:
        clients.host.attach("ftp://x", None)
    assert caught.value.key == "url"
    with pytest.raises(ConfigError, match="tier option colour"):
        clients.host.attach("mooncake://m:1?colour=red", None)
    assert (clients.opened, clients.host.store) == (0, None)


def test_what_a_host_cannot_open_is_not_attached(clients: Clients) -> None:
    clients.error = ConflictError("the memory of the ranks cannot be mapped")
    with pytest.raises(ConflictError, match="cannot be mapped"):
        clients.host.attach("memory:", None)
    assert clients.host.store is None
    clients.error = None
    assert clients.host.attach("memory:", None)


def test_one_change_at_a_time(clients: Clients) -> None:
    host = clients.host
    host.attach("memory:", None)
    clients.may_close.clear()
    detaching = threading.Thread(target=host.detach)
    detaching.start()
    assert clients.is_blocked.wait(60)
    for change in (host.detach, lambda: host.attach("memory:", None)):
        with pytest.raises(ConflictError, match="a store is being attached or detached"):
            change()
    assert states(host) == ["on"], "readers wait for a change"
    clients.may_close.set()
    detaching.join(60)
    assert host.store is None


def test_a_host_whose_store_is_that_of_its_start(host: TierHost, make_tier: MakeTier) -> None:
    host.begin(TierChoice.of("memory:", "back", allows_memory=True))
    host.add(make_tier(), pool="a", namespace="a1")
    assert not host.can_attach
    assert host.store is not None
    for change in (host.detach, lambda: host.attach("memory:", None)):
        with pytest.raises(ConflictError, match="takes its store only when it starts"):
            change()


def test_nothing_is_attached_to_a_host_that_ends(clients: Clients) -> None:
    clients.host.attach("memory:", None)
    clients.host.end()
    assert (clients.host.store, clients.closed) == (None, 1)
    with pytest.raises(ConflictError, match="the host is stopping"):
        clients.host.attach("memory:", None)
    clients.host.end()


# -- bypass ------------------------------------------------------------------------------------------------------------


def test_a_bypass_is_for_all_pools_and_those_to_come(host: TierHost, make_tier: MakeTier, clock: FakeClock) -> None:
    host.add(make_tier(), pool="a", namespace="a1")
    assert host.set_bypass(bypassed=True, ttl_seconds=60.0, pool=None) == (True, 60.0)
    host.add(make_tier(), pool="b", namespace="b1")
    assert states(host) == ["bypassed", "bypassed"]
    clock.advance(20.0)
    assert [one.bypass_seconds_left for one in host.tiers()] == [40.0, 40.0]
    clock.advance(41.0)
    assert states(host) == ["on", "on"]
    assert host.bypass == (False, None)


def test_one_pool_is_bypassed_and_used_again(host: TierHost, make_tier: MakeTier) -> None:
    for pool in ("a", "b"):
        host.add(make_tier(), pool=pool, namespace=f"{pool}1")
    assert host.set_bypass(bypassed=True, ttl_seconds=None, pool="b") == (False, None)
    assert states(host) == ["on", "bypassed"]
    host.add(make_tier(), pool="b", namespace="b2")
    assert states(host) == ["on", "bypassed", "bypassed"]
    host.set_bypass(bypassed=False, ttl_seconds=None, pool="b")
    assert states(host) == ["on", "on", "on"]


def test_a_switch_of_the_host_replaces_those_of_single_pools(host: TierHost, make_tier: MakeTier) -> None:
    host.add(make_tier(), pool="a", namespace="a1")
    host.set_bypass(bypassed=True, ttl_seconds=None, pool="a")
    host.set_bypass(bypassed=False, ttl_seconds=None, pool=None)
    host.add(make_tier(), pool="a", namespace="a2")
    assert states(host) == ["on", "on"]


def test_a_pool_can_be_used_while_the_host_is_bypassed(host: TierHost, make_tier: MakeTier) -> None:
    host.add(make_tier(), pool="a", namespace="a1")
    host.set_bypass(bypassed=True, ttl_seconds=None, pool=None)
    host.set_bypass(bypassed=False, ttl_seconds=None, pool="a")
    host.add(make_tier(), pool="a", namespace="a2")
    assert states(host) == ["on", "on"]


def test_a_client_of_several_namespaces_is_shown_with_the_first_that_is_there(
    host: TierHost, make_tier: MakeTier
) -> None:
    shared = TierClient("transfers of the node", ClientHealth("connected"), ClientStats())
    tiers = [make_tier() for _ in range(3)]
    for number, (pool, tier) in enumerate(zip("aab", tiers, strict=True)):
        own = TierClient(f"look-ups {number}", ClientHealth("connected"), ClientStats())
        host.add(tier, pool=pool, namespace=str(number), clients=lambda own=own: [shared, own])  # type: ignore[misc]
    assert [len(one.clients) for one in host.tiers()] == [2, 1, 2]
    host.remove(tiers[0])
    assert [len(one.clients) for one in host.tiers()] == [2, 2]


def requests(host: TierHost) -> dict[str, int]:
    """How many each pool has counted."""
    return {pool: totals.counters.requests for (_, pool, _), totals in host.totals().items()}


def test_what_a_tier_has_counted_stays_in_the_totals_of_its_pool(host: TierHost, make_tier: MakeTier) -> None:
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


def test_totals_end_with_the_pool(host: TierHost, make_tier: MakeTier) -> None:
    for pool in "ab":
        tier = make_tier()
        host.add(tier, pool=pool, namespace="1")
        tier.counters.requests = 5
        host.remove(tier)
    host.forget_pool("a")
    for pool in "ab":
        host.add(make_tier(), pool=pool, namespace="2")
    assert requests(host) == {"a": 0, "b": 5}


def test_totals_end_with_the_store(clients: Clients) -> None:
    for _ in range(2):
        clients.host.attach("memory:", None)
        assert requests(clients.host) == {"a": 0}
        assert clients.tier is not None
        clients.tier.counters.requests = 5
        clients.host.detach()


# -- weights -----------------------------------------------------------------------------------------------------------


def test_weights_are_named_after_a_reset(host: TierHost, make_tier: MakeTier) -> None:
    tier = make_tier()
    host.add(tier, pool="a", namespace="a1", fingerprint_of=lambda weights: f"print-of-{weights}")
    with pytest.raises(ConflictError, match="have a name: they can be named again"):
        host.name_weights("a", None, "w2")
    tier.reset()
    host.name_weights("a", None, "w2")
    tier.step()
    assert host.tiers()[0].fingerprint == "print-of-w2"


def test_weights_that_cannot_be_named(host: TierHost, make_tier: MakeTier) -> None:
    def refuse(weights: str) -> str:
        raise ConflictError("hashes of blocks are not reproducible")

    host.add(make_tier(None), pool="a", namespace="a1")
    host.add(make_tier(None), pool="b", namespace="b1", fingerprint_of=refuse)
    host.add(make_tier(None), pool="b", namespace="b2", fingerprint_of=refuse)
    with pytest.raises(ConflictError, match="cannot be named"):
        host.name_weights("a", "a1", "w")
    with pytest.raises(ConflictError, match="several namespaces: b1, b2"):
        host.name_weights("b", None, "w")
    with pytest.raises(ConflictError, match="not reproducible"):
        host.name_weights("b", "b2", "w")
    with pytest.raises(NotFoundError, match="pool c has no tier"):
        host.name_weights("c", None, "w")
    for name in ("", "x" * 101, "a\nb"):
        with pytest.raises(InvalidRequestError, match="1 to 100 printable characters"):
            host.name_weights("a", None, name)


# -- purge -------------------------------------------------------------------------------------------------------------


def test_a_purge_removes_the_objects_of_one_fingerprint(clients: Clients) -> None:
    host = clients.host
    with pytest.raises(ConflictError, match="no store is attached"):
        host.purge("f")
    store = ControlledStore()
    choice = TierChoice("memory:", store, "through")
    clients.open(choice)
    host.begin(choice)
    for fingerprint, count in (("f", 3), ("g", 2)):
        for number in range(count):
            store.put(str(ObjectName(fingerprint, bytes([0, 0, number]), 0, 1)), b"x")
    sweep = host.purge("f")
    while sweep.step():
        pass
    assert (sweep.done, store.num_objects) == (3, 2)
    assert clients.tier is not None
    assert clients.tier._was_purged, "the tier goes on to believe that the store has these"
    sweep.cancel()


def test_a_purge_of_a_store_that_does_not_answer_fails_and_says_why(clock: FakeClock) -> None:
    class Unconnected(MemoryStore):
        def open_lookups(self):  # type: ignore[no-untyped-def]
            client = super().open_lookups()
            client.health = lambda: ClientHealth("connecting", "no route to host")  # type: ignore[method-assign]
            return client

    purged: list[bool] = []
    sweep = TierPurge(Unconnected(), "f", lambda: purged.append(True), clock)
    assert sweep.step()
    assert sweep.waiting
    clock.advance(31.0)
    with pytest.raises(TierUnavailableError, match="no route to host"):
        sweep.step()
    assert purged


# -- what may be said of a store ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("mooncake://10.0.0.1:50051?protocol=rdma&replicas=2", "mooncake://10.0.0.1:50051?protocol=rdma&replicas=2"),
        ("mooncake://a:1,b:2?ha=etcd", "mooncake://a:1,b:2?ha=etcd"),
        ("rediss://kvstow@cache:6379?password_file=/etc/secret&ca_file=/etc/ca", "rediss://cache:6379"),
        ("memory:1GiB", "memory:1GiB"),
        ("memory:", "memory:"),
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
    assert measure_store("memory:").has_access_control
