"""The chart's values: described once, and refused in words when they are wrong. No tools needed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import yaml
from tests.helm.conftest import CHART, ROOT

SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())

# Objects that Kubernetes knows better than we do, and Helm's own.
HANDED_ON = {"#/definitions/kubernetesObject", "#/properties/global"}


def objects(schema: Any, path: str = "#") -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(schema, dict):
        if schema.get("type") == "object":
            yield path, schema
        for key, part in schema.items():
            yield from objects(part, f"{path}/{key}")


def test_the_readme_describes_the_values_as_they_are() -> None:
    result = subprocess.run(
        [sys.executable, ROOT / "helm" / "readme.py", "--check"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


def test_no_object_takes_unknown_keys() -> None:
    lax = [path for path, schema in objects(SCHEMA) if not isinstance(schema.get("additionalProperties"), bool | dict)]
    assert set(lax) == HANDED_ON


def resolved(schema: dict[str, Any]) -> dict[str, Any]:
    name = schema.get("$ref", "").removeprefix("#/definitions/")
    return SCHEMA["definitions"][name] if name else schema


def differences(values: dict[str, Any], schema: dict[str, Any], path: str = "") -> Iterator[str]:
    known = schema["properties"]
    yield from (f"{path}{key}" for key in known.keys() ^ values.keys())
    for key in known.keys() & values.keys():
        part = resolved(known[key])
        if "properties" in part:
            yield from differences(values[key], part, f"{path}{key}.")


def test_the_schema_knows_the_values_and_no_others() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert list(differences(values, SCHEMA)) == ["global"]
