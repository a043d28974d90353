"""A service started as the chart says, with TLS and a token for reading; all who ask it do as the chart tells them."""

from __future__ import annotations

import os
import re
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
import pytest
import trustme
from tests.helm.conftest import Template, containers_of
from tests.helm.processes import KVSTOW, environ, serving, until

pytestmark = [pytest.mark.deploy, pytest.mark.process]

VALUES = Path(__file__).parents[2] / "helm" / "kvstow" / "ci" / "node-tls-values.yaml"
TOKENS = {"token": "the-token-of-an-admin", "viewer-token": "the-token-of-a-viewer"}
ADMIN_HOST = "test-kvstow-admin.kv.svc"


class Cluster(NamedTuple):
    """A service under the chart's flags. Its files lie below `root`; `operators` signs client certificates."""

    manifests: list[dict[str, Any]]
    root: Path
    port: int
    operators: trustme.CA

    def one(self, kind: str) -> Any:
        return next(manifest["spec"] for manifest in self.manifests if manifest["kind"] == kind)

    def here(self, text: str) -> str:
        """What the chart says, with the paths and the address of this service."""
        port = re.sub(r":9595\b", f":{self.port}", text.replace("/etc/kvstow", str(self.root)))
        return port.replace(ADMIN_HOST, "localhost")

    def ask_as(self, container: dict[str, Any], *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command line of KVStow with the environment of a container."""
        env = environ(**{variable["name"]: self.here(variable["value"]) for variable in container["env"]})
        return subprocess.run([*KVSTOW, *command], env=env, capture_output=True, text=True, check=False, timeout=120)


def write_secrets(root: Path, server: trustme.CA, operators: trustme.CA) -> None:
    """The files as kubelet would lay them out for the Secrets that the values name."""
    for folder in ("token", "tls", "client-ca"):
        (root / folder).mkdir()
    for name, token in TOKENS.items():
        (root / "token" / name).write_text(token)
    certificate = server.issue_cert(ADMIN_HOST, "localhost")
    (root / "tls" / "tls.key").write_bytes(certificate.private_key_pem.bytes())
    # The values name this file for who checks the certificate, too, as for one that has signed itself.
    chain = [*(pem.bytes() for pem in certificate.cert_chain_pems), server.cert_pem.bytes()]
    (root / "tls" / "tls.crt").write_bytes(b"".join(chain))
    (root / "client-ca" / "authorities.pem").write_bytes(operators.cert_pem.bytes())


@pytest.fixture(scope="module")
def cluster(template: Template, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    root = tmp_path_factory.mktemp("etc")
    operators = trustme.CA()
    write_secrets(root, trustme.CA(), operators)
    sets = ("service.memory=8Mi", "service.keeper.enabled=false")
    manifests = template(*sets, values=VALUES, apis=("monitoring.coreos.com/v1",))
    service = containers_of(next(manifest for manifest in manifests if manifest["kind"] == "DaemonSet"))["kvstow"]
    flags = [re.sub("/etc/kvstow|/run/kvstow", str(root), flag) for flag in service["args"]]
    with serving(*flags, f"--attach-group={os.getegid()}", log=root / "log") as address:
        yield Cluster(manifests, root, int(address.rpartition(":")[2]), operators)


def test_the_kubelet_gets_its_answers_without_a_certificate_and_checks_none(cluster: Cluster) -> None:
    (container,) = cluster.one("DaemonSet")["template"]["spec"]["containers"]
    for name in ("startupProbe", "livenessProbe", "readinessProbe"):
        probe = container[name]["httpGet"]
        url = f"{probe['scheme'].lower()}://127.0.0.1:{cluster.port}{probe['path']}"
        until(lambda url=url: httpx.get(url, verify=False).is_success, name)  # type: ignore[misc]


def test_prometheus_knows_the_server_by_the_name_it_is_told(cluster: Cluster) -> None:
    (endpoint,) = cluster.one("PodMonitor")["podMetricsEndpoints"]
    key = endpoint["tlsConfig"]["ca"]["secret"]["key"]
    trust = ssl.create_default_context(cafile=cluster.root / "tls" / key)
    # A pod has an address only; the name is what the certificate is compared with.
    with httpx.Client(verify=trust) as prometheus:
        answer = prometheus.request(
            "GET",
            f"{endpoint['scheme']}://127.0.0.1:{cluster.port}{endpoint['path']}",
            extensions={"sni_hostname": endpoint["tlsConfig"]["serverName"]},
        )
    assert "kvstow_ready" in answer.text


def test_the_helm_test_passes(cluster: Cluster) -> None:
    (container,) = cluster.one("Pod")["containers"]
    result = cluster.ask_as(container, *container["command"][1:])
    assert result.returncode == 0, result.stderr


def test_the_helm_test_gets_no_more_than_it_needs(cluster: Cluster) -> None:
    volumes = cluster.one("Pod")["volumes"]
    taken = {volume["secret"]["secretName"]: [one["key"] for one in volume["secret"]["items"]] for volume in volumes}
    assert taken == {"test-kvstow-token": ["viewer-token"], "stow-tls": ["tls.crt"]}


def test_in_the_pod_the_command_line_may_change_things(cluster: Cluster) -> None:
    (container,) = cluster.one("DaemonSet")["template"]["spec"]["containers"]
    result = cluster.ask_as(container, "bypass", "--load", "--ttl", "1s")
    assert result.returncode == 0, result.stderr


def test_a_stranger_reads_and_changes_nothing(cluster: Cluster) -> None:
    base = f"https://127.0.0.1:{cluster.port}"
    assert httpx.get(f"{base}/v1/pools", verify=False).status_code == 401
    viewer = {"Authorization": f"Bearer {TOKENS['viewer-token']}"}
    assert httpx.get(f"{base}/v1/pools", verify=False, headers=viewer).status_code == 200
    assert httpx.put(f"{base}/v1/drain", verify=False, headers=viewer, json={}).status_code == 403


def test_an_operators_certificate_is_enough(cluster: Cluster) -> None:
    trust = ssl.create_default_context()
    trust.check_hostname, trust.verify_mode = False, ssl.CERT_NONE
    cluster.operators.issue_cert(common_name="ada").configure_cert(trust)
    body = {"load": True, "store": False, "ttl_seconds": 1}
    answer = httpx.put(f"https://127.0.0.1:{cluster.port}/v1/bypass", verify=trust, json=body)
    assert answer.is_success, answer.text


def test_who_checks_the_certificate_asks_for_the_same_name(cluster: Cluster) -> None:
    (container,) = cluster.one("Pod")["containers"]
    server = next(variable["value"] for variable in container["env"] if variable["name"] == "KVSTOW_SERVER")
    (endpoint,) = cluster.one("PodMonitor")["podMetricsEndpoints"]
    assert urlsplit(server).hostname == endpoint["tlsConfig"]["serverName"] == ADMIN_HOST
    assert next(one for one in cluster.manifests if one["kind"] == "Service")["metadata"]["name"] == "test-kvstow-admin"
