"""The node's memory: carries out what the budget decides, with real extents."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from kvstow.config import HugePages
from kvstow.errors import KvstowError, PinError
from kvstow.memfd import MemfdIdentity
from kvstow.memory.budget import MemoryBudget
from kvstow.memory.budgetsteps import Close, Create, Give, Recall, Step, TakeBack
from kvstow.memory.extents import Extent
from kvstow.memory.populator import Populator

NAME_PREFIX = "extent-"  # of extents at the keeper

logger = logging.getLogger("kvstow.extents")


class Kept(Protocol):
    """A descriptor at the keeper, and what was said of it."""

    @property
    def fd(self) -> int: ...

    @property
    def info(self) -> str: ...


class ExtentKeeper(Protocol):
    """Where descriptors survive the service. It does not raise: what it cannot keep now it keeps once it can."""

    def put(self, extents: Mapping[str, tuple[int, str]]) -> None:
        """Keep these descriptors, with these texts, under their names, in place of what the names stood for. The
        caller's descriptors stay the caller's."""

    def drop(self, names: Collection[str]) -> None:
        """Let go of these before returning."""


class NoKeeper:
    """Memory ends with the service."""

    def put(self, extents: Mapping[str, tuple[int, str]]) -> None:
        """Nothing to do."""

    def drop(self, names: Collection[str]) -> None:
        """Nothing to do."""


@dataclass(frozen=True, slots=True)
class _Label:
    """What a restarted service has to know of an extent."""

    num_bytes: int
    numa_node: int | None
    owner: int | None
    identity: MemfdIdentity
    place: Give | None

    def to_text(self) -> str:
        place = None if self.place is None else self.place[1:]
        return json.dumps([self.num_bytes, self.numa_node, self.owner, self.identity, place], separators=(",", ":"))

    @classmethod
    def from_text(cls, extent: int, text: str) -> _Label:
        num_bytes, numa_node, owner, identity, place = json.loads(text)
        return cls(
            num_bytes, numa_node, owner, MemfdIdentity(*identity), None if place is None else Give(extent, *place)
        )


class NodeMemory:
    """The extents of a `MemoryBudget`, populated in the background, and at the keeper.

    `apply` after each change of the budget, and handle the steps that it returns before any client is served. Not
    locked: calls come one at a time, like those of the budget; `populator` has a thread of its own.
    """

    def __init__(
        self,
        budget: MemoryBudget,
        populator: Populator,
        *,
        huge_pages: HugePages = "advised",
        keeper: ExtentKeeper | None = None,
    ) -> None:
        """Takes over the populator."""
        self.budget = budget
        self.populator = populator
        self.error: PinError | None = None
        """Why an extent could not be created, until it was."""
        self.foreign_extents = 0
        """Descriptors from the keeper that were not what their text said."""
        self._huge_pages = huge_pages
        self.keeper = keeper or NoKeeper()
        self._extents: dict[int, Extent] = {}
        self._missing: dict[int, Create] = {}
        self._places: dict[int, Give] = {}
        self._owners: dict[int, int] = {}

    def apply(self) -> list[Step]:
        """Decide and carry out. Returns the steps: of a `Recall`, the caller evicts the row's blocks and asks clients
        to let go; of a `Give`, the last one of a row makes its slots available as they are populated."""
        steps = self.budget.plan()
        changed: set[int] = set()
        for step in steps:
            self._carry_out(step, changed)
        self._create_missing(changed)
        self._keep(changed & self._extents.keys())
        return steps

    def restore(self, kept: Mapping[str, Kept]) -> None:
        """Take over extents of an earlier service, whose pools were added to the budget. What is not as its text says,
        or has no place, is closed and dropped. Call it before the first `apply`, then record the mappings of clients
        that may live. Takes over the descriptors, and ignores other names."""
        for name, held in kept.items():
            if not name.startswith(NAME_PREFIX):
                continue
            try:
                self._restore_one(name, held)
            except (KvstowError, ValueError, TypeError) as error:
                logger.warning("%s of an earlier service is not used: %s", name, error)
                self.foreign_extents += 1
                os.close(held.fd)
                self.keeper.drop([name])

    def retry(self) -> None:
        """Try again what memory was refused for."""
        changed: set[int] = set()
        self._create_missing(changed)
        self._keep(changed)
        self.populator.retry()

    def extent(self, number: int) -> Extent | None:
        """Its descriptor may be sent to clients up to its watermark; None while it could not be created."""
        return self._extents.get(number)

    def populated_slots(self, pool: str) -> dict[int, int]:
        """By row that was not recalled: how many of its slots are populated on every rank."""
        found = {}
        for number, row in self.budget.rows(pool).items():
            if row.recalled:
                continue
            extents = [self._extents.get(extent) for extent in row.extents]
            found[number] = min(
                row.num_slots,
                *(
                    0 if extent is None else extent.populated_bytes // rank.slot_stride
                    for extent, rank in zip(extents, self.budget.layout(pool).ranks, strict=True)
                ),
            )
        return found

    def close(self) -> None:
        """Stop populating and let go of all extents; idempotent. A keeper has them still."""
        self.populator.close()
        for extent in self._extents.values():
            extent.close()
        self._extents.clear()

    def _carry_out(self, step: Step, changed: set[int]) -> None:
        match step:
            case Create():
                self._missing[step.extent] = step
            case Give():
                self._places[step.extent] = step
                self._owners[step.extent] = self.budget.layout(step.pool).owner
                self._set_row(step.extent, step.row)
                changed.add(step.extent)
            case TakeBack():
                del self._places[step.extent]
                changed.add(step.extent)
            case Close():
                self._close(step.extent)
            case Recall():
                for number in step.extents:
                    self._set_row(number, None)

    def _set_row(self, number: int, row: int | None) -> None:
        """The populator takes it into account from its next chunk on."""
        extent = self._extents.get(number)
        if extent is not None:
            extent.row = row

    def _create_missing(self, changed: set[int]) -> None:
        self.error = None
        for number, step in list(self._missing.items()):
            try:
                extent = Extent.create(step.num_bytes, self._huge_pages, step.numa_node)
            except PinError as error:
                logger.warning("an extent is missing: %s", error)
                self.error = error
                return
            del self._missing[number]
            self._extents[number] = extent
            place = self._places.get(number)
            extent.row = None if place is None else place.row
            self.populator.add(extent)
            changed.add(number)

    def _close(self, number: int) -> None:
        self._missing.pop(number, None)
        self._owners.pop(number, None)
        extent = self._extents.pop(number, None)
        if extent is not None:
            self.keeper.drop([f"{NAME_PREFIX}{number}"])
            self.populator.discard(extent)
            extent.close()

    def _restore_one(self, name: str, held: Kept) -> None:
        number = int(name.removeprefix(NAME_PREFIX))
        label = _Label.from_text(number, held.info)
        extent = Extent.adopt(held.fd, label.num_bytes, self._huge_pages, label.numa_node, identity=label.identity)
        self.budget.restore(number, label.num_bytes, label.numa_node, label.owner, label.place)
        self._extents[number] = extent
        if label.owner is not None:
            self._owners[number] = label.owner
        if label.place is not None:
            self._places[number] = label.place
            extent.row = label.place.row
        self.populator.add(extent)

    def _keep(self, numbers: Collection[int]) -> None:
        """Give the keeper these extents."""
        if numbers:
            self.keeper.put({f"{NAME_PREFIX}{number}": self._described(number) for number in sorted(numbers)})

    def _described(self, number: int) -> tuple[int, str]:
        extent = self._extents[number]
        label = _Label(
            extent.num_bytes, extent.numa_node, self._owners.get(number), extent.identity, self._places.get(number)
        )
        return extent.fd, label.to_text()
