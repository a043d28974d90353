"""Tiny models with random weights, spread enough that a wrong KV cache changes the answers."""

from __future__ import annotations

import json
from pathlib import Path

import torch

LAYERS = 4
HIDDEN = 256
HEADS = 4
KV_HEADS = 2
HEAD = 64
MLP = 512
VOCABULARY = 1024
WINDOW = 96

# Standard deviations. With vLLM's dummy weights all logits are nearly equal, and equal answers would prove nothing.
SPREAD = {"embedding": 1.0, "head": 0.15, "attention": 0.12, "mlp": 0.06}


def write_model(folder: Path, *, hybrid: bool = False, seed: int = 20) -> Path:
    """Write a Llama of 4 layers in fp32 as a local model folder; `hybrid` gives every other layer a sliding window
    of 96 tokens, hence two KV cache groups. The same seed gives the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    if hybrid:
        kinds = ["sliding_attention", "full_attention"]
        config |= {"layer_types": kinds * (LAYERS // 2), "sliding_window": WINDOW}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    write_tokenizer(folder)
    from safetensors.torch import save_file  # vLLM brings it

    save_file(make_weights(seed), folder / "model.safetensors")
    return folder


def write_tokenizer(folder: Path) -> None:
    """Words `t0` to `t1023`, in the format of `tokenizers`: the OpenAI server wants to write its answers in words."""
    words = {"type": "WordLevel", "vocab": {f"t{token}": token for token in range(VOCABULARY)}, "unk_token": "t0"}
    tokenizer = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "WhitespaceSplit"}, "model": words}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def make_weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(spread: str, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32) * SPREAD[spread]

    weights = {
        "model.embed_tokens.weight": normal("embedding", VOCABULARY, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": normal("head", VOCABULARY, HIDDEN),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        weights |= {
            f"{prefix}.input_layernorm.weight": torch.ones(HIDDEN),
            f"{prefix}.post_attention_layernorm.weight": torch.ones(HIDDEN),
            f"{prefix}.self_attn.q_proj.weight": normal("attention", HEADS * HEAD, HIDDEN),
            f"{prefix}.self_attn.k_proj.weight": normal("attention", KV_HEADS * HEAD, HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": normal("attention", KV_HEADS * HEAD, HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": normal("attention", HIDDEN, HEADS * HEAD),
            f"{prefix}.mlp.gate_proj.weight": normal("mlp", MLP, HIDDEN),
            f"{prefix}.mlp.up_proj.weight": normal("mlp", MLP, HIDDEN),
            f"{prefix}.mlp.down_proj.weight": normal("mlp", HIDDEN, MLP),
        }
    return weights
