"""Metrics, computed from snapshots at scrape time.

Counter and Gauge of prometheus_client are not used: with PROMETHEUS_MULTIPROC_DIR set, as in vLLM, they would write
into the inference engine's own files.
"""
