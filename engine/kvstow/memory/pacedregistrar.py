"""Register calls at the pace that the host's steps allow."""

from __future__ import annotations

import logging
import statistics
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from kvstow.memory.callqueue import CallQueue, MadeCall
from kvstow.memory.hoststeps import HostSteps
from kvstow.memory.pace import Pace
from kvstow.memory.pinning import Registrar

_KEPT = 4096  # calls, for `figures`

logger = logging.getLogger("kvstow.pool")


class CallFigures(NamedTuple):
    """Register and unregister calls since the last time. `by_host`: on the host's thread. `wakes`: how often the
    pinning thread woke while the host made steps. `batches`: how often it populated, for `populating_seconds`. Medians
    and `p99_seconds` are of the last 4096 calls, and 0 without any. `share`: of the host's time while it makes steps;
    `cost`: by how much of a call's time it makes a step longer (see `CallBudget`)."""

    calls: int
    by_host: int
    wakes: int
    batches: int
    populating_seconds: float
    median_bytes: float
    median_seconds: float
    p99_seconds: float
    share: float
    cost: float


class PacedRegistrar:
    """Makes the calls of a `Registrar` on the thread that the pace chooses. Not locked: the pinning thread calls it,
    and after the end of that thread the one that closes the pool. Any thread may call `take_figures`."""

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
        self._calls: deque[MadeCall] = deque(maxlen=_KEPT)
        self._number = self._by_host = self._batches = 0
        self._populating_seconds = 0.0
        self._told: tuple[float, ...] = (0, 0, 0, 0, 0.0)
        self._started = 0.0
        self._of_host: float | None = None

    def prepare_thread(self) -> None:
        """Idempotent; see `Registrar.prepare_thread`."""
        if not self._is_prepared:
            self._registrar.prepare_thread()
            self._is_prepared = True

    def register(self, address: int, num_bytes: int) -> None:
        """Pin a populated range, on the calling thread: a call of the queue for `advance`. Raises `PinError`; the range
        is then not pinned."""
        self._registrar.register(address, num_bytes)

    def unregister(self, address: int, num_bytes: int) -> None:
        """Undo `register`, at the pace. Raises `PinError`; the range is then still pinned. The caller records what is
        pinned, then calls `record`."""
        call = partial(self._registrar.unregister, address, num_bytes)
        self._started, self._of_host = self._cpu_clock(), None
        if (expected := self._pace.call_seconds) is None:
            call()
        else:
            self._of_host = self._steps.run(call, num_bytes, expected)

    def record(self, num_bytes: int) -> None:
        """Tell the pace how long the last `unregister` held the driver's lock."""
        of_host = self._of_host
        self._record(MadeCall(num_bytes, self._cpu_clock() - self._started if of_host is None else of_host))
        self._by_host += of_host is not None

    def advance(self, queue: CallQueue, wake_at: int, wait_for_turn: Callable[[], bool]) -> None:
        """Wait until `wake_at` calls of the queue have been made by the host's thread, or make the next one here. May
        return earlier. `wait_for_turn` waits for as long as the pace says; False: make none.

        The caller settles the queue, then calls `withdraw`.
        """
        if (expected := self._pace.call_seconds) is not None:
            self._steps.offer(queue, expected)
            if self._steps.wait(queue, wake_at):
                self._record_of_host(queue)
                return
        self._record_of_host(queue)
        if not wait_for_turn() or (expected is not None and self._steps.state(self._clock()) == "stepping"):
            return
        if queue.claim():
            try:
                started = self._cpu_clock()
                made = queue.made
                num_bytes = queue.make()
                if queue.made > made:
                    self._record(MadeCall(num_bytes, self._cpu_clock() - started))
            finally:
                queue.done()

    def withdraw(self, queue: CallQueue) -> None:
        """The queue is settled."""
        self._steps.withdraw()
        self._record_of_host(queue)

    @contextmanager
    def populating(self) -> Iterator[None]:
        """Measures, for `take_figures`."""
        began = self._clock()
        try:
            yield
        finally:
            self._batches += 1
            self._populating_seconds += self._clock() - began

    def take_figures(self) -> CallFigures:
        """Since the last time."""
        counted, self._calls = self._calls, deque(maxlen=_KEPT)
        calls, before = list(counted), self._told  # a thread may still add to the deque
        self._told = (self._number, self._by_host, self._steps.looks, self._batches, self._populating_seconds)
        number, by_host, wakes, batches, populating = (now - then for now, then in zip(self._told, before, strict=True))
        seconds = sorted(call.seconds for call in calls) or [0.0]
        return CallFigures(
            int(number),
            int(by_host),
            int(wakes),
            int(batches),
            populating,
            statistics.median([call.num_bytes for call in calls] or [0]),
            statistics.median(seconds),
            seconds[len(seconds) * 99 // 100],
            self._steps.budget.share,
            self._steps.budget.cost,
        )

    def unregister_at_close(self, address: int, num_bytes: int, what: str) -> None:
        """Unregister on the calling thread, without a pace. Logs an error instead of raising it, so that the caller
        goes on to the rest."""
        try:
            self._registrar.unregister(address, num_bytes)
        except Exception as error:  # noqa: BLE001
            logger.warning("could not unregister %s: %s", what, error)

    def _record_of_host(self, queue: CallQueue) -> None:
        """Tell the pace of each call what the median one took: one that took unusually long must not shrink the
        next ones."""
        calls: list[MadeCall] = []
        while queue.by_host:
            calls.append(queue.by_host.popleft())
        if not calls:
            return
        self._by_host += len(calls)
        usual = sorted(calls, key=lambda call: call.seconds / call.num_bytes)[len(calls) // 2]
        for call in calls:
            self._keep(call)
            self._pace.record(usual.num_bytes, usual.seconds, self._clock())

    def _record(self, call: MadeCall) -> None:
        self._keep(call)
        self._pace.record(call.num_bytes, call.seconds, self._clock())

    def _keep(self, call: MadeCall) -> None:
        self._number += 1
        self._calls.append(call)
