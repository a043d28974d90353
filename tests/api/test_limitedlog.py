from __future__ import annotations

import logging
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from tests.doubles.fakes import FakeClock

from kvstow_api.journal import LimitedLog
from kvstow_api.middleware import RefusalLog

_logger = logging.getLogger("kvstow.test")


def test_lines_are_limited_per_minute_and_suppressed_ones_counted(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    log = LimitedLog(_logger, clock, burst=2)
    for number in range(10):
        log.warning("again: %d", number)
    clock.advance(59.9)
    log.warning("again: %d", 10)
    clock.advance(0.1)
    log.warning("again: %d", 11)
    log.warning("again: %d", 12)
    messages = [record.message for record in caplog.records]
    assert messages == ["again: 0", "again: 1", "again: 11 (9 more were suppressed)", "again: 12"]


def audited(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == "kvstow.audit"]


@pytest.mark.anyio
async def test_refused_requests_have_one_line_a_minute_and_hide_no_change(
    launch: Any, ranks: Any, token_file: Path, viewer_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="kvstow.audit")
    client = await launch(token_file=token_file, viewer_token_file=viewer_file, caller=None)
    for _ in range(20):
        assert (await client.post("/v1/pools/host/retry")).status_code == 401
        viewer = {"Authorization": "Bearer viewer-token"}
        assert (await client.post("/v1/pools/host/retry", headers=viewer)).status_code == 403
    assert [record.getMessage().split()[0] for record in audited(caplog)] == ["actor=-", "actor=viewer"]
    for _ in range(130):
        headers = {"Authorization": "Bearer admin-token"}
        assert (await client.post("/v1/pools/host/retry", headers=headers)).status_code == 202
        assert (await client.post("/v1/pools/nowhere/retry", headers=headers)).status_code == 404
    assert len(audited(caplog)) == 2 + 260


def test_the_number_of_refused_requests_is_written_at_the_end_of_a_callers_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="kvstow.audit")
    clock = FakeClock()
    log = RefusalLog(clock)
    assert log.is_first("viewer at 10.0.0.1")
    clock.advance(30.0)
    assert log.is_first("viewer at 10.0.0.2")
    assert not log.is_first("viewer at 10.0.0.1")
    assert not log.is_first("viewer at 10.0.0.1")
    clock.advance(29.9)
    log.write_counts()
    assert audited(caplog) == []
    clock.advance(0.1)
    log.write_counts()
    (line,) = audited(caplog)
    assert line.getMessage() == "2 more requests of viewer at 10.0.0.1 were refused within a minute"
    clock.advance(30.0)
    assert log.is_first("viewer at 10.0.0.2")
    assert len(audited(caplog)) == 1  # 10.0.0.2 was refused once a minute


def test_callers_beyond_a_thousand_share_a_line() -> None:
    log = RefusalLog(FakeClock())
    assert all(log.is_first(f"- at {number}") for number in range(1000))
    assert [log.is_first(f"- at {number}") for number in range(1000, 1003)] == [True, False, False]


@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        (b"wait=1&token=hunter2&x=2", "wait=1&token=...&x=2"),
        (b"access_token=hunter2", "access_token=..."),
        (b'{"api_key": "hunter\\"2", "slots": 1}', '{"api_key": ..., "slots": 1}'),
        (b'{"Authorization": "Bearer hunter2"}', '{"Authorization": ...}'),
        (b'{"password":"hunter2', '{"password":...'),
        (b"redis://user:hunter2@host/", "redis://...@host/"),
        (b'{"slots": 1}', '{"slots": 1}'),
    ],
)
@pytest.mark.anyio
async def test_secrets_are_left_out_of_the_audit_log(
    launch: Any, ranks: Any, caplog: pytest.LogCaptureFixture, sent: bytes, shown: str
) -> None:
    """Whether they are in the query or in the body: a client may have put them there by mistake."""
    caplog.set_level(logging.INFO, logger="kvstow.audit")
    client = await launch()
    await client.post("/v1/pools/host/evict", content=sent, headers={"Content-Type": "application/json"})
    await client.post(f"/v1/pools/host/retry?{quote(sent, safe='=&')}")
    by_body, by_query = (record.getMessage() for record in audited(caplog))
    assert by_body.endswith(f" body={shown}")
    assert "hunter" not in by_body
    if b"=" in sent:
        assert f"query={shown} " in by_query
    assert "hunter" not in by_query or b"=" not in sent
