"""Benchmarks on a GPU: each module runs by itself, needs no more than the engine, and writes JSON into `$OUT`."""
