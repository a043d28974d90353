"""The device protocol: what a data plane needs from whatever moves the bytes (CPU, CUDA, JAX).

Threads. One thread at a time calls a device and its tickets: the copy thread, or the host's thread if the device copies
without help. The host may make a `Fence` on any thread. A `Launcher` belongs to the host's thread; if there is one,
only it gives the device work.

Ordering. A store reads its blocks only after the compute work that `after` names. A load may read its slots at once;
it writes its blocks only after `after`. Compute work never waits for a store.

Slots. From its launch to the final state of its ticket the slots belong to the op: the control plane does not reuse
them, and the caller holds their memory (`SlotPool.hold`).

Errors. The ticket of an op carries its failure. `advance` raises if the device no longer knows which copies are under
way. The caller then closes the device, and only after that have its ops ended.
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
    """Only stores pass `SOURCE_FREE`, on the way to `DONE`: their blocks may be overwritten from then on. `DONE` and
    `FAILED` are final."""

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
        """The ticket of the load, for the thread that drives the device."""

    def wait(self, part: int) -> None:
        """Make the work that the calling thread gives to its compute stream from now on wait until this part, and all
        parts before it, are in their blocks. Idempotent."""


class LayerDevice(Protocol):
    """A device that can load under a computation. The host's thread makes these calls, between those of the thread that
    drives the device."""

    @property
    def num_parts(self) -> int: ...

    @property
    def layer_figures(self) -> LayerFigures:
        """The way by which it loads, and how fast that is. Any thread may read it."""

    def load_layers(self, blocks: Sequence[int], slots: Sequence[int], after: Fence | None) -> LayeredLoad:
        """Start to copy slot `slots[i]` to block `blocks[i]`, part by part; the blocks are written once `after` has
        finished. Never waits. After an error nothing is under way, unless the device is lost; then the error is the
        driver's, and the next call fails as well."""

    def load_now(self, blocks: Sequence[int], slots: Sequence[int], after: Fence | None) -> None:
        """Copy the slots to the blocks, and wait until that is done. It is the last resort, if `load_layers` and
        `Device.launch_load` have failed."""


class Launcher(Protocol):
    """The part of a device whose programs and transfers must be launched in order with the host's own (JAX). Only the
    host's thread, which has made the device, calls it, except for `stop` and `take_staged`. On another thread, `gather`
    and `expect` raise `CopyError`, and the loads of `write` fail.

    All hosts of one model launch the same programs in the same order. So the arguments of these calls alone decide what
    is launched, and not how far the copies are, whether an op has failed here, or whether the device has been stopped.
    A call waits for bytes that are not ready.
    """

    def gather(self, blocks: Sequence[int]) -> Fence:
        """Launch the first program that reads blocks of a store, so that they are copied while `launch_rest` launches
        the others. Returns the `after` for `launch_store`. If it raises `CopyError`, nothing was launched."""

    def launch_rest(self) -> None:
        """Launch the other programs of the last `gather`. Waits while memory in flight is used up, which only copies
        give back. So the caller has queued the store before, and keeps no reference to its fence. The tickets carry
        the errors."""

    def expect(self, op_id: int, num_blocks: int) -> Fence:
        """Announce a load. Returns the `after` for `launch_load`, which then only stages the bytes: `write` writes the
        blocks."""

    def write(self, launches: Sequence[LoadLaunch]) -> None:
        """Launch the programs that write the blocks of these loads. Waits for the loads that are not staged yet. The
        tickets carry the errors."""

    def take_staged(self) -> list[StagedLoad]:
        """The loads that have staged pieces since the last call."""

    def stop(self) -> None:
        """Fail the ops that still need the host's thread. Any thread may call it. Idempotent."""


def checked(what: str, numbers: Sequence[int], end: int, why: str = "") -> Int64Array:
    """The numbers of blocks or slots, as an array. Raises `CopyError` unless each is one from 0 to `end - 1`."""
    values = np.array(numbers, np.int64)
    if len(values) and not 0 <= values.min() <= values.max() < end:
        allowed = f"0 to {end - 1}{why}" if end else "none"
        raise CopyError(f"{what} {values.min()} to {values.max()}; allowed: {allowed}")
    return values


def checked_slots(pool: SlotPool, slots: Sequence[int], blocks: Sequence[int]) -> Int64Array:
    """Check the slots of an op as `checked` does. Also raises `CopyError` unless there are as many blocks as slots."""
    if len(blocks) != len(slots):
        raise CopyError(f"{len(blocks)} blocks and {len(slots)} slots; allowed: as many of each")
    return checked("slots", slots, pool.pinned_slots, ", which are pinned")
