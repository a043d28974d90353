"""The service goes at the worst moment for an attached vLLM: no engine ends, and no answer differs."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.vllm.engines import (
    A_HIT,
    LONGEST,
    PROMPTS,
    A,
    Answer,
    B,
    C,
    Engine,
    Prompt,
    Reference,
    Setup,
    assert_same,
    eventually,
    running,
)
from tests.vllm.engines import SECONDS as ENGINE_SECONDS
from tests.vllm.nodeservice import NodeService, is_attached, until_attached

from kvstow.attach.worker import LONGEST_GRACE_SECONDS, AttachedWorker
from kvstow_service.connectors.engine_core.controlplane import AttachedControl

pytestmark = pytest.mark.vllm

SECONDS = 2.5
"""How long a step takes on the device."""


class Bench:
    """An attached engine that has stored prompts, has forgotten them on the GPU, and has a request that decodes. The
    rank's worker has a clock that the test sets."""

    def __init__(self, engine: Engine, service: NodeService, patch: pytest.MonkeyPatch) -> None:
        self.engine, self.service, self._patch = engine, service, patch
        until_attached(engine, service)
        self.worker: AttachedWorker = engine.rank_host.side.plane
        self._late, self._turns = 0.0, 0
        patch.setattr(self.worker, "_clock", lambda: time.monotonic() + self._late)
        settle: Callable[[], float] = self.worker._settle

        def turn() -> float:
            self._turns += 1
            return settle()

        patch.setattr(self.worker, "_settle", turn)

    def prepare(self, *prompts: Prompt) -> None:
        self.engine.ask(*prompts, tokens=1)
        self.engine.forget_gpu()
        self.running = self.engine.add(C, LONGEST)
        for _ in range(4):
            self.engine.step()

    def lose(self, how: str, seconds: float) -> None:
        """The session ends, and the rank has noticed it and has had `seconds` to act on that."""
        if how == "detach":
            (session,) = self.service.sessions()
            self.service.detach(session["id"])
        else:
            {"kill": self.service.kill, "stop": self.service.stop}[how]()
        eventually(lambda: self.worker._joined.is_over, "a rank that notices the end of the session")
        self._late, turns = self._late + seconds, self._turns
        for number in (1, 2):
            self.worker._wake.set()
            eventually(partial(self._has_turned, turns + number), "a turn of the rank's worker")

    def _has_turned(self, turns: int) -> bool:
        return self._turns >= turns

    def ask(self, *prompts: Prompt, tokens: int = 24) -> list[Any]:
        """Their answers, and then that of the request that was running."""
        names = [*(self.engine.add(each, tokens) for each in prompts), self.running]
        answers = self.engine.run()
        return [answers[name] for name in names]

    def once_planned(self, then: Callable[[], object]) -> list[int]:
        """Call `then` when vLLM has planned a step that computes with a load by layer, before the rank gets it. Returns
        a list that has its blocks from then on."""
        connector, blocks = self.engine.connector, list[int]()
        build = connector.build_connector_meta

        def build_meta(output: Any) -> Any:
            metadata = build(output)
            if metadata.plan is not None and metadata.plan.layered.ops and not blocks:
                blocks.extend(block for op in metadata.plan.layered.ops for block in op.blocks)
                then()
            return metadata

        self._patch.setattr(connector, "build_connector_meta", build_meta)
        return blocks

    def once_asked(self, then: Callable[[], object]) -> None:
        """Call `then` in the step after whose planning the answer with the slots of a load by layer arrives: the host
        has launched the step and its ranks have reported it, and it has not ended on the device."""
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        begin, wait, sample = AttachedControl.begin_load, AttachedControl.wait_for_slots, GPUModelRunner.sample_tokens
        asked, is_over = list[Any](), list[bool]()

        def begin_load(control: AttachedControl, *arguments: Any, **options: Any) -> Any:
            asked.append(begin(control, *arguments, **options))
            return asked[-1]

        def wait_for_slots(control: AttachedControl, answer: Any) -> bool:
            return bool(is_over) and wait(control, answer)

        def sample_tokens(*arguments: Any, **options: Any) -> Any:
            if asked and not is_over:
                fd = self.engine.scheduler_host.side.control.fileno()
                eventually(lambda: asked[0].done or unread(fd), "the answer with the slots")
                then()
                is_over.append(True)
            return sample(*arguments, **options)

        self._patch.setattr(AttachedControl, "begin_load", begin_load)
        self._patch.setattr(AttachedControl, "wait_for_slots", wait_for_slots)
        self._patch.setattr(GPUModelRunner, "sample_tokens", sample_tokens)


