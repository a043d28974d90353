"""What identifies the blocks of one engine: `attachidentity`, applied to its configuration."""

from __future__ import annotations

from typing import Any, NamedTuple

from kvstow.attach.identity import FleetWeights, NamespaceIdentity, PoolIdentity
from kvstow_service.connectors.engine_core.kvgroups import KVGroups
from kvstow_service.connectors.engine_core.metadata import RankHello
from kvstow_service.connectors.engine_core.vllmprocess import hash_block_tokens
from kvstow_service.connectors.vllm import attachidentity


class EngineIdentity(NamedTuple):
    """Computed from a `VllmConfig` and a `KVCacheConfig`. `weights_id`: as configured."""

    vllm_config: Any
    kv_cache_config: Any
    groups: KVGroups
    weights_id: str | None
    replicated: bool

    def pool(self, hellos: list[RankHello]) -> PoolIdentity:
        return attachidentity.pool_identity(
            self.vllm_config, self.kv_cache_config, self.groups, hellos, replicated=self.replicated
        )

    def namespace(self) -> NamespaceIdentity:
        """Available once vLLM has its block hashes."""
        hash_tokens = hash_block_tokens(self.vllm_config, self.kv_cache_config)
        return attachidentity.namespace_identity(self.vllm_config, hash_tokens, self.weights_id)

    def weights(self) -> FleetWeights:
        """Reads samples of the weight files."""
        return attachidentity.fleet_weights(self.vllm_config, self.weights_id)
