from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

_PATIENCE = 60.0

with suppress(ImportError):  # some environments have no httpx
    from httpx import _config

    for _phase in ("connect", "read", "write", "pool"):  # 5 s are too short for a machine that does other things, too
        setattr(_config.DEFAULT_TIMEOUT_CONFIG, _phase, _PATIENCE)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """A thread of ours that outlives its test fails that one, and not those that come later and count threads."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + _PATIENCE
    while left := [each for each in threading.enumerate() if each not in before and each.name.startswith("kvstow")]:
        left[0].join(max(0.0, deadline - time.monotonic()))
        assert not left[0].is_alive(), f"the test left {left[0].name} running: end it in a fixture"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long tests run only if they are asked for. Files that start processes come first, as they take longest: two
    workers that run a file each (`make test`) then end at about the same time."""
    if "soak" not in config.getoption("markexpr"):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("soak")])
        items[:] = [item for item in items if not item.get_closest_marker("soak")]
    starting = {item.path for item in items if item.get_closest_marker("process")}
    items.sort(key=lambda item: item.path not in starting)
