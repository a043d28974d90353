"""A device whose copies run when the run says so: late, in any order, in two phases, some of them failing."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np
import torch
from tests.vllm.harness.stream import ComputeStream

from kvstow.devices.base import Fence, TicketState
from kvstow.devices.cpu import CpuDevice, Rows, rows_at
from kvstow.errors import CopyError
from kvstow.layout import KVLayout
from kvstow.memory.hostpool import HostPool
from kvstow.messages import Direction, LayerFigures, Mark

_SPOILED = 0xEE


class StreamedLoad:
    """A load by layer, and its ticket. The compute stream brings all of it before the step."""

    state, error, seconds = TicketState.PENDING, None, 0.0

    @property
    def ticket(self) -> StreamedLoad:
        return self

    def poll(self) -> TicketState:
        return self.state

    def wait(self, part: int) -> None:
        """What is launched from now on runs after the copy."""


@dataclass(eq=False)
class SimulatedTicket:
    """A copy; `due` are the ticks of its two phases. Bytes are read in the first and written in the second."""

    op_id: int
    direction: Direction
    blocks: Sequence[int]
    slots: Sequence[int]
    after: Fence | None
    due: tuple[int, int]
    fails: bool
    device: SimulatedDevice
    state: TicketState = TicketState.PENDING
    error: BaseException | None = None
    seconds: float = 0.0
    staged: list[Rows] = field(default_factory=list)

    def poll(self) -> TicketState:
        if self.device.is_broken:
            raise RuntimeError("a defect of the device")
        return self.state

    def is_ready(self, tick: int) -> bool:
        """Whether the next phase may run. A load's first touches no block of the device, so no fence holds it up."""
        is_first = not self.staged
        fenced = is_first == (self.direction == "store")
        return self.due[not is_first] <= tick and not (fenced and self.after is not None and not self.after.query())


