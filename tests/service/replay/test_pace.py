import pytest

from kvstow.errors import ConfigError
from kvstow_service.replay.trace import ReplayOptions, TraceRequest

FIRST, LATER = TraceRequest(5000, 1, 1, (1,)), TraceRequest(9000, 1, 1, (2,))


@pytest.mark.parametrize(
    ("options", "due"),
    [
        (ReplayOptions(), 0.0),
        (ReplayOptions(rate=2.0), 1.5),
        (ReplayOptions(time_scale=1.0), 4.0),
        (ReplayOptions(time_scale=8.0), 0.5),
    ],
)
def test_requests_are_due_by_rate_or_timestamp(options: ReplayOptions, due: float) -> None:
    assert options.due(3, LATER, FIRST) == due


@pytest.mark.parametrize(
    "wrong",
    [
        {"concurrency": 0},
        {"rate": 0.0},
        {"rate": float("nan")},
        {"time_scale": -1.0},
        {"drain_seconds": -1.0},
    ],
)
def test_options_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))} is"):
        ReplayOptions(**wrong)  # type: ignore[arg-type]


def test_the_end_of_a_request_is_due_at_the_pace_of_its_start() -> None:
    assert ReplayOptions(time_scale=2.0).due_end(9000, FIRST) == 2.0
    assert ReplayOptions().due_end(9000, FIRST) is None
    assert ReplayOptions(rate=1.0).due_end(9000, FIRST) is None
