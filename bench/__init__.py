"""Benchmarks of KVStow. `python -m bench` runs them and records their figures (`report.py`)."""
