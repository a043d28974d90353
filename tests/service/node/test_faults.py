"""Faults of real processes, and what the service says about them within seconds."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.service.node.realservice import RealService
from tests.waiting import eventually

pytestmark = pytest.mark.process


@pytest.fixture
def service(tmp_path: Path) -> Iterator[RealService]:
    made = RealService(tmp_path)
    with made.running:
        yield made


def told(client: httpx.Client) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in client.get("/v1/doctor").json()["conditions"]}


def test_an_engine_that_is_stopped_is_told_and_one_that_goes_on_is_not(service: RealService) -> None:
    client = service.serve("--memory", "64MiB")
    engine, _ = service.engine()
    engine.send_signal(signal.SIGSTOP)
    eventually(lambda: "session_stopped" in told(client))
    found = told(client)["session_stopped"]
    assert f"(pid {engine.pid} on " in found["what"]
    assert f"`kill -CONT {engine.pid}`" in found["fix"]
    engine.send_signal(signal.SIGCONT)
    eventually(lambda: "session_stopped" not in told(client))


def test_a_service_that_was_stopped_blames_nobody(service: RealService) -> None:
    client = service.serve("--memory", "64MiB")
    service.engine()
    eventually(lambda: client.get("/v1/sessions").json()["items"])
    service.process.send_signal(signal.SIGSTOP)
    begun = time.monotonic()
    eventually(lambda: time.monotonic() - begun > 8.0)  # longer than ranks may be silent
    service.process.send_signal(signal.SIGCONT)
    blamed: set[str] = set()

    def has_looked() -> bool:
        blamed.update(told(client))
        return client.get("/readyz/loop").status_code == 503  # it knows its own pause

    eventually(has_looked)
    assert not blamed & {"rank_silent", "session_stuck", "session_lost"}
