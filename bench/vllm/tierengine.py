"""An engine with a pool of its own and a fleet tier, in this process: times to first tokens, and between tokens while
blocks are put or fetched."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from bench.vllm import admin
from bench.vllm.engines import Setup, start_llm, wait_until_usable
from kvstow.control.fleettier import FleetTier
from kvstow.tier.breakeven import BreakEven, Estimate

_ANSWER = 8
"""Tokens."""
_LOGPROBS = 5
_PINNING = 90.0
_PATIENCE = 60.0
_DECODING = "decoding"
_DECODED = 512
"""Tokens of the prompt that is decoded beside others."""

Prompt = list[int]


@dataclass(frozen=True, slots=True)
class Answer:
    """`seconds` to the first token; `logprobs`: of the likeliest first tokens; `cached`: prompt tokens that were not
    computed."""

    seconds: float
    tokens: tuple[int, ...]
    logprobs: Mapping[int, float]
    cached: int

    def distance(self, other: Answer) -> float | None:
        """The largest difference of log-probabilities of first tokens that both find likely; None if there is none."""
        both = self.logprobs.keys() & other.logprobs.keys()
        return max((abs(self.logprobs[token] - other.logprobs[token]) for token in both), default=None)


class TierEngine:
    """It makes steps in calls alone."""

    def __init__(self, setup: Setup, fill: Callable[[Any], None] | None) -> None:
        """Returns when all of its pool is pinned. `fill`: gives the model its weights. Raises `TimeoutError`."""
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        started = start_llm(setup)
        assert started.port is not None
        self.start_seconds, self._port = started.seconds, started.port
        self._llm = started.engine
        if fill is not None:
            self._llm.apply_model(fill)
        self._asked = 0
        wait_until_usable(started, setup, _PINNING)

    @property
    def fleet(self) -> FleetTier:
        connector = self._llm.llm_engine.engine_core.engine_core.scheduler.connector
        fleet: FleetTier = connector._host.tier.tier.fleet
        return fleet

    def status(self) -> dict[str, Any]:
        """What `/v1/tier` says of its pool."""
        (item,) = admin.ask(self._port, "/v1/tier")["items"]
        return dict(item)

    def ask(self, prompt: Prompt) -> Answer:
        name = self.begin(prompt)
        began, first = time.perf_counter(), None
        while True:
            for output in self._step_or_yield():
                if output.request_id == name:
                    first = time.perf_counter() - began if first is None else first
                    if output.finished:
                        (completion,) = output.outputs
                        likeliest = completion.logprobs[0]
                        return Answer(
                            first,
                            tuple(completion.token_ids),
                            {token: each.logprob for token, each in likeliest.items()},
                            output.num_cached_tokens or 0,
                        )

    def begin(self, prompt: Prompt) -> str:
        """Ask, and make no step."""
        self._asked += 1
        name = f"prompt-{self._asked}"
        self._add(name, prompt, _ANSWER, RequestOutputKind.CUMULATIVE)
        return name

    def forget_gpu(self) -> None:
        """Empty the GPU's prefix cache, and only that, when all transfers have ended."""
        self.settle()
        self._poll(self._llm.reset_prefix_cache, "be ready to forget the GPU's prefix cache")

    def wait_connected(self) -> None:
        """Its processes have reached the store. They are started with its first request."""

        def is_connected() -> bool:
            clients = self.status()["clients"]
            return len(clients) > 1 and all(client["state"] == "connected" for client in clients)

        self._poll(is_connected, "connect to the store")

    def settle(self) -> None:
        """Until nothing is stored, put or fetched any more."""

        def is_settled() -> bool:
            return self.fleet.is_idle and not admin.summarize(self._port).pending

        self._poll(is_settled, "end all transfers")

    @contextmanager
    def every_fetch_pays(self) -> Iterator[None]:
        """Without the gate: requests wait for what the store has, however long it takes."""
        fleet = self.fleet
        patient = replace(fleet._settings, deadline=_PATIENCE, lookup_wait=_PATIENCE)
        estimate = Estimate(None, None, True, "every fetch is waited for")
        with (
            patch.object(fleet, "_settings", patient),
            patch.object(fleet.break_even, "decide", lambda *_: estimate),
            patch.object(BreakEven, "may_pay", True),
            patch.object(fleet.break_even, "pays", True),
        ):
            yield

    @contextmanager
    def decoding(self, vocabulary: int, tokens: int) -> Iterator[None]:
        """One request is decoded meanwhile, `tokens` at most."""
        chance = random.Random("decoding")
        prompt = [chance.randrange(10, vocabulary) for _ in range(_DECODED)]
        self._add(_DECODING, prompt, tokens, RequestOutputKind.DELTA)
        self.steps(lambda: False, 1)
        try:
            yield
        finally:
            self._llm.llm_engine.abort_request([_DECODING])

    def steps(self, is_over: Callable[[], bool], most: int) -> list[float]:
        """Milliseconds between tokens of the request that is decoded, until `is_over` or there are so many."""
        gaps: list[float] = []
        last: float | None = None
        while len(gaps) < most and not is_over():
            outputs = self._step()
            now = time.perf_counter()
            for output in outputs:
                if output.request_id == _DECODING:
                    if output.finished:
                        raise RuntimeError("the request that is decoded has ended: give it more tokens")
                    if last is not None:
                        gaps.append((now - last) * 1e3)
                    last = now
        return gaps

    def finish(self, name: str) -> None:
        """Until this request has ended."""
        while not any(output.request_id == name and output.finished for output in self._step()):
            pass

    def _add(self, name: str, prompt: Prompt, tokens: int, kind: RequestOutputKind) -> None:
        params = SamplingParams(
            max_tokens=tokens,
            temperature=0,
            logprobs=_LOGPROBS if kind is RequestOutputKind.CUMULATIVE else None,
            detokenize=False,
            ignore_eos=True,
            output_kind=kind,
        )
        self._llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params)

    def _step(self) -> list[Any]:
        outputs: list[Any] = self._llm.llm_engine.step()
        return outputs

    def _step_or_yield(self) -> list[Any]:
        """As vLLM's own loop, which sleeps when nothing was computed: others need the interpreter."""
        outputs = self._step()
        if not outputs:
            time.sleep(0.001)
        return outputs

    def _poll(self, condition: Callable[[], bool], what: str) -> None:
        """Makes steps, without which transfers do not end."""
        deadline = time.monotonic() + _PATIENCE
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"the engine did not {what} within {_PATIENCE:g} s: {self.status()}")
            self._step_or_yield()
