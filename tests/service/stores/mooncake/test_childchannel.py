"""The channel over children that a test plays, without Mooncake."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from typing import Any

import pytest
from tests.waiting import eventually

from kvstow.errors import TierTimeoutError, TierUnavailableError
from kvstow.memfd import create_memfd
from kvstow_service.stores.childprocess import pause_after
from kvstow_service.stores.mooncake.childchannel import ChildChannel
from kvstow_service.stores.mooncake.childmessages import AddMemory, Answer, Connect, Exists, RemoveMemory
from kvstow_service.stores.mooncake.objects import MemoryRange

SECONDS = 30.0
_pids = count(1000)


class FakeChild:
    """Obeys at once, unless it hangs: then its calls end when it is dead. `kill` ends when it may."""

    def __init__(self) -> None:
        self.pid = next(_pids)
        self.hangs = self.refuses_memory = self.refuses_to_connect = False
        self.asked: list[object] = []
        self.signalled = threading.Event()
        self.may_die = threading.Event()
        self.may_die.set()
        self.is_dead = threading.Event()
        self.is_closed = False

    def ask(self, lane: str, request: object, timeout: float, *, fds: Sequence[int] = ()) -> Answer:
        assert not self.is_closed
        if isinstance(request, Connect):
            return "no master" if self.refuses_to_connect else ()
        self.asked.append(request)
        if self.hangs and lane != "control":
            if not self.is_dead.wait(timeout):
                raise TimeoutError
            raise EOFError
        if self.is_dead.is_set():
            raise EOFError
        return "no memlock" if self.refuses_memory and isinstance(request, AddMemory) else (7,)

    def has_ended(self) -> bool:
        return self.is_dead.is_set()

    def kill(self) -> None:
        self.signalled.set()
        assert self.may_die.wait(SECONDS)
        self.is_dead.set()

    def close(self) -> None:
        self.kill()
        self.is_closed = True

    def describe_end(self) -> str:
        return "signal SIGKILL"

    def describe_lines(self) -> str:
        return ": I1129 Successfully created client"


class Stage:
    """A channel, and the children that it starts. `prepare` sees each one before the channel does."""

    def __init__(self) -> None:
        self.children: list[FakeChild] = []
        self.prepare: Callable[[FakeChild], object] = lambda child: None
        self._threads = ThreadPoolExecutor(4)
        self.memory: list[MemoryRange] = []

    def open(self) -> ChildChannel:
        self.channel = ChildChannel("test", self._start, lambda: Connect("", "", "", "", 1))
        return self.channel

    def has_asked(self) -> bool:
        """Whether a child has been asked for something, and so a call is under way."""
        return any(child.asked for child in self.children)

    def call(self, lane: str = "a", *, timeout: float = SECONDS) -> Future[tuple[int, ...]]:
        return self._threads.submit(self.channel.call, lane, Exists(()), timeout)

    def range(self) -> MemoryRange:
        self.memory.append(MemoryRange(len(self.memory), 4096, create_memfd("test", 4096)))
        return self.memory[-1]

    def close(self) -> None:
        for child in self.children:
            child.may_die.set()
        self.channel.close()
        self._threads.shutdown()
        for memory in self.memory:
            assert memory.fd is not None
            os.close(memory.fd)

    def _start(self) -> Any:
        child = FakeChild()
        self.prepare(child)
        self.children.append(child)
        return child


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.close()


def test_a_call_that_takes_too_long_ends_only_when_its_process_is_gone(stage: Stage) -> None:
    """The process is killed because of the call, and takes its time to die."""

    def hang(child: FakeChild) -> None:
        if not stage.children:
            child.hangs = True
            child.may_die.clear()

    stage.prepare = hang
    stage.open()
    call = stage.call(timeout=0.05)
    eventually(lambda: stage.children)
    child = stage.children[0]
    assert child.signalled.wait(SECONDS)  # killed, and not gone yet
    with pytest.raises(TimeoutError):
        call.result(0.1)
    assert len(stage.children) == 1  # nor is there another one that could use the slots
    child.may_die.set()
    with pytest.raises(TierTimeoutError):
        call.result(SECONDS)
    assert child.is_dead.is_set()
    assert stage.call().result(SECONDS) == (7,)
    assert len(stage.children) == 2
    assert (stage.channel.health().timeouts, stage.channel.health().restarts) == (1, 1)


def test_the_other_calls_of_a_process_that_is_killed_end_when_it_is_gone(stage: Stage) -> None:
    stage.prepare = lambda child: setattr(child, "hangs", not stage.children)
    stage.open()
    other = stage.call("a")
    eventually(stage.has_asked)
    with pytest.raises(TierTimeoutError):
        stage.call("b", timeout=0.05).result(SECONDS)
    with pytest.raises(TierUnavailableError, match="ended during a call"):
        other.result(SECONDS)
    assert stage.call().result(SECONDS) == (7,)


def test_the_lines_of_the_library_are_in_the_log_and_not_in_the_reason(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    may_start = threading.Event()

    def hang(child: FakeChild) -> None:
        child.hangs = True
        if stage.children:  # the next process, which would take the reason away
            assert may_start.wait(SECONDS)

    stage.prepare = hang
    stage.open()
    with pytest.raises(TierTimeoutError):
        stage.call("b", timeout=0.05).result(SECONDS)
    reason = stage.channel.health().reason
    eventually(lambda: "and was ended: I1129 Successfully created client" in caplog.text)
    may_start.set()
    assert reason.endswith("did not answer for 0.05 s, and was ended")


def test_each_process_gets_all_memory_before_any_call(stage: Stage) -> None:
    channel = stage.open()
    first, second, third = (stage.range() for _ in range(3))
    channel.add_memory(first)
    assert stage.call().result(SECONDS) == (7,)
    channel.add_memory(second)
    channel.add_memory(third)
    channel.remove_memory(first.range_id)
    assert RemoveMemory(0) in stage.children[0].asked
    stage.children[0].kill()
    eventually(lambda: len(stage.children) == 2)
    assert stage.call().result(SECONDS) == (7,)
    assert stage.children[1].asked == [AddMemory(1, 4096), AddMemory(2, 4096), Exists(())]


def test_a_process_that_does_not_give_memory_up_is_killed(stage: Stage) -> None:
    channel = stage.open()
    memory = stage.range()
    channel.add_memory(memory)
    assert stage.call().result(SECONDS) == (7,)
    child = stage.children[0]
    child.is_dead.set()
    channel.remove_memory(memory.range_id)
    assert child.signalled.is_set()


def test_memory_is_gone_once_the_channel_was_closed(stage: Stage) -> None:
    """A caller that waits for the removal is answered even if the channel is closed first."""
    channel = stage.open()
    memory = stage.range()
    channel.add_memory(memory)
    channel.close()
    channel.remove_memory(memory.range_id)


def test_memory_that_cannot_be_registered_stops_the_client(stage: Stage) -> None:
    stage.prepare = lambda child: setattr(child, "refuses_memory", True)
    channel = stage.open()
    channel.add_memory(stage.range())
    eventually(lambda: channel.health().state == "failed")
    assert channel.health().reason == "no memlock"
    with pytest.raises(TierUnavailableError, match="no memlock"):
        stage.call().result(SECONDS)
    assert all(child.is_dead.is_set() for child in stage.children)


def test_calls_fail_at_once_between_attempts_and_say_why(stage: Stage) -> None:
    stage.prepare = lambda child: setattr(child, "refuses_to_connect", True)
    stage.open()
    eventually(lambda: len(stage.children) >= 3)
    with pytest.raises(TierUnavailableError, match="no master"):
        stage.call().result(SECONDS)
    assert all(child.is_closed for child in stage.children[:-1])
    assert stage.channel.health().state == "starting"


def test_pauses_double_until_a_call_succeeds() -> None:
    assert [pause_after(starts) for starts in (0, 1, 2, 3, 4, 100)] == [0.0, 0.0, 0.5, 1.0, 2.0, 15.0]


def test_an_unexpected_error_ends_the_process_and_another_one_starts(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> Answer:
        raise ZeroDivisionError("defect")

    def prepare(child: FakeChild) -> None:
        if not stage.children:
            child.ask = fail  # type: ignore[method-assign, assignment]

    stage.prepare = prepare
    stage.open()
    assert stage.call().result(SECONDS) == (7,)
    assert [child.is_closed for child in stage.children] == [True, False]
    assert "unexpected" in caplog.text


def test_closing_ends_calls(stage: Stage) -> None:
    stage.prepare = lambda child: setattr(child, "hangs", True)
    channel = stage.open()
    call = stage.call()
    eventually(stage.has_asked)
    channel.close()
    with pytest.raises(TierUnavailableError):
        call.result(SECONDS)
    assert stage.children[0].is_closed
    with pytest.raises(TierUnavailableError, match="closed"):
        stage.call().result(SECONDS)
