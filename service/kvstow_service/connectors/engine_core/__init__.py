"""The code that all connectors of vLLM share, on any device: requests, hits, loads, stores, metrics and events."""
