"""`kvstow get` and `kvstow describe` against a real server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from kvstow_api.answers import ProblemView
from kvstow_api.client import ApiError, Client
from kvstow_service.cli.get import _watch

KEYS = [bytes([0, 0, number]) for number in range(6)]


@pytest.fixture
def get(kvstow: Any, host: Any) -> Callable[..., Any]:
    host.store(*KEYS)
    return lambda *arguments: kvstow("get", *arguments)


@pytest.mark.parametrize(
    ("noun", "title", "cell"),
    [
        ("pools", "DROPPED", "128 KiB"),
        ("ranks", "PENDING", "64 KiB of 64 KiB (100.0 %)"),
        ("blocks", "IDLE", "cached"),
        ("transfers", "REQUEST", ""),
        ("operations", "PROGRESS", ""),
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


@pytest.mark.parametrize(
    ("noun", "names"), [("pools", ["host"]), ("ranks", ["0", "1"]), ("blocks", [key.hex() for key in KEYS])]
)
def test_names_are_what_other_commands_take(kvstow: Any, get: Any, noun: str, names: list[str]) -> None:
    listed = get(noun, "-o", "name").stdout.splitlines()
    assert sorted(listed) == names
    for name in listed:
        assert kvstow("describe", noun.removesuffix("s"), name).exit_code == 0


def test_an_empty_list_has_no_names(get: Any) -> None:
    assert get("transfers", "-o", "name").stdout == ""
    (titles,) = get("transfers").stdout.splitlines()
    assert titles.startswith("OP  DIRECTION")


def test_get_lists_and_points_to_describe(get: Any) -> None:
    outcome = get("rank", "1")
    assert outcome.exit_code == 2
    assert "`kvstow describe rank 1` shows one" in outcome.stderr
    assert get("log-levels", "kvstow").exit_code == 2


@pytest.mark.parametrize("item", [["rank", "7"], ["pool", "gpu"], ["block", "00ff"], ["operation", "evict-1"]])
def test_an_absent_item_is_exit_code_4(kvstow: Any, item: list[str]) -> None:
    outcome = kvstow("describe", *item)
    assert (outcome.exit_code, outcome.stdout) == (4, "")
    assert outcome.stderr.startswith("kvstow describe ")
    assert f"\nhint: `kvstow get {item[0]}s` lists what there is\n" in outcome.stderr


def test_an_invalid_key_is_a_usage_error(kvstow: Any) -> None:
    assert kvstow("describe", "block", "xyz").exit_code == 2


def test_pages_are_joined_up_to_the_limit(get: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    call = Client.call

    def call_for_small_pages(client: Client, route: Any, body: Any = None, **given: Any) -> Any:
        if "page_size" in given:
            given["page_size"] = min(given["page_size"], 2)
        return call(client, route, body, **given)

    monkeypatch.setattr(Client, "call", call_for_small_pages)
    assert len(json.loads(get("blocks", "-o", "json").stdout)["items"]) == 6
    outcome = get("blocks", "-o", "json", "--limit", "5")
    assert len(json.loads(outcome.stdout)["items"]) == 5
    assert outcome.stderr == "there are more than 5; --limit shows them\n"


def test_stats_can_be_one_section(kvstow: Any, host: Any) -> None:
    host.store(*KEYS)
    stats = ("describe", "stats", "--section")
    outcome = kvstow(*stats, "lookups")
    assert "query blocks" in outcome.stdout
    assert "evictions" not in outcome.stdout
    everything = kvstow("describe", "stats").stdout
    assert "evictions" in everything
    assert ", mean " in everything
    assert kvstow(*stats, "weather").exit_code == 2


def test_transfers_in_flight_are_listed(get: Any, host: Any) -> None:
    host.engine.begin_store([b"\x09\x09"], [0], request_id="r-7")
    shown = get("transfers", "--direction", "store").stdout
    assert "r-7" in shown
    assert "0, 1" in shown  # the ranks that it waits for
    assert "r-7" not in get("transfers", "--direction", "load").stdout


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (
            ["server"],
            ["  mode", "  state", "drain", "bypass", "running operations  -", "0     ready", "1     ready"],
        ),
        (["pool"], ["  slots", "    cached", "  evictions"]),
        (["rank", "1"], ["  boot id", "  pinned"]),
        (["block", KEYS[1].hex()], ["  leases"]),
    ],
)
def test_describe_shows_every_field(kvstow: Any, host: Any, arguments: list[str], lines: list[str]) -> None:
    host.store(*KEYS)
    outcome = kvstow("describe", *arguments)
    assert outcome.exit_code == 0, outcome.stderr
    for line in lines:
        assert f"\n{line}" in "\n" + outcome.stdout


def test_a_watched_list_that_is_cut_says_so_below(host: Any, on_terminal: Any) -> None:
    host.store(*KEYS)
    with on_terminal("get", "blocks", "--limit", "5", "--watch") as terminal:
        terminal.until("LEASES")
        terminal.until("there are more than 5; --limit shows them")
        terminal.type("\x03")
        assert terminal.end() == 0


class Answers:
    """Answers of a watched server, one for each request. Ctrl-C ends the last sleep."""

    def __init__(self, *answers: str | ApiError) -> None:
        self._answers = list(answers)
        self.slept: list[float] = []

    def fetch(self) -> str:
        answer = self._answers.pop(0)
        if isinstance(answer, ApiError):
            raise answer
        return answer

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        if not self._answers:
            raise KeyboardInterrupt


def watched(answers: Answers) -> None:
    _watch(answers.fetch, 2.0, title="kvstow get ranks", sleep=answers.sleep)


def test_watching_prints_what_has_changed(capsys: pytest.CaptureFixture[str]) -> None:
    answers = Answers("one", "one", "two")
    watched(answers)
    assert capsys.readouterr().out == "one\ntwo\n"
    assert answers.slept == [2.0, 2.0, 2.0]


def test_watching_survives_a_lost_connection(capsys: pytest.CaptureFixture[str]) -> None:
    watched(Answers("one", ApiError("it is away"), ApiError("it is away"), "one", "two"))
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("one\ntwo\n", "no answer: it is away; trying again\n")


def test_watching_ends_if_the_server_refuses_or_never_answered() -> None:
    with pytest.raises(ApiError, match="away"):
        watched(Answers(ApiError("it is away")))
    refusal = ProblemView(
        type="t", title="t", status=403, detail="d", instance="i", code="c", errors=[], retry_after=None
    )
    with pytest.raises(ApiError, match="no"):
        watched(Answers("one", ApiError("no", refusal)))


def test_a_watched_list_is_one_json_object_a_line(host: Any, child_environ: dict[str, str]) -> None:
    options = ("--watch", "--interval=100ms", "-o", "json", "--server", host.url)
    command = [sys.executable, "-m", "kvstow_service", "get", "pools", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=child_environ) as watching:
        assert watching.stdout is not None
        assert json.loads(watching.stdout.readline())["items"][0]["policy"] == "auto"
        host.engine.admin.set_policy("lru")
        assert json.loads(watching.stdout.readline())["items"][0]["policy"] == "lru"
        watching.kill()


def test_on_a_terminal_a_watched_list_is_replaced(host: Any, on_terminal: Any) -> None:
    with on_terminal("get", "pools", "--watch", "-o", "wide", "--interval", "100ms") as terminal:
        assert terminal.until("kvstow get pools").endswith("\x1b[2J\x1b[1;1H\x1b[1m")
        terminal.until(host.url)
        terminal.until("auto")
        host.engine.admin.set_policy("lru")
        terminal.until("lru")
        terminal.type("\x03")
        assert terminal.end() == 0
