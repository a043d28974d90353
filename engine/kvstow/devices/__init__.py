"""Devices: one module per way to move bytes between a KV cache and a pool (protocol in `base`)."""
