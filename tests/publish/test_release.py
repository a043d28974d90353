"""A release has one version and one date in every file that names them, a tag on the commit that is built, and a way to
report faults that asks for what is needed."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from publish.release import ROOT, disagreements, missing, newest

FILES = (
    "pyproject.toml",
    "CHANGELOG.md",
    "CITATION.cff",
    "Dockerfile",
    "helm/kvstow/Chart.yaml",
    "engine/kvstow/__init__.py",
)
ADDRESS = "https://git.example.org/kvstow"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository of what a release is checked by, in which nothing is missing but the tag."""
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    _replace(tmp_path / "CHANGELOG.md", "0.1.0 (unreleased)", "0.1.0 (2030-12-31)")
    _replace(
        tmp_path / "CITATION.cff",
        "version: 0.1.0\n",
        f"version: 0.1.0\ndate-released: 2030-12-31\nrepository-code: {ADDRESS}\n",
    )
    _replace(
        tmp_path / "pyproject.toml",
        "[project.scripts]",
        f'[project.urls]\nRepository = "{ADDRESS}"\n\n[project.scripts]',
    )
    dockerfile = (tmp_path / "Dockerfile").read_text()
    digest = f"@sha256:{'0' * 64}"
    (tmp_path / "Dockerfile").write_text(
        re.sub(r"^(ARG \w+_IMAGE=[^@\s]+).*$", rf"\1{digest}", dockerfile, flags=re.MULTILINE)
    )
    _git(tmp_path, "init", "--quiet")
    _commit(tmp_path)
    return tmp_path


def _replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text, f"{path.name} does not say {old}"
    path.write_text(text.replace(old, new, 1))


def _git(tree: Path, *words: str) -> None:
    subprocess.run(["git", *words], cwd=tree, check=True)


def _commit(tree: Path) -> None:
    _git(tree, "add", "--all")
    identity = ("-c", "user.name=A Developer", "-c", "user.email=developer@example.org")
    _git(tree, *identity, "commit", "--quiet", "--message", "all: everything")


def test_the_files_of_this_tree_agree() -> None:
    assert list(disagreements(ROOT)) == []


def test_nothing_is_missing_once_the_tag_is_there(tree: Path) -> None:
    assert list(missing(tree, "v0.1.0")) == ["the tag v0.1.0 is not at the last commit: git tag v0.1.0"]
    _git(tree, "tag", "v0.1.0")
    assert list(missing(tree, "v0.1.0")) == []


@pytest.mark.parametrize(
    ("tag", "complaint"),
    [
        (None, "no tag is named: make release TAG=v0.1.0"),
        ("v0.2.0", "the tag is v0.2.0, and the version is 0.1.0: name it v0.1.0"),
    ],
)
def test_the_tag_names_the_version(tree: Path, tag: str | None, complaint: str) -> None:
    assert list(missing(tree, tag)) == [complaint]


@pytest.mark.parametrize(
    ("name", "old", "new", "complaint"),
    [
        ("CHANGELOG.md", "2030-12-31", "unreleased", "0.1.0 is unreleased"),
        ("CHANGELOG.md", "## 0.1.0", "## 0.2.0", "CHANGELOG.md, newest section: 0.2.0, and the package is 0.1.0"),
        ("CITATION.cff", "version: 0.1.0", "version: 0.0.9", "CITATION.cff, version: 0.0.9"),
        ("CITATION.cff", "2030-12-31", "2030-12-30", "date-released: 2030-12-30, and CHANGELOG.md says 2030-12-31"),
        ("CITATION.cff", ADDRESS, "https://other.example.org", "repository-code: https://other.example.org"),
        ("helm/kvstow/Chart.yaml", "appVersion: ", "appVersion: 1", "Chart.yaml, appVersion"),
        ("Dockerfile", "ARG VERSION=0.1.0", "ARG VERSION=0.3.0", "Dockerfile, ARG VERSION: 0.3.0"),
        ("Dockerfile", f"@sha256:{'0' * 64}", "", "has no digest"),
        ("pyproject.toml", "\n[project.urls]", "\n[tool.urls]", "names no public address"),
    ],
)
def test_what_a_release_lacks_is_named(tree: Path, name: str, old: str, new: str, complaint: str) -> None:
    _replace(tree / name, old, new)
    _commit(tree)
    _git(tree, "tag", "v0.1.0")
    assert any(complaint in line for line in missing(tree, "v0.1.0"))


def test_what_is_not_committed_is_named(tree: Path) -> None:
    _git(tree, "tag", "v0.1.0")
    (tree / "CHANGELOG.md").write_text((tree / "CHANGELOG.md").read_text() + "- More.\n")
    assert list(missing(tree, "v0.1.0")) == [
        "the tree differs from the last commit, which is what is built: CHANGELOG.md"
    ]


def test_a_heading_of_another_form_is_refused() -> None:
    with pytest.raises(ValueError, match="not of the form"):
        newest("# Changelog\n\n## 0.1\n")


WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())


def test_the_workflow_publishes_what_make_release_has_checked_and_holds_no_secret() -> None:
    text = (ROOT / ".github/workflows/release.yml").read_text()
    assert "secrets." not in text
    assert all(re.fullmatch(r"\S+@[0-9a-f]{40} # v\S+", use) for use in re.findall(r"uses: (.*)", text))
    jobs = WORKFLOW["jobs"]
    assert WORKFLOW["permissions"] == {}
    assert jobs["build"]["permissions"] == {"contents": "read"}
    assert [step["run"] for step in jobs["build"]["steps"] if "run" in step] == ['make release TAG="$GITHUB_REF_NAME"']
    assert jobs["publish"]["needs"] == "build"
    assert jobs["publish"]["permissions"] == {"id-token": "write"}


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("[!c]*.yml")), ids=lambda path: path.stem
)
def test_a_template_asks_for_what_doctor_says(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    doctor = next(field for field in form["body"] if field.get("id") == "doctor")
    assert doctor["attributes"]["label"] == "kvstow doctor -o json"
    assert doctor["validations"] == {"required": True}
    assert len({field["id"] for field in form["body"] if "id" in field}) == sum("id" in field for field in form["body"])
