"""KVStow in vLLM: name `KVStowConnector` as `kv_connector` and this package as `kv_connector_module_path`.

The class is imported on first access, because most of the package works without vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstow_service.connectors.vllm.connector import KVStowConnector

__all__ = ["KVStowConnector"]


def __getattr__(name: str) -> Any:
    if name != "KVStowConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvstow_service.connectors.vllm.connector import KVStowConnector

    return KVStowConnector
