"""Concurrent conversations with KVStow, whose answers are all compared with those of an engine without a connector.

    python3 -m bench.vllm verify [--seconds 600] [--ranks 2] [--stages 2] [--beside] [--connector simple] [--seed 0]
        [--out DIR]

On a GPU, vLLM runs in its batch-invariant mode: an answer depends neither on what is computed beside it, nor on how
much of its prompt was cached. So tokens and log-probabilities must be equal, bit by bit. The GPU's own cache is small,
and so is the pool. So conversations come back from host memory, and blocks are evicted there, too. Some requests are
preempted, and some are aborted. Writes `verify.jsonl`. The exit status is 1 if an answer differs, if nothing came from
the host, or if a loaded block has other bytes than when it was stored (`bench.vllm.checked`).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from vllm.platforms import current_platform

from bench.vllm import admin
from bench.vllm.checked import FOLDER, Checks, read_checks
from bench.vllm.conversations import Answer, Load, Talk, Turn
from bench.vllm.engines import CONNECTORS, GRAPHS, Setup, block_tokens, start_async
from bench.vllm.model import SHAPES, Shape, write_model
from bench.vllm.process import Measurement, MeasurementError, run
from bench.vllm.results import make_parser, open_results
from kvstow_service.connectors.engine_core.loadpolicy import LOAD_PATHS

_STARTING = 180.0  # seconds
_PROMPTS = 16  # prompts of the control experiment
_TINY_LOAD = Load(clients=4, beside=3, turns=4, systems=2, system_tokens=(64, 128), question_tokens=(16, 64))


@dataclass(frozen=True, slots=True)
class Talked:
    """`sensitive` counts those of `_PROMPTS` prompts whose answers changed when one early block did."""

    start_seconds: float
    seconds: float
    answers: dict[Turn, Answer]
    abandoned: int
    sensitive: int
    admin: admin.Summary | None
    checks: Checks | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """`differing` counts turns whose tokens differ from the reference. `logprobs` counts other turns whose
    log-probability differs, and `largest` is the largest difference. The turns of a conversation after a difference
    have other prompts, so they are not compared (`astray`), nor are turns that only one of the two has reached
    (`missing`)."""

    compared: int
    differing: int
    logprobs: int
    largest: float
    astray: int
    missing: int


def compare(reference: Mapping[Turn, Answer], answers: Mapping[Turn, Answer]) -> Comparison:
    differing = logprobs = astray = compared = 0
    largest = 0.0
    lost: set[tuple[int, int]] = set()
    for turn in sorted(reference.keys() & answers.keys()):
        if turn[:2] in lost:
            astray += 1
            continue
        expected, answer = reference[turn], answers[turn]
        compared += 1
        if expected.tokens != answer.tokens:
            differing += 1
            lost.add(turn[:2])
            continue
        gap = abs(expected.logprob - answer.logprob)
        logprobs += gap > 0
        largest = max(largest, gap)
    return Comparison(compared, differing, logprobs, largest, astray, len(reference.keys() ^ answers.keys()))


def talk(setup: Setup, load: Load, vocabulary: int, seconds: float, gpus: str | None) -> Talked:
    if gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus
    with tempfile.TemporaryDirectory() as folder:
        os.environ[FOLDER] = folder
        return asyncio.run(_talk(setup, load, vocabulary, seconds, Path(folder)))


async def _talk(setup: Setup, load: Load, vocabulary: int, seconds: float, folder: Path) -> Talked:
    started = start_async(setup)
    clients = Talk(started.engine, load, vocabulary)
    began = time.monotonic()
    await clients.run(seconds)
    took = time.monotonic() - began
    sensitive = await _count_sensitive(clients, vocabulary)
    summary = admin.summarize(started.port) if started.port else None
    started.engine.shutdown()
    checks = read_checks(folder) if setup.connector == "checked" else None
    return Talked(started.seconds, took, clients.answers, clients.abandoned, sensitive, summary, checks)


async def _count_sensitive(clients: Talk, vocabulary: int) -> int:
    """Count the prompts for which one wrong block of many changes the answer. Without any, equal answers would prove
    nothing."""
    chance, changed = random.Random("control"), 0
    for _ in range(_PROMPTS):
        prompt = [chance.randrange(10, vocabulary) for _ in range(12 * block_tokens())]
        other = [chance.randrange(10, vocabulary) for _ in range(block_tokens())] + prompt[block_tokens() :]
        first, second = await asyncio.gather(clients.ask(prompt, 4), clients.ask(other, 4))
        changed += first.tokens != second.tokens
    return changed


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    load = replace(_TINY_LOAD if options.tiny else Load(), seed=options.seed)
    shape, results = SHAPES["tiny" if options.tiny else "small"], open_results("verify", options)
    with tempfile.TemporaryDirectory() as folder:
        run(_STARTING, write_model, Path(folder), shape, weights=True)
        setup = _setup(Path(folder), load, shape, options)
        try:
            reference, talked = _talk_to_both(setup, load, shape.vocabulary, options)
        except MeasurementError as error:
            results.add("failed", error=str(error))
            return 1
    for name, one in (("none", reference), (options.connector, talked)):
        results.add("talked", connector=name, **_figures(one))
    comparison = compare(reference.answers, talked.answers)
    results.add("verify", ranks=options.ranks, stages=options.stages, connector=options.connector, **asdict(comparison))
    same = comparison.compared > 0 and not comparison.differing
    print("every answer is the same" if same else "ANSWERS DIFFER", flush=True)
    checks = talked.checks
    right = options.connector != "kvstow" or (checks is not None and checks.blocks > 0 and not checks.wrong)
    print("every loaded block is right" if right else f"NOT RIGHT: {checks}", flush=True)
    return 0 if same and right else 1


def _setup(model: Path, load: Load, shape: Shape, options: argparse.Namespace) -> Setup:
    """Make the setup. The GPU holds an eighth of all conversations, and the pool half."""
    tokens = load.clients * load.beside * load.max_tokens * 3 // 5
    element = 2 if current_platform.is_cuda() else 4
    return Setup(
        model,
        "none",
        pool_bytes=tokens // 2 * shape.token_bytes(element),
        max_tokens=load.max_tokens,
        gpu_blocks=max(tokens // 8, load.max_tokens * 2) // block_tokens(),
        batch_tokens=2048,
        batch_requests=load.clients,
        weights=True,
        ranks=options.ranks,
        stages=options.stages,
        gpu_share=0.2,
        invariant=True,
        graphs=options.graphs,
        extra={"load_path": options.load_path},
    )


def _talk_to_both(setup: Setup, load: Load, vocabulary: int, options: argparse.Namespace) -> tuple[Talked, Talked]:
    """Talk to an engine without a connector, and to one with the connector of the options."""
    patience = options.seconds + _STARTING
    name = "checked" if options.connector == "kvstow" else options.connector
    first, second = (replace(setup, connector=connector) for connector in ("none", name))
    if not options.beside:
        reference = run(patience, talk, first, load, vocabulary, options.seconds, None)
        return reference, run(patience, talk, second, load, vocabulary, options.seconds, None)
    gpus = ("0", "1") if current_platform.is_cuda() and current_platform.device_count() > 1 else (None, None)
    other = Measurement(talk, first, load, vocabulary, options.seconds, gpus[1])
    try:
        talked = run(patience, talk, second, load, vocabulary, options.seconds, gpus[0])
    except BaseException:
        other.kill()
        raise
    return other.result(patience), talked


def _figures(talked: Talked) -> dict[str, object]:
    answers = talked.answers.values()
    figures = asdict(replace(talked, answers={}))
    del figures["answers"]
    return {
        **figures,
        "turns": len(answers),
        "answer_tokens": sum(len(answer.tokens) for answer in answers),
        "prompt_tokens": sum(answer.prompt_tokens for answer in answers),
        "cached_tokens": sum(answer.cached for answer in answers),
    }


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("verify", __doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="of talking to each of the two engines")
    parser.add_argument(
        "--connector", choices=CONNECTORS, default="kvstow", help="compared; with none, the comparison itself is tried"
    )
    parser.add_argument("--ranks", type=int, default=1, help="GPUs of each engine, or of each stage (tensor parallel)")
    parser.add_argument("--stages", type=int, default=1, help="of the pipeline")
    parser.add_argument("--seed", type=int, default=0, help="of what is talked about")
    parser.add_argument("--load-path", choices=LOAD_PATHS, default="async", help="KVStow's option of that name")
    parser.add_argument("--graphs", choices=GRAPHS, default="none", help="CUDA graphs; full is vLLM's default")
    parser.add_argument("--beside", action="store_true", help="both engines at once, on two GPUs if there are two")
    return parser
