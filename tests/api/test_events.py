from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import pytest
from tests.api.conftest import send_report
from tests.api.tieredhost import TieredHost

from kvstow.config import EngineConfig
from kvstow.control.engine import OffloadEngine
from kvstow_api.answers import EventView
from kvstow_api.client.client import parse_events
from kvstow_api.directory import EmbeddedDirectory, HostedPool
from kvstow_api.journal import Journal
from kvstow_api.sampler import Sampler
from kvstow_api.streams import EventStreams, _encode

pytestmark = pytest.mark.anyio

DEADLINE = 60.0


class Reader:
    """Reads a stream event by event."""

    def __init__(self, stream: AsyncIterator[bytes]) -> None:
        self._stream = stream
        self._ready: list[EventView] = []

    async def next(self) -> EventView:
        async with asyncio.timeout(DEADLINE):
            while not self._ready:
                chunk = (await anext(self._stream)).decode()
                lines = chunk.split("\n")[:-1]
                self._ready += parse_events(lines)
        return self._ready.pop(0)

    async def close(self) -> None:
        await self._stream.aclose()  # type: ignore[attr-defined]


def host_pool(engine: OffloadEngine) -> HostedPool:
    return EmbeddedDirectory(engine, 16).pools()[0]


@pytest.fixture
def journal() -> Journal:
    return Journal()


@pytest.fixture
def streams(engine: OffloadEngine, journal: Journal) -> EventStreams:
    return EventStreams(EmbeddedDirectory(engine, 16), journal)


@pytest.fixture
async def listen(streams: EventStreams, engine: OffloadEngine) -> AsyncIterator[Any]:
    readers: list[Reader] = []

    def start(*wanted: str, after: str | None = None, recent: int = 0) -> Reader:
        readers.append(Reader(streams.open(wanted, host_pool(engine), after=after, recent=recent, poll=0.001)))
        return readers[-1]

    yield start
    for reader in readers:
        await reader.close()


async def test_events_come_in_order_and_by_type(listen: Any, journal: Journal) -> None:
    journal.add("state", state="old")
    reader = listen("state")
    journal.add("change", path="/v1/drain")
    journal.add("state", state="draining")
    event = await reader.next()
    assert (event.type, event.data["state"]) == ("state", "draining")
    assert event.data["time"].startswith("20")


async def test_the_last_events_may_come_first(listen: Any, journal: Journal) -> None:
    for state in ("a", "b", "c"):
        journal.add("state", state=state)
    reader = listen("state", recent=2)
    assert [(await reader.next()).data["state"] for _ in range(2)] == ["b", "c"]


async def test_blocks_come_to_who_asks(listen: Any, ranks: Any, keys: list[bytes]) -> None:
    stored, removed = listen("stored"), listen("removed")
    ranks.store(keys[:2])
    ranks.engine.admin.purge(keys=keys[:1]).run()
    event = await stored.next()
    assert (event.type, event.data) == ("stored", {"pool": "host", "keys": [key.hex() for key in keys[:2]]})
    event = await removed.next()
    assert (event.type, event.data) == ("removed", {"pool": "host", "keys": [keys[0].hex()], "reason": "purge"})


async def test_an_event_of_blocks_is_encoded_once_for_all_streams(listen: Any, ranks: Any, keys: list[bytes]) -> None:
    _encode.cache_clear()
    readers = [listen("stored") for _ in range(5)]
    ranks.store(keys[:2])
    assert {(await reader.next()).type for reader in readers} == {"stored"}
    assert _encode.cache_info()[:2] == (4, 1), "hits and misses"


async def test_a_stream_goes_on_after_the_event_that_was_read_last(
    listen: Any, journal: Journal, ranks: Any, keys: list[bytes]
) -> None:
    wanted = ("state", "stored")
    reader = listen(*wanted)
    journal.add("state", state="a")
    ranks.store(keys[:1])
    first = await reader.next()
    journal.add("state", state="b")
    ranks.store(keys[1:2])
    again = listen(*wanted, after=first.id)
    seen = [await again.next() for _ in range(3)]
    assert [event.data.get("state") or event.data["keys"] for event in seen] == [
        "b",
        [keys[0].hex()],
        [keys[1].hex()],
    ]
    assert len({event.id for event in [first, *seen]}) == 4


async def test_a_late_reader_is_told_what_it_missed(listen: Any, journal: Journal) -> None:
    reader = listen("state")
    journal.add("state", state="a")
    first = await reader.next()
    for _ in range(1005):
        journal.add("state", state="b")
    again = listen("state", after=first.id)
    lost = await again.next()
    assert (lost.type, lost.data) == ("lost", {"count": 5})
    assert (await again.next()).type == "state"


