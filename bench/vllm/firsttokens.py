"""The measurements of `bench.vllm headline` for one engine, in the engine's process: times to the first token, each
beside the time with the prefix on the GPU and the time of the same loop of Python, and a check of the answers.

The GPU's prefix cache is emptied before each hit. So it can hold all prompts, and "on the GPU" is the same request made
again. Weights are filled with random values with which an answer depends on all of the KV cache. With vLLM's dummy
weights all answers would be alike. The two answers come from the same kernels on the same shapes, so their tokens and
log probabilities must be equal, bit by bit. A prompt with new tokens after its prefix is therefore compared with the
same prompt under a separate cache salt: the GPU has computed its prefix under that salt, but not the new tokens.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm import SamplingParams

from bench.vllm.engines import Setup, Started, block_tokens, start_llm, wait_until_usable
from bench.vllm.hits import host_ms
from bench.vllm.model import Shape, fill_weights

_PINNING, _PATIENCE, _ENDLESS = 90.0, 20.0, 60.0  # seconds
_ANSWER = 8  # tokens of a compared answer
_PAUSE = 0.5  # seconds for stores to end


@dataclass(frozen=True, slots=True)
class Work:
    """The requests. `lengths` are those of prompts, with the number of prompts of each. Those of the first length are
    also sent at once. The tokens after a prompt's last whole block are always computed. `new` is how many tokens follow
    the whole blocks of the first prompts. `pairs` is how often each way is timed."""

    lengths: dict[int, int] = field(default_factory=lambda: {16007: 16, 2055: 4, 519: 4})
    new: tuple[int, ...] = (256, 2048)
    pairs: int = 10
    bursts: int = 5
    decoding: int = 8  # how many requests decode
    decoded: int = 2000  # the most tokens of each
    steps: int = 120  # undisturbed steps that are timed
    stored: int = 16000  # tokens of a prompt that is stored meanwhile
    after: int = 30  # steps that are timed after that


QUICK = Work({16007: 6, 2055: 3, 519: 3}, pairs=4, bursts=3, steps=60)
"""For a machine that is available for a few minutes only."""
TINY = Work({647: 3, 71: 2}, (64,), 1, 2, 2, 120, 10, 256, 5)


@dataclass(frozen=True, slots=True)
class Case:
    """Milliseconds to the first token. `recompute`: nothing of the prompt is cached. `gpu`: its prefix is on the GPU.
    `ways`: its prefix is on the host, by the way of the load. `right` is how many of the `compared` answers are right,
    by the way of the load. An answer with a loaded prefix is right if it equals the answer with the prefix on the GPU.
    An answer whose prefix was computed again, which `computed` counts, is right if it equals the answer of a first
    computation. `cached` is the smallest number of tokens found. `chosen` are the policy's choices."""

    tokens: int
    new: int
    recompute: list[float] = field(default_factory=list)
    gpu: list[float] = field(default_factory=list)
    ways: dict[str, list[float]] = field(default_factory=dict)
    right: dict[str, int] = field(default_factory=dict)
    computed: dict[str, int] = field(default_factory=dict)
    compared: int = 0
    cached: int | None = None
    chosen: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Burst:
    """All prompts at once, in milliseconds: the mean first token, and the last one. `right` counts first tokens that
    equal those of single requests."""

    way: str
    mean: float
    last: float
    right: int
    of: int
    chosen: dict[str, int]


@dataclass(frozen=True, slots=True)
class Decoding:
    """Hits beside requests that decode. `step` is the median of an undisturbed step, in milliseconds. `share` is how
    many of their undisturbed steps the requests make while a hit is in progress, `gap` the longest of these steps, and
    `first_token` that of the hit, as medians in milliseconds. `stored` is how much longer the steps after the store of
    a prompt took, as a median."""

    step: float
    share: float
    gap: float
    first_token: float
    stored: float
    chosen: dict[str, int]


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """`host` are times of the loop of Python throughout the row, in milliseconds. `link` and `kernel` are the rates of
    one large copy, and of the kernel that reads host memory, in GB/s. `distinct` counts different answers to `of`
    prompts. `depends` says whether an answer changed when a token of the first block did."""

    machine: str
    start_seconds: float
    host: list[float]
    link: float | None
    kernel: float | None
    cases: list[Case]
    bursts: list[Burst]
    decoding: Decoding | None
    distinct: int
    of: int
    depends: bool


