"""The copies of one direction: batch by batch through a few staging buffers, by turns.

Guarantees
- A batch touches the KV cache after its op's fence, in the order in which ops were submitted. Work of the host
  never waits for a batch.
- A buffer is used again after its batch has finished: the device waits for that by itself, so more batches can be
  given to it than there are buffers, and the link is not idle while this thread waits for the interpreter.
- `advance` never waits for the device. It begins as many batches as have finished since the last call, and at most
  `per_look` more: so the device's queue does not shrink between calls, and the cost of a call is bounded by the time
  since the last (a batch costs the host 50 us and keeps the link busy for 0.9 ms) plus `per_look` batches.
- After an error no further batch of the op is begun, and those under way are waited for before it counts as failed.
  If the driver refuses even the events that would tell, it waits until the streams are idle.

Assumes one thread, which has made the context current. An error that is not the driver's comes out of `advance`: what
is under way is unknown then, and only `drain` may follow.

A batch has two halves on two streams: a store's are on `kv` the kernel that gathers pages, then on its buffer's
`link` the copies; a load's are on `link` the copies, then on `kv` the kernel that scatters pages (and the direct
copies, as they write the KV cache). So the kernel of one batch runs while another's copies do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

from kvstow.devices.cuda.driver import AccessOrder, Driver, DriverError, Handle
from kvstow.devices.cuda.fence import CudaFence
from kvstow.devices.cuda.kernels import PageKernels
from kvstow.devices.cuda.plan import Copies, Split
from kvstow.devices.cuda.staging import BatchMarks, StagingBuffer, Timer, new_stream
from kvstow.devices.cuda.transfer import Transfer
from kvstow.errors import CopyError

_Value = TypeVar("_Value")


@dataclass(slots=True)
class Batch:
    """`is_marked`: whether the event `finished` comes after all that the batch gave to the device."""

    transfer: Transfer
    number: int
    buffer: StagingBuffer
    marks: BatchMarks
    is_marked: bool = True


class Copier(ABC):
    """`undo` frees what the copier holds; call `drain` before. `kernels` is None where no region is staged."""

    _kernel: Literal["gather", "scatter"]
    _order: AccessOrder

    def __init__(
        self,
        driver: Driver,
        split: Split,
        kernels: PageKernels | None,
        *,
        num_buffers: int,
        batches_ahead: int,
        per_look: int,
        undo: ExitStack,
    ) -> None:
        self._per_look = per_look
        self._driver, self._split, self._kernels = driver, split, kernels
        self._kv = new_stream(driver, undo, urgent=True)  # the kernels are short, and the link waits for them
        self._buffers = deque(StagingBuffer(driver, split.staging_bytes, undo) for _ in range(num_buffers))
        self._marks = deque(BatchMarks(driver, undo) for _ in range(batches_ahead))
        self._last_copied: Handle | None = None  # the event after the copies that were queued last
        self._waiting: deque[Transfer] = deque()
        self._flying: deque[Batch] = deque()  # begun and not finished
        self._unended: deque[Batch] = deque()  # the last of them, whose second halves the device has not yet

    def submit(self, transfer: Transfer) -> None:
        """Queue a transfer; `advance` starts it."""
        self._waiting.append(transfer)

    def advance(self) -> None:
        """Take back what has finished, then give the device what it may have."""
        left = self._take_back() + self._per_look
        self._end_begun()
        while left and self._marks and self._is_buffer_given_back() and (transfer := self._next()) is not None:
            self._begin(Batch(transfer, transfer.begun, self._buffers[0], self._marks.popleft()))
            self._buffers.rotate(-1)
            self._end_begun()
            left -= 1

    def drain(self) -> None:
        """Wait for what is under way; what is not complete then has failed. Raises `DriverError` after all was tried:
        the device is lost then, and touches no memory."""
        unbegun = [transfer for transfer in self._waiting if transfer.begun < transfer.num_batches]
        for transfer in [*unbegun, *(batch.transfer for batch in self._unended)]:
            transfer.fail(CopyError("the device was closed before the copy was complete"))
        self._waiting.clear()
        while self._unended:
            self._end(self._unended.popleft())
        with ExitStack() as attempts:
            attempts.callback(self._take_back)
            for stream in (self._kv, *(buffer.link for buffer in self._buffers)):
                attempts.callback(_twice, partial(self._driver.synchronize, stream))

    # What the directions differ in.

    @abstractmethod
    def _streams(self, batch: Batch) -> tuple[Handle, Handle]:
        """The streams of a batch's first and of its second half."""

    @abstractmethod
    def _may_begin(self, transfer: Transfer) -> bool: ...

    @abstractmethod
    def _may_end(self, transfer: Transfer) -> bool: ...

    @abstractmethod
    def _first_half(self, batch: Batch) -> None: ...

    @abstractmethod
    def _second_half(self, batch: Batch) -> None: ...

    # The life of a batch.

    def _next(self) -> Transfer | None:
        """The first transfer with a batch to begin, if it may."""
        while self._waiting:
            transfer = self._waiting[0]
            if transfer.error is None and transfer.begun < transfer.num_batches:
                if self._may_begin(transfer):
                    return transfer
                if transfer.error is None:
                    return None
            self._waiting.popleft()
        return None

    def _is_buffer_given_back(self) -> bool:
        """Whether the device knows, if not now then in order, when the next buffer is free: batches take turns."""
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
        while self._unended and self._may_end(self._unended[0].transfer):
            self._end(self._unended.popleft())

    def _end(self, batch: Batch) -> None:
        """A failed batch ends too: `finished` then says that nothing of it is under way any more."""
        _, second = self._streams(batch)
        _mark(batch, lambda batch: self._driver.wait_event(second, batch.marks.halfway))
        _attempt(batch, self._second_half)
        _mark(batch, lambda batch: self._driver.record_event(batch.marks.finished, second))

    def _take_back(self) -> int:
        """How many batches have finished since the last call."""
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
            return _twice(partial(self._is_past, batch))
        except DriverError as error:  # the device is lost, and what was under way with it
            batch.transfer.fail(error)
            return True

    def _is_past(self, batch: Batch) -> bool:
        if batch.is_marked:
            return self._driver.is_reached(batch.marks.finished)
        return all(self._driver.is_idle(stream) for stream in self._streams(batch))

    # The halves.

    def _wait_fence(self, transfer: Transfer) -> None:
        """Let the stream of work on the KV cache wait for the op's fence."""
        if isinstance(transfer.after, CudaFence) and not transfer.fence_queued:
            transfer.after.hold_back(self._kv)
            transfer.fence_queued = True

    def _take_turn(self, batch: Batch, copied: Handle) -> None:
        """Let a batch's copies follow those before them; `copied` will be recorded after them.

        A copy engine stays with a stream until that has no more work: with all batches on one stream, a sampled
        token's copy waited for a whole store, 39 ms for 2 GiB, and with a stream for each buffer 0.9 ms at most.
        """
        if self._last_copied is not None:
            self._driver.wait_event(batch.buffer.link, self._last_copied)
        self._last_copied = copied

    def _run_kernel(self, batch: Batch) -> None:
        if self._kernels is None:
            return
        start = batch.number * self._split.batch_blocks
        blocks = batch.transfer.blocks[start : start + self._split.batch_blocks]
        self._kernels.launch(self._kernel, batch.buffer.address, blocks, self._kv)

    def _copy_staged(self, batch: Batch) -> None:
        if self._kernels is not None:
            device, host, size = batch.transfer.staged.batch(batch.number)
            self._copy(Copies(device + batch.buffer.address, host, size), batch.marks.staged_timer, batch.buffer.link)

    def _copy_direct(self, batch: Batch, stream: Handle) -> None:
        if self._split.has_direct:
            self._copy(batch.transfer.direct.batch(batch.number), batch.marks.direct_timer, stream)

    def _copy(self, copies: Copies, timer: Timer, stream: Handle) -> None:
        device, host, size = copies
        target, source = (host, device) if self._order == "stream" else (device, host)
        timer.start(stream)
        self._driver.copy(target, source, size, self._order, stream)
        timer.stop(stream)


