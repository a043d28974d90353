"""A pool of slots: some are pinned or given back while others are in use."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeGuard

import numpy as np
import numpy.typing as npt

from kvstow.callbacks import Callbacks
from kvstow.errors import ConfigError, CopyError, PinError
from kvstow.memory.chunks import Chunk, ChunkMemory, PinnedChunks
from kvstow.memory.growth import Growth
from kvstow.memory.hoststeps import CallQueue, HostSteps, MadeCall
from kvstow.memory.pinning import Pace, PinProgress, Registrar
from kvstow.messages import PoolFigures

logger = logging.getLogger("kvstow.pool")

PoolState = Literal["pinning", "ready", "degraded", "failed", "closed"]

_UNEXPECTED = "internal"
"""The `reason` of a failure that is not a `PinError`."""


@dataclass(frozen=True, kw_only=True)
class PoolStatus(PoolFigures):
    """The state of a pool at one moment.

    The state is `degraded` after a chunk could not be pinned, and `failed` after an unexpected error. In both cases
    `error_reason` and `error` say why, the pinned slots stay usable, and `retry` or a new target tries again.
    `numa_bytes` is the memory on each NUMA node. It is empty if the kernel does not report it.
    """

    state: PoolState
    error_reason: str | None
    error: str | None
    numa_bytes: Mapping[int, int]


Int64Array = npt.NDArray[np.int64]


class SlotPool(ABC):
    """A pool whose slots below `pinned_slots` may be used. `HostPool` has memory of its own. `MappedPool` maps memory
    of the node service.

    Guarantees: every slot below `pinned_slots` is populated and registered. Memory is given back from the top, in whole
    chunks, and never while a copy holds it. If pinning a chunk fails, it is undone completely. The pool then stops
    growing, but stays usable. No error ends the pinning thread. After `close` no memory is left.

    The pinning thread populates a batch of chunks before they can be registered; the `Pace` limits how many. It puts
    their register calls into a queue. After some of its steps (`steps`), the host's thread makes one of these calls.
    The pinning thread wakes up when a third of them is left, because each time it runs, a host that computes in Python
    has to hand over the interpreter. While the host makes no steps, the pinning thread makes the calls itself, with the
    pauses of the pace, and another thread populates. The watermark rises each time the pinning thread has run.

    Assumes: a caller that copies to or from slots holds their memory (`hold`) from before the copy begins until the
    device no longer touches it. `close` waits for the last of them.

    Thread-safe. `_state` guards the fields and is never held during a system call; `_ending` is held while `close`
    gives the memory back. Where both are taken, `_ending` comes first.
    """

    def __init__(
        self,
        slot_bytes: int,
        max_slots: int,
        target: int,
        memory: ChunkMemory,
        registrar: Registrar,
        steps: HostSteps,
        pace: Pace,
        *,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """`max_slots` is the largest target that `set_target` accepts. `target` is the first one. `pace` has the same
        `steps`, whose clock is the clock of the pool."""
        self.slot_bytes, self.max_slots = slot_bytes, max_slots
        self._memory, self._registrar = memory, registrar
        self.steps, self._pace = steps, pace
        self._state = threading.Condition()
        self._ending = threading.Lock()
        self._held: Counter[int] = Counter()
        """How many callers hold the slots below each end slot."""
        self._target = target
        self._chunks: PinnedChunks | None = None
        self._failure: PinError | None = None
        self._pin_failures: Counter[str] = Counter()
        self._progress = PinProgress(steps.clock)
        self._cpu_clock = cpu_clock
        self._paused = self._closing = False
        self._growth: Growth | None = None
        """The growth under way."""
        self._listeners = Callbacks()
        self._thread: threading.Thread | None = None

    # The following methods differ between pools.

    @abstractmethod
    def _close_memory(self) -> None:
        """Give back all memory and the address space. Idempotent. `close` calls it last."""

    @abstractmethod
    def addresses(self, slots: Int64Array) -> Int64Array:
        """Return the address of each pinned slot. Neighbouring slots are `slot_stride` bytes apart, except where two
        registrations meet."""

    @property
    @abstractmethod
    def slot_stride(self) -> int:
        """Bytes from one slot to the next. It exceeds `slot_bytes` only for sizes far from a multiple of a page."""

    @abstractmethod
    def _next_chunk(self, covered: int) -> Chunk | None:
        """Return the chunk to pin after the first `covered` slots, or None if there is none. Hold `_state`."""

    @abstractmethod
    def _chunks_left(self) -> int:
        """Count the chunks that are still to be pinned. Hold `_state`."""

    def _usable_end(self) -> int:
        """Return the first slot that must not be used, even if it is pinned. Hold `_state`."""
        return self._target

    def _wanted_end(self) -> int:
        """Return the first slot whose memory is not wanted any more. Hold `_state`."""
        return self._target

    # Any thread may call the following methods.

    @property
    def pinned_slots(self) -> int:
        """The watermark. Slots below it may be used."""
        with self._state:
            return self._pinned()

    def start(self, *, at_ease: bool = False) -> None:
        """Start pinning in the background. Idempotent. With `at_ease`, pinning makes longer pauses until the host
        begins a step, or until `start` is called without it."""
        with self._state:
            self.steps.is_starting = at_ease
            if self._thread is None and not self._closing:
                thread = threading.Thread(target=self._run, name="kvstow-pin", daemon=True)
                thread.start()
                self._thread = thread

    def add_listener(self, callback: Callable[[], None]) -> None:
        """Call `callback` on the pinning thread after each chunk or failure. It must not block or close the pool."""
        self._listeners.register(callback)

    def set_target(self, slots: int) -> None:
        """Grow or shrink to `slots` in the background. Slots above the target are unusable at once. A new target also
        starts a new attempt after a failure. Raises `ConfigError` unless it is between 0 and `max_slots`."""
        if not 0 <= slots <= self.max_slots:
            raise ConfigError("target slots", slots, f"0 to {self.max_slots} (max_bytes of the pool)")
        with self._state:
            if slots != self._target:
                self._target = slots
                self._failure = None
                if self._covered() >= slots:
                    self._progress.end()
                self._stop_growth(above=slots)
                self._state.notify_all()

    def set_paused(self, paused: bool) -> None:
        """While paused, pin no further chunk. Shrinking continues, and populated chunks stay populated."""
        with self._state:
            self._paused = paused
            if self._growth is not None:
                self._growth.queue.hold(paused)
            self._state.notify_all()

    def retry(self) -> None:
        """Try to pin a chunk that failed once more. Without a failure, nothing happens."""
        with self._state:
            self._failure = None
            self._state.notify_all()

    def hold(self, end_slot: int) -> ExitStack:
        """Keep the memory of all slots below `end_slot` in place until the returned object is closed. Never waits.
        Raises `CopyError` if one of these slots is not pinned."""
        held = ExitStack()
        with self._state:
            if (pinned := self._pinned()) < end_slot:
                raise CopyError(f"slot {end_slot - 1} is not pinned; the pool has {pinned} slots pinned")
            self._held[end_slot] += 1
        held.callback(self._release, end_slot)
        return held

    def _release(self, end_slot: int) -> None:
        with self._state:
            self._held[end_slot] -= 1
            if not self._held[end_slot]:
                del self._held[end_slot]
            if self._closing or self._covered() > self._wanted_end():  # otherwise no thread waits for the release
                self._state.notify_all()

    def status(self) -> PoolStatus:
        with self._state:
            pinned = self._pinned()
            done = self._chunks.count if self._chunks is not None else 0
            return PoolStatus(
                state=self._current_state(),
                pinned_slots=pinned,
                target_slots=self._target,
                pinned_bytes=pinned * self.slot_bytes,
                target_bytes=self._target * self.slot_bytes,
                resident_bytes=self._memory.resident_bytes,
                locked_bytes=self._registrar.locked_bytes,
                pin_mode=self._registrar.mode,
                notice="; ".join(filter(None, (self._registrar.notice, self._memory.notice))) or None,
                pin_rate_bytes_per_second=self._progress.rate,
                pin_elapsed_seconds=self._progress.elapsed,
                chunks_done=done,
                chunks_total=done + self._chunks_left(),
                chunks_failed=int(self._failure is not None),
                error_reason=self._failure.reason if self._failure else None,
                error=str(self._failure) if self._failure else None,
                pin_failures=dict(self._pin_failures),
                numa_bytes=dict(self._chunks.numa_bytes) if self._chunks is not None else {},
            )

    def close(self) -> None:
        """Stop pinning after the current chunk, unregister all chunks and give the memory back. Waits until no copy
        holds memory. Idempotent."""
        with self._state:
            self._closing = True
            self.steps.close()
            self._stop_growth()
            self._state.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()
        with self._ending:
            with self._state:
                self._state.wait_for(lambda: not self._held)
                chunks, self._chunks = self._chunks, None  # from now on `hold` refuses every slot
            try:
                while chunks is not None:
                    chunk, chunks = chunks.last, chunks.below
                    try:
                        self._registrar.unregister(self._memory.address_of(chunk), chunk.num_bytes)
                    except Exception as error:  # noqa: BLE001 - the other chunks must still be unregistered
                        first, last = chunk.first_slot, chunk.end_slot - 1
                        logger.warning("could not unregister slots %d-%d: %s", first, last, error)
            finally:
                self._close_memory()

    # The pinning thread calls the following methods.

    def _run(self) -> None:
        is_prepared = False
        while True:
            try:
                step = self._wait_for_step()
                if step is None:
                    return
                if step == self._grow and not is_prepared:
                    self._registrar.prepare_thread()
                    is_prepared = True
                step()
            except PinError as error:
                logger.warning("pinning stopped at %d slots: %s", self.pinned_slots, error)
                self._fail(error.reason, str(error))
            except Exception as error:
                logger.exception("pinning stopped at %d slots: unexpected error", self.pinned_slots)
                self._fail(_UNEXPECTED, repr(error))
            self._listeners.call()

    def _wait_for_step(self) -> Callable[[], None] | None:
        """Wait until there is work, and return it. Returns None when the pool closes."""
        with self._state:
            self.steps.is_pinning = self._next_step() is not None
            self._state.wait_for(lambda: self._closing or self._next_step() is not None)
            self.steps.is_pinning = not self._closing
            return None if self._closing else self._next_step()

    def _next_step(self) -> Callable[[], None] | None:
        if self._failure is not None:
            return None
        if (step := self._give_back_step()) is not None:
            return step
        return None if self._paused or self._next_chunk(self._covered()) is None else self._grow

    def _give_back_step(self) -> Callable[[], None] | None:
        """Return the work that gives memory back, which comes before growth, or None. Hold `_state`."""
        return self._shrink if self._may_give_back(self._chunks) else None

    def _grow(self) -> None:
        """Pin chunk after chunk until none is left, or until there is more urgent work."""
        with self._state:
            growth = Growth(
                self._chunks, self._plan, self._memory, self._registrar, self.steps, self._pace.chunks_ahead
            )
            self._growth = growth
            growth.queue.is_held, growth.queue.is_stopped = self._paused, self._closing
            self._progress.begin(self._covered() * self.slot_bytes)
        try:
            while (wake_at := growth.populate_ahead()) is not None:
                made = growth.queue.made
                self._advance(growth.queue, wake_at)
                self._publish(growth)
                if not self._goes_on(growth):
                    break
                if growth.queue.made > made:
                    self._listeners.call()
        finally:
            growth.queue.settle()
            with self._state:  # registered chunks stay; `end` gives the others back
                self._growth = None
                self._publish(growth)
            growth.end()
        self.steps.withdraw()
        self._record_host_calls(growth.queue)
        growth.queue.raise_error()

    def _advance(self, queue: CallQueue, wake_at: int) -> None:
        """Wait until `wake_at` calls of the queue have been made. While the host makes steps, its thread makes them;
        otherwise this thread makes the next one. May return earlier."""
        if (expected := self._pace.call_seconds) is not None:
            self.steps.offer(queue, expected)
            if self.steps.wait(queue, wake_at):
                self._record_host_calls(queue)
                return
        self._record_host_calls(queue)
        if not self._wait_for_turn(queue):
            return
        if expected is not None and self.steps.state(self.steps.clock()) == "stepping":
            return
        if queue.claim():
            try:
                started, made = self._cpu_clock(), queue.made
                num_bytes = queue.make()
                if queue.made > made:
                    self._pace.record(num_bytes, self._cpu_clock() - started, self.steps.clock())
            finally:
                queue.done()

    def _record_host_calls(self, queue: CallQueue) -> None:
        """Record the duration of the median call for every call that the host's thread has made: a single slow call
        must not make the next chunks smaller."""
        calls: list[MadeCall] = []
        while queue.by_host:
            calls.append(queue.by_host.popleft())
        calls.sort(key=lambda call: call.seconds / call.num_bytes)
        for _ in calls:
            median = calls[len(calls) // 2]
            self._pace.record(median.num_bytes, median.seconds, self.steps.clock())

    def _plan(self, covered: int, number: int) -> list[Chunk]:
        """Return at most `number` chunks to populate after the first `covered` slots. They follow each other in
        memory."""
        with self._state:
            growth = self._growth
            if self._paused or growth is None or growth.queue.is_over_for_good or self._give_back_step() is not None:
                return []
            chunks: list[Chunk] = []
            while len(chunks) < number and (chunk := self._next_chunk(covered)) is not None:
                if chunks and chunk.offset != chunks[-1].end_offset:
                    break
                chunks.append(chunk)
                growth.end_slot = covered = chunk.end_slot
            return chunks

    def _publish(self, growth: Growth) -> None:
        """Raise the watermark to the last registered chunk."""
        with self._state:
            pinned = growth.pinned
            if pinned is self._chunks:
                return
            self._chunks = pinned
            self._progress.record(self._covered() * self.slot_bytes)
            if self._next_chunk(self._covered()) is None:
                self._progress.end()

    def _goes_on(self, growth: Growth) -> bool:
        """Whether there is more to register. Waits while pinning is paused."""
        with self._state:
            if growth.is_registered:
                return not self._closing and not growth.queue.is_over_for_good and self._next_step() == self._grow
            while self._paused and not growth.queue.is_over_for_good and self._give_back_step() is None:
                self.steps.is_pinning = False
                self._state.wait()
            self.steps.is_pinning = not self._closing
            return not growth.queue.is_over_for_good and not self._paused

    def _stop_growth(self, above: int = -1) -> None:
        """End the growth under way if it has planned slots beyond the first `above`: register none of its chunks any
        more, and give back the populated ones. By default, end any growth. Hold `_state`."""
        if self._growth is not None and self._growth.end_slot > above:
            self._growth.queue.stop()

    def _shrink(self) -> None:
        """Give the last chunk back, unless it has become wanted or held in the meantime."""
        if not self._wait_for_turn():
            return
        with self._state:
            chunks = self._chunks
            if not self._may_give_back(chunks):
                return
            self._chunks = chunks.below  # from now on `hold` refuses the chunk's slots
        chunk, started, host_seconds = chunks.last, self._cpu_clock(), None
        call = partial(self._registrar.unregister, self._memory.address_of(chunk), chunk.num_bytes)
        try:
            if (expected := self._pace.call_seconds) is None:
                call()
            else:
                host_seconds = self.steps.run(call, chunk.num_bytes, expected)
        except BaseException:
            with self._state:
                self._chunks = chunks  # the chunk is still pinned; the next attempt or `close` unregisters it
            raise
        self._memory.decommit(chunk)
        seconds = self._cpu_clock() - started if host_seconds is None else host_seconds
        self._pace.record(chunk.num_bytes, seconds, self.steps.clock())

    def _wait_for_turn(self, queue: CallQueue | None = None) -> bool:
        """Leave the driver's lock to other threads for as long as the pace requires. Returns False if the pool closes
        or the queue accepts no calls any more."""
        with self._state:
            while not (is_over := self._closing or (queue is not None and queue.is_over_for_good)):
                if (seconds := self._pace.delay(self.steps.clock())) <= 0:
                    break
                self._state.wait(seconds)
            return not is_over

    def _fail(self, reason: str, message: str) -> None:
        self._memory.forget_limits()
        with self._state:
            self._failure = PinError(reason, message)
            self._pin_failures[reason] += 1
            self._progress.end()

    # Callers of the following methods hold `_state`.

    def _may_give_back(self, chunks: PinnedChunks | None) -> TypeGuard[PinnedChunks]:
        """Whether the last chunk is neither wanted nor held."""
        return chunks is not None and chunks.last.first_slot >= max(self._wanted_end(), *self._held, 0)

    def _covered(self) -> int:
        return self._chunks.last.end_slot if self._chunks is not None else 0

    def _pinned(self) -> int:
        return min(self._usable_end(), self._covered())

    def _current_state(self) -> PoolState:
        if self._closing:
            return "closed"
        if self._failure is not None:
            return "failed" if self._failure.reason == _UNEXPECTED else "degraded"
        return "ready" if self._pinned() >= self._target else "pinning"
