"""What the documents tell people to type is what the command line takes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from kvstow_service.cli import app

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("docs/**/*.md"), ROOT / "helm" / "kvstow" / "files" / "rules.yaml"])

_TYPED = re.compile(r"`(?:\$ )?kvstow ([^`]+)`|^\s*\$ (?:.*/)?kvstow ([^#|>&\n]+)", re.MULTILINE)


def commands(text: str) -> Iterator[str]:
    """What stands behind `kvstow`, in code within sentences and behind prompts."""
    for match in _TYPED.finditer(text):
        yield (match[1] or match[2]).strip()


COMMANDS = [(path, command) for path in DOCUMENTS for command in commands(path.read_text())]


@pytest.mark.parametrize(
    ("path", "command"), COMMANDS, ids=[f"{path.stem}: {command}"[:80] for path, command in COMMANDS]
)
def test_the_command_line_takes_it(path: Path, command: str) -> None:
    given: click.Command = app
    context, words = click.Context(app, info_name="kvstow"), shlex.split(command)
    while isinstance(given, click.Group) and words:
        name, found, words = given.resolve_command(context, words)
        assert found is not None, f"{path.name}: there is no {name}"
        given, context = found, click.Context(found, context, info_name=name)
    if words:  # else it is only named
        given.make_context(context.info_name, words)


def test_there_are_some() -> None:
    assert {"doctor", "describe pool", "get transfers"} <= {command for _, command in COMMANDS}


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if path.suffix == ".md"], ids=lambda path: path.stem)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", path.read_text()):
        assert "://" in target or (path.parent / target).exists(), f"{path.name}: {target}"
