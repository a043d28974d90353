"""The documents name commands, files, modules and tests that exist."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import click
import yaml
from bench import report
from tests.mutants import MUTANTS, PATCHED

from kvstow.config import EngineConfig
from kvstow.control.engine import OffloadEngine
from kvstow.stats import SLOT_STATES, EngineState
from kvstow_api.app import create_app
from kvstow_api.conditions.evidence import TABLE
from kvstow_api.directory import EmbeddedDirectory
from kvstow_service.admin.adminhost import AdminOptions, Ticker, make_api_host
from kvstow_service.admin.sockets import AdminSockets
from kvstow_service.cli import app

RULES = Path(__file__).parents[1] / "helm" / "kvstow" / "files" / "rules.yaml"
ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md"), ROOT / "helm" / "kvstow" / "files" / "rules.yaml"])

_TYPED = re.compile(r"`(?:\$ )?kvstow ([^`]+)`|^\s*\$ (?:\S*/|kubectl .* -- )?kvstow ([^#|>&\n]+)", re.MULTILINE)


def commands(text: str) -> Iterator[str]:
    """What stands behind `kvstow`, in code within sentences and behind prompts."""
    for match in _TYPED.finditer(text):
        yield (match[1] or match[2]).strip()


COMMANDS = [(path, command) for path in DOCUMENTS for command in commands(path.read_text())]


def take(command: str) -> None:
    """Parse it as the command line does. Raises what click would say."""
    given: click.Command = app
    context = click.Context(app, info_name="kvstow")
    words = [word for word in shlex.split(command) if word != "--help"]  # which would print and end
    while isinstance(given, click.Group) and words:
        _, words, _ = given.make_parser(context).parse_args(words)  # options of the group itself
        name, found, words = given.resolve_command(context, words)
        assert found is not None, f"there is no {name}"
        given, context = found, click.Context(found, context, info_name=name)
    if words:  # else it is only named
        given.make_context(context.info_name, words)


def test_the_command_line_takes_what_is_written() -> None:
    refused = []
    for path, command in COMMANDS:
        try:
            take(command)
        except (click.ClickException, AssertionError) as error:
            refused.append((path.name, command, str(error)))
    assert refused == []


def test_there_are_some() -> None:
    assert {"doctor", "describe server", "get contexts"} <= {command for _, command in COMMANDS}


PROSE = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("helm/**/*.md"),
        *ROOT.glob("examples/*.md"),
        ROOT / "bench" / "README.md",
    ]
)


def anchors(path: Path) -> set[str]:
    """Of the headings of a document, as GitHub makes them."""
    prose = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere() -> None:
    links = [
        (path, (path.parent / target).resolve() if target else path, anchor)
        for path in PROSE
        for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", path.read_text())
        if "://" not in target
    ]
    assert len(links) > 100
    assert [(path.name, str(to)) for path, to, _ in links if not to.exists()] == []
    assert [(path.name, to.name, name) for path, to, name in links if name and name not in anchors(to)] == []


CODE = {
    str(path.relative_to(ROOT)): path.read_text()
    for folder in ("engine", "api", "service", "tests", "bench", "publish", "helm", "examples")
    for path in (ROOT / folder).rglob("*.py")
}
CHART = "".join(path.read_text() for path in (ROOT / "helm").rglob("*.yaml"))
ALL_CODE = "\n".join(CODE.values())


def named(pattern: str) -> set[tuple[str, str]]:
    """What prose names in this way: document and name."""
    return {(str(path.relative_to(ROOT)), name) for path in PROSE for name in re.findall(pattern, path.read_text())}


def unknown(names: set[tuple[str, str]], is_known: Callable[[str], bool]) -> list[tuple[str, str]]:
    assert len(names) > 10
    return sorted((document, name) for document, name in names if not is_known(name))


def test_files_that_prose_names_exist() -> None:
    names = named(r"(?<![\w./*-])[\w/]+\.py\b")
    assert unknown(names, lambda name: any(f"/{path}".endswith(f"/{name}") for path in CODE)) == []


def test_modules_and_loggers_that_prose_names_exist() -> None:
    known = [path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in CODE]

    def is_known(name: str) -> bool:
        return any(f".{module}".endswith(f".{name}") for module in known) or f'getLogger("{name}")' in ALL_CODE

    assert unknown(named(r"`(kvstow(?:_api|_service)?\.[a-z_.]+)`"), is_known) == []


def test_classes_that_prose_names_exist() -> None:
    words = set(re.findall(r"\w+", ALL_CODE))
    names = named(r"`([A-Z][a-z]+(?:[A-Z][a-z]+)+)[`.(]")
    assert unknown(names, lambda name: name in words or name in CHART) == []


def test_tests_that_prose_names_exist() -> None:
    """A name may be cut off with dots."""
    assert unknown(named(r"`(test_\w+)(?:\.\.\.)?`"), lambda name: f"def {name}" in ALL_CODE) == []


def test_mutants_that_prose_names_exist() -> None:
    names = {
        (document, name)
        for document, found in named(r"mutants? ((?:`[a-z_0-9]+`(?:, )?)+)")
        for name in re.findall(r"`(\w+)`", found)
        if not name.startswith("test_")
    }
    listed = {mutant.name for mutant in MUTANTS}.union(*(patched.names for patched in PATCHED))
    assert unknown(names, lambda name: name in listed) == []


def explained(head: str) -> set[str]:
    """What the table in the operations guide whose first column has this head explains."""
    text = (ROOT / "docs" / "operations.md").read_text()
    table = text.partition(f"| {head} |")[2].partition("\n\n")[0]
    return set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE))


def test_every_state_is_explained() -> None:
    assert explained("state") == set(get_args(EngineState))
    assert explained("slot") == set(SLOT_STATES)


def test_every_condition_is_explained_with_its_checks_and_alerts() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    rows = re.findall(
        r"^\| `(\w+)` \| [^|]+ \| ([^|]*) \| ([^|]*) \|$", text.partition("## Conditions")[2], re.MULTILINE
    )
    told = {
        name: (set(re.findall(r"`(\w+)`", checks)), set(re.findall(r"\[(\w+)\]", alerts)))
        for name, checks, alerts in rows
    }
    checks = {name: {check for one in TABLE if one.name == name for check in one.checks} for name in told}
    assert told.keys() == {condition.name for condition in TABLE}
    assert {name: found for name, (found, _) in told.items()} == checks
    for rule in (rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]):
        for names in re.findall(r'condition=~"([^"]+)"', rule["expr"]):
            assert all(rule["alert"] in told[name][1] for name in names.split("|")), rule["alert"]


def test_every_readiness_check_is_explained() -> None:
    engine = OffloadEngine(EngineConfig(slot_bytes=64, capacity_slots=4))
    host = make_api_host(
        EmbeddedDirectory(engine, 4),
        Ticker(engine.tick),
        AdminSockets(),
        AdminOptions(),
        mode="test",
        agent_token="token",
    )
    assert explained("check") == set(create_app(host).state.kvstow.probes["readyz"].checks)


def test_the_page_of_benchmarks_is_made_of_their_results() -> None:
    text = report.PAGE.read_text()
    assert text == report.page(), "make it anew with `python -m bench page`"
    assert len(text.split()) <= 5300
    listed = [*report.FILES_ONLY, *(name for names in report.SECTIONS.values() for name in names)]
    assert sorted(listed) == sorted(path.stem for path in report.RESULTS.glob("*.json"))
