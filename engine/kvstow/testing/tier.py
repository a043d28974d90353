"""A store of the fleet tier under the control of a test."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from kvstow.testing.memorystore import MemoryLookups, MemoryStore, MemoryTransfers
from kvstow.tier.store import GetStatus, ObjectName, PutStatus, SlotObject


class Gate:
    """Where calls wait, on their own threads, until the test lets them pass. It is open at first."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._is_open = True
        self._arrived = 0

    def shut(self) -> None:
        with self._condition:
            self._is_open = False

    def open(self) -> None:
        with self._condition:
            self._is_open = True
            self._condition.notify_all()

    def pass_through(self) -> None:
        with self._condition:
            self._arrived += 1
            self._condition.notify_all()
            if not self._condition.wait_for(lambda: self._is_open, 60):
                raise TimeoutError("the test has left a gate shut")

    @property
    def num_arrived(self) -> int:
        """Calls that have come here."""
        with self._condition:
            return self._arrived

    def wait_arrived(self, calls: int) -> None:
        """Wait until so many calls in all have come here."""
        with self._condition:
            if not self._condition.wait_for(lambda: self._arrived >= calls, 60):
                raise TimeoutError(f"{self._arrived} of {calls} calls came")


class ControlledStore(MemoryStore):
    """A `MemoryStore` whose calls wait at a gate, and fail, as the test says. `error`: what each call raises.
    `put_status` and `get_status`: what becomes of an object, by its name, instead of what would. `max_answers`: a
    lookup gets no more answers than that. `batches` has the number of objects of each call."""

    def __init__(self, capacity_bytes: int | None = None) -> None:
        super().__init__(capacity_bytes)
        self.puts, self.gets, self.lookups = Gate(), Gate(), Gate()
        self.error: Exception | None = None
        self.put_status: Callable[[ObjectName], PutStatus | None] = lambda name: None
        self.get_status: Callable[[ObjectName], GetStatus | None] = lambda name: None
        self.max_answers: int | None = None
        self.batches: list[tuple[str, int]] = []

    def open_transfers(self, witness: int | None = None) -> ControlledTransfers:
        return ControlledTransfers(self)

    def open_lookups(self) -> ControlledLookups:
        return ControlledLookups(self)


class ControlledTransfers(MemoryTransfers):
    def __init__(self, store: ControlledStore) -> None:
        super().__init__(store)
        self._controls = store

    def put(self, objects: Sequence[SlotObject], timeout: float) -> list[PutStatus]:
        store = self._controls
        store.batches.append(("put", len(objects)))
        store.puts.pass_through()
        if store.error is not None:
            raise store.error
        return [store.put_status(one.name) or super(ControlledTransfers, self).put([one], 0)[0] for one in objects]

    def get(self, objects: Sequence[SlotObject], timeout: float) -> list[GetStatus]:
        store = self._controls
        store.batches.append(("get", len(objects)))
        store.gets.pass_through()
        if store.error is not None:
            raise store.error
        return [store.get_status(one.name) or super(ControlledTransfers, self).get([one], 0)[0] for one in objects]


class ControlledLookups(MemoryLookups):
    def __init__(self, store: ControlledStore) -> None:
        super().__init__(store)
        self._controls = store

    def exists(self, names: Sequence[ObjectName], timeout: float) -> list[bool]:
        store = self._controls
        store.batches.append(("exists", len(names)))
        store.lookups.pass_through()
        if store.error is not None:
            raise store.error
        return super().exists(names, timeout)[: store.max_answers]
