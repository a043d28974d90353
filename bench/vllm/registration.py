"""How long vLLM waits for a connector while it starts, and for which functions of the connector."""

from __future__ import annotations

import cProfile
import pstats
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

_LEAST = 0.005  # functions that take less are not listed, in seconds


@contextmanager
def observe_registration(profile: cProfile.Profile | None = None) -> Iterator[Callable[[], float]]:
    """Time the connectors of this process: their construction, and `register_kv_caches`. Yields a function that returns
    the seconds so far. `profile` records the calls."""
    spent = 0.0
    create = KVConnectorFactory.create_connector

    def timed(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal spent
        began = time.perf_counter()
        try:
            return call(*args, **kwargs) if profile is None else profile.runcall(call, *args, **kwargs)
        finally:
            spent += time.perf_counter() - began

    def create_timed(*args: Any, **kwargs: Any) -> Any:
        connector = timed(create, *args, **kwargs)
        register = connector.register_kv_caches
        connector.register_kv_caches = lambda *args, **kwargs: timed(register, *args, **kwargs)
        return connector

    KVConnectorFactory.create_connector = create_timed
    try:
        yield lambda: spent
    finally:
        KVConnectorFactory.create_connector = create


def slowest(profile: cProfile.Profile) -> dict[str, float]:
    """Return seconds by function, including the calls that it makes, the longest first. Empty if nothing was
    profiled."""
    if not profile.getstats():  # pstats refuses an empty profile
        return {}
    stats = pstats.Stats(profile).stats  # type: ignore[attr-defined] # by (file, line, function)
    seconds = {
        f"{file.rpartition('site-packages/')[2]}:{line} {name}": row[3] for (file, line, name), row in stats.items()
    }
    return {
        name: round(value, 4) for name, value in sorted(seconds.items(), key=lambda item: -item[1]) if value >= _LEAST
    }
