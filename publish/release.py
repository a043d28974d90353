"""`make release`: build the wheel and the source distribution of the last commit into dist/, check them, install the
wheel into a fresh environment, serve from it, and list what it consists of. Nothing is uploaded.

Without a tag it is a rehearsal, which prints what a release would still need. With `--tag v0.1.0` each of these is an
error, and nothing is built."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import yaml

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"


class Heading(NamedTuple):
    """The newest section of the changelog. `date` is empty as long as the version is not released."""

    version: str
    date: str


def newest(changelog: str) -> Heading:
    """Raises `ValueError` if the first heading has another form."""
    line = next((line for line in changelog.splitlines() if line.startswith("## ")), "")
    match = re.fullmatch(r"## (\d+\.\d+\.\d+) \((unreleased|\d{4}-\d\d-\d\d)\)", line)
    if match is None:
        raise ValueError(
            f"CHANGELOG.md: {line!r} is not of the form '## 1.2.3 (2030-12-31)' or '## 1.2.3 (unreleased)'"
        )
    return Heading(match[1], "" if match[2] == "unreleased" else match[2])


def public_address(root: Path) -> str | None:
    """Of the repository: pyproject.toml is the one place that names it."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    address: str | None = project.get("urls", {}).get("Repository")
    return address


def disagreements(root: Path) -> Iterator[str]:
    """Files of the tree whose versions, dates or addresses differ. There is none in any commit."""
    version = re.findall(r'^__version__ = "(.+)"$', (root / "engine/kvstow/__init__.py").read_text(), re.MULTILINE)[0]
    heading = newest((root / "CHANGELOG.md").read_text())
    chart = yaml.safe_load((root / "helm/kvstow/Chart.yaml").read_text())
    citation = yaml.safe_load((root / "CITATION.cff").read_text())
    images = re.findall(r"^ARG VERSION=(\S+)$", (root / "Dockerfile").read_text(), re.MULTILINE)
    for name, found in (
        ("CHANGELOG.md, newest section", heading.version),
        ("CITATION.cff, version", citation["version"]),
        ("helm/kvstow/Chart.yaml, version", chart["version"]),
        ("helm/kvstow/Chart.yaml, appVersion", chart["appVersion"]),
        *(("Dockerfile, ARG VERSION", image) for image in images),
    ):
        if str(found) != version:
            yield f"{name}: {found}, and the package is {version}"
    date, address = citation.get("date-released"), citation.get("repository-code")
    if str(date or "") != heading.date:
        yield f"CITATION.cff, date-released: {date}, and CHANGELOG.md says {heading.date or 'unreleased'}"
    if address != public_address(root):
        yield f"CITATION.cff, repository-code: {address}, and pyproject.toml says {public_address(root)}"


def missing(root: Path, tag: str | None) -> Iterator[str]:
    """What a release of this tree still needs."""
    yield from disagreements(root)
    heading = newest((root / "CHANGELOG.md").read_text())
    if not heading.date:
        yield f"CHANGELOG.md: {heading.version} is unreleased: write the date of the release"
    if tag is None:
        yield f"no tag is named: make release TAG=v{heading.version}"
    elif tag != f"v{heading.version}":
        yield f"the tag is {tag}, and the version is {heading.version}: name it v{heading.version}"
    elif _git(root, "tag", "--points-at", "HEAD", "--list", tag) != tag:
        yield f"the tag {tag} is not at the last commit: git tag {tag}"
    if changed := _git(root, "status", "--porcelain"):
        yield f"the tree differs from the last commit, which is what is built: {', '.join(changed.split()[1::2])}"
    if public_address(root) is None:
        yield "pyproject.toml names no public address: write Repository in [project.urls], and the same in CITATION.cff"
    for image in re.findall(r"^ARG \w+_IMAGE=(\S+)$", (root / "Dockerfile").read_text(), re.MULTILINE):
        if "@sha256:" not in image:
            yield f"Dockerfile: {image} has no digest: python -m publish.bases"


def build(root: Path, folder: Path) -> list[Path]:
    """The source distribution of the last commit, and the wheel that is made of it; both are the same, byte for byte,
    whenever and wherever they are built."""
    tree = folder / "tree"
    tree.mkdir()
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=root, capture_output=True, check=True)
    subprocess.run(["tar", "--extract", "--directory", tree], input=archive.stdout, check=True)
    time = _git(root, "log", "-1", "--format=%ct")
    _run("-m", "build", "--no-isolation", "--outdir", folder, tree, environ={"SOURCE_DATE_EPOCH": time})
    return sorted([*folder.glob("*.whl"), *folder.glob("*.tar.gz")])


