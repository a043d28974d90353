"""What lies behind a name, in real engines: none finds what other weights have computed, whichever way they came there.

Each case puts other bytes behind a path, or into a running engine. Another engine of the same node service then has to
compute, and its answers are right.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.service.connectors.engine_core.releases import released, rename, switch
from tests.vllm.engineprocess import EngineProcess
from tests.vllm.engines import A_HIT, A, Adapter, Answer, Engine, Setup, assert_same, distance, eventually, running
from tests.vllm.models import write_adapter, write_model
from tests.vllm.nodeservice import NodeService, is_attached, until_attached

pytestmark = pytest.mark.vllm

LORA = {"enable_lora": True, "max_lora_rank": 8}


class Versions(NamedTuple):
    """Two models that differ in their weights alone, and what vLLM alone answers to `A` with each."""

    models: tuple[Path, Path]
    answers: tuple[Answer, Answer]


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Versions:
    folder = tmp_path_factory.mktemp("versions")
    models: list[Path] = []
    answers: list[Answer] = []
    for seed in (20, 21):
        models.append(write_model(folder / f"v{len(models) + 1}", seed=seed))
        with running(Setup(models[-1])) as engine:
            answers += engine.ask(A)
    assert distance(*answers) > 0.1
    return Versions((models[0], models[1]), (answers[0], answers[1]))


def check_answer(engine: Engine | EngineProcess, expected: Answer, *, cached: int = 0, **how: Any) -> None:
    """To `A`; then all of it is stored, and forgotten by the GPU."""
    (answer,) = engine.ask(A, **how)
    assert answer.cached == cached
    assert_same([answer], [expected])
    engine.forget_gpu()


def check_another_engine(
    model: Path, service: NodeService, log: Path, expected: Answer, *, cached: int = 0, sessions: int = 1, **how: Any
) -> None:
    """It starts now."""
    settings = LORA if "adapter" in how else {}
    engine = EngineProcess(model, service.attach, log, settings=settings)
    try:
        eventually(lambda: is_attached(service, sessions), "an attached engine")
        check_answer(engine, expected, cached=cached, **how)
    finally:
        engine.kill()


def attached(model: Path, service: NodeService, **options: Any) -> Setup:
    return Setup(model, {"attach": service.attach}, **options)


def copied(model: Path, folder: Path) -> Path:
    """The same files, as older ones."""
    folder.mkdir(parents=True)
    for file in model.iterdir():
        (folder / file.name).hardlink_to(file)
    return folder


def test_two_checkpoints_below_one_snapshot_are_two_models(
    versions: Versions, service: NodeService, tmp_path: Path
) -> None:
    snapshot = tmp_path / "models--org--name" / "snapshots" / ("1" * 40)
    names = ("checkpoint-1000", "checkpoint-2000")
    for name, model, answer in zip(names, versions.models, versions.answers, strict=True):
        check_another_engine(copied(model, snapshot / name), service, tmp_path / "log", answer)
    check_another_engine(snapshot / names[0], service, tmp_path / "log", versions.answers[0], cached=A_HIT)


def release(versions: Versions, folder: Path) -> Path:
    """`current` leads to the second version."""
    models = dict(zip(("v1", "v2"), versions.models, strict=True))
    return released(folder, lambda place, name: copied(models[name], place)) / "current"


@pytest.mark.parametrize("change", [switch, rename])
def test_a_path_that_leads_elsewhere_after_the_start_names_what_was_loaded(
    versions: Versions, service: NodeService, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    """Before the first request, which is when an engine attaches."""
    current = release(versions, tmp_path / "models")
    with running(attached(current, service)) as engine:
        change(current.parent)
        until_attached(engine, service)
        check_answer(engine, versions.answers[1])
    eventually(lambda: not service.sessions(), "the end of its session")
    check_another_engine(current, service, tmp_path / "log", versions.answers[0])
    check_another_engine(current, service, tmp_path / "log", versions.answers[0], cached=A_HIT)


def test_a_path_that_leads_elsewhere_while_vllm_loads_is_shared_with_nobody(
    versions: Versions, service: NodeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either version may have been loaded."""
    from vllm.v1.worker.gpu_worker import Worker

    current = release(versions, tmp_path / "models")
    load = Worker.load_model

    def load_and_switch(worker: Any, **options: Any) -> None:
        load(worker, **options)
        switch(current.parent)

    with monkeypatch.context() as patch:
        patch.setattr(Worker, "load_model", load_and_switch)
        with running(attached(current, service)) as engine:
            until_attached(engine, service)
            check_answer(engine, versions.answers[1])
            (namespace,) = service.get("/v1/namespaces")["items"]
            assert any("files_changed" in reason for reason in namespace["sharing_off"])
    eventually(lambda: not service.sessions(), "the end of its session")
    check_another_engine(current, service, tmp_path / "log", versions.answers[0])


def test_one_folder_is_one_model_through_any_path(versions: Versions, service: NodeService, tmp_path: Path) -> None:
    current = release(versions, tmp_path / "models")
    check_another_engine(current, service, tmp_path / "log", versions.answers[1])
    check_another_engine(current.parent / "v2", service, tmp_path / "log", versions.answers[1], cached=A_HIT)


