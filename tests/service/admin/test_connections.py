from __future__ import annotations

import resource
from collections.abc import Callable

import pytest

from kvstow.testing.fakes import FakeClock
from kvstow_service.admin.connections import Connection, Connections, Wait, connection_limit


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(100.0)


@pytest.fixture
def dropped() -> list[str]:
    return []


@pytest.fixture
def admit(clock: FakeClock, dropped: list[str]) -> Callable[..., Connection | None]:
    """Admits named connections to one registry of three; each is a second younger than the one before."""
    registry = Connections(3, clock)

    def add(
        name: str,
        *,
        client: str = "192.0.2.1",
        trusted: bool = False,
        wait: Wait | None = Wait.HEAD,
        after: float = 1.0,
    ) -> Connection | None:
        clock.advance(after)
        connection = registry.admit(client, trusted=trusted, wait=Wait.HEAD)
        if connection is not None:
            connection.drop = lambda: dropped.append(name)
            connection.wait_for(wait)
        return connection

    return add


def test_the_untrusted_connection_idle_longest_makes_room(admit: Callable[..., Connection], dropped: list[str]) -> None:
    """Before a busy stranger, and before trusted clients."""
    admit("trusted", trusted=True)
    admit("busy", wait=None)
    admit("idle")
    assert admit("new", wait=None) is not None
    assert dropped == ["idle"]
    assert admit("newer") is not None
    assert dropped == ["idle", "busy"]


def test_a_new_connection_outlives_one_that_was_busy_for_long(
    admit: Callable[..., Connection], dropped: list[str]
) -> None:
    """A probe whose request is on its way, among attackers who keep the server at work."""
    for name in ("a", "b", "c"):
        admit(name, wait=None)
    admit("probe")
    admit("d", wait=None, after=0.5)
    admit("e", wait=None, after=0.1)
    assert dropped == ["a", "b", "c"]


def test_the_address_with_the_most_connections_makes_room(admit: Callable[..., Connection], dropped: list[str]) -> None:
    """Even for others that are idle, and older."""
    admit("probe", client="192.0.2.9")
    admit("flood 1", wait=None)
    admit("flood 2", wait=None)
    for number in range(3, 10):
        admit(f"flood {number}", wait=None)
    assert dropped == [f"flood {number}" for number in range(1, 8)]


def test_an_idle_trusted_client_makes_room_if_none_is_untrusted(
    admit: Callable[..., Connection], dropped: list[str]
) -> None:
    admit("agent", trusted=True, wait=None)
    admit("operator", trusted=True)
    admit("second operator", trusted=True)
    assert admit("probe") is not None
    assert dropped == ["operator"]


def test_busy_trusted_clients_are_never_dropped(admit: Callable[..., Connection], dropped: list[str]) -> None:
    for name in ("a", "b", "c"):
        admit(name, trusted=True, wait=None)
    assert admit("probe") is None
    assert dropped == []


def test_a_closed_connection_no_longer_counts(admit: Callable[..., Connection], dropped: list[str]) -> None:
    first = admit("a")
    admit("b")
    admit("c")
    first.closed()
    first.closed()
    admit("d")
    assert dropped == []


@pytest.mark.parametrize("wait", list(Wait))
def test_each_wait_has_a_deadline(wait: Wait, clock: FakeClock) -> None:
    registry = Connections(3, clock)
    ended: list[str] = []
    connection = registry.admit("192.0.2.1", trusted=True, wait=wait)
    assert connection is not None
    connection.drop = lambda: ended.append("dropped")
    clock.advance(wait.seconds)
    connection.wait_for(wait)  # still the same wait: this extends nothing
    registry.expire()
    assert (ended, len(registry)) == ([], 1)
    clock.advance(0.1)
    registry.expire()
    assert (ended, len(registry)) == (["dropped"], 0)


def test_work_has_no_deadline_and_the_next_wait_has_a_new_one(clock: FakeClock) -> None:
    registry = Connections(3, clock)
    connection = registry.admit("192.0.2.1", trusted=False, wait=Wait.HEAD)
    assert connection is not None
    connection.wait_for(None)
    clock.advance(3600.0)
    registry.expire()
    assert len(registry) == 1
    connection.wait_for(Wait.HEAD)
    clock.advance(Wait.HEAD.seconds)
    registry.expire()
    assert len(registry) == 1


def test_a_flood_logs_one_line_a_minute(clock: FakeClock, caplog: pytest.LogCaptureFixture) -> None:
    registry = Connections(1, clock)
    for _ in range(1001):
        registry.admit("192.0.2.1", trusted=False, wait=Wait.HEAD)
    assert len(caplog.records) == 1
    clock.advance(61.0)
    registry.admit("192.0.2.1", trusted=False, wait=Wait.HEAD)
    assert "(999 more were suppressed)" in caplog.records[1].message


@pytest.mark.parametrize(("soft", "limit"), [(64, 16), (128, 16), (1024, 128), (1 << 20, 256), (-1, 256)])
def test_the_limit_leaves_the_engine_its_descriptors(soft: int, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda what: (soft, soft))
    assert resource.RLIM_INFINITY == -1
    assert connection_limit() == limit
