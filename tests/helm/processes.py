"""Processes of the tests: started, waited for and ended."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

KVSTOW = (sys.executable, "-m", "kvstow_service")


def environ(**more: str) -> dict[str, str]:
    """Of this process, in which sources are found and no setting of KVStow is."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("KVSTOW_")}
    return {**inherited, "PYTHONPATH": os.pathsep.join(sys.path), **more}


def validated(manifests: Path, version: str) -> str:
    """What a Kubernetes of this version would take. Returns what the validator says beside that."""
    validate = shutil.which("kubernetes-validate", path=str(Path(sys.executable).parent))
    assert validate, "not installed: make test-deploy does that"
    command: list[str | Path] = [validate, "--strict", "--kubernetes-version", version, manifests]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stderr


@contextmanager
def running(*command: Any, log: Path, env: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=env)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def until(condition: Callable[[], Any], what: str, seconds: float = 120.0) -> Any:
    """What `condition` finds, once it finds anything; fails after a deadline that no healthy run comes near."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what} did not come about within {seconds:g} s"
        time.sleep(0.1)
    return found


@contextmanager
def serving(*flags: Any, log: Path, **variables: str) -> Iterator[str]:
    """The address of a `kvstow serve` on a port of its own."""
    command = (*KVSTOW, "serve", *flags, "--port=0", "--shutdown-delay=0")
    with _address_of(*command, log=log, variables=variables) as address:
        yield address


@contextmanager
def embedding(trace: Path, *flags: Any, log: Path, **variables: str) -> Iterator[str]:
    """The address of an engine that replays a trace, embedded in a process of its own."""
    command = (sys.executable, "-m", "tests.embeddedhost", trace, *flags)
    with _address_of(*command, log=log, variables=variables) as address:
        yield address


@contextmanager
def _address_of(*command: Any, log: Path, variables: Mapping[str, str]) -> Iterator[str]:
    with running(*command, log=log, env=environ(**variables)) as process:

        def address() -> str | None:
            assert process.poll() is None, log.read_text()
            found = re.search(r"admin server on (https?://[\d.:]+)", log.read_text())
            return found and found[1]

        yield until(address, "the service's address")
