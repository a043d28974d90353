"""The images, built by buildah and run as Kubernetes would run them: not root, on a read-only root file system.

Where no registry is reachable, Debian's own packages stand in for the base image.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.helm.conftest import VLLM_BASE
from tests.helm.images import Buildah, Container, Mount, pip_settings

import kvstow

pytestmark = pytest.mark.image

RunReadOnly = Callable[..., tuple[int, str]]


@pytest.fixture
def run_read_only(buildah: Buildah, tmp_path: Path) -> RunReadOnly:
    """Runs a command in an image, with nothing but the image's environment and a temporary folder."""
    tmp_path.chmod(0o1777)

    def run(image: str, *command: str) -> tuple[int, str]:
        variables = dict(line.split("=", 1) for line in buildah.config_of(image)["Env"])
        mounts = [Mount(tmp_path, "/tmp")]
        return Container(buildah.unpacked(image), command, variables, mounts=mounts).finish()

    return run


# Starts the service, asks what its health check asks and more, and stops it as Kubernetes does.
SESSION = """
import importlib.util, json, os, signal, subprocess, sys, time
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

assert importlib.util.find_spec("torch") is None
health_check = json.loads(sys.argv[1])
open("/tmp/token", "w").write("0123456789abcdef")
flags = "--host=0.0.0.0 --token-file=/tmp/token --memory=8MiB --attach-socket=/tmp/node/attach.sock --shutdown-delay=0"
service = subprocess.Popen(["kvstow", "serve", *flags.split()])

def answers(path):
    try:
        return urlopen(f"http://127.0.0.1:9595{path}", timeout=60).status
    except HTTPError as error:
        return error.code
    except URLError:
        return 0

deadline = time.monotonic() + 60
while answers("/readyz/pinned") != 200:
    assert service.poll() is None and time.monotonic() < deadline, "the memory was not populated"
    time.sleep(0.1)
assert subprocess.run(health_check).returncode == 0
try:
    drain = Request("http://127.0.0.1:9595/v1/drain", b"{}", {"Content-Type": "application/json"}, method="PUT")
    urlopen(drain)
    sys.exit("drained without a token")
except HTTPError as error:
    assert error.code == 401, error.code
service.send_signal(signal.SIGTERM)
assert service.wait(30) == 0
assert not os.path.exists("/tmp/node/attach.sock")
try:
    open("/written", "w")
    sys.exit("the root file system can be written")
except OSError as error:
    print("uid", os.getuid(), error.strerror)
"""


def test_the_service_runs_read_only_and_not_as_root(
    build: Callable[[str], str], buildah: Buildah, run_read_only: RunReadOnly
) -> None:
    image = build("service")
    config = buildah.config_of(image)
    kind, *health_check = config["Healthcheck"]["Test"]
    assert kind == "CMD"
    status, output = run_read_only(image, "python", "-c", SESSION, json.dumps(health_check))
    assert status == 0, output
    assert output.splitlines()[-1] == "uid 65532 Read-only file system"
    assert config["User"] == "65532:65532"
    assert config["Entrypoint"] == ["kvstow"]
    assert config["Labels"]["org.opencontainers.image.revision"] == "abc123"
    assert config["Labels"]["org.opencontainers.image.version"] == kvstow.__version__


def test_the_command_line_runs_without_numpy_and_web_server(
    build: Callable[[str], str], run_read_only: RunReadOnly
) -> None:
    image = build("cli")
    status, output = run_read_only(image, "kvstow", "--help")
    assert status == 0, output
    assert "serve" in output
    packages = ("torch", "msgspec", "numpy", "fastapi", "pip")
    absent = f"import importlib.util as u; print([name for name in {packages} if u.find_spec(name)])"
    assert run_read_only(image, "/opt/kvstow/bin/python", "-c", absent) == (0, "[]\n")


OPENED = """
import importlib.util, sys
from kvstow.errors import MissingPackageError
from kvstow_service.stores.stores import open_store

for url in sys.argv[1:]:
    try:
        print(open_store(url).name)
    except MissingPackageError as error:
        print(error)
assert importlib.util.find_spec("mooncake") is None or __import__("mooncake.store")
"""
URL = "mooncake://127.0.0.1:50051"


def test_the_service_has_the_clients_of_the_stores_that_were_asked_for(
    build: Callable[..., str], run_read_only: RunReadOnly
) -> None:
    python = "/opt/kvstow/bin/python"
    status, output = run_read_only(build("service"), python, "-c", OPENED, URL)
    assert status == 0, output
    assert "needs mooncake" in output
    assert run_read_only(build("service", "mooncake"), python, "-c", OPENED, URL) == (0, "mooncake\n")


def test_vllm_gets_kvstow_and_nothing_else(
    build: Callable[[str], str], buildah: Buildah, run_read_only: RunReadOnly, tmp_path: Path, base: str
) -> None:
    """On a base that has uv and Python, as vLLM's has; vLLM itself is 10 GB of CUDA."""
    recipe = tmp_path / "Dockerfile"
    recipe.write_text(
        f"FROM {base}\nRUN python3 -m venv /uv && /uv/bin/pip install uv && ln -s /uv/bin/uv /usr/local/bin/uv"
        " && rm -f /usr/lib/python3*/EXTERNALLY-MANAGED\n"
    )
    mounts = pip_settings(tmp_path)
    buildah("bud", "--pull-never", "--network", "host", *mounts, "--tag", VLLM_BASE, "--file", recipe, tmp_path)
    image = build("vllm")
    config = buildah.config_of(image)
    assert config["User"] == "65532:65532"
    assert config["Entrypoint"] == ["vllm", "serve"]
    known = {"kvstow", "torch", "xxhash", "numpy", "fastapi"}
    listed = f"from importlib.metadata import distributions as all; print(*sorted({{d.name for d in all()}} & {known}))"
    assert run_read_only(image, "python3", "-c", listed) == (0, "kvstow\n")
