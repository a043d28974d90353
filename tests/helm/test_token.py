"""The tokens of an installation, with a cluster that has the Secret of an earlier one."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.helm.cluster import Cluster, serving
from tests.helm.conftest import CHART, must_run

pytestmark = pytest.mark.deploy

SECRET = {
    "apiVersion": "v1",
    "kind": "Secret",
    "metadata": {
        "name": "test-kvstow-token",
        "labels": {"app.kubernetes.io/managed-by": "Helm"},
        "annotations": {"meta.helm.sh/release-name": "test", "meta.helm.sh/release-namespace": "kv"},
    },
    "data": {"token": base64.b64encode(b"the-token-of-before").decode()},
}


@contextmanager
def cluster(**secrets: dict[str, Any]) -> Iterator[str]:
    """The address of an API server that has these Secrets."""
    made = Cluster(has_operator=False)
    for secret in secrets.values():
        made.put(secret)
    with serving(made) as server:
        yield server


@pytest.fixture
def tokens(helm: Path, tmp_path: Path) -> Callable[..., dict[str, str]]:
    """The tokens that an installation with these values would have."""

    def render(server: str, *sets: str) -> dict[str, str]:
        options = [word for one in sets for word in ("--set", one)]
        (tmp_path / "kubeconfig").touch()
        asked = ("--dry-run=server", "--disable-openapi-validation", "--kube-apiserver", server)
        kubeconfig = ("--kubeconfig", tmp_path / "kubeconfig")
        said = must_run(helm, "template", "test", CHART, "--namespace=kv", *asked, *kubeconfig, *options)
        (secret,) = (one for one in yaml.safe_load_all(said) if one and one["kind"] == "Secret")
        return {key: base64.b64decode(value).decode() for key, value in secret["data"].items()}

    return render


def test_an_upgrade_keeps_the_token(tokens: Callable[..., dict[str, str]]) -> None:
    with cluster(token=SECRET) as server:
        assert tokens(server) == {"token": "the-token-of-before"}
        later = tokens(server, "admin.guardReading=true")
        assert later["token"] == "the-token-of-before"
        assert len(later["viewer-token"]) == 48


def test_a_token_that_is_set_replaces_it(tokens: Callable[..., dict[str, str]]) -> None:
    with cluster(token=SECRET) as server:
        assert tokens(server, "admin.token=another-token-now") == {"token": "another-token-now"}


def test_a_first_installation_makes_tokens_that_nobody_guesses(tokens: Callable[..., dict[str, str]]) -> None:
    with cluster() as server:
        first, second = (tokens(server, "admin.guardReading=true") for _ in range(2))
    assert first.keys() == second.keys() == {"token", "viewer-token"}
    made = [*first.values(), *second.values()]
    assert len(set(made)) == 4
    assert all(len(token) == 48 for token in made)
