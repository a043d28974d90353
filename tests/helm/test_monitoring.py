"""Prometheus finds the pods, and gets the rules; Grafana gets the dashboards."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.helm.conftest import CHART, OPERATOR, REGISTRY, Find, Template, containers_of

pytestmark = pytest.mark.deploy


@pytest.mark.parametrize(("key", "kind"), [("podMonitor", "PodMonitor"), ("prometheusRule", "PrometheusRule")])
@pytest.mark.parametrize(
    ("enabled", "apis", "expected"),
    [
        ("auto", (), False),
        ("auto", (OPERATOR,), True),
        ("true", (), True),
        ("false", (OPERATOR,), False),
    ],
)
def test_objects_of_the_operator_come_where_it_is(
    template: Template, key: str, kind: str, enabled: str, apis: tuple[str, ...], expected: bool
) -> None:
    kinds = {manifest["kind"] for manifest in template(f"monitoring.{key}.enabled={enabled}", apis=apis)}
    assert (kind in kinds) == expected


@pytest.mark.parametrize(
    ("kind", "mode", "ports"),
    [
        ("Deployment", ("mode=engine",), [8000, 9595, 9596]),
        ("Deployment", ("mode=engine", "sidecar=true"), [8000, 9595]),
        ("Deployment", ("mode=engine", "attach.node=true"), [8000]),
        ("DaemonSet", ("mode=node",), [9595]),
    ],
)
def test_own_pods_declare_the_ports_that_are_scraped(
    find: Find, kind: str, mode: tuple[str, ...], ports: list[int]
) -> None:
    """Prometheus discovers the ports of sidecars, too, although these are init containers."""
    sets = (*mode, REGISTRY, "engine.model=m", "parallel.data=2")
    containers = containers_of(find(kind, *sets)).values()
    declared = {port["name"]: port["containerPort"] for one in containers for port in one.get("ports", ())}
    scraped = [one["port"] for one in find("PodMonitor", *sets, apis=(OPERATOR,))["spec"]["podMetricsEndpoints"]]
    assert [declared[name] for name in scraped] == ports


def in_prometheus_words(rule: dict[str, Any]) -> dict[str, Any]:
    """A relabeling of the operator's API as Prometheus' own configuration spells it."""
    return {re.sub("[A-Z]", lambda letter: f"_{letter[0].lower()}", key): value for key, value in rule.items()}


def targets_of(endpoint: dict[str, Any], pods: list[dict[str, str]], promtool: Path, folder: Path) -> list[Any]:
    """The labels of the targets that Prometheus makes of what it discovered, by the relabelings of `endpoint`."""
    (folder / "pods.json").write_text(json.dumps([{"targets": [pod["__address__"]], "labels": pod} for pod in pods]))
    job = {
        "job_name": "pods",
        "file_sd_configs": [{"files": ["pods.json"]}],
        "relabel_configs": [in_prometheus_words(rule) for rule in endpoint["relabelings"]],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump({"scrape_configs": [job]}))
    command: list[str | Path] = [
        promtool,
        "check",
        "service-discovery",
        "--timeout=1s",
        folder / "prometheus.yml",
        "pods",
    ]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [target["labels"] for target in json.loads(said)]


@pytest.mark.parametrize(
    ("ip", "addresses"),
    [
        ("10.0.0.7", ["10.0.0.7:9595", "10.0.0.7:9596"]),
        ("fd00::7", ["[fd00::7]:9595", "[fd00::7]:9596"]),
    ],
)
def test_a_port_that_a_pod_does_not_declare_is_scraped_once(
    find: Find, promtool: Path, tmp_path: Path, ip: str, addresses: list[str]
) -> None:
    monitor = find("PodMonitor", "parallel.data=2", apis=(OPERATOR,))
    # vLLM's pod with its port, and a sidecar without any: Prometheus discovers it once for each.
    common = {"__meta_kubernetes_pod_ip": ip, "__meta_kubernetes_pod_node_name": "node-1", "pod": "vllm-0"}
    pods = [
        {**common, "__address__": f"{ip}:8000", "container": "vllm"},
        {**common, "__address__": ip, "container": "sidecar"},
    ]
    for endpoint, address in zip(monitor["spec"]["podMetricsEndpoints"], addresses, strict=True):
        assert "port" not in endpoint
        assert "portNumber" not in endpoint
        first, second = targets_of(endpoint, pods, promtool, tmp_path)
        assert first == second
        assert {key: first[key] for key in ("__address__", "pod", "node")} == {
            "__address__": address,
            "pod": "vllm-0",
            "node": "node-1",
        }


def test_the_rules_arrive_as_they_are(find: Find) -> None:
    """Without a URL for runbooks there are no links: relative ones lead nowhere."""
    rules = yaml.safe_load((CHART / "files" / "rules.yaml").read_text())
    for one in (one for group in rules["groups"] for one in group["rules"] if "alert" in one):
        del one["annotations"]["runbook_url"]
    assert find("PrometheusRule", apis=(OPERATOR,))["spec"] == rules


def test_alerts_link_to_the_runbooks_that_people_can_read(find: Find) -> None:
    where = "https://git.example.com/runbooks.md"
    rule = find("PrometheusRule", f"monitoring.prometheusRule.runbooks={where}", apis=(OPERATOR,))
    links = {
        one["alert"]: one["annotations"]["runbook_url"]
        for group in rule["spec"]["groups"]
        for one in group["rules"]
        if "alert" in one
    }
    assert links == {alert: f"{where}#{alert.lower()}" for alert in links}
    assert "KvstowThrashing" in links


def test_every_dashboard_arrives_as_it_is(template: Template) -> None:
    arrived = {
        name: json.loads(text)
        for manifest in template()
        if manifest["metadata"]["labels"].get("grafana_dashboard") == "1"
        for name, text in manifest["data"].items()
    }
    assert arrived == {path.name: json.loads(path.read_text()) for path in CHART.glob("dashboards/*.json")}


def test_a_policy_closes_the_admin_ports_alone(find: Find) -> None:
    policy = find("NetworkPolicy", "networkPolicy.enabled=true", "admin.port=9600", "parallel.data=3")
    anybody, named = policy["spec"]["ingress"]
    assert "from" not in anybody
    tcp = [(one["port"], one["endPort"]) for one in anybody["ports"] if one["protocol"] == "TCP"]
    assert tcp == [(1, 9599), (9603, 65535)]
    assert [(one["port"], one["endPort"]) for one in named["ports"]] == [(9600, 9602)]
    spaces = [one["namespaceSelector"]["matchLabels"] for one in named["from"] if "namespaceSelector" in one]
    assert spaces == [{"kubernetes.io/metadata.name": "monitoring"}]


@pytest.mark.parametrize("mode", [("mode=node",), ("mode=engine", "sidecar=true")])
def test_a_policy_closes_the_one_port_of_a_node_service(find: Find, mode: tuple[str, ...]) -> None:
    sets = (*mode, REGISTRY, "engine.model=m", "parallel.data=3")
    _, named = find("NetworkPolicy", "networkPolicy.enabled=true", *sets)["spec"]["ingress"]
    assert [(one["port"], one["endPort"]) for one in named["ports"]] == [(9595, 9595)]


def test_a_policy_lets_the_helm_test_in(find: Find) -> None:
    sets = ("networkPolicy.enabled=true", REGISTRY)
    labels = find("Pod", *sets)["metadata"]["labels"]
    named = find("NetworkPolicy", *sets)["spec"]["ingress"][1]
    peers = [one["podSelector"]["matchLabels"] for one in named["from"] if "podSelector" in one]
    assert any(peer.items() <= labels.items() for peer in peers)
