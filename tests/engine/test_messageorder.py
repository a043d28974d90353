"""A desired state that is older than the last one is never applied, whatever path it took."""

from __future__ import annotations

import os
import socket

import pytest

from kvstow.messageorder import NewestDesiredState, ReportSequence
from kvstow.messages import DesiredState
from kvstow.testing.rank import ready_report


class Rank:
    def __init__(self) -> None:
        self.newest = NewestDesiredState()
        self.obeyed: list[int] = []
        self.error: Exception | None = None

    def receive(self, number: int, engine: str = "engine") -> bool:
        return self.newest.apply_if_newer(DesiredState(engine, 10 * number, number=number), self.obey)

    def obey(self, desired: DesiredState) -> None:
        if self.error is not None:
            raise self.error
        self.obeyed.append(desired.capacity_slots)


def test_reports_name_their_process_and_are_numbered() -> None:
    reports = ReportSequence()
    made = ready_report(64, 4, device="cpu", sender="", number=0)
    first, second = reports.next_report(lambda: made), reports.next_report(lambda: made)
    assert (first.number, second.number) == (1, 2)
    assert first.sender == second.sender != ""
    assert (first.host, first.pid, first.device) == (socket.gethostname(), os.getpid(), "cpu")


def test_each_newer_state_is_applied_once() -> None:
    rank = Rank()
    assert [rank.receive(number) for number in (1, 1, 3, 2, 3, 4)] == [True, False, True, False, False, True]
    assert rank.obeyed == [10, 30, 40]
    assert (rank.newest.applied.number, rank.newest.stale) == (4, 1)


def test_another_engine_counts_from_the_start_and_a_replaced_one_is_ignored() -> None:
    rank = Rank()
    rank.receive(5)
    assert rank.receive(1, "another")
    assert not rank.receive(6)
    assert (rank.obeyed, rank.newest.stale) == ([50, 10], 1)
    assert rank.receive(2, "another")


def test_a_state_that_could_not_be_applied_is_tried_again() -> None:
    rank = Rank()
    rank.error = RuntimeError("no such pool")
    with pytest.raises(RuntimeError):
        rank.receive(1)
    assert rank.newest.applied.number == 0
    rank.error = None
    assert rank.receive(1)
