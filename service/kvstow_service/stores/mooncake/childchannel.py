"""Keeps one child process, which runs Mooncake's library, connected to the store, and makes calls through it."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from kvstow.errors import InvalidRequestError, TierTimeoutError, TierUnavailableError
from kvstow_service.stores.childprocess import IsolatedProcess, pause_after
from kvstow_service.stores.messagesocket import MessageSocket
from kvstow_service.stores.mooncake.childmessages import (
    AddMemory,
    Answer,
    Connect,
    RemoveMemory,
)
from kvstow_service.stores.mooncake.objects import ClientHealth, MemoryRange

_MODULE = "kvstow_service.stores.mooncake.storechild"

# Variables that an operator has set are not changed.
_SETTINGS = {
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "8192",  # with its default of 1,024, batches have hung
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",  # an attempt takes 4 s, and the channel tries again itself
    "MC_RPC_TIMEOUT_MS": "5000",  # connecting to a master that hangs would take 30 s
    "GLOG_minloglevel": "2",  # log only errors
}

_log = logging.getLogger("kvstow.tier")


class ChildProcess(IsolatedProcess):
    """A child process that runs Mooncake's library. It starts at once. Only one thread at a time may use a lane; any
    thread may call `kill`."""

    def __init__(self, lanes: Sequence[str], inherited: Sequence[int] = ()) -> None:
        """`lanes`: the names of the lanes, of which the first one is for connecting and for memory. `inherited`:
        descriptors that the process has until it ends; the caller keeps its own. Raises `OSError` if no process can be
        started."""
        self.lanes: dict[str, MessageSocket] = {}
        theirs = []
        for name in lanes:
            ours, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self.lanes[name] = MessageSocket(ours)
            theirs.append(end)
        try:
            super().__init__(_MODULE, [end.fileno() for end in theirs], inherited, _SETTINGS, _log)
        except BaseException:
            for lane in self.lanes.values():
                lane.end.close()
            raise
        finally:
            for end in theirs:
                end.close()

    def ask(self, lane: str, request: object, timeout: float, *, fds: Sequence[int] = ()) -> Answer:
        """Send a request, and return its answer. Raises `TimeoutError`, after which the lane must not be used any more,
        or `EOFError` if the process has ended."""
        end = time.monotonic() + timeout
        self.lanes[lane].send(request, *fds, timeout=timeout)
        answer: Answer = self.lanes[lane].receive(max(0.001, end - time.monotonic()))[0]
        return answer

    def close(self) -> None:
        """Kill the process and give up its lanes, which no thread may use any more. Idempotent."""
        self.kill()
        for lane in self.lanes.values():
            lane.end.close()
        self.join_reader()


CONTROL = "control"
"""The lane on which a child is connected and gets memory."""

_START_SECONDS = 20.0  # imports take 2 s on a busy machine, and each of Mooncake's attempts up to 5 s
_MEMORY_SECONDS = 120.0  # a network card takes this long to register a terabyte
_LOOK_SECONDS = 0.5  # how often an idle child that has ended is noticed


class ChildChannel:
    """A connection to the store that outlives the processes which make it. Thread-safe, but only one thread at a time
    may use a lane.

    A thread of its own starts the child, connects it, gives it all memory, and starts another one when it has ended: at
    once, and after pauses that double until a call succeeds. A call that finds no connected child waits for the attempt
    that is under way; between attempts it fails at once.

    Guarantee: when a call ends, in whatever way, no process of this channel touches the memory that the call was about.
    """

    def __init__(self, purpose: str, start_child: Callable[[], ChildProcess], connect: Callable[[], Connect]) -> None:
        """`purpose` names the thread and log lines. The channel's thread calls `start_child` and `connect`, which may
        raise `OSError`."""
        self._purpose, self._start_child, self._make_connect = purpose, start_child, connect
        self._changed = threading.Condition()
        # Under the condition's lock:
        self._child: ChildProcess | None = None  # connected, with all memory
        self._starting: ChildProcess | None = None
        self._users = 0  # threads that use a child; the next child starts when there are none
        self._is_trying = True
        self._problem = "it has not connected yet"
        self._has_failed = self._is_closed = False
        self._starts = self._starts_without_success = self._timeouts = 0
        # Taken before the condition's lock. Held while memory is registered, so that no child misses any.
        self._memory_lock = threading.Lock()
        self._ranges: dict[int, MemoryRange] = {}
        """The memory that each child gets, with descriptors of this channel's own."""
        self._thread = threading.Thread(target=self._run, name=f"kvstow-mooncake-{purpose}", daemon=True)
        self._thread.start()

    def call(self, lane: str, request: object, timeout: float) -> tuple[int, ...]:
        """Make a request, and return the status codes of its answer. Raises `TierTimeoutError` or another
        `TierUnavailableError`, or `InvalidRequestError` if the child has refused the request."""
        end = time.monotonic() + timeout
        with self._use(end) as child:
            try:
                answer = child.ask(lane, request, max(0.001, end - time.monotonic()))
            except TimeoutError:
                self._end(child, f"did not answer for {timeout:.3g} s", timeouts=1)
                raise TierTimeoutError(f"Mooncake did not answer for {timeout:.3g} s; its process was ended") from None
            except (EOFError, OSError):
                raise TierUnavailableError(self._end(child, "ended during a call")) from None
        if isinstance(answer, str):
            raise InvalidRequestError(answer)
        with self._changed:
            self._starts_without_success = 0
        return answer

    def health(self) -> ClientHealth:
        with self._changed:
            counts = self._timeouts, max(0, self._starts - 1)
            if self._is_closed:
                return ClientHealth("closed", "it was closed", *counts)
            if self._has_failed:
                return ClientHealth("failed", self._problem, *counts)
            if self._child is None:
                return ClientHealth("starting", self._problem, *counts)
            return ClientHealth("on", "", *counts)

    @property
    def pid(self) -> int | None:
        with self._changed:
            return None if self._child is None else self._child.pid

    def add_memory(self, memory: MemoryRange) -> None:
        with self._memory_lock:
            added = self._ranges[memory.range_id] = memory._replace(fd=os.dup(memory.fd))
            with suppress(TierUnavailableError), self._use() as child:
                self._add(child, added)

    def remove_memory(self, range_id: int) -> None:
        with self._memory_lock:
            removed = self._ranges.pop(range_id, None)
            if removed is None:  # the channel was closed, and so no process has it
                return
            with suppress(TierUnavailableError), self._use() as child:
                self._change_memory(child, RemoveMemory(range_id))
            os.close(removed.fd)

    def close(self) -> None:
        """End the child, and with it the calls under way. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            children = [child for child in (self._child, self._starting) if child is not None]
        for child in children:
            child.kill()
        with self._changed:
            self._changed.notify_all()
        self._thread.join()
        with self._memory_lock:
            for one in self._ranges.values():
                os.close(one.fd)
            self._ranges.clear()

    @contextmanager
    def _use(self, end: float = 0.0) -> Iterator[ChildProcess]:
        """Wait for a connected child until `end`, and keep its lanes open while the context lasts. Raises
        `TierUnavailableError`."""
        with self._changed:
            while self._child is None or self._is_closed:
                if self._is_closed:
                    raise TierUnavailableError("the client was closed")
                left = end - time.monotonic()
                if self._has_failed or not self._is_trying or left <= 0:
                    raise TierUnavailableError(f"the client is not connected to Mooncake: {self._problem}")
                self._changed.wait(left)
            child = self._child
            self._users += 1
        try:
            yield child
        finally:
            with self._changed:
                self._users -= 1
                if self._child is not child:  # only then a thread waits for the last user
                    self._changed.notify_all()

    def _end(self, child: ChildProcess, what: str, *, timeouts: int = 0) -> str:
        """Kill a child and wait for its end, because the slots of its calls are free only then. Returns a text that
        says what has happened."""
        child.kill()
        problem = f"process {child.pid} {what}" + (", and was ended" if timeouts else f" ({child.describe_end()})")
        with self._changed:
            if self._child is child:
                self._child, self._problem = None, problem
            self._timeouts += timeouts
            self._changed.notify_all()
        return problem

    def _add(self, child: ChildProcess, one: MemoryRange) -> bool:
        return self._change_memory(child, AddMemory(one.range_id, one.num_bytes), one.fd)

    def _change_memory(self, child: ChildProcess, request: AddMemory | RemoveMemory, *fds: int) -> bool:
        """Let a child change its memory. Returns whether it has done so. If not, the child is killed, so that it has no
        memory at all."""
        try:
            answer = child.ask(CONTROL, request, _MEMORY_SECONDS, fds=fds)
        except (TimeoutError, EOFError, OSError):
            self._end(child, "did not change its memory")
            return False
        if isinstance(answer, str):
            self._end(child, f"refused memory ({answer})")
            with self._changed:
                self._problem, self._has_failed = answer, True
                self._changed.notify_all()
            return False
        return True

    def _run(self) -> None:
        while not self._is_closed and not self._has_failed:
            with self._changed:
                self._starts_without_success += 1
            try:
                self._host(self._start_child())
            except OSError as error:
                with self._changed:
                    self._problem = f"no process can be started: {error}"
            except Exception as error:  # noqa: BLE001 - without this thread, there would never be a process again
                _log.exception("Mooncake, %s: unexpected error", self._purpose)
                with self._changed:
                    self._problem = repr(error)
            self._pause()

    def _host(self, child: ChildProcess) -> None:
        """Connect a child, and watch it until it has ended and no thread uses it."""
        with self._changed:
            self._starts += 1
            self._starting = child
            is_closed = self._is_closed
        try:
            if not is_closed and self._connect(child):
                _log.info("Mooncake, %s: process %d is connected", self._purpose, child.pid)
                self._watch(child)
        finally:
            child.kill()
            with self._changed:
                self._starting = None
                self._changed.wait_for(lambda: self._users == 0)
            child.close()
        if not self._is_closed:
            _log.warning("Mooncake, %s: %s%s", self._purpose, self._problem, child.describe_lines())

    def _watch(self, child: ChildProcess) -> None:
        with self._changed:
            self._starting = None
            while self._child is child and not child.has_ended():
                self._changed.wait(_LOOK_SECONDS)
            nobody_has_noticed = self._child is child
        if nobody_has_noticed:
            self._end(child, "ended")

    def _connect(self, child: ChildProcess) -> bool:
        """Connect the child and give it all memory. Returns whether both have succeeded."""
        try:
            answer = child.ask(CONTROL, self._make_connect(), _START_SECONDS)
            problem = answer if isinstance(answer, str) else None
        except TimeoutError:
            problem = f"process {child.pid} did not connect within {_START_SECONDS:.0f} s"
        except EOFError:
            child.kill()
            problem = f"process {child.pid} ended before it was connected ({child.describe_end()})"
        except OSError as error:
            problem = str(error)
        if problem is not None:
            with self._changed:
                self._problem = problem
            return False
        with self._memory_lock:
            if not all(self._add(child, one) for one in self._ranges.values()):
                return False
            with self._changed:
                self._child = child
                self._changed.notify_all()
        return True

    def _pause(self) -> None:
        with self._changed:
            seconds = pause_after(self._starts_without_success)
            if seconds and not self._is_closed:
                self._is_trying = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._is_closed, seconds)
            self._is_trying = True
