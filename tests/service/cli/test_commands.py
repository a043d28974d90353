"""The list of commands, their lazy imports."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import click
import pytest

import kvstow
from kvstow_service.cli import COMMANDS, load

HEAVY = ["torch", "numpy", "fastapi", "starlette", "uvicorn", "pydantic", "prometheus_client", "vllm"]
ON_THIS_MACHINE = {"serve", "keeper", "replay"}


def loaded(arguments: list[str], watched: list[str], environ: dict[str, str]) -> list[str]:
    """Which of these modules `kvstow ARGUMENTS` imports."""
    return loaded_by_each([arguments], watched, environ)[" ".join(arguments)]


LOADED_BY_EACH = """
import atexit, os, sys
from kvstow_service.cli import app
for arguments in {every!r}:
    child = os.fork()
    if not child:
        atexit.register(lambda: print("loaded", (arguments, [name for name in {watched!r} if name in sys.modules])))
        app(arguments)
    os.waitpid(child, 0)
"""


def loaded_by_each(every: list[list[str]], watched: list[str], environ: dict[str, str]) -> dict[str, list[str]]:
    """The same of several, in forks of one process that has imported only the command line."""
    code = LOADED_BY_EACH.format(every=every, watched=watched)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ, check=True)
    lines = [line.removeprefix("loaded ") for line in result.stdout.splitlines() if line.startswith("loaded ")]
    found = {" ".join(arguments): names for arguments, names in map(ast.literal_eval, lines)}
    assert len(found) == len(every)
    return found


def test_help_imports_no_heavy_modules(child_environ: dict[str, str]) -> None:
    every = [["--help"], *([name, "--help"] for name in COMMANDS if name != "serve")]
    found = loaded_by_each(every, [*HEAVY, "httpx", "rich", "yaml"], child_environ)
    assert {arguments: names for arguments, names in found.items() if names} == {}


@pytest.mark.parametrize("arguments", [["get", "pools"], ["describe", "stats", "-o", "yaml"], ["top"], ["doctor"]])
def test_remote_commands_import_no_heavy_modules(
    host: Any, arguments: list[str], child_environ: dict[str, str]
) -> None:
    assert loaded([*arguments, "--server", host.url], HEAVY, child_environ) == []


def test_the_command_list_matches_each_commands_help() -> None:
    helps = {name: (load(name).help or "").split("\n\n")[0] for name in COMMANDS}
    assert {name: said.help for name, said in COMMANDS.items()} == {
        name: " ".join(first.split()) for name, first in helps.items()
    }


@pytest.mark.parametrize("name", COMMANDS)
def test_every_remote_command_has_connection_flags(name: str) -> None:
    command = load(name)
    commands = list(command.commands.values()) if isinstance(command, click.Group) else [command]
    if name in ON_THIS_MACHINE or name in ("trace", "completion"):
        return
    for one in commands:
        flags = {flag for parameter in one.params for flag in parameter.opts}
        assert {"--server", "--token-file", "--ca-file"} <= flags, one.name


def with_yes(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    if isinstance(command, click.Group):
        for child in command.commands.values():
            yield from with_yes(f"{name} {child.name}", child)
    elif any("--yes" in parameter.opts for parameter in command.params):
        yield name, command


def test_these_commands_can_be_destructive() -> None:
    found = dict(pair for name in COMMANDS for pair in with_yes(name, load(name)))
    assert set(found) == {"evict", "purge", "resize", "config set", "drain", "detach", "delete pool"}
    for command in found.values():
        assert any("--dry-run" in parameter.opts for parameter in command.params), "it can be tried first"


def test_version(run: Any) -> None:
    assert run("--version").stdout == f"kvstow, version {kvstow.__version__}\n"


def test_an_unknown_command_is_a_usage_error(run: Any) -> None:
    outcome = run("evic")
    assert outcome.exit_code == 2
    assert "evict" in outcome.stderr


def test_a_missing_package_is_named(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "kvstow_service.cli.serve", raising=False)
    monkeypatch.setitem(sys.modules, "pydantic.fields", None)
    outcome = run("serve", "--help")
    assert outcome.exit_code == 1
    assert "this command needs the package pydantic" in outcome.stderr
    assert "pip install '.[service,cli]' in KVStow's checkout" in outcome.stderr


def test_the_script_completes_commands_nouns_and_flags(child_environ: dict[str, str]) -> None:
    def complete(*words: str) -> str:
        asked = {"_KVSTOW_COMPLETE": "bash_complete", "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
        # A command run by `python -c` has no name: click takes it from the script.
        code = "import sys; sys.argv[0] = 'kvstow'; from kvstow_service.cli import main; main()"
        command = [sys.executable, "-c", code]
        return subprocess.run(
            command, capture_output=True, text=True, env={**child_environ, **asked}, check=True
        ).stdout

    assert complete("kvstow", "ev") == "plain,events\nplain,evict\n"
    assert complete("kvstow", "get", "po") == "plain,pools\n"
    assert "plain,--dry-run" in complete("kvstow", "evict", "--d")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_completion_script(run: Any, shell: str) -> None:
    outcome = run("completion", shell)
    assert outcome.exit_code == 0
    assert f"_KVSTOW_COMPLETE={shell}_complete" in outcome.stdout