@pytest.mark.parametrize("change", [switch, rename])
def test_an_adapter_whose_path_leads_elsewhere_uses_no_host_cache(
    versions: Versions, service: NodeService, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    """It is loaded as an operator does it, before it is first asked for."""
    from vllm.lora.request import LoRARequest

    model, current = versions.models[0], tmp_path / "adapters" / "current"
    released(current.parent, lambda place, name: write_adapter(place, seed=int(name[1:])))
    adapter = Adapter("french", 7, str(current))
    with running(Setup(model, settings=LORA)) as alone:
        expected = alone.ask(A, adapter=adapter)
        expected += alone.ask(A, adapter=Adapter("older", 8, str(current.parent / "v1")))
    assert distance(*expected) > 0.1
    with running(attached(model, service, settings=LORA)) as engine:
        until_attached(engine, service)
        engine.llm.llm_engine.add_lora(LoRARequest(*adapter[:3]))
        change(current.parent)
        check_answer(engine, expected[0], adapter=adapter)
        check_answer(engine, expected[0], adapter=adapter)
    eventually(lambda: not service.sessions(), "the end of its session")
    for cached in (0, A_HIT):
        check_another_engine(model, service, tmp_path / "log", expected[1], adapter=adapter, cached=cached)


# -- weights that change in a running engine ------------------------------------------------------------------------


def load_from(worker: Any, model: str) -> None:
    """As the code of a trainer does, which vLLM has never heard of, past the methods that ranks are asked for."""
    worker.worker.model_runner.reload_weights(weights_path=model)


def by_function(engine: Engine, model: Path) -> None:
    engine.llm.collective_rpc(load_from, args=(str(model),))


def by_name(engine: Engine, model: Path) -> None:
    engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(model)})


def on_the_rank(engine: Engine, model: Path) -> None:
    """Past the executor, as code in a worker's process can."""
    engine.llm.llm_engine.model_executor.driver_worker.reload_weights(weights_path=str(model))


@pytest.mark.parametrize("update", [by_function, by_name, on_the_rank])
def test_weights_that_change_in_an_engine_reach_no_neighbour(
    versions: Versions, service: NodeService, tmp_path: Path, update: Callable[[Engine, Path], None]
) -> None:
    """As in a loop of reinforcement learning, which empties the GPU's cache after each update, and only that."""
    first, second = versions.models
    frozen = EngineProcess(first, service.attach, tmp_path / "log")
    try:
        eventually(lambda: is_attached(service), "an attached engine")
        with running(attached(first, service)) as engine:

            def are_attached() -> bool:
                engine.step()
                return is_attached(service, sessions=2)

            eventually(are_attached, "two attached engines")
            check_answer(engine, versions.answers[0])
            check_answer(frozen, versions.answers[0], cached=A_HIT)
            engine.forget_gpu()
            check_answer(engine, versions.answers[0], cached=A_HIT)  # a reset alone changes nothing
            for model, answer in ((second, versions.answers[1]), (first, versions.answers[0])):
                update(engine, model)
                eventually(engine.llm.reset_prefix_cache, "a reset of the prefix cache")
                check_answer(engine, answer)
                frozen.forget_gpu()
                check_answer(frozen, versions.answers[0], cached=A_HIT)
            assert engine.scheduler_host.side.control.state.sharing == "weights_changed"
    finally:
        frozen.kill()
    eventually(lambda: not service.sessions(), "the end of both sessions")
    check_another_engine(first, service, tmp_path / "log", versions.answers[0], cached=A_HIT)


def test_ranks_in_processes_of_their_own_notice_a_change(
    versions: Versions, service: NodeService, tmp_path: Path
) -> None:
    first, second = versions.models
    with running(attached(first, service, tp=2, processes=True)) as engine:
        eventually(lambda: is_attached(service), "an attached engine")
        by_name(engine, second)
        eventually(engine.llm.reset_prefix_cache, "a reset of the prefix cache")
        (answer,) = engine.ask(A)
        assert_same([answer], [versions.answers[1]])
        eventually(lambda: service.sessions()[0]["in_flight"] == 0, "the end of all stores")
    eventually(lambda: not service.sessions(), "the end of its session")
    with running(attached(first, service, tp=2, processes=True)) as engine:
        eventually(lambda: is_attached(service), "an attached engine")
        (answer,) = engine.ask(A)
        assert answer.cached == 0
        assert_same([answer], [versions.answers[0]])


def test_an_engine_with_a_pool_of_its_own_forgets_it_with_its_weights(versions: Versions) -> None:
    first, second = versions.models
    with running(Setup(first, {})) as engine:
        check_answer(engine, versions.answers[0])
        check_answer(engine, versions.answers[0], cached=A_HIT)
        by_name(engine, second)
        eventually(engine.llm.reset_prefix_cache, "a reset of the prefix cache")
        check_answer(engine, versions.answers[1])
        engine.forget_gpu()
