"""Benchmarks on a GPU: each module runs on its own, needs only the engine, and writes JSON into `$OUT`."""
