"""Answers with KVStow are those without it, to the token and to the log probability: one process, one rank.

One engine per size and model serves all cases of it; each begins with empty caches. Each case shows that what
it compares came from host memory: vLLM says how many tokens it did not compute, and the admin API how many blocks were
loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.doubles.fakes import Latch
from tests.vllm.engines import (
    A_BLOCKS,
    A_HIT,
    BLOCK,
    LONGEST,
    NEAR,
    PROMPTS,
    SHORT,
    WHOLE,
    A,
    Answer,
    B,
    C,
    D,
    Engine,
    Reference,
    Setup,
    assert_same,
    distance,
    eventually,
    prompt,
    running,
)

from kvstow.devices import cpu
from kvstow.devices.base import Fence

pytestmark = pytest.mark.vllm


PACE = {"pin_chunk": 128 << 10, "pin_pause": 0.15}
"""A slot in 0.15 s, or two where they are half as large."""
SIZES: dict[str, dict[str, Any]] = {
    "roomy": {},
    "small": {"step_tokens": 128, "gpu_blocks": 80},
    "evicting": {"slots": 40},
    "lazy": {"extra": {"lazy_offload": True}, "gpu_blocks": 72},
    "pinning": {"extra": PACE, "slots": 4096},
    "as vLLM keeps it": {"settings": {}},
    "beside": {},
}


def on(size: str, *models: str) -> pytest.MarkDecorator:
    """Run on a shared engine of this size: with full attention, then with a sliding window in every other layer, of
    which vLLM has to keep every block: by default it keeps those that a repeated prompt needs. Tests of one size stand
    together, so that each engine starts once."""
    models = models or ("full", "hybrid")
    return pytest.mark.parametrize("shared", [(model, size) for model in models], ids=models, indirect=True)


@pytest.fixture(scope="module")
def shared(
    request: pytest.FixtureRequest,
    model: Path,
    hybrid_model: Path,
    reference: Reference,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Engine]:
    layers, size = request.param
    used, settings = (model, {}) if layers == "full" else (hybrid_model, {"prefix_cache_retention_interval": None})
    setup = replace(Setup(used, extra={}, settings=settings), **SIZES[size])
    if size == "beside":
        storage = {"shared_storage_path": str(tmp_path_factory.mktemp("storage"))}
        setup = replace(setup, beside={"kv_connector": "ExampleConnector", "kv_connector_extra_config": storage})
    reference(used)
    with running(setup) as engine:
        yield engine


@pytest.fixture
def no_thread_is_left() -> None:
    """A shared engine may replace its threads; when it ends, `running` sees that none is left."""


@pytest.fixture
def engine(shared: Engine) -> Engine:
    """It has no requests, and its caches are empty."""
    shared.empty()
    return shared


class Gate:
    """Holds the first copy of one direction back until it is opened; others pass it."""

    def __init__(self, patch: pytest.MonkeyPatch, method: str) -> None:
        self.latch = Latch()
        self._has_come = False
        original = getattr(cpu.CpuDevice, method)

        def begin(device: cpu.CpuDevice, op: object, *what: Any) -> object:
            *others, after = what
            if not self._has_come:
                self._has_come = True
                after = _Both(self.latch, after)
            return original(device, op, *others, after)

        patch.setattr(cpu.CpuDevice, method, begin)

    def step_until_reached(self, engine: Engine) -> None:
        def reached() -> bool:
            engine.step()
            return self.latch.wait_queried(timeout=0.01)

        eventually(reached, "a copy at the gate")


class _Both:
    """Two fences in one."""

    def __init__(self, latch: Latch, after: Fence | None) -> None:
        self._latch, self._after = latch, after

    def query(self) -> bool:
        return self._latch.query() and (self._after is None or self._after.query())


@pytest.fixture
def held_loads(shared: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Of loads before the step: what a step computes with cannot be held back on a CPU."""
    monkeypatch.setattr(shared.scheduler_host.side.policy, "_path", "async")
    gate = Gate(monkeypatch, "launch_load")
    yield gate
    gate.latch.open()


@pytest.fixture
def held_stores(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch, "launch_store")
    yield gate
    gate.latch.open()


