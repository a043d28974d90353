from __future__ import annotations

import threading

import pytest
from tests.doubles.fakes import FakeClock
from tests.waiting import eventually

from kvstow_service.admin.adminhost import Ticker

FAST = 0.001


class Hanging:
    """Work that hangs until the test ends it."""

    def __init__(self) -> None:
        self.has_begun, self._may_end = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.has_begun.set()
        self._may_end.wait(30.0)

    def end(self) -> None:
        self._may_end.set()


def test_it_ticks_until_it_is_stopped() -> None:
    ticks: list[int] = []
    ticker = Ticker(lambda: ticks.append(1), interval=FAST)
    ticker.start()
    eventually(lambda: len(ticks) > 3)
    assert ticker.check() is None
    ticker.stop()
    ticker.stop()
    assert ticker.check() == "the ticker has stopped"


def test_what_raises_ends_neither_the_ticks_nor_the_renewal_of_tls_files(caplog: pytest.LogCaptureFixture) -> None:
    done: list[str] = []

    def tick() -> None:
        done.append("tick")
        raise RuntimeError("out of step")

    def renew() -> None:
        done.append("renewal")
        raise OSError("no such file")

    ticker = Ticker(tick, interval=FAST, renew_tls=renew)
    ticker.start()
    eventually(lambda: min(done.count("tick"), done.count("renewal")) > 3)
    assert ticker.check() is None
    ticker.stop()
    assert "RuntimeError: out of step" in caplog.text
    assert "OSError: no such file" in caplog.text


def test_a_tick_that_hangs_is_noticed() -> None:
    clock, tick = FakeClock(), Hanging()
    ticker = Ticker(tick, interval=FAST, clock=clock)
    ticker.start()
    assert tick.has_begun.wait(30.0)
    assert ticker.check() is None
    clock.advance(11.0)
    assert ticker.check() == "the ticker has not run for 11 s"
    tick.end()
    ticker.stop()


def test_a_renewal_that_hangs_stops_no_tick() -> None:
    clock, renewal, ticks = FakeClock(), Hanging(), list[int]()
    ticker = Ticker(lambda: ticks.append(1), interval=FAST, renew_tls=renewal, clock=clock)
    ticker.start()
    assert renewal.has_begun.wait(30.0)
    clock.advance(11.0)
    before = len(ticks)
    eventually(lambda: len(ticks) > before + 3)
    assert ticker.check() == "the check of the TLS files has not run for 11 s"
    renewal.end()
    ticker.stop()


def test_one_that_was_never_started_can_be_stopped() -> None:
    Ticker(lambda: None).stop()
