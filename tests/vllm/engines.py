"""Real engines for tests: vLLM on the CPU with a tiny model, with KVStow or without, and what they answer.

vLLM is imported when an engine is made, so that tests are collected without it.
"""

from __future__ import annotations

import contextlib
import gc
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import httpx
import pytest
from tests.service.connectors.engine_core.connectorhosts import rank_host_of, scheduler_host_of
from tests.vllm.models import IMAGE_SIZE, VOCABULARY

from kvstow_service.connectors.engine_core import vllmprocess

BLOCK = 32
"""Tokens; the CPU backend allows multiples of 32."""
SLOT_BYTES = 4 * BLOCK * 2 * (64 + 64) * 4
"""Of all ranks together: layers, tokens, KV heads, K and V, fp32. A hybrid model's is half of it: its blocks belong to
one of two groups, of two layers each."""
NEAR = 2e-4
"""The largest difference of two log probabilities that is rounding: sums in fp32 depend on how a prompt is cut."""
SECONDS = 600
"""After that an engine is stuck, however busy the machine is: on a quiet one no test takes a tenth of it."""


class Answer(NamedTuple):
    """`logprobs[i]` are those of the five likeliest tokens at position `i`; `cached`: prompt tokens not computed;
    `transfer`: what a connector tells the client, for another engine."""

    tokens: tuple[int, ...]
    logprobs: tuple[Mapping[int, float], ...]
    cached: int
    transfer: Mapping[str, Any] | None = None


class Adapter(NamedTuple):
    """A LoRA adapter as a request names it. `reload`: its files are read again, even if it was loaded before."""

    name: str
    number: int
    path: str
    reload: bool = False


Prompt = tuple[int, ...]


def prompt(length: int, seed: int, prefix: Prompt = ()) -> Prompt:
    """Random tokens after `prefix`, `length` in all."""
    source = random.Random(seed)
    return prefix + tuple(source.randrange(3, VOCABULARY) for _ in range(length - len(prefix)))


A = prompt(602, seed=1)
"""The prompt that most tests ask for: 18 full blocks, and 26 tokens that no hit covers."""
B = prompt(602, seed=2, prefix=A[:512])
C, D = prompt(602, seed=3), prompt(602, seed=4)
SHORT = tuple(prompt(300 + 7 * number, seed=10 + number, prefix=(A, C)[number % 2][:160]) for number in range(8))
LONGEST = 160
"""Tokens of an answer; more than one block, so that blocks of answers are stored and loaded too."""
A_BLOCKS = 18
A_HIT = A_BLOCKS * BLOCK
WHOLE = A[:A_HIT]
PROMPTS = (A, B, C, D, WHOLE, *SHORT)


@dataclass(frozen=True)
class Setup:
    """An engine to make. `extra`: the connector's settings; None: without connector. `beside`, `before`: another
    connector, that MultiConnector asks after KVStow's, or before it."""

    model: Path
    extra: Mapping[str, Any] | None = None
    slots: int = 256
    gpu_blocks: int = 160
    tp: int = 1
    processes: bool = False
    step_tokens: int = 1024
    beside: Mapping[str, Any] | None = None
    before: Mapping[str, Any] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def pool_bytes(self) -> int:
        return self.slots * SLOT_BYTES

    @property
    def is_attached(self) -> bool:
        return self.extra is not None and "attach" in self.extra


