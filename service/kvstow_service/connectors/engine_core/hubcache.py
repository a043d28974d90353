"""The local cache of the Hugging Face Hub: which commit of a repository lies where."""

from __future__ import annotations

import logging
import re
from pathlib import Path

logger = logging.getLogger("kvstow.vllm")

_SNAPSHOT = re.compile(r"models--(?P<repository>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})(?:/|$)")


def find_cached(repository: str, revision: str | None, file: str = "config.json") -> Path | None:
    """A file of a repository, at a revision; None if it is not in the cache."""
    from huggingface_hub import try_to_load_from_cache  # type: ignore[import-not-found, unused-ignore]

    try:
        found = try_to_load_from_cache(repository, file, revision=revision)
    except Exception as error:  # noqa: BLE001 - a name that is no repository, such as s3://bucket
        logger.debug("%s of %s is not in the cache: %s", file, repository, error)
        return None
    return Path(found) if isinstance(found, str) else None


def commit_of(place: Path) -> tuple[str, str] | None:
    """The repository and the commit whose snapshot this place is in; None for any other place."""
    found = _SNAPSHOT.search(f"{place.absolute()}/")
    return None if found is None else (found["repository"].replace("--", "/"), found["commit"])


def reference_of(cached: Path, revision: str | None = None) -> Path | None:
    """The file that says which commit a branch or a tag is; None if there is none, as for a commit."""
    for parent in cached.parents:
        if parent.name == "snapshots":
            reference = parent.parent / "refs" / (revision or "main")
            return reference if reference.exists() else None
    return None
