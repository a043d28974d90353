"""Register calls at the pace that the host's steps allow."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from kvstow.memory.hoststeps import HostSteps
from kvstow.memory.pace import Pace
from kvstow.memory.pinning import Registrar

logger = logging.getLogger("kvstow.pool")


class PacedRegistrar:
    """Makes the calls of a `Registrar` on the thread that the pace chooses. Not locked: the pinning thread calls it,
    and after the end of that thread the one that closes the pool."""

    def __init__(
        self,
        registrar: Registrar,
        pace: Pace,
        steps: HostSteps,
        *,
        clock: Callable[[], float],
        cpu_clock: Callable[[], float],
    ) -> None:
        self._registrar, self._pace, self._steps = registrar, pace, steps
        self._clock, self._cpu_clock = clock, cpu_clock
        self._is_prepared = False
        self._of_host: float | None = None
        self._started = 0.0

    def prepare_thread(self) -> None:
        """Idempotent; see `Registrar.prepare_thread`."""
        if not self._is_prepared:
            self._registrar.prepare_thread()
            self._is_prepared = True

    def register(self, address: int, num_bytes: int) -> None:
        """Pin a populated range. Raises `PinError`; the range is then not pinned. The caller records what is pinned,
        then calls `record`; nothing may fail between `register` and recording."""
        self._call(partial(self._registrar.register, address, num_bytes))

    def unregister(self, address: int, num_bytes: int) -> None:
        """Undo `register`. Raises `PinError`; the range is then still pinned."""
        self._call(partial(self._registrar.unregister, address, num_bytes))

    def record(self, num_bytes: int) -> None:
        """Tell the pace how long the last call, for so many bytes, held the driver's lock."""
        seconds = self._cpu_clock() - self._started if self._of_host is None else self._of_host
        self._pace.record(num_bytes, seconds, self._clock())

    def unregister_at_close(self, address: int, num_bytes: int, what: str) -> None:
        """Unregister on the calling thread, without a pace. Logs an error instead of raising it, so that the caller
        goes on to the rest."""
        try:
            self._registrar.unregister(address, num_bytes)
        except Exception as error:  # noqa: BLE001
            logger.warning("could not unregister %s: %s", what, error)

    def _call(self, call: Callable[[], None]) -> None:
        self._of_host = None
        self._started = self._cpu_clock()
        if (expected := self._pace.call_seconds) is None:
            call()
        else:
            self._of_host = self._steps.run(call, expected)
