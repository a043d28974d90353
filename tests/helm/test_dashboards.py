"""The dashboards as Grafana reads them: every panel explains itself, and all look at what the variables choose."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.api.fakenode import FakeNode
from tests.doubles.fakes import FakeClock
from tests.doubles.rank import use_keys

from kvstow_api.app import create_app
from kvstow_api.host import ApiHost

pytestmark = pytest.mark.deploy

FILES = sorted((Path(__file__).parents[2] / "helm" / "kvstow" / "dashboards").glob("*.json"))
BOARDS: dict[str, dict[str, Any]] = {path.stem: json.loads(path.read_text()) for path in FILES}
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
ROWS = [
    "Health and pinning",
    "Memory of the node",
    "Sessions",
    "Hit ratio",
    "Bandwidth",
    "Latency",
    "Pools",
    "Evictions and outcomes",
    "Fleet tier",
    "Admin server",
]
CHOSEN = 'cluster=~"$cluster", namespace=~"$namespace", pod=~"$pod"'
CHOSEN_POOL = f'{CHOSEN}, pool=~"$pool", model=~"$model"'
OWN_VARIABLES = {"__rate_interval", "__range", "__all"}  # Grafana's

each_board = pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)


def panels(board: dict[str, Any]) -> Iterator[dict[str, Any]]:
    return (panel for panel in board["panels"] if panel["type"] != "row")


def expressions(board: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in panels(board) for target in panel["targets"]]


@each_board
def test_rows_follow_what_an_operator_asks_first(board: dict[str, Any]) -> None:
    assert [panel["title"] for panel in board["panels"] if panel["type"] == "row"] == ROWS


@each_board
def test_a_dashboard_is_of_the_present_schema_and_no_instance_of_grafana(board: dict[str, Any]) -> None:
    assert board["schemaVersion"] == 42
    assert "id" not in board
    assert not {"__inputs", "__requires"} & set(board)


@each_board
def test_every_panel_has_a_description_a_unit_and_the_chosen_source(board: dict[str, Any]) -> None:
    for panel in panels(board):
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
        assert all(source == DATASOURCE for source in sources), panel["title"]
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs) > 0, panel["title"]


@each_board
def test_panels_have_a_number_each_and_lie_side_by_side(board: dict[str, Any]) -> None:
    everything = board["panels"]
    assert len({panel["id"] for panel in everything}) == len(everything)
    for one, other in itertools.combinations((panel["gridPos"] for panel in everything), 2):
        apart_across = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        apart_down = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert apart_across or apart_down, (one, other)
    assert all(position["x"] + position["w"] <= 24 for position in (panel["gridPos"] for panel in everything))


@each_board
def test_the_variables_are_there_and_used(board: dict[str, Any]) -> None:
    variables = [variable["name"] for variable in board["templating"]["list"]]
    assert variables == ["datasource", "cluster", "namespace", "pod", "model", "pool"]
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(board["panels"]) + json.dumps(board["templating"])))
    assert used - OWN_VARIABLES == set(variables)


def families_of_pools() -> set[str]:
    """Names of series that have the label `pool`."""
    node = FakeNode(FakeClock())
    engine = node.attach("pool")
    engine.report(pin_rate_bytes_per_second=1.0, numa_bytes={"0": 1})
    for number in range(200):  # enough for a curve, of a size that fits
        use_keys(engine.control, [(number % 12).to_bytes(32, "big")])
    host = ApiHost(directory=node, version="1", mode="node")
    create_app(host)
    samples = [sample for family in host.registry.collect() for sample in family.samples]
    return {sample.name for sample in samples if "pool" in sample.labels}


@each_board
def test_every_expression_looks_at_what_is_chosen(board: dict[str, Any]) -> None:
    of_pools = families_of_pools()
    for expression in expressions(board):
        selectors = re.findall(r"\b((?:kvstow|process)_\w+)(\{[^}]*\})?", expression)
        assert selectors
        for name, selector in selectors:
            assert (CHOSEN_POOL if name in of_pools else CHOSEN) in selector, expression


@each_board
def test_pools_and_models_are_offered_and_all_of_them_include_what_has_none(board: dict[str, Any]) -> None:
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    for name, chosen in (("model", CHOSEN), ("pool", f'{CHOSEN}, model=~"$model"')):
        assert variables[name]["query"]["query"] == f"label_values(kvstow_config_info{{{chosen}}}, {name})"
        assert variables[name]["allValue"] == ".*", "errors of the node have no pool"
