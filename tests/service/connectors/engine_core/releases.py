"""Folders as release tools and the cache of the Hub keep them, and what puts other files behind a path without changing
a file."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path


def released(folder: Path, write: Callable[[Path, str], object]) -> Path:
    """`current` is a link to the folder `v2`, and `v1` is older. `write` puts the files of a version, whose name it
    gets, into a folder."""
    for name in ("v1", "v2"):
        write(folder / name, name)
    (folder / "current").symlink_to("v2")
    return folder


def switch(folder: Path, version: str = "v1") -> None:
    """As git-sync and Kubernetes do: the new link takes the place of the old one at once."""
    (folder / "next").symlink_to(version)
    (folder / "next").rename(folder / "current")


def switch_and_back(folder: Path) -> None:
    switch(folder)
    switch(folder, "v2")


def rename(folder: Path) -> None:
    (folder / "current").unlink()
    (folder / "v1").rename(folder / "current")


def rename_above(folder: Path) -> None:
    """The folder above is another one, which was in it, with the same names."""
    folder.rename(folder.with_name("old"))
    (folder.with_name("old") / "other").rename(folder)


def rename_and_back(folder: Path) -> None:
    (folder / "v2").rename(folder / "next")
    (folder / "v1").rename(folder / "v2")
    (folder / "v2").rename(folder / "v1")
    (folder / "next").rename(folder / "v2")


def in_hub(cache: Path, commit: str, files: Mapping[str, str], *, is_main: bool = False) -> Path:
    """A snapshot of org/name as the library of the Hub makes it: links to blobs, which are named by their content.
    `is_main`: the branch main is now this commit."""
    repository = cache / "models--org--name"
    snapshot, blobs, references = (repository / name for name in (f"snapshots/{commit}", "blobs", "refs"))
    for folder in (blobs, references):
        folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        blob = blobs / hashlib.sha256(content.encode()).hexdigest()
        blob.write_text(content)
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).symlink_to(os.path.relpath(blob, (snapshot / name).parent))
    if is_main:
        (references / "main").write_text(commit)
    return snapshot
