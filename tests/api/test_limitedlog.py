from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from kvstow.testing.fakes import FakeClock
from kvstow_api.journal import LimitedLog

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
async def test_unauthenticated_clients_cannot_flood_the_audit_log(
    launch: Any, ranks: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What somebody who is known asks for is written line by line."""
    caplog.set_level(logging.INFO, logger="kvstow.audit")
    (tmp_path / "token").write_text("secret")
    (tmp_path / "token").chmod(0o600)
    client = await launch(token_file=tmp_path / "token", caller=None)
    for _ in range(200):
        assert (await client.post("/v1/pools/host/retry")).status_code == 401
    assert len(audited(caplog)) == 60
    for _ in range(100):
        headers = {"Authorization": "Bearer secret"}
        assert (await client.post("/v1/pools/host/retry", headers=headers)).status_code == 202
        assert (await client.post("/v1/pools/nowhere/retry", headers=headers)).status_code == 404
    assert len(audited(caplog)) == 60 + 200
