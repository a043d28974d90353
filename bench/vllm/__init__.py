"""Benchmarks and checks inside vLLM, on a GPU: `python3 -m bench.vllm NAME --help`. A bare checkout is enough."""
