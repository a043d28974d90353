"""vLLM with tpu-inference's runner on two devices of the CPU, KVStow, and a tiny Llama with random weights."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file
from tests.service.connectors.engine_core.connectorhosts import rank_host_of, scheduler_host_of
from vllm import LLM, SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group

from kvstow.control.engine import OffloadEngine
from kvstow_service.connectors.engine_core.workerside import WorkerSide
from kvstow_service.connectors.tpu.connector import TPUOffloadConnector

BLOCK_TOKENS = 16
GPU_BLOCKS, SLOTS = 41, 48  # one GPU block is vLLM's null block
LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_SIZE, VOCABULARY = 2, 64, 128, 4, 2, 128, 512
SLOT_BYTES = LAYERS * BLOCK_TOKENS * 2 * KV_HEADS * HEAD_SIZE * 4
DEVICES = 2
SECONDS = 120

Prompt = tuple[int, ...]


def prompts(count: int, seed: int, length: int = 100) -> list[Prompt]:
    source = random.Random(seed)
    return [tuple(source.randrange(3, VOCABULARY) for _ in range(length)) for _ in range(count)]


class Engine:
    """In fp32, so that an answer does not depend on how a prompt is cut."""

    def __init__(self, folder: Path) -> None:
        _write_model(folder)
        self.llm = LLM(
            str(folder),
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=256,
            max_num_seqs=4,
            max_num_batched_tokens=128,
            block_size=BLOCK_TOKENS,
            num_gpu_blocks_override=GPU_BLOCKS,
            tensor_parallel_size=DEVICES,
            enforce_eager=True,
            seed=0,
            kv_transfer_config={
                "kv_connector": "TPUOffloadConnector",
                "kv_connector_module_path": "kvstow_service.connectors.tpu",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"cpu_bytes_to_use": SLOTS * SLOT_BYTES, "lock": False, "admin_port": 0},
            },
        )
        self.core: Any = self.llm.llm_engine.engine_core.engine_core
        self.worker: Any = self.core.model_executor.driver_worker
        self.runner: Any = self.worker.model_runner
        self.ask(prompts(1, seed=0))  # ranks say hello with their first step
        self.wait_ready()

    @property
    def scheduler_host(self) -> Any:
        connector = self.core.scheduler.connector
        assert isinstance(connector, TPUOffloadConnector)
        return scheduler_host_of(connector)

    @property
    def offload(self) -> OffloadEngine:
        host = self.scheduler_host
        assert isinstance(host.engine, OffloadEngine)
        return host.engine

    @property
    def loaded_blocks(self) -> int:
        return self.offload.stats().transfers.load.blocks

    @property
    def failed_loads(self) -> int:
        return self.offload.stats().transfers.load.error

    def ask(self, asked: Sequence[Prompt]) -> list[tuple[int, ...]]:
        """The answers, of 8 tokens each."""
        sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
        given = [{"prompt_token_ids": list(prompt)} for prompt in asked]
        return [tuple(output.outputs[0].token_ids) for output in self.llm.generate(given, sampling, use_tqdm=False)]

    def forget_gpu(self) -> None:
        """What follows can hit host memory alone."""
        self.settle()  # stores under way hold their blocks
        assert self.llm.reset_prefix_cache()

    @property
    def side(self) -> WorkerSide:
        """Of the worker's half."""
        connector = get_kv_transfer_group()
        assert isinstance(connector, TPUOffloadConnector)
        side: WorkerSide = rank_host_of(connector).side
        return side

    def step(self) -> None:
        """A step without requests. vLLM schedules ahead, so `ask` may leave a step launched: the scheduler hears of its
        transfers first, because nothing else reads that step's output."""
        scheduler, ahead = self.core.scheduler, self.core.batch_queue
        while ahead:
            future, output, _ = ahead.pop()
            scheduler.update_from_output(output, future.result())
        output = scheduler.schedule()
        scheduler.update_from_output(output, self.core.model_executor.execute_model(output))

    def settle(self) -> None:
        """Make steps until all that is complete was stored, and no transfer is under way."""
        self.step()
        self.step_until(lambda: not self.offload.open_transfers)

    def wait_ready(self) -> None:
        """Wait until the scheduler's half knows the rank as it is now, with its whole pool."""
        self.step_until(lambda: self.offload.ranks.boots == (self.side.plane.boot_id,))
        self.step_until(lambda: self.offload.stats().pool.usable_slots == SLOTS)

    def step_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < deadline, "the condition did not come true"
            self.step()

    def block(self, number: int) -> bytes:
        """A block's bytes as a slot holds them: device by device, layer by layer."""
        shards = [
            [
                np.asarray(shard.data)[number]
                for shard in sorted(array.addressable_shards, key=lambda one: one.device.id)
            ]
            for array in self.runner.kv_caches
        ]
        return b"".join(layer[device].tobytes() for device in range(DEVICES) for layer in shards)

    def close(self) -> None:
        self.core.shutdown()


def _device_number(shard: Any) -> int:
    return int(shard.device.id)


def _write_model(folder: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_SIZE,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = np.random.default_rng(20)

    def matrix(rows: int, columns: int) -> np.ndarray:
        """Spread enough that a wrong KV cache changes the answers."""
        values: np.ndarray = generator.standard_normal((rows, columns)) * 2 / np.sqrt(columns)
        return values.astype(np.float32)

    ones = np.ones(HIDDEN, np.float32)
    tensors = {
        "model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN),
        "model.norm.weight": ones,
        "lm_head.weight": matrix(VOCABULARY, HIDDEN),
    }
    for layer in range(LAYERS):
        tensors |= {
            f"model.layers.{layer}.{name}.weight": weight
            for name, weight in {
                "self_attn.q_proj": matrix(HEADS * HEAD_SIZE, HIDDEN),
                "self_attn.k_proj": matrix(KV_HEADS * HEAD_SIZE, HIDDEN),
                "self_attn.v_proj": matrix(KV_HEADS * HEAD_SIZE, HIDDEN),
                "self_attn.o_proj": matrix(HIDDEN, HEADS * HEAD_SIZE),
                "mlp.gate_proj": matrix(INNER, HIDDEN),
                "mlp.up_proj": matrix(INNER, HIDDEN),
                "mlp.down_proj": matrix(HIDDEN, INNER),
                "input_layernorm": ones,
                "post_attention_layernorm": ones,
            }.items()
        }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


assert len(jax.devices()) == DEVICES
