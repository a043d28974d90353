"""A real Prometheus scrapes a real engine under traffic, and evaluates every rule and every panel."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from tests.helm.conftest import CHART
from tests.helm.processes import KVSTOW, embedding, environ, running, until

pytestmark = [pytest.mark.deploy, pytest.mark.process]

RULES = CHART / "files" / "rules.yaml"
LABELS = {"namespace": "ml", "pod": "kvstow-0"}  # as a PodMonitor would add them
TIERED = {"namespace": "ml", "pod": "kvstow-1"}

# What panels choose, and what Grafana fills in.
VALUES = {
    "cluster": ".*",
    "namespace": "ml",
    "model": ".*",
    "pod": "kvstow-0",
    "pool": "host",
    "__rate_interval": "1m",
    "__range": "1h",
}
RULE_GROUPS: list[dict[str, Any]] = yaml.safe_load(RULES.read_text())["groups"]
RECORDS = [rule["record"] for group in RULE_GROUPS for rule in group["rules"] if "record" in rule]
PANELS = [
    (panel["title"], target["expr"])
    for path in sorted(CHART.glob("dashboards/*.json"))
    for panel in json.loads(path.read_text())["panels"]
    for target in panel.get("targets", ())
]
VARIABLES = [
    variable["query"]["query"]
    for path in sorted(CHART.glob("dashboards/*.json"))
    for variable in json.loads(path.read_text())["templating"]["list"]
    if variable["type"] == "query"
]

# Nothing to see where no kernel names a node, where there is no TLS, and of an engine to which nobody attaches.
MAY_BE_EMPTY = {"Conditions", "Memory by NUMA node", "Certificate expires in", "Keeper", "Rejected engines"}
PROMETHEUS_OWN = {"up", "ALERTS"}


def filled_in(expression: str) -> str:
    values = {**VALUES, "pod": TIERED["pod"], "pool": ".*"} if "kvstow_tier_" in expression else VALUES
    return re.sub(r"\$\{?(\w+)\}?", lambda name: values[name[1]], expression)


def metrics_in(expression: str) -> set[str]:
    """Names of metrics in an expression; those of records have colons, and are none."""
    bare = re.sub(r'"[^"]*"|\b(?:by|on|without|group_left) \([^)]*\)|\[[^\]]*\]', "", expression)
    return set(re.findall(r"(?<![\w:])(?:kvstow|process|python)_\w+(?![\w:])", bare))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def tried(call: Callable[[], Any]) -> Any:
    """None where nobody answers yet."""
    try:
        return call()
    except httpx.TransportError:
        return None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scrape")


@pytest.fixture(scope="module")
def multiprocess_folder(folder: Path) -> Path:
    path = folder / "multiprocess"
    path.mkdir()
    return path


@pytest.fixture(scope="module")
def trace(folder: Path) -> Path:
    path = folder / "trace.jsonl"
    generate = (*KVSTOW, "trace", "generate", "--sessions", "2000", "--output", path)
    subprocess.run(generate, env=environ(), check=True, capture_output=True)
    return path


@pytest.fixture(scope="module")
def service(trace: Path, folder: Path, multiprocess_folder: Path) -> Iterator[str]:
    """URL of an embedded engine, with two ranks and a replay that goes on for longer than the tests, in a pool that is
    too small for it."""
    log, shared = folder / "engine.log", str(multiprocess_folder)
    with embedding(trace, "--rate=25", log=log, PROMETHEUS_MULTIPROC_DIR=shared) as address:
        yield address


@pytest.fixture(scope="module")
def tiered(trace: Path, folder: Path) -> Iterator[str]:
    """URL of a service with a fleet tier, from which fetches pay, and a pool that is too small for its engine."""
    port, attach, log = free_port(), folder / "node" / "attach.sock", folder / "service.log"
    serve = (sys.executable, "-m", "tests.helm.tieredservice", "serve", "--tier=mooncake://store:1", "--memory=4MiB")
    options = ("--extent-size=2MiB", f"--port={port}", f"--attach-socket={attach}")
    engine = (*KVSTOW, "replay", trace, f"--attach=unix:{attach}", "--slot-size=16KiB", "--prefill-rate=50000")
    with running(*serve, *options, log=log, env=environ()) as process:
        url = f"http://127.0.0.1:{port}"
        until(lambda: process.poll() is not None or tried(lambda: httpx.get(f"{url}/livez").is_success), "the service")
        assert process.poll() is None, log.read_text()
        with running(*engine, "--rate=25", log=folder / "replay.log", env=environ()):
            yield url


@pytest.fixture(scope="module")
def scraped_tier(tiered: str) -> str:
    """The text of one scrape of that service, after a fetch."""
    return scrape_once_positive(tiered, r"kvstow_tier_read_blocks_total\{.*\}", "a fetch")


@pytest.fixture(scope="module")
def scraped(service: str) -> str:
    """The text of one scrape, of a service under traffic."""
    return scrape_once_positive(service, r'kvstow_transfer_bytes_total\{.*direction="load".*\}', "a load")


def scrape_once_positive(url: str, sample: str, what: str) -> str:
    """The first scrape in which a sample that matches is more than 0."""

    def text() -> str | None:
        said = httpx.get(f"{url}/metrics").text
        found = re.search(rf"^{sample} (\S+)", said, re.MULTILINE)
        return said if found and float(found[1]) > 0 else None

    scraped: str = until(text, what)
    return scraped


@pytest.fixture(scope="module")
def prometheus_url(service: str, tiered: str, prometheus: Path, folder: Path) -> Iterator[str]:
    """A Prometheus that scrapes both every second and has evaluated the rules."""
    targets = [
        {"targets": [url.removeprefix("http://")], "labels": labels}
        for url, labels in ((service, LABELS), (tiered, TIERED))
    ]
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [{"job_name": "kvstow", "static_configs": targets}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    options = (f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/tsdb")
    url = f"http://{address}"
    with running(prometheus, *options, f"--web.listen-address={address}", log=folder / "prometheus.log") as process:
        until(lambda: process.poll() is not None or tried(lambda: httpx.get(f"{url}/-/ready").is_success), "Prometheus")
        assert process.poll() is None, (folder / "prometheus.log").read_text()
        yield url


@pytest.fixture(scope="module")
def ask(prometheus_url: str) -> Callable[[str], list[dict[str, Any]]]:
    """Evaluates an expression now."""

    def query(expression: str) -> list[dict[str, Any]]:
        answer = httpx.get(f"{prometheus_url}/api/v1/query", params={"query": expression}).json()
        assert answer["status"] == "success", f"{expression}: {answer}"
        result = answer["data"]["result"]
        return list(result)

    return query


def test_promtool_finds_nothing_to_complain_about(scraped: str, scraped_tier: str, promtool: Path) -> None:
    for text in (scraped, scraped_tier):
        result = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr


def test_a_service_writes_nothing_into_the_multiprocess_folder(scraped: str, multiprocess_folder: Path) -> None:
    assert "kvstow_pool_blocks" in scraped
    assert list(multiprocess_folder.iterdir()) == []


def test_panels_and_rules_name_only_what_a_service_exports(scraped: str, scraped_tier: str) -> None:
    assert "kvstow_tier_" not in scraped, "a host without a tier has none of its metrics"
    exported = set(re.findall(r"^# TYPE (\S+) ", scraped + scraped_tier, re.MULTILINE))
    exported |= {
        f"{name}_{part}"
        for name in re.findall(r"^# TYPE (\S+) histogram$", scraped, re.MULTILINE)
        for part in ("bucket", "sum", "count")
    }
    expressions = [expression for _, expression in PANELS]
    expressions += [rule["expr"] for group in RULE_GROUPS for rule in group["rules"]]
    expressions += [re.sub(r"label_values\((.*), \w+\)", r"\1", query) for query in VARIABLES]
    named = {name for expression in expressions for name in metrics_in(expression)}
    assert len(named) > 50
    assert named <= exported


def test_the_service_is_scraped(ask: Callable[[str], list[dict[str, Any]]], prometheus_url: str) -> None:
    until(lambda: len(ask("up == 1")) == 2, "two scrapes")
    targets = httpx.get(f"{prometheus_url}/api/v1/targets").json()["data"]["activeTargets"]
    assert [(target["health"], target["lastError"]) for target in targets] == [("up", "")] * 2


@pytest.mark.parametrize("record", RECORDS)
def test_records_have_values(ask: Callable[[str], list[dict[str, Any]]], record: str) -> None:
    (sample,) = until(lambda: ask(f'{record}{{pod="kvstow-0"}} > 0'), record)
    assert sample["metric"].items() >= LABELS.items()


def test_prometheus_evaluates_every_rule(ask: Callable[[str], list[dict[str, Any]]], prometheus_url: str) -> None:
    until(lambda: ask(RECORDS[0]), "an evaluation")
    groups = httpx.get(f"{prometheus_url}/api/v1/rules").json()["data"]["groups"]
    rules = {rule["name"]: rule for group in groups for rule in group["rules"]}
    assert set(rules) == {rule.get("alert") or rule["record"] for group in RULE_GROUPS for rule in group["rules"]}
    assert {name: rule.get("lastError") for name, rule in rules.items() if rule["health"] != "ok"} == {}
    firing = [name for name, rule in rules.items() if rule.get("state") == "firing"]
    assert firing == [], "the service is well"


@pytest.mark.parametrize(("title", "expression"), PANELS, ids=[f"{n}-{title}" for n, (title, _) in enumerate(PANELS)])
def test_every_panel_shows_something(ask: Callable[[str], list[dict[str, Any]]], title: str, expression: str) -> None:
    found = ask(filled_in(expression))
    if title not in MAY_BE_EMPTY:
        until(lambda: found or ask(filled_in(expression)), title)
