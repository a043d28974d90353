"""KVStow in tpu-inference: name `TPUOffloadConnector` as `kv_connector` and this package as `kv_connector_module_path`.
tpu-inference accepts four names only, and this is one of them.

The class is imported on first access, because most of the package works without vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstow_service.connectors.tpu.connector import TPUOffloadConnector

__all__ = ["TPUOffloadConnector"]


def __getattr__(name: str) -> Any:
    if name != "TPUOffloadConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvstow_service.connectors.tpu.connector import TPUOffloadConnector

    return TPUOffloadConnector
