"""The page of what works with what is made of outcomes of tests, and each version that README names has run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from bench import compatibility
from bench.compatibility import FEATURES, OLDER, PAGE, Environment, Outcome, add, page, read, versions_that_ran
from bench.report import RESULTS

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests" / "vllm"
HERE = Environment("0.33.0", "3.11")


def test_the_page_is_made_of_the_record() -> None:
    assert PAGE.read_text() == page(read()), "make it anew with `python -m bench compatibility`"


def test_each_version_that_readme_names_has_run() -> None:
    ranges = re.findall(r"vLLM(?:'s environment)? \(?0\.(\d+) to 0\.(\d+)", (ROOT / "README.md").read_text())
    assert len(ranges) > 1
    named = {f"0.{minor}" for first, last in ranges for minor in range(int(first), int(last) + 1)}
    assert named <= {version.rpartition(".")[0] for version in versions_that_ran(read())}


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_a_row_names_tests_and_results_that_exist(feature: compatibility.Feature) -> None:
    assert all((RESULTS / f"{name}.json").is_file() for name in feature.gpu)
    assert feature.embedded or feature.attached or feature.gpu
    for pattern in (*feature.embedded, *feature.attached):
        file, _, name = pattern.partition("::")
        assert re.search(rf"^def {name.partition('[')[0]}", (TESTS / file).read_text(), re.MULTILINE), pattern


def test_the_versions_are_those_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text()
    others = re.findall(r"^VLLM_OTHERS := (.*)$", makefile, re.MULTILINE)[0].split()
    assert set(OLDER) == {*others, "0.32.0"}, "0.32.0 is the version of .venv-vllm"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """What a run of the tests has left."""
    tests = {
        "tests/vllm/test_latentattention.py::test_a": "passed",
        "tests/vllm/test_images.py::test_b": "failed",
        "tests/vllm/test_adapters.py::test_c": "skipped",
        "tests/vllm/test_import.py::test_d": "passed",
        "tests/vllm/test_versions.py::test_e[0.31.0]": "passed",
        "tests/vllm/test_versions.py::test_e[0.30.0]": "failed",
    }
    path = tmp_path / "run.json"
    path.write_text(
        json.dumps({"date": "2030-12-31", "python": "3.11", "packages": {"vllm": "0.33.0"}, "tests": tests})
    )
    return path


def test_a_run_replaces_what_was_known_of_its_tests(run: Path) -> None:
    known = {
        "test_latentattention.py::test_a": Outcome("failed", "2030-01-01"),
        "test_adapters.py::test_c": Outcome("passed", "2030-01-01"),
    }
    record = {HERE: known}
    add(record, run)
    assert record[HERE]["test_latentattention.py::test_a"] == Outcome("passed", "2030-12-31")
    assert record[HERE]["test_adapters.py::test_c"] == Outcome("passed", "2030-01-01"), "a skipped test says nothing"
    assert "test_import.py::test_d" not in record[HERE], "no row needs it"
    assert versions_that_ran(record) == {"0.31.0"}, "a test of an engine of 0.30 has failed, with one of 0.33 beside it"


def test_a_cell_says_when_it_ran_and_what_fails(run: Path) -> None:
    record: dict[Environment, dict[str, Outcome]] = {}
    add(record, run)
    older = {
        "test_latentattention.py::test_a": Outcome("passed", "2030-12-30"),
        "test_contract.py::test_the_installed_vllm_fits": Outcome("passed", "2030-12-29"),
    }
    record[Environment("0.32.0", "3.12")] = older
    _, _, attached = page(record).partition("attached to a node service")
    assert "|  | 0.33.0 | 0.32.0 | 0.31.0 | 0.30.0 |" in attached
    unknown = "not read yet | not read yet"
    assert (
        f"| latent attention (MLA), two ranks | run 2030-12-31, 1 test | run 2030-12-30, 1 test | {unknown} |"
        in attached
    )
    assert f"| images | **fails**: test_images.py::test_b | read 2030-12-29 | {unknown} |" in attached
    assert f"| LoRA adapters | not run yet | read 2030-12-29 | {unknown} |" in attached
    fails = "**fails**: test_versions.py::test_e[0.30.0]"
    assert f"| full attention, eager | {fails} | read 2030-12-29 | run 2030-12-31, 1 test | {fails} |" in attached
    assert "Python 3.13, which KVStow allows" in page(record)


def test_a_failure_with_one_python_is_not_hidden_by_another() -> None:
    record = {
        Environment("0.33.0", python): {"test_images.py::test_b": Outcome(result, "2030-12-31")}
        for python, result in (("3.11", "passed"), ("3.12", "failed"), ("3.13", "passed"))
    }
    assert "| images | **fails**: test_images.py::test_b |" in page(record)


def test_results_of_pytest_are_kept(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "def test_a(): pass\n"
        "def test_b(): assert False\n"
        "@pytest.fixture\n"
        "def broken():\n"
        "    yield\n"
        "    assert False\n"
        "def test_c(broken): pass\n"
        "@pytest.mark.skip\n"
        "def test_d(): pass\n"
    )
    (tmp_path / "empty.ini").write_text("[pytest]\n")
    kept = tmp_path / "kept" / "run.json"
    options = ("-p", "tests.results", "--results", kept, "-c", tmp_path / "empty.ini", "-p", "no:cacheprovider")
    ended = subprocess.run([sys.executable, "-m", "pytest", *options, tmp_path], cwd=ROOT, check=False)
    assert ended.returncode == pytest.ExitCode.TESTS_FAILED
    found = json.loads(kept.read_text())
    outcomes = {name.partition("::")[2]: outcome for name, outcome in found["tests"].items()}
    assert outcomes == {"test_a": "passed", "test_b": "failed", "test_c": "failed", "test_d": "skipped"}
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", found["date"])
