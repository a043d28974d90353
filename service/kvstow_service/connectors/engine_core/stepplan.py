"""The plan of a step: what the ranks do in one step of vLLM, besides computing, and what they report of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from kvstow.messages import Completion, Op, StepPlan
from kvstow.results import Awaited, Lease, StoreGrant
from kvstow_service.connectors.engine_core.controlplane import ControlPlane


class Step(Protocol):
    """The part of vLLM's `SchedulerOutput` that is read. Its `kv_connector_block_state` (vLLM 0.30) has states."""

    @property
    def num_scheduled_tokens(self) -> Mapping[str, int]: ...

    @property
    def scheduled_cached_reqs(self) -> Any: ...


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


class StepPlanner:
    """Plans ops with the control plane and collects them for the next step. Used by the scheduler's thread."""

    def __init__(self, control: ControlPlane) -> None:
        self._control = control
        self.number = 0
        """Steps planned so far."""
        self._stores: list[Op] = []
        self._loads: list[Op] = []
        self._layered: list[Op] = []
        self._load_requests: list[str] = []
        self._lost_loads: dict[str, tuple[int, ...]] = {}

    def begin_store(self, keys: Sequence[bytes], blocks: Sequence[int], request_id: str) -> Awaited[StoreGrant]:
        """Ask to store `blocks[i]` under `keys[i]`, as far as there is room. `add_store` follows."""
        return self._control.begin_store(keys, blocks, request_id=request_id)

    def add_store(self, op: Op) -> None:
        self._stores.append(op)

    def begin_load(
        self, lease: Lease, blocks: Sequence[int], first: int, request_id: str, choice: str
    ) -> Awaited[Op | None]:
        """Ask to load the slots of the lease, starting at its slot `first`, into `blocks`. `add_load` or `add_layered`
        follows."""
        return self._control.begin_load(lease, blocks, first=first, request_id=request_id, choice=choice)

    def add_load(self, op: Op, request_id: str) -> None:
        self._loads.append(op)
        self._load_requests.append(request_id)

    def add_layered(self, op: Op) -> None:
        """A load that `begin_load` has answered, for the step that computes with it."""
        self._layered.append(op)

    def drop_load(self, op: Op) -> None:
        """Have the ranks end a load that `begin_load` has answered and nobody needs: they touch nothing of it."""
        self._stores.append(replace(op, blocks=(), slots=()))

    def add_lost_load(self, request_id: str, blocks: tuple[int, ...]) -> None:
        """Have each rank report that the load of these blocks has failed."""
        self._lost_loads[request_id] = blocks

    def take_step(self) -> PlannedStep:
        """The plan of the next step, with all that was planned since the last call."""
        self.number += 1
        planned = PlannedStep(
            self.number,
            StepPlan(tuple(self._stores)),
            StepPlan(tuple(self._loads)),
            tuple(self._load_requests),
            self._lost_loads,
            StepPlan(tuple(self._layered)),
        )
        self._stores, self._loads, self._load_requests, self._lost_loads, self._layered = [], [], [], {}, []
        return planned


class LoadId(NamedTuple):
    """A load. A request has at most one in a step."""

    request_id: str
    step: int


class FinishedLoads(NamedTuple):
    """Requests whose loads have ended on this rank. `failed` is a subset of `done`; `bad_blocks` are the blocks of
    failed loads."""

    done: set[str]
    failed: set[str]
    bad_blocks: set[int]


class BootCompletions(NamedTuple):
    """Completions, and the boot of the rank that made them."""

    boot_id: str
    completions: tuple[Completion, ...]


class RankSession(NamedTuple):
    """How far a rank is in a session with the node service. `number` is that of the session's ticket; 0 while it is in
    no session. `slots`: how many slots it can copy to and from. `is_whole`: no more slots will come."""

    number: int = 0
    slots: int = 0
    is_whole: bool = False
