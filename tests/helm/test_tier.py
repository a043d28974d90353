"""The store below the pools in the chart: its URL, devices for RDMA, and whom the service may reach."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.helm.conftest import (
    ENGINE,
    NODE,
    SIDECAR,
    Find,
    Template,
    containers_of,
    notes_of,
    values_of,
)
from tests.helm.test_connection import connection, settings_of

from kvstow_service.stores.mooncake import mooncakestore
from kvstow_service.stores.mooncake.mooncakestore import MooncakeLocation

pytestmark = pytest.mark.deploy

MOONCAKE = "tier.url=mooncake://mooncake-master.mooncake.svc:50051"


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the image of the container has, and this machine need not have."""
    monkeypatch.setattr(mooncakestore, "find_spec", lambda name: name)


def test_the_service_takes_the_tier(find: Find) -> None:
    settings = settings_of(containers_of(find("DaemonSet", values=values_of("node-tier")))["kvstow"])
    assert settings.tier is not None
    location = MooncakeLocation.parse(settings.tier)
    assert (location.endpoints, location.protocol) == (("mooncake-master.mooncake.svc:50051",), "rdma")
    assert settings.tenants == {0: "ml", 1001: "ml", 4_000_000: "web"}
    sidecar = settings_of(containers_of(find("Deployment", values=values_of("engine-sidecar-tier")))["kvstow"])
    assert sidecar.tier == "mooncake://mooncake-master.mooncake.svc:50051?replicas=2"


def test_an_engine_with_a_service_has_no_tier_of_its_own(find: Find) -> None:
    assert "tier" not in connection(find, values=values_of("engine-sidecar-tier"))["kv_connector_extra_config"]


def test_no_tier_leaves_nothing_behind(template: Template) -> None:
    for sets in (NODE, ENGINE, SIDECAR, ()):
        manifests = [one for one in template(*sets) if not one["metadata"]["name"].endswith("-kvstow")]
        assert "tier" not in json.dumps(manifests)


def test_the_service_gets_the_devices(find: Find) -> None:
    given = (*NODE, f"{MOONCAKE}?protocol=rdma", "tier.rdma.resources.rdma/hca=2")
    resources = containers_of(find("DaemonSet", *given))["kvstow"]["resources"]
    assert resources["requests"]["rdma/hca"] == resources["limits"]["rdma/hca"] == 2


def test_of_two_containers_the_sidecar_gets_the_devices(find: Find) -> None:
    sets = (*SIDECAR, f"{MOONCAKE}?protocol=rdma", "tier.rdma.resources.rdma/hca=1")
    containers = containers_of(find("Deployment", *sets))
    with_devices = [name for name, one in containers.items() if "rdma/hca" in one["resources"]["limits"]]
    assert with_devices == ["kvstow"]


def test_a_service_may_reach_the_store_and_nothing_else(find: Find) -> None:
    policy = find("NetworkPolicy", values=values_of("node-tier"), suffix="-tier")["spec"]
    assert policy["policyTypes"] == ["Egress"]
    pod = find("DaemonSet", values=values_of("node-tier"))["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"].items() <= pod.items()
    dns, store = policy["egress"]
    assert "to" not in dns
    assert {(one["protocol"], one["port"]) for one in dns["ports"]} == {("UDP", 53), ("TCP", 53)}
    assert store == {"to": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "mooncake"}}}]}, (
        "no port, as Mooncake's providers pick theirs at random"
    )


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("engine-sidecar-tier", ("store below the pools", "Mooncake has no authentication", "TIERS=mooncake")),
        ("node-tier", ("store below the pools", "Mooncake has no authentication", "LimitMEMLOCK=infinity")),
        ("node", ()),
    ],
)
def test_the_notes_say_what_the_store_needs(helm: Path, case: str, words: tuple[str, ...]) -> None:
    notes = notes_of(helm, values_of(case))
    assert [word for word in words if word not in notes] == []
    everything = ("store below the pools", "Mooncake has no authentication", "LimitMEMLOCK=infinity")
    assert {word for word in everything if word in notes} == {*words} & {*everything}
