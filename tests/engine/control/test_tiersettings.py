"""Settings of a tier that are refused."""

from __future__ import annotations

from typing import Any

import pytest

from kvstow.control.tiersettings import TierSettings
from kvstow.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"deadline": 0.0}, "deadline is 0.0; allowed: more than 0 seconds"),
        ({"lookup_wait": -1.0}, "lookup_wait is -1.0"),
        ({"prefill_rate": 0.0}, "prefill_rate is 0.0; allowed: more than 0 tokens per second"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        TierSettings(**settings)
