"""Long-running operations: each runs one sweep of the engine on its own thread.

Guarantees: an operation always ends, also if its sweep raises; the error is logged and kept as `error`. A sweep always
runs to its end or is cancelled: an abandoned resize would keep the pool small and block every later resize. Only the
operation's thread uses its sweep. `view` may be read on any thread.
Assumes: a step of a sweep is short (one slice), so cancelling and closing take effect at once.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from datetime import UTC, datetime
from typing import get_args

from kvstow.control.administration import Sweep
from kvstow.errors import ConflictError, KvstowError, NotFoundError, QueueFullError
from kvstow.stats import Histogram
from kvstow_api.answers import OperationKind, OperationState, OperationView, ProgressView, RemovedView
from kvstow_api.journal import Journal

logger = logging.getLogger("kvstow.api")

KINDS: tuple[OperationKind, ...] = get_args(OperationKind)
STATES: tuple[OperationState, ...] = get_args(OperationState)
END_STATES = STATES[1:]

MAX_RUNNING = 8
_KEPT = 200
_KEPT_SECONDS = 3600.0
_WAIT_SECONDS = 0.01  # between two steps of a sweep that waits for transfers
_BOUNDS = (0.001, 0.01, 0.1, 1.0, 10.0, 100.0)


class Operation:
    """One run of a sweep. Made by `Operations.start`; `born` is in seconds of its clock, `number` counts from 1."""

    def __init__(self, number: int, kind: OperationKind, pool: str, sweep: Sweep, dry_run: bool, born: float) -> None:
        self._sweep = sweep
        self.number = number
        self.born = born
        self._cancelled = threading.Event()
        self._ended: Future[None] = Future()
        self.failure: KvstowError | None = None
        """Why the operation failed, if the cause is one of the engine's errors."""
        self._view = OperationView(
            id=f"{kind}-{secrets.token_hex(6)}",
            pool=pool,
            kind=kind,
            dry_run=dry_run,
            state="running",
            waiting=False,
            progress=_progress(sweep),
            created=datetime.now(UTC),
            started=None,
            ended=None,
            error=None,
            result=None,
        )

    @property
    def view(self) -> OperationView:
        return self._view  # replaced as a whole by the thread, so a reader never sees half of a change

    @property
    def running(self) -> bool:
        return self._view.state == "running"

    def cancel(self) -> None:
        """Stop after the current slice. Does nothing if it has ended."""
        self._cancelled.set()

    async def wait(self, timeout: float) -> OperationView:
        """The operation when it ends, or after `timeout` seconds."""
        if timeout <= 0:  # a wait leaves a callback behind until the operation ends, so a plain read must not wait
            return self.view
        await asyncio.wait([asyncio.wrap_future(self._ended)], timeout=timeout)
        return self.view

    def run(self) -> None:
        """Run to the end and record the result. On the operation's thread, which then calls `announce`."""
        try:
            self._update(started=datetime.now(UTC))
            state: OperationState = "succeeded" if self._sweep_all() else "cancelled"
            self._finish(state, result=self._removed())
        except BaseException as error:
            logger.exception("operation %s failed", self._view.id)
            if isinstance(error, KvstowError):
                self.failure = error
            text = str(error) if isinstance(error, KvstowError) else f"internal error ({type(error).__name__})"
            self._sweep.cancel()
            self._finish("failed", error=text)

    def announce(self) -> None:
        """Wake the callers of `wait`."""
        self._ended.set_result(None)

    def _sweep_all(self) -> bool:
        """Step until the sweep is complete; False if it was cancelled."""
        sweep = self._sweep
        while sweep.step():
            self._update(waiting=sweep.waiting, progress=_progress(sweep))
            if self._cancelled.wait(_WAIT_SECONDS if sweep.waiting else 0):
                sweep.cancel()
                return False
        self._update(progress=_progress(sweep))
        return True

    def _removed(self) -> RemovedView:
        sweep, dry_run = self._sweep, self._view.dry_run
        return RemovedView(evicted_slots=sweep.evicted_slots, evicted_bytes=sweep.evicted_bytes, dry_run=dry_run)

    def _finish(self, state: OperationState, *, result: RemovedView | None = None, error: str | None = None) -> None:
        self._update(state=state, waiting=False, ended=datetime.now(UTC), result=result, error=error)

    def _update(self, **changes: object) -> None:
        self._view = replace(self._view, **changes)  # type: ignore[arg-type]


def _progress(sweep: Sweep) -> ProgressView:
    return ProgressView(done=sweep.done, total=sweep.total)