def check_cold_and_from_the_host(engine: Engine, reference: Reference) -> None:
    expected, loaded = reference(engine.setup.model, A, B), engine.loaded_blocks()
    cold = engine.ask(A)
    assert [answer.cached for answer in cold] == [0]
    assert_same(cold, expected[:1])
    engine.forget_gpu()
    warm = engine.ask(A, tokens=LONGEST)
    assert [answer.cached for answer in warm] == [A_HIT]
    assert engine.loaded_blocks() >= loaded + A_BLOCKS
    assert_same(warm, expected[:1])
    engine.forget_gpu()
    shared = engine.ask(B, tokens=LONGEST)
    assert [answer.cached for answer in shared] == [512]
    assert_same(shared, expected[1:])


@on("roomy")
def test_cold_and_from_the_host(engine: Engine, reference: Reference) -> None:
    check_cold_and_from_the_host(engine, reference)


@on("roomy")
def test_all_of_a_prompt_from_the_host(engine: Engine, reference: Reference) -> None:
    """Only its last token is computed again; where a window counts, its last block."""
    expected = reference(engine.setup.model, WHOLE)
    engine.ask(WHOLE)
    for _ in range(2):
        engine.forget_gpu()
        answers = engine.ask(WHOLE)
        assert_same(answers, expected)
        assert answers[0].cached == (A_HIT - BLOCK if engine.setup.settings else A_HIT)


@on("roomy")
def test_beginning_on_the_gpu_and_the_rest_from_the_host(engine: Engine, reference: Reference) -> None:
    expected = reference(engine.setup.model, A)
    engine.ask(A)
    engine.forget_gpu()
    engine.ask(A[:200], tokens=1)
    engine.settle()
    loaded = engine.loaded_blocks()
    answers = engine.ask(A)
    assert [answer.cached for answer in answers] == [A_HIT]
    assert engine.loaded_blocks() - loaded >= A_BLOCKS - 200 // BLOCK
    assert_same(answers, expected)


@on("roomy")
def test_blocks_of_an_answer_are_kept_too(engine: Engine, reference: Reference) -> None:
    (expected,) = reference(engine.setup.model, A)
    said, to_come = expected.tokens[:100], expected.tokens[100:]
    engine.ask(A, tokens=120)
    engine.forget_gpu()
    (answer,) = engine.ask(A + said, tokens=40)
    assert answer.cached == (len(A) + len(said) - 1) // BLOCK * BLOCK > A_HIT
    assert answer.tokens == to_come[:40]


def answer_after_copies(
    engine: Engine, patch: pytest.MonkeyPatch, copy: Callable[[cpu.Rows, cpu.Rows], None]
) -> Answer:
    """To `A`, whose blocks are loaded by `copy`."""
    engine.ask(A)
    engine.forget_gpu()
    patch.setattr(cpu, "_copy_run", copy)
    (answer,) = engine.ask(A)
    assert answer.cached == A_HIT
    return answer


