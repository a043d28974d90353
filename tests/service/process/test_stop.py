from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from kvstow_service.process.stop import Stop, StopRequests


@pytest.fixture
def stops() -> Iterator[StopRequests]:
    with StopRequests() as requests:
        yield requests


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_interrupts_the_wait_and_means_success(stops: StopRequests, number: signal.Signals) -> None:
    sender = threading.Thread(target=os.kill, args=(os.getpid(), number))
    sender.start()
    assert stops.requested.wait(30.0)
    assert stops.wait() == Stop(number.name, 0)
    sender.join()


def test_a_signal_received_by_another_thread_counts(stops: StopRequests) -> None:
    """Nothing wakes the main thread then, and handlers of Python's run nowhere else."""
    end = threading.Event()
    target = threading.Thread(target=end.wait)
    target.start()
    assert target.ident is not None
    sender = threading.Thread(target=signal.pthread_kill, args=(target.ident, signal.SIGTERM))
    sender.start()
    assert stops.wait() == Stop("SIGTERM", 0)
    end.set()
    sender.join()
    target.join()


def test_the_first_request_of_any_thread_counts(stops: StopRequests) -> None:
    thread = threading.Thread(target=stops.request, args=("the server ended", 1))
    thread.start()
    thread.join()
    stops.request("later", 0)
    assert stops.wait() == Stop("the server ended", 1)


def test_a_second_signal_ends_the_process_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    statuses: list[int] = []
    monkeypatch.setattr(os, "_exit", statuses.append)
    with StopRequests():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)
    assert statuses == [130]


def test_other_signals_are_ignored(stops: StopRequests) -> None:
    before = signal.signal(signal.SIGUSR1, lambda number, frame: None)
    signal.raise_signal(signal.SIGUSR1)
    stops.request("the test", 0)
    assert stops.wait() == Stop("the test", 0)
    signal.signal(signal.SIGUSR1, before)


def test_handlers_and_wakeup_fd_are_restored() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with StopRequests():
        assert signal.getsignal(signal.SIGTERM) is not before[0]
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    assert signal.set_wakeup_fd(-1) == -1
    assert "kvstow-signals" not in {thread.name for thread in threading.enumerate()}
