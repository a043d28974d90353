"""Admin servers that stop at once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import uvicorn.server


async def _sleep(seconds: float) -> None:
    await asyncio.sleep(min(seconds, 0.002))


@pytest.fixture(autouse=True, scope="session")
def servers_stop_at_once() -> Iterator[None]:
    """uvicorn pauses for 0.1 s whenever a server stops, and several hundred tests have one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uvicorn.server, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": _sleep}))
        yield
