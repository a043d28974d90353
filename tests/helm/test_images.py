"""The images, built by buildah and run as Kubernetes would run them: not root, on a read-only root file system.

Where no registry is reachable, Debian's own packages stand in for the base image.
"""

from __future__ import annotations

import configparser
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvstow

pytestmark = pytest.mark.image

ROOT = Path(__file__).parents[2]
READ_ONLY = Path(__file__).with_name("read_only.sh")
BASE = "docker.io/library/python:3.12-slim-bookworm"
VLLM_BASE = "docker.io/vllm/vllm-openai:v0.33.0"

Buildah = Callable[..., str]


def said(*command: str | Path, **options: Any) -> str:
    result: subprocess.CompletedProcess[str] = subprocess.run(
        command, capture_output=True, text=True, check=False, **options
    )
    assert result.returncode == 0, f"{' '.join(map(str, command))} failed:\n{result.stdout}{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def buildah(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Buildah]:
    """Runs buildah with a store of its own."""
    if os.geteuid() != 0:
        pytest.skip("builds images, which needs root")
    for program in ("buildah", "debootstrap", "unshare"):
        if shutil.which(program) is None:
            pytest.skip(f"needs {program}: apt-get install buildah debootstrap util-linux iproute2")
    store = tmp_path_factory.mktemp("store")
    places = ("--root", store / "root", "--runroot", store / "run")

    def run(*arguments: str | Path) -> str:
        return said("buildah", *places, *arguments, env={**os.environ, "BUILDAH_ISOLATION": "chroot"})

    yield run
    run("rm", "--all")
    run("rmi", "--all", "--force")
    shutil.rmtree(store, ignore_errors=True)


def _make_base(folder: Path) -> None:
    packages = "python3,python3-venv,ca-certificates"
    said("debootstrap", "--variant=minbase", f"--include={packages}", "bookworm", folder / "root")
    said("tar", "--directory", folder / "root", "--create", "--file", folder / "base.tar", ".")
    shutil.rmtree(folder / "root")


@pytest.fixture(scope="module")
def base(buildah: Buildah, obtain: Callable[[str, Callable[[Path], None]], Path], tmp_path_factory: Any) -> str:
    try:
        buildah("pull", BASE)
    except AssertionError:
        folder = obtain("base-bookworm", _make_base)
        recipe = tmp_path_factory.mktemp("base") / "Dockerfile"
        recipe.write_text("FROM scratch\nADD base.tar /\nENV PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin\n")
        buildah("bud", "--tag", BASE, "--file", recipe, folder)
    return BASE


@pytest.fixture(scope="module")
def build(buildah: Buildah, base: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Builds a target with the package indexes and certificates that pip has on this machine."""
    pip_config = tmp_path_factory.mktemp("pip") / "pip.conf"
    mounts = pip_settings(pip_config)

    def image(target: str) -> str:
        name = f"kvstow-test-{target}"
        given = ("--build-arg", "REVISION=abc123", "--tag", name, "--target", target)
        buildah("bud", "--format", "docker", "--layers", "--pull-never", "--network", "host", *mounts, *given, ROOT)
        return name

    return image


def pip_settings(written: Path) -> list[str]:
    """Writes this machine's settings of pip to a file; returns the mounts that make a build use them."""
    config = configparser.ConfigParser(interpolation=None)
    lines = said(sys.executable, "-m", "pip", "config", "list").splitlines()
    settings = {name.split(".", 1)[1]: value.strip("'") for name, _, value in (line.partition("=") for line in lines)}
    config["global"] = settings
    with written.open("w") as stream:
        config.write(stream)
    words = [word for value in settings.values() for word in value.split()]
    indexes = [Path(word.removeprefix("file://")).parent for word in words if word.startswith("file://")]
    paths = {*indexes, *(Path(word) for word in words if word.startswith("/"))}  # an index links to what lies beside it
    shared = [f"{path}:{path}:ro" for path in sorted(paths) if path.exists()]
    return [option for mount in (f"{written}:/etc/pip.conf:ro", *shared) for option in ("-v", mount)]


@pytest.fixture(scope="module")
def run_read_only(buildah: Buildah) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a command in an image, with nothing but the image's environment."""

    def run(image: str, *command: str) -> subprocess.CompletedProcess[str]:
        container = buildah("from", "--pull-never", image).strip()
        root = buildah("mount", container).strip()
        variables = dict(line.split("=", 1) for line in config_of(buildah, image)["Env"])
        isolated = ("unshare", "--mount", "--net", "--pid", "--fork", READ_ONLY, root)
        result = subprocess.run(
            [*isolated, *command], env=variables, capture_output=True, text=True, check=False, timeout=120
        )
        buildah("rm", container)
        return result

    return run


def config_of(buildah: Buildah, image: str) -> dict[str, Any]:
    return dict(json.loads(buildah("inspect", "--type", "image", image))["Docker"]["config"])


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
        return urlopen(f"http://127.0.0.1:9595{path}", timeout=2).status
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
    build: Callable[[str], str],
    buildah: Buildah,
    run_read_only: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    image = build("service")
    config = config_of(buildah, image)
    kind, *health_check = config["Healthcheck"]["Test"]
    assert kind == "CMD"
    result = run_read_only(image, "python", "-c", SESSION, json.dumps(health_check))
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.strip() == "uid 65532 Read-only file system"
    assert config["User"] == "65532:65532"
    assert config["Entrypoint"] == ["kvstow"]
    assert config["Labels"]["org.opencontainers.image.revision"] == "abc123"
    assert config["Labels"]["org.opencontainers.image.version"] == kvstow.__version__


def test_the_command_line_runs_without_numpy_and_web_server(
    build: Callable[[str], str], run_read_only: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    image = build("cli")
    result = run_read_only(image, "kvstow", "--help")
    assert result.returncode == 0, result.stderr
    assert "serve" in result.stdout
    absent = "import importlib.util as u; print([n for n in ('torch', 'numpy', 'fastapi', 'pip') if u.find_spec(n)])"
    found = run_read_only(image, "/opt/kvstow/bin/python", "-c", absent)
    assert found.stdout.strip() == "[]", found.stderr


def test_vllm_gets_kvstow_and_nothing_else(
    build: Callable[[str], str],
    buildah: Buildah,
    run_read_only: Callable[..., subprocess.CompletedProcess[str]],
    tmp_path: Path,
    base: str,
) -> None:
    """On a base that has uv and Python, as vLLM's has; vLLM itself is 10 GB of CUDA."""
    recipe = tmp_path / "Dockerfile"
    recipe.write_text(
        f"FROM {base}\nRUN python3 -m venv /uv && /uv/bin/pip install uv && ln -s /uv/bin/uv /usr/local/bin/uv"
        " && rm -f /usr/lib/python3*/EXTERNALLY-MANAGED\n"
    )
    mounts = pip_settings(tmp_path / "pip.conf")
    buildah("bud", "--pull-never", "--network", "host", *mounts, "--tag", VLLM_BASE, "--file", recipe, tmp_path)
    image = build("vllm")
    config = config_of(buildah, image)
    assert config["User"] == "65532:65532"
    assert config["Entrypoint"] == ["vllm", "serve"]
    listed = (
        "from importlib.metadata import distributions; print({d.name for d in distributions()} & {'kvstow', 'torch'})"
    )
    result = run_read_only(image, "python3", "-c", listed)
    assert result.stdout.strip() == "{'kvstow'}", result.stderr
