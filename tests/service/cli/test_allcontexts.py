"""`--all-contexts`: one command over several servers, some of which are away, silent or refuse."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.service.cli.terminal import Terminal

from kvstow_service.cli.allcontexts import AllContexts
from kvstow_service.cli.contexts import Context
from kvstow_service.cli.failures import CommandError

KEYS = [bytes([0, 0, number]) for number in range(6)]
GET = ("--all-contexts", "get")

# httpcore leaves the socket that it could not connect to the garbage collector
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture
def name_servers(run: Any) -> Callable[..., None]:
    def name(**servers: str) -> None:
        for context, url in servers.items():
            assert run("context", "set", context, "--server", url).exit_code == 0

    return name


@pytest.fixture
def two(make_host: Any, name_servers: Any) -> list[Any]:
    """The engines `east`, with six blocks, and `west`."""
    hosts = [make_host(), make_host()]
    hosts[0].store(*KEYS)
    name_servers(west=hosts[1].url, east=hosts[0].url)
    return hosts


class Mute:
    """A server that accepts connections, and sends one byte after the other without an end if `is_slow`."""

    def __init__(self, *, is_slow: bool) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._is_slow, self._ended = is_slow, threading.Event()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                connected, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._answer, args=(connected,))
            self._threads.append(thread)
            thread.start()

    def _answer(self, connected: socket.socket) -> None:
        with connected:
            try:
                connected.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n" if self._is_slow else b"")
                while not self._ended.wait(0.02):
                    connected.sendall(b" " if self._is_slow else b"")
            except OSError:
                return

    def close(self) -> None:
        self._ended.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(30)


@pytest.fixture(params=[False, True], ids=["silent", "slow"])
def mute(request: pytest.FixtureRequest) -> Iterator[Mute]:
    server = Mute(is_slow=request.param)
    yield server
    server.close()


def rows_of(table: str) -> list[dict[str, str]]:
    titles, *rows = (re.split("  +", line) for line in table.splitlines())
    return [dict(zip(titles, row, strict=True)) for row in rows]


@pytest.mark.parametrize("arguments", [("--all-contexts", "get", "pools"), ("get", "pools", "--all-contexts")])
def test_one_table_has_the_rows_of_all_servers(run: Any, two: Any, arguments: tuple[str, ...]) -> None:
    outcome = run(*arguments)
    assert (outcome.exit_code, outcome.stderr) == (0, "")
    rows = rows_of(outcome.stdout)
    assert [(row["CONTEXT"], row["NAME"], row["USED"]) for row in rows] == [
        ("east", "host", "37.5 %"),
        ("west", "host", "0.0 %"),
    ]


@pytest.mark.parametrize(
    "noun", ["servers", "pools", "sessions", "namespaces", "ranks", "blocks", "transfers", "operations", "log-levels"]
)
def test_every_list_can_be_of_all_servers(run: Any, two: Any, noun: str) -> None:
    outcome = run(*GET, noun, "-o", "wide")
    assert outcome.exit_code == 0, outcome.stderr
    titles, *rows = outcome.stdout.splitlines()
    assert titles.split()[0] == "CONTEXT"
    contexts = {row.split()[0] for row in rows}
    assert contexts == {"blocks": {"east"}, "transfers": set(), "operations": set()}.get(noun, {"east", "west"})
    document = json.loads(run(*GET, noun, "-o", "json").stdout)
    as_yaml = yaml.safe_load(run(*GET, noun, "-o", "yaml").stdout)
    assert [item.keys() for item in document["items"]] == [item.keys() for item in as_yaml["items"]]
    assert {item["context"] for item in document["items"]} == contexts


def test_names_come_with_the_flag_that_chooses_their_server(run: Any, two: Any) -> None:
    names = run(*GET, "ranks", "-o", "name").stdout.splitlines()
    assert names == ["--context east 0", "--context east 1", "--context west 0", "--context west 1"]
    for name in names:
        assert run("describe", "rank", *name.split()).exit_code == 0


def test_servers_that_are_away_or_refuse_are_named_and_the_others_rows_printed(
    run: Any, two: Any, name_servers: Any, make_host: Any, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("t")
    closed = make_host(token_file=tmp_path / "token", viewer_token_file=tmp_path / "token").url
    name_servers(away="http://127.0.0.1:1", closed=closed)
    outcome = run(*GET, "pools")
    assert outcome.exit_code == 6
    assert [row["CONTEXT"] for row in rows_of(outcome.stdout)] == ["east", "west"]
    assert "kvstow get pools: context away (http://127.0.0.1:1): http://127.0.0.1:1 cannot be reached" in outcome.stderr
    assert f"context closed ({closed}): Unauthorized" in outcome.stderr
    document = json.loads(run(*GET, "pools", "-o", "json").stdout)
    assert [item["context"] for item in document["items"]] == ["east", "west"]
    assert [(error["context"], error["server"]) for error in document["errors"]] == [
        ("away", "http://127.0.0.1:1"),
        ("closed", closed),
    ]
    assert "cannot be reached" in document["errors"][0]["error"]


def test_a_server_that_does_not_answer_in_time_holds_nobody_up(
    run: Any, two: Any, name_servers: Any, mute: Mute
) -> None:
    name_servers(mute=mute.url)
    for timeout in ("1s", "4s", "16s", "64s"):  # a slow machine may need more than one second for the others
        outcome = run(*GET, "pools", "--request-timeout", timeout)
        assert outcome.exit_code == 6
        assert f"context mute ({mute.url}): " in outcome.stderr
        assert "did not answer" in outcome.stderr
        if "context east" not in outcome.stderr and "context west" not in outcome.stderr:
            break
    assert [row["CONTEXT"] for row in rows_of(outcome.stdout)] == ["east", "west"]


def test_servers_are_asked_at_the_same_time() -> None:
    """Each answers only when all have been asked."""
    barrier = threading.Barrier(8)
    servers = AllContexts({f"c{number}": Context("http://127.0.0.1:1") for number in range(8)}, 60.0)
    answers = servers.ask(lambda client: barrier.wait(60))
    assert sorted(answers.views.values()) == list(range(8))
    assert list(answers.views) == [f"c{number}" for number in range(8)]


def test_a_server_that_hangs_is_not_asked_again_before_it_has_answered() -> None:
    asked, is_asked, released = list[int](), threading.Event(), threading.Event()

    def hang(client: Any) -> str:
        asked.append(1)
        is_asked.set()
        released.wait(60)
        return "late"

    servers = AllContexts({"a": Context("http://127.0.0.1:1")}, 0.05)
    for _ in range(3):
        answers = servers.ask(hang)
        assert [str(one.error) for one in answers.failures] == ["it did not answer within 0.05 s"]
        assert is_asked.wait(60), "its thread may begin after the deadline"
    assert asked == [1]
    released.set()
    deadline = time.monotonic() + 60
    while asked == [1]:
        servers.ask(lambda client: asked.append(2))
        assert time.monotonic() < deadline


def test_an_error_of_ours_is_raised_and_not_taken_for_a_servers() -> None:
    def fail(client: Any) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        AllContexts({"a": Context("http://127.0.0.1:1")}, 30.0).ask(fail)

    def refuse(client: Any) -> None:
        raise CommandError("no", "never")

    (failure,) = AllContexts({"a": Context("http://127.0.0.1:1")}, 30.0).ask(refuse).failures
    assert str(failure.error) == "no"


def test_a_pool_that_only_some_servers_have(run: Any, two: Any) -> None:
    assert {row["CONTEXT"] for row in rows_of(run(*GET, "ranks", "--pool", "host").stdout)} == {"east", "west"}
    outcome = run(*GET, "ranks", "--pool", "gone")
    assert (outcome.exit_code, outcome.stdout) == (4, "")
    assert "no server has a pool 'gone'" in outcome.stderr


def test_a_list_that_is_cut_says_where(run: Any, two: Any) -> None:
    outcome = run(*GET, "blocks", "--limit", "2")
    assert len(rows_of(outcome.stdout)) == 2
    assert outcome.stderr == "context east: there are more than 2; --limit shows them\n"


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (("--server", "http://127.0.0.1:1"), "--server"),
        (("--context", "east"), "--context"),
        (("--token-file", "t"), "--token-file"),
        (("--ca-file", "c"), "--ca-file"),
    ],
)
def test_what_is_about_one_server_is_refused(run: Any, two: Any, given: tuple[str, ...], named: str) -> None:
    outcome = run(*GET, "pools", *given)
    assert outcome.exit_code == 2
    assert f"{named} is {given[1]!r}; allowed: nothing with --all-contexts: each context has its own" in outcome.stderr


def test_the_environment_chooses_no_server_and_gives_no_token_away(run: Any, two: Any) -> None:
    environ = {"KVSTOW_SERVER": "http://127.0.0.1:1", "KVSTOW_CONTEXT": "west", "KVSTOW_TOKEN_FILE": "/none"}
    outcome = run(*GET, "pools", environ=environ)
    assert outcome.exit_code == 0, outcome.stderr
    assert len(rows_of(outcome.stdout)) == 2


def test_without_contexts_there_is_nobody_to_ask(run: Any) -> None:
    outcome = run(*GET, "pools")
    assert outcome.exit_code == 2
    assert "`kvstow context set` adds one" in outcome.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["evict", "--slots", "1", "--yes"],
        ["describe", "server"],
        ["wait", "--timeout", "0"],
        ["top"],
        ["drain", "--yes"],
        ["context", "list"],
        ["events"],
        ["serve"],
    ],
    ids=" ".join,
)
def test_other_commands_are_about_one_server(run: Any, two: Any, arguments: list[str]) -> None:
    outcome = run("--all-contexts", *arguments)
    assert outcome.exit_code == 2
    told = f"`kvstow {arguments[0]}` works with one server; --all-contexts is for `kvstow get` and `kvstow doctor`"
    assert told in outcome.stderr
    assert two[0].engine.stats().pool.slots.cached == 6


def test_the_doctor_examines_all_servers(run: Any, two: Any, name_servers: Any) -> None:
    two[1].ranks[0].state, two[1].ranks[0].error = "degraded", "no more memory"
    two[1].ranks[0].report()
    outcome = run("--all-contexts", "doctor")
    assert outcome.exit_code == 1
    east, west = outcome.stdout.split("context west")
    assert east.startswith("context east\n")
    assert "no more memory" in west
    assert "no more memory" not in east
    items = json.loads(run("--all-contexts", "doctor", "-o", "json").stdout)["items"]
    assert [(item["context"], bool(item["checks"])) for item in items] == [("east", True), ("west", True)]
    name_servers(away="http://127.0.0.1:1")
    outcome = run("--all-contexts", "doctor")
    assert outcome.exit_code == 6
    assert "no more memory" in outcome.stdout
    assert "context away" in outcome.stderr


def test_a_watched_list_shows_who_does_not_answer_until_it_does(
    two: Any, make_host: Any, run: Any, name_servers: Any, tmp_path: Path, child_environ: dict[str, str]
) -> None:
    uds = tmp_path / "admin.sock"
    name_servers(north=f"unix:{uds}")
    environ = {**child_environ, "KVSTOW_CONTEXTS": str(tmp_path / "contexts.toml"), "NO_COLOR": "1"}
    watch = (*GET, "pools", "--watch", "--interval", "100ms")
    with Terminal(*watch, environ=environ) as terminal:
        terminal.until("east")
        terminal.until("west")
        terminal.until(f"context north (unix:{uds}): ")
        north = make_host(uds=uds)
        terminal.until("north    host")
        north.stop()
        terminal.until(f"context north (unix:{uds}): ")
        terminal.type("\x03")
        assert terminal.end() == 0
