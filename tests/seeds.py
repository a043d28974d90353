"""How many random schedules a test runs: a few each time, and the rest in `make soak`.

The few are as many as it takes to notice each of the mutants that are listed for them (`mutants.py`)."""

from __future__ import annotations

import pytest


def few_and_many(few: int, many: int) -> list[object]:
    """For `parametrize`: the first `few` seeds, and those from there to `many`."""
    return [
        pytest.param(range(few), id="few"),
        pytest.param(range(few, many), id="many", marks=pytest.mark.soak),
    ]
