"""The manifests beside the chart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

EXAMPLES = Path(__file__).parents[2] / "helm" / "examples"


def manifests(file: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((EXAMPLES / file).read_text()))


def find(file: str, kind: str, name: str) -> dict[str, Any]:
    (found,) = (one for one in manifests(file) if (one["kind"], one["metadata"]["name"]) == (kind, name))
    return found


def container(file: str, kind: str, name: str) -> dict[str, Any]:
    """The only container of a workload."""
    (found,) = find(file, kind, name)["spec"]["template"]["spec"]["containers"]
    return dict(found)
