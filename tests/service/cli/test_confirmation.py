"""Destructive commands ask for confirmation and name their server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click
import pytest

from kvstow_service.cli import COMMANDS, load


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
