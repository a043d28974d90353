"""What the connectors of vLLM share, whatever moves the bytes: requests, hits, loads, stores, metrics, events."""
