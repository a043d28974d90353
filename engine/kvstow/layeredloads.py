"""Loads that a computation waits for while it runs: its host cannot take them back, so they must not fail.

There are three ways, and each is tried if the one before it has failed: a load by layer, under the computation; an
ordinary load, before the computation; one blocking copy. If a load by layer has failed once, the rank makes no more of
them. If the last way fails as well, the device is lost, and the error is raised, because the computation would read
blocks that were never written.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from kvstow.copythread import CopyThread
from kvstow.devices.base import Fence, LayerDevice, LayeredLoad, Ticket, TicketState
from kvstow.errors import CopyError
from kvstow.messages import LayerFigures, Op

logger = logging.getLogger("kvstow.dataplane")

_STAGED_TIMEOUT = 30.0
"""Seconds that an ordinary load may take. If it takes longer, the device hangs, and so does the host's own work."""

_LOOK = 0.5e-3
"""Seconds between two checks whether the load has ended."""


@dataclass(slots=True)
class _Share:
    """The ticket of one of several ops that are loaded together."""

    ticket: Ticket
    share: float

    @property
    def error(self) -> BaseException | None:
        return self.ticket.error

    @property
    def seconds(self) -> float:
        return self.ticket.seconds * self.share

    def poll(self) -> TicketState:
        return self.ticket.poll()


class LayeredLoads:
    """Makes loads that a computation waits for. Used by the host's thread. `hold` keeps the memory of the slots below a
    number in place."""

    def __init__(
        self,
        device: LayerDevice,
        copies: CopyThread,
        hold: Callable[[int], ExitStack],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._device, self._copies, self._hold, self._clock = device, copies, hold, clock
        self.num_parts = device.num_parts
        self.failure: str | None = None
        """Why loads by layer are off, or None."""

    @property
    def figures(self) -> LayerFigures:
        """The figures of the device, without a way if loads by layer are off. Any thread may read them."""
        figures = self._device.layer_figures
        return figures if self.failure is None else replace(figures, layer_way=None)

    def load(self, ops: Sequence[Op], after: Fence | None) -> LayeredLoad | None:
        """Load what `ops` name, once `after` is reached. If it returns None, it has waited until all bytes are in their
        blocks. Raises the error of the last way if all have failed."""
        if self.failure is None:
            try:
                return self._by_layer(ops, after)
            except Exception as error:
                self.failure = f"{type(error).__name__}: {error}"
                logger.exception("a load by layer has failed; it goes another way, and later loads do so at once")
        left = self._staged(ops, after)
        if left:
            with self._hold(_end(left)):
                self._device.load_now(*_pairs(left), after)
        return None

    def _by_layer(self, ops: Sequence[Op], after: Fence | None) -> LayeredLoad:
        blocks, slots = _pairs(ops)
        holds = [self._hold(_end([op])) for op in ops]
        try:
            load = self._device.load_layers(blocks, slots, after)
        except BaseException:
            for hold in holds:
                hold.close()
            raise
        for op, hold in zip(ops, holds, strict=True):
            self._copies.adopt(op, _Share(load.ticket, len(op.slots) / len(slots)), hold)
        return load

    def _staged(self, ops: Sequence[Op], after: Fence | None) -> list[Op]:
        """Wait for the ops. Returns those that failed."""
        self._copies.submit(ops, after)
        deadline = self._clock() + _STAGED_TIMEOUT
        while (failed := self._copies.failed_of(ops)) is None:
            if self._clock() > deadline:
                raise CopyError(f"a load that a computation needs has not ended after {_STAGED_TIMEOUT:g} s")
            self._copies.drive()
            self._copies.wait_completions(_LOOK)
        return failed


def _end(ops: Sequence[Op]) -> int:
    return max((slot for op in ops for slot in op.slots), default=-1) + 1


def _pairs(ops: Sequence[Op]) -> tuple[list[int], list[int]]:
    return [block for op in ops for block in op.blocks], [slot for op in ops for slot in op.slots]
