"""What identifies a model's weights. Engines share KV only if they have the same weights."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from kvstow.tier.fingerprint import named_weights
from kvstow_service.connectors.engine_core.hubcache import commit_of
from kvstow_service.connectors.vllm.weightsdigest import WEIGHTS, digest_of_weights, digested_files

FindSnapshot = Callable[[str, str | None], Path | None]
"""Finds the files of a repository, at a revision, in the local cache of the Hugging Face Hub."""


class Weights(NamedTuple):
    """`weights_id` is empty if nothing identifies them. `source`: `configured`, `snapshot`, `files` or `unknown`.
    `path`: where the `files` are."""

    model: str
    weights_id: str
    source: str
    path: Path | None = None

    def fleet_id(self) -> str:
        """The name of the weights on every node; empty if there is none. Reads samples of `files`
        (`digest_of_weights`), and raises `OSError`."""
        match self.source:
            case "configured":
                return named_weights(self.weights_id, self.model).weights_id
            case "snapshot":
                return f"commit {self.weights_id}"
            case "files":
                assert self.path is not None
                digest = digest_of_weights(self.path)
                return f"files {digest}" if digest else ""
        return ""

    def changed_after(self, moment: float) -> bool:
        """Whether one of the `files` has changed after `moment`, in seconds since the epoch. Raises `OSError`."""
        return self.path is not None and any(file.stat().st_ctime > moment for file in digested_files(self.path))


def identify_weights(model: str, revision: str | None, configured: str | None, find_snapshot: FindSnapshot) -> Weights:
    """`model`: a path, or a repository of the Hugging Face Hub. Reads no weights: files are identified by name, size,
    times and inode."""
    path = Path(model)
    place = path if path.exists() else find_snapshot(model, revision)
    snapshot = None if place is None else commit_of(place)
    name = model if snapshot is None else snapshot[0]
    if configured:
        return Weights(name, configured, "configured")
    if snapshot is not None:
        return Weights(name, snapshot[1], "snapshot")
    if path.exists() and (digest := _digest_of_files(path)) is not None:
        return Weights(name, digest, "files", path)
    return Weights(name, "", "unknown")


def _digest_of_files(path: Path) -> str | None:
    """Returns None without weight files."""
    files = [path] if path.is_file() else sorted(path.iterdir())
    weights = [file for file in files if file.name.endswith(WEIGHTS)]
    if not weights:
        return None
    digest = hashlib.sha256()
    for file in files:
        if file in weights or file.name == "config.json":
            stat = file.stat()
            # Any program can set the first time; some network file systems do not keep the second.
            times = f"{stat.st_mtime_ns} {stat.st_ctime_ns}"
            digest.update(f"{file.name} {stat.st_size} {times} {stat.st_ino}\n".encode())
    return digest.hexdigest()[:40]
