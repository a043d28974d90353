"""Doubles under the control of a test: a clock, a fence, a registrar, and a device with its tickets."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvstow.devices.base import Device, Fence, Ticket, TicketState
from kvstow.errors import PinError
from kvstow.memory.slotpool import SlotPool


def rests(pool: SlotPool) -> bool:
    """Whether the thread that pins this pool has nothing to do now."""
    return pool._next_step() is None


class FakeClock:
    """Replaces `time.monotonic`, in seconds; time passes only in `advance`."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def __call__(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds


class Latch:
    """A `Fence` that is reached after `open()`, so that tests of ordering need no sleeps. Thread-safe."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._is_open = False
        self._queries = 0

    def query(self) -> bool:
        with self._condition:
            self._queries += 1
            self._condition.notify_all()
            return self._is_open

    def open(self) -> None:
        with self._condition:
            self._is_open = True

    def wait_queried(self, times: int = 1, timeout: float = 60.0) -> bool:
        """Wait until `query` was called `times` more times: by then the caller has seen the closed fence."""
        with self._condition:
            wanted = self._queries + times
            return self._condition.wait_for(lambda: self._queries >= wanted, timeout)


class FakeRegistrar:
    """Records what is registered. `failures` maps the number of a `register` call (from 0) to its error. The call with
    the number `wait_at` sets `waiting`, then waits for `go_on`."""

    mode = "fake"
    notice: str | None = None

    def __init__(self, failures: dict[int, Exception] | None = None, *, wait_at: int | None = None) -> None:
        self.failures = failures or {}
        self.waiting, self.go_on = threading.Event(), threading.Event()
        self.registered: dict[int, int] = {}
        self.calls = 0
        self.prepared_by: list[str] = []
        self.unregister_error: Exception | None = None
        self._wait_at = wait_at

    @property
    def locked_bytes(self) -> int:
        return sum(tuple(self.registered.values()))

    def prepare_thread(self) -> None:
        self.prepared_by.append(threading.current_thread().name)

    def register(self, address: int, num_bytes: int) -> None:
        call, self.calls = self.calls, self.calls + 1
        if call == self._wait_at:
            self.waiting.set()
            self.go_on.wait(timeout=60)
        if call in self.failures:
            raise self.failures[call]
        if address in self.registered:
            raise PinError("driver", f"memory at {address:#x} is registered already")
        self.registered[address] = num_bytes

    def unregister(self, address: int, num_bytes: int) -> None:
        if self.unregister_error is not None:
            raise self.unregister_error
        if self.registered.pop(address, None) != num_bytes:
            raise PinError("driver", f"{num_bytes} bytes at {address:#x} are not registered as one range")


class FakeTicket:
    """Its state is what the test sets. `poll_error` makes `poll` raise, against its contract."""

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


class FakeDevice:
    """Returns `FakeTicket`s by op id. `launch_error` is raised by the next `launch_store` or `launch_load`,
    `advance_error` by each `advance`."""

    name, copies_alone = "fake", True

    def __init__(self) -> None:
        self.launch_error: Exception | None = None
        self.advance_error: Exception | None = None
        self.close_error: Exception | None = None
        self.closed = False
        self._tickets: dict[int, FakeTicket] = {}
        self._begun = threading.Condition()

    def launch_store(self, op_id: int, blocks: Sequence[int], slots: Sequence[int], after: Fence | None) -> FakeTicket:
        return self._begin(op_id)

    def launch_load(self, op_id: int, blocks: Sequence[int], slots: Sequence[int], after: Fence | None) -> FakeTicket:
        return self._begin(op_id)

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

    def ticket(self, op_id: int, timeout: float = 60.0) -> FakeTicket:
        """The ticket of an op, once it has begun."""
        with self._begun:
            if not self._begun.wait_for(lambda: op_id in self._tickets, timeout):
                raise TimeoutError(f"op {op_id} has not begun")
            return self._tickets[op_id]

    def _begin(self, op_id: int) -> FakeTicket:
        with self._begun:
            if (error := self.launch_error) is not None:
                self.launch_error = None
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
