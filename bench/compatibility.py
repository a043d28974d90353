"""What runs with what: docs/compatibility.md, made of the outcomes of the tests and of the dated figures of a GPU.

`make test-vllm` leaves an outcome for each test (`tests/results.py`). `python -m bench compatibility` adds those of
build/results to `compatibility.json`, as far as the page shows them, and makes the page anew."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.report import RESULTS, load
from kvstow_service.connectors.engine_core import kvgroups, vllmprocess

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "build" / "results"
RECORD = Path(__file__).with_suffix(".json")
PAGE = ROOT / "docs" / "compatibility.md"
OLDER = ("0.32.0", "0.31.0", "0.30.0")
"""Versions of which one engine shares a node with the newest one. What it relies on is compared with their sources."""


class Outcome(NamedTuple):
    """Of one test in one environment. `date`: the day on which it ran last."""

    result: str
    date: str


class Environment(NamedTuple):
    """What tests ran with. `python` is a minor version."""

    vllm: str
    python: str


class Feature(NamedTuple):
    """A row of the page. `embedded` and `attached` are the tests that show it in a real vLLM on a CPU, by the first
    characters of their names; `gpu` are results in `results/` that were measured with it."""

    name: str
    embedded: Sequence[str] = ()
    attached: Sequence[str] = ()
    gpu: Sequence[str] = ()


FEATURES = (
    Feature(
        "full attention, eager",
        (
            *(
                f"test_identity.py::{name}[full]"
                for name in ("test_cold_and_from_the_host", "test_all_prompts_at_once_twice")
            ),
        ),
        ("test_attached.py::test_answers_are_those_of_vllm_alone[eager]", "test_versions.py::"),
        ("vllm-peers",),
    ),
    Feature("CUDA graphs and FlashAttention 3, vLLM's defaults", gpu=("vllm-headline",)),
    Feature("batch-invariant kernels, each answer compared bit by bit", gpu=("vllm-verify",)),
    Feature(
        "a sliding window in every other layer (hybrid)",
        (
            *(
                f"test_identity.py::{name}[hybrid]"
                for name in ("test_cold_and_from_the_host", "test_all_prompts_at_once_twice")
            ),
        ),
        ("test_attached.py::test_answers_are_those_of_vllm_alone[hybrid]",),
    ),
    Feature("latent attention (MLA), two ranks", (), ("test_latentattention.py::",)),
    Feature(
        "drafters (EAGLE, MTP): vLLM's scheduler without a model",
        ("test_scheduling.py::test_no_wrong_byte_is_read_and_nothing_leaks[async, drafts",),
    ),
    Feature("LoRA adapters", (), ("test_adapters.py::",)),
    Feature("images", (), ("test_images.py::",)),
    Feature(
        "lazy stores",
        ("test_identity.py::test_lazy_stores",),
        ("test_attached.py::test_answers_are_those_of_vllm_alone[lazy]",),
    ),
    Feature("loads by layer, within the step", ("test_layeredloads.py::",), (), ("vllm-layers",)),
    Feature(
        "tensor parallel, ranks in processes of their own",
        ("test_identity_processes.py::",),
        ("test_attached.py::test_ranks_in_processes_of_their_own",),
    ),
    Feature("pipeline parallel", (), ("test_pipeline.py::",)),
    Feature("data parallel", (), ("test_dataparallel.py::",)),
    Feature(
        "preempted and aborted requests",
        ("test_identity.py::test_preempted_requests", "test_identity.py::test_aborts_at_any_step"),
    ),
    Feature("streamed input", ("test_streamedinput.py::",)),
    Feature("KV events", ("test_kvevents.py::",), ("test_attachedevents.py::",)),
    Feature("prefill/decode disaggregation with NIXL, in MultiConnector", ("test_disaggregation.py::",)),
    Feature("MultiConnector with another connector", ("test_identity.py::test_beside_another_connector",)),
    Feature("vLLM's OpenAI server", ("test_server.py::",)),
    Feature(
        "engines and services that are killed",
        (),
        ("test_rotation.py::", "test_lostservice.py::"),
        ("vllm-rotation", "vllm-restart"),
    ),
    Feature("a disk below the pool", (), ("test_attacheddisk.py::",)),
    Feature(
        "memory that is pinned while engines serve",
        ("test_identity.py::test_while_slots_are_still_being_pinned",),
        (),
        ("vllm-pinning",),
    ),
)
VERSIONS = "test_versions.py::"
"""Tests of an older engine beside one of the newest, on one node service."""
ENGINE = ("test_identity.py::", "test_attached.py::", VERSIONS)
NEWEST_CONTRACT = "test_contract.py::test_the_installed_vllm_fits"


def is_of_feature(test: str) -> bool:
    """Whether a row of the page has this test."""
    return test.startswith(tuple([each for feature in FEATURES for each in (*feature.embedded, *feature.attached)]))


def shown(test: str) -> bool:
    """Whether the page needs this test's outcome."""
    wanted = (*ENGINE, NEWEST_CONTRACT, "test_contract.py::test_an_older_vllm_fits")
    return test.startswith(wanted) or is_of_feature(test)


