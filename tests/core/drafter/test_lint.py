"""The lint of folders that nobody exported: whatever config.json holds is answered with a rule,
never with a crash."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from core.drafter.lint import lint

SIZES = {
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "vocab_size": 16,
    "max_position_embeddings": 32,
}
PLAIN: dict[str, Any] = {
    **SIZES,
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": 8,
    "target_hidden_size": 8,
    "torch_dtype": "float32",
    "rope_theta": 1e4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    "eagle_config": {
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
        "use_aux_hidden_state": True,
    },
    "eos_token_id": 3,
}
ODD: list[Any] = [None, 0, -1, 1.5, True, "7", "\x1b[31m", [], [1], ["a", None, {}], {}, {"a": 1}]


def folder(path: Path, config: dict[str, Any]) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    maps = {"d2t": torch.zeros(8, dtype=torch.int64), "t2d": torch.arange(16) < 8}
    save_file({"norm.weight": torch.ones(8), **maps}, path / "model.safetensors")
    return path


@pytest.mark.parametrize("key", PLAIN)
@pytest.mark.parametrize("engine", ["sglang", "vllm", "hf"])
def test_any_value_of_any_key_is_survived(
    tmp_path: Path, target_path: Path, key: str, engine: str
) -> None:
    for odd in ODD:
        for extra in ({}, {"speculators_model_type": "eagle3"}):
            problems = lint(
                folder(tmp_path / "x", {**PLAIN, key: odd, **extra}), engine, target_path
            )
            assert problems and all(p.partition(":")[0].isidentifier() for p in problems)
            assert all(p.isprintable() for p in problems), problems


@pytest.mark.parametrize("key", SIZES)
@pytest.mark.parametrize("value", [0, -1, True, 1.5, "8", None])
def test_sizes_are_whole_numbers_from_one(tmp_path: Path, key: str, value: Any) -> None:
    problems = lint(folder(tmp_path / "x", {**PLAIN, key: value}), "sglang")
    assert any(p.startswith("config: ") and key in p for p in problems), problems


@pytest.mark.parametrize("key", ["draft_vocab_size", "target_hidden_size"])
def test_optional_sizes_are_whole_numbers_too(tmp_path: Path, key: str) -> None:
    problems = lint(folder(tmp_path / "x", {**PLAIN, key: "8"}), "sglang")
    assert any(p.startswith("config: ") and key in p for p in problems), problems
