"""Write a checkpoint as an engine reads it, lint what was written, load it back and compare logits.

    sglang   config.json with eagle_config (output-of-layer ids), tensors midlayer.*; vLLM reads the
    same folder vllm     speculators layout: layers.0.*, boundary ids, every norm flag said hf
    as sglang, with the embedding, so that the folder stands alone

Ids of aux layers are written in the convention of each place: nested eagle_config = output of
layer, top level = boundary (hidden_states index). Knows formats; the checks live in
core.drafter.lint."""

# H hidden size, X = 3H aux states, N positions, V target vocabulary, D draft vocabulary

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from core import events as ev
from core.config import Config
from core.drafter import checkpoint
from core.drafter.columns import columns_of
from core.drafter.lint import lint
from core.drafter.model import DraftConfig, Drafter
from core.errors import ExportError
from core.features import disk_boundary, to_boundaries
from core.store import RunDir
from core.target import DTYPES, TargetHead, load_head, target_dir, text_config

ENGINES = ("sglang", "vllm", "hf")


def hf_config(draft: DraftConfig, dtype: str) -> dict[str, Any]:
    """config.json of the SGLang and hf layouts. RoPE is written in both spellings, aux ids in both
    places."""
    rope = dict(draft.rope_parameters)
    theta = rope.pop("rope_theta", 10_000.0)
    scaling = None if rope.get("rope_type", "default") == "default" else rope
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_layer_config(draft, dtype),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "draft_vocab_size": draft.draft_vocab_size,
        "target_hidden_size": draft.hidden_size,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": to_boundaries(draft.aux_layers),
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": draft.aux_layers,
            "use_aux_hidden_state": True,
        },
    }


def speculators_config(
    draft: DraftConfig, dtype: str, verifier: dict[str, Any], tokens: int
) -> dict[str, Any]:
    """config.json of the speculators layout, which vLLM serves as a model of its own."""
    layer = {"architectures": ["LlamaForCausalLM"], **_layer_config(draft, dtype)}
    layer["rope_theta"] = draft.rope_parameters.get("rope_theta", 10_000.0)
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens}],
            "verifier": verifier,
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": draft.draft_vocab_size,
        "target_hidden_size": draft.hidden_size,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "eagle_aux_hidden_state_layer_ids": to_boundaries(draft.aux_layers),
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
    }


def _layer_config(draft: DraftConfig, dtype: str) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": draft.hidden_size,
        "intermediate_size": draft.intermediate_size,
        "num_attention_heads": draft.num_heads,
        "num_key_value_heads": draft.num_kv_heads,
        "head_dim": draft.head_dim,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": draft.rms_eps,
        "vocab_size": draft.vocab_size,
        "max_position_embeddings": draft.max_position_embeddings,
        "rope_parameters": draft.rope_parameters,
        "tie_word_embeddings": False,
        "pretraining_tp": 1,
        "bos_token_id": draft.bos_id,
        "eos_token_id": draft.eos_ids[0] if len(draft.eos_ids) == 1 else draft.eos_ids or None,
        "pad_token_id": None,
        "torch_dtype": dtype,
    }


