"""The documents name commands, files, modules and tests that exist."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import click
import pytest

from kvstow.config import EngineConfig
from kvstow.control.engine import OffloadEngine
from kvstow.stats import SLOT_STATES, EngineState
from kvstow_api.embeddeddirectory import EmbeddedDirectory
from kvstow_api.health import Health
from kvstow_api.looplag import LoopMonitor
from kvstow_service.admin.adminhost import make_api_host
from kvstow_service.admin.adminoptions import AdminOptions
from kvstow_service.admin.sockets import AdminSockets
from kvstow_service.admin.ticker import Ticker
from kvstow_service.cli import app

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md"), ROOT / "helm" / "kvstow" / "files" / "rules.yaml"])

_TYPED = re.compile(r"`(?:\$ )?kvstow ([^`]+)`|^\s*\$ (?:.*/|kubectl .* -- )?kvstow ([^#|>&\n]+)", re.MULTILINE)


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
    context = click.Context(app, info_name="kvstow")
    words = [word for word in shlex.split(command) if word != "--help"]  # which would print and end
    while isinstance(given, click.Group) and words:
        _, words, _ = given.make_parser(context).parse_args(words)  # options of the group itself
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


PROSE = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("helm/**/*.md"), ROOT / "bench" / "README.md"]
)
CODE = {
    str(path.relative_to(ROOT)): path.read_text()
    for folder in ("engine", "api", "service", "tests", "bench", "helm", "examples")
    for path in (ROOT / folder).rglob("*.py")
}
CHART = "".join(path.read_text() for path in (ROOT / "helm").rglob("*.yaml"))
of_prose = pytest.mark.parametrize("document", PROSE, ids=lambda path: str(path.relative_to(ROOT)))


@of_prose
def test_files_that_it_names_exist(document: Path) -> None:
    for name in re.findall(r"(?<![\w./*-])[\w/]+\.py\b", document.read_text()):
        assert any(f"/{path}".endswith(f"/{name}") for path in CODE), name


@of_prose
def test_modules_and_loggers_that_it_names_exist(document: Path) -> None:
    known = {path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in CODE}
    for name in re.findall(r"`(kvstow(?:_api|_service)?\.[a-z_.]+)`", document.read_text()):
        is_module = any(f".{module}".endswith(f".{name}") for module in known)
        assert is_module or any(f'getLogger("{name}")' in text for text in CODE.values()), name


@of_prose
def test_classes_that_it_names_exist(document: Path) -> None:
    for name in re.findall(r"`([A-Z][a-z]+(?:[A-Z][a-z]+)+)[`.(]", document.read_text()):
        assert any(re.search(rf"\b{name}\b", text) for text in CODE.values()) or name in CHART, name


@of_prose
def test_tests_and_mutants_that_it_names_exist(document: Path) -> None:
    """A name may be cut off with dots."""
    text = document.read_text()
    names = re.findall(r"`(test_\w+)(?:\.\.\.)?`", text)
    for mutants in re.findall(r"mutants? ((?:`[a-z_]+`(?:, )?)+)", text):
        names += re.findall(r"`(\w+)`", mutants)
    for name in names:
        assert any(f"def {name}" in source for source in CODE.values()), name


def explained(head: str) -> set[str]:
    """What the table in the operations guide whose first column has this head explains."""
    text = (ROOT / "docs" / "operations.md").read_text()
    table = text.partition(f"| {head} |")[2].partition("\n\n")[0]
    return set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE))


def test_every_state_is_explained() -> None:
    assert explained("state") == set(get_args(EngineState))
    assert explained("slot") == set(SLOT_STATES)


def test_every_readiness_check_is_explained() -> None:
    engine = OffloadEngine(EngineConfig(slot_bytes=64, capacity_slots=4))
    host = make_api_host(
        EmbeddedDirectory(engine, 4), Ticker(engine), AdminSockets(), AdminOptions(), mode="test", agent_token="token"
    )
    assert explained("check") == set(Health(host, LoopMonitor()).probes["readyz"].checks)
