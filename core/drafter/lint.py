"""What an engine would misread in an exported drafter: tensors, shapes, dtypes, d2t, aux ids, rope,
norms, eos.

Engines ignore unknown weights and fall back on default layers without a word, so a folder that
loads proves nothing. Reads config.json and tensor files only; builds no model."""

# H hidden size, Q query heads, G key/value heads, E head size, I intermediate size, V target
# vocabulary, D draft vocabulary

import json
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from core.drafter.vocab import check_maps
from core.errors import ConfigError
from core.target import eos_ids, text_config

FLAGS_OFF = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def lint(directory: Path, engine: str, target: Path | None = None) -> list[str]:
    """Problems as `rule: what`, empty when there is none. With `target` the shapes, layers, rope
    and end tokens are compared with the model that the drafter is for."""
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        tensors = _read(directory)
    except (OSError, ValueError) as e:
        return [
            f"files: {directory} cannot be read ({type(e).__name__}); it needs config.json and "
            "model.safetensors"
        ]
    if not isinstance(config, dict):
        return ["files: config.json is not an object"]
    speculators = "speculators_model_type" in config
    layer = config.get("transformer_layer_config", {}) if speculators else config
    if not isinstance(layer, dict):
        return ["config: transformer_layer_config is not an object"]
    problems = _check_layout(config, engine, speculators)
    if missing := [k for k in _NEEDED if not _whole(layer.get(k))]:
        return [*problems, f"config: {', '.join(missing)} missing or not a whole number"]
    if few := [k for k in _NEEDED if layer[k] < 1]:
        return [*problems, f"config: {', '.join(few)} below 1"]
    if odd := [k for k in _SIZES if k in config and not _whole(config[k])]:
        return [*problems, f"config: {', '.join(odd)} not a whole number"]
    problems += _check_tensors(config, layer, tensors)
    problems += _check_dtypes(layer, config, tensors)
    problems += _check_vocab(config, tensors)
    problems += _check_aux(config, engine, speculators)
    problems += _check_rope(layer)
    problems += _check_flags(config, speculators)
    return problems + (_check_target(config, layer, target) if target else [])


