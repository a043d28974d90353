"""The copies of one direction, in batches that take turns with a few staging buffers.

Guarantees
- A batch accesses the KV cache after its op's fence, in the order in which ops were queued. Work of the host never
  waits for a batch.
- A buffer is reused after its batch has finished. The device waits for that on its own, so it can be given more batches
  than there are buffers, and the link is not idle while this thread waits for the interpreter.
- `advance` never waits for the device. It begins as many batches as have finished since the last call, and at most
  `per_advance` more. So the device's queue does not shrink between calls, and the cost of a call is bounded by the time
  since the last one (a batch costs the host 50 us and keeps the link busy for 0.9 ms) plus `per_advance` batches.
- After an error no further batch of the op begins, and the op fails only when those under way have finished. If the
  driver refuses even to record the events that show this, the streams must become idle first.

One thread uses a copier, and has made the context current. If `advance` raises an error that is not the driver's, the
state of the device is unknown, and only `drain` may follow.

A batch has two halves on two streams. A store first runs the kernel that gathers pages, on `kv`, and then the copies,
on its buffer's `link`. A load first runs the copies, on `link`, and then the kernel that scatters pages, on `kv`, where
its direct copies run as well, because they write the KV cache. So the kernel of one batch runs during the copies of
another.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from importlib.resources import files
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt

from kvstow.devices.base import Fence, TicketState
from kvstow.devices.cuda.context import BatchMarks, CudaContext, CudaFence, StagingBuffer, Timer, new_stream
from kvstow.devices.cuda.driver import AccessOrder, Driver, DriverError, Handle, Int64Array
from kvstow.devices.cuda.plan import PIECE, BatchedCopies, Copies, Split
from kvstow.errors import CopyError

MAX_BLOCKS = 1000
"""Blocks per launch of a kernel. Their numbers then just fit into the 4 KiB that a kernel's arguments may have."""

_THREADS = 128
"""Threads per thread block."""


@cache
def machine_code(driver: Driver, capability: tuple[int, int]) -> bytes:
    """The machine code of pages.cu. It is compiled once per process and kind of GPU."""
    source = files("kvstow.devices.cuda").joinpath("pages.cu").read_text()
    return driver.compile(source, capability)


def load_kernels(context: CudaContext, names: Sequence[str], undo: ExitStack) -> dict[str, Handle]:
    """Load these functions of pages.cu. `undo` unloads them."""
    driver = context.driver
    module = driver.load_module(machine_code(driver, driver.compute_capability(context.ordinal)))
    undo.callback(driver.unload_module, module)
    return {name: driver.get_function(module, name) for name in names}


def copy_to_device(driver: Driver, values: npt.NDArray[np.void], undo: ExitStack) -> int:
    """Copy an array to device memory, which `undo` frees. Returns its address."""
    address = driver.allocate(values.nbytes)
    undo.callback(driver.free, address)
    driver.write(address, values)
    return address


class _PageArguments(ctypes.Structure):
    """The arguments of both kernels, in their order (pages.cu)."""

    _fields_ = [
        ("pieces", ctypes.c_uint64),
        ("staging", ctypes.c_uint64),
        ("block_bytes", ctypes.c_uint64),
        ("blocks", ctypes.c_int32 * MAX_BLOCKS),
    ]


