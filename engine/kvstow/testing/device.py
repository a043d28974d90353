"""A device that moves nothing and finishes when a test says so, and tickets that advance a real one."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvstow.devices.base import Capabilities, Device, Fence, PreparedLoad, Ticket, TicketState


class FakeTicket:
    """Stays where the test puts it. `poll_error` makes `poll` break its promise to raise nothing."""

    def __init__(self) -> None:
        self.state = TicketState.PENDING
        self.error: BaseException | None = None
        self.seconds = 0.0
        self.poll_error: BaseException | None = None

    def poll(self) -> TicketState:
        if self.poll_error is not None:
            raise self.poll_error
        return self.state

    def free_source(self) -> None:
        self.state = TicketState.SOURCE_FREE

    def finish(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.state = TicketState.DONE

    def fail(self, error: BaseException) -> None:
        self.error = error
        self.state = TicketState.FAILED


class FakeLoad:
    """A prepared load; `device.prepared` has it until it is launched or closed."""

    def __init__(self, op_id: int, prepared: dict[int, FakeLoad]) -> None:
        self.op_id = op_id
        self._prepared = prepared
        prepared[op_id] = self

    def close(self) -> None:
        self._prepared.pop(self.op_id, None)


class FakeDevice:
    """Hands out `FakeTicket`s by op id. `begin_error` is raised by the next `begin_store` or `launch_load`,
    `advance_error` by each `advance`. `prepared`: loads that were neither launched nor closed."""

    capabilities = Capabilities(name="fake", kv_in_place=True, pin_mode="fake")

    def __init__(self) -> None:
        self.begin_error: Exception | None = None
        self.advance_error: Exception | None = None
        self.close_error: Exception | None = None
        self.closed = False
        self.prepared: dict[int, FakeLoad] = {}
        self._tickets: dict[int, FakeTicket] = {}
        self._begun = threading.Condition()

    def begin_store(self, op_id: int, blocks: Sequence[int], slots: Sequence[int], after: Fence | None) -> FakeTicket:
        return self._begin(op_id)

    def prepare_load(self, op_id: int, slots: Sequence[int]) -> FakeLoad:
        return FakeLoad(op_id, self.prepared)

    def launch_load(self, load: PreparedLoad, blocks: Sequence[int], after: Fence | None) -> FakeTicket:
        assert isinstance(load, FakeLoad)
        ticket = self._begin(load.op_id)
        load.close()
        return ticket

    def advance(self) -> None:
        if self.advance_error is not None:
            raise self.advance_error

    def close(self) -> None:
        self.closed = True
        if self.close_error is not None:
            raise self.close_error

    @property
    def begun(self) -> tuple[int, ...]:
        """Ids of the ops that have begun, in order."""
        with self._begun:
            return tuple(self._tickets)

    def ticket(self, op_id: int, timeout: float = 10.0) -> FakeTicket:
        """The ticket of an op, once it has begun."""
        with self._begun:
            if not self._begun.wait_for(lambda: op_id in self._tickets, timeout):
                raise TimeoutError(f"op {op_id} has not begun")
            return self._tickets[op_id]

    def _begin(self, op_id: int) -> FakeTicket:
        with self._begun:
            if (error := self.begin_error) is not None:
                self.begin_error = None
                raise error
            self._tickets[op_id] = FakeTicket()
            self._begun.notify_all()
            return self._tickets[op_id]


class Polled:
    """A ticket whose `poll` advances the device first, as the copy thread does."""

    def __init__(self, device: Device, ticket: Ticket) -> None:
        self._device, self._ticket = device, ticket

    def poll(self) -> TicketState:
        self._device.advance()
        return self._ticket.poll()

    @property
    def error(self) -> BaseException | None:
        return self._ticket.error

    @property
    def seconds(self) -> float:
        return self._ticket.seconds