_NEEDED = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
)
_SIZES = ("draft_vocab_size", "target_hidden_size")
"""Of the drafter alone, both optional."""


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _read(directory: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as f:
                found.update({name: f.get_tensor(name) for name in f.keys()})  # noqa: SIM118
        except SafetensorError as e:
            raise ValueError(f"{path}: {e}") from e
    if not found:
        raise ValueError("no tensors")
    return found


def _check_layout(config: dict[str, Any], engine: str, speculators: bool) -> list[str]:
    architectures = config.get("architectures")
    wanted = ["Eagle3Speculator"] if speculators else ["LlamaForCausalLMEagle3"]
    problems = []
    if engine in ("sglang", "hf") and speculators:
        problems.append(
            "layout: a speculators folder; SGLang reads the layout with midlayer.* and eagle_config"
        )
    if architectures != wanted:
        problems.append(f"architectures: {architectures!r}, the engine looks for {wanted}")
    return problems


def _shapes(
    config: dict[str, Any], layer: dict[str, Any], prefix: str
) -> dict[str, tuple[int, ...]]:
    h, i = layer["hidden_size"], layer["intermediate_size"]
    q = layer["num_attention_heads"] * layer["head_dim"]
    g = layer["num_key_value_heads"] * layer["head_dim"]
    d = config.get("draft_vocab_size") or layer["vocab_size"]
    return {
        f"{prefix}self_attn.q_proj.weight": (q, 2 * h),
        f"{prefix}self_attn.k_proj.weight": (g, 2 * h),
        f"{prefix}self_attn.v_proj.weight": (g, 2 * h),
        f"{prefix}self_attn.o_proj.weight": (h, q),
        f"{prefix}mlp.gate_proj.weight": (i, h),
        f"{prefix}mlp.up_proj.weight": (i, h),
        f"{prefix}mlp.down_proj.weight": (h, i),
        f"{prefix}hidden_norm.weight": (h,),
        f"{prefix}input_layernorm.weight": (h,),
        f"{prefix}post_attention_layernorm.weight": (h,),
        "fc.weight": (h, 3 * config.get("target_hidden_size", h)),
        "norm.weight": (h,),
        "lm_head.weight": (d, h),
        "d2t": (d,),
        "t2d": (layer["vocab_size"],),
    }


def _check_tensors(
    config: dict[str, Any], layer: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> list[str]:
    prefix = "layers.0." if any(name.startswith("layers.0.") for name in tensors) else "midlayer."
    shapes, problems = _shapes(config, layer, prefix), []
    if layer["num_attention_heads"] % layer["num_key_value_heads"]:
        problems.append("heads: num_attention_heads is not a multiple of num_key_value_heads")
    for name, shape in shapes.items():
        if name not in tensors:
            problems.append(f"tensors: {name} is missing")
        elif tuple(tensors[name].shape) != shape:
            problems.append(
                f"shapes: {name} is {tuple(tensors[name].shape)}, config.json says {shape}"
            )
    unknown = sorted(set(tensors) - set(shapes) - {"embed_tokens.weight"})
    problems += [f"tensors: {name} is unknown and would be ignored" for name in unknown]
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            problems.append(f"values: {name} holds NaN or infinity")
    return problems


def _check_dtypes(
    layer: dict[str, Any], config: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> list[str]:
    said = layer.get("torch_dtype") or config.get("torch_dtype") or layer.get("dtype")
    problems = []
    if not isinstance(said, str) or said not in FLOATS:
        problems.append(f"dtype: torch_dtype {said!r} is not float32, bfloat16 or float16")
    for name, tensor in tensors.items():
        wanted = {"d2t": torch.int64, "t2d": torch.bool}.get(name, FLOATS.get(str(said)))
        if wanted is not None and tensor.dtype != wanted:
            problems.append(f"dtype: {name} is {tensor.dtype}, expected {wanted}")
    return problems


def _check_vocab(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> list[str]:
    if "draft_vocab_size" not in config:
        return ["vocabulary: draft_vocab_size is missing; engines read it unasked"]
    if "d2t" not in tensors or "t2d" not in tensors:
        return []
    return check_maps(
        tensors["d2t"].to(torch.int64).numpy(),
        tensors["t2d"].to(torch.bool).numpy().astype(np.bool_),
    )


def _check_aux(config: dict[str, Any], engine: str, speculators: bool) -> list[str]:
    """Both places, each in its own convention; the nested one is what SGLang reads, the top one
    what vLLM reads."""
    top = config.get("eagle_aux_hidden_state_layer_ids")
    nested_config = config.get("eagle_config")
    nested = (
        nested_config.get("eagle_aux_hidden_state_layer_ids")
        if isinstance(nested_config, dict)
        else None
    )
    problems = []
    if engine == "vllm" and not _three(top):
        problems.append(
            "aux_ids: top-level eagle_aux_hidden_state_layer_ids (boundaries) missing; vLLM takes "
            "others"
        )
    if engine in ("sglang", "hf") and not speculators and not _three(nested):
        problems.append(
            "aux_ids: eagle_config.eagle_aux_hidden_state_layer_ids missing; SGLang takes default "
            "layers"
        )
    if _three(top) and _three(nested) and list(top) != [i + 1 for i in nested]:
        problems.append(
            f"aux_ids: top level {top} (inputs of layers) must be one more than eagle_config's "
            f"{nested} (outputs)"
        )
    if isinstance(nested_config, dict) and nested_config.get("use_aux_hidden_state") is not True:
        problems.append("aux_ids: eagle_config.use_aux_hidden_state must be true")
    return problems


def _three(ids: Any) -> TypeGuard[list[int]]:
    return (
        isinstance(ids, list)
        and len(ids) == 3
        and all(_whole(i) for i in ids)
        and ids == sorted(set(ids))
    )


def _check_rope(layer: dict[str, Any]) -> list[str]:
    rope, theta = layer.get("rope_parameters"), layer.get("rope_theta")
    if not isinstance(rope, dict) or theta is None:
        return [
            "rope: write both rope_parameters and rope_theta; engines of either age read one of "
            "them"
        ]
    problems = []
    if rope.get("rope_theta") != theta:
        problems.append(
            f"rope: rope_theta {theta!r} differs from rope_parameters.rope_theta "
            f"{rope.get('rope_theta')!r}"
        )
    scaled = rope.get("rope_type", "default") != "default"
    if scaled and "rope_scaling" in layer and not layer["rope_scaling"]:
        problems.append(
            "rope: rope_parameters scale but rope_scaling is empty; older engines would not scale"
        )
    return problems


def _check_flags(config: dict[str, Any], speculators: bool) -> list[str]:
    problems = [
        f"norms: {flag} is on; these weights were trained without it"
        for flag in FLAGS_OFF
        if config.get(flag)
    ]
    if speculators and "norm_before_residual" not in config:
        problems.append(
            "norms: norm_before_residual is missing; vLLM's speculators path assumes true"
        )
    return problems


def _check_target(config: dict[str, Any], layer: dict[str, Any], target: Path) -> list[str]:
    try:
        hf = text_config(target)
    except ConfigError as e:
        return [f"target: {e}"]
    problems = []
    for key in ("vocab_size", "hidden_size"):
        if layer[key] != getattr(hf, key):
            problems.append(f"target: {key} {layer[key]}, the target has {getattr(hf, key)}")
    if layer["max_position_embeddings"] < hf.max_position_embeddings:
        problems.append(
            f"max_position: {layer['max_position_embeddings']} is below the target's "
            f"{hf.max_position_embeddings}; "
            "longer contexts would crash or draft noise"
        )
    top = config.get("eagle_aux_hidden_state_layer_ids")
    if _three(top) and not 1 <= top[0] < top[-1] <= hf.num_hidden_layers:
        problems.append(
            f"aux_ids: {top} do not lie within the target's {hf.num_hidden_layers} layers"
        )
    eos = layer.get("eos_token_id")
    mine = eos if isinstance(eos, list) else [] if eos is None else [eos]
    mine = sorted(mine) if all(_whole(i) for i in mine) else mine
    if mine != eos_ids(target):
        problems.append(f"eos: {mine}, the target ends with {eos_ids(target)}")
    return problems
