"""The tiny model of the benchmarks, with weights that are spread enough that a wrong KV cache changes the answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

import torch
from bench.vllm import model

TINY = model.SHAPES["tiny"]
VOCABULARY = TINY.vocabulary
WINDOW = 96
IMAGE_TOKEN, IMAGE_SIZE = 2, 56

_CONFIG = {"max_position_embeddings": 4096, "rope_theta": 10000.0, "torch_dtype": "float32"}


def write_model(folder: Path, *, hybrid: bool = False, seed: int = 20) -> Path:
    """Write a Llama of 4 layers in fp32 as a local model folder; `hybrid` gives every other layer a sliding window
    of 96 tokens, hence two KV cache groups. `seed`: of the weights."""
    layers = {"layer_types": ["sliding_attention", "full_attention"] * (TINY.layers // 2), "sliding_window": WINDOW}
    config = _CONFIG | (layers if hybrid else {})
    model.write_model(folder, TINY, weights=True, dtype=torch.float32, seed=seed, config=config)
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


def write_adapter(folder: Path, seed: int) -> Path:
    """Write a LoRA adapter for `write_model`, strong enough that answers without it, or with another one, differ."""
    save_file = import_module("safetensors.torch").save_file  # comes with vLLM
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    rows = {"k_proj": TINY.kv_heads * TINY.head_size, "v_proj": TINY.kv_heads * TINY.head_size}
    tensors = {}
    for layer in range(TINY.layers):
        for name, size in rows.items():
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{place}.lora_A.weight"] = torch.randn(8, TINY.hidden, generator=generator) * 0.1
            tensors[f"{place}.lora_B.weight"] = torch.randn(size, 8, generator=generator) * 0.1
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": sorted(rows), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def write_image_model(folder: Path) -> Path:
    """Write a BLIP-2 whose answers depend on the image before the prompt, which becomes 16 tokens `IMAGE_TOKEN`."""
    transformers = import_module("transformers")  # comes with vLLM
    torch.manual_seed(20)
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.Blip2Config(
        vision_config={**small, "image_size": IMAGE_SIZE, "patch_size": 14, "initializer_range": 0.2},
        qformer_config={**small, "encoder_hidden_size": 64, "vocab_size": 64, "initializer_range": 0.2},
        text_config={
            "model_type": "opt",
            "vocab_size": VOCABULARY,
            "hidden_size": 256,
            "word_embed_proj_dim": 256,
            "ffn_dim": 512,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "init_std": 0.1,
            "bos_token_id": 0,
            "eos_token_id": 1,
        },
        num_query_tokens=16,
        image_token_index=IMAGE_TOKEN,
    )
    transformers.Blip2ForConditionalGeneration(config).float().save_pretrained(folder)
    write_image_settings(folder)
    processor = {"processor_class": "Blip2Processor", "num_query_tokens": 16, "image_token": "<image>"}
    (folder / "processor_config.json").write_text(json.dumps(processor))
    write_tokenizer(folder, {IMAGE_TOKEN: "<image>"})
    return folder


def write_image_settings(folder: Path, image_mean: Sequence[float] = (0.5, 0.5, 0.5)) -> None:
    """How the processor of `write_image_model` makes numbers of an image."""
    settings = {
        "image_processor_type": "BlipImageProcessor",
        "size": {"height": IMAGE_SIZE, "width": IMAGE_SIZE},
        "do_normalize": True,
        "image_mean": image_mean,
        "image_std": [0.25, 0.25, 0.25],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))


def write_tokenizer(folder: Path, special: Mapping[int, str] | None = None) -> None:
    """Words `t0` to `t1023`, in the format of `tokenizers`: the OpenAI server wants to write its answers in words.
    `special`: other words for some tokens."""
    names = {token: f"t{token}" for token in range(VOCABULARY)} | dict(special or {})
    words = {"type": "WordLevel", "vocab": {name: token for token, name in names.items()}, "unk_token": "t0"}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": token, "content": name, "special": True, **flags} for token, name in (special or {}).items()]
    tokenizer = {"version": "1.0", "added_tokens": added, "pre_tokenizer": {"type": "WhitespaceSplit"}, "model": words}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
