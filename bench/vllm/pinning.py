"""What growing a pool costs the steps of its own engine, compared with the engine's steps while nothing is pinned.

    python3 -m bench.vllm pinning [--shapes 8b tp8] [--graphs decode] [--gib 8] [--turns 5] [--processes 3] [--out DIR]

The engine and its worker are in one process. While one request is decoded, the pool grows by `--gib`. Pinning is paused
and continued every 16 steps, because a shared machine changes its speed within seconds, so that only neighbouring
windows of steps can be compared. Then the pool shrinks again, which ends a turn. `first` is the time to the first token
of 16,000 unknown ones, with pinning paused and not. `idle` and `steady` pin `--warm` GiB without a pause, without a
decoded request and beside one. They come first, after `new`, which pins once in memory that the machine may never have
used. With `--cold`, the first process has a pool of that size from the start, also in such memory. With `--attached`,
the pool is memory of a node service, which each process registers once: `--cold` GiB in pages of 2 MiB (huge) or 4 KiB
(small). Nothing is resized then. Writes `pinning.jsonl`, each part as soon as it is measured, with the figures of its
register calls (`calls`), and `pinning.md`.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from vllm import SamplingParams

from bench.report import Table, verdict
from bench.vllm import admin
from bench.vllm.engines import GIB, Setup, rank_pool, start_llm
from bench.vllm.model import SHAPES, write_model
from bench.vllm.process import run
from bench.vllm.results import add_common, add_engine, enter_node, open_results
from kvstow.memory.slotpool import SlotPool

P50_BAR, P99_BAR, FIRST_BAR = 1.05, 2.0, 1.02  # a ratio, ms, and a ratio
STEADY_BAR, IDLE_BAR = 30.0, 5.0  # seconds for 40 GiB

_TIMEOUT = 400.0
_SKIPPED = 3  # steps of a request that do not count: its prompt, and effects of the first answers
_WINDOW, _EDGE = 16, 2  # steps of a window; its first ones do not count, because pinning has just changed
_SMALL_GIB = 1.0
_CHUNK_BYTES = 64 << 20  # a pool gives back whole chunks
_RESIZE_SECONDS, _IDLE_SECONDS = 60.0, 2.0
_GROWTH_SECONDS = 30.0  # how long steps are measured; the rest is pinned beside an idle engine
_STEADY_SECONDS = 45.0  # how long a measurement waits for the pool at most


@dataclass(frozen=True, slots=True)
class Load:
    """`most` is the number of steps of a phase. `prompt` is the length of the decoded prompt in tokens, and
    `cold_prompt` that of the prompts for `first`."""

    most: int = 8000
    prompt: int = 512
    cold_prompt: int = 16000


FULL, TINY = Load(), Load(most=200, prompt=64, cold_prompt=200)


@dataclass(frozen=True, slots=True)
class Steps:
    """Milliseconds."""

    p50: float
    p99: float
    number: int


@dataclass(frozen=True, slots=True)
class Turn:
    """The growth of a pool, once or several times: steps beside pinning, and steps while it was paused."""

    pinning: Steps
    paused: Steps
    gib_per_second: float


@dataclass(frozen=True, slots=True)
class Pinning:
    """`cold` is about the pool with which the engine starts. `all_turns` are all steps of `turns`. `first_*` are the
    milliseconds until the first token of a prompt, in pairs. `steady_seconds` and `idle_seconds` are how long it took
    until `--warm` GiB were pinned, or infinite if that took more than 45 s."""

    start_seconds: float
    cold: Turn | None
    all_turns: Turn | None
    turns: list[Turn]
    first_pinning: list[float]
    first_paused: list[float]
    steady_seconds: float | None
    idle_seconds: float | None


@dataclass(frozen=True, slots=True)
class Plan:
    """By how many bytes the pool grows, and how often. `warm_bytes` are pinned once more without a pause, unless they
    are 0."""

    num_bytes: int
    turns: int
    warm_bytes: int


def measure(
    setup: Setup, load: Load, vocabulary: int, plan: Plan, note: Callable[..., None], *, cold_bytes: int
) -> Pinning:
    """Measure one process. `setup` has a small pool, or one with `cold_bytes` more. `note(part=, ...)` is called after
    each part."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    started = start_llm(setup)
    assert started.port is not None
    decode = _Decode(started.engine, load, vocabulary)
    tell = partial(_tell, note)
    cold = None
    if cold_bytes:
        cold = _turn([decode.growth()])
        tell(part="cold", **asdict(cold))
    small = setup.pool_bytes - cold_bytes
    decode.request(load.cold_prompt, 8)
    admin.wait_until_pinned(started.port, _TIMEOUT)
    decode.resize(started.port, small)
    steady = idle = None
    if plan.warm_bytes:
        tell(part="new", seconds=decode.until_idly_pinned(started.port, small + plan.warm_bytes))
        decode.resize(started.port, small)
        _Calls.of_pool().take()
        idle = decode.until_idly_pinned(started.port, small + plan.warm_bytes)
        tell(part="idle", seconds=idle)
        decode.resize(started.port, small)
        decode.resize(started.port, small + plan.warm_bytes, paused=True)
        _Calls.of_pool().take()
        steady, pinned, steps = decode.until_pinned(small)
        tell(part="steady", seconds=steady, gib=pinned / GIB, pinning=asdict(_steps(steps)))
        decode.resize(started.port, small)
    growths = []
    for _ in range(plan.turns):
        decode.resize(started.port, small + plan.num_bytes, paused=True)
        _Calls.of_pool().take()
        growths.append(decode.growth())
        tell(part="resized", **asdict(_turn(growths[-1:])))
        decode.resize(started.port, small)
    first_pinning, first_paused = [], []
    for _ in range(plan.turns):
        decode.resize(started.port, small + plan.num_bytes, paused=True)
        first_paused.append(decode.first_token())
        _Calls.of_pool().take()
        rank_pool().set_paused(False)
        first_pinning.append(decode.first_token())
        tell(part="first", pinning=first_pinning[-1], paused=first_paused[-1])
        decode.resize(started.port, small)
    turns = [_turn([growth]) for growth in growths]
    return Pinning(started.seconds, cold, _turn(growths), turns, first_pinning, first_paused, steady, idle)


