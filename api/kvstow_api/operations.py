"""Long-running operations. Each is a task that runs one sweep of the engine on threads. Used on the event loop.

An operation always ends, even if its sweep raises. Then the error is logged and kept as `error`. A sweep always runs to
its end or is cancelled, because an abandoned resize would keep the pool small and block every later resize. Only one
thread at a time uses a sweep. Each step of a sweep is short (one slice), so cancelling and closing take effect at once.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import get_args

from starlette.concurrency import run_in_threadpool

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
"""How many operations that have ended are kept, and for how long."""
_WAIT_SECONDS = 0.01  # the pause between two steps of a sweep that must wait for transfers
_BOUNDS = (0.001, 0.01, 0.1, 1.0, 10.0, 100.0)


class Operation:
    """One run of a sweep. `Operations.start` makes it. `born` is in seconds on its clock, and `number` counts from 1.
    `failure` is the cause of a failure if it is one of the engine's errors."""

    def __init__(self, number: int, kind: OperationKind, pool: str, sweep: Sweep, dry_run: bool, born: float) -> None:
        self.number, self.born = number, born
        self.failure: KvstowError | None = None
        self.view = OperationView(
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
        """It is replaced as a whole, so that readers never see half of a change."""
        self.task: asyncio.Task[None] | None = None
        self._sweep = sweep
        self._is_cancelled = False

    @property
    def running(self) -> bool:
        return self.view.state == "running"

    def cancel(self) -> None:
        """Stop after the current slice. Does nothing if the operation has ended."""
        self._is_cancelled = True

    async def wait(self, timeout: float) -> OperationView:
        if timeout > 0 and self.task is not None:
            await asyncio.wait([self.task], timeout=timeout)
        return self.view

    async def run(self) -> None:
        try:
            self._update(started=datetime.now(UTC))
            while await run_in_threadpool(self._step):
                await asyncio.sleep(_WAIT_SECONDS)
            self._end("cancelled" if self._sweep.cancelled else "succeeded")
        except BaseException as error:
            logger.exception("operation %s failed", self.view.id)
            if isinstance(error, KvstowError):
                self.failure = error
            self._sweep.cancel()
            self._end("failed", str(error) if self.failure else f"internal error ({type(error).__name__})")
            if isinstance(error, asyncio.CancelledError):
                raise

    def _step(self) -> bool:
        """Make steps until the sweep ends or the operation is cancelled. Returns True if the sweep must wait."""
        sweep = self._sweep
        while sweep.step():
            self._update(waiting=sweep.waiting, progress=_progress(sweep))
            if self._is_cancelled:
                sweep.cancel()
                return False
            if sweep.waiting:
                return True
        self._update(progress=_progress(sweep))
        return False

    def _end(self, state: OperationState, error: str | None = None) -> None:
        sweep, result = self._sweep, None
        if error is None:
            result = RemovedView(
                evicted_slots=sweep.evicted_slots,
                evicted_bytes=sweep.evicted_bytes,
                stored_blocks=sweep.stored_blocks,
                notice=sweep.notice,
                dry_run=self.view.dry_run,
            )
        self._update(state=state, waiting=False, ended=datetime.now(UTC), result=result, error=error)

    def _update(self, **changes: object) -> None:
        self.view = replace(self.view, **changes)  # type: ignore[arg-type]


def _progress(sweep: Sweep) -> ProgressView:
    return ProgressView(done=sweep.done, total=sweep.total)


class Operations:
    def __init__(self, clock: Callable[[], float], journal: Journal) -> None:
        self._clock, self._journal = clock, journal
        self._operations: dict[str, Operation] = {}
        self._started = 0
        self._closed = False
        self.ended = {(kind, state): 0 for kind in KINDS for state in END_STATES}
        self.seconds = {kind: Histogram(_BOUNDS) for kind in KINDS}

    def start(
        self, kind: OperationKind, pool: str, make_sweep: Callable[[], Sweep], *, dry_run: bool = False
    ) -> Operation:
        """Make a sweep of a pool and run it. Raises the errors of `make_sweep`, `ConflictError` for a second resize,
        and `QueueFullError` if too many operations are running."""
        if self._closed:
            raise ConflictError("the server is stopping, so it starts no operation")
        if kind == "resize" and self.num_running("resize"):  # only an embedded pool can be resized
            raise ConflictError("a resize is running; wait for it or cancel it")
        if sum(map(self.num_running, KINDS)) >= MAX_RUNNING:
            raise QueueFullError(f"{MAX_RUNNING} operations are running, and no more are allowed; wait until one ends")
        self._started += 1
        operation = Operation(self._started, kind, pool, make_sweep(), dry_run, self._clock())
        self._operations[operation.view.id] = operation
        self._forget_old()
        operation.task = asyncio.create_task(self._run(operation), name=f"kvstow-{operation.view.id}")
        return operation

    def get(self, operation_id: str) -> Operation:
        """Return an operation. Raises `NotFoundError`, also for one that is no longer kept."""
        self._forget_old()
        operation = self._operations.get(operation_id)
        if operation is None:
            raise NotFoundError(
                f"there is no operation {operation_id!r}; the last {_KEPT} are kept for {_KEPT_SECONDS:g} s"
            )
        return operation

    def all(self) -> list[Operation]:
        self._forget_old()
        return list(reversed(self._operations.values()))

    def forget(self, operation_id: str) -> None:
        """Remove an operation that has ended. Raises `NotFoundError`, and `ConflictError` while it is running."""
        if self.get(operation_id).running:
            raise ConflictError(f"operation {operation_id} is running; cancel it first")
        del self._operations[operation_id]

    def num_running(self, kind: OperationKind) -> int:
        return sum(operation.running and operation.view.kind == kind for operation in self._operations.values())

    async def close(self, timeout: float = 5.0) -> None:
        """Cancel the running operations and wait for their end. No operation can start after that. Idempotent."""
        self._closed = True
        operations = list(self._operations.values())
        for operation in operations:
            operation.cancel()
        await asyncio.gather(*(operation.wait(timeout) for operation in operations))

    async def _run(self, operation: Operation) -> None:
        self._log(operation.view)
        try:
            await operation.run()
        finally:
            view = operation.view
            self._log(view)
            self.ended[view.kind, view.state] += 1
            self.seconds[view.kind].observe(self._clock() - operation.born)

    def _log(self, view: OperationView) -> None:
        names = ("id", "pool", "kind", "dry_run", "state", "error")
        self._journal.add("operation", **{name: getattr(view, name) for name in names})

    def _forget_old(self) -> None:
        """Drop ended operations that are too old, and the oldest ones if there are too many."""
        oldest = self._clock() - _KEPT_SECONDS
        excess = len(self._operations) - _KEPT
        for name, operation in list(self._operations.items()):
            if not operation.running and (excess > 0 or operation.born < oldest):
                del self._operations[name]
                excess -= 1
