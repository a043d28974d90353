"""The locks hold what pyproject.toml asks for and agree with each other. What an index serves today does not matter."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import NormalizedName, canonicalize_name

ROOT = Path(__file__).parents[1]
LOCKS = ROOT / "locks"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PYPROJECT["project"]["optional-dependencies"]
BUILD = PYPROJECT["build-system"]["requires"]

# What each lock is for: extras of the package, and the Pythons that it serves.
PURPOSE = {
    "run": ({"service", "cli"}, ("3.11", "3.12", "3.13")),
    "dev": ({"dev"}, ("3.11", "3.12", "3.13")),
    "deploy": ({"deploy"}, ("3.11", "3.12", "3.13")),
    "tier": ({"mooncake"}, ("3.11", "3.12", "3.13")),
    "image-build": (set(), ("3.12",)),
    "image-cli": ({"cli"}, ("3.12",)),
    "image-service": ({"service", "cli"}, ("3.12",)),
    "image-mooncake": ({"mooncake"}, ("3.12",)),
    "vllm": ({"test", "mooncake"}, ("3.11", "3.12", "3.13")),
    "jax": ({"jax", "cli"}, ("3.11", "3.12", "3.13")),
    "tpu": (set(), ("3.11",)),
    "publish": (set(), ("3.11", "3.12", "3.13")),
    **{path.stem: (set(), ("3.11", "3.12", "3.13")) for path in LOCKS.glob("vllm-*.txt")},
}
BUILDS = {"run", "dev", "image-build", "vllm", "jax", "tpu", "publish"}
"""Environments in which the package is built: they hold what builds it."""
SHARED = ("dev", "run", "deploy", "tier", "image-cli", "image-service", "image-mooncake")
WITHOUT_CORE = {"image-cli", "image-mooncake"}
"""Locks without the packages that the core needs: the command line uses none of them, and the stores of a tier are
installed beside them."""
"""Locks of one environment, or of images that run what was tested there."""


def locked(name: str) -> list[tuple[Requirement, str]]:
    """The requirements of locks/`name`.txt, each with what follows it: its hashes."""
    text = (LOCKS / f"{name}.txt").read_text().replace("\\\n", "")
    return [
        (Requirement(line.split(" --hash", 1)[0].strip()), " --hash".join(line.split(" --hash")[1:]))
        for line in text.splitlines()
    ]


def versions(name: str, python: str) -> dict[NormalizedName, str]:
    """What pip installs from it on Linux."""
    environment = {
        "python_version": python,
        "python_full_version": f"{python}.1",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
    }
    found: dict[NormalizedName, str] = {}
    for one, _ in locked(name):
        if one.marker is None or one.marker.evaluate(environment):
            assert canonicalize_name(one.name) not in found, f"{one.name} is in {name}.txt twice for Python {python}"
            (only,) = one.specifier
            assert only.operator == "==", one
            found[canonicalize_name(one.name)] = only.version
    return found


def left_out() -> set[str]:
    return {line for line in (LOCKS / "left-out.txt").read_text().splitlines() if not line.startswith("#")}


def asked_for(extras: set[str]) -> Iterator[Requirement]:
    """What the package and these extras require, through extras that name others."""
    lines = list(PYPROJECT["project"]["dependencies"])
    for extra in extras:
        lines += EXTRAS[extra]
    for one in map(Requirement, lines):
        if one.name == "kvstow":
            yield from asked_for(one.extras)
        else:
            yield one


def test_every_lock_has_a_purpose() -> None:
    assert {path.stem for path in LOCKS.glob("*.txt")} - PURPOSE.keys() == {"left-out", "tpu-left-out", "tpu-overrides"}
    makefile = (ROOT / "Makefile").read_text()
    for name in PURPOSE:
        version = name.removeprefix("vllm-")
        assert f"-o locks/{name}.txt" in makefile or f" {version}" in makefile, f"make locks does not write {name}.txt"


@pytest.mark.parametrize("name", PURPOSE)
def test_a_lock_has_versions_that_pyproject_allows(name: str) -> None:
    extras, pythons = PURPOSE[name]
    wanted = [*(asked_for(extras) if extras else ()), *(map(Requirement, BUILD) if name in BUILDS else ())]
    for python in pythons:
        held = versions(name, python)
        for one in wanted:
            if name in WITHOUT_CORE and one.name in ("msgspec", "numpy"):
                continue
            if one.name not in left_out():
                assert canonicalize_name(one.name) in held, f"{one.name} is not in {name}.txt: make locks"
                assert one.specifier.contains(held[canonicalize_name(one.name)]), one


@pytest.mark.parametrize("name", PURPOSE)
def test_a_lock_names_versions_and_hashes_and_no_place(name: str) -> None:
    text = (LOCKS / f"{name}.txt").read_text()
    assert re.search(r"://|^\s*-|@", text.replace("    --hash", ""), re.MULTILINE) is None
    for one, hashes in locked(name):
        assert re.fullmatch(r"(=sha256:[0-9a-f]{64}\s*(--hash)?\s*)+", hashes), one
        assert one.name not in left_out(), f"{one.name} is installed by the Makefile"


def test_environments_that_are_shared_have_one_version_of_each_package() -> None:
    for python in ("3.11", "3.12", "3.13"):
        known: dict[NormalizedName, str] = {}
        for name in SHARED:
            if python in PURPOSE[name][1]:
                for package, version in versions(name, python).items():
                    assert known.setdefault(package, version) == version, f"{package} in {name}.txt: make locks"
