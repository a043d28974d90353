"""vLLM's scheduler and KVStowConnector under random traffic: no wrong byte is read, nothing leaks, every
request is answered. What is real and what is not: see `harness`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pkgutil import resolve_name
from typing import Any

import pytest
from tests.vllm.harness.host import SHARED
from tests.vllm.harness.run import run
from tests.vllm.harness.setup import Layers, Setup

pytestmark = pytest.mark.vllm

HYBRID_BLOCKS = 72
WINDOW_BLOCKS = 26  # few: what has left the window is given back

SETUPS = [
    Setup("sync"),
    Setup("sync, two ranks, operator and failures", ranks=2, operator_rate=0.04, failure_rate=0.1),
    Setup("sync, lazy, operator", lazy=True, operator_rate=0.04, slots=64),
    Setup("sync, drafts, bad memory", drafts=2, bad_slots=8, ranks=2),
    Setup("sync, many failures", failure_rate=0.2),
    Setup("sync, stores in small portions, operator", step_blocks=2, operator_rate=0.04, failure_rate=0.1, seed=2),
    Setup("async", asynchronous=True),
    Setup("async, two ranks, operator and failures", asynchronous=True, ranks=2, operator_rate=0.04, failure_rate=0.1),
    Setup("async, lazy, two ranks, slow copies", asynchronous=True, lazy=True, ranks=2, delay=(6, 30)),
    Setup("async, drafts, many failures", asynchronous=True, drafts=2, failure_rate=0.2, blocks=44),
    Setup("repeats, sync, drafts, failures", repeat_rate=0.5, drafts=2, failure_rate=0.1),
    Setup("repeats, async, two ranks, operator", asynchronous=True, repeat_rate=0.5, ranks=2, operator_rate=0.04),
    Setup("repeats, async, lazy", asynchronous=True, repeat_rate=0.5, lazy=True),
    Setup("fans, sync, failures", fan_rate=0.4, failure_rate=0.1, delay=(6, 30)),
    Setup("fans, async, two ranks, operator", asynchronous=True, fan_rate=0.4, ranks=2, operator_rate=0.04, seed=2),
    Setup("fans, async, lazy", asynchronous=True, fan_rate=0.4, lazy=True),
    Setup("fans, hybrid, async", layers="hybrid", asynchronous=True, fan_rate=0.4, blocks=HYBRID_BLOCKS),
    Setup(
        "fans, attached, async, sessions that end", attached=True, asynchronous=True, fan_rate=0.4, operator_rate=0.04
    ),
    Setup("window, two ranks, failures", layers="window", ranks=2, blocks=WINDOW_BLOCKS, failure_rate=0.2),
    Setup(
        "window, async, bad memory", layers="window", asynchronous=True, blocks=WINDOW_BLOCKS, bad_slots=8, requests=180
    ),
    Setup("hybrid, sync", layers="hybrid", blocks=HYBRID_BLOCKS, layout="BLHNC"),
    Setup("hybrid, sync, many failures", layers="hybrid", blocks=HYBRID_BLOCKS, failure_rate=0.2),
    Setup("hybrid, sync, lazy, failures", layers="hybrid", blocks=HYBRID_BLOCKS, lazy=True, failure_rate=0.1),
    Setup(
        "hybrid, async, two ranks, operator",
        layers="hybrid",
        asynchronous=True,
        ranks=2,
        blocks=HYBRID_BLOCKS,
        operator_rate=0.04,
        seed=5,
    ),
    Setup("hybrid, async, lazy, drafts", layers="hybrid", asynchronous=True, blocks=HYBRID_BLOCKS, lazy=True, drafts=2),
    Setup(
        "hybrid, async, stores in small portions",
        layers="hybrid",
        asynchronous=True,
        blocks=HYBRID_BLOCKS,
        step_blocks=4,
        failure_rate=0.1,
    ),
    Setup("mixed blocks, sync, bad memory", layers="mixed", blocks=HYBRID_BLOCKS, ranks=2, bad_slots=8),
    Setup("mixed blocks, async, operator", layers="mixed", asynchronous=True, blocks=HYBRID_BLOCKS, operator_rate=0.04),
    Setup("mixed blocks, async, lazy", layers="mixed", asynchronous=True, blocks=HYBRID_BLOCKS, lazy=True),
    Setup("replayed window", layers="replayed", blocks=HYBRID_BLOCKS, ranks=2, failure_rate=0.1),
    Setup("replayed window, async, drafts", layers="replayed", asynchronous=True, blocks=HYBRID_BLOCKS, drafts=2),
    Setup("replayed window, async, lazy", layers="replayed", asynchronous=True, blocks=HYBRID_BLOCKS, lazy=True),
    Setup("attached, sync", attached=True),
    Setup("attached, sync, sessions that end", attached=True, ranks=2, operator_rate=0.04, failure_rate=0.1, seed=2),
    Setup("attached, async, sessions that end", attached=True, asynchronous=True, ranks=2, operator_rate=0.06, seed=3),
    Setup("attached, async, lazy, sessions that end", attached=True, asynchronous=True, lazy=True, operator_rate=0.04),
    Setup(
        "attached, hybrid, async, sessions that end",
        attached=True,
        layers="hybrid",
        asynchronous=True,
        blocks=HYBRID_BLOCKS,
        operator_rate=0.04,
    ),
    *(
        Setup(
            f"by layer, {layers}, {'async' if is_async else 'sync'}, services that die",
            attached=True,
            by_layer=True,
            layers=layers,  # type: ignore[arg-type]
            asynchronous=is_async,
            ranks=ranks,
            blocks=blocks,
            answers=(0, 0, 1),
            operator_rate=0.06,
            operations=("lose_service", "lose_session"),
            seed=seed,
        )
        for layers, blocks in (("full", 60), ("hybrid", 80))
        for is_async, ranks, seed in ((False, 2, 1), (True, 1, 2))
    ),
    Setup(
        "by layer, ranks that refuse",
        attached=True,
        by_layer=True,
        ranks=2,
        blocks=60,
        answers=(0, 0, 1),
        operator_rate=0.06,
        operations=("lose_service",),
        refusal_rate=0.9,
    ),
    Setup("two stages", ranks=2, stages=True),
    Setup("weights that change", operator_rate=0.02, operations=("change_weights",)),
    *(
        Setup(
            f"weights that change under loads, {where}, {'by layer' if by_layer else 'before the step'}"
            f"{', async' if is_async else ''}",
            attached=where == "attached",
            by_layer=by_layer,
            asynchronous=is_async,
            ranks=ranks,
            blocks=60,
            answers=(0, 0, 1),
            operator_rate=0.05,
            operations=("notice_change", "replace_weights", *(("lose_service",) if where == "attached" else ())),
        )
        for where in ("embedded", "attached")
        for by_layer, is_async, ranks in ((False, True, 1), (True, False, 2), (True, True, 1))
    ),
]


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    yield
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("kvstow")] == []


@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: setup.name)
def test_no_wrong_byte_is_read_and_nothing_leaks(setup: Setup) -> None:
    report = run(setup)
    assert report.problems == []
    assert report.finished + report.aborted == setup.requests
    assert report.token_reads > 200_000
    changes = "replace_weights" in setup.operations  # then much is aborted, and little is found
    assert report.loaded_blocks > (0 if changes else 15), "too few loads to prove anything"
    assert report.whole_hits > 0 or not setup.repeat_rate
    assert report.replays > 15 or setup.layers != "replayed"
    assert report.waits > 5 or not setup.fan_rate
    assert report.preemptions > 0
    assert report.aborted_loads > 0 or setup.by_layer or changes
    assert report.layered + report.taken_back > (0 if changes else 5) or not setup.by_layer
    assert report.deaths > 5 or not setup.by_layer or changes
    assert report.taken_back > 2 or not setup.refusal_rate
    assert report.failed_loads > 0 or not (setup.failure_rate or setup.bad_slots)
    assert report.resets > 2 or "change_weights" not in setup.operations
    assert report.operations["replace_weights"] + report.operations["notice_change"] > 3 or not changes
    loses = setup.attached and setup.operator_rate and not setup.by_layer and not changes
    assert report.operations["lose_session"] > 2 or not loses


class Breaking:
    """A method that raises for good from its tenth call on."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method, self._calls = method, 0

    @property
    def has_broken(self) -> bool:
        return self._calls >= 10

    def call(self, *args: Any, **kwargs: Any) -> Any:
        self._calls += 1
        if self.has_broken:
            raise MemoryError("injected")
        return self._method(*args, **kwargs)