def read(path: Path = RECORD) -> dict[Environment, dict[str, Outcome]]:
    """The recorded outcomes: for each environment those of its tests, by their names in tests/vllm."""
    return {
        Environment(*key.split(", Python ")): {test: Outcome(*found) for test, found in tests.items()}
        for key, tests in json.loads(path.read_text()).items()
    }


def write(record: dict[Environment, dict[str, Outcome]], path: Path = RECORD) -> None:
    found = {
        f"{environment.vllm}, Python {environment.python}": {test: list(one) for test, one in sorted(tests.items())}
        for environment, tests in sorted(record.items())
    }
    path.write_text(json.dumps(found, indent=1) + "\n")


def add(record: dict[Environment, dict[str, Outcome]], run: Path) -> None:
    """Put the outcomes of a run in place of older ones of its environment. A test that was skipped says nothing."""
    found = json.loads(run.read_text())
    if "vllm" not in found["packages"]:
        return
    tests = record.setdefault(Environment(found["packages"]["vllm"], found["python"]), {})
    for name, result in found["tests"].items():
        test = name.removeprefix("tests/vllm/")
        if result != "skipped" and shown(test):
            tests[test] = Outcome(result, found["date"])


def versions_that_ran(record: dict[Environment, dict[str, Outcome]]) -> set[str]:
    """Of vLLM: those of which an engine has answered with KVStow, and no test of it has failed."""
    return {
        version
        for version in _all_versions(record)
        if (engines := _engines(record, version)) and all(one.result == "passed" for one in engines.values())
    }


def _all_versions(record: dict[Environment, dict[str, Outcome]]) -> list[str]:
    """The versions of vLLM that the page is about, the newest first."""
    return sorted({*OLDER, *[environment.vllm for environment in record]}, key=_number, reverse=True)


