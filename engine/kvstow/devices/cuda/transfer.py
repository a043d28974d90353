"""One op on its way through a copier."""

from __future__ import annotations

from collections.abc import Callable

from kvstow.devices.base import Fence, TicketState
from kvstow.devices.cuda.driver import Int64Array
from kvstow.devices.cuda.fence import CudaFence
from kvstow.devices.cuda.plan import BatchedCopies


class Transfer:
    """The ticket of an op; for a load also what was staged. Its batches are begun in order and finish in order.

    Used by one thread. `advance` is what `poll` does first: it moves on all transfers of the copier. It raises only
    where the device is lost, and with it all that was under way.
    """

    def __init__(
        self,
        slots: tuple[int, ...],
        places: Int64Array,
        order: Int64Array,
        num_batches: int,
        staged: BatchedCopies,
        advance: Callable[[], None],
    ) -> None:
        """`slots` as the host gave them; `places[i]` is `slots[order[i]]`, ascending."""
        self.slots, self.places, self.order = slots, places, order
        self.num_batches, self.staged, self._advance = num_batches, staged, advance
        self.blocks: Int64Array | None = None
        self.direct: BatchedCopies | None = None
        self.after: Fence | None = None
        self.begun = self.finished = 0
        self.source_free = False
        self.fence_queued = False  # the copier's stream waits for the fence
        self.error: BaseException | None = None
        self.seconds = 0.0

    def commit(self, blocks: Int64Array, direct: BatchedCopies, after: Fence | None) -> None:
        """Say which blocks are read or written, in the order of `places`. Until then no batch touches the KV cache."""
        self.blocks, self.direct, self.after = blocks, direct, after

    def may_touch_blocks(self) -> bool:
        """Whether work on the KV cache may be given to the device. A CUDA fence is waited for there; any other has to
        be reached before. A fence that raises fails the transfer."""
        if self.blocks is None or self.after is None or isinstance(self.after, CudaFence):
            return self.blocks is not None
        try:
            reached = self.after.query()
        except Exception as error:  # noqa: BLE001 - the failure of one op, which its ticket tells
            self.fail(error)
            return False
        if reached:
            self.after = None
        return reached

    def fail(self, error: BaseException) -> None:
        """Begin no further batch. The first error stays."""
        self.error = self.error or error

    def poll(self) -> TicketState:
        if (state := self._state()) in (TicketState.DONE, TicketState.FAILED):
            return state
        try:
            self._advance()
        except Exception as error:  # noqa: BLE001 - poll raises nothing: the error travels in the ticket
            self.fail(error)
            self.finished = self.begun
        return self._state()

    def _state(self) -> TicketState:
        if self.error is not None:
            return TicketState.FAILED if self.finished >= self.begun else TicketState.PENDING
        if self.finished == self.num_batches and self.blocks is not None:
            return TicketState.DONE
        return TicketState.SOURCE_FREE if self.source_free else TicketState.PENDING
