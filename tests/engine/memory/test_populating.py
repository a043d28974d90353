from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import pytest

from kvstow.memory.chunks import Chunk, Populating

_CHUNKS = [Chunk(number, number + 1, number << 21, 1 << 21) for number in range(4)]


def test_chunks_are_populated_on_another_thread_and_taken_once() -> None:
    threads = set[str]()

    def commit(chunks: Sequence[Chunk]) -> list[Chunk]:
        threads.add(threading.current_thread().name)
        return list(chunks)

    populating = Populating(commit)
    populating.begin(_CHUNKS[:2])
    assert populating.take(wait=True) == _CHUNKS[:2]
    assert (populating.is_under_way, populating.take(wait=True)) == (False, [])
    populating.begin(_CHUNKS[2:])
    assert populating.close() == _CHUNKS[2:]
    assert threads == {"kvstow-ahead_0"}


def test_without_a_thread_the_caller_populates(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    committed = list[Chunk]()

    def commit(chunks: Sequence[Chunk]) -> list[Chunk]:
        assert threading.current_thread() is threading.main_thread()
        committed.extend(chunks)
        return list(chunks)

    populating = Populating(commit)
    with caplog.at_level(logging.WARNING):
        for chunk in _CHUNKS:
            populating.begin([chunk])
            assert populating.is_under_way
            assert populating.take(wait=False) == [chunk]
    assert populating.close() == []
    assert committed == _CHUNKS
    assert [record.getMessage() for record in caplog.records] == [
        "memory is not populated ahead, so pinning takes longer: can't start new thread"
    ]


def test_without_a_thread_the_caller_gets_what_populating_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    def commit(chunks: Sequence[Chunk]) -> list[Chunk]:
        raise MemoryError("refused")

    monkeypatch.setattr(threading.Thread, "start", start)
    populating = Populating(commit)
    with pytest.raises(MemoryError, match="refused"):
        populating.begin(_CHUNKS)
    assert populating.close() == []


def test_what_populating_raises_is_raised_when_it_is_taken() -> None:
    def commit(chunks: Sequence[Chunk]) -> list[Chunk]:
        raise MemoryError("refused")

    populating = Populating(commit)
    populating.begin(_CHUNKS)
    with pytest.raises(MemoryError, match="refused"):
        populating.take(wait=True)
    assert populating.close() == []