class PageKernels:
    """Moves the pages described by `pieces` (dtype `plan.PIECE`) between the KV cache and staging buffers, where a
    block takes `block_bytes`. Used by one thread. `undo` frees the memory on the device."""

    def __init__(self, context: CudaContext, pieces: npt.NDArray[np.void], block_bytes: int, undo: ExitStack) -> None:
        self._driver = context.driver
        self._functions = load_kernels(context, ("gather", "scatter"), undo)
        self._table = copy_to_device(self._driver, pieces, undo)
        self._num_pieces, self._block_bytes = len(pieces), block_bytes
        self._arguments = _PageArguments()
        self._blocks = np.ctypeslib.as_array(self._arguments.blocks)
        self._pointers = pointers_to_fields(self._arguments)

    def launch(self, name: Literal["gather", "scatter"], staging: int, blocks: Int64Array, stream: Handle) -> None:
        """Move the pages of `blocks`: `gather` to the staging buffer at address `staging`, `scatter` from it."""
        for start in range(0, len(blocks), MAX_BLOCKS):
            some, at = blocks[start : start + MAX_BLOCKS], staging + start * self._block_bytes
            self._launch(name, range(self._num_pieces), at, self._block_bytes, some, stream)

    def move(self, rows: range, staging: int, block_bytes: int, blocks: Int64Array, stream: Handle) -> None:
        """Scatter these rows of `pieces` alone, from a buffer where a block takes `block_bytes`, to up to `MAX_BLOCKS`
        blocks."""
        self._launch("scatter", rows, staging, block_bytes, blocks, stream)

    def _launch(
        self,
        name: Literal["gather", "scatter"],
        rows: range,
        staging: int,
        block_bytes: int,
        blocks: Int64Array,
        stream: Handle,
    ) -> None:
        arguments = self._arguments
        self._blocks[: len(blocks)] = blocks
        arguments.pieces, arguments.staging = self._table + rows.start * PIECE.itemsize, staging
        arguments.block_bytes = block_bytes
        # The driver copies the arguments during the call.
        pointers = ctypes.addressof(self._pointers)
        self._driver.launch(self._functions[name], (len(rows), len(blocks)), _THREADS, stream, pointers)


def pointers_to_fields(arguments: ctypes.Structure) -> ctypes.Array[ctypes.c_uint64]:
    """Pointers to the fields of `arguments`, as `Driver.launch` takes them. `arguments` must outlive them."""
    start = ctypes.addressof(arguments)
    offsets = [getattr(type(arguments), field[0]).offset for field in arguments._fields_]
    return (ctypes.c_uint64 * len(offsets))(*(start + offset for offset in offsets))


class Transfer:
    """The ticket of an op, with all that its batches need before a copier takes it. The batches begin and finish in
    order. Used by one thread."""

    def __init__(
        self,
        blocks: Int64Array,
        num_batches: int,
        staged: BatchedCopies,
        direct: BatchedCopies,
        after: Fence | None,
    ) -> None:
        """`blocks`, `staged` and `direct` are in the order of the slots in memory."""
        self.blocks, self.num_batches, self.staged, self.direct = blocks, num_batches, staged, direct
        self.after = after
        self.begun = self.finished = 0
        self.source_free = False
        self.fence_queued = False  # the copier's stream waits for the fence
        self.error: BaseException | None = None
        self.seconds = 0.0

    def may_touch_blocks(self) -> bool:
        """Whether work on the KV cache may be queued. The device waits for a CUDA fence; any other must be reached
        first. A fence that raises fails the transfer."""
        if self.after is None or isinstance(self.after, CudaFence):
            return True
        try:
            reached = self.after.query()
        except Exception as error:  # noqa: BLE001 - the failure of one op, reported by its ticket
            self.fail(error)
            return False
        if reached:
            self.after = None
        return reached

    def fail(self, error: BaseException) -> None:
        """Begin no further batch. Keeps the first error, without its traceback, which would keep the op and its fence
        alive until a garbage collection."""
        self.error = self.error or error.with_traceback(None)

    def poll(self) -> TicketState:
        if self.error is not None:
            return TicketState.FAILED if self.finished >= self.begun else TicketState.PENDING
        if self.finished == self.num_batches:
            return TicketState.DONE
        return TicketState.SOURCE_FREE if self.source_free else TicketState.PENDING


_Value = TypeVar("_Value")


@dataclass(slots=True)
class Batch:
    """`is_marked`: whether the event `finished` was recorded after all work of the batch."""

    transfer: Transfer
    number: int
    buffer: StagingBuffer
    marks: BatchMarks
    is_marked: bool = True