class Engine:
    """A running vLLM; `admin` talks to its admin server."""

    def __init__(self, llm: Any, setup: Setup, admin: httpx.Client | None) -> None:
        self.llm, self.setup = llm, setup
        self._admin = admin
        self._requests = 0

    @property
    def admin(self) -> httpx.Client:
        assert self._admin is not None, "this engine has no connector"
        return self._admin

    @property
    def connector(self) -> Any:
        """The scheduler's half; in this process only."""
        return self._core.scheduler.connector

    @property
    def rank_connector(self) -> Any:
        """The worker's half; in this process only."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()

    @property
    def scheduler_host(self) -> Any:
        """What the scheduler's half hosts; in this process only."""
        return scheduler_host_of(self.connector)

    @property
    def rank_host(self) -> Any:
        """What the worker's half hosts; in this process only."""
        return rank_host_of(self.rank_connector)

    @property
    def scheduler(self) -> Any:
        """In this process only."""
        return self._core.scheduler

    @property
    def free_blocks(self) -> int:
        return int(self._core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    @property
    def _core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    def add(
        self,
        tokens: Prompt,
        answer_tokens: int = 24,
        adapter: Adapter | None = None,
        image: int | None = None,
        salt: str | None = None,
        session: str | None = None,
        hints: Mapping[str, Any] | None = None,
        transfer: Mapping[str, Any] | None = None,
    ) -> str:
        """`image`: the seed of an image before the prompt. `transfer`: for connectors."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import RequestOutputKind

        self._requests += 1
        name = f"request-{self._requests}"
        told = dict(transfer or {}) | ({} if hints is None else {"kvstow": dict(hints)})
        params = SamplingParams(
            temperature=0,
            max_tokens=answer_tokens,
            logprobs=5,
            detokenize=False,
            ignore_eos=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={"kv_transfer_params": told} if told else None,
        )
        lora = None if adapter is None else LoRARequest(*adapter[:3], load_inplace=adapter.reload)
        asked: dict[str, Any] = {"prompt_token_ids": list(tokens)}
        if image is not None:
            asked["multi_modal_data"] = {"image": _image(image)}
        if salt is not None:
            asked["cache_salt"] = salt
        named = {} if session is None else {"session_id": session}  # since vLLM 0.28
        self.llm.llm_engine.add_request(name, asked, params, lora_request=lora, **named)
        return name

    def step(self) -> dict[str, Answer]:
        """One step; the answers that it finished."""
        outputs = self.llm.llm_engine.step()
        return {output.request_id: _answer(output) for output in outputs if output.finished}

    def run(self, meanwhile: Callable[[], object] = lambda: None) -> dict[str, Answer]:
        """Step until every request has its answer."""
        answers: dict[str, Answer] = {}
        while self.llm.llm_engine.has_unfinished_requests():
            answers |= self.step()
            meanwhile()
        return answers

    def ask(
        self,
        *prompts: Prompt,
        tokens: int = 24,
        meanwhile: Callable[[], object] = lambda: None,
        **how: Any,
    ) -> list[Answer]:
        """Answers of requests that run at once. `how`: see `add`."""
        names = [self.add(each, tokens, **how) for each in prompts]
        answers = self.run(meanwhile)
        return [answers[name] for name in names]

    def abort(self, name: str) -> None:
        self.llm.llm_engine.abort_request([name])

    def settle(self) -> None:
        """Wait until no transfer is under way."""
        eventually(lambda: self._idle() and not self._pending(), "the end of all transfers")

    def forget_gpu(self) -> None:
        """Empty the GPU's prefix cache, and only that."""
        self.settle()
        eventually(lambda: self._idle() and self.llm.reset_prefix_cache(), "a reset of the prefix cache")

    def empty(self) -> None:
        """Have no request, and nothing in any cache; the next case has the time of an engine that has just started."""
        signal.alarm(SECONDS)
        if not self.setup.processes:
            self.llm.llm_engine.abort_request(list(self.llm.llm_engine.output_processor.request_states))
        self.forget_gpu()
        self.purge()

    def purge(self) -> None:
        """As an operator does."""
        self.admin.post("/v1/pools/host/purge", json={"all": True}).raise_for_status()

    def stats(self, section: str) -> dict[str, Any]:
        answer = self.admin.get("/v1/stats").raise_for_status().json()
        return dict(answer[section])

    def has_slots(self, *, all_of_them: bool) -> bool:
        try:
            pool = self.stats("pool")
        except httpx.TransportError:  # the admin server comes up beside vLLM
            return False
        return bool(pool["usable_slots"] >= (pool["capacity_slots"] if all_of_them else 1))

    def loaded_blocks(self) -> int:
        return int(self.stats("transfers")["load"]["blocks"])

    def counter(self, name: str) -> float:
        """One of vLLM's own."""
        return float(sum(metric.value for metric in self.llm.get_metrics() if metric.name == name))

    def _pending(self) -> bool:
        if self.setup.is_attached:  # in this process
            return bool(self.connector.has_pending_push_work())
        pending = self.stats("transfers")["pending"]
        return bool(pending["loads"] + pending["stores"])

    def _idle(self) -> bool:
        """In this process only the test steps the engine, and completions of transfers need steps."""
        if not self.setup.processes:
            self.llm.llm_engine.step()
        return True


def start_at(patch: pytest.MonkeyPatch, moment: float) -> None:
    """Have every process have started at this moment, in seconds since the epoch."""
    patch.setattr(vllmprocess, "_start_of", lambda process: moment)


@contextlib.contextmanager
def running(setup: Setup) -> Iterator[Engine]:
    """A vLLM of this setup, with its pool pinned, or its first slot if that is paced; afterwards none of its threads is
    left."""
    threads = set(threading.enumerate())
    with contextlib.ExitStack() as stack:
        stack.enter_context(_deadline())
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        began = time.time()  # this process is older than its engines, and than the models that it has written
        start_at(patch, began)
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", str(int(setup.processes)))
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1" if setup.tp == 2 else "nobind")
        patch.setattr(gc, "collect", lambda generation=2: 0)  # vLLM does it nine times for each engine: half its time
        patch.setenv("OMP_NUM_THREADS", "1")  # threads that wait for each other cost more than so small a model
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstow-"))
        patch.setenv("XDG_RUNTIME_DIR", folder)  # where the admin server of an engine opens its socket
        stack.callback(_end_connector)
        llm = _llm(setup)
        stack.callback(_close, llm)
        admin = None
        if setup.extra is not None and not setup.is_attached:

            def socket() -> Path | None:
                if setup.before or setup.beside:  # the rank introduces itself with a step
                    llm.llm_engine.step()
                return admin_socket(Path(folder))

            eventually(socket, "an admin server")
            transport = httpx.HTTPTransport(uds=str(admin_socket(Path(folder))))
            admin = stack.enter_context(httpx.Client(transport=transport, base_url="http://kvstow", timeout=30))
        engine = Engine(llm, setup, admin)
        if admin is not None:
            paced = "pin_pause" in (setup.extra or {})
            eventually(lambda: engine.has_slots(all_of_them=not paced), "a pinned pool")
        yield engine
    gc.collect()
    left = [thread.name for thread in set(threading.enumerate()) - threads if thread.name.startswith("kvstow")]
    assert not left, f"threads outlived their engine: {left}"


class Reference:
    """Answers without a connector, for all of `PROMPTS`; each model is asked once, in one process. Splitting the model
    over ranks changes log probabilities by rounding alone."""

    def __init__(self) -> None:
        self._answers: dict[Path, dict[Prompt, Answer]] = {}

    def __call__(self, model: Path, *prompts: Prompt) -> list[Answer]:
        """Ask before another engine is up: a process has one at a time."""
        if model not in self._answers:
            with running(Setup(model, gpu_blocks=512)) as engine:
                answers = engine.ask(*PROMPTS, tokens=LONGEST)
            self._answers[model] = dict(zip(PROMPTS, answers, strict=True))
        return [self._answers[model][each] for each in prompts]


def admin_socket(folder: Path) -> Path | None:
    """The socket of the admin server that an engine with this runtime folder has opened."""
    return next(folder.glob("kvstow-*/*.sock"), None)


def _llm(setup: Setup) -> Any:
    import torch
    from vllm import LLM

    torch.set_num_threads(1)
    settings: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "dtype": "float32",
        "block_size": BLOCK,
        "max_model_len": 1024,
        "max_num_seqs": 8,
        "max_num_batched_tokens": setup.step_tokens,
        "num_gpu_blocks_override": setup.gpu_blocks,
        "gpu_memory_utilization": 0.1,
        "tensor_parallel_size": setup.tp,
        "seed": 0,
        "disable_log_stats": False,
        "kv_transfer_config": None if setup.extra is None else transfer_config(setup),
    }
    return LLM(model=str(setup.model), **(settings | dict(setup.settings)))


