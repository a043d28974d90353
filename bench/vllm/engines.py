"""vLLM engines that differ only in their connectors."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from vllm import LLM
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM

from bench.vllm import admin
from bench.vllm.node import Node

Graphs = Literal["none", "decode", "full"]
GRAPHS: tuple[Graphs, ...] = ("none", "decode", "full")

GIB = 1 << 30
ATTENTION = "TRITON_ATTN"
_ALL = 0.9  # the share of a small pool that counts as all of it, because slots and pages of 2 MiB are whole
CONNECTORS = ("none", "simple", "offloading", "kvstow", "attached", "absent")
"""kvstow is embedded. attached uses the memory of a node service, and absent looks for a service that is not there. Any
other connector is given by the JSON that `--kv-transfer-config` takes."""

_KVSTOW = {
    "kvstow": ("KVStowConnector", "kvstow_service.connectors.vllm"),
    "attached": ("KVStowConnector", "kvstow_service.connectors.vllm"),
    "absent": ("KVStowConnector", "kvstow_service.connectors.vllm"),
    "checked": ("CheckedKVStowConnector", "bench.vllm.checked"),
}


@dataclass(frozen=True, slots=True)
class Setup:
    """One engine. `connector` is one of `CONNECTORS`, or checked (`bench.vllm.checked`), or JSON. `node` is the service
    to which KVStow attaches. Without one, it is embedded. `pool_bytes` is host memory over all ranks. `ranks` is the
    number of tensor-parallel ranks in each of `stages` (pipeline). `gpu_blocks` limits the GPU's own cache. None means
    that it takes what fits. `kv_bytes` is what vLLM takes for that cache without measuring the GPU's memory. Measuring
    fails while another engine on the same GPU gives memory back.

    `graphs` is none (eager), decode (full graphs of decode steps, nothing compiled) or full (vLLM's default).
    `attention` is vLLM's backend on a GPU. With `invariant`, vLLM's own kernels for norms are not used, in addition to
    `VLLM_BATCH_INVARIANT`, because in 0.26 the one that adds and normalizes sums in another order for steps of 256
    tokens or more. `extra` are more options of KVStow's connector.
    """

    model: Path
    connector: str
    pool_bytes: int
    max_tokens: int
    gpu_blocks: int | None = None
    batch_tokens: int = 16384
    batch_requests: int = 256
    graphs: Graphs = "none"
    graph_sizes: tuple[int, ...] | None = None
    attention: str = ATTENTION
    weights: bool = False
    ranks: int = 1
    stages: int = 1
    gpu_share: float = 0.6
    invariant: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)
    node: Node | None = None
    kv_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Started:
    """`seconds` is how long it took until the engine could take requests. `port` is that of KVStow's admin server, if
    it has one."""

    engine: Any
    seconds: float
    port: int | None

    def model(self) -> Any:
        """Return the model of an engine in this process, which may be filled with weights."""
        worker = self.engine.llm_engine.engine_core.engine_core.model_executor.driver_worker
        runner = getattr(worker, "worker", worker).model_runner
        return runner.get_model() if hasattr(runner, "get_model") else runner.model


def rank_pool() -> Any:
    """Return KVStow's pool in the worker of this process."""
    plane = get_kv_transfer_group()._rank.side.plane
    return getattr(plane, "_plane", plane).pool  # the plane of an attached engine wraps another one


def wait_until_usable(started: Started, setup: Setup, patience: float) -> float | None:
    """Wait until all of KVStow's pool is pinned. Returns the seconds, or None for other connectors. Raises
    `TimeoutError`. An attached engine learns of its session only in steps. So it makes some until it has its first
    memory, as `vllm serve` does."""
    if started.port is not None:
        return admin.wait_until_pinned(started.port, patience)
    if setup.connector != "attached":
        return None
    began = time.perf_counter()
    if setup.ranks > 1:  # the pools of the ranks are in other processes
        host = started.engine.llm_engine.engine_core.engine_core.scheduler.connector._host
        while not host._has_all_memory():
            if time.perf_counter() - began > patience:
                raise TimeoutError(f"the ranks had no memory within {patience:g} s")
            started.engine.generate([{"prompt_token_ids": [5] * 40}], use_tqdm=False)
            time.sleep(0.05)
        return time.perf_counter() - began
    while rank_pool().status().pinned_bytes < _ALL * setup.pool_bytes or rank_pool().status().state == "pinning":
        if time.perf_counter() - began > patience:
            raise TimeoutError(f"the pool was not registered within {patience:g} s: {rank_pool().status()}")
        if not rank_pool().pinned_slots:
            started.engine.llm_engine.step()
        time.sleep(0.001)
    return time.perf_counter() - began


def block_tokens() -> int:
    return 16 if current_platform.is_cuda() else 32


def start_llm(setup: Setup) -> Started:
    """Start an engine for whole batches. `VLLM_ENABLE_V1_MULTIPROCESSING` decides in which process."""
    arguments, port = _arguments(setup)
    began = time.perf_counter()
    engine = LLM(**arguments)
    return Started(engine, time.perf_counter() - began, port)


def start_async(setup: Setup) -> Started:
    """Start an engine in its own process, as for serving."""
    arguments, port = _arguments(setup)
    began = time.perf_counter()
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    return Started(engine, time.perf_counter() - began, port)


def _arguments(setup: Setup) -> tuple[dict[str, Any], int | None]:
    cuda, transfer = current_platform.is_cuda(), transfer_of(setup)
    arguments: dict[str, Any] = {
        "model": str(setup.model),
        "load_format": "auto" if setup.weights else "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16" if cuda else "float32",
        "block_size": block_tokens(),
        "max_model_len": setup.max_tokens,
        "max_num_batched_tokens": setup.batch_tokens,
        "max_num_seqs": setup.batch_requests,
        "num_gpu_blocks_override": setup.gpu_blocks,
        "gpu_memory_utilization": setup.gpu_share,
        "kv_cache_memory_bytes": setup.kv_bytes,
        "tensor_parallel_size": setup.ranks,
        "pipeline_parallel_size": setup.stages,
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "enforce_eager": setup.graphs == "none" or not cuda,
        "kv_transfer_config": KVTransferConfig(**transfer) if transfer else None,
    }
    if cuda:
        arguments["attention_config"] = {"backend": setup.attention}
        arguments["compilation_config"] = _compilation(setup)
        if setup.invariant:
            arguments["ir_op_priority"] = {name: ["native"] for name in ("rms_norm", "fused_add_rms_norm")}
    port = transfer["kv_connector_extra_config"].get("admin_port") if transfer else None
    return arguments, port


def _compilation(setup: Setup) -> dict[str, Any]:
    compilation: dict[str, Any] = {"custom_ops": ["-rms_norm"]} if setup.invariant else {}
    if setup.graphs == "none":
        return compilation
    if setup.graphs == "decode":
        compilation |= {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    if setup.graph_sizes is not None:
        compilation["cudagraph_capture_sizes"] = list(setup.graph_sizes)
    return compilation


def transfer_of(setup: Setup) -> dict[str, Any] | None:
    extra: dict[str, Any] = {"cpu_bytes_to_use": setup.pool_bytes}
    if setup.connector == "none":
        return None
    if setup.connector.startswith("{"):
        transfer: dict[str, Any] = {"kv_role": "kv_both", "kv_connector_extra_config": {}}
        transfer |= json.loads(setup.connector)
        return transfer
    if setup.connector in _KVSTOW:
        name, module = _KVSTOW[setup.connector]
        if setup.node is not None:
            extra |= {"attach": f"unix://{setup.node.socket}"}
        else:
            extra |= {"admin_port": admin.free_port()}
        return {
            "kv_connector": name,
            "kv_connector_module_path": module,
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {**extra, **setup.extra},
        }
    names = {"simple": "SimpleCPUOffloadConnector", "offloading": "OffloadingConnector"}
    return {"kv_connector": names[setup.connector], "kv_role": "kv_both", "kv_connector_extra_config": extra}
