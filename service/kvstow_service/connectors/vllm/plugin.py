"""vLLM plugin that registers KVStowConnector by name: MultiConnector looks its children up by name."""

from __future__ import annotations


def register() -> None:
    """Called by vLLM in each of its processes (entry point `vllm.general_plugins`); idempotent."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if "KVStowConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector("KVStowConnector", "kvstow_service.connectors.vllm", "KVStowConnector")
