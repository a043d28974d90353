"""The device protocol: what a data plane offers, whatever moves the bytes (CPU, CUDA, later JAX).

Threads. `begin_store`, `stage_load`, `commit_load` and every `Ticket.poll` are called by one thread at a time: the
worker's copy thread, or the host's where the device copies alone. A `Fence` is made by the host on any thread.

Ordering. A store reads its blocks only after the compute work that `after` names. A load's `stage_load` may
start at once and never touches the KV cache; `commit_load` writes the blocks only after `after`. No compute
work ever waits for a store.

Slots. Between `begin_store` and its final mark, and between `stage_load` and its final mark, the slots belong
to the op: the control plane does not reuse them, and the caller holds their memory (`HostPool.hold`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol


class TicketState(Enum):
    """`SOURCE_FREE` is passed by stores only, on the way to `DONE`. `DONE` and `FAILED` are final."""

    PENDING = "pending"
    SOURCE_FREE = "source_free"
    DONE = "done"
    FAILED = "failed"


class Fence(Protocol):
    """Names compute work that was launched; `query()` says, without blocking, whether it has finished."""

    def query(self) -> bool: ...


class Ticket(Protocol):
    """The progress of one copy."""

    def poll(self) -> TicketState:
        """The state now; never waits for the device. Where the device has no engine of its own (CPU), a due
        copy is done inside this call. Raises nothing: errors become `FAILED`."""

    @property
    def error(self) -> BaseException | None:
        """Why the copy failed, once `poll()` said so."""

    @property
    def seconds(self) -> float:
        """Time of the copy itself, as the device saw it; final with the final state."""


class Staged(Protocol):
    """Bytes of a load on their way into private staging (or still in their leased slots)."""

    @property
    def slots(self) -> Sequence[int]: ...


@dataclass(frozen=True, slots=True)
class Capabilities:
    """`kv_in_place`: the KV cache is one set of buffers for life (false for JAX, which replaces arrays).
    `pin_mode`: what pinning means here. `copies_alone`: it moves bytes by itself, and `poll` only looks."""

    name: str
    kv_in_place: bool
    pin_mode: str
    copies_alone: bool = True


class Device(Protocol):
    """One rank's device with its KV cache and its pool."""

    @property
    def capabilities(self) -> Capabilities: ...

    def begin_store(self, op_id: int, blocks: Sequence[int], slots: Sequence[int], after: Fence | None) -> Ticket:
        """Start to copy block `blocks[i]` to slot `slots[i]` once `after` has finished."""

    def stage_load(self, op_id: int, slots: Sequence[int]) -> Staged:
        """Start to fetch the slots' bytes. Touches no block."""

    def commit_load(self, op_id: int, staged: Staged, blocks: Sequence[int], after: Fence | None) -> Ticket:
        """Write what was staged from slot `i` into block `blocks[i]` once `after` has finished."""

    def close(self) -> None:
        """Wait for copies under way and free what the device holds; idempotent. The pool is not closed."""
