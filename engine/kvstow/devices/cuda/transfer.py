"""One op in a copier."""

from __future__ import annotations

from kvstow.devices.base import Fence, TicketState
from kvstow.devices.cuda.driver import Int64Array
from kvstow.devices.cuda.fence import CudaFence
from kvstow.devices.cuda.plan import BatchedCopies


class Transfer:
    """The ticket of an op, complete before a copier takes it. Its batches begin and finish in order. Used by one
    thread."""

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
