from __future__ import annotations

import pytest

from kvstow.errors import TierUnavailableError
from kvstow_service.stores.mooncake.childmessages import CORRUPT
from kvstow_service.stores.mooncake.mooncakestore import get_status, put_status, require_master


def test_puts() -> None:
    assert [put_status(code) for code in (0, -200, -800, -600, -900)] == [
        "stored",
        "full",
        "failed",
        "failed",
        "failed",
    ]


def test_gets() -> None:
    assert [get_status(code) for code in (0, -703, -704, -707)] == ["found", "missing", "missing", "missing"]
    assert [get_status(code) for code in (-800, -600, -900, CORRUPT)] == ["failed", "failed", "failed", "corrupt"]


@pytest.mark.parametrize("codes", [(-900, -900), (-901,)])
def test_a_master_that_answers_nothing_is_an_outage(codes: tuple[int, ...]) -> None:
    with pytest.raises(TierUnavailableError, match=str(codes[0])):
        require_master(codes)


@pytest.mark.parametrize("codes", [(), (0, -900), (-800,), (-1_000_000,)])
def test_one_answer_is_enough(codes: tuple[int, ...]) -> None:
    require_master(codes)