async def test_a_late_reader_of_blocks_is_told_too(ranks: Any, keys: list[bytes], journal: Journal) -> None:
    engine = OffloadEngine(EngineConfig(slot_bytes=4096, capacity_slots=16, num_ranks=2, event_buffer=2))
    busy = type(ranks)(engine)
    busy.report()
    for key in keys[:5]:
        busy.store([key])
    streams = EventStreams(EmbeddedDirectory(engine, 16), journal)
    reader = Reader(streams.open(("stored",), host_pool(engine), after=f"{engine.engine_id}-0-0"))
    lost = await reader.next()
    assert (lost.type, lost.data["count"]) == ("lost", 3)
    assert streams.lost == 3
    assert [(await reader.next()).data["keys"] for _ in range(2)] == [[key.hex()] for key in keys[3:5]]
    await reader.close()


async def test_an_id_that_has_not_been_given_out_yet_is_of_another_life(
    listen: Any, journal: Journal, engine: OffloadEngine
) -> None:
    for after in (f"{engine.engine_id}-1-0", f"{engine.engine_id}-0-1"):
        reader = listen("state", after=after)
        assert (await reader.next()).data == {"count": None}
    journal.add("state", state="a")
    assert (await reader.next()).data["state"] == "a"


@pytest.mark.parametrize("after", ["abc123-7-9", "nonsense", "a-b-c", "1" * 500])
async def test_an_id_of_another_life_is_told_and_the_journal_starts_anew(
    listen: Any, journal: Journal, after: str
) -> None:
    journal.add("state", state="a")
    reader = listen("state", after=after)
    lost = await reader.next()
    assert (lost.type, lost.data) == ("lost", {"count": None})
    assert (await reader.next()).data["state"] == "a"


async def test_a_silent_stream_says_that_it_is_alive(streams: EventStreams) -> None:
    stream = streams.open(("state",), poll=0.0)
    await anext(stream)
    assert (await anext(stream)).startswith(b":")
    await stream.aclose()  # type: ignore[attr-defined]


@pytest.mark.parametrize("query", ["types=nonsense", "recent=-1", "recent=1001", "type=state"])
async def test_a_bad_choice_is_refused(client: httpx.AsyncClient, query: str) -> None:
    assert (await client.get(f"/v1/events?{query}")).status_code == 422


def test_the_watch_notes_what_the_tier_does(tiered_host: TieredHost, journal: Journal) -> None:
    sampler = Sampler(tiered_host.directory(16), journal)
    number = tiered_host.begin()
    changes: list[Callable[[], object]] = [
        lambda: None,
        lambda: tiered_host.change(number, state="down", reason="no master"),
        lambda: tiered_host.change(number, state="off", reason="a defect"),
        tiered_host.close,
    ]
    for change in changes:
        change()
        for _ in range(2):
            sampler.tick()
    told = [entry.data for entry in journal.after(0)[0] if entry.type == "tier"]
    assert [(data["store"], data["state"]) for data in told] == [
        ("memory", "on"),
        ("memory", "down"),
        ("memory", "off"),
        (None, "over"),
    ]
    assert {(data["pool"], data["namespace"]) for data in told} == {("host", "a1")}
    assert "no master" in told[1]["reason"]


async def test_a_watch_that_fails_goes_on(engine: OffloadEngine, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    sampler = Sampler(EmbeddedDirectory(engine, 16), Journal())
    failures: Iterator[int] = iter(range(3))
    seen = asyncio.Event()

    def tick() -> None:
        if next(failures, None) is None:
            seen.set()
        else:
            raise RuntimeError("broken")

    monkeypatch.setattr(sampler, "tick", tick)
    monkeypatch.setattr("kvstow_api.sampler._INTERVAL", 0.0)
    watching = asyncio.create_task(sampler.run())
    await asyncio.wait_for(seen.wait(), 20)
    watching.cancel()
    assert caplog.text.count("sampling the pools failed") == 1


async def test_operations_and_changes_enter_the_journal(client: httpx.AsyncClient, launch: Any, ranks: Any) -> None:
    other = await launch()
    await other.post("/v1/pools/host/evict", json={"slots": 1}, params={"wait": 20})
    await other.post("/v1/pools/host/evict", json={"slots": 0})
    await other.post("/v1/lookup", json={"keys": ["00aa"]})
    await other.get("/v1/pools")
    await other.post("/v1/pools/host/evict", json={"slots": 1, "dry_run": True}, params={"wait": 20})
    await other.patch("/v1/pools/host", json={"policy": "lru", "dry_run": True})
    over = (await other.get("/v1/operations")).json()["items"][0]["id"]
    await other.post(f"/v1/operations/{over}/cancel")
    await other.patch("/v1/pools/host", json={"policy": "lru", "dry_run": True})
    await send_report(other, ranks.make_report(0))
    entries, lost = launch.state.journal.after(0)
    told = [
        (entry.type, entry.data.get("path") or entry.data["state"], entry.data.get("dry_run"))
        for entry in entries
        if "session" not in entry.data
    ]
    assert [item for item in told if item[0] != "state"] == [
        ("operation", "running", False),
        ("operation", "succeeded", False),
        ("change", "/v1/pools/host/evict", None),
        ("operation", "running", True),
        ("operation", "succeeded", True),
    ]
    assert lost == 0
    json.dumps([entry.data for entry in entries])