class SimulatedDevice:
    """A device over the memory of the CPU device. The copies happen in `tick`, on the caller's thread: nothing
    depends on when the copy thread gets its turn, which only sees their results."""

    name, copies_alone = "simulated", True

    def __init__(
        self,
        pool: HostPool,
        layout: KVLayout,
        tensors: Sequence[torch.Tensor],
        parts: object = None,
        *,
        random: Random,
        delay: tuple[int, int],
        gap: int,
        failure_rate: float,
        bad_slots: int,
        stream: ComputeStream,
    ) -> None:
        """`parts`: None if nothing loads by layer. A copy reads `delay` ticks after it began; a store writes up to
        `gap` ticks later. `failure_rate` of the ops fail, and all loads from slots below `bad_slots`."""
        self.is_broken = False
        """Every poll raises from now on."""
        self._pool = pool
        self._pages = CpuDevice(pool, layout, tensors)._pages
        self._random, self._delay, self._gap, self._failure_rate = random, delay, gap, failure_rate
        self._bad_slots = bad_slots
        self._tick = 0
        self.num_parts, self.layer_figures = 1, LayerFigures()
        self._stream, self._layered = stream, list[tuple[int, Mark]]()
        self.next_layered: Sequence[int] = ()
        """The ops of the load by layer that begins next."""
        self._tickets: list[SimulatedTicket] = []
        self._begun: set[int] = set()
        self._changed = threading.Condition()

    def launch_store(
        self, op_id: int, blocks: Sequence[int], slots: Sequence[int], after: Fence | None
    ) -> SimulatedTicket:
        return self._begin(op_id, "store", blocks, slots, after)

    def launch_load(
        self, op_id: int, blocks: Sequence[int], slots: Sequence[int], after: Fence | None
    ) -> SimulatedTicket:
        return self._begin(op_id, "load", blocks, slots, after)

    def load_layers(self, blocks: Sequence[int], slots: Sequence[int], after: Fence | None) -> StreamedLoad:
        """The copy runs when the compute stream gets there: after what was launched before, and before the step that
        needs it."""
        load, op_ids = StreamedLoad(), self.next_layered

        def copy() -> None:
            kv, host = self._arrays()
            with self._pool.hold(max(slots) + 1):
                for pages, source in zip(kv, host, strict=True):
                    pages[list(blocks)] = source[list(slots)]
            load.state = TicketState.DONE
            self._layered += [(op_id, "done") for op_id in op_ids]

        self._stream.launch(copy)
        return load

    def load_now(self, *_: object) -> None:
        raise CopyError("it went another way")

    def advance(self) -> None:
        """Copies are done in `tick`."""

    def close(self) -> None:
        self._pages = []

    def wait_begun(self, op_ids: set[int], timeout: float = 10.0) -> None:
        """Wait until the copy thread has begun these ops."""
        with self._changed:
            if not self._changed.wait_for(lambda: op_ids <= self._begun, timeout):
                raise TimeoutError(f"ops {sorted(op_ids - self._begun)} have not begun")

    def schedule(self, op_ids: Sequence[int]) -> None:
        """Draw when these ops run, and which of them fail: in the order of their submission."""
        tickets = {ticket.op_id: ticket for ticket in self._tickets}
        for op_id in op_ids:
            ticket = tickets[op_id]
            first = self._tick + self._random.randint(*self._delay)
            gap = self._gap if ticket.direction == "store" else self._delay[1]
            ticket.due = (first, first + self._random.randint(0, gap))
            ticket.fails = self._random.random() < self._failure_rate
            ticket.fails |= ticket.direction == "load" and min(ticket.slots) < self._bad_slots

    def tick(self) -> list[tuple[int, Mark]]:
        """Let a tick pass; which ops have moved on, and to what."""
        self._tick += 1
        if self.is_broken:
            return []
        ready = [ticket for ticket in self._tickets if ticket.is_ready(self._tick)]
        ready.sort(key=lambda ticket: ticket.op_id)
        self._random.shuffle(ready)
        moved, self._layered = self._layered, []
        for ticket in ready:
            mark = self.run_first(ticket) if not ticket.staged else self.run_second(ticket)
            if mark is not None:
                moved.append((ticket.op_id, mark))
        self._tickets = [ticket for ticket in self._tickets if ticket.state not in _FINAL]
        return moved

    def _begin(
        self, op_id: int, direction: Direction, blocks: Sequence[int], slots: Sequence[int], after: Fence | None
    ) -> SimulatedTicket:
        never = 1 << 60
        ticket = SimulatedTicket(op_id, direction, blocks, slots, after, due=(never, never), fails=False, device=self)
        with self._changed:
            self._tickets.append(ticket)
            self._begun.add(op_id)
            self._changed.notify_all()
        return ticket

    def run_first(self, ticket: SimulatedTicket) -> Mark | None:
        kv, host = self._arrays()
        source, indices = (kv, ticket.blocks) if ticket.direction == "store" else (host, ticket.slots)
        with self._pool.hold(max(ticket.slots) + 1):
            ticket.staged = [pages[list(indices)] for pages in source]
        if ticket.direction == "load":
            return None
        ticket.state = TicketState.SOURCE_FREE
        return "source_free"

    def run_second(self, ticket: SimulatedTicket) -> Mark:
        kv, host = self._arrays()
        target, indices = (host, ticket.slots) if ticket.direction == "store" else (kv, ticket.blocks)
        with self._pool.hold(max(ticket.slots) + 1):
            for pages, staged in zip(target, ticket.staged, strict=True):
                pages[list(indices)] = _SPOILED if ticket.fails else staged
        if ticket.fails:
            ticket.error = CopyError("injected")
        ticket.state = TicketState.FAILED if ticket.fails else TicketState.DONE
        return "failed" if ticket.fails else "done"

    def _arrays(self) -> tuple[list[Rows], list[Rows]]:
        """Of each region, its pages on the device and in all slots."""
        pool = self._pool
        (begin,) = pool.addresses(np.zeros(1, np.int64)).tolist()
        slots = [rows_at(begin + offset, pool.max_slots, pool.slot_stride, kv) for kv, offset in self._pages]
        return [kv for kv, _ in self._pages], slots


_FINAL = {TicketState.DONE, TicketState.FAILED}
