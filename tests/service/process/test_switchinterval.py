"""How long one thread may keep the interpreter."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from kvstow_service.process.switchinterval import short_switch_interval


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


def test_the_smallest_of_several_intervals_counts_until_the_last_thread_has_left() -> None:
    sys.setswitchinterval(0.004)
    inside, leave = threading.Event(), threading.Event()

    def enter() -> None:
        with short_switch_interval(0.0002):
            inside.set()
            leave.wait(60)

    second = threading.Thread(target=enter)
    with short_switch_interval():
        second.start()
        assert inside.wait(60)
        assert sys.getswitchinterval() == pytest.approx(0.0002, abs=2e-6)
    assert sys.getswitchinterval() == pytest.approx(0.0002, abs=2e-6)
    with short_switch_interval():  # what is in force is not taken for the host's
        leave.set()
        second.join(60)
        assert sys.getswitchinterval() == pytest.approx(0.0005)
    assert sys.getswitchinterval() == pytest.approx(0.004)
