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


def first_present(slots: list[int | None], count: int) -> list[int | None]:
    """The slots with only the first `count` that are not None."""
    kept = list[int | None]()
    for slot in slots:
        count -= slot is not None
        kept.append(slot if count >= 0 else None)
    return kept


def key_runs(slots: Sequence[int | None]) -> list[KeyRun]:
    """The runs of keys whose slot is not None."""
    present = bytes(slot is not None for slot in slots)
    runs: list[KeyRun] = []
    start = present.find(1)
    while start >= 0:
        end = present.find(0, start)
        end = len(present) if end < 0 else end
        runs.append(KeyRun(start, end - start))
        start = present.find(1, end)
    return runs