class StoreCopier(Copier):
    """Device to host."""

    _kernel, _order = "gather", "stream"

    def advance(self) -> None:
        super().advance()
        for batch in self._flying:
            if batch.number == batch.transfer.num_batches - 1 and not self._split.has_direct:
                _attempt(batch, self._mark_source_free)

    def _streams(self, batch: Batch) -> tuple[Handle, Handle]:
        return self._kv, batch.buffer.link

    def _may_begin(self, transfer: Transfer) -> bool:
        return transfer.may_touch_blocks()

    def _may_end(self, transfer: Transfer) -> bool:
        return True

    def _first_half(self, batch: Batch) -> None:
        self._wait_fence(batch.transfer)
        self._run_kernel(batch)

    def _second_half(self, batch: Batch) -> None:
        self._take_turn(batch, batch.marks.finished)
        self._copy_staged(batch)
        self._copy_direct(batch, batch.buffer.link)

    def _mark_source_free(self, batch: Batch) -> None:
        batch.transfer.source_free = batch.transfer.source_free or self._driver.is_reached(batch.marks.halfway)


class LoadCopier(Copier):
    """Host to device. The slots of a waiting load belong to its op, so reading them may begin before all else."""

    _kernel, _order = "scatter", "any"

    def _streams(self, batch: Batch) -> tuple[Handle, Handle]:
        return batch.buffer.link, self._kv

    def _may_begin(self, transfer: Transfer) -> bool:
        return True

    def _may_end(self, transfer: Transfer) -> bool:
        return transfer.error is not None or transfer.may_touch_blocks()

    def _first_half(self, batch: Batch) -> None:
        self._take_turn(batch, batch.marks.halfway)
        self._copy_staged(batch)

    def _second_half(self, batch: Batch) -> None:
        self._wait_fence(batch.transfer)
        self._run_kernel(batch)
        self._copy_direct(batch, self._kv)


def _attempt(batch: Batch, step: Callable[[Batch], None]) -> None:
    """Do a step of a batch, unless one has failed before; its failure is the transfer's."""
    if batch.transfer.error is None:
        try:
            step(batch)
        except Exception as error:  # noqa: BLE001 - the failure of one op, reported by its ticket
            batch.transfer.fail(error)


def _mark(batch: Batch, step: Callable[[Batch], None]) -> None:
    """Do a step that gives the batch's events their meaning, even after a failure."""
    try:
        step(batch)
    except Exception as error:  # noqa: BLE001 - as above
        batch.transfer.fail(error)
        batch.is_marked = False


def _twice(call: Callable[[], _Value]) -> _Value:
    """Calls that wait or query also report errors of earlier work, and then have not waited. If the second attempt
    fails too, the device is lost."""
    try:
        return call()
    except DriverError:
        return call()


def _count_seconds(batch: Batch) -> None:
    batch.transfer.seconds += batch.marks.take_seconds()
