"""Benchmarks on a GPU. Each module runs on its own, needs only the engine, and writes JSON into `$OUT`."""
