"""Engines of several versions of vLLM on one node service: each finds its own blocks, and those of others only where
both hash everything alike. `make test-vllm` installs the versions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.vllm.engineprocess import EngineProcess
from tests.vllm.engines import A_BLOCKS, A_HIT, C, D, Reference, assert_same, eventually
from tests.vllm.environments import of_version, python
from tests.vllm.nodeservice import NodeService, is_attached, running_service

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeService]:
    with running_service(tmp_path_factory.mktemp("service")) as service:
        yield service


@pytest.fixture(scope="module")
def engine(
    model: Path, reference: Reference, service: NodeService, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineProcess]:
    """Of this environment's version; it has stored C."""
    expected = reference(model, C)
    engine = EngineProcess(model, service.attach, tmp_path_factory.mktemp("engine") / "log")
    try:
        eventually(lambda: is_attached(service), "an attached engine")
        assert_same(engine.ask(C), expected)
        engine.forget_gpu()
        yield engine
    finally:
        engine.kill()


def _namespaces(service: NodeService) -> set[str]:
    return {session["namespace"] for session in service.sessions()}


@pytest.mark.parametrize("version", [of_version("0.30.0")])
def test_versions_with_other_hashes_do_not_meet(
    version: str,
    model: Path,
    reference: Reference,
    service: NodeService,
    engine: EngineProcess,
    tmp_path: Path,
) -> None:
    """vLLM 0.30 hashes tokens as this version does, and LoRA adapters by their name alone."""
    expected = reference(model, C)
    used = service.used_slots()
    other = EngineProcess(model, service.attach, tmp_path / "log", python=python(version))
    try:
        eventually(lambda: is_attached(service, sessions=2), "two attached engines")
        assert f"v{version}" in (tmp_path / "log").read_text(), "the version that it is meant to be"
        assert len(_namespaces(service)) == 2
        assert len({pool["name"] for pool in service.pools()}) == 1, "they share memory"
        for cached in (0, A_HIT):  # of this version's blocks, and of its own
            (answer,) = other.ask(C)
            assert answer.cached == cached
            assert_same([answer], expected)
            other.forget_gpu()
        assert service.used_slots() >= used + A_BLOCKS, "the same blocks are stored twice"
        (answer,) = engine.ask(C)
        assert answer.cached == A_HIT
        assert_same([answer], expected)
        engine.forget_gpu()
        reasons = [why for one in service.get("/v1/namespaces")["items"] for why in one["sharing_off"]]
        assert any("hash_probe" in why for why in reasons)
    finally:
        other.kill()
        eventually(lambda: is_attached(service), "the end of the session")


@pytest.mark.parametrize("version", [of_version("0.31.0"), of_version("0.32.0")])
def test_versions_with_equal_hashes_and_identities_share(
    version: str, model: Path, reference: Reference, service: NodeService, engine: EngineProcess, tmp_path: Path
) -> None:
    expected = reference(model, C, D)
    other = EngineProcess(model, service.attach, tmp_path / "log", python=python(version))
    try:
        eventually(lambda: is_attached(service, sessions=2), "two attached engines")
        assert f"v{version}" in (tmp_path / "log").read_text(), "the version that it is meant to be"
        assert len(_namespaces(service)) == 1
        answers = other.ask(C)
        assert answers[0].cached == A_HIT, "its first request hits"
        answers += other.ask(D)
        assert_same(answers, expected)
        other.forget_gpu()
        (answer,) = engine.ask(D)
        assert answer.cached == A_HIT, "and so does this version's"
        assert_same([answer], expected[1:])
        engine.forget_gpu()
    finally:
        other.kill()
        eventually(lambda: is_attached(service), "the end of the session")
