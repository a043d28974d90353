from __future__ import annotations

import threading
from typing import Any

import pytest
from tests.doubles.fakes import FakeClock

from kvstow.config import EngineConfig
from kvstow.control.engine import OffloadEngine
from kvstow_service.admin import adminhost as ticker_module
from kvstow_service.admin.adminhost import Ticker

FAST = 0.001


@pytest.fixture
def engine() -> OffloadEngine:
    return OffloadEngine(EngineConfig(slot_bytes=4096, capacity_slots=8))


def test_it_ticks_until_it_is_stopped(engine: OffloadEngine, monkeypatch: pytest.MonkeyPatch, eventually: Any) -> None:
    ticks: list[int] = []
    monkeypatch.setattr(engine, "tick", lambda: ticks.append(1))
    ticker = Ticker(engine.tick, interval=FAST)
    ticker.start()
    eventually(lambda: len(ticks) > 3)
    assert ticker.check() is None
    ticker.stop()
    ticker.stop()
    assert ticker.check() == "the ticker has stopped"


def test_a_tick_that_raises_does_not_end_it(
    engine: OffloadEngine, monkeypatch: pytest.MonkeyPatch, eventually: Any, caplog: pytest.LogCaptureFixture
) -> None:
    ticked_again = threading.Event()

    def tick() -> None:
        if caplog.records:
            ticked_again.set()
        raise RuntimeError("out of step")

    monkeypatch.setattr(engine, "tick", tick)
    ticker = Ticker(engine.tick, interval=FAST)
    ticker.start()
    assert ticked_again.wait(30)
    ticker.stop()
    assert "RuntimeError: out of step" in caplog.text


def test_tls_files_are_renewed_at_each_tick_although_the_engine_fails(
    engine: OffloadEngine, monkeypatch: pytest.MonkeyPatch, eventually: Any, caplog: pytest.LogCaptureFixture
) -> None:
    done: list[int] = []

    def tick() -> None:
        raise RuntimeError("out of step")

    def chore() -> None:
        done.append(1)
        raise OSError("no such file")

    monkeypatch.setattr(engine, "tick", tick)
    ticker = Ticker(engine.tick, interval=FAST, renew_tls=chore)
    ticker.start()
    eventually(lambda: len(done) > 3)
    assert ticker.check() is None
    ticker.stop()
    assert "OSError: no such file" in caplog.text


def test_a_tick_that_hangs_is_noticed(engine: OffloadEngine, monkeypatch: pytest.MonkeyPatch, eventually: Any) -> None:
    monkeypatch.setattr(ticker_module, "_JOIN_SECONDS", 0.01)
    hangs, release = threading.Event(), threading.Event()

    def tick() -> None:
        hangs.set()
        release.wait(30.0)

    monkeypatch.setattr(engine, "tick", tick)
    clock = FakeClock()
    ticker = Ticker(engine.tick, interval=FAST, clock=clock)
    ticker.start()
    assert hangs.wait(30.0)
    assert ticker.check() is None
    clock.advance(11.0)
    assert ticker.check() == "the ticker has not run for 11 s"
    ticker.stop()
    release.set()


def test_a_renewal_that_hangs_stops_no_tick(
    engine: OffloadEngine, monkeypatch: pytest.MonkeyPatch, eventually: Any
) -> None:
    monkeypatch.setattr(ticker_module, "_JOIN_SECONDS", 0.01)
    hangs, release = threading.Event(), threading.Event()
    ticks: list[int] = []

    def chore() -> None:
        hangs.set()
        release.wait(30.0)

    monkeypatch.setattr(engine, "tick", lambda: ticks.append(1))
    clock = FakeClock()
    ticker = Ticker(engine.tick, interval=FAST, renew_tls=chore, clock=clock)
    ticker.start()
    assert hangs.wait(30.0)
    clock.advance(11.0)
    before = len(ticks)
    eventually(lambda: len(ticks) > before + 3)
    assert ticker.check() == "the check of the TLS files has not run for 11 s"
    ticker.stop()
    release.set()


def test_one_that_was_never_started_can_be_stopped(engine: OffloadEngine) -> None:
    Ticker(engine.tick).stop()