def tensors(drafter: Drafter, engine: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The engine's tensors: weights in `dtype`, d2t int64 offsets, t2d bool."""
    out = {}
    for name, value in drafter.state_dict().items():
        kept = value if name in ("d2t", "t2d") else value.to(dtype)
        key = name.replace("midlayer.", "layers.0.", 1) if engine == "vllm" else name
        out[key] = kept.detach().cpu().contiguous().clone()
    if engine == "hf":
        out["embed_tokens.weight"] = drafter.embed_VH.detach().to(dtype).cpu().contiguous()
    return out


def write(
    drafter: Drafter,
    engine: str,
    directory: Path,
    dtype: str,
    verifier: dict[str, Any],
    draft_tokens: int,
) -> None:
    """Write one export folder; it appears by rename and replaces an older one."""
    if engine not in ENGINES:
        raise ExportError(f"engine {engine!r} is not known; take one of {', '.join(ENGINES)}")
    config = (
        speculators_config(drafter.c, dtype, verifier, draft_tokens)
        if engine == "vllm"
        else hf_config(drafter.c, dtype)
    )
    temporary = directory.with_name(f".{directory.name}.tmp")
    with disk_boundary(directory):
        if temporary.exists():
            shutil.rmtree(temporary)
        temporary.mkdir(parents=True)
        text = json.dumps(config, indent=2, ensure_ascii=True) + "\n"
        (temporary / "config.json").write_text(text, encoding="utf-8")
        weights = tensors(drafter, engine, DTYPES[dtype])
        save_file(weights, temporary / "model.safetensors", metadata={"format": "pt"})
        # safetensors makes its files for their owner alone; engines often run as somebody else
        shutil.copymode(temporary / "config.json", temporary / "model.safetensors")
        if directory.exists():
            shutil.rmtree(directory)
        temporary.replace(directory)


def load_export(directory: Path, head: TargetHead) -> Drafter:
    """Rebuild a drafter from an export folder alone (and the target's embedding), as an engine
    would: shapes from config.json, aux ids and offsets as written there."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    weights = load_file(directory / "model.safetensors")
    layer = config.get("transformer_layer_config", config)
    boundaries = config["eagle_aux_hidden_state_layer_ids"]
    eos = layer.get("eos_token_id")
    draft = DraftConfig(
        hidden_size=layer["hidden_size"],
        intermediate_size=layer["intermediate_size"],
        num_heads=layer["num_attention_heads"],
        num_kv_heads=layer["num_key_value_heads"],
        head_dim=layer["head_dim"],
        rms_eps=layer["rms_norm_eps"],
        vocab_size=layer["vocab_size"],
        draft_vocab_size=config["draft_vocab_size"],
        rope_parameters=layer["rope_parameters"],
        max_position_embeddings=layer["max_position_embeddings"],
        aux_layers=[boundary - 1 for boundary in boundaries],
        bos_id=layer.get("bos_token_id"),
        eos_ids=eos if isinstance(eos, list) else [] if eos is None else [eos],
    )
    weights.pop("embed_tokens.weight", None)
    renamed = {k.replace("layers.0.", "midlayer.", 1): v for k, v in weights.items()}
    dtype = renamed["fc.weight"].dtype
    drafter = Drafter(draft, head.embed_VH.to(dtype), renamed["d2t"], renamed["t2d"]).to(dtype)
    drafter.load_state_dict(renamed)
    return drafter


@torch.no_grad()
def reload_gap(drafter: Drafter, directory: Path, head: TargetHead) -> float:
    """Largest absolute logit difference, over three chain steps on random states, between the
    training module cast to the stored dtype and the folder loaded back. Anything but 0 is a
    fault."""
    loaded = load_export(directory, head)
    dtype = loaded.fc.weight.dtype
    same = Drafter(drafter.c, head.embed_VH.to(dtype), drafter.d2t, drafter.t2d).to(dtype)
    same.load_state_dict(
        {k: v.to(dtype) if v.is_floating_point() else v for k, v in drafter.state_dict().items()}
    )
    generator = torch.Generator().manual_seed(0)
    ids_BT = torch.randint(drafter.c.vocab_size, (2, 24), generator=generator)
    aux_BTX = torch.randn(2, 24, 3 * drafter.c.hidden_size, generator=generator).to(dtype)
    columns, gap = columns_of(torch.ones(2, 24, dtype=torch.bool)), 0.0
    mine = same.columns(ids_BT, aux_BTX, columns, 3)
    theirs = loaded.columns(ids_BT, aux_BTX, columns, 3)
    for a, b in zip(mine, theirs, strict=True):
        gap = max(gap, float((same.logits(a) - loaded.logits(b)).abs().max()))
        if not torch.equal(same.target_ids(same.logits(a)), loaded.target_ids(loaded.logits(b))):
            gap = float("inf")
    return gap


def export_checkpoint(path: Path, config: Config, engine: str, directory: Path) -> dict[str, Any]:
    """Write, lint and load back one layout. ExportError names the first problem; the folder is left
    for inspection."""
    source = target_dir(config)
    head = load_head(source)
    drafter, _ = checkpoint.load_drafter(path, head)
    verifier = {
        "name_or_path": str(source.resolve()),
        "architectures": list(text_config(source).architectures or []),
    }
    write(drafter, engine, directory, config.target.dtype, verifier, config.eval.draft_tokens)
    if problems := lint(directory, engine, source):
        raise ExportError(
            f"{directory}: {problems[0]} ({len(problems)} problems); see eyas lint", kind="lint"
        )
    gap = reload_gap(drafter, directory, head)
    if gap != 0:
        raise ExportError(
            f"{directory}: logits of the loaded export differ from the checkpoint's by {gap:g}; do "
            "not serve it",
            kind="reload",
        )
    size = sum(p.stat().st_size for p in directory.iterdir())
    return {
        "path": str(directory),
        "bytes": size,
        "logit_gap": gap,
        "launch": launch(engine, directory, config),
    }


def launch(engine: str, directory: Path, config: Config) -> str:
    """The command line that serves the target with this drafter."""
    k, target = config.eval.draft_tokens, target_dir(config)
    if engine == "vllm":
        spec = json.dumps(
            {"method": "eagle3", "model": str(directory), "num_speculative_tokens": k}
        )
        return f"vllm serve {target} --speculative-config '{spec}'"
    return (
        f"python -m sglang.launch_server --model-path {target} --speculative-algorithm EAGLE3 "
        f"--speculative-draft-model-path {directory} --speculative-num-steps {k} "
        f"--speculative-eagle-topk 1 --speculative-num-draft-tokens {k + 1}"
    )


def run(
    run: RunDir, config: Config, emit: Callable[[ev.Event], None], should_stop: Callable[[], bool]
) -> dict[str, Any]:
    """Export the newest checkpoint for every engine of [export]."""
    path = checkpoint.latest(run.checkpoints)
    if path is None:
        raise ExportError(
            f"{run.checkpoints}: no checkpoint; run the train stage first", kind="no_checkpoint"
        )
    engines = config.export.engines
    summary: dict[str, Any] = {"checkpoint": path.name, "engines": ", ".join(engines)}
    run.export.mkdir(parents=True, exist_ok=True)
    for done, engine in enumerate(engines):
        made = export_checkpoint(path, config, engine, run.export / engine)
        summary.update({f"{engine}_{key}": value for key, value in made.items()})
        emit(ev.StageProgress(stage="export", done=done + 1, total=len(engines), detail=engine))
    return summary
