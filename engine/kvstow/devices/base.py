"""The device protocol: what a data plane offers, whatever moves the bytes (CPU, CUDA, later JAX).

Threads. `begin_store`, `begin_load`, `advance` and every `Ticket.poll` are called by one thread at a time: the
worker's copy thread, or the host's where the device copies alone. A `Fence` is made by the host on any thread.

Ordering. A store reads its blocks only after the compute work that `after` names. A load may fetch the bytes of its
slots at once; it writes its blocks only after `after`. No compute work ever waits for a store.

Slots. From `begin_store` or `begin_load` to the ticket's final state the slots belong to the op: the control plane does
not reuse them, and the caller holds their memory (`HostPool.hold`).

Errors. The failure of one op is in its ticket. `advance` raises if the device can no longer tell what is under way:
its caller closes the device, and only then have the ops ended.
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
        """The state as of the last `advance`; never waits for the device. Where the device has no engine of its own
        (CPU), a due copy is done inside this call. Raises nothing: errors become `FAILED`."""

    @property
    def error(self) -> BaseException | None:
        """Why the copy failed, once `poll()` said so."""

    @property
    def seconds(self) -> float:
        """Time of the copy itself, as the device saw it; final with the final state."""


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
        """Take on the copy of block `blocks[i]` to slot `slots[i]`, once `after` has finished. Touches neither; after
        an error nothing was taken on."""

    def begin_load(self, op_id: int, blocks: Sequence[int], slots: Sequence[int], after: Fence | None) -> Ticket:
        """Take on the copy of slot `slots[i]` to block `blocks[i]`, which is written once `after` has finished. Touches
        neither; after an error nothing was taken on."""

    def advance(self) -> None:
        """Start what may start, loads before stores, and see what has finished. Never waits for the device, and
        starts a bounded amount of work, since its caller may be a host in the middle of a step."""

    def close(self) -> None:
        """Wait for copies under way and free what the device holds; idempotent. The pool is not closed."""
