from __future__ import annotations

import pytest

from kvstow.errors import PinError
from kvstow.memory.allowance import Allowance
from kvstow.memory.limits import Shortage
from kvstow.testing.fakes import FakeClock

MIB, GIB = 1 << 20, 1 << 30
CHUNK = 64 * MIB


class Limits:
    """Limits that leave `num_bytes`; they remember what they were asked."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes, self.clock = num_bytes, FakeClock()
        self.asked: list[int] = []
        self.allowance = Allowance(self._shortage, self.clock)

    def _shortage(self, num_bytes: int) -> Shortage | None:
        self.asked.append(num_bytes)
        return None if num_bytes <= self.num_bytes else Shortage("cgroup_limit", "no more is there")

    def require(self, *chunks: int) -> int:
        """How many questions these chunks take."""
        del self.asked[:]
        for number in chunks:
            self.allowance.require(number * CHUNK, (number + 1) * CHUNK)
        return len(self.asked)


@pytest.mark.parametrize(("left", "questions", "plenty"), [(3 * GIB, 1, True), (GIB, 2, False), (CHUNK, 24, False)])
def test_many_chunks_are_asked_for_at_once_unless_memory_is_short(left: int, questions: int, plenty: bool) -> None:
    limits = Limits(left)
    assert limits.require(*range(8)) == questions
    assert limits.allowance.is_plenty is plenty


def test_what_does_not_fit_is_refused_with_the_reason() -> None:
    limits = Limits(CHUNK - 1)
    with pytest.raises(PinError, match="the next chunk does not fit: no more is there") as caught:
        limits.require(0)
    assert caught.value.reason == "cgroup_limit"


def test_plenty_is_not_believed_for_long() -> None:
    limits = Limits(4 * GIB)
    limits.require(0)
    limits.num_bytes = GIB  # others have taken it
    assert limits.require(1) == 0
    limits.clock.advance(1)
    assert limits.require(2) == 2
    assert not limits.allowance.is_plenty


def test_what_is_forgotten_is_asked_again() -> None:
    limits = Limits(4 * GIB)
    limits.require(0)
    limits.allowance.forget()
    assert limits.require(1) == 1
