from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Any

import pytest
from tests.doubles.fakes import FakeClock

from kvstow_service.admin.server import Connections, Wait, connection_limit


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(100.0)


@pytest.fixture
def dropped() -> list[str]:
    return []


class Peer:
    """What the registry knows of a connection."""

    def __init__(self, drop: Callable[[], object], address: str = "192.0.2.1", trusted: bool = False) -> None:
        self.drop, self.address, self.trusted = drop, address, trusted
        self.wait: Wait | None = Wait.HEAD
        self.opened = self.since = 0.0
        self.now: Wait | None = Wait.HEAD

    def waits_for(self) -> Wait | None:
        return self.now


@pytest.fixture
def admit(clock: FakeClock, dropped: list[str]) -> Callable[..., Peer | None]:
    """Admits named connections to one registry of three; each is a second younger than the one before."""
    registry: Any = Connections(3, clock)

    def add(
        name: str,
        *,
        client: str = "192.0.2.1",
        trusted: bool = False,
        wait: Wait | None = Wait.HEAD,
        after: float = 1.0,
    ) -> Peer | None:
        clock.advance(after)
        connection = Peer(lambda: dropped.append(name), client, trusted)
        if not registry.admit(connection):
            return None
        connection.now = wait
        registry.look_at(connection)
        return connection

    return add


def test_the_untrusted_connection_idle_longest_makes_room(admit: Callable[..., Any], dropped: list[str]) -> None:
    """Before a busy stranger, and before trusted clients."""
    admit("trusted", trusted=True)
    admit("busy", wait=None)
    admit("idle")
    assert admit("new", wait=None) is not None
    assert dropped == ["idle"]
    assert admit("newer") is not None
    assert dropped == ["idle", "busy"]


def test_a_new_connection_outlives_one_that_was_busy_for_long(admit: Callable[..., Any], dropped: list[str]) -> None:
    """A probe whose request is on its way, among attackers who keep the server at work."""
    for name in ("a", "b", "c"):
        admit(name, wait=None)
    admit("probe")
    admit("d", wait=None, after=0.5)
    admit("e", wait=None, after=0.1)
    assert dropped == ["a", "b", "c"]


def test_the_address_with_the_most_connections_makes_room(admit: Callable[..., Any], dropped: list[str]) -> None:
    """Even for others that are idle, and older."""
    admit("probe", client="192.0.2.9")
    admit("flood 1", wait=None)
    admit("flood 2", wait=None)
    for number in range(3, 10):
        admit(f"flood {number}", wait=None)
    assert dropped == [f"flood {number}" for number in range(1, 8)]


def test_an_idle_trusted_client_makes_room_if_none_is_untrusted(admit: Callable[..., Any], dropped: list[str]) -> None:
    admit("agent", trusted=True, wait=None)
    admit("operator", trusted=True)
    admit("second operator", trusted=True)
    assert admit("probe") is not None
    assert dropped == ["operator"]


def test_busy_trusted_clients_are_never_dropped(admit: Callable[..., Any], dropped: list[str]) -> None:
    for name in ("a", "b", "c"):
        admit(name, trusted=True, wait=None)
    assert admit("probe") is None
    assert dropped == []


@pytest.mark.anyio
@pytest.mark.parametrize("wait", list(Wait))
async def test_each_wait_has_a_deadline(wait: Wait, clock: FakeClock) -> None:
    registry: Any = Connections(3, clock)
    ended: list[str] = []
    connection = Peer(lambda: ended.append("dropped"), trusted=True)
    registry.admit(connection)
    connection.now = wait
    registry.look_at(connection)
    clock.advance(wait.value)
    registry.look_at(connection)  # still the same wait: this extends nothing
    await registry.expire()
    assert (ended, len(registry.open)) == ([], 1)
    clock.advance(0.1)
    await registry.expire()
    assert (ended, len(registry.open)) == (["dropped"], 0)


def test_a_flood_logs_one_line_a_minute(clock: FakeClock, caplog: pytest.LogCaptureFixture) -> None:
    registry: Any = Connections(1, clock)
    for _ in range(1001):
        registry.admit(Peer(lambda: None))
    assert len(caplog.records) == 1
    clock.advance(61.0)
    registry.admit(Peer(lambda: None))
    assert "(999 more were suppressed)" in caplog.records[1].message


@pytest.mark.parametrize(("soft", "limit"), [(64, 16), (128, 16), (1024, 128), (1 << 20, 256), (-1, 256)])
def test_the_limit_leaves_the_engine_its_descriptors(soft: int, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda what: (soft, soft))
    assert resource.RLIM_INFINITY == -1
    assert connection_limit() == limit
