from __future__ import annotations

import threading

import pytest

from kvstow.memory.hoststeps import CallQueue, RegisterCall


class Calls:
    """A queue of calls that note their number. `failing`: the number of the one that raises."""

    def __init__(self, number: int, failing: int | None = None) -> None:
        self.made: list[int] = []
        self.queue = CallQueue()
        self.queue.add([RegisterCall(lambda index=index: self._make(index, failing), 10) for index in range(number)])  # type: ignore[misc]

    def _make(self, index: int, failing: int | None) -> None:
        if index == failing:
            raise ValueError("refused")
        self.made.append(index)

    def make(self) -> bool:
        """Claim and make the next one, if there is one."""
        if not self.queue.claim():
            return False
        assert self.queue.make() == 10
        self.queue.done()
        return True


def test_calls_are_made_once_and_in_order_and_more_may_follow() -> None:
    calls = Calls(2)
    assert [calls.make() for _ in range(3)] == [True, True, False]
    calls.queue.add([RegisterCall(lambda: calls.made.append(7), 10)])
    assert calls.make()
    assert calls.made == [0, 1, 7]
    assert calls.queue.settle() == 3
    calls.queue.raise_error()


def test_a_queue_that_is_held_begins_no_call_and_one_that_is_stopped_never_does() -> None:
    calls = Calls(3)
    calls.queue.hold(True)
    assert not calls.make()
    calls.queue.hold(False)
    assert calls.make()
    calls.queue.stop()
    assert not calls.make()
    assert calls.queue.settle() == 1
    calls.queue.raise_error()


@pytest.mark.parametrize("how", ["hold", "stop", "abandon", "fail"])
def test_the_waiting_thread_wakes_when_there_will_be_no_more_calls(how: str) -> None:
    calls = Calls(5, failing=0)
    waiting = threading.Thread(target=calls.queue.wait, args=(5, 60.0), daemon=True)
    waiting.start()
    ways = {"stop": calls.queue.stop, "abandon": calls.queue.abandon, "fail": calls.make}
    ways.get(how, lambda: calls.queue.hold(True))()
    waiting.join(30)
    assert not waiting.is_alive()


def test_settling_waits_for_the_call_under_way() -> None:
    queue, begun, go_on = CallQueue(), threading.Event(), threading.Event()

    def call() -> None:
        begun.set()
        assert go_on.wait(30)

    queue.add([RegisterCall(call, 1), RegisterCall(call, 1)])

    def make() -> None:
        assert queue.claim()
        queue.make()
        queue.done()

    making = threading.Thread(target=make, daemon=True)
    making.start()
    assert begun.wait(30)
    settled: list[int] = []
    settling = threading.Thread(target=lambda: settled.append(queue.settle()), daemon=True)
    settling.start()
    settling.join(0.05)
    assert settling.is_alive()
    go_on.set()
    settling.join(30)
    making.join(30)
    assert settled == [1], "and no other is begun"
