"""Metrics, made at scrape time from snapshots.

No Counter or Gauge of prometheus_client: with PROMETHEUS_MULTIPROC_DIR set, as vLLM may set it, these write
into the inference engine's own files.
"""
