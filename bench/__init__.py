"""Benchmarks of KVStow. `python -m bench` runs them and writes their figures into `bench/README.md`."""
