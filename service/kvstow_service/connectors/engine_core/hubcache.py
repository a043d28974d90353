"""The local cache of the Hugging Face Hub: which commit of a repository lies where."""

from __future__ import annotations

import os
import re
from pathlib import Path

COMMIT = re.compile("[0-9a-f]{40}")
_SNAPSHOT = re.compile(r"models--(?P<repository>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})(?:/|$)")


def find_snapshot(repository: str, revision: str | None, cache: str | None = None) -> Path | None:
    """The folder of a repository's files at a revision, by default the latest that the cache knows; None if it is not
    in the cache. `cache`: another folder than the usual one."""
    reference = reference_of(repository, revision, cache)
    commit = revision
    if reference is not None:
        commit = reference.read_text().strip()
    if commit is None or not COMMIT.fullmatch(commit):
        return None
    folder = _folder(repository, cache)
    snapshot = None if folder is None else folder / "snapshots" / commit
    return snapshot if snapshot is not None and snapshot.is_dir() else None


def reference_of(repository: str, revision: str | None, cache: str | None = None) -> Path | None:
    """The file that says which commit a branch or a tag is; None if there is none, as for a commit."""
    folder = _folder(repository, cache)
    reference = None if folder is None else folder / "refs" / (revision or "main")
    return reference if reference is not None and reference.is_file() else None


def commit_of(place: Path) -> tuple[str, str] | None:
    """The repository and the commit whose snapshot this place is in; None for any other place."""
    found = _SNAPSHOT.search(f"{place.absolute()}/")
    return None if found is None else (found["repository"].replace("--", "/"), found["commit"])


def _folder(repository: str, cache: str | None) -> Path | None:
    from huggingface_hub import constants  # type: ignore[import-not-found, unused-ignore]

    if os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true"):  # names then mean other repositories
        return None
    return Path(cache or constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}"
