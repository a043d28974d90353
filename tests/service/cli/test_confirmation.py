"""Destructive commands ask for confirmation and name their server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click
import pytest

from kvstow_service.cli import COMMANDS, load
from kvstow_service.cli.connection import Connection, Invocation
from kvstow_service.cli.failures import CommandError

CALL = Invocation(Connection(server="http://prod:1"))


def test_a_harmless_command_needs_no_confirmation() -> None:
    CALL.confirm("grow the pool", destructive=False)


def test_yes_names_the_server_and_asks_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    Invocation(CALL.connection, yes=True).confirm("remove 2 blocks", destructive=True)
    assert capsys.readouterr().err == "server: http://prod:1\n"


def test_the_question_names_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def answer(question: str, err: bool) -> bool:
        asked.append(question)
        return len(asked) == 1

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr(click, "confirm", answer)
    CALL.confirm("remove 2 blocks", destructive=True)
    assert asked == ["Remove 2 blocks on http://prod:1?"]
    with pytest.raises(CommandError, match="nothing was changed"):
        CALL.confirm("remove 2 blocks", destructive=True)


def test_without_a_terminal_a_flag_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    with pytest.raises(CommandError, match=r"would remove 2 blocks on http://prod:1") as refusal:
        CALL.confirm("remove 2 blocks", destructive=True)
    assert refusal.value.hint.startswith("--yes proceeds without a prompt")


def with_yes(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    if isinstance(command, click.Group):
        for child in command.commands.values():
            yield from with_yes(f"{name} {child.name}", child)
    elif any("--yes" in parameter.opts for parameter in command.params):
        yield name, command


def test_these_commands_can_be_destructive() -> None:
    found = dict(pair for name in COMMANDS for pair in with_yes(name, load(name)))
    pools = {"evict", "purge", "resize", "config set", "drain", "detach", "delete pool"}
    assert set(found) == pools
    for command in found.values():
        assert any("--dry-run" in parameter.opts for parameter in command.params), "it can be tried first"


@pytest.mark.parametrize(
    "arguments",
    [
        ["evict", "--slots", "1"],
        ["purge", "--all"],
        ["resize", "--slots", "1"],
        ["config", "set", "capacity_slots=1"],
        ["drain"],
    ],
    ids=" ".join,
)
def test_each_names_its_server(run: Any, host: Any, arguments: list[str]) -> None:
    keys = [b"\x00\x01", b"\x00\x02"]
    host.store(*keys)
    given = (*arguments, "--server", host.url)
    assert f" on {host.url}, and there is no terminal" in run(*given).stderr
    outcome = run(*given, "--yes")
    assert (outcome.exit_code, outcome.stderr) == (0, f"server: {host.url}\n")
