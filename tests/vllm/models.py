"""The tiny model of the benchmarks, with weights that are spread enough that a wrong KV cache changes the answers."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import torch
from bench.vllm import model

TINY = model.SHAPES["tiny"]
VOCABULARY = TINY.vocabulary
WINDOW = 96

_CONFIG = {"max_position_embeddings": 4096, "rope_theta": 10000.0, "torch_dtype": "float32"}


def write_model(folder: Path, *, hybrid: bool = False) -> Path:
    """Write a Llama of 4 layers in fp32 as a local model folder; `hybrid` gives every other layer a sliding window
    of 96 tokens, hence two KV cache groups."""
    layers = {"layer_types": ["sliding_attention", "full_attention"] * (TINY.layers // 2), "sliding_window": WINDOW}
    config = _CONFIG | (layers if hybrid else {})
    model.write_model(folder, TINY, weights=True, dtype=torch.float32, seed=20, config=config)
    write_tokenizer(folder)
    return folder


def write_latent_model(folder: Path) -> Path:
    """Write a DeepSeek-V2 of 4 dense layers with latent attention (MLA), whose KV is the same on all ranks."""
    transformers = import_module("transformers")  # comes with vLLM
    torch.manual_seed(20)
    config = transformers.DeepseekV2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        head_dim=64,
        first_k_dense_replace=4,
        max_position_embeddings=4096,
        initializer_range=0.05,
        bos_token_id=0,
        eos_token_id=1,
    )
    transformers.DeepseekV2ForCausalLM(config).float().save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """Words `t0` to `t1023`, in the format of `tokenizers`: the OpenAI server wants to write its answers in words."""
    words = {"type": "WordLevel", "vocab": {f"t{token}": token for token in range(VOCABULARY)}, "unk_token": "t0"}
    tokenizer = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "WhitespaceSplit"}, "model": words}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
