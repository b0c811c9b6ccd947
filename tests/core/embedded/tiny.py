"""A random Llama small enough for every test, and its directory in the Hugging Face layout."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

TINY = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}


def tiny_weights(seed: int = 0, scale: float = 0.35) -> dict[str, torch.Tensor]:
    """Weights large enough for peaked, varied distributions."""
    make = torch.Generator().manual_seed(seed)
    hidden, inner, vocab = 32, 48, int(str(TINY["vocab_size"]))

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=make) * scale

    weights = {
        "model.embed_tokens.weight": rand(vocab, hidden),
        "lm_head.weight": rand(vocab, hidden),
        "model.norm.weight": 1 + rand(hidden),
    }
    for i in range(3):
        shapes = {
            "self_attn.q_proj": (32, hidden),
            "self_attn.k_proj": (16, hidden),
            "self_attn.v_proj": (16, hidden),
            "self_attn.o_proj": (hidden, 32),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        for name, shape in shapes.items():
            weights[f"model.layers.{i}.{name}.weight"] = rand(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{i}.{name}.weight"] = 1 + rand(hidden)
    return weights


def write_tiny(directory: Path, seed: int = 0, vocab_size: int = 320) -> Path:
    """config.json and model.safetensors; the tokenizer is not part of it."""
    directory.mkdir(parents=True, exist_ok=True)
    weights = tiny_weights(seed)
    if vocab_size != 320:
        make = torch.Generator().manual_seed(seed + 1)
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            weights[name] = torch.randn((vocab_size, 32), generator=make) * 0.35
    config = {**TINY, "vocab_size": vocab_size}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(weights, directory / "model.safetensors")
    return directory