class Copier:
    """The copies of stores, or of loads. The slots of a load belong to it, so copying them may begin before its fence.
    `undo` frees what the copier holds; call `drain` first. `kernels` is None if no region is staged."""

    def __init__(
        self,
        driver: Driver,
        split: Split,
        kernels: PageKernels | None,
        *,
        stores: bool,
        num_buffers: int,
        batches_ahead: int,
        per_advance: int,
        undo: ExitStack,
    ) -> None:
        self._stores, self._per_advance = stores, per_advance
        self._order: AccessOrder = "stream" if stores else "any"
        self._driver, self._split, self._kernels = driver, split, kernels
        self._kv = new_stream(driver, undo, urgent=True)  # the kernels are short, and the link waits for them
        self._buffers = deque(StagingBuffer(driver, split.staging_bytes, undo) for _ in range(num_buffers))
        self._marks = deque(BatchMarks(driver, undo) for _ in range(batches_ahead))
        self._last_copied: Handle | None = None  # recorded after the copies that were queued last
        self._waiting: deque[Transfer] = deque()
        self._flying: deque[Batch] = deque()  # begun and not finished
        self._unended: deque[Batch] = deque()  # the last of these, whose second halves are not queued yet

    def queue(self, transfer: Transfer) -> None:
        """Queue a transfer; `advance` starts it."""
        self._waiting.append(transfer)

    def advance(self) -> None:
        """Reclaim finished batches, then begin new ones."""
        left = self._reclaim() + self._per_advance
        self._end_begun()
        while left and self._marks and self._has_buffer() and (transfer := self._next()) is not None:
            self._begin(Batch(transfer, transfer.begun, self._buffers[0], self._marks.popleft()))
            self._buffers.rotate(-1)
            self._end_begun()
            left -= 1
        for batch in self._flying if self._stores and not self._split.has_direct else ():
            if batch.number == batch.transfer.num_batches - 1:
                _attempt(batch, self._mark_source_free)

    def drain(self) -> None:
        """Wait for the batches under way, and fail the ops that are not complete. Raises `DriverError` after trying
        everything; then the device is lost, and accesses no memory."""
        unbegun = [transfer for transfer in self._waiting if transfer.begun < transfer.num_batches]
        for transfer in [*unbegun, *(batch.transfer for batch in self._unended)]:
            transfer.fail(CopyError("the device was closed before the copy was complete"))
        self._waiting.clear()
        while self._unended:
            self._end(self._unended.popleft())
        with ExitStack() as attempts:
            attempts.callback(self._reclaim)
            for stream in (self._kv, *(buffer.link for buffer in self._buffers)):
                attempts.callback(twice, partial(self._driver.synchronize, stream))

    # The life of a batch.

    def _next(self) -> Transfer | None:
        """The first transfer that has a batch to begin. None if there is none, or if it still waits for its fence."""
        while self._waiting:
            transfer = self._waiting[0]
            if transfer.error is None and transfer.begun < transfer.num_batches:
                if not self._stores or transfer.may_touch_blocks():
                    return transfer
                if transfer.error is None:
                    return None
            self._waiting.popleft()
        return None

    def _has_buffer(self) -> bool:
        """Whether the next buffer is free, or will be at an event that the device can wait for."""
        return len(self._unended) < len(self._buffers)

    def _begin(self, batch: Batch) -> None:
        turns, first = len(self._buffers), self._streams(batch)[0]
        if len(self._flying) >= turns:
            freed = self._flying[-turns].marks.finished
            _attempt(batch, lambda _: self._driver.wait_event(first, freed))
        batch.transfer.begun += 1
        self._flying.append(batch)
        self._unended.append(batch)
        _attempt(batch, self._first_half)
        _mark(batch, lambda batch: self._driver.record_event(batch.marks.halfway, first))

    def _end_begun(self) -> None:
        while self._unended:
            transfer = self._unended[0].transfer
            if not self._stores and transfer.error is None and not transfer.may_touch_blocks():
                return
            self._end(self._unended.popleft())

    def _end(self, batch: Batch) -> None:
        """Queue the second half. A failed batch gets its event, too, and `finished` then shows that none of it is under
        way."""
        _, second = self._streams(batch)
        _mark(batch, lambda batch: self._driver.wait_event(second, batch.marks.halfway))
        _attempt(batch, self._second_half)
        _mark(batch, lambda batch: self._driver.record_event(batch.marks.finished, second))

    def _reclaim(self) -> int:
        """End the batches that have finished since the last call, and return their number."""
        count = 0
        while len(self._flying) > len(self._unended) and self._has_finished(self._flying[0]):
            batch = self._flying.popleft()
            _attempt(batch, _count_seconds)
            batch.transfer.finished += 1
            self._marks.append(batch.marks)
            count += 1
        return count

    def _has_finished(self, batch: Batch) -> bool:
        try:
            return twice(partial(self._is_past, batch))
        except DriverError as error:  # the device is lost, and what was under way with it
            batch.transfer.fail(error)
            return True

    def _is_past(self, batch: Batch) -> bool:
        if batch.is_marked:
            return self._driver.is_reached(batch.marks.finished)
        return all(self._driver.is_idle(stream) for stream in self._streams(batch))

    # The halves.

    def _streams(self, batch: Batch) -> tuple[Handle, Handle]:
        """The stream of the batch's first half, and that of its second."""
        return (self._kv, batch.buffer.link) if self._stores else (batch.buffer.link, self._kv)

    def _first_half(self, batch: Batch) -> None:
        if self._stores:
            self._move_pages(batch)
        else:
            self._copy_staged(batch, batch.marks.halfway)

    def _second_half(self, batch: Batch) -> None:
        if self._stores:
            self._copy_staged(batch, batch.marks.finished)
        else:
            self._move_pages(batch)
        if self._split.has_direct:
            self._copy(batch.transfer.direct.batch(batch.number), batch.marks.direct_timer, self._streams(batch)[1])

    def _move_pages(self, batch: Batch) -> None:
        """Run the kernel, after the op's fence."""
        transfer = batch.transfer
        if isinstance(transfer.after, CudaFence) and not transfer.fence_queued:
            transfer.after.hold_back(self._kv)
            transfer.fence_queued = True
        if self._kernels is not None:
            start = batch.number * self._split.batch_blocks
            blocks = transfer.blocks[start : start + self._split.batch_blocks]
            self._kernels.launch("gather" if self._stores else "scatter", batch.buffer.address, blocks, self._kv)

    def _copy_staged(self, batch: Batch, copied: Handle) -> None:
        """Queue the copies behind those of the batch before. The caller records `copied` after them.

        A copy engine stays with a stream as long as it has work. With all batches on one stream, the copy of a sampled
        token waited for a whole store, which takes 39 ms for 2 GiB. With one stream per buffer it waits 0.9 ms at most.
        """
        if self._last_copied is not None:
            self._driver.wait_event(batch.buffer.link, self._last_copied)
        self._last_copied = copied
        if self._kernels is not None:
            device, host, size = batch.transfer.staged.batch(batch.number)
            self._copy(Copies(device + batch.buffer.address, host, size), batch.marks.staged_timer, batch.buffer.link)

    def _copy(self, copies: Copies, timer: Timer, stream: Handle) -> None:
        device, host, size = copies
        target, source = (host, device) if self._stores else (device, host)
        timer.start(stream)
        self._driver.copy(target, source, size, self._order, stream)
        timer.stop(stream)

    def _mark_source_free(self, batch: Batch) -> None:
        batch.transfer.source_free = batch.transfer.source_free or self._driver.is_reached(batch.marks.halfway)


def _attempt(batch: Batch, step: Callable[[Batch], None]) -> None:
    """Do a step of a batch unless an earlier one has failed. Its failure fails the transfer."""
    if batch.transfer.error is None:
        try:
            step(batch)
        except Exception as error:  # noqa: BLE001 - the failure of one op, reported by its ticket
            batch.transfer.fail(error)


def _mark(batch: Batch, step: Callable[[Batch], None]) -> None:
    """Do a step that the batch's events depend on, even after a failure."""
    try:
        step(batch)
    except Exception as error:  # noqa: BLE001 - as above
        batch.transfer.fail(error)
        batch.is_marked = False


def twice(call: Callable[[], _Value]) -> _Value:
    """Call again if the first call fails: a call that waits or queries may report an error of earlier work without
    waiting. If the second call fails, too, the device is lost."""
    try:
        return call()
    except DriverError:
        return call()


def _count_seconds(batch: Batch) -> None:
    batch.transfer.seconds += batch.marks.staged_timer.take() + batch.marks.direct_timer.take()
