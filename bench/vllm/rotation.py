"""Two engines on one pool under verified load, while the engines and the node service are killed in turn.

    python3 -m bench.vllm rotation [--seconds 480] [--every 30] [--out DIR]

Both engines send random prompts of a set without a pause, on the same GPU, and compute some tokens of each answer.
Tokens and log-probabilities are compared with those of an engine without a connector, bit by bit (vLLM's
batch-invariant mode). The bytes of every loaded block are compared with those that either engine has stored
(`bench.vllm.checked`). The GPU's own caches hold a part of the prompts, and so does the pool. Every `--every` seconds,
SIGKILL ends engine a, then engine b, then the service, and the killed process is restarted at once. A keeper has the
service's memory meanwhile. `nvidia-smi` is called each time. Without a GPU, log-probabilities differ by rounding, and
only tokens count. Writes `rotation.jsonl`, with the counts after each kill and at the end. The exit status is 1 if an
answer or a block differs, a request fails that was not one of a killed engine, no block was loaded, slots are lost, or
the service is seen on the GPU.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from vllm.platforms import current_platform

from bench.vllm.checked import FOLDER, Checks, read_checks
from bench.vllm.engines import Setup, block_tokens
from bench.vllm.killedengine import ENDING, FULL, TINY, KilledEngine, Load, Prompt, Tally, expect
from bench.vllm.model import SHAPES, Shape, write_model
from bench.vllm.node import NodeService, device_processes
from bench.vllm.process import run
from bench.vllm.results import Results, make_parser, open_results

_STARTING = 240.0  # seconds


@dataclass(frozen=True, slots=True)
class Rotation:
    """`kills` counts those of each. `failures` describes requests that ended other than by a kill. `recovered_seconds`
    are the times from each kill until both engines were attached and had answered again. `service_on_gpu` counts how
    often `nvidia-smi` listed the service. `engines_on_gpu` counts how often it listed any process; without that, the
    former proves nothing. `stuck_slots` are those of the pool at the end."""

    seconds: float
    kills: dict[str, int]
    tallies: dict[str, Tally]
    failures: list[str]
    checks: Checks
    recovered_seconds: dict[str, list[float]]
    service_on_gpu: int
    engines_on_gpu: int
    stuck_slots: int

    @property
    def problems(self) -> list[str]:
        tallies = self.tallies.values()
        found = {
            "an answer differs": any(tally.differing for tally in tallies),
            "a log-probability differs": current_platform.is_cuda() and any(tally.logprobs for tally in tallies),
            "an engine was hardly asked": not all(tally.requests for tally in tallies),
            "a loaded block is wrong": self.checks.wrong > 0,
            "no block was loaded": not self.checks.blocks,
            "a request or an engine has failed": bool(self.failures),
            "slots are stuck": self.stuck_slots > 0,
            "the service was on the GPU": self.service_on_gpu > 0,
            "not everything was killed": not all(self.kills.values()),
        }
        return [problem for problem, is_found in found.items() if is_found]


class _Rotation:
    def __init__(self, service: NodeService, engines: Sequence[KilledEngine], checks: Path, results: Results) -> None:
        self._service, self._engines, self._checks, self._results = service, engines, checks, results
        self._failures: list[str] = []
        self._on_gpu = self._listed = 0
        names = [*(engine.name for engine in engines), "service"]
        self._kills = dict.fromkeys(names, 0)
        self._recovered: dict[str, list[float]] = {name: [] for name in names}

    def run(self, seconds: float, every: float) -> Rotation:
        for engine in self._engines:
            engine.start()
        self._recover(_STARTING)
        began = time.monotonic()
        rounds = 0
        while (now := time.monotonic()) < began + seconds:
            kill_at = began + rounds * every
            if now < kill_at:
                self._watch()
                time.sleep(0.2)
                continue
            name = tuple(self._kills)[rounds % len(self._kills)]
            rounds += 1
            try:
                self._kill(name)
            except (OSError, RuntimeError, subprocess.SubprocessError) as error:
                self._failures.append(f"after the kill of {name}: {error}")
                break
            self._results.add("kill", of=name, **asdict(self._found(time.monotonic() - began)))
        took = time.monotonic() - began
        for engine in self._engines:
            engine.stop()
        return replace(self._found(took), stuck_slots=self._stuck_slots() if self._service.answers() else 0)

    def _found(self, seconds: float) -> Rotation:
        return Rotation(
            seconds=seconds,
            kills=self._kills,
            tallies={engine.name: engine.count() for engine in self._engines},
            failures=[*self._failures, *(failure for engine in self._engines for failure in engine.failures)],
            checks=read_checks(self._checks),
            recovered_seconds=self._recovered,
            service_on_gpu=self._on_gpu,
            engines_on_gpu=self._listed,
            stuck_slots=0,
        )

    def _kill(self, name: str) -> None:
        listed = device_processes()
        self._on_gpu += self._service.pid in listed
        self._listed += bool(listed)
        began = time.monotonic()
        if name == "service":
            self._service.kill()
            self._service.start()
        else:
            engine = next(engine for engine in self._engines if engine.name == name)
            engine.kill()
            engine.start()
        self._kills[name] += 1
        if self._recover(_STARTING):
            self._recovered[name].append(time.monotonic() - began)

    def _recover(self, patience: float) -> bool:
        """Wait until both engines are attached, and have answered."""
        before = [engine.count().requests for engine in self._engines]
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            self._watch()
            answered = [engine.count().requests > count for engine, count in zip(self._engines, before, strict=True)]
            if all(answered) and self._service.count_attached() == len(self._engines):
                return True
            time.sleep(0.1)
        self._failures.append(f"both engines were not attached and answering again within {patience:g} s")
        return False

    def _watch(self) -> None:
        for engine in self._engines:
            engine.check()

    def _stuck_slots(self) -> int:
        """Return the slots that no block of a living session has, after all sessions have ended."""
        deadline = time.monotonic() + ENDING
        while self._service.sessions() and time.monotonic() < deadline:
            time.sleep(0.1)
        states = ("leased", "filling", "quarantined")
        return sum(pool["slots"][state] for pool in self._service.pools() for state in states)


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    results = open_results("rotation", options)
    load, shape = TINY if options.tiny else FULL, SHAPES["tiny" if options.tiny else "small"]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        checks = folder / "checks"
        checks.mkdir()
        os.environ[FOLDER] = str(checks)
        run(_STARTING, write_model, folder / "model", shape, weights=True)
        prompts = load.prompts(shape.vocabulary)
        plain = _setup(folder / "model", load, shape, prompts)
        expected = run(_STARTING, expect, plain, load, prompts)
        service = stack.enter_context(NodeService(plain.pool_bytes, keeps=True))
        setup = replace(plain, connector="checked", node=service.node, extra={"weights_id": "rotation"})
        engines = [KilledEngine(name, folder, (setup, load, prompts, expected)) for name in ("engine-a", "engine-b")]
        for engine in engines:
            stack.callback(engine.kill)
        found = _Rotation(service, engines, checks, results).run(options.seconds, options.every)
    results.add("rotation", **asdict(found), problems=found.problems)
    print("; ".join(found.problems) or "every answer and every block is right, and no other request failed", flush=True)
    return 1 if found.problems else 0


def _setup(model: Path, load: Load, shape: Shape, prompts: Sequence[Prompt]) -> Setup:
    """Make the setup. The GPU's cache of each engine holds a fifth of the prompts, and the pool two thirds."""
    tokens = sum(map(len, prompts))
    element = 2 if current_platform.is_cuda() else 4
    gpu_blocks = max(tokens // 5, load.max_tokens * 4) // block_tokens()
    return Setup(
        model,
        "none",
        pool_bytes=max(tokens * 2 // 3 * shape.token_bytes(element), 32 << 20),
        max_tokens=load.max_tokens,
        gpu_blocks=gpu_blocks,
        batch_tokens=4096,
        batch_requests=load.at_once,
        weights=True,
        gpu_share=0.2,
        invariant=True,
        kv_bytes=gpu_blocks * block_tokens() * shape.token_bytes(element),
    )


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("rotation", __doc__)
    parser.add_argument("--seconds", type=float, default=480.0, help="of load, from both engines' first answers on")
    parser.add_argument("--every", type=float, default=30.0, metavar="SECONDS", help="from one kill to the next")
    return parser
