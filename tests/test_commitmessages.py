"""The hook that checks the form of commit messages, in a real repository."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

_HOOKS = Path(__file__).parents[1] / ".githooks"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for command in (
        ("init", "--quiet", "."),
        ("config", "core.hooksPath", str(_HOOKS)),
        ("config", "user.name", "A Developer"),
        ("config", "user.email", "developer@example.org"),
    ):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    return tmp_path


def _commit(repository: Path, message: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["git", "commit", "--quiet", "--allow-empty", "--file=-"],
        cwd=repository,
        input=message,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    "message",
    [
        "tier: read before writing\n\nA read has a request that waits for it.",
        "helm, docs: name the volume of a disk",
        "tests: " + "x" * 63,
        'Revert "tier: read before writing"\n\nThis reverts commit 0123456.',
        "fixup! tier: read before writing",
    ],
)
def test_messages_of_the_form_are_taken(repository: Path, message: str) -> None:
    done = _commit(repository, message)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("read before writing", "does not begin with an area"),
        ("Tier: read before writing", "does not begin with an area"),
        ("tier: Read before writing", "does not begin with an area"),
        ("tests: " + "x" * 64, "has 71 characters, of 70 at most"),
        ("tier: wip", "work in progress stays on its branch"),
        ("wip: read before writing", "work in progress stays on its branch"),
        ("tier: read before writing.", "ends with a full stop"),
        ("tier: read before writing\nas a request waits", "its second line is not empty"),
    ],
)
def test_others_are_refused_with_the_reason_and_the_form(repository: Path, message: str, reason: str) -> None:
    done = _commit(repository, message)
    assert done.returncode == 1
    assert reason in done.stderr
    assert "'area: what the change does'" in done.stderr
    assert "Your message is kept in .git/COMMIT_EDITMSG." in done.stderr