def unread(fd: int) -> bytes:
    """What has arrived on a socket and was not read."""
    with socket.socket(fileno=os.dup(fd)) as peek:
        try:
            return peek.recv(1 << 20, socket.MSG_PEEK)
        except BlockingIOError:
            return b""


@contextmanager
def bench(model: Path, service: NodeService, patch: pytest.MonkeyPatch, **options: Any) -> Iterator[Bench]:
    extra = {"attach": service.attach, **options.pop("extra", {})}
    with running(Setup(model, extra, **{"gpu_blocks": 160, **options})) as engine:
        yield Bench(engine, service, patch)


WAYS = pytest.mark.parametrize("how", ["kill", "stop", "detach"])


@WAYS
def test_a_service_that_goes_behind_its_answer_while_a_step_takes_long(
    how: str, model: Path, reference: Reference, service: NodeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load is not promised any more, although its slots are known, and the request is computed."""
    expected = reference(model, A, C)
    with bench(model, service, monkeypatch) as made:
        made.prepare(A)
        made.once_asked(lambda: made.lose(how, SECONDS))
        answers = made.ask(A)
        assert_same(answers, expected)
        assert answers[0].cached == 0


@WAYS
@pytest.mark.parametrize("groups", ["one", "several"])
def test_a_service_that_goes_after_a_load_by_layer_was_promised(
    how: str,
    groups: str,
    model: Path,
    hybrid_model: Path,
    reference: Reference,
    service: NodeService,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rank holds its gate until the step has come, with several groups however long that takes."""
    used, seconds = (model, SECONDS) if groups == "one" else (hybrid_model, 100 * LONGEST_GRACE_SECONDS)
    settings = {} if groups == "one" else {"prefix_cache_retention_interval": None}
    expected = reference(used, A, C)
    with bench(used, service, monkeypatch, settings=settings) as made:
        made.prepare(A)
        blocks = made.once_planned(lambda: made.lose(how, seconds))
        answers = made.ask(A)
        assert blocks, "no load went by layer"
        assert_same(answers, expected)
        assert answers[0].cached == A_HIT


def test_what_a_rank_refuses_in_the_end_is_computed_by_each_request_that_has_it(
    model: Path, reference: Reference, service: NodeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host was stuck for longer than a rank waits. In the same step, another request finds on the GPU what was to
    be loaded. Computing it again takes several steps, before which a third request asks for it."""
    expected = reference(model, A, B, C)
    with bench(model, service, monkeypatch, step_tokens=128, extra={"load_path": "layer"}) as made:
        made.prepare(A)
        blocks = made.once_planned(lambda: made.lose("kill", 2 * LONGEST_GRACE_SECONDS))
        first, second = made.engine.add(A, 24), made.engine.add(B, 24)
        answers = dict[str, Any]()
        while not blocks:
            answers |= made.engine.step()
        pool = made.engine.scheduler.kv_cache_manager.block_pool
        assert all(pool.blocks[block].block_hash is None for block in blocks), "nobody finds them"
        third = made.engine.add(A, 24)
        answers |= made.engine.run()
        assert_same([answers[name] for name in (first, third, second, made.running)], [expected[0], *expected])


class Losses:
    """Has the service go at random moments, in every way, and come back. `problem`: what has gone wrong here."""

    def __init__(self, service: NodeService, seed: str) -> None:
        self.counts = Counter[str]()
        self.problem: BaseException | None = None
        self._service, self._random = service, random.Random(seed)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)  # the process of a test that fails can end
        self._thread.start()

    @property
    def are_all(self) -> bool:
        return set(self.counts) == {"kill", "stop", "detach"}

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        ways = ["kill", "stop", "detach"]
        try:
            while not self._stopping.is_set():
                eventually(lambda: self._stopping.is_set() or is_attached(self._service), "an attached engine")
                if self._stopping.wait(self._random.uniform(0.0, 4.0)):
                    return
                if not ways:
                    ways = self._random.choices(["kill", "stop", "detach"], (4, 1, 1))
                self._lose(ways.pop())
        except BaseException as error:  # noqa: BLE001 - the test raises it
            self.problem = error

    def _lose(self, how: str) -> None:
        if how == "detach":
            for session in self._service.sessions():
                self._service.detach(session["id"])
        else:
            {"kill": self._service.kill, "stop": self._service.stop}[how]()
            self._stopping.wait(self._random.uniform(0.0, 1.0))
            self._service.start()
        self.counts[how] += 1


class SlowDevice:
    """Some steps of vLLM take long after their ranks have reported them."""

    def __init__(self, seed: str, patch: pytest.MonkeyPatch) -> None:
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        self.steps = 0
        source, sample = random.Random(seed), GPUModelRunner.sample_tokens

        def sample_late(*arguments: Any, **options: Any) -> Any:
            if source.random() < 0.03:
                self.steps += 1
                threading.Event().wait(source.choice((0.05, 0.3, 1.5)))
            return sample(*arguments, **options)

        patch.setattr(GPUModelRunner, "sample_tokens", sample_late)


@pytest.mark.parametrize("seconds", [0.0, pytest.param(1200.0, marks=pytest.mark.soak)], ids=["once", "soak"])
@pytest.mark.parametrize("kind", ["one", "one and its memory is kept", "several"])
def test_random_requests_while_the_service_goes_and_comes_back(
    seconds: float,
    kind: str,
    model: Path,
    hybrid_model: Path,
    reference: Reference,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a device that is slow at random. `make soak` does it for 20 minutes."""
    used = hybrid_model if kind == "several" else model
    expected = dict(zip(PROMPTS, reference(used, *PROMPTS), strict=True))
    settings = {"prefix_cache_retention_interval": None} if kind == "several" else {}
    state = ["--state", str(tmp_path / "state")] if "kept" in kind else []
    source, answers, cached = random.Random(kind), 0, 0
    service = NodeService(tmp_path, "64MiB", *state)
    service.start()
    try:
        extra = {"attach": service.attach} | ({"load_path": "layer"} if source.random() < 0.5 else {})
        with running(Setup(used, extra, gpu_blocks=128, step_tokens=256, settings=settings)) as engine:
            until_attached(engine, service)
            device, losses = SlowDevice(kind, monkeypatch), Losses(service, kind)
            try:
                deadline = time.monotonic() + seconds
                while time.monotonic() < deadline or (not (losses.are_all and answers > 20) and not losses.problem):
                    prompts = source.sample(PROMPTS, source.randint(1, 4))
                    given: list[Answer] = engine.ask(*prompts, tokens=source.choice((1, 8, 24)))
                    assert_same(given, [expected[each] for each in prompts])
                    answers, cached = answers + len(given), cached + sum(answer.cached for answer in given)
                    if source.random() < 0.7:
                        engine.forget_gpu()
                    signal.alarm(ENGINE_SECONDS)
            finally:
                losses.stop()
            assert losses.problem is None
            control, policy = engine.scheduler_host.side.control, engine.scheduler_host.side.policy
            ways = {choice.label: count for choice, count in policy.counts.items()}
            moved, sessions = dict(control.moved_blocks), control.num_sessions
            print(f"{kind}: {dict(losses.counts)}, {answers} answers, {cached} tokens cached, {ways}, {moved} blocks")
            print(f"{sessions} sessions, {device.steps} slow steps")
            assert cached > 0
    finally:
        service.stop()


def test_the_table_of_hooks_lists_all_that_the_connector_has() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    from kvstow_service.connectors.vllm import KVStowConnector

    ours = [kind for kind in KVStowConnector.__mro__ if kind.__module__.startswith("kvstow_service")]
    theirs = {*dir(base.KVConnectorBase_V1), *dir(base.SupportsHMA)}
    hooks = {name for kind in ours for name in vars(kind) if name in theirs and not name.startswith("_")}
    page = (Path(__file__).parents[2] / "docs" / "vllm.md").read_text()
    table = page.partition("| hook | the session has ended |")[2].partition("\n\n")[0]
    listed = [name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(listed) == sorted(hooks)
