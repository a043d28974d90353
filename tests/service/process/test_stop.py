from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from kvstow_service.process.stop import Stop, StopRequests

_IGNORED_BY_SHELLS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
"""What nohup, and shells for commands in the background, have a process ignore. It stays ignored."""


@pytest.fixture(autouse=True)
def foreground() -> Iterator[None]:
    """The signals as a process in the foreground has them, wherever the tests run."""
    before = {
        number: signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        for number in _IGNORED_BY_SHELLS
    }
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def stops(foreground: None) -> Iterator[StopRequests]:
    with StopRequests() as requests:
        yield requests


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGXCPU, signal.SIGPWR])
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


def test_a_second_signal_is_no_second_request_but_hurries(stops: StopRequests) -> None:
    signal.raise_signal(signal.SIGTERM)
    assert stops.wait() == Stop("SIGTERM", 0)
    assert not stops.hurried.is_set()
    signal.raise_signal(signal.SIGINT)
    assert stops.hurried.wait(30.0)


_QUIET = (
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF, signal.SIGIO),
    *(signal.SIGSTKFLT, signal.SIGRTMIN, signal.SIGRTMAX),
)


def test_other_signals_do_not_end_the_process(stops: StopRequests) -> None:
    for number in _QUIET:
        signal.raise_signal(number)
    stops.request("the test", 0)
    assert stops.wait() == Stop("the test", 0)


def test_sighup_reloads_and_does_not_stop(stops: StopRequests) -> None:
    """Whatever the reloading raises."""
    calls: list[int] = []
    both = threading.Event()

    def reload() -> None:
        calls.append(1)
        if len(calls) == 2:
            both.set()
        raise RuntimeError("a defect")

    stops.on_reload = reload
    for number in (1, 2):
        signal.raise_signal(signal.SIGHUP)
        while len(calls) < number and not both.wait(0.01):
            pass
    assert both.wait(30.0)
    assert not stops.requested.is_set()


def test_sighup_stays_ignored_under_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequests():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_handlers_and_wakeup_fd_are_restored() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with StopRequests():
        assert signal.getsignal(signal.SIGTERM) is not before[0]
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    assert signal.set_wakeup_fd(-1) == -1
    assert "kvstow-signals" not in {thread.name for thread in threading.enumerate()}
