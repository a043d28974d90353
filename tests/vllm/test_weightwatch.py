"""Calls that may change an engine's weights are noticed before they run, by executors and by ranks; others are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from kvstow_service.connectors.vllm.weightwatch import HARMLESS, watch_executors, watch_of, watch_ranks

pytestmark = pytest.mark.vllm


class Executor:
    """As vLLM has one for each way to reach ranks."""

    def __init__(self, config: Any) -> None:
        self.vllm_config = config
        self.sent: list[tuple[object, int]] = []

    def collective_rpc(
        self, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None, non_block: bool = False
    ) -> str:
        self.sent.append((method, watch_of(self.vllm_config).asked))
        return "sent"


class Worker:
    """What a rank's wrapper finds its methods in."""

    device = "cpu"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "absent":
            raise AttributeError(name)
        return lambda *args, **kwargs: name


@pytest.fixture
def config() -> Any:
    return SimpleNamespace(instance_id=uuid4(), kv_transfer_config=object())


@pytest.fixture
def heard(config: Any) -> list[str]:
    heard: list[str] = []
    watch_of(config).listener = heard.append
    return heard


@pytest.fixture
def executor(config: Any, monkeypatch: pytest.MonkeyPatch) -> Executor:
    from vllm.v1.executor import abstract

    monkeypatch.setattr(abstract, "Executor", SimpleNamespace(__subclasses__=lambda: [Executor]))
    monkeypatch.setattr(Executor, "collective_rpc", Executor.collective_rpc)
    watch_executors()
    watch_executors()
    return Executor(config)


@pytest.fixture
def rank(config: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    monkeypatch.setattr(WorkerWrapperBase, "__getattr__", WorkerWrapperBase.__getattr__)
    watch_ranks()
    watch_ranks()
    wrapper = WorkerWrapperBase.__new__(WorkerWrapperBase)
    wrapper.worker, wrapper.vllm_config = Worker(), config
    return wrapper


def trained(worker: Any) -> None: ...


class Unhashable:
    """A function as a trainer may write it, which is in no set."""

    __hash__ = None  # type: ignore[assignment]

    def __call__(self, worker: Any) -> None: ...


UPDATES: list[Any] = [
    *("reload_weights", "update_weights", "apply_model", "finish_weight_update", "theirs"),
    *(trained, Unhashable()),
]


@pytest.mark.parametrize("method", UPDATES)
def test_an_executor_notices_before_it_sends(executor: Executor, heard: list[str], method: Any) -> None:
    executor.collective_rpc = _checked(executor.collective_rpc, heard)  # type: ignore[method-assign]
    assert executor.collective_rpc(method, args=(1,)) == "sent"
    assert len(heard) == 1
    assert heard[0].startswith("weights_changed: ")
    assert executor.sent == [(method, int(isinstance(method, str)))], "noticed by then"


def _checked(send: Callable[..., Any], heard: list[str]) -> Callable[..., Any]:
    def send_once(*args: Any, **kwargs: Any) -> Any:
        assert not heard
        return send(*args, **kwargs)

    return send_once


@pytest.mark.parametrize("method", sorted(HARMLESS))
def test_what_vllm_asks_itself_is_no_change(executor: Executor, rank: Any, heard: list[str], method: str) -> None:
    executor.collective_rpc(method)
    getattr(rank, method)
    assert not heard
    assert (watch_of(executor.vllm_config).asked, watch_of(executor.vllm_config).noticed) == (0, 0)


def test_sleep_and_discard_count_if_weights_are_lost(executor: Executor, heard: list[str]) -> None:
    executor.collective_rpc("sleep", kwargs={"level": 1})
    executor.collective_rpc("discard", args=(("kv_cache",),))
    executor.collective_rpc("sleep")
    assert not heard
    executor.collective_rpc("sleep", kwargs={"level": 2})
    executor.collective_rpc("discard", args=(("weights",),))
    assert len(heard) == 2
    executor.collective_rpc("sleep", args=(None,))
    executor.collective_rpc("discard", kwargs={"tags": None})
    assert len(heard) == 4, "it is unknown what these do"


def test_a_function_of_vllm_itself_is_no_change(executor: Executor, heard: list[str]) -> None:
    def own(worker: Any) -> None: ...

    own.__module__ = "vllm.distributed.ec_transfer.ec_connector.encoder_output_width"
    own.__qualname__ = "_measure_on_worker"
    executor.collective_rpc(own)
    assert not heard


def test_a_rank_notices_what_nobody_here_has_asked_for(rank: Any, config: Any, heard: list[str]) -> None:
    """Its executor is in another process, or the call has come by another way."""
    assert rank.reload_weights(path="x") == "reload_weights"
    assert (watch_of(config).noticed, len(heard)) == (1, 1)
    assert rank.device == "cpu", "that is no method"
    assert watch_of(config).noticed == 1
    with pytest.raises(AttributeError):
        rank.absent  # noqa: B018


def test_a_call_that_was_noticed_when_it_was_sent_is_heard_once(
    rank: Any, executor: Executor, config: Any, heard: list[str]
) -> None:
    executor.collective_rpc("update_weights")
    rank.update_weights()
    assert len(heard) == 1
    assert watch_of(config).asked == watch_of(config).noticed == 1


def test_what_happens_while_an_engine_starts_is_no_change(rank: Any, config: Any) -> None:
    rank.some_setup()
    watch_of(config).begin_serving()
    assert watch_of(config).noticed == 0


def test_an_engine_without_a_connector_is_not_watched(rank: Any, config: Any, heard: list[str]) -> None:
    config.kv_transfer_config = None
    rank.reload_weights()
    assert not heard


def test_an_error_of_the_watch_does_not_reach_vllm(rank: Any, executor: Executor, config: Any) -> None:
    def fail(reason: str) -> None:
        raise RuntimeError("a defect")

    watch_of(config).listener = fail
    assert executor.collective_rpc("reload_weights") == "sent"
    watch_of(config).begin_serving()
    watch_of(config).asked = 0
    assert rank.reload_weights() == "reload_weights"


def test_loading_is_compared_before_and_after(config: Any, rank: Any, tmp_path: Path) -> None:
    """The weights that a link leads to are switched while they are loaded."""
    for name in ("v1", "v2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text(name)
    (tmp_path / "current").symlink_to("v2")
    model = SimpleNamespace(
        model=str(tmp_path / "current"), revision=None, hf_config_path=None, multimodal_config=None,
        trust_remote_code=False, tokenizer=None, tokenizer_revision=None,
    )  # fmt: skip
    config.model_config, config.load_config, config.speculative_config = model, SimpleNamespace(), None

    def load_model() -> str:
        (tmp_path / "current").unlink()
        (tmp_path / "current").symlink_to("v1")
        return "loaded"

    rank.worker.load_model = load_model
    assert rank.load_model() == "loaded"
    loaded = watch_of(config).loaded
    assert loaded is not None
    assert loaded.changed_weights == str(tmp_path / "current")
    assert not loaded.problem
    assert watch_of(config).noticed == 0
    rank.load_model()
    assert watch_of(config).noticed == 1, "the weights are loaded again"
