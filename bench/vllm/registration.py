"""How long vLLM waits for a connector while it starts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory


@contextmanager
def observe_registration() -> Iterator[Callable[[], float]]:
    """Inside, the connectors of this process are timed: their making, and `register_kv_caches`. The callable returns
    the seconds so far."""
    spent = 0.0
    create = KVConnectorFactory.create_connector

    def timed(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal spent
        began = time.perf_counter()
        try:
            return call(*args, **kwargs)
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
