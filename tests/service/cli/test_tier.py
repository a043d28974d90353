"""`kvstow get tier` against a real server."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.api.tieredhost import TieredHost
from tests.doubles.fakes import FakeClock
from tests.service.cli.conftest import CAPACITY, Host, Run

from kvstow.config import EngineConfig
from kvstow.control.engine import OffloadEngine
from kvstow.tier.tierstatus import TierCounters


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(100.0)


@pytest.fixture
def server(make_host: Callable[..., Host], clock: FakeClock) -> Iterator[tuple[Host, TieredHost]]:
    engine = OffloadEngine(EngineConfig(slot_bytes=4096, capacity_slots=CAPACITY, block_tokens=16), clock=clock)
    tiered = TieredHost(engine, clock)
    yield make_host(directory=tiered.directory(2 * CAPACITY)), tiered
    tiered.close()


Ask = Callable[..., Any]


@pytest.fixture
def ask(server: tuple[Host, TieredHost], run: Run) -> Ask:
    host, _ = server
    return lambda *arguments, **given: run(*arguments, "--server", host.url, **given)


@pytest.fixture
def tiered(server: tuple[Host, TieredHost]) -> TieredHost:
    return server[1]


def test_without_a_tier_the_list_is_empty_and_says_why(host: Host, run: Run) -> None:
    outcome = run("get", "tier", "--server", host.url)
    assert outcome.exit_code == 0
    assert outcome.stderr == "there is no store below the pools: `kvstow serve --tier URL` has one\n"
    assert json.loads(run("get", "tiers", "-o", "json", "--server", host.url).stdout)["items"] == []


def test_top_has_a_row_while_a_store_is_attached(ask: Ask, tiered: TieredHost) -> None:
    assert "READING" not in ask("top").stdout
    counters = TierCounters(written_blocks=1234)
    tiered.begin(state="down", reason="no answer in 0.5 s", counters=counters)
    deadline = time.monotonic() + 60.0
    while "READING" not in (text := ask("top", environ={"COLUMNS": "120"}).stdout):  # made anew once a second
        assert time.monotonic() < deadline, text
    lines = text.splitlines()
    (at,) = [number for number, line in enumerate(lines) if line.startswith("NAMESPACE")]
    assert lines[at + 1].split()[:2] == ["a1", "down"]
    assert "1,234" in lines[at + 1]
    assert "no answer in 0.5 s" in " ".join(lines[:at])
