"""A registrar that fails and waits where a test says so."""

from __future__ import annotations

import threading

from kvstow.errors import PinError


class FakeRegistrar:
    """Keeps account of what is registered. `failures` maps the number of a `register` call (from 0) to its error.
    The call number `wait_at` sets `waiting`, then waits for `go_on`."""

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
            self.go_on.wait(timeout=30)
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