def measure_attached(setup: Setup, load: Load, vocabulary: int, note: Callable[..., None]) -> Pinning:
    """Measure how the memory of `setup.node` is registered, once."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    started = start_llm(setup)
    pool = rank_pool()
    pool.set_paused(True)
    pool.set_paused = lambda paused: None  # because the service says that nothing is paused when the session begins
    decode, deadline = _Decode(started.engine, load, vocabulary), time.perf_counter() + _RESIZE_SECONDS
    while not pool.status().target_slots:  # because the engine learns of its session in steps
        if time.perf_counter() > deadline:
            raise TimeoutError(f"no memory was granted within {_RESIZE_SECONDS:g} s")
        decode.settle()
    del pool.set_paused
    _Calls.of_pool().take()
    cold = _turn([decode.growth()])
    _tell(note, part="attached", **asdict(cold))
    return Pinning(started.seconds, cold, None, [], [], [], None, None)


def _tell(note: Callable[..., None], **measured: Any) -> None:
    """Note a part, with the figures of its register calls."""
    note(**measured, calls=_Calls.of_pool().take())


class _Calls:
    """The times of a pool's register calls."""

    _made: dict[int, _Calls] = {}  # noqa: RUF012 - by the pool's identity

    @classmethod
    def of_pool(cls) -> _Calls:
        """Return the object of this process's pool. The first call begins to measure the pool."""
        pool = rank_pool()
        return cls._made.get(id(pool)) or cls._made.setdefault(id(pool), cls(pool))

    def __init__(self, pool: SlotPool) -> None:
        self._pool, self._calls = pool, list[tuple[int, float, bool]]()
        registrar = pool._registrar
        register = registrar.register

        def measured(address: int, num_bytes: int) -> None:
            of_pool = threading.current_thread().name == "kvstow-pin"
            clock = time.thread_time if of_pool else time.perf_counter  # the pool's thread also waits for others
            began = clock()
            register(address, num_bytes)
            self._calls.append((num_bytes, clock() - began, not of_pool))

        registrar.register = measured  # type: ignore[method-assign]

    def take(self) -> dict[str, float]:
        """Return the figures of register calls since the last time. `by_host` are those on the host's thread."""
        calls, self._calls = self._calls, []
        seconds = sorted(took for _, took, _ in calls) or [0.0]
        budget = self._pool.steps.budget
        return {
            "calls": len(calls),
            "by_host": sum(by_host for _, _, by_host in calls),
            "median_bytes": statistics.median([num_bytes for num_bytes, _, _ in calls] or [0]),
            "median_seconds": statistics.median(seconds),
            "p99_seconds": seconds[len(seconds) * 99 // 100],
            "share": budget.share,
            "cost": budget.cost,
        }


class _Decode:
    def __init__(self, llm: Any, load: Load, vocabulary: int) -> None:
        self._engine, self._load, self._vocabulary = llm.llm_engine, load, vocabulary
        self._chance, self._number = random.Random(0), 0
        self.request(load.prompt, 2 * _SKIPPED)

    def growth(self) -> _Growth:
        """Decode until the pool is pinned. Pinning is paused in every second window of steps, the first one
        included."""
        pool, pinned, seconds = rank_pool(), 0, 0.0
        window = _Window(0.0, pool.status().pinned_bytes)
        deadline = time.perf_counter() + _GROWTH_SECONDS

        def going(steps: int) -> bool:
            nonlocal pinned, seconds, window
            if steps % _WINDOW:
                return True
            now, status = time.perf_counter(), pool.status()
            pinned += status.pinned_bytes - window.pinned_bytes  # it rises late, so also in paused windows
            if not _is_paused(steps - _WINDOW):
                seconds += now - window.began
            window = _Window(now, status.pinned_bytes)
            pool.set_paused(_is_paused(steps))
            return bool(status.state == "pinning") and now < deadline

        pool.set_paused(True)
        steps = self.request(self._load.prompt, self._load.most, going)
        pool.set_paused(False)
        while pool.status().state == "pinning":
            time.sleep(0.01)
        growth = _Growth([], [], pinned / GIB, seconds)
        for index in range(_WINDOW, len(steps) - len(steps) % _WINDOW):
            if index % _WINDOW >= _EDGE:
                (growth.paused if _is_paused(index) else growth.pinning).append(steps[index])
        return growth

    def resize(self, port: int, num_bytes: int, *, paused: bool = False) -> None:
        """Resize the pool. Returns when the rank has begun to grow, or has given everything back. That is fast, because
        the host is idle, but stores in progress end only with steps."""
        admin.change(port, "/v1/pools/host", {"capacity_bytes": num_bytes, "pinning_paused": paused})
        deadline = time.perf_counter() + _RESIZE_SECONDS
        while not self._follows(num_bytes):
            if time.perf_counter() > deadline:
                raise TimeoutError(f"the pool did not follow a resize to {num_bytes} bytes: {rank_pool().status()}")
            self.settle()
            idle_until = time.perf_counter() + _IDLE_SECONDS
            while not self._follows(num_bytes) and time.perf_counter() < idle_until:
                time.sleep(0.005)

    def settle(self) -> None:
        """Make steps, in which stores end."""
        self.request(self._load.prompt, 4)

    def is_at(self, num_bytes: int) -> bool:
        """Whether a resize has reached the rank."""
        pool = rank_pool()
        missing = abs(pool.status().target_bytes - num_bytes)
        return bool(missing <= pool.slot_bytes)

    def _follows(self, num_bytes: int) -> bool:
        status = rank_pool().status()
        is_under_way = status.state == "pinning" or status.resident_bytes <= num_bytes + _CHUNK_BYTES
        return bool(self.is_at(num_bytes) and is_under_way)

    def until_pinned(self, before: int) -> tuple[float, int, list[float]]:
        """Decode until the paused pool, which had `before` bytes, is pinned. Returns seconds, bytes, and the
        milliseconds of the steps. Ends after `_STEADY_SECONDS`, with infinite seconds."""
        pool, steps = rank_pool(), list[float]()
        self.settle()
        pool.set_paused(False)
        began = time.perf_counter()

        def going(number: int) -> bool:
            return pool.status().state == "pinning" and time.perf_counter() - began < _STEADY_SECONDS

        while going(0):
            steps += self.request(self._load.prompt, self._load.most, going)[_SKIPPED:]
        seconds, status = time.perf_counter() - began, pool.status()
        return seconds if status.state == "ready" else math.inf, status.pinned_bytes - before, steps

    def until_idly_pinned(self, port: int, num_bytes: int) -> float:
        """Let the pool grow beside an idle engine. Returns the seconds that it took."""
        began = time.perf_counter()
        admin.change(port, "/v1/pools/host", {"capacity_bytes": num_bytes})
        while not self.is_at(num_bytes) or rank_pool().status().state == "pinning":
            time.sleep(0.001)
        return time.perf_counter() - began

    def first_token(self) -> float:
        return self.request(self._load.cold_prompt, 1)[0]

    def request(self, tokens: int, answer: int, going: Callable[[int], bool] = lambda steps: True) -> list[float]:
        """Make a request, and return the milliseconds of its steps, of which the first one has the prompt. It ends
        early if `going(steps so far)` is false."""
        self._number += 1
        prompt = [self._chance.randrange(10, self._vocabulary) for _ in range(tokens)]
        params = SamplingParams(max_tokens=answer, temperature=0, detokenize=False, ignore_eos=True)
        name = str(self._number)
        last = time.perf_counter()
        self._engine.add_request(name, {"prompt_token_ids": prompt}, params)
        steps: list[float] = []
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            if outputs and len(outputs[0].outputs[0].token_ids) > len(steps):
                now = time.perf_counter()
                steps.append((now - last) * 1e3)
                last = now
                if not going(len(steps)):
                    self._engine.abort_request([name])
        return steps


class _Window(NamedTuple):
    began: float
    pinned_bytes: int


class _Growth(NamedTuple):
    """Milliseconds of steps, and the GiB that were pinned in `seconds`, without pauses."""

    pinning: list[float]
    paused: list[float]
    gib: float
    seconds: float


def _turn(growths: Sequence[_Growth]) -> Turn:
    pinning = [ms for growth in growths for ms in growth.pinning]
    paused = [ms for growth in growths for ms in growth.paused]
    seconds = sum(growth.seconds for growth in growths)
    rate = sum(growth.gib for growth in growths) / seconds if seconds else float("nan")
    return Turn(_steps(pinning), _steps(paused), rate)


def _is_paused(step: int) -> bool:
    return step // _WINDOW % 2 == 0


def _steps(milliseconds: list[float]) -> Steps:
    p50, p99 = (float(value) for value in np.percentile(milliseconds or [float("nan")], [50, 99]))
    return Steps(p50, p99, len(milliseconds))


def table(runs: Sequence[tuple[str, Pinning]]) -> Table:
    rows = []
    for name, run_ in runs:
        for what, turn in (("cold memory", run_.cold), ("resized", run_.all_turns)):
            if turn is not None:
                rows.append([f"{name}, {what}", *_cells(turn)])
        if run_.first_paused:
            paused, pinning = statistics.median(run_.first_paused), statistics.median(run_.first_pinning)
            ratio = f"{pinning / paused:.3f}, {verdict(pinning <= FIRST_BAR * paused)}"
            rows.append([f"{name}, first token", f"{paused:.0f}", f"{pinning:.0f}", ratio, "", "", ""])
        for what, seconds, bar in (("steady", run_.steady_seconds, STEADY_BAR), ("idle", run_.idle_seconds, IDLE_BAR)):
            if seconds is not None:
                rows.append([f"{name}, {what}: {seconds:.1f} s, {verdict(seconds <= bar)}", "", "", "", "", "", ""])
    head = [
        "",
        "paused: p50, ms",
        "pinning",
        f"ratio, bar {P50_BAR}",
        f"p99 longer, bar {P99_BAR} ms",
        "steps",
        "GiB/s",
    ]
    return Table("Steps of an engine beside its growing pool", head, rows)


def _cells(turn: Turn) -> list[str]:
    ratio, longer = turn.pinning.p50 / turn.paused.p50, turn.pinning.p99 - turn.paused.p99
    return [
        f"{turn.paused.p50:.2f}",
        f"{turn.pinning.p50:.2f}",
        f"{ratio:.3f}, {verdict(ratio <= P50_BAR)}",
        f"{longer:+.2f}, {verdict(longer <= P99_BAR)}",
        str(turn.pinning.number),
        f"{turn.gib_per_second:.2f}",
    ]


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    if options.attached and not options.cold:
        _parser().error("--attached needs --cold, the size of the node service's memory")
    results, load = open_results("pinning", options), TINY if options.tiny else FULL
    scale = GIB // 16 if options.tiny else GIB
    plan = Plan(int(options.gib * scale), options.turns, int(options.warm * scale))
    small, cold_bytes = int(_SMALL_GIB * scale), int(options.cold * scale)
    runs: list[tuple[str, Pinning]] = []
    with tempfile.TemporaryDirectory() as folder:
        for shape in ["tiny"] if options.tiny else options.shapes:
            write_model(Path(folder) / shape, SHAPES[shape], weights=False)
            setup = Setup(
                Path(folder) / shape,
                "kvstow",
                pool_bytes=small,
                max_tokens=4096 if options.tiny else 32768,
                gpu_blocks=None if options.tiny else 4096,
                graphs=options.graphs,
                graph_sizes=(1,),
                extra={"max_bytes": small + max(plan.num_bytes, plan.warm_bytes, cold_bytes), **options.extra},
            )
            for process in range(options.processes):
                labels = {"shape": shape, "graphs": options.graphs, "process": process, "attached": options.attached}
                note = partial(results.add, "part", **labels)
                once = partial(
                    _once, setup, load, SHAPES[shape].vocabulary, plan, note, cold_bytes, process, options.attached
                )
                measured = results.attempt("pinning", once, **labels)
                if measured is not None:
                    memory = f", attached, {options.attached} pages" if options.attached else ""
                    runs.append((f"{shape}, graphs {options.graphs}, process {process + 1}{memory}", measured))
    results.show(table(runs))
    return 0


def _once(
    setup: Setup,
    load: Load,
    vocabulary: int,
    plan: Plan,
    note: Callable[..., None],
    cold_bytes: int,
    process: int,
    attached: str | None,
) -> Pinning:
    if attached is not None:
        with ExitStack() as stack:
            node = enter_node(stack, cold_bytes, small_pages=attached == "small").node
            one = replace(setup, connector="attached", node=node, pool_bytes=cold_bytes, extra={})
            return run(_TIMEOUT, measure_attached, one, load, vocabulary, note)
    cold = cold_bytes * (process == 0)
    one = replace(setup, pool_bytes=setup.pool_bytes + cold)
    return run(_TIMEOUT, measure, one, load, vocabulary, plan, note, cold_bytes=cold)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python3 -m bench.vllm pinning", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common(parser)
    shapes = [name for name in SHAPES if name != "tiny"]
    parser.add_argument("--shapes", nargs="+", default=["8b", "tp8"], choices=shapes)
    add_engine(parser, graphs="none")
    parser.add_argument("--gib", type=float, default=8.0, help="that the pool grows by, each turn")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--processes", type=int, default=3, help="of each shape")
    parser.add_argument("--warm", type=float, default=0.0, metavar="GIB", help="pinned once more, steadily and idly")
    parser.add_argument("--cold", type=float, default=0.0, metavar="GIB", help="pool of the first process at its start")
    parser.add_argument("--attached", choices=["huge", "small"], help="register memory of a node service instead")
    return parser