class Operations:
    """The operations of one server: the running ones and the last that have ended. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, journal: Journal | None = None) -> None:
        """`journal` records each start and end."""
        self._clock = clock
        self._journal = Journal() if journal is None else journal
        self._lock = threading.Lock()
        self._operations: dict[str, Operation] = {}
        self._started = 0
        self._threads: set[threading.Thread] = set()
        self._closed = False
        self._ended = {(kind, state): 0 for kind in KINDS for state in END_STATES}
        self._seconds = {kind: Histogram(_BOUNDS) for kind in KINDS}

    def start(
        self, kind: OperationKind, pool: str, make_sweep: Callable[[], Sweep], *, dry_run: bool = False
    ) -> Operation:
        """Make a sweep of a pool and run it. Raises what `make_sweep` raises, `ConflictError` for a second resize,
        and `QueueFullError` if too many operations run."""
        with self._lock:
            self._check(kind)
            sweep = make_sweep()
            try:
                operation = Operation(self._started + 1, kind, pool, sweep, dry_run, self._clock())
                name = operation.view.id
                thread = threading.Thread(target=self._run, args=(operation,), name=f"kvstow-{name}", daemon=True)
                thread.start()  # before it is listed: a thread that cannot start leaves no operation that never ends
            except BaseException:
                sweep.cancel()
                raise
            self._threads.add(thread)
            self._operations[name] = operation
            self._started = operation.number
            self._forget_old()
        return operation

    def _log(self, view: OperationView) -> None:
        self._journal.add(
            "operation",
            id=view.id,
            pool=view.pool,
            kind=view.kind,
            dry_run=view.dry_run,
            state=view.state,
            error=view.error,
        )

    def get(self, operation_id: str) -> Operation:
        """Raises `NotFoundError`, also for an operation that is no longer kept."""
        with self._lock:
            self._forget_old()
            operation = self._operations.get(operation_id)
        if operation is None:
            raise NotFoundError(
                f"there is no operation {operation_id!r}; the last {_KEPT} are kept for {_KEPT_SECONDS:g} s"
            )
        return operation

    def all(self) -> list[Operation]:
        """All that are kept, newest first."""
        with self._lock:
            self._forget_old()
            return list(reversed(self._operations.values()))

    def forget(self, operation_id: str) -> None:
        """Remove an operation that has ended. Raises `NotFoundError`, and `ConflictError` while it runs."""
        operation = self.get(operation_id)
        if operation.running:
            raise ConflictError(f"operation {operation_id} is running; cancel it first")
        with self._lock:
            self._operations.pop(operation_id, None)

    def num_running(self, kind: OperationKind) -> int:
        with self._lock:
            return self._running(kind)

    def ended(self) -> dict[tuple[OperationKind, OperationState], int]:
        with self._lock:
            return dict(self._ended)

    def seconds(self) -> dict[OperationKind, Histogram]:
        with self._lock:
            return {kind: histogram.copy() for kind, histogram in self._seconds.items()}

    def close(self, timeout: float = 5.0) -> None:
        """Cancel the running operations and wait for their threads. No operation starts afterwards. Idempotent."""
        with self._lock:
            self._closed = True
            threads = list(self._threads)
            for operation in self._operations.values():
                operation.cancel()
        for thread in threads:
            thread.join(timeout)

    def _check(self, kind: OperationKind) -> None:
        if self._closed:
            raise ConflictError("the server is stopping")
        if kind == "resize" and self._running("resize"):  # only an embedded pool can be resized
            raise ConflictError("a resize is running; wait for it or cancel it")
        if len(self._threads) >= MAX_RUNNING:
            raise QueueFullError(f"too many operations are running (limit {MAX_RUNNING})")

    def _running(self, kind: OperationKind) -> int:
        return sum(operation.running and operation.view.kind == kind for operation in self._operations.values())

    def _run(self, operation: Operation) -> None:
        self._log(operation.view)
        operation.run()
        view = operation.view
        self._log(view)
        with self._lock:
            self._ended[view.kind, view.state] += 1
            self._seconds[view.kind].observe(self._clock() - operation.born)
            self._threads.discard(threading.current_thread())
        operation.announce()

    def _forget_old(self) -> None:
        """Drop ended operations that are too old, and the oldest ended ones above the limit."""
        oldest = self._clock() - _KEPT_SECONDS
        excess = len(self._operations) - _KEPT
        for name, operation in list(self._operations.items()):
            if not operation.running and (excess > 0 or operation.born < oldest):
                del self._operations[name]
                excess -= 1
