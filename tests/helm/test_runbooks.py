"""Every name in a runbook is one that an operator meets. What it says to type is tried in tests/test_docs.py."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from typing import Any, get_args

import click
import pytest
import yaml
from tests.api.fakenode import FakeNode
from tests.api.tieredhost import TieredHost
from tests.doubles.fakes import FakeClock
from tests.helm.conftest import ROOT

import kvstow.errors
from kvstow.config import POLICIES, EngineConfig
from kvstow.control.engine import OffloadEngine
from kvstow.messages import RankState
from kvstow.stats import EngineStats, FaultStats, LookupStats
from kvstow_api.answers import SessionsView
from kvstow_api.appstate import AppState
from kvstow_api.conditions.evidence import TABLE
from kvstow_api.directory import EmbeddedDirectory
from kvstow_api.metrics import Collector, tier_metrics
from kvstow_service import environment
from kvstow_service.admin.adminhost import AdminOptions, Ticker, make_api_host
from kvstow_service.admin.sockets import AdminSockets
from kvstow_service.cli import app
from kvstow_service.cli.tables import LISTS
from kvstow_service.node.attach.clients import REASONS

PAGE = (ROOT / "docs" / "runbooks.md").read_text()
SECTIONS = dict(section.split("\n", 1) for section in PAGE.split("\n## ")[1:])
RULES = ROOT / "helm" / "kvstow" / "files" / "rules.yaml"
ALERTS = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"] if "alert" in rule]

# Of Kubernetes, Prometheus, vLLM, Mooncake and the driver.
FOREIGN = {
    "--client_ttl",
    "MOONCAKE_OFFLOAD_USE_URING=false",
    "No space left",
    "Percentage Used",
    "container_cpu_cfs_throttled_periods_total",
    "dmesg",
    "edac-util",
    "fsfreeze",
    "https",
    "hugepages-2Mi",
    "instance",
    "kubectl -n NAMESPACE get certificate",
    "kubectl -n NAMESPACE logs POD",
    "kubectl exec -it",
    "kv_load_failure_policy: recompute",
    "kvs1:",
    "nvidia-smi",
    "up",
}


_COMMANDS = ("kvstow ", "ps -o ", "kill -CONT ")


def code_words(text: str) -> Iterator[str]:
    """What stands between backticks in sentences, but for commands of ours and of the system."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return (word for word in re.findall(r"`([^`]+)`", prose) if not word.startswith(_COMMANDS))


@cache
def app_state() -> AppState:
    engine = OffloadEngine(EngineConfig(slot_bytes=64, capacity_slots=4))
    host = make_api_host(
        EmbeddedDirectory(engine, 4),
        Ticker(engine.tick),
        AdminSockets(),
        AdminOptions(),
        mode="test",
        agent_token="token",
    )
    return AppState(host)


@cache
def node_state() -> AppState:
    """Of `kvstow serve`."""
    node = FakeNode(FakeClock(), rejected=dict.fromkeys(REASONS, 0))
    node.attach("pool")
    ticker = Ticker(OffloadEngine(EngineConfig(slot_bytes=64, capacity_slots=4)).tick)
    checks = {"node": lambda: None}
    host = make_api_host(node, ticker, AdminSockets(), AdminOptions(), mode="node", startup_checks=checks)
    return AppState(host)


def scraped() -> Iterator[str]:
    """Names of metrics, and values of their labels: states, checks, reasons, outcomes, errors."""
    for family in (*Collector(app_state()).collect(), *Collector(node_state()).collect()):
        for sample in family.samples:
            yield sample.name
            yield from sample.labels.values()
        if family.type == "histogram":
            yield family.name


def metrics_of_a_tier() -> Iterator[str]:
    """Of a host with a fleet tier, those included that have no sample before they are measured."""
    engine = OffloadEngine(EngineConfig(slot_bytes=64, capacity_slots=4))
    host = TieredHost(engine, FakeClock())
    host.begin()
    for family in tier_metrics(host.directory(4).tier):
        yield f"{family.name}_total" if family.type == "counter" else family.name
    host.close()
    engine.close()


@cache
def sources() -> str:
    return "".join(path.read_text() for top in ("engine", "api", "service") for path in (ROOT / top).rglob("*.py"))


def flags(command: click.Command) -> Iterator[str]:
    for parameter in command.params:
        yield from (*parameter.opts, *parameter.secondary_opts)
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            _, found, _ = command.resolve_command(context, [name])
            assert found is not None
            yield from flags(found)


@cache
def known() -> frozenset[str]:
    found = {
        *scraped(),
        *metrics_of_a_tier(),
        *flags(app),
        *(one.name for one in TABLE),
        *get_args(RankState),
        *POLICIES,
        *FOREIGN,
    }
    found |= {field.name for view in (EngineStats, LookupStats, FaultStats, SessionsView) for field in fields(view)}
    found |= {column.title.upper() for kind in LISTS.values() for column in kind.columns}
    found |= {one.code for one in vars(kvstow.errors).values() if isinstance(one, type) and hasattr(one, "code")}
    found |= {value for value in vars(environment).values() if isinstance(value, str)}
    found |= {rule["labels"]["severity"] for rule in ALERTS}
    found |= {f"/{probe}" for probe in app_state().probes}
    return frozenset(found | set(re.findall(r'getLogger\("([\w.]+)"\)', sources())))


def is_known(word: str) -> bool:
    """A name, a file of the repository, or words that a log may have."""
    return word in known() or (ROOT / word).is_file() or (" " in word and word in sources())


def test_every_name_is_real() -> None:
    assert [word for word in code_words(PAGE) if not is_known(word)] == []


def test_each_alert_has_its_runbook_and_each_runbook_its_alert() -> None:
    assert list(SECTIONS) == ["Restart a pod", *(rule["alert"] for rule in ALERTS)]


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_a_runbook_says_what_it_means_where_to_look_and_what_to_do(rule: dict[str, Any]) -> None:
    text = SECTIONS[rule["alert"]].strip()
    assert text.startswith(f"*{rule['labels']['severity']}*: ")
    assert re.findall(r"^- \*\*([A-Z][a-z ]+)\*\*", text, re.MULTILINE) == ["Look", "Do", "Do not"]


def test_every_check_of_readiness_has_an_alert() -> None:
    own = {
        "ranks": "KvstowRankNotReady",
        "pool": "KvstowPoolNotPinned",
        "pinned": "KvstowPoolNotPinned",
        "transfers": "KvstowSessionStuck",
    }
    expressions = {rule["alert"]: rule["expr"] for rule in ALERTS}
    (others,) = re.findall(r'check=~"([^"]+)"', expressions["KvstowNotReady"])
    assert {*own, *others.split("|")} == {
        check for state in (app_state(), node_state()) for check in state.probes["readyz"].checks
    }
    assert set(own.values()) <= expressions.keys()
