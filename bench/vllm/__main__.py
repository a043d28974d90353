"""`python3 -m bench.vllm NAME [--help]`: one of start, hits, verify, decode, pinning, throughput,
restart, rotation, paths, crowd, worth, agents, agentx, headline."""

from __future__ import annotations

import compileall
import os
import sys
from importlib import import_module
from pathlib import Path

NAMES = (
    "start",
    "hits",
    "verify",
    "decode",
    "pinning",
    "throughput",
    "restart",
    "rotation",
    "paths",
    "crowd",
    "worth",
    "agents",
    "agentx",
    "headline",
)

_ROOT = Path(__file__).parents[2]
_CODE = tuple(str(_ROOT / folder) for folder in ("engine", "api", "service"))
_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; without a GPU
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # because results go to stdout
    "VLLM_NO_USAGE_STATS": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # the other check starts CUDA, and processes are forked after it
    "PYTHONHASHSEED": "0",  # vLLM reads it; engines that share blocks need equal hashes
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it would be compiled at its first use
}


def main() -> int:
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in NAMES:
        print(__doc__, file=sys.stderr)
        return 2
    for key, value in _ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    for folder in _CODE:  # as installation does; otherwise each engine compiles what it imports, in 0.2 s
        compileall.compile_dir(folder, quiet=2)
    paths = [*_CODE, str(_ROOT)]
    sys.path[:0] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*paths, os.environ.get("PYTHONPATH", "")]))
    if (name in ("verify", "rotation") or "--invariant" in sys.argv) and has_gpu():
        os.environ.setdefault("VLLM_BATCH_INVARIANT", "1")  # vLLM reads it when it is imported
    import_module("fastapi")  # because `vllm serve` has it in its engine's process, too
    program = import_module(f"bench.vllm.{name}")
    import_module("bench.vllm.process").die_with_the_program()
    status: int = program.main(sys.argv[2:])
    return status


def has_gpu() -> bool:
    from torch import cuda

    return cuda.is_available()


if __name__ == "__main__":
    raise SystemExit(main())
