"""The answers about pools and their blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvstow.messages import Direction
from kvstow.stats import EngineState, PendingTransfers, SlotCounts
from kvstow.status import HOST_NAME, BlockStatus, DrainMode, SessionState
from kvstow_api.figures import NowView

POOL_NAME = HOST_NAME
BlockState = Literal["cached", "leased", "protected"]
"""States of slots whose blocks can be loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolView:
    """A pool. Slots and bytes are of one rank; every rank has the same. `etag` names its settings; `block_tokens` is
    null while the number of tokens in a block is unknown. `model` is that of the engine that made the pool, empty if
    unknown; `sessions` counts lost ones, too, and `session_states` has them by state. `resizable`: whether a PATCH can
    change the capacity.

    `granted_bytes`: what the pool has of the host's memory, on all ranks together. `due_bytes`: what it should have: as
    much as it has use for, up to its fair share. `drain_mode` and `bypassed`: what an operator has switched off, here
    or on the whole host. `pending`: transfers in flight. `now`: figures of the last seconds.
    """

    name: str
    model: str
    state: EngineState
    reason: str
    sessions: int
    session_states: dict[SessionState, int]
    resizable: bool
    etag: str
    slot_bytes: int
    block_tokens: int | None
    capacity_slots: int
    capacity_bytes: int
    max_capacity_slots: int
    max_capacity_bytes: int
    usable_slots: int
    usable_bytes: int
    granted_bytes: int
    slots: SlotCounts
    policy: str
    pinning_paused: bool
    leases: int
    num_ranks: int
    due_bytes: int
    drain_mode: DrainMode | None
    bypassed: list[Direction]
    pending: PendingTransfers
    now: NowView


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolsView:
    items: list[PoolView]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanView:
    """What a change of settings would do."""

    dry_run: Literal[True] = True
    capacity_slots: int
    policy: str
    pinning_paused: bool
    evicted_slots: int
    evicted_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovedView:
    """What was removed, or in a dry run would be. Bytes are of one rank."""

    evicted_slots: int
    evicted_bytes: int
    dry_run: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PinningView:
    """What the ranks are told about pinning in the answer to their next report. `pin_attempt` grows with each retry."""

    paused: bool
    pin_attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksView:
    """One page, in order of slots; `next_page_token` is null on the last one."""

    items: list[BlockStatus]
    next_page_token: str | None
