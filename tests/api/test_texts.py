"""Numbers as people read them."""

from __future__ import annotations

import pytest

from kvstow_api.texts import duration, field_text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"), (0.0042, "4.2 ms"), (0.999, "999 ms"), (0.9994, "999 ms"), (0.9996, "1 s"), (12.5, "12.5 s"),
        (59.94, "59.9 s"), (59.97, "1m"), (200, "3m 20s"), (3599.7, "1h"), (90061, "25h 1m"),
    ],
)  # fmt: skip
def test_a_duration_is_rounded_before_its_unit_is_chosen(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("memory", 67108864, "64 MiB"), ("trust_eof", 30.0, "30 s"), ("load_step_budget", 0.01, "10 ms"),
        ("budget_bytes", 2048, "2 KiB"), ("blocks", 1234, "1,234"),
    ],
)  # fmt: skip
def test_the_name_of_a_setting_tells_its_unit(name: str, value: float, text: str) -> None:
    assert field_text(name, value) == text
