"""`kvstow get` and `kvstow describe` against a real server."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import yaml

KEYS = [bytes([0, 0, number]) for number in range(6)]


@pytest.fixture
def get(run: Any, host: Any) -> Callable[..., Any]:
    host.store(*KEYS)
    return lambda *arguments: run("get", *arguments, "--server", host.url)


@pytest.mark.parametrize(
    ("noun", "title", "cell"),
    [
        ("pools", "POLICY", "lru"),
        ("ranks", "PENDING", "64 KiB of 64 KiB (100.0 %)"),
        ("blocks", "IDLE", "cached"),
        ("readiness", "REASON", "2 ready"),
        ("transfers", "REQUEST", ""),
        ("operations", "PROGRESS", ""),
        ("drain", "LEASES", "off"),
        ("bypass", "STORES", "on"),
        ("log-levels", "LOGGER", "kvstow.api"),
    ],
)
def test_a_table_has_titles_and_no_escapes_in_a_pipe(get: Any, noun: str, title: str, cell: str) -> None:
    outcome = get(noun)
    assert outcome.exit_code == 0, outcome.stderr
    titles, *rows = outcome.stdout.splitlines()
    assert title in titles
    assert cell in "\n".join(rows)
    assert "\x1b" not in outcome.stdout
    assert not any(line.endswith(" ") for line in outcome.stdout.splitlines())


def test_wide_has_more_columns(get: Any) -> None:
    assert "QUARANTINED" not in get("pools").stdout
    assert "QUARANTINED" in get("pools", "-o", "wide").stdout


@pytest.mark.parametrize("noun", ["info", "readiness", "stats", "pools", "ranks", "blocks", "transfers", "operations"])
def test_json_and_yaml_are_the_same_answer(get: Any, noun: str) -> None:
    as_json, as_yaml = json.loads(get(noun, "-o", "json").stdout), yaml.safe_load(get(noun, "-o", "yaml").stdout)
    assert as_json.keys() == as_yaml.keys()
    assert as_json.keys()


def test_one_thing_by_its_name(get: Any) -> None:
    assert json.loads(get("rank", "1", "-o", "json").stdout)["rank"] == 1
    assert json.loads(get("pool", "host", "-o", "json").stdout)["capacity_slots"] == 16
    assert json.loads(get("block", KEYS[0].hex(), "-o", "json").stdout)["state"] == "cached"


@pytest.mark.parametrize("arguments", [["rank", "7"], ["pool", "gpu"], ["block", "00ff"], ["op", "evict-1"]])
def test_what_is_not_there_is_exit_code_4(get: Any, arguments: list[str]) -> None:
    outcome = get(*arguments)
    assert (outcome.exit_code, outcome.stdout) == (4, "")
    assert outcome.stderr.startswith("kvstow get ")
    assert f"\nfix: `kvstow get {arguments[0]}` lists what there is\n" in outcome.stderr


def test_a_key_that_is_no_key_is_a_usage_error(get: Any) -> None:
    assert get("block", "xyz").exit_code == 2


def test_pages_are_put_together_up_to_the_limit(get: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstow_service.cli.get._PAGE", 2)
    assert len(json.loads(get("blocks", "-o", "json").stdout)["items"]) == 6
    outcome = get("blocks", "-o", "json", "--limit", "5")
    assert len(json.loads(outcome.stdout)["items"]) == 5
    assert outcome.stderr == "there are more than these 5: see them with --limit\n"


def test_stats_can_be_one_section(get: Any) -> None:
    outcome = get("stats", "--section", "lookups")
    assert "query blocks" in outcome.stdout
    assert "evictions" not in outcome.stdout
    assert get("stats", "--section", "weather").exit_code == 2


def test_transfers_in_flight_are_listed(get: Any, host: Any) -> None:
    host.engine.begin_store([b"\x09\x09"], [0], request_id="r-7")
    shown = get("transfers", "--direction", "store").stdout
    assert "r-7" in shown
    assert "0, 1" in shown  # the ranks that it waits for
    assert "r-7" not in get("transfers", "--direction", "load").stdout


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (["server"], ["  mode", "  state", "drain", "bypass", "running operations  -"]),
        (["pool"], ["  slots", "    cached", "  evictions"]),
        (["rank", "1"], ["  boot id", "  pinned"]),
        (["block", KEYS[1].hex()], ["  leases"]),
    ],
)
def test_describe_says_everything_of_one_thing(run: Any, host: Any, arguments: list[str], lines: list[str]) -> None:
    host.store(*KEYS)
    outcome = run("describe", *arguments, "--server", host.url)
    assert outcome.exit_code == 0, outcome.stderr
    for line in lines:
        assert f"\n{line}" in "\n" + outcome.stdout


def test_describe_says_nothing_of_what_is_not_there(run: Any, host: Any) -> None:
    outcome = run("describe", "rank", "9", "--server", host.url)
    assert (outcome.exit_code, outcome.stdout) == (4, "")
