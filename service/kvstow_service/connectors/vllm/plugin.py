"""The plugin for vLLM. It registers KVStowConnector by name, because MultiConnector looks its children up by name. It
also begins to watch which files ranks load, because that has to begin before they do."""

from __future__ import annotations


def register() -> None:
    """Called by vLLM in each of its processes (entry point `vllm.general_plugins`); idempotent."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from kvstow_service.connectors.vllm import weightwatch

    if "KVStowConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector("KVStowConnector", "kvstow_service.connectors.vllm", "KVStowConnector")
    weightwatch.watch_ranks()
