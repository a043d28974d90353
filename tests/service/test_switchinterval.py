"""How long one thread may keep the interpreter."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from kvstow_service import switchinterval
from kvstow_service.switchinterval import short_switch_interval


@pytest.fixture(autouse=True)
def default_interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


def test_the_interval_is_short_inside_and_restored_afterwards() -> None:
    sys.setswitchinterval(0.004)
    with suppress(ImportError), short_switch_interval():
        assert sys.getswitchinterval() == pytest.approx(0.0005)
        raise ImportError("no such module")
    assert sys.getswitchinterval() == pytest.approx(0.004)


def test_a_shorter_interval_of_the_host_is_kept() -> None:
    sys.setswitchinterval(0.0001)
    with short_switch_interval():
        assert sys.getswitchinterval() == pytest.approx(0.0001, abs=2e-6)  # whole microseconds, rounded down


def test_a_second_thread_does_not_take_the_short_interval_for_the_hosts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sys.setswitchinterval(0.004)
    waiting, first_is_out = threading.Event(), threading.Event()
    lock = switchinterval._changing

    class ObservedLock:
        def __enter__(self) -> None:
            if lock.locked():
                waiting.set()
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()

    monkeypatch.setattr(switchinterval, "_changing", ObservedLock())

    def enter() -> None:
        with short_switch_interval():
            first_is_out.wait(10)

    second = threading.Thread(target=enter)
    with short_switch_interval():
        second.start()
        assert waiting.wait(10)
    first_is_out.set()
    second.join(10)
    assert sys.getswitchinterval() == pytest.approx(0.004)
