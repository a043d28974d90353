"""Recordings of a pool's requests."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tests.doubles.fakes import FakeClock
from tests.doubles.rank import use_keys

from kvstow.control import recording
from kvstow.control.engine import OffloadEngine
from kvstow.control.recording import MOST_BYTES, MOST_SECONDS, Recording
from kvstow.endings import NO_ENDING, Ending
from kvstow.errors import ConflictError, InvalidRequestError

LIMITS: dict[str, Any] = {"seconds": 60.0, "max_bytes": 1 << 20}


def keys(*numbers: int) -> list[bytes]:
    return [hashlib.sha256(b"%d" % number).digest() for number in numbers]


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(100.0)


@pytest.fixture
def made(clock: FakeClock) -> Recording:
    return Recording(100.0, block_tokens=16, clock=clock, **LIMITS)


def use(
    made: Recording,
    chain: Sequence[bytes],
    *,
    tag: int = 0,
    looked_up: tuple[int, int] | None = None,
    now: float = 101.5,
    ending: Ending = NO_ENDING,
) -> None:
    made.add("request", chain, tag, looked_up, now)
    made.end("request", ending, now + 0.25)


def lines(made: Recording) -> list[dict[str, Any]]:
    return [json.loads(line) for line in made.take().lines.splitlines()]


def test_a_line_has_times_lengths_and_what_was_looked_up(made: Recording) -> None:
    use(made, keys(1, 2, 3, 4, 5), looked_up=(1, 3))
    (line,) = lines(made)
    ids = line.pop("hash_ids")
    assert line == {"timestamp": 1500, "end": 1750, "input_length": 48, "output_length": 32, "looked_up": [1, 3]}
    assert len(set(ids)) == 5
    assert (made.requests, made.blocks) == (1, 2)


def test_equal_blocks_have_equal_ids_within_a_namespace(made: Recording) -> None:
    use(made, keys(1, 2))
    use(made, keys(1, 3))
    use(made, keys(1), tag=7)
    first, second, other = (line["hash_ids"] for line in lines(made))
    assert first[0] == second[0] != other[0]
    assert first[1] != second[1]


def test_ids_tell_nothing_outside_of_their_recording(clock: FakeClock) -> None:
    """Neither a second recording of the same requests nor any hash without the key has the same ids."""
    both = [Recording(100.0, block_tokens=16, clock=clock, **LIMITS) for _ in range(2)]
    for made in both:
        use(made, keys(1, 2, 3))
    (one,), (other,) = map(lines, both)
    assert not set(one["hash_ids"]) & set(other["hash_ids"])
    bits = 52
    plain = {
        int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> (64 - bits) for key in keys(1, 2, 3)
    }
    cut = {int.from_bytes(key[:8], "big") >> (64 - bits) for key in keys(1, 2, 3)}
    assert not set(one["hash_ids"]) & (plain | cut)
    assert max(one["hash_ids"]) < 1 << 52, "any reader of JSON keeps them"


def test_requests_that_overlap_have_their_own_ends(made: Recording) -> None:
    for number in range(3):
        made.add(number, keys(number), 0, None, 101.0 + number)
    made.end(1, Ending("stop", (5, 6)), 110.0)
    made.end(0, Ending("length"), 111.0)
    made.end(7, NO_ENDING, 112.0)  # began before the recording
    first, second = lines(made)
    assert (first["timestamp"], first["end"], first["stop"][:5]) == (2000, 10_000, "stop-")
    assert (second["timestamp"], second["end"], second["stop"]) == (1000, 11_000, "length")
    made.add(1, keys(9), 0, None, 113.0)
    made.end(1, Ending("stop", (5, 6)), 114.0)
    assert [line["stop"] for line in lines(made)] == [first["stop"]], "equal tokens, equal names"


def test_requests_that_go_on_at_its_end_have_none(made: Recording, clock: FakeClock) -> None:
    for number in range(2):
        made.add(number, keys(number), 0, None, 101.0)
    made.end(1, NO_ENDING, 102.0)
    clock.advance(60.0)
    taken = made.take()
    assert ["end" in json.loads(line) for line in taken.lines.splitlines()] == [True, False]
    assert taken.end == "time"


def test_of_many_running_requests_the_oldest_have_no_end(made: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "MOST_OPEN", 10)
    for _ in range(2):  # the requests of the first round have ended and leave no trace
        for number in range(12):
            made.add(number, keys(number), 0, None, 101.0 + number)
        assert [line["timestamp"] for line in lines(made)] == [1000, 2000]
        for number in range(12):
            made.end(number, NO_ENDING, 120.0)
        assert len(lines(made)) == 10


def test_a_context_has_a_name_that_tells_nothing(made: Recording) -> None:
    for number in range(2):
        made.add(number, keys(number), 0, None, 101.0, b"a context" if number < 2 else None)
        made.end(number, NO_ENDING, 102.0)
    first, second = (line["context"] for line in lines(made))
    assert first == second
    assert len(first) == 13


def test_a_repeated_key_occurs_once(made: Recording) -> None:
    use(made, [*keys(1, 2), *keys(1)])
    (line,) = lines(made)
    assert (len(line["hash_ids"]), line["looked_up"]) == (2, [0, 2])


def test_it_ends_by_time_and_what_came_before_is_read(made: Recording, clock: FakeClock) -> None:
    use(made, keys(1))
    clock.advance(60.0)
    use(made, keys(2))
    taken = made.take()
    assert (len(taken.lines.splitlines()), taken.end) == (1, "time")
    assert made.is_over


def test_it_ends_by_size(clock: FakeClock) -> None:
    made = Recording(100.0, seconds=60.0, max_bytes=300, block_tokens=None, clock=clock)
    for number in range(10):
        use(made, keys(number))
    taken = made.take()
    assert taken.end == "size"
    assert 200 < len(taken.lines) <= 300
    assert made.requests <= 4
    assert made.take() == (b"", "size")


def test_it_ends_when_nobody_reads_and_holds_no_more(made: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "MOST_WAITING", 100)
    for number in range(500):
        use(made, keys(number % 200, (number + 1) % 200))
    assert made.is_over
    taken = made.take()
    assert (len(taken.lines.splitlines()), taken.end) == (25, "slow")


def test_a_reader_that_keeps_up_goes_on(made: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "MOST_WAITING", 10)
    for number in range(200):
        use(made, keys(number, number + 1)[:2])
        assert len(lines(made)) == 1
    assert (made.is_over, made.requests) == (False, 200)


def test_much_is_taken_piece_by_piece(made: Recording) -> None:
    for number in range(3):
        use(made, keys(*range(5000 * number, 5000 * (number + 1))))
    assert [len(made.take().lines.splitlines()) for _ in range(3)] == [1, 2, 0]
    use(made, keys(1))
    made.stop()
    assert made.take() == (b"", "stopped")


@pytest.mark.parametrize(
    "changes", [{"seconds": 0.0}, {"seconds": MOST_SECONDS + 1}, {"max_bytes": 0}, {"max_bytes": MOST_BYTES + 1}]
)
def test_limits_are_limited(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="allowed"):
        Recording(0.0, block_tokens=1, **{**LIMITS, **changes})


# -- of a pool ---------------------------------------------------------------------------------------------------------


def test_a_pool_records_uses_with_and_without_a_comparison(make_engine: Callable[..., OffloadEngine]) -> None:
    for changes in ({}, {"policy": "lru", "curve": False}):
        engine = make_engine(block_tokens=16, **changes)
        use_keys(engine, keys(9))
        with engine.record(**LIMITS) as made:
            use_keys(engine, keys(1, 2, 3, 4), looked_up=(0, 3))
            (line,) = lines(made)
            assert (len(line["hash_ids"]), line["looked_up"]) == (4, [0, 3])
            assert line["end"] >= line["timestamp"]
        assert engine.pool.requests.recording is None
        use_keys(engine, keys(1))
        assert made.take() == (b"", "stopped")


def test_a_pool_has_one_recording_at_a_time(make_engine: Callable[..., OffloadEngine]) -> None:
    engine = make_engine()
    with engine.record(**LIMITS) as first:
        with pytest.raises(ConflictError, match="is being recorded already"), engine.record(**LIMITS):
            pass
        use_keys(engine, keys(1))
        assert len(lines(first)) == 1, "the refused one has changed nothing"
        first.stop()
        with engine.record(**LIMITS) as second:
            use_keys(engine, keys(1))
            assert len(lines(second)) == 1
        assert engine.pool.requests.recording is None
    assert engine.pool.requests.recording is None


def test_stalled_readers_hold_no_more_than_one_recording(
    make_engine: Callable[..., OffloadEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "MOST_WAITING", 4)
    engine = make_engine()
    with engine.record(**LIMITS) as stalled:
        use_keys(engine, keys(1))
        use_keys(engine, keys(2, 3))
        assert stalled.is_over
        with engine.record(**LIMITS):
            assert stalled.take() == (b"", "slow")


def test_a_recording_without_requests_ends_by_time(made: Recording, clock: FakeClock) -> None:
    clock.advance(60.0)
    assert made.is_over
