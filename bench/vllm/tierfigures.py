"""What the program `tier` finds, and its tables."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from vllm.platforms import current_platform

from bench.report import Table
from bench.vllm.engines import GIB
from bench.vllm.model import Shape
from bench.vllm.tierengine import Answer

COMPUTED, FORCED, GATED, POOL, GPU = "computed", "tier, every fetch", "tier, the gate decides", "pool", "GPU"
"""Ways to a prompt's prefix."""
OWN = "GPU, just computed"
"""A control: no byte of it was copied. It shows by how much answers differ because of rounding."""


def element_bytes() -> int:
    """Of the KV cache."""
    return 2 if current_platform.is_cuda() else 4


@dataclass(frozen=True, slots=True)
class Stored:
    """What engine a has done. `put_gb_per_second`: from its first prompt until all were put, computing included.
    `distinct`: different ones of its answers."""

    start_seconds: float
    answers: list[Answer]
    put_blocks: int
    failed_put_blocks: int
    put_gb_per_second: float
    distinct: int


class Given(NamedTuple):
    """An answer of b's, and what it is compared with: an answer of a's by its number, or another one of b's."""

    answer: Answer
    other: int | Answer | None


@dataclass(frozen=True, slots=True)
class Asked:
    """One way to the first token, in milliseconds. `cached`: the fewest prompt tokens that were not computed. `same`:
    answers with the tokens of what they are compared with; `distance`: the largest difference of a log-probability.
    Both are None where there is nothing to compare with."""

    way: str
    times: list[float]
    cached: int
    same: int | None = None
    distance: float | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.times)

    @property
    def is_exact(self) -> bool:
        """Whether no answer differs from what it is compared with, not even in a bit."""
        return self.same is None or (self.same == len(self.times) and self.distance == 0)


@dataclass(frozen=True, slots=True)
class Steps:
    """Milliseconds between two tokens of a request that is decoded."""

    beside: str
    number: int
    p50: float
    p99: float
    longest: float


@dataclass(frozen=True, slots=True)
class Tiered:
    """What engine b has seen. `forced` and `gated`: `/v1/tier` after the fetches that were waited for, and after the
    gate has decided."""

    start_seconds: float
    asked: list[Asked]
    steps: list[Steps]
    forced: dict[str, Any]
    gated: dict[str, Any]


def compare(way: str, answers: Sequence[Given], of_a: Sequence[Answer]) -> Asked:
    times, cached = [given.answer.seconds * 1e3 for given in answers], min(given.answer.cached for given in answers)
    others = [of_a[given.other] if isinstance(given.other, int) else given.other for given in answers]
    pairs = [(given.answer, other) for given, other in zip(answers, others, strict=True) if other is not None]
    if not pairs:
        return Asked(way, times, cached)
    distances = [answer.distance(other) for answer, other in pairs]
    known = [distance for distance in distances if distance is not None]
    same = sum(answer.tokens == other.tokens for answer, other in pairs)
    return Asked(way, times, cached, same, max(known) if len(known) == len(pairs) else None)


def tables(name: str, shape: Shape, prompt_tokens: int, stored: Stored, tiered: Tiered) -> list[Table]:
    token_bytes = shape.token_bytes(element_bytes())
    gate, rates = tiered.gated, []
    if gate["fetch_bytes_per_second"]:
        rates.append(f"fetched at {gate['fetch_bytes_per_second'] / 1e9:.2f} GB/s")
    if gate["prefill_tokens_per_second"]:
        prefill = gate["prefill_tokens_per_second"]
        rates.append(f"{prefill:,.0f} tokens/s of prefill: break-even at {prefill * token_bytes / 1e9:.2f} GB/s")
    title = f"{name}, {prompt_tokens * token_bytes / GIB:.2f} GiB a prompt; {'; '.join(rates)}. {gate['decision']}"
    computed = next(asked.median for asked in tiered.asked if asked.way == COMPUTED)
    rows = [
        [
            asked.way,
            f"{asked.median:.1f}",
            f"{min(asked.times):.1f} to {max(asked.times):.1f}",
            f"{asked.median / computed:.2f}",
            f"{asked.cached:,}",
            "" if asked.same is None else f"{asked.same}/{len(asked.times)}",
            "" if asked.same is None else "none in common" if asked.distance is None else f"{asked.distance:.3f}",
        ]
        for asked in tiered.asked
    ]
    head = ["prefix", "first token, ms", "all", "of computed", "cached tokens", "same answers", "log-prob., apart"]
    steps = [
        [one.beside, f"{one.number}", f"{one.p50:.2f}", f"{one.p99:.2f}", f"{one.longest:.1f}"] for one in tiered.steps
    ]
    beside = f"{name}: steps of one request that is decoded beside; engine a put {stored.put_gb_per_second:.2f} GB/s"
    return [Table(title, head, rows), Table(beside, ["beside", "steps", "p50, ms", "p99, ms", "longest"], steps)]
