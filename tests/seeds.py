"""How many random schedules a test runs: a few each time, and the rest in `make soak`.

The tests of the mutants run as many schedules as it takes to notice the mutant."""

from __future__ import annotations

import pytest


def few_and_many(few: int, many: int) -> list[object]:
    """For `parametrize`: the first `few` seeds, and those from there to `many`."""
    return [
        pytest.param(range(few), id="few"),
        pytest.param(range(few, many), id="many", marks=pytest.mark.soak),
    ]
