from pathlib import Path

import pytest

from kvstow_service.replay.trace import TraceRequest, read_trace

TRACE = Path(__file__).with_name("data") / "conversations.jsonl"


@pytest.fixture(scope="session")
def conversations() -> list[TraceRequest]:
    return read_trace(str(TRACE))
