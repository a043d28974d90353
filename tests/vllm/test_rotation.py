"""Two engines on one pool under verified load, while each of them and the service are killed in rotation: every answer
is that of vLLM alone, and no request fails but those of the engine that was killed. `make soak` does it for 8
minutes."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from tests.vllm.engineprocess import EngineProcess
from tests.vllm.engines import LONGEST, PROMPTS, Answer, Prompt, Reference, assert_same, eventually
from tests.vllm.nodeservice import NodeService, is_attached

pytestmark = pytest.mark.vllm

RECOVERY_SECONDS = 300.0
"""A deadline: an engine starts in 10 seconds on a quiet machine."""
ROUNDS_BETWEEN = 2
"""Of each engine, from one kill to the next."""


class LoadedEngine:
    """An engine in a process of its own that is asked for random prompts without a pause, and restarted by its thread
    whenever it was killed. `problem`: the first answer that differs, or the first request that failed otherwise."""

    def __init__(
        self, name: str, model: Path, service: NodeService, folder: Path, expected: dict[Prompt, Answer]
    ) -> None:
        self.name = name
        self.rounds = self.kills = self.hits = 0
        self.problem: BaseException | None = None
        self._model, self._service, self._log, self._expected = model, service, folder / name, expected
        self._random = random.Random(name)
        self._lock = threading.Lock()
        self._is_killed = self._is_stopping = False
        self._process = self._start()
        self._thread = threading.Thread(target=self._run, name=name)
        self._thread.start()

    def kill(self) -> None:
        with self._lock:
            self._is_killed = True
            self._process.kill()
            self.kills += 1

    def stop(self) -> None:
        self._is_stopping = True
        self._thread.join(RECOVERY_SECONDS)
        self._process.close()
        self._process.kill()

    def has_made(self, rounds: int) -> bool:
        """Whether it has; raises its problem if it has one."""
        if self.problem is not None:
            raise self.problem
        return self.rounds >= rounds

    def _start(self) -> EngineProcess:
        return EngineProcess(self._model, self._service.attach, self._log)

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._round()
        except BaseException as error:  # noqa: BLE001 - the test raises it
            self.problem = error

    def _round(self) -> None:
        prompts = self._random.sample(PROMPTS, 3)
        try:
            answers = self._process.ask(*prompts, tokens=self._random.choice((1, 24, LONGEST)))
            self._process.forget_gpu()
        except (AssertionError, OSError, ValueError):  # no answer, no pipe, half of an answer
            with self._lock:
                if not self._is_killed:
                    raise
                self._process = self._start()
                self._is_killed = False
            return
        assert_same(answers, [self._expected[prompt] for prompt in prompts])
        self.hits += sum(answer.cached for answer in answers)
        self.rounds += 1


@contextmanager
def loaded_engines(
    model: Path, service: NodeService, folder: Path, expected: dict[Prompt, Answer]
) -> Iterator[list[LoadedEngine]]:
    with ExitStack() as stack:
        engines = list[LoadedEngine]()
        for name in ("engine-a", "engine-b"):
            engines.append(LoadedEngine(name, model, service, folder, expected))
            stack.callback(engines[-1].stop)
        yield engines


@pytest.mark.parametrize("seconds", [0.0, pytest.param(480.0, marks=pytest.mark.soak)], ids=["once", "soak"])
def test_no_answer_differs_and_no_other_request_fails(
    seconds: float, model: Path, reference: Reference, tmp_path: Path
) -> None:
    expected = dict(zip(PROMPTS, reference(model, *PROMPTS), strict=True))
    service = NodeService(tmp_path, "64MiB", "--state", str(tmp_path / "state"))
    service.start()
    try:
        with loaded_engines(model, service, tmp_path, expected) as engines:
            recovered(engines, service)
            deadline = time.monotonic() + seconds
            while True:
                for engine in engines:
                    engine.kill()
                    recovered(engines, service)
                service.kill()
                service.start()
                recovered(engines, service)
                if time.monotonic() >= deadline:
                    break
        assert [engine.problem for engine in engines] == [None, None]
        assert all(engine.kills and engine.hits for engine in engines)
        eventually(lambda: not service.sessions(), "the end of both sessions")
        (pool,) = service.pools()
        assert (pool["slots"]["leased"], pool["slots"]["filling"], pool["slots"]["quarantined"]) == (0, 0, 0)
    finally:
        service.stop()


def recovered(engines: list[LoadedEngine], service: NodeService) -> None:
    """Both engines are attached, and have answered."""
    eventually(lambda: alive(engines) and is_attached(service, 2), "two attached engines", RECOVERY_SECONDS)
    wanted = [engine.rounds + ROUNDS_BETWEEN for engine in engines]
    for engine, rounds in zip(engines, wanted, strict=True):
        eventually(lambda: engine.has_made(rounds), f"{rounds} rounds of {engine.name}", RECOVERY_SECONDS)  # noqa: B023


def alive(engines: list[LoadedEngine]) -> bool:
    return all(engine.has_made(0) for engine in engines)
