"""The JAX device: KV arrays that every step replaces, on one or more devices of this process (TPU, CPU, CUDA)."""

from kvstow.devices.jax.device import JaxDevice, JaxOptions
from kvstow.devices.jax.shards import ArrayCell, KVCell, ShardedKV

__all__ = ["ArrayCell", "JaxDevice", "JaxOptions", "KVCell", "ShardedKV"]