def transfer_config(setup: Setup, admin_port: int = 0) -> dict[str, Any]:
    """What a user writes into --kv-transfer-config."""
    place: dict[str, Any] = {"cpu_bytes_to_use": setup.pool_bytes}
    if not setup.is_attached:
        place |= {"admin_port": admin_port, "transfer_timeout": SECONDS}
    common = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    ours = {"kv_connector": "KVStowConnector", "kv_connector_extra_config": {**place, **(setup.extra or {})}, **common}
    others = [None if one is None else {**common, **one} for one in (setup.before, setup.beside)]
    if others == [None, None]:
        return {"kv_connector_module_path": "kvstow_service.connectors.vllm", **ours}
    children = {"connectors": [one for one in (others[0], ours, others[1]) if one is not None]}
    return {"kv_connector": "MultiConnector", "kv_connector_extra_config": children, **common}


def _end_connector() -> None:
    """An engine that fails while it starts leaves its worker's connector in this process, and the next one would use
    it."""
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    ensure_kv_transfer_shutdown()


def _close(llm: Any) -> None:
    from vllm.distributed import cleanup_dist_env_and_memory

    llm.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()


def _image(seed: int) -> Any:
    from PIL import Image

    pixels = random.Random(seed).randbytes(3 * IMAGE_SIZE * IMAGE_SIZE)
    return Image.frombytes("RGB", (IMAGE_SIZE, IMAGE_SIZE), pixels)