def _number(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def _engines(record: dict[Environment, dict[str, Outcome]], version: str) -> dict[str, Outcome]:
    """The tests with an engine of this version: alone, or beside one of the newest."""
    return _begins(_of_version(record, version), ENGINE)


def _of_version(record: dict[Environment, dict[str, Outcome]], version: str) -> dict[str, Outcome]:
    """The outcomes with this version, by the names of the tests. If they ran with several versions of Python, failures
    come before others. Tests of two versions ran with the newest, and name the other one."""
    found: dict[str, Outcome] = {}
    for environment, tests in record.items():
        of_two = {test: one for test, one in _begins(tests, (VERSIONS,)).items() if test.endswith(f"[{version}]")}
        for test, one in (tests if environment.vllm == version else of_two).items():
            if test not in found or one.result != "passed":
                found[test] = one
    return found


def page(record: dict[Environment, dict[str, Outcome]]) -> str:
    """The whole page, as Markdown."""
    versions = _all_versions(record)
    parts = [
        _INTRODUCTION.rstrip(),
        "## Versions",
        _grid(("vLLM", "Python", "engines on a CPU", "what KVStow relies on", "on a GPU"), _versions(record)),
        _pythons(record),
        "## Features, embedded, on a CPU",
        _grid(("", *versions), _features(record, "embedded")),
        "## Features, attached to a node service, on a CPU",
        _grid(("", *versions), _features(record, "attached")),
        "## Features on a GPU",
        _grid(("", "result", "date", "GPU", "vLLM"), _on_gpus()),
        "## What is refused",
        "vLLM does not start with these, and the error says what to do instead.",
        _grid(("", "what KVStow needs"), _refusals()),
    ]
    return "\n\n".join(parts) + "\n"


def _versions(record: dict[Environment, dict[str, Outcome]]) -> Iterator[Sequence[str]]:
    for version in _all_versions(record):
        pythons = sorted({each.python for each, tests in record.items() if _engines({each: tests}, version)})
        yield version, ", ".join(pythons), _said(_engines(record, version)), _read(record, version), _measured(version)


def _pythons(record: dict[Environment, dict[str, Outcome]]) -> str:
    """A sentence about the versions of Python that have no row."""
    allowed = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    others = sorted({*allowed} - {environment.python for environment in record})
    return f"No engine has run on a CPU with Python {' or '.join(others)}, which KVStow allows." if others else ""


def _begins(tests: dict[str, Outcome], patterns: Sequence[str]) -> dict[str, Outcome]:
    return {test: one for test, one in tests.items() if test.startswith(tuple(patterns))}


def _features(record: dict[Environment, dict[str, Outcome]], way: str) -> Iterator[Sequence[str]]:
    """The rows of one way to run. What has not run with an older version has been read, if that has."""
    for feature in FEATURES:
        patterns: Sequence[str] = getattr(feature, way)
        if not patterns:
            continue
        cells = []
        for number, version in enumerate(_all_versions(record)):
            found = _begins(_of_version(record, version), patterns)
            cells.append(_said(found) if found or not number else _read(record, version))
        yield feature.name, *cells


def _on_gpus() -> Iterator[Sequence[str]]:
    for feature in FEATURES:
        for name in feature.gpu:
            result = load(RESULTS / f"{name}.json")
            gpus, versions = (
                ", ".join(dict.fromkeys(re.findall(pattern, result.machine)))
                for pattern in (r"H\d00", r"vLLM ([\d.]*\d)")
            )
            yield feature.name, f"[{name}](../bench/results/{name}.json)", result.date, gpus, versions


def _read(record: dict[Environment, dict[str, Outcome]], version: str) -> str:
    """What a cell says of the comparison with this version's sources."""
    found = _begins(_of_version(record, version), (NEWEST_CONTRACT,))
    for tests in record.values():
        found.update(_begins(tests, (f"test_contract.py::test_an_older_vllm_fits[{version}]",)))
    return _said(found, "read")


def _said(found: dict[str, Outcome], how: str = "run") -> str:
    failed = sorted(test for test, one in found.items() if one.result != "passed")
    if failed:
        return f"**fails**: {', '.join(failed)}"
    if not found:
        return f"not {how} yet"
    count = f", {len(found)} test{'s' * (len(found) > 1)}" if how == "run" else ""
    return f"{how} {min(one.date for one in found.values())}{count}"


def _measured(version: str) -> str:
    """How many results in `results/` name this version and a GPU, and the day of the newest."""
    minor = version.rpartition(".")[0]
    days = [
        result.date
        for result in (load(path) for path in sorted(RESULTS.glob("vllm-*.json")))
        if re.search(rf"vLLM {re.escape(minor)}\b", result.machine) and "NVIDIA" in result.machine
    ]
    return f"{len(days)} benchmark{'s' * (len(days) > 1)}, the last one {max(days)}" if days else ""


def _refusals() -> Iterator[Sequence[str]]:
    for kind, allowed in kvgroups.REFUSED.items():
        yield f"a KV cache of the kind `{kind}`", allowed
    texts: dict[str, object] = {}
    for node in sorted(
        (node for node in ast.walk(ast.parse(Path(vllmprocess.__file__).read_text())) if hasattr(node, "lineno")),
        key=lambda node: node.lineno,
    ):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=text)):
                texts[name] = text
            case ast.Call(func=ast.Name(id="ConfigError"), args=[ast.Constant(value=key), _, ast.Constant(value=text)]):
                yield f"`{key!s}`", str(text)
            case ast.Call(func=ast.Name(id="ConfigError"), args=[ast.Constant(value=key), _, ast.Name(id=name)]):
                yield f"`{key!s}`", str(texts[name])


def _grid(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main() -> None:
    record = read() if RECORD.exists() else {}
    for run in sorted(RUNS.glob("*.json"), key=lambda path: path.stat().st_mtime):
        add(record, run)
    write(record)
    PAGE.write_text(page(record))


_INTRODUCTION = """\
# What works with what

`python -m bench compatibility` makes this page of the outcomes of the tests, which `make test-vllm` and \
`make test-vllm-older` leave in build/results, and of the dated results of GPUs in [bench](../bench/README.md).

- *run* has the day on which all of the tests behind a cell have passed; if they ran on several days, the first.
- *read* means that no test has run, but everything that KVStow imports, calls, overrides or reads of vLLM was \
compared with the sources of that version.
- A feature that has no row in a table has no test there. It may work.

The tests run a real vLLM with small models. Their answers, to the log probability, are those of vLLM without KVStow. \
A CPU has neither CUDA graphs nor FlashAttention, so these have results of GPUs alone. The newest version runs all \
tests. An engine of each older one shares a node service with an engine of the newest, and runs tests of its own. \
[A new version of vLLM](newvllm.md) says how to follow vLLM.
"""