@pytest.mark.parametrize("layers", ["full", "hybrid"])
@pytest.mark.parametrize(
    "broken",
    [
        "loads.Loads.hold_hit",
        "loads.Loads.count_hit",
        "loads.Loads._begin_load",
        "stores.EagerStores.offer_due",
        "stores.EagerStores.offer_last",
        "schedulerside.SchedulerSide.settle",
        "stores.Stores.retry_room",
        "stores.EagerStores._follow_tables",
    ],
)
def test_an_engine_whose_connector_fails_continues_to_serve(
    broken: str, layers: Layers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's hooks do not raise, every promised load ends, and nothing wrong is read."""
    name = f"{SHARED}.{broken}"
    breaking = Breaking(resolve_name(name))
    monkeypatch.setattr(name, lambda *args, **kwargs: breaking.call(*args, **kwargs))
    blocks = HYBRID_BLOCKS if layers == "hybrid" else 50
    report = run(Setup("broken", layers=layers, asynchronous=True, blocks=blocks, requests=60), monkeypatch)
    below = (
        "leases leaked",
        "transfers left",
        "slots leaked",
        "GPU blocks leaked",
    )  # these need hooks
    assert [problem for problem in report.problems if not problem.startswith(below)] == []
    assert report.finished + report.aborted == 60
    assert breaking.has_broken


def test_the_same_seed_gives_the_same_run() -> None:
    setup = Setup("twice", asynchronous=True, ranks=2, operator_rate=0.04, failure_rate=0.1, requests=60)
    assert run(setup) == run(setup)
    assert run(setup) != run(replace(setup, seed=2))
    breaking = replace(setup, operator_rate=0.2, operations=("restart_rank", "kill_copy_thread"))
    first = run(breaking)
    assert first.operations.total() > 10
    assert all(run(breaking) == first for _ in range(3))
