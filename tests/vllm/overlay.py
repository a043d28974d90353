"""Installs a release of vLLM that has no CPU build: the Python files of its CUDA wheel, over the compiled files of the
vLLM that runs this. It works as long as the release calls no kernel whose signature has changed.

    python overlay.py ENVIRONMENT locks/vllm-0.33.0.txt

The file names the wheel, and what the release needs beside the packages of the vLLM that runs this.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

_NOT_NEEDED = (".so", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".inl", ".jpg", ".js", "vllm/vllm-rs")
"""Parts of the wheel that need a GPU or make a page in a browser: over 600 MB."""


def install(packages: Path, lock: str) -> None:
    """`packages`: the folder site-packages of the environment. The wheel, 340 MB, is not kept."""
    with tempfile.TemporaryDirectory(dir=packages) as folder:
        options = ["--no-deps", "--no-cache-dir", "--only-binary=:all:", "--disable-pip-version-check", "--quiet"]
        download = [sys.executable, "-m", "pip", "download", *options, "--dest", folder, "--require-hashes"]
        subprocess.run([*download, "--requirement", lock], check=True)
        for wheel in Path(folder).glob("*.whl"):
            left_out = _NOT_NEEDED if wheel.name.startswith("vllm-") else ()
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(packages, [name for name in archive.namelist() if not name.endswith(left_out)])
    for compiled in _installed().glob("*.so"):
        (packages / "vllm" / compiled.name).symlink_to(compiled)
    _name_cpu(packages)


def _installed() -> Path:
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).resolve().parent


def _name_cpu(packages: Path) -> None:
    """vLLM takes its platform from the version of the distribution `vllm`."""
    (info,) = packages.glob("vllm-*.dist-info")
    version = info.name.removeprefix("vllm-").removesuffix(".dist-info")
    metadata = info / "METADATA"
    metadata.write_text(re.sub(r"(?m)^Version: .*$", f"Version: {version}+cpu", metadata.read_text(), count=1))
    info.rename(packages / f"vllm-{version}+cpu.dist-info")


if __name__ == "__main__":
    (found,) = Path(sys.argv[1]).glob("lib/python*/site-packages")
    install(found.resolve(), sys.argv[2])