def _answer(output: Any) -> Answer:
    (completion,) = output.outputs
    logprobs = tuple({token: each.logprob for token, each in position.items()} for position in completion.logprobs)
    return Answer(tuple(completion.token_ids), logprobs, output.num_cached_tokens, output.kv_transfer_params)


def assert_same(answers: Sequence[Answer], expected: Sequence[Answer]) -> None:
    """Tokens are equal, log probabilities are too but for rounding. A shorter answer is compared as far as it goes."""
    assert len(answers) == len(expected)
    for number, (answer, wanted) in enumerate(zip(answers, expected, strict=True)):
        length = len(answer.tokens)
        assert answer.tokens == wanted.tokens[:length], f"answer {number} (of {answer.cached} cached tokens) differs"
        far = distance(answer, wanted)
        assert far < NEAR, f"answer {number} (of {answer.cached} cached tokens): log probabilities differ by {far:.2g}"


def distance(answer: Answer, wanted: Answer) -> float:
    """The largest difference of log probabilities of tokens that both list among the likeliest; infinite if there is
    no such token."""
    pairs = zip(answer.logprobs, wanted.logprobs, strict=False)
    return max(
        (abs(here[token] - there[token]) for here, there in pairs for token in here.keys() & there.keys()), default=inf
    )


def eventually(condition: Callable[[], object], what: str, seconds: float = 240.0) -> None:
    """Polls until a condition holds; fails with `what` after a deadline that no healthy run comes near."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come about within {seconds:g} s"
        time.sleep(0.005)


@contextlib.contextmanager
def _deadline() -> Iterator[None]:
    """An engine that is stuck blocks its caller; a signal ends that with a test that fails."""

    def fail(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"the engine has done nothing for {SECONDS} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
