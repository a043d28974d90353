"""`kvstow tier` and `kvstow get tier` against a real server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.api.tieredhost import TieredHost
from tests.service.cli.conftest import CAPACITY, Host, Run

from kvstow.config import EngineConfig
from kvstow.control.engine import OffloadEngine
from kvstow.testing.fakes import FakeClock
from kvstow_api.embeddeddirectory import EmbeddedDirectory


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(100.0)


@pytest.fixture
def server(make_host: Callable[..., Host], clock: FakeClock) -> Iterator[tuple[Host, TieredHost]]:
    engine = OffloadEngine(EngineConfig(slot_bytes=4096, capacity_slots=CAPACITY, block_tokens=16), clock=clock)
    tiered = TieredHost(engine, clock)
    yield make_host(directory=EmbeddedDirectory(engine, 2 * CAPACITY, tier=tiered.control)), tiered
    tiered.close()


Ask = Callable[..., Any]


@pytest.fixture
def ask(server: tuple[Host, TieredHost], run: Run) -> Ask:
    host, _ = server
    return lambda *arguments, **given: run(*arguments, "--server", host.url, **given)


@pytest.fixture
def tiered(server: tuple[Host, TieredHost]) -> TieredHost:
    return server[1]


def test_without_a_store_the_list_is_empty_and_says_why(ask: Ask, host: Host, run: Run) -> None:
    outcome = ask("get", "tier")
    assert outcome.exit_code == 0
    assert outcome.stderr == "no store is attached; `kvstow tier attach URL` attaches one\n"
    assert run("get", "tier", "--server", host.url).stderr == "no store is attached\n"
    assert json.loads(ask("get", "tiers", "-o", "json").stdout)["items"] == []


def test_a_store_is_attached_shown_and_detached(ask: Ask, tiered: TieredHost) -> None:
    outcome = ask("tier", "attach", "memory:", "--write", "selective")
    assert outcome.exit_code == 0, outcome.stderr
    assert outcome.stdout == "memory: is attached, writing selective; `kvstow get tier` shows whether it answers\n"
    shown = ask("get", "tier").stdout.splitlines()
    assert shown[0].split()[:3] == ["NAMESPACE", "POOL", "STATE"]
    assert shown[1].split()[:3] == ["a1", "host", "on"]
    wide = ask("get", "tier", "-o", "wide").stdout
    assert "transfers of rank 0 connected" in wide
    assert "FINGERPRINT" in wide
    assert ask("get", "tier", "-o", "name").stdout == "a1\n"
    assert ask("tier", "attach", "memory:").exit_code == 5
    outcome = ask("tier", "detach")
    assert (outcome.exit_code, outcome.stdout) == (0, "the store is detached\n")
    assert tiered.tier is None
    refused = ask("tier", "detach")
    assert refused.exit_code == 5
    assert "no store is attached" in refused.stderr


def test_a_url_that_cannot_be_used(ask: Ask) -> None:
    outcome = ask("tier", "attach", "mooncake://m")
    assert outcome.exit_code == 2
    assert "url is 'mooncake://m'; allowed: mooncake://MASTER:PORT" in outcome.stderr


def test_the_store_is_bypassed_and_used_again(ask: Ask, tiered: TieredHost) -> None:
    tiered.begin()
    assert ask("tier", "bypass", "--ttl", "10m").stdout == "the store is bypassed for 10m 0s\n"
    assert [*tiered.control.bypass] == [True, 600.0]
    assert "an operator has switched it off" in ask("get", "tier").stdout
    assert ask("tier", "bypass", "--off").stdout == "the store is used again\n"
    assert not tiered.control.bypass.bypassed
    assert ask("tier", "bypass", "--pool", "host").stdout == "the store is bypassed in pool host\n"
    assert tiered.control.tiers()[0].status.state == "bypassed"
    assert ask("tier", "bypass", "--pool", "other").exit_code == 4
    assert ask("tier", "bypass", "--off", "--ttl", "1s").exit_code == 2


def test_a_purge_asks_first(ask: Ask, tiered: TieredHost) -> None:
    tiered.begin()
    tiered.fill("f", 3)
    refused = ask("tier", "purge", "f")
    assert refused.exit_code == 2
    assert "there is no terminal to confirm it on" in refused.stderr
    planned = ask("tier", "purge", "f", "--dry-run")
    assert planned.stdout == (
        "would remove all objects of fingerprint f from the store, for all nodes that use it: memory:\n"
    )
    assert tiered.store.num_objects == 3
    outcome = ask("tier", "purge", "f", "--yes")
    assert (outcome.exit_code, outcome.stdout) == (0, "removed 3 objects from the store\n")
    assert tiered.store.num_objects == 0
    assert "3 objects" in ask("get", "operations", "--kind", "tier-purge").stdout


def test_a_purge_that_is_not_waited_for(ask: Ask, tiered: TieredHost) -> None:
    tiered.begin()
    tiered.fill("f", 3)
    outcome = ask("tier", "purge", "f", "--yes", "--no-wait", "-o", "json")
    assert outcome.exit_code == 0
    view = json.loads(outcome.stdout)
    assert view.get("objects", 3) == 3, "it was so quick that its result is there"
    assert view.get("kind", "tier-purge") == "tier-purge"


def test_weights_are_named(ask: Ask, tiered: TieredHost) -> None:
    tier = tiered.begin()
    early = ask("tier", "weights", "w2")
    assert early.exit_code == 5
    assert "have a name" in early.stderr
    tier.reset()
    outcome = ask("tier", "weights", "w2")
    assert outcome.exit_code == 0, outcome.stderr
    assert outcome.stdout == "the weights of pool host are w2 from the engine's next step on\n"
    tier.step()
    assert tier.fingerprint == "print-of-w2"


def test_top_has_a_row_while_a_store_is_attached(ask: Ask, tiered: TieredHost) -> None:
    assert "TIER" not in ask("top").stdout
    tier = tiered.begin()
    tier.counters.put_blocks = 1234
    tier._note_outage("no answer in 0.5 s")
    tiered.control.set_bypass(bypassed=False, ttl_seconds=None, pool=None)
    lines = ask("top", environ={"COLUMNS": "120"}).stdout.splitlines()
    (at,) = [number for number, line in enumerate(lines) if line.startswith("TIER")]
    assert lines[at + 1].split()[:2] == ["a1", "down"]
    assert "1,234" in lines[at + 1]
    assert lines[at + 2].strip() == "no answer in 0.5 s"
    tiered.control.set_bypass(bypassed=True, ttl_seconds=None, pool=None)
    assert "the tier's store is bypassed (undo: `kvstow tier bypass --off`)" in ask("top").stdout
