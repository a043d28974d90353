"""Sources of released vLLM versions, fetched for the time of a test."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

RELEASES = ("0.26.0", "0.30.0", "0.33.0")
"""The oldest that KVStow supports, the one in which the order of the hooks changed, and the newest."""


@contextmanager
def unpacked(version: str) -> Iterator[Path]:
    """A folder with the package `vllm` of that version, as far as it is Python; it is removed again.

    The wheel is 300 MB, and pip has no way to fetch less: the sdist cannot be downloaded without building it.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"vllm-{version}-"))
    try:
        _download(version, folder / "wheel")
        (wheel,) = (folder / "wheel").glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            sources = [name for name in archive.namelist() if name.startswith("vllm/") and name.endswith(".py")]
            archive.extractall(folder, sources)
        shutil.rmtree(folder / "wheel")
        yield folder
    finally:
        shutil.rmtree(folder)


def _download(version: str, folder: Path) -> None:
    options = ["--no-deps", "--no-cache-dir", "--only-binary=:all:", "--disable-pip-version-check", "--quiet"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), f"vllm=={version}"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        pytest.fail(
            f"vLLM {version} cannot be fetched, so it is unknown whether KVStow fits it: this test needs a package "
            f"index that pip can reach (300 MB per version). pip says: {result.stderr.strip()}",
            pytrace=False,
        )
