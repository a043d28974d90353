"""Images built by buildah, and containers of them as Kubernetes would run them."""

from __future__ import annotations

import configparser
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

GET = """
import sys, urllib.error, urllib.request
try:
    answer = urllib.request.build_opener(urllib.request.ProxyHandler({})).open(sys.argv[1], timeout=10)
    print(answer.status, answer.read().decode())
except urllib.error.HTTPError as error:
    print(error.code, error.read().decode())
except OSError:
    print("0 ")
"""
CONTAINER = Path(__file__).with_name("container.sh")


def said(*command: str | Path, **options: Any) -> str:
    result: subprocess.CompletedProcess[str] = subprocess.run(
        command, capture_output=True, text=True, check=False, **options
    )
    assert result.returncode == 0, f"{' '.join(map(str, command))} failed:\n{result.stdout}{result.stderr}"
    return result.stdout


class Buildah:
    """buildah with a store of its own."""

    def __init__(self, store: Path) -> None:
        self._places = ("--root", store / "root", "--runroot", store / "run")

    def __call__(self, *arguments: str | Path) -> str:
        return said("buildah", *self._places, *arguments, env={**os.environ, "BUILDAH_ISOLATION": "chroot"})

    def config_of(self, image: str) -> dict[str, Any]:
        return dict(json.loads(self("inspect", "--type", "image", image))["Docker"]["config"])

    def unpacked(self, image: str) -> Path:
        """A fresh root folder of the image, which lives as long as the store."""
        return Path(self("mount", self("from", "--pull-never", image).strip()).strip())


def pip_settings(folder: Path) -> list[str]:
    """Writes this machine's settings of pip into a folder, also for uv; returns mounts that make a build use them."""
    written, for_uv = folder / "pip.conf", folder / "uv.toml"
    config = configparser.ConfigParser(interpolation=None)
    lines = said(sys.executable, "-m", "pip", "config", "list").splitlines()
    settings = {name.split(".", 1)[1]: value.strip("'") for name, _, value in (line.partition("=") for line in lines)}
    config["global"] = settings
    with written.open("w") as stream:
        config.write(stream)
    found = {name: settings.get(name, "").split() for name in ("extra-index-url", "find-links")}
    lists = "".join(f"{name} = {json.dumps(values)}\n" for name, values in found.items() if values)
    for_uv.write_text(f'system-certs = true\nindex-strategy = "unsafe-best-match"\n{lists}')
    words = [word for value in settings.values() for word in value.split()]
    indexes = [Path(word.removeprefix("file://")).parent for word in words if word.startswith("file://")]
    paths = {*indexes, *(Path(word) for word in words if word.startswith("/"))}  # an index links to what lies beside it
    shared = [f"{path}:{path}:ro" for path in sorted(paths) if path.exists()]
    return [
        option
        for mount in (f"{written}:/etc/pip.conf:ro", f"{for_uv}:/etc/uv/uv.toml:ro", *shared)
        for option in ("-v", mount)
    ]


class Mount(NamedTuple):
    source: Path
    target: str
    read_only: bool = False


class Identity(NamedTuple):
    """Who a container's process is, and what it may do."""

    user: int = 65532
    group: int = 65532
    groups: tuple[int, ...] = ()
    capabilities: tuple[str, ...] = ()

    def command(self) -> list[str]:
        """Becomes that, with no way back."""
        allowed = ",".join(["-all", *(f"+{name.lower()}" for name in self.capabilities)])
        groups = ["--groups", ",".join(map(str, self.groups))] if self.groups else ["--clear-groups"]
        identity = ["--reuid", str(self.user), "--regid", str(self.group), *groups]
        return ["setpriv", *identity, f"--inh-caps={allowed}", f"--bounding-set={allowed}", "--no-new-privs", "--"]


KVSTOW_USER = Identity()


class Container:
    """A process with pid, network and mount namespaces of its own, on a root file system that is read-only."""

    def __init__(
        self,
        root: Path,
        command: Iterable[str],
        environ: Mapping[str, str],
        *,
        mounts: Iterable[Mount] = (),
        identity: Identity = KVSTOW_USER,
        output: Any = subprocess.PIPE,
    ) -> None:
        volumes = [word for one in mounts for word in ("ro" if one.read_only else "rw", str(one.source), one.target)]
        self.process = subprocess.Popen(
            [
                "unshare",
                "--mount",
                "--net",
                "--pid",
                "--fork",
                str(CONTAINER),
                str(root),
                *volumes,
                "--",
                *identity.command(),
                *command,
            ],
            env={"PATH": os.environ["PATH"], **environ},
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def finish(self, seconds: float = 120) -> tuple[int, str]:
        """Its exit status and its output, once it has ended by itself."""
        output, _ = self.process.communicate(timeout=seconds)
        return self.process.returncode, output

    def stop(self) -> int:
        """Send SIGTERM to its process 1, as the kubelet does; returns the exit status."""
        self._signal(signal.SIGTERM)
        return self.process.wait(120)

    def kill(self) -> None:
        """With all its processes; idempotent."""
        self._signal(signal.SIGKILL)
        self.process.communicate()

    def get(self, url: str) -> tuple[int, str]:
        """Status and body of the answer to a request in its network; 0 while there is none."""
        if (pid := self._first()) is None:
            return 0, ""
        network = ("nsenter", "--net", "--target", str(pid))
        status, _, body = said(*network, sys.executable, "-c", GET, url).partition(" ")
        return int(status), body

    def _signal(self, number: int) -> None:
        if (pid := self._first()) is not None:
            os.kill(pid, number)

    def _first(self) -> int | None:
        """Process 1 of its namespace: the one child of `unshare`, which passes no signals on."""
        if self.process.poll() is not None:
            return None
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0]) if children else None
