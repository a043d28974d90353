"""Models to serve: Llamas of several shapes with random weights, as folders that vLLM opens."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import torch


@dataclass(frozen=True, slots=True)
class Shape:
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    max_tokens: int = 65536
    latent: int = 0
    """Values of a token in a layer's KV with latent attention (MLA). 0 if the model does not have it."""

    def token_bytes(self, element_bytes: int = 2) -> int:
        """Return the KV bytes of one token in all layers."""
        if self.latent:
            return self.layers * self.latent * element_bytes
        return 2 * self.layers * self.kv_heads * self.head_size * element_bytes

    def config(self) -> dict[str, object]:
        return self._config() | (_LATENT if self.latent else {})

    def _config(self) -> dict[str, object]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_size,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.max_tokens,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "hidden_act": "silu",
            "torch_dtype": "bfloat16",
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }


_LATENT = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "first_k_dense_replace": 1000,
    "rope_theta": 10000.0,
}
SHAPES = {
    "8b": Shape(32, 4096, 14336, 32, 8, 128, 32000),  # pages of 64 KiB, as Llama 3 8B
    "tp8": Shape(80, 2048, 3584, 8, 1, 128, 32000),  # pages of 8 KiB, as one of 8 GPUs has of a 70B model
    "mla": Shape(27, 2048, 10944, 16, 16, 192, 32000, latent=576),  # like DeepSeek V2 Lite, without experts
    "small": Shape(16, 1024, 2816, 16, 4, 64, 8192),
    "tiny": Shape(4, 256, 512, 4, 2, 64, 1024),
}


_SPREADS = {"lm_head": 0.15, "self_attn": 0.12, "mlp": 0.06}
"""Standard deviations of weights at a hidden size of 256. Those of embeddings have 1."""


def write_model(
    folder: Path,
    shape: Shape,
    *,
    weights: bool,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    config: Mapping[str, object] | None = None,
) -> None:
    """Write a model. Without `weights`, vLLM must make its own (`load_format="dummy"`), and all answers look alike.

    With them, answers depend on all of the KV cache, so that one wrong block changes them. The same seed gives the same
    bytes. `config` replaces values of the shape's configuration.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape.config() | dict(config or {})))
    if weights:
        save_file = import_module("safetensors.torch").save_file  # comes with vLLM
        save_file(_weights(shape, dtype, seed), folder / "model.safetensors", metadata={"format": "pt"})


def _weights(shape: Shape, dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    spread = (256 / shape.hidden) ** 0.5

    def normal(rows: int, columns: int, std: float) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * std).to(dtype)

    hidden, queries, keys = shape.hidden, shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    weights = {
        "model.embed_tokens.weight": normal(shape.vocabulary, hidden, 1.0),
        "model.norm.weight": torch.ones(hidden, dtype=dtype),
        "lm_head.weight": normal(shape.vocabulary, hidden, _SPREADS["lm_head"] * spread),
    }
    for layer in range(shape.layers):
        sizes = {
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "mlp.gate_proj": (shape.intermediate, hidden),
            "mlp.up_proj": (shape.intermediate, hidden),
            "mlp.down_proj": (hidden, shape.intermediate),
        }
        for name, (rows, columns) in sizes.items():
            std = _SPREADS[name.partition(".")[0]] * spread
            weights[f"model.layers.{layer}.{name}.weight"] = normal(rows, columns, std)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{name}.weight"] = torch.ones(hidden, dtype=dtype)
    return weights


def fill_weights(model: torch.nn.Module, shape: Shape) -> None:
    """Fill a model that was made without weights with random ones, in place, as `write_model` writes them to a file.
    Making and reading the files of a large model would take minutes. Each tensor's name is its seed."""
    spread = (256 / shape.hidden) ** 0.5
    with torch.no_grad():
        for name, values in model.named_parameters():
            generator = torch.Generator(values.device).manual_seed(zlib.crc32(name.encode()))
            if "norm" in name:
                values.fill_(1)
            elif "embed" in name:
                values.normal_(0, 1.0, generator=generator)
            else:
                std = next((std for part, std in _SPREADS.items() if part in name), _SPREADS["mlp"])
                values.normal_(0, std * spread, generator=generator)
