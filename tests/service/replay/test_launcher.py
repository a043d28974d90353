"""The launcher over engines that do what the test says."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.service.replay.fakeengine import run_fake_engine

from kvstow.errors import InsufficientMemoryError, ProcessEndedError
from kvstow_service.replay import launcher
from kvstow_service.replay.launcher import EngineLauncher, EngineSpec
from kvstow_service.replay.result import AttachedResult
from kvstow_service.replay.trace import ReplayOptions, TraceRequest, even_shape

pytestmark = pytest.mark.process

Run = Callable[..., AttachedResult]


def spec(name: str, requests: int = 10) -> EngineSpec:
    """Request `n` has `n` blocks."""
    trace = [TraceRequest(0, 1, 1, tuple(range(100 * number, 101 * number))) for number in range(requests)]
    return EngineSpec(name, Path("/nowhere"), even_shape(4096), 2, 100, 0, trace, ReplayOptions())


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(launcher, "run_engine", run_fake_engine)

    def run_engines(*specs: EngineSpec, stop: threading.Event | None = None, **given: object) -> AttachedResult:
        return EngineLauncher(specs, **given).run(stop or threading.Event())  # type: ignore[arg-type]

    return run_engines


def test_figures_are_those_of_each_engine_and_of_all(run: Run) -> None:
    counts: list[int] = []
    found = run(spec("replay-1"), spec("replay-2", requests=5), on_request=counts.append).to_json()
    assert counts[-1] == 15
    assert (found["requests"], found["blocks"], found["sessions"], found["restarts"]) == (15, 45 + 10, 2, 0)
    assert [(one["engine"], one["requests"], one["blocks"]) for one in found["engines"]] == [
        ("replay-1", 10, 45),
        ("replay-2", 5, 10),
    ]
    assert (found["ranks"], found["slots"]) == (2, 100)


def test_an_engine_that_dies_goes_on_with_what_it_had_not_finished(run: Run) -> None:
    lines: list[str] = []
    found = run(spec("dies with 1 and 3 in flight"), log=lines.append)
    first, second = found.engines[0].lives
    assert (first.result.requests, first.end) == (3, "signal SIGKILL")
    assert (second.result.requests, second.end) == (7, "finished")  # 1, 3 and 5 to 9
    assert second.result.blocks == 1 + 3 + sum(range(5, 10))
    assert found.total.requests == 10
    assert found.to_json()["restarts"] == 1
    assert lines == ["dies with 1 and 3 in flight ended (signal SIGKILL); it is started again with 7 requests to go"]


def test_an_engine_that_dies_again_and_again_ends_the_replay(run: Run) -> None:
    with pytest.raises(ProcessEndedError, match="dies at once ended 3 times in a row at once: exit status 3"):
        run(spec("dies at once"))


def test_an_engine_that_cannot_work_says_why(run: Run) -> None:
    with pytest.raises(InsufficientMemoryError, match="1 TiB of KV cache do not fit"):
        run(spec("waits to be finished"), spec("cannot work"))


def test_a_stop_finishes_the_engines(run: Run) -> None:
    stop = threading.Event()
    stop.set()
    found = run(spec("waits to be finished"), stop=stop)
    assert (found.total.requests, found.engines[0].lives[0].end) == (0, "finished")


def test_each_process_of_an_engine_is_held_until_it_may_begin(run: Run) -> None:
    asked: list[int] = []

    def may_begin(pid: int) -> bool:
        asked.append(pid)
        return asked.count(pid) == 3

    found = run(spec("dies with 1 and 3 in flight"), may_begin=may_begin)
    first, second = dict.fromkeys(asked)
    assert asked == [first] * 3 + [second] * 3
    assert [life.result.requests for life in found.engines[0].lives] == [3, 7]


def test_what_an_engine_writes_goes_to_the_log_of_the_children(run: Run, tmp_path: Path) -> None:
    with pytest.raises(ProcessEndedError):
        run(spec("dies at once"), children_log=tmp_path / "log")
    assert (tmp_path / "log").read_text() == "dying\n" * 3
