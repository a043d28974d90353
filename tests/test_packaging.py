"""The wheel holds all of the three packages and nothing else, and works where the sources are not."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder
from packaging.requirements import Requirement
from packaging.utils import NormalizedName, canonicalize_name

ROOT = Path(__file__).parents[1]
PACKAGES = ["engine/kvstow", "api/kvstow_api", "service/kvstow_service"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("wheel")
    (path,) = WheelBuilder(str(ROOT)).build(directory=str(target), versions=["standard"])
    return Path(path)


def test_the_packages_are_those_of_the_tree() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert settings["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == PACKAGES
    found = [
        str(path.parent.relative_to(ROOT))
        for top in ("engine", "api", "service")
        for path in (ROOT / top).glob("*/__init__.py")
    ]
    assert found == PACKAGES


def test_the_wheel_holds_every_module_and_nothing_else(wheel: Path) -> None:
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expected = {
        f"{Path(package).name}/{path.relative_to(ROOT / package)}"
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert held == expected


def test_the_wheel_holds_its_licence(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/licenses/LICENSE"))
    assert archive.read(name) == (ROOT / "LICENSE").read_bytes()
    metadata = archive.read(f"{name.partition('/')[0]}/METADATA").decode()
    assert "License-Expression: Apache-2.0\nLicense-File: LICENSE\n" in metadata


def test_the_command_runs_from_the_wheel_alone(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=False, system_site_packages=False)
    site = next((tmp_path / "env" / "lib").glob("python*/site-packages"))
    zipfile.ZipFile(wheel).extractall(site)
    # The dependencies come from the environment of the tests; the code under test only from the wheel.
    dependencies = next(path for path in sys.path if path.endswith("site-packages"))
    code = (
        f"import sys; sys.path.append({dependencies!r});"
        "import kvstow, kvstow_service.cli, kvstow_service.node.settings, kvstow_api.app;"
        f"assert kvstow.__file__.startswith({str(tmp_path)!r}), kvstow.__file__; print(kvstow.__version__)"
    )
    python = tmp_path / "env" / "bin" / "python"
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        [python, "-c", code], cwd=tmp_path, env=environ, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "0.1.0"


HOSTS = {
    "vllm": ("engine_core", "vllm"),
    "huggingface_hub": ("engine_core",),
}
"""Inference engines, which load a connector themselves, and what they bring: what is imported of them is there. The
values: packages of `kvstow_service.connectors` that import them."""


def declared(*extras: str) -> set[str]:
    """Import names of what the core install and these extras declare."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]
    names = {re.split(r"[<>=\[]", line)[0].replace("-", "_") for line in lines}
    imports = {"pyyaml": "yaml", "mooncake_transfer_engine_non_cuda": "mooncake"}
    names = {imports.get(name, name) for name in names}
    return (
        names | ({"starlette"} if "fastapi" in names else set()) | ({"pydantic_core"} if "pydantic" in names else set())
    )


def imported(package: str) -> set[str]:
    """Top-level names of what the package imports anywhere, without itself and Python's own."""
    names = set()
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module.partition(".")[0])
    return names - sys.stdlib_module_names - {"kvstow", "kvstow_api", "kvstow_service"}


@pytest.mark.parametrize(
    ("package", "extras"),
    [
        ("engine/kvstow", ("torch", "jax")),
        ("api/kvstow_api", ("service",)),
        ("service/kvstow_service", ("service", "cli", "torch", "jax", "mooncake")),
    ],
)
def test_what_is_imported_is_declared(package: str, extras: tuple[str, ...]) -> None:
    assert imported(package) - set(HOSTS) <= declared(*extras)


def needed(requirements: Iterable[str], environment: Mapping[str, str]) -> dict[NormalizedName, list[Requirement]]:
    """Everything that pip would install for these, with what is required of each package. Read from the metadata of
    the packages installed here; `environment` overrides what markers see."""
    found: dict[NormalizedName, list[Requirement]] = {}
    to_visit = [Requirement(line) for line in requirements]
    while to_visit:
        one = to_visit.pop()
        name = canonicalize_name(one.name)
        if one.marker is not None and not one.marker.evaluate({"extra": "", **environment}):
            continue
        if name not in found:
            to_visit += map(Requirement, metadata.requires(name) or ())
        found.setdefault(name, []).append(one)
    return found


def test_the_service_and_the_command_line_install_no_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    packages = needed([*project["dependencies"], *extras["service"], *extras["cli"]], {})
    assert {"numpy", "fastapi", "click"} <= packages.keys()
    assert [name for name in packages if name.startswith(("torch", "nvidia", "triton"))] == []
    assert "torch" in needed(extras["torch"], {}), "the walk finds torch where it is"
    assert "kvstow[torch]" in extras["cuda"]


@pytest.mark.parametrize(("host", "connectors"), HOSTS.items())
def test_only_its_connectors_import_an_inference_engine(host: str, connectors: tuple[str, ...]) -> None:
    folder = ROOT / "service/kvstow_service/connectors"
    importers = {
        path
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if re.search(rf"^\s*(from|import) {host}\b", path.read_text(), re.MULTILINE)
    }
    assert {path.relative_to(folder).parts[0] for path in importers} == set(connectors)
