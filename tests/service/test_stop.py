from __future__ import annotations

import os
import signal
import threading

import pytest

from kvstow_service.stop import Stop, StopRequests


@pytest.fixture
def stops(process_state: None) -> StopRequests:
    requests = StopRequests()
    requests.install()
    return requests


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_interrupts_the_wait_and_means_success(stops: StopRequests, number: signal.Signals) -> None:
    sender = threading.Thread(target=os.kill, args=(os.getpid(), number))
    sender.start()
    assert stops.wait() == Stop(number.name, 0)
    sender.join()


def test_the_first_request_of_any_thread_counts(stops: StopRequests) -> None:
    thread = threading.Thread(target=stops.request, args=("the server ended", 1))
    thread.start()
    thread.join()
    stops.request("later", 0)
    assert stops.wait() == Stop("the server ended", 1)


def test_a_second_signal_ends_the_process_at_once(stops: StopRequests, monkeypatch: pytest.MonkeyPatch) -> None:
    statuses: list[int] = []
    monkeypatch.setattr(os, "_exit", statuses.append)
    signal.raise_signal(signal.SIGTERM)
    assert statuses == []
    signal.raise_signal(signal.SIGINT)
    assert statuses == [130]
