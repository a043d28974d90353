"""The node's memory: carries out what the budget decides, with real extents."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

from kvstow.config import HugePages
from kvstow.errors import PinError
from kvstow.memory.budget import Close, Create, Give, MemoryBudget, Recall, Step, TakeBack
from kvstow.memory.extents import Extent, Populator

logger = logging.getLogger("kvstow.extents")


class NodeMemory:
    """The extents of a `MemoryBudget`, populated in the background.

    `apply` after each change of the budget, and handle the steps that it returns before any client is served. Not
    locked: calls come one at a time, like those of the budget; `populator` has a thread of its own.

    Extents that are to be closed may still be mapped by a process that no book knows. So they are given up: they count
    as allocated, and are closed once the kernel says that no process maps them (`free_given_up`).
    """

    def __init__(self, budget: MemoryBudget, populator: Populator, *, huge_pages: HugePages = "advised") -> None:
        """Takes over the populator."""
        self.budget = budget
        self.populator = populator
        self.huge_pages = huge_pages
        self.error: PinError | None = None
        """Why an extent could not be created, until it was."""
        self.given_up: list[Extent] = []
        """Extents that are not used any more, and that a process may still map."""
        self._extents: dict[int, Extent] = {}
        self._missing: dict[int, Create] = {}
        self._rows: dict[int, int] = {}

    def apply(self) -> list[Step]:
        """Decide and carry out. Returns the steps: of a `Recall`, the caller evicts the row's blocks and asks clients
        to let go; of a `Give`, the last one of a row makes its slots available as they are populated."""
        steps = self.budget.plan()
        for step in steps:
            self._carry_out(step)
        self._create_missing()
        if any(isinstance(step, Close) for step in steps):
            self.free_given_up()
        return steps

    def restore(self, number: int, extent: Extent, row: int | None) -> None:
        """An extent of an earlier service, which the budget knows. Takes it over."""
        self._extents[number] = extent
        if row is not None:
            self._rows[number] = extent.row = row
        self.populator.add(extent)

    def give_up(self, fd: int) -> None:
        """Memory of an earlier service that is not used any more. Takes over the descriptor. `free_given_up` then
        counts it."""
        self.given_up.append(Extent(fd, os.fstat(fd).st_size, self.huge_pages, None))

    def free_given_up(self) -> bool:
        """Close what no process maps any more. Returns whether that was anything: the budget can decide anew."""
        left = [extent for extent in self.given_up if not extent.close_if_unused()]
        is_less, self.given_up = len(left) < len(self.given_up), left
        self.budget.given_up_bytes = sum(extent.num_bytes for extent in left)
        return is_less

    def retry(self) -> None:
        """Try again what memory was refused for."""
        self._create_missing()
        self.populator.retry()

    def extent(self, number: int) -> Extent | None:
        """Its descriptor may be sent to clients up to its watermark; None while it could not be created."""
        return self._extents.get(number)

    def extents(self) -> Mapping[int, Extent]:
        """Those that exist, by number, without those that were given up."""
        return self._extents

    def close(self) -> None:
        """Stop populating and let go of all extents; idempotent. A keeper has them still."""
        self.populator.close()
        for extent in (*self._extents.values(), *self.given_up):
            extent.close()
        self._extents.clear()
        self.given_up.clear()

    def _carry_out(self, step: Step) -> None:
        match step:
            case Create():
                self._missing[step.extent] = step
            case Give():
                self._set_row(step.extent, step.row)
            case TakeBack():
                self._set_row(step.extent, None)
            case Close():
                self._close(step.extent)
            case Recall():
                for number in step.extents:
                    self._set_row(number, None)

    def _set_row(self, number: int, row: int | None) -> None:
        """The populator takes it into account from its next chunk on."""
        if row is None:
            self._rows.pop(number, None)
        else:
            self._rows[number] = row
        extent = self._extents.get(number)
        if extent is not None:
            extent.row = row

    def _create_missing(self) -> None:
        before, self.error = self.error, None
        for number, step in list(self._missing.items()):
            try:
                extent = Extent.create(step.num_bytes, self.huge_pages, step.numa_node)
            except PinError as error:
                if before is None or before.reason != error.reason:  # this is tried again and again
                    logger.warning("an extent is missing: %s", error)
                self.error = error
                return
            del self._missing[number]
            self.restore(number, extent, self._rows.get(number))

    def _close(self, number: int) -> None:
        self._missing.pop(number, None)
        self._rows.pop(number, None)
        extent = self._extents.pop(number, None)
        if extent is not None:
            self.populator.discard(extent)
            self.given_up.append(extent)