class _Answer(NamedTuple):
    """`first` is how many milliseconds it took to the first token. `logprobs` are those of the tokens, if requested."""

    first: float
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached: int


class _How(NamedTuple):
    """With `compare`, log probabilities are requested. With `stored`, KVStow may store what is computed. With a `salt`,
    the request shares no KV with requests without that salt."""

    compare: bool = False
    stored: bool = True
    salt: str | None = None


_PLAIN, _COMPARE, _LOADED = _How(), _How(compare=True), _How(compare=True, stored=False)
_COMPUTED = _How(compare=True, stored=False, salt="computed here")
_COMPUTED_AT_ONCE = _How(compare=True, stored=False, salt="computed at once")


class _Asker:
    """Sends requests to an engine of this process, step by step."""

    def __init__(self, started: Started, vocabulary: int) -> None:
        self._llm, self._engine = started.engine, started.engine.llm_engine
        self._vocabulary, self._chance, self._number = vocabulary, random.Random(0), 0
        connector = self._engine.engine_core.engine_core.scheduler.connector
        self.policy = getattr(getattr(getattr(connector, "_host", None), "side", None), "policy", None)
        self.ways = ("auto", "async") if self.policy is not None else ("hit",)

    def prompt(self, tokens: int) -> list[int]:
        return [self._chance.randrange(10, self._vocabulary) for _ in range(tokens)]

    def go_by(self, way: str) -> None:
        if self.policy is not None:
            self.policy._path = way

    def take_choices(self) -> dict[str, int]:
        if self.policy is None:
            return {}
        chosen = {choice.label: count for choice, count in self.policy.counts.items()}
        self.policy.counts.clear()
        return chosen

    def begin(self, prompt: list[int], tokens: int = 1, how: _How = _PLAIN) -> str:
        self._number += 1
        name = f"headline{self._number}"
        keeps_none = not how.stored and self.policy is not None
        sampling = SamplingParams(
            max_tokens=tokens,
            temperature=0,
            detokenize=False,
            ignore_eos=True,
            logprobs=0 if how.compare else None,
            extra_args={"kv_transfer_params": {"kvstow": {"store": False}}} if keeps_none else None,
        )
        inputs: dict[str, Any] = {"prompt_token_ids": prompt}
        if how.salt is not None:
            inputs["cache_salt"] = how.salt
        self._engine.add_request(name, inputs, sampling)
        return name

    def step(self) -> list[tuple[str, Any]]:
        """Make a step, and return the outputs by request. vLLM may append text to the names of requests."""
        return [(output.request_id.split("-")[0], output) for output in self._engine.step()]

    def abort(self, names: Sequence[str]) -> None:
        self._engine.abort_request(list(names))
        for _ in range(5):
            self._engine.step()

    def ask_all(self, prompts: Sequence[list[int]], tokens: int = 1, how: _How = _PLAIN) -> list[_Answer]:
        began = time.perf_counter()
        names = [self.begin(prompt, tokens, how) for prompt in prompts]
        first, answers = dict[str, float](), dict[str, _Answer]()
        while len(answers) < len(names):
            outputs = self.step()
            now = time.perf_counter() - began
            for name, output in outputs:
                sampled = output.outputs[0]
                first.setdefault(name, now * 1e3)
                if output.finished:
                    found = tuple(sampled.token_ids)
                    pairs = zip(sampled.logprobs or (), found, strict=False)
                    logprobs = tuple(each[token].logprob for each, token in pairs)
                    answers[name] = _Answer(first[name], found, logprobs, output.num_cached_tokens or 0)
            if now > _ENDLESS:
                raise TimeoutError(f"{len(names) - len(answers)} of {len(names)} requests do not end")
        return [answers[name] for name in names]

    def ask(self, prompt: list[int], tokens: int = 1, how: _How = _PLAIN) -> _Answer:
        return self.ask_all([prompt], tokens, how)[0]

    def empty_gpu(self) -> None:
        ends = time.monotonic() + _PATIENCE
        while not self._llm.reset_prefix_cache():  # it fails while blocks are being stored
            if time.monotonic() > ends:
                raise TimeoutError("the GPU's prefix cache cannot be emptied")
            self._engine.step()

    def settle(self) -> None:
        """Make steps in which stores of ended requests end."""
        for _ in range(4):
            self.ask(self.prompt(40))
        time.sleep(_PAUSE)
        self.ask([9] * 40)
        self.empty_gpu()