@on("roomy")
def test_loaded_zeros_are_noticed(engine: Engine, reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: if this passed, equal answers would prove nothing."""

    def copy_zeros(target: cpu.Rows, source: cpu.Rows) -> None:
        target[:] = 0

    expected = reference(engine.setup.model, A)
    answer = answer_after_copies(engine, monkeypatch, copy_zeros)
    assert answer.tokens != expected[0].tokens[: len(answer.tokens)]
    assert distance(answer, expected[0]) > 1000 * NEAR


@on("roomy")
def test_one_wrong_block_is_noticed(engine: Engine, reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the control: not only gross errors show."""

    def copy_all_but_one(target: cpu.Rows, source: cpu.Rows) -> None:
        target[:-1] = source[:-1]
        target[-1] = 0

    expected = reference(engine.setup.model, A)
    answer = answer_after_copies(engine, monkeypatch, copy_all_but_one)
    assert distance(answer, expected[0]) > 10 * NEAR


@on("roomy")
def test_abort_while_blocks_are_loaded(engine: Engine, reference: Reference, held_loads: Gate) -> None:
    """The blocks that a load writes stay out of use until it has written them."""
    expected = reference(engine.setup.model, A, C)
    engine.ask(A)
    engine.forget_gpu()
    doomed = engine.add(A)
    held_loads.step_until_reached(engine)
    engine.abort(doomed)
    engine.step()
    assert engine.free_blocks <= engine.setup.gpu_blocks - 1 - A_BLOCKS
    others = engine.ask(C)
    held_loads.latch.open()
    engine.forget_gpu()
    assert engine.free_blocks == engine.setup.gpu_blocks - 1
    answers = engine.ask(A)
    assert [answer.cached for answer in answers] == [A_HIT]
    assert_same([*answers, *others], expected)


@on("roomy")
def test_abort_while_blocks_are_stored(engine: Engine, reference: Reference, held_stores: Gate) -> None:
    """The blocks that a store reads keep their contents, though others use every block of the GPU meanwhile."""
    expected = reference(engine.setup.model, A, C, D)
    doomed = engine.add(A, LONGEST)
    held_stores.step_until_reached(engine)
    engine.abort(doomed)
    others = [*engine.ask(C), *engine.ask(D)]
    for seed in range(100, 100 + engine.setup.gpu_blocks // A_BLOCKS):
        engine.ask(prompt(602, seed), tokens=1)  # one by one: vLLM waits for the held blocks rather than preempt others
    held_stores.latch.open()
    engine.forget_gpu()
    answers = engine.ask(A)
    assert [answer.cached for answer in answers] == [A_HIT]
    assert_same([*answers, *others], expected)


@on("roomy")
def test_all_prompts_at_once_twice(engine: Engine, reference: Reference) -> None:
    expected, loaded = reference(engine.setup.model, *PROMPTS), engine.loaded_blocks()
    for _ in range(2):
        answers = engine.ask(*PROMPTS, tokens=LONGEST)
        engine.forget_gpu()
        assert_same(answers, expected)
    assert min(answer.cached for answer in answers) > 0
    assert engine.loaded_blocks() > loaded


@on("roomy")
def test_restarted_rank(engine: Engine, reference: Reference) -> None:
    """What a rank had in its pool is lost, and is not served."""
    expected = reference(engine.setup.model, A)
    assert_same(engine.ask(A), expected)
    engine.forget_gpu()
    _restart_rank(engine)
    again = engine.ask(A)
    assert [answer.cached for answer in again] == [0]
    assert_same(again, expected)
    engine.forget_gpu()
    warm = engine.ask(A)
    assert [answer.cached for answer in warm] == [A_HIT]
    assert_same(warm, expected)


@on("roomy")
def test_rank_restarts_while_blocks_are_loaded(engine: Engine, reference: Reference, held_loads: Gate) -> None:
    """The load fails, the request is computed."""
    expected = reference(engine.setup.model, A)
    engine.ask(A)
    engine.forget_gpu()
    name = engine.add(A)
    held_loads.step_until_reached(engine)
    _restart_rank(engine)
    held_loads.latch.open()
    assert_same([engine.run()[name]], expected)
    engine.forget_gpu()
    assert engine.free_blocks == engine.setup.gpu_blocks - 1


def _restart_rank(engine: Engine) -> None:
    """As after sleep mode: the rank gets a new data plane."""
    restarts = engine.stats("faults")["rank_restarts"]
    engine.rank_connector.unregister_kv_caches()
    engine.rank_connector.restore_kv_caches()
    eventually(lambda: engine.stats("faults")["rank_restarts"] > restarts, "the report of the new rank")
    eventually(lambda: engine.stats("pool")["usable_slots"] == engine.stats("pool")["capacity_slots"], "a pinned pool")


@on("small")
def test_cold_in_chunks_and_from_the_host(engine: Engine, reference: Reference) -> None:
    check_cold_and_from_the_host(engine, reference)


@on("small")
def test_preempted_requests(engine: Engine, reference: Reference) -> None:
    expected, loaded = reference(engine.setup.model, *SHORT), engine.loaded_blocks()
    preemptions = engine.counter("vllm:num_preemptions")
    for _ in range(2):
        answers = engine.ask(*SHORT, tokens=LONGEST)
        engine.forget_gpu()
        assert_same(answers, expected)
    assert engine.counter("vllm:num_preemptions") > preemptions
    assert engine.loaded_blocks() > loaded
    assert min(answer.cached for answer in answers) > 0
    eventually(lambda: engine.step() or engine.free_blocks == engine.setup.gpu_blocks - 1, "all blocks free")


@on("small")
def test_aborts_at_any_step(engine: Engine, reference: Reference) -> None:
    expected = reference(engine.setup.model, A, B, C)
    engine.ask(A)
    for steps in range(8):
        engine.forget_gpu()
        doomed = [engine.add(each) for each in (A, B, C)]
        for _ in range(steps):
            engine.step()
        for name in doomed:
            engine.abort(name)
        engine.run()
    engine.forget_gpu()
    assert engine.free_blocks == engine.setup.gpu_blocks - 1
    loaded = engine.loaded_blocks()
    answers = engine.ask(A, B, C)
    assert engine.loaded_blocks() > loaded
    assert_same(answers, expected)


@on("small")
def test_purges_in_the_middle(engine: Engine, reference: Reference) -> None:
    """An operator purges at every step of requests that hit, and miss, and store."""
    prompts = (A, B, C, *SHORT[:4])
    expected, purged = reference(engine.setup.model, *prompts), engine.stats("evictions")["purge"]
    engine.ask(*prompts)
    engine.forget_gpu()
    loaded = engine.loaded_blocks()
    for _ in range(2):
        answers = engine.ask(*prompts, meanwhile=engine.purge)
        assert_same(answers, expected)
        engine.forget_gpu()
        engine.ask(*prompts)
        engine.forget_gpu()
    assert engine.loaded_blocks() > loaded
    assert engine.stats("evictions")["purge"] > purged


@on("evicting")
def test_after_the_pool_had_to_evict(engine: Engine, reference: Reference) -> None:
    expected, loaded = reference(engine.setup.model, A, C, D), engine.loaded_blocks()
    cached = set()
    for _ in range(3):
        answers = [*engine.ask(A), *engine.ask(C), *engine.ask(D)]
        engine.forget_gpu()
        assert_same(answers, expected)
        cached |= {answer.cached for answer in answers}
    assert engine.stats("evictions")["capacity"] > 0
    assert engine.loaded_blocks() > loaded
    assert any(0 < tokens < A_HIT for tokens in cached)


@on("evicting")
def test_purge_while_blocks_are_loaded(engine: Engine, reference: Reference, held_loads: Gate) -> None:
    """Slots that are being read keep their bytes although they are in no index any more."""
    expected = reference(engine.setup.model, A, C)
    engine.ask(A)
    engine.forget_gpu()
    name = engine.add(A)
    held_loads.step_until_reached(engine)
    engine.purge()
    other = engine.add(C)  # its stores want slots
    answers: dict[str, Answer] = {}
    eventually(lambda: answers.update(engine.step()) or other in answers, "an answer beside the load")
    held_loads.latch.open()
    answers |= engine.run()
    both = [answers[name], answers[other]]
    assert both[0].cached == A_HIT
    assert_same(both, expected)


@on("lazy")
def test_lazy_stores(engine: Engine, reference: Reference) -> None:
    """Blocks reach the host when the GPU is about to evict them."""
    expected = reference(engine.setup.model, A, C, D)
    for _ in range(3):
        answers = [*engine.ask(A), *engine.ask(C), *engine.ask(D), *engine.ask(*SHORT)][:3]
        assert_same(answers, expected)
    engine.settle()
    assert max(answer.cached for answer in answers) > 0
    assert engine.loaded_blocks() > 0


@on("pinning")
def test_while_slots_are_still_being_pinned(engine: Engine, reference: Reference) -> None:
    """The first request finds next to none, and is none the slower; later the same request hits."""
    expected = reference(engine.setup.model, A)
    answers = []

    def hits() -> bool:
        answers.extend(engine.ask(A))
        engine.forget_gpu()
        return answers[-1].cached == A_HIT

    eventually(hits, "a hit in host memory")
    assert answers[0].cached == 0
    assert len(answers) > 2
    assert engine.stats("pool")["usable_slots"] < engine.stats("pool")["capacity_slots"]
    assert_same(answers, len(answers) * expected)


@on("as vLLM keeps it", "hybrid")
def test_hybrid_model_as_vllm_keeps_it(engine: Engine, reference: Reference) -> None:
    expected = reference(engine.setup.model, A)
    (cold,) = engine.ask(A)
    engine.forget_gpu()
    (warm,) = engine.ask(A)
    assert (cold.cached, warm.cached) == (0, A_HIT)
    assert A_BLOCKS <= engine.loaded_blocks() < 2 * A_BLOCKS  # of the window only what the next token reads
    assert_same([cold, warm], 2 * expected)


@on("beside", "full")
def test_beside_another_connector(engine: Engine, reference: Reference) -> None:
    """MultiConnector knows its children by name, which vLLM's plugin has told it, and asks for their statistics."""
    expected = reference(engine.setup.model, A)
    engine.ask(A)
    engine.forget_gpu()
    answers = engine.ask(A)
    assert [answer.cached for answer in answers] == [A_HIT]
    assert engine.loaded_blocks() == A_BLOCKS
    assert_same(answers, expected)

    def is_told() -> bool:
        """Statistics come with steps, once a period."""
        engine.ask(A)
        return engine.counter("vllm:kv_offload_load_bytes") > 0

    eventually(is_told, "vLLM's own metric of what was loaded")
