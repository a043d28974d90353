"""Namespaces of a shared pool: equal keys of two namespaces are different blocks."""

from __future__ import annotations

import pytest
from tests.doubles.rank import use_keys
from tests.engine.control.sharedhost import Client, Host

from kvstow.control.engine import PoolFacade
from kvstow.errors import ConflictError, LeaseError, NotFoundError
from kvstow.status import NamespaceStatus

A, B, C, D, E = (bytes([letter]) for letter in b"ABCDE")
KEYS = [bytes([100 + number]) for number in range(16)]


@pytest.fixture
def host() -> Host:
    return Host()


def cached(host: Host, client: Client, keys: list[bytes]) -> list[bytes]:
    return [key for key, present in zip(keys, client.session.contains(keys), strict=True) if present]


def end(host: Host, client: Client) -> None:
    client.session.lose("closed")
    host.kill(client)


def test_a_run_of_slots_ends_where_another_namespace_begins() -> None:
    host = Host(slots=40)
    first, second = host.attach(namespace="a"), host.attach(namespace="b")
    second.store(KEYS[:9])
    first.store(KEYS[9:])  # in the next slots
    second.store(KEYS[12:])
    assert second.session.acquire(KEYS).num_keys == 9
    assert second.session.find_runs(KEYS) == [(0, 9), (12, 4)]


def test_keys_may_come_in_any_sequence() -> None:
    client = Host(slots=40).attach()
    client.store(KEYS)
    assert client.session.acquire(tuple(KEYS)).num_keys == 16
    assert client.session.find_runs((A, *KEYS)) == [(1, 16)]
    assert client.session.begin_store(tuple(KEYS), range(16)).op is None


def test_namespaces_without_sessions_are_evicted_first_the_oldest_before_others(host: Host) -> None:
    first, second, third = (host.attach(namespace=name) for name in "abc")
    third.store([A, B])
    host.clock.advance(1.0)
    second.store([A, B, C])
    first.store([A, B, C])
    end(host, first)
    end(host, second)
    assert third.begin_store([D, E]) is not None
    assert {one.name: one.blocks for one in host.pool.namespaces()} == {"a": 1, "b": 3, "c": 2}
    third.run()
    third.store(KEYS[:3])
    assert {one.name: one.blocks for one in host.pool.namespaces()} == {"b": 1, "c": 7}, "an empty one is forgotten"
    assert cached(host, third, [A, B]) == [A, B]


def test_a_namespace_keeps_its_blocks_until_an_engine_comes_back(host: Host) -> None:
    first, other = host.attach(namespace="a"), host.attach(namespace="b")
    first.store([A, B])
    end(host, first)
    other.store([C])
    again = host.attach(namespace="a")
    other.store([D])
    host.clock.advance(1.0)
    assert again.load([A, B]) == [A, B]
    use_keys(again.session, [A, B])
    for number in range(5):
        host.clock.advance(1.0)
        other.store([KEYS[number]])
    assert cached(host, again, [A, B]) == [A, B]


@pytest.mark.parametrize("policy", ["lru", "auto"])
def test_among_used_namespaces_the_blocks_unused_for_longest_are_evicted(policy: str) -> None:
    host = Host(slots=96, policy=policy)
    first, second = host.attach(namespace="a"), host.attach(namespace="b")
    for number in range(48):
        for client in (first, second):
            host.clock.advance(1.0)
            client.store([bytes([number])])
    host.clock.advance(1.0)
    first.store([bytes([60 + number]) for number in range(64)])
    left = {one.name: one.blocks for one in host.pool.namespaces()}
    assert left["b"] == pytest.approx(16, abs=16)
    assert left["a"] + left["b"] == 96
    assert cached(host, second, [bytes([47])]) == [bytes([47])], "the one that was used last"


def test_a_reset_moves_its_session_only(host: Host) -> None:
    first, second = host.attach(), host.attach()
    first.store([A, B])
    lease = first.session.acquire([A])
    stored_before = first.begin_store([C])
    name = first.session.reset()
    assert name.startswith("model@")
    assert first.session.status().namespace == name
    assert first.session.lookup([A]) == 0
    with pytest.raises(LeaseError, match="broken"):
        first.session.begin_load(lease, [0])
    first.session.release_lease(lease)
    assert stored_before is not None
    first.run()
    assert first.session.lookup([C]) == 0
    assert second.session.lookup([A, B, C]) == 3
    first.store([A])
    assert first.session.reset() != name
    assert host.counts["cached"] == 4


def test_engines_that_name_the_same_epoch_meet_again(host: Host) -> None:
    first, second = host.attach(), host.attach()
    assert first.session.reset("model@weights-2") == "model@weights-2"
    first.store([A])
    second.session.reset("model@weights-2")
    assert second.load([A]) == [A]
    assert [one.name for one in host.pool.namespaces()] == ["model@weights-2"], "the old one was empty"


def test_a_lost_session_cannot_be_reset(host: Host) -> None:
    client = host.attach()
    client.session.lose("closed")
    with pytest.raises(ConflictError, match="the session has ended"):
        client.session.reset()


def test_a_namespace_is_dropped_at_once_and_its_slots_are_freed_slice_by_slice(host: Host) -> None:
    client, other = host.attach(namespace="a"), host.attach(namespace="b")
    client.store([A, B, C])
    client.session.acquire([A])
    client.begin_store([D])
    other.store([A])
    with pytest.raises(ConflictError, match="namespace 'a' is used by 1 sessions; detach them first"):
        host.pool.drop_namespace("a")
    client.session.lose("closed")
    sweep = host.pool.drop_namespace("a")
    with pytest.raises(NotFoundError):
        host.pool.drop_namespace("a")
    dropped = NamespaceStatus(
        name="a", pool="host", sessions=0, blocks=3, looked_up_blocks=1, hit_blocks=1, dropped=True
    )
    assert dropped in host.pool.namespaces()
    again = host.attach(namespace="a")
    assert again.session.lookup([A]) == 0
    again.store([A])
    sweep.run()
    assert sweep.evicted_slots == 3
    assert host.counts == {"free": 4, "filling": 0, "cached": 2, "leased": 1, "quarantined": 1}
    host.kill(client)
    assert host.counts["free"] == 6
    assert other.load([A]) == again.load([A]) == [A]


def test_blocks_of_a_dropped_namespace_are_evicted_before_all_others(host: Host) -> None:
    old, dropped, other = (host.attach(namespace=name) for name in "abc")
    old.store([A, B])
    dropped.store([A, B])
    other.store([A, B, C, D])
    end(host, old)
    end(host, dropped)
    host.pool.drop_namespace("b")
    other.store([E, KEYS[0]])
    assert {one.name: one.blocks for one in host.pool.namespaces()} == {"a": 2, "c": 6}


def test_operators_reach_the_blocks_of_all_namespaces(host: Host) -> None:
    first, second = host.attach(namespace="a"), host.attach(namespace="b")
    first.store([A, B])
    second.store([A, C])
    admin = host.pool.admin
    assert admin.lookup([A, B, C, D]).present == [True, True, True, False]
    assert admin.purge(keys=[A]).run().evicted_slots == 2
    admin.set_policy("auto")
    admin.remove_block(B)
    assert PoolFacade(host.pool).block(C) is not None
    assert admin.purge(everything=True).run().evicted_slots == 1
    assert host.counts["free"] == 8