def measure(setup: Setup, shape: Shape, work: Work) -> FirstTokens:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    started = start_llm(setup)
    fill_weights(started.model(), shape)
    wait_until_usable(started, setup, _PINNING)
    asker, has_hits = _Asker(started, shape.vocabulary), setup.connector != "none"
    longest = next(iter(work.lengths))
    for tokens in (64, longest, longest - 7):
        asker.ask(asker.prompt(tokens))
    asker.ask_all([asker.prompt(longest // 27) for _ in range(4)], _ANSWER, _COMPARE)  # compiles kernels
    asker.settle()
    host = [host_ms()]
    prompts = {tokens: [asker.prompt(tokens) for _ in range(count)] for tokens, count in work.lengths.items()}
    cases, first = list[Case](), list[_Answer]()
    for these in prompts.values():
        recomputed = [asker.ask(prompt, _ANSWER, _COMPARE) for prompt in these]
        expected = [asker.ask(prompt, _ANSWER, _COMPARE) for prompt in these]
        first += expected
        asker.settle()
        cases.append(_case(asker, these, expected, recomputed, work.pairs, has_hits=has_hits))
        host.append(host_ms())
    whole = longest // block_tokens() * block_tokens()
    for new in work.new:
        cases.append(_behind(asker, prompts[longest][:2], whole, new, work.pairs, has_hits=has_hits))
        host.append(host_ms())
    bursts = _bursts(asker, prompts[longest], work.bursts, has_hits=has_hits)
    host.append(host_ms())
    decoding = _decoding(asker, prompts[longest][:12] if has_hits else [], work)
    host.append(host_ms())
    changed = [prompts[longest][0][0] ^ 1, *prompts[longest][0][1:]]
    depends = asker.ask(changed, _ANSWER, _COMPARE)[1:3] != first[0][1:3]
    machine, link, kernel = _machine(shape)
    distinct = len({answer.tokens for answer in first})
    return FirstTokens(
        machine, started.seconds, host, link, kernel, cases, bursts, decoding, distinct, len(first), depends
    )


def _case(
    asker: _Asker,
    prompts: list[list[int]],
    expected: list[_Answer],
    recomputed: list[_Answer],
    pairs: int,
    *,
    has_hits: bool,
) -> Case:
    tokens, gpu = len(prompts[0]), list[float]()
    times: dict[str, list[float]] = {way: [] for way in asker.ways if has_hits}
    cached = tokens
    asker.take_choices()
    for number in range(pairs + 1):
        prompt = prompts[number % len(prompts)]
        for way, found in times.items():
            asker.go_by(way)
            asker.empty_gpu()
            answer = asker.ask(prompt)
            if number:  # the first round compiles kernels, so it does not count
                found.append(answer.first)
                cached = min(cached, answer.cached)
        if not has_hits:
            asker.ask(prompt)
        answer = asker.ask(prompt)
        if number:
            gpu.append(answer.first)
    chosen, right, computed = asker.take_choices(), Counter[str](), Counter[str]()
    for way in times:
        asker.go_by(way)
        for prompt, of_gpu, of_nothing in zip(prompts, expected, recomputed, strict=True):
            asker.empty_gpu()
            answer = asker.ask(prompt, _ANSWER, _COMPARE)
            computed[way] += not answer.cached
            right[way] += answer[1:3] == (of_gpu if answer.cached else of_nothing)[1:3]
    asker.go_by("auto")
    return Case(
        tokens,
        0,
        [answer.first for answer in recomputed],
        gpu,
        times,
        dict(right),
        dict(computed),
        len(prompts),
        cached if has_hits else None,
        chosen,
    )


def _behind(asker: _Asker, prompts: list[list[int]], whole: int, new: int, pairs: int, *, has_hits: bool) -> Case:
    """Measure prompts with new tokens after the first `whole` tokens of these prompts."""
    gpu, cached, prefixes = list[float](), whole, [prompt[:whole] for prompt in prompts]
    times: dict[str, list[float]] = {way: [] for way in asker.ways if has_hits}
    right, computed = Counter[str](), Counter[str]()
    asker.take_choices()
    for number in range(pairs + 1):
        prefix = prefixes[number % len(prefixes)]
        for way, found in times.items():
            asker.go_by(way)
            asker.empty_gpu()
            answer = asker.ask(prefix + asker.prompt(new))
            if number:
                found.append(answer.first)
                cached = min(cached, answer.cached)
        asker.go_by("auto")
        if not has_hits:
            asker.ask(prefix)
        answer = asker.ask(prefix + asker.prompt(new))
        if number:
            gpu.append(answer.first)
    chosen = asker.take_choices()
    for prompt in prompts if times else ():
        asked = prompt[:whole] + asker.prompt(new)
        loaded = {}
        for way in times:
            asker.go_by(way)
            asker.empty_gpu()
            loaded[way] = asker.ask(asked, _ANSWER, _LOADED)
        asker.go_by("auto")
        asker.empty_gpu()
        asker.ask(prompt, how=_COMPUTED)  # computed in the same steps as the prefix that is on the host
        expected = asker.ask(asked, _ANSWER, _COMPUTED)
        if not all(one.cached for one in loaded.values()):  # computed in other steps, so that bits may differ
            at_once = asker.ask(asked, _ANSWER, _COMPUTED_AT_ONCE)
        for way, one in loaded.items():
            computed[way] += not one.cached
            right[way] += one[1:3] == (expected if one.cached else at_once)[1:3]
    count = len(prompts)
    return Case(whole, new, [], gpu, times, dict(right), dict(computed), count, cached if has_hits else None, chosen)


def _bursts(asker: _Asker, prompts: list[list[int]], count: int, *, has_hits: bool) -> list[Burst]:
    bursts = []
    alone = [asker.ask(prompt).tokens for prompt in prompts]
    ways = asker.ways if has_hits else ("gpu",)
    for number in range(count + 1):
        for way in ways:
            asker.go_by(way)
            if has_hits:
                asker.empty_gpu()
            asker.take_choices()
            answers = asker.ask_all(prompts)
            if number:
                first = [answer.first for answer in answers]
                right = sum(answer.tokens == one for answer, one in zip(answers, alone, strict=True))
                mean = statistics.mean(first)
                bursts.append(Burst(way, mean, max(first), right, len(prompts), asker.take_choices()))
    asker.go_by("auto")
    return bursts


def _decoding(asker: _Asker, hits: list[list[int]], work: Work) -> Decoding | None:
    if not hits:
        return None
    asker.settle()
    ids = [asker.begin(asker.prompt(work.stored // 32), work.decoded) for _ in range(work.decoding)]

    def steps(number: int) -> list[float]:
        found = []
        for _ in range(number):
            began = time.perf_counter()
            asker.step()
            found.append((time.perf_counter() - began) * 1e3)
        return found

    steps(work.steps // 3)
    step = statistics.median(steps(work.steps))
    asker.take_choices()
    shares, gaps, first, more = (list[float]() for _ in range(4))

    def until_first(prompt: list[int]) -> None:
        """Make steps until the prompt has its first token."""
        began = last = time.perf_counter()
        name, decoded, longest, is_there = asker.begin(prompt), 0, 0.0, False
        while not is_there:
            outputs = asker.step()
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
            decoded += sum(one in ids for one, _ in outputs)
            is_there = any(one == name and output.finished for one, output in outputs)
            if now - began > _ENDLESS:
                raise TimeoutError("a request does not end while other requests decode")
        seconds = last - began
        first.append(seconds * 1e3)
        gaps.append(longest * 1e3)
        shares.append(decoded / len(ids) * step / (seconds * 1e3))

    for prompt in hits:
        until_first(prompt)
        steps(12)
    found = statistics.median(shares), statistics.median(gaps), statistics.median(first)
    chosen = asker.take_choices()
    for _ in range(4):
        until_first(asker.prompt(work.stored))
        after = steps(work.after)
        more.append(sum(after) - len(after) * step)
    asker.abort(ids)
    return Decoding(step, *found, statistics.median(more), chosen)


def _machine(shape: Shape) -> tuple[str, float | None, float | None]:
    """Return the machine's name, and the rates of one large copy and of the kernel that reads host memory."""
    import torch

    if not torch.cuda.is_available():
        return "cpu", None, None
    from bench.gpu.layers import Loads
    from bench.vllm.hits import measure_link

    page, size = shape.token_bytes() * block_tokens() // shape.layers, 512 << 20
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True).fill_(1)
    blocks = size // (page * shape.layers) // 2
    loads = Loads(page, shape.layers, blocks, host.data_ptr(), size)
    kernel = loads.total / loads.seconds((4, 512)) / 1e9
    return torch.cuda.get_device_name(), measure_link(size).gb_per_second, kernel