def check(root: Path, built: Sequence[Path]) -> None:
    """Raises `CalledProcessError` for what an index would refuse or show wrongly, or a wheel should not hold."""
    _run("-m", "twine", "check", "--strict", *built)
    wheels = [path for path in built if path.suffix == ".whl"]
    _run("-m", "check_wheel_contents", "--config", root / "pyproject.toml", *wheels)


def install(root: Path, wheel: Path, folder: Path) -> Path:
    """The interpreter of a fresh environment with the wheel, what its service and command line need in the versions of
    locks/run.txt, and nothing else."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    versions = folder / "versions.txt"
    versions.write_text(re.sub(r" \\\n    --hash=\S+", "", (root / "locks" / "run.txt").read_text()))
    pip = ("-m", "pip", "--disable-pip-version-check", "--python", python)
    _run(*pip, "install", "--quiet", "--constraint", versions, f"kvstow[service,cli] @ {wheel.as_uri()}")
    _run(*pip, "check")
    return python


def serve(python: Path, folder: Path) -> None:
    """Serve from an empty folder, with no more than the wheel has, and load what was stored before. Raises
    `RuntimeError` if nothing hits."""
    kvstow, attach, admin = (
        python.with_name("kvstow"),
        folder / "engines" / "attach.sock",
        folder / "admin" / "admin.sock",
    )
    environ = {"PATH": os.environ["PATH"], "HOME": str(folder), "KVSTOW_SERVER": f"unix:{admin}"}
    sockets = (f"--attach-socket={attach}", f"--admin-socket={admin}", "--port=0")
    with (folder / "log").open("w") as log:
        command = [str(kvstow), "serve", "--memory=64MiB", *sockets, "--shutdown-delay=0"]
        service = subprocess.Popen(command, cwd=folder, env=environ, stdout=log, stderr=log)

    def said(*words: str) -> str:
        """Standard output of a command; raises `RuntimeError` with what it and the service said if it fails."""
        done = subprocess.run([kvstow, *words], cwd=folder, env=environ, capture_output=True, text=True, check=False)
        if done.returncode:
            log = (folder / "log").read_text()
            raise RuntimeError(f"kvstow {' '.join(words)} failed:\n{done.stdout}{done.stderr}The service said:\n{log}")
        return done.stdout

    try:
        said("wait", "--for=pinned", "--timeout=60s")
        said("trace", "generate", "--sessions=20", "--output=trace.jsonl")
        result = json.loads(said("replay", "trace.jsonl", f"--attach=unix:{attach}", "--slot-size=16KiB", "--json"))
        if not result["hit_blocks"]:
            raise RuntimeError(f"nothing hit: {result}")
    finally:
        service.terminate()
        service.wait(60)


def list_parts(root: Path, python: Path, target: Path) -> None:
    """Write what is installed beside the wheel as CycloneDX: names, versions, licences."""
    options = ("--pyproject", root / "pyproject.toml", "--mc-type", "library", "--output-reproducible")
    _run("-m", "cyclonedx_py", "environment", *options, "--of", "JSON", "-o", target, python)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m publish.release", description=__doc__)
    parser.add_argument("--tag", help="the tag of the release, which is at the last commit")
    tag = parser.parse_args(argv).tag or None
    wanted = list(missing(ROOT, tag))
    if wanted:
        print("\n".join([f"{tag} cannot be released:" if tag else "A release would still need:", *wanted]))
    if wanted and tag:
        return 1
    with tempfile.TemporaryDirectory(prefix="kvstow-release-") as scratch:
        folder = Path(scratch)
        built = build(ROOT, folder)
        check(ROOT, built)
        (wheel,) = (path for path in built if path.suffix == ".whl")
        python = install(ROOT, wheel, folder / "environment")
        (folder / "served").mkdir()
        serve(python, folder / "served")
        parts = folder / f"{'-'.join(wheel.name.split('-')[:2])}.cdx.json"
        list_parts(ROOT, python, parts)
        shutil.rmtree(DIST, ignore_errors=True)
        DIST.mkdir()
        for path in (*built, parts):
            shutil.copy(path, DIST)
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}" for path in sorted(DIST.iterdir())]
    (DIST / "SHA256SUMS").write_text("\n".join(sums) + "\n")
    print("\n".join(["dist:", *sums]))
    return 0


def _git(root: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout.strip()


def _run(*words: str | Path, environ: dict[str, str] | None = None) -> None:
    subprocess.run([sys.executable, *words], env={**os.environ, **(environ or {})}, check=True)


if __name__ == "__main__":
    sys.exit(main())
