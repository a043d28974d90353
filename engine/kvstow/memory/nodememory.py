"""The node's memory: carries out the steps of the budget with real extents."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable

from kvstow.config import HugePages
from kvstow.errors import PinError
from kvstow.memfd import MemfdEnds, is_open_elsewhere, seal_writes
from kvstow.memory.budget import Close, Create, MemoryBudget, Step
from kvstow.memory.extents import Extent, Populator

logger = logging.getLogger("kvstow.extents")

_MOST_PINNED = 3
"""After this many pinned extents, `close_given_up` checks no more of them: the kernel takes 0.2 s for each."""


class NodeMemory:
    """The extents of a `MemoryBudget`, which are populated in the background.

    The owner calls `apply` after each change of the budget, and handles the returned steps before it serves any client.
    Not locked, so calls come one at a time, like those of the budget. `populator` has a thread of its own.

    When an extent that was handed out is closed, a process that the budget does not know may still have it mapped,
    pinned or open, because a client may report too early that it has released it. So the extent is given up: it counts
    as allocated until the kernel reports that its memory is free. `close_given_up` seals and closes it when no process
    has it open and none of its pages is pinned. `settle` notices the end of its file, once the keeper has released it
    too. `kvstow.memfd` explains why each of these steps is needed.
    """

    def __init__(self, budget: MemoryBudget, populator: Populator, *, huge_pages: HugePages = "advised") -> None:
        """Takes over the populator."""
        self.budget = budget
        self.populator = populator
        self.huge_pages = huge_pages
        self.error: PinError | None = None
        """Why an extent is missing, until it could be created."""
        self.extents: dict[int, Extent] = {}
        """The extents by number, without those that were given up. Others may read it."""
        self.given_up: dict[int, Extent] = {}
        """Extents that are never used again, but that a process may still have."""
        self._ends: MemfdEnds | None = None
        self._missing: dict[int, Create] = {}
        """Extents that could not be created yet."""

    def apply(self) -> list[Step]:
        """Let the budget plan, carry out its steps, and return them. After a `Recall`, the caller evicts the row's
        blocks and asks clients to release it. After the last `Give` of a row, its slots become available as they are
        populated."""
        steps = self.budget.plan()
        for step in steps:
            if isinstance(step, Create):
                self._missing[step.extent] = step
            elif isinstance(step, Close):
                self._close(step.extent)
        for number, extent in self.extents.items():  # the populator reads `row` before each chunk
            extent.row = self.budget.extents[number].waiting_row
        self._create_missing()
        self.close_given_up([step.extent for step in steps if isinstance(step, Close)])
        return steps

    def restore(self, number: int, extent: Extent) -> None:
        """Take over an extent of an earlier service. The budget has its record already."""
        self.extents[number] = extent
        extent.row = self.budget.extents[number].waiting_row
        self.populator.add(extent)

    def give_up(self, fd: int) -> None:
        """Give up memory of an earlier service that is never used again. Takes over the descriptor."""
        num_bytes = os.fstat(fd).st_size
        self.given_up[self.budget.restore_closed(num_bytes)] = Extent(fd, num_bytes, self.huge_pages, None)

    @property
    def waits(self) -> bool:
        """Whether memory that was given up is not free yet."""
        return bool(self.budget.closed)

    def close_given_up(self, numbers: Iterable[int] | None = None) -> None:
        """Close those of the given extents that no process uses any more, or of all that were given up. The keeper must
        release them before `settle`."""
        pinned = 0
        for number in [one for one in (self.given_up if numbers is None else numbers) if one in self.given_up]:
            extent = self.given_up[number]
            try:
                is_unused = not is_open_elsewhere(extent.fd)
                if is_unused and not self._seal(number, extent):
                    is_unused = False
                    pinned += 1
                if is_unused:
                    if self._ends is None:
                        self._ends = MemfdEnds()
                    self._ends.watch(extent.fd, number)
            except OSError as error:
                logger.warning("memory cannot be given back yet: %s", error.strerror)
                is_unused = False
            del self.given_up[number]
            if is_unused:
                extent.close()
            else:
                self.given_up[number] = extent  # at the end, so that the others are checked before it
                self.budget.keep(number)
            if pinned == _MOST_PINNED:
                break

    def _seal(self, number: int, extent: Extent) -> bool:
        """Seal the extent against writing. Returns False if a page is pinned. If a client has sealed the seals, the
        kernel does not report pinned pages. Then this returns False until all clients that had the extent have
        ended."""
        try:
            return seal_writes(extent.fd)
        except PermissionError:
            return not self.budget.closed[number].had

    def settle(self) -> bool:
        """Record which closed extents are free by now. A process keeps the others. Returns whether anything has
        changed, so that the budget must plan again."""
        remaining = {*self.given_up, *(() if self._ends is None else self._ends.remaining())}
        is_changed = False
        for number, extent in list(self.budget.closed.items()):
            if number not in remaining:
                self.budget.free(number)
                is_changed = True
            elif not extent.is_kept:
                self.budget.keep(number)
                is_changed = True
        return is_changed

    def retry(self) -> None:
        """Try again to create missing extents, and to populate after a failure."""
        self._create_missing()
        self.populator.retry()

    def close(self) -> None:
        """Stop populating and release all extents. A keeper still has them. Idempotent."""
        self.populator.close()
        for extent in (*self.extents.values(), *self.given_up.values()):
            extent.close()
        self.extents.clear()
        self.given_up.clear()
        if self._ends is not None:
            self._ends.close()

    def _create_missing(self) -> None:
        before, self.error = self.error, None
        for number, step in list(self._missing.items()):
            try:
                extent = Extent.create(step.num_bytes, self.huge_pages, step.numa_node)
            except PinError as error:
                if before is None or before.reason != error.reason:  # the node tries again and again
                    logger.warning("an extent cannot be created: %s", error)
                self.error = error
                return
            del self._missing[number]
            self.restore(number, extent)

    def _close(self, number: int) -> None:
        self._missing.pop(number, None)
        extent = self.extents.pop(number, None)
        if extent is not None:
            self.populator.discard(extent)
            if number in self.budget.closed:
                self.given_up[number] = extent
            else:  # no client was ever handed the extent
                extent.close()
