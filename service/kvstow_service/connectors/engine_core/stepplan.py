"""The plan of a step: what the ranks do in one step of vLLM in addition to computing, and what they report of it."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from kvstow.messages import Completion, Op, StepPlan


class PlannedStep(NamedTuple):
    """The ops of one step. `load_requests[i]` is the request of `loads.ops[i]`. `lost_loads` are requests whose load
    has become impossible although vLLM waits for it, with the GPU blocks that stay unwritten. The step itself computes
    with what `layered` loads. `is_timed`: rank 0 says when the step has ended."""

    number: int
    stores: StepPlan
    loads: StepPlan
    load_requests: tuple[str, ...]
    lost_loads: dict[str, tuple[int, ...]]
    layered: StepPlan = StepPlan()
    is_timed: bool = False

    @property
    def ops(self) -> tuple[Op, ...]:
        return (*self.layered.ops, *self.loads.ops, *self.stores.ops)


class StepDraft:
    """The plan of the next step, as far as it was made. Used by the scheduler's thread."""

    def __init__(self) -> None:
        self.number = 0
        """How many steps were planned so far."""
        self._clear()

    def _clear(self) -> None:
        self.stores: list[Op] = []
        self.layered: list[Op] = []
        """Loads for the step that computes with them."""
        self._loads: list[Op] = []
        self._load_requests: list[str] = []
        self.lost_loads: dict[str, tuple[int, ...]] = {}

    def add_load(self, op: Op, request_id: str) -> None:
        self._loads.append(op)
        self._load_requests.append(request_id)

    def drop_load(self, op: Op) -> None:
        """Make the ranks end a load that has begun but is not needed. They touch none of its blocks and slots."""
        self.stores.append(replace(op, blocks=(), slots=()))

    def take(self) -> PlannedStep:
        """The plan of the next step, with all that was planned since the last call."""
        self.number += 1
        stores, loads, layered = (StepPlan(tuple(ops)) for ops in (self.stores, self._loads, self.layered))
        planned = PlannedStep(self.number, stores, loads, tuple(self._load_requests), self.lost_loads, layered)
        self._clear()
        return planned


class LoadId(NamedTuple):
    """Identifies a load. A request has at most one load in a step."""

    request_id: str
    step: int


class FinishedLoads(NamedTuple):
    """Requests whose loads have ended on this rank. `failed` is a subset of `done`; `bad_blocks` are the blocks of
    failed loads, and of loads by layer that were refused."""

    done: set[str]
    failed: set[str]
    bad_blocks: set[int]


class BootCompletions(NamedTuple):
    """Completions, and the boot of the rank that made them."""

    boot_id: str
    completions: tuple[Completion, ...]
