"""How long one thread may keep the interpreter."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from kvstow_service import turns
from kvstow_service.turns import short_turns


@pytest.fixture(autouse=True)
def usual_turns() -> Iterator[None]:
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


def test_turns_are_short_inside_and_as_before_afterwards() -> None:
    sys.setswitchinterval(0.004)
    with suppress(ImportError), short_turns():
        assert sys.getswitchinterval() == pytest.approx(0.0005)
        raise ImportError("no such module")
    assert sys.getswitchinterval() == pytest.approx(0.004)


def test_a_host_whose_turns_are_shorter_keeps_them() -> None:
    sys.setswitchinterval(0.0001)
    with short_turns():
        assert sys.getswitchinterval() == pytest.approx(0.0001, abs=2e-6)  # whole microseconds, rounded down


def test_of_two_threads_the_second_does_not_take_the_first_ones_turns_for_the_hosts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sys.setswitchinterval(0.004)
    waiting, first_is_out = threading.Event(), threading.Event()
    lock = turns._changing

    class ObservedLock:
        def __enter__(self) -> None:
            if lock.locked():
                waiting.set()
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()

    monkeypatch.setattr(turns, "_changing", ObservedLock())

    def enter() -> None:
        with short_turns():
            first_is_out.wait(10)

    second = threading.Thread(target=enter)
    with short_turns():
        second.start()
        assert waiting.wait(10)
    first_is_out.set()
    second.join(10)
    assert sys.getswitchinterval() == pytest.approx(0.004)
