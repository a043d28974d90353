from __future__ import annotations

import pytest

from kvstow.errors import ConfigError
from kvstow_service.duration import parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2ms", 0.002),
        ("500us", 0.0005),
        ("1.5s", 1.5),
        (" 2 m ", 120.0),
        ("1h", 3600.0),
        ("3", 3.0),
        (0, 0.0),
        (0.25, 0.25),
    ],
)
def test_numbers_are_seconds_and_units_scale_them(text: object, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text", ["", "ms", "-1s", "1 day", "1s2ms", True, None, -1, float("nan"), float("inf"), [1], "9" * 400]
)
def test_anything_else_is_refused_by_name(text: object) -> None:
    with pytest.raises(ConfigError, match=r"^pin_pause is .*; allowed: 0 or more seconds"):
        parse_duration(text, "pin_pause")
