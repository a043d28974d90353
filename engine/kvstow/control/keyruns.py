"""The results of look-ups as runs: of slots, and of keys that are present."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from kvstow.results import KeyRun


def runs_below(runs: list[Sequence[int]], watermark: int) -> list[Sequence[int]]:
    """The runs up to the first slot at or above the watermark."""
    below: list[Sequence[int]] = []
    for run in runs:
        highest = run[-1] if isinstance(run, range) else max(run)
        part = run if highest < watermark else list(takewhile(lambda slot: slot < watermark, run))
        if part:
            below.append(part)
        if len(part) < len(run):
            break
    return below


def first_of_runs(runs: Sequence[KeyRun], count: int) -> list[KeyRun]:
    """The runs of the first `count` keys."""
    kept: list[KeyRun] = []
    for first, length in runs:
        if not count:
            break
        kept.append(KeyRun(first, min(length, count)))
        count -= kept[-1].length
    return kept


def keys_of(runs: Sequence[KeyRun], keys: Sequence[bytes]) -> Sequence[bytes]:
    """The keys of the runs."""
    if len(runs) == 1:
        first, length = runs[0]
        return keys if length == len(keys) else keys[first : first + length]
    return [key for first, length in runs for key in keys[first : first + length]]


def key_runs(slots: Sequence[int | None], start: int = 0) -> list[KeyRun]:
    """The runs of keys whose slot is not None. The first slot is that of key `start`."""
    return _runs_of(bytes(slot is not None for slot in slots), start)


def runs_without(runs: Sequence[tuple[int, int]], others: Sequence[tuple[int, int]]) -> list[KeyRun]:
    """The keys of the runs that are in none of the others."""
    left = bytearray(sum(runs[-1]) if runs else 0)
    for first, length in runs:
        left[first : first + length] = b"\1" * length
    for first, length in others:
        left[first : first + length] = bytes(length)
    return _runs_of(left)


def _runs_of(present: bytes | bytearray, start: int = 0) -> list[KeyRun]:
    runs: list[KeyRun] = []
    begin = present.find(1)
    while begin >= 0:
        end = present.find(0, begin)
        end = len(present) if end < 0 else end
        runs.append(KeyRun(start + begin, end - begin))
        begin = present.find(1, end)
    return runs
