"""The device protocol: what a data plane needs from whatever moves the bytes (CPU, CUDA, JAX).

Threads. All calls of a device and of its tickets are made by one thread at a time: the copy thread, or the host's
thread where the device copies without help. The host makes a `Fence` on any thread. Only a `Launcher` belongs to the
host's thread, and where there is one nothing but it gives the device work.

Ordering. A store reads its blocks only after the compute work that `after` names. A load may read its slots at once;
it writes its blocks only after `after`. Compute work never waits for a store.

Slots. From its launch to the final state of its ticket the slots belong to the op: the control plane does not reuse
them, and the caller holds their memory (`SlotPool.hold`).

Errors. The failure of one op is in its ticket. `advance` raises if the device no longer knows what is under way: then
the caller closes the device, and its ops have ended only after that.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

import numpy as np

from kvstow.errors import CopyError
from kvstow.memory.slotpool import Int64Array, SlotPool
from kvstow.messages import LayerFigures, LoadLaunch, StagedLoad


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
        """The state as of the last `advance`. Never waits for the device. A device without a copy engine (CPU) copies
        inside this call. Never raises: errors become `FAILED`."""

    @property
    def error(self) -> BaseException | None:
        """Why the copy failed, once `poll` has returned `FAILED`."""

    @property
    def seconds(self) -> float:
        """Time of the copy itself, measured by the device; final with the final state."""


class Device(Protocol):
    """One rank's device with its KV cache and its pool."""

    @property
    def name(self) -> str:
        """Which device of this process, such as "cuda:1"."""

    @property
    def copies_alone(self) -> bool:
        """Whether the device moves bytes without the CPU; `poll` then only checks."""

    def launch_store(self, op_id: int, blocks: Sequence[int], slots: Sequence[int], after: Fence | None) -> Ticket:
        """Queue the copy of block `blocks[i]` to slot `slots[i]`, to start once `after` has finished. Touches neither
        itself. After an error nothing is queued."""

    def launch_load(self, op_id: int, blocks: Sequence[int], slots: Sequence[int], after: Fence | None) -> Ticket:
        """Queue the copy of slot `slots[i]` to block `blocks[i]`, which is written once `after` has finished. Touches
        no block itself. After an error nothing is queued."""

    def advance(self) -> None:
        """Start queued work, loads before stores, and notice what has finished. Never waits for the device, and starts
        a bounded amount of work, since its caller may be a host in the middle of a step."""

    def close(self) -> None:
        """Wait for copies under way and free what the device holds. Idempotent. The pool stays open."""


class LayeredLoad(Protocol):
    """A load whose parts a computation waits for one by one (`KVLayout`). May be used by several of the host's
    threads."""

    @property
    def ticket(self) -> Ticket:
        """For the thread that drives the device."""

    def wait(self, part: int) -> None:
        """What the calling thread gives to its compute stream from now on runs after this part, and all parts before
        it, are in their blocks. Idempotent."""


class LayerDevice(Protocol):
    """A device that can load under a computation. These calls are made by the host's thread, in between those of the
    thread that drives the device."""

    @property
    def num_parts(self) -> int: ...

    @property
    def layer_figures(self) -> LayerFigures:
        """By which way it loads, and how fast. For any thread."""

    def load_layers(self, blocks: Sequence[int], slots: Sequence[int], after: Fence | None) -> LayeredLoad:
        """Start to copy slot `slots[i]` to block `blocks[i]`, part by part; the blocks are written once `after` has
        finished. Never waits. After an error nothing is under way, unless the device is lost; then the error is the
        driver's, and the next call fails as well."""

    def load_now(self, blocks: Sequence[int], slots: Sequence[int], after: Fence | None) -> None:
        """Copy the slots to the blocks, and wait for it. For a load that no other way could bring."""


class Launcher(Protocol):
    """The part of a device whose programs and transfers must be launched in order with the host's own (JAX). All but
    `stop` and `take_staged` are for the host's thread, which has made the device: on another, `gather` and `expect`
    raise `CopyError`, and the loads of `write` fail.

    Hosts of one model launch the same programs in the same order. So what is launched depends on the arguments of these
    calls alone: not on how far the copies are, nor on whether an op has failed here or the device has been stopped.
    What is not ready is waited for.
    """

    def gather(self, blocks: Sequence[int]) -> Fence:
        """Begin to launch what reads the blocks of a store, and return the `after` of its `launch_store`: the first
        blocks are copied while `launch_rest` goes on. Raises `CopyError`, and then has launched nothing."""

    def launch_rest(self) -> None:
        """Launch the rest of the gather. Waits while memory in flight is used up, so the caller has queued the store by
        then, and keeps no reference to its fence. Errors are in the tickets."""

    def expect(self, op_id: int, num_blocks: int) -> Fence:
        """The `after` of the `launch_load` of this op, with which it only stages its bytes."""

    def write(self, launches: Sequence[LoadLaunch]) -> None:
        """Launch what writes the blocks of these loads. Waits for those that are not staged. Errors are in the
        tickets."""

    def take_staged(self) -> list[StagedLoad]:
        """The loads of which pieces have been staged since the last call."""

    def stop(self) -> None:
        """Ops that still need the host fail. May be called by any thread. Idempotent."""


def checked(what: str, numbers: Sequence[int], end: int, why: str = "") -> Int64Array:
    """The numbers of blocks or slots, as an array. Raises `CopyError` unless each is one from 0 to `end - 1`."""
    values = np.array(numbers, np.int64)
    if len(values) and not 0 <= values.min() <= values.max() < end:
        allowed = f"0 to {end - 1}{why}" if end else "none"
        raise CopyError(f"{what} {values.min()} to {values.max()}; allowed: {allowed}")
    return values


def checked_slots(pool: SlotPool, slots: Sequence[int], blocks: Sequence[int]) -> Int64Array:
    """As `checked`, for the slots of an op. Raises `CopyError` also unless there are as many blocks."""
    if len(blocks) != len(slots):
        raise CopyError(f"{len(blocks)} blocks and {len(slots)} slots; allowed: as many of each")
    return checked("slots", slots, pool.pinned_slots, ", which are pinned")
