"""tpu-inference on a machine without a TPU: stand-ins for the hardware that it asks for, and for its attention kernel.

Import this before vLLM. Everything else is tpu-inference's own: platform, worker, runner, model, programs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # what is replaced here is replaced in this process alone
    "MODEL_IMPL_TYPE": "flax_nnx",
    "SKIP_JAX_PRECOMPILE": "1",
    "TPU_ACCELERATOR_TYPE": "v6e-1",
    "TPU_NAME": "none",
    "TPU_WORKER_ID": "0",
    "HF_HUB_OFFLINE": "1",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
}

import jax
import jax.numpy as jnp
import numpy as np
import torch

HBM_BYTES = 4 << 30


class _MissingOverload:
    """An operator that this version of torch does not have."""

    def __init__(self, name: str) -> None:
        self.name = name


@contextmanager
def _missing_overloads() -> Iterator[None]:
    """torchax 0.0.13 names operators of torch 2.11, and torch 2.13 lacks those on named tensors. Only models that run
    through torchax need them."""
    packet: Any = torch._ops.OpOverloadPacket
    original = packet.__getattr__

    def find(self: Any, key: str) -> Any:
        try:
            return original(self, key)
        except AttributeError:
            if key.startswith("__"):
                raise
            return _MissingOverload(f"{self}.{key}")

    packet.__getattr__ = find
    try:
        yield
    finally:
        packet.__getattr__ = original


def prepare() -> None:
    """Choose tpu-inference's platform, and put the stand-ins in place. Idempotent."""
    import vllm.platforms

    with _missing_overloads():
        import torchax
        from tpu_inference.platforms.tpu_platform import TpuPlatform

        if not isinstance(vllm.platforms._current_platform, TpuPlatform):
            vllm.platforms._current_platform = TpuPlatform()
        import tpu_inference.layers.common.attention_interface as attention_interface
        import tpu_inference.models.common.model_loader as model_loader
        import tpu_inference.runner.tpu_runner as tpu_runner
        import tpu_inference.utils as utils

        torchax.default_env()

    utils.hbm_usage_bytes = lambda devices: [(0, HBM_BYTES) for _ in devices]
    utils.make_optimized_mesh = tpu_runner.make_optimized_mesh = _mesh
    model_loader.get_step_fn_compiler_options = dict  # XLA for the CPU does not know them
    attention_interface.sharded_ragged_paged_attention = paged_attention
    utils.general_device_put = _put_copy


def _mesh(shape: Any, names: Any, *, devices: Any = None) -> jax.sharding.Mesh:
    """Devices of the CPU have no coordinates by which to arrange them."""
    chosen = np.array(jax.devices() if devices is None else devices)
    auto = (jax.sharding.AxisType.Auto,) * len(names)
    return jax.sharding.Mesh(chosen.reshape(shape), names, axis_types=auto)


def _put_copy(tensor: Any, sharding: Any, **named: Any) -> Any:
    """The runner writes the inputs of the next step to the same host memory while this step runs. A TPU has a copy of
    them by then; the CPU backend uses aligned memory in place, and the step would read the next one's inputs."""
    from tpu_inference.layers.common.utils import general_device_put

    def copied(leaf: Any) -> Any:
        return leaf.copy() if isinstance(leaf, np.ndarray) else leaf

    return general_device_put(jax.tree.map(copied, tensor), sharding, **named)


def paged_attention(
    mesh: Any,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kv_cache: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    distribution: jax.Array,
    attention_sink: Any,
    sm_scale: float,
    attention_chunk_size: int | None = None,
    **_: Any,
) -> tuple[jax.Array, jax.Array]:
    """What the kernel of a TPU computes, in plain JAX: writes keys and values to the pages, and attends to them."""
    from tpu_inference.kernels.ragged_paged_attention.v3.kernel import merge_kv

    num_pages, page_tokens, pairs, packing, width = kv_cache.shape
    num_rows, tokens = kv_lens.shape[0], jnp.arange(q.shape[0])
    pages = page_indices.reshape(num_rows, -1)
    row = jnp.clip(jnp.searchsorted(cu_q_lens[1:], tokens, side="right"), 0, num_rows - 1)
    position = kv_lens[row] - cu_q_lens[row + 1] + tokens
    is_real = tokens < cu_q_lens[distribution[-1]]
    page = jnp.where(is_real, pages[row, position // page_tokens], num_pages)
    kv_cache = kv_cache.at[page, position % page_tokens].set(merge_kv(k, v).astype(kv_cache.dtype), mode="drop")
    context = jnp.take(kv_cache, pages, axis=0, mode="clip").reshape(num_rows, -1, pairs * packing, width)
    heads, size = k.shape[1], q.shape[2]
    context = context[:, :, : 2 * heads].reshape(num_rows, -1, heads, 2, width)[..., :size].astype(jnp.float32)
    keys, values = context[..., 0, :], context[..., 1, :]
    queries = q.astype(jnp.float32).reshape(q.shape[0], heads, -1, size)
    scores = jnp.einsum("tkgd,tlkd->tkgl", queries, keys[row]) * sm_scale
    seen = jnp.arange(keys.shape[1])[None] <= position[:, None]
    if attention_chunk_size is not None:  # a sliding window
        seen &= jnp.arange(keys.shape[1])[None] > position[:, None] - attention_chunk_size
    weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -1e30), axis=-1)
    output = jnp.einsum("tkgl,tlkd->tkgd", weights, values[row]).reshape(q.shape)
    return output.astype(q.dtype), kv_cache
