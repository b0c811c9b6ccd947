"""Exports: reload equality, both aux id conventions, and a lint that catches each way of breaking "
"a folder."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from core import extract
from core.drafter import checkpoint, export, train, vocab
from core.drafter.lint import lint
from core.errors import ExportError
from core.store import RunDir
from core.target import load_head

from .conftest import HIDDEN, VOCAB

ENGINES = ["sglang", "vllm", "hf"]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, target_path: Path, drawn):
    """(run, config) with all three layouts written by the stage."""
    from core import config as cfg
    from core.store import write_samples

    run = RunDir(tmp_path_factory.mktemp("export") / "run")
    run.path.mkdir()
    write_samples(run, drawn)
    config = cfg.parse(
        {
            "target": {"kind": "hf", "path": str(target_path), "tokenizer": str(target_path)},
            "extract": {"dtype": "float32"},
            "draft": {"vocab_size": 64},
            "train": {"ttt_steps": 2, "lr": 2e-3, "max_steps": 3},
            "export": {"engines": ENGINES},
        },
        "test",
    )
    for stage in (vocab, extract, train):
        stage.run(run, config, lambda _: None, lambda: False)
    events: list = []
    summary = export.run(run, config, events.append, lambda: False)
    assert [e.detail for e in events] == ENGINES
    return run, config, summary


@pytest.mark.parametrize("engine", ENGINES)
def test_written_linted_and_loaded_back_with_the_same_logits(
    exported, engine: str, target_path: Path
):
    run, _, summary = exported
    assert summary[f"{engine}_logit_gap"] == 0.0
    assert lint(run.export / engine, engine, target_path) == []
    head = load_head(target_path)
    newest = checkpoint.latest(run.checkpoints)
    assert newest is not None
    drafter, _ = checkpoint.load_drafter(newest, head)
    assert export.reload_gap(drafter, run.export / engine, head) == 0.0
    with torch.no_grad():
        drafter.midlayer.self_attn.k_proj.weight[0, 0] += 1e-3
    assert export.reload_gap(drafter, run.export / engine, head) > 0.0
    assert all(isinstance(v, int | float | str) for v in summary.values())
    modes = {(run.export / engine / n).stat().st_mode for n in ("config.json", "model.safetensors")}
    assert len(modes) == 1  # who may read the one may read the other


def test_layouts_hold_what_each_engine_reads(exported):
    run, _, summary = exported
    sglang = json.loads((run.export / "sglang/config.json").read_text())
    assert sglang["architectures"] == ["LlamaForCausalLMEagle3"]
    assert sglang["eagle_config"] == {
        "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
        "use_aux_hidden_state": True,
    }
    assert sglang["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert (sglang["draft_vocab_size"], sglang["vocab_size"], sglang["num_hidden_layers"]) == (
        64,
        VOCAB,
        1,
    )
    assert sglang["rope_theta"] == sglang["rope_parameters"]["rope_theta"] == 10_000.0
    names = set(load_file(run.export / "sglang/model.safetensors"))
    assert {
        "midlayer.self_attn.q_proj.weight",
        "fc.weight",
        "norm.weight",
        "lm_head.weight",
        "d2t",
        "t2d",
    } <= names
    assert "embed_tokens.weight" not in names
    vllm = json.loads((run.export / "vllm/config.json").read_text())
    assert vllm["speculators_model_type"] == "eagle3"
    assert vllm["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert vllm["norm_before_residual"] is False
    assert vllm["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    weights = load_file(run.export / "vllm/model.safetensors")
    assert weights["layers.0.hidden_norm.weight"].shape == (HIDDEN,)
    assert weights["d2t"].dtype == torch.int64 and weights["t2d"].dtype == torch.bool
    assert "embed_tokens.weight" in load_file(run.export / "hf/model.safetensors")
    assert "--speculative-algorithm EAGLE3 " in summary["sglang_launch"]
    assert '"method": "eagle3"' in summary["vllm_launch"]


def edit_config(directory: Path, change) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def edit_tensors(directory: Path, change) -> None:
    path = directory / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path)


def nested(config: dict) -> dict:
    return config["eagle_config"]


CONFIG_FAULTS = {
    "plus one in both places": (
        "sglang",
        lambda c: nested(c).update(eagle_aux_hidden_state_layer_ids=[2, 4, 5]),
        "aux_ids",
    ),
    "no eagle_config": ("sglang", lambda c: c.pop("eagle_config"), "aux_ids"),
    "aux states off": ("sglang", lambda c: nested(c).update(use_aux_hidden_state=False), "aux_ids"),
    "no top-level ids for vLLM": (
        "vllm",
        lambda c: c.pop("eagle_aux_hidden_state_layer_ids"),
        "aux_ids",
    ),
    "two ids": ("vllm", lambda c: c.update(eagle_aux_hidden_state_layer_ids=[2, 4]), "aux_ids"),
    "past the last layer": (
        "vllm",
        lambda c: c.update(eagle_aux_hidden_state_layer_ids=[2, 4, 9]),
        "aux_ids",
    ),
    "norm before residual": ("vllm", lambda c: c.update(norm_before_residual=True), "norms"),
    "residual flag missing": ("vllm", lambda c: c.pop("norm_before_residual"), "norms"),
    "norm output": ("sglang", lambda c: c.update(norm_output=True), "norms"),
    "rope in one spelling": ("sglang", lambda c: c.pop("rope_theta"), "rope"),
    "rope spellings differ": ("sglang", lambda c: c.update(rope_theta=5.0), "rope"),
    "scaling lost": (
        "sglang",
        lambda c: c["rope_parameters"].update(rope_type="yarn", factor=4.0),
        "rope",
    ),
    "no draft_vocab_size": ("sglang", lambda c: c.pop("draft_vocab_size"), "vocabulary"),
    "another D": ("sglang", lambda c: c.update(draft_vocab_size=60), "shapes"),
    "another head_dim": ("sglang", lambda c: c.update(head_dim=16), "shapes"),
    "odd heads": ("sglang", lambda c: c.update(num_key_value_heads=3), "heads"),
    "architecture": (
        "sglang",
        lambda c: c.update(architectures=["LlamaForCausalLM"]),
        "architectures",
    ),
    "hidden size is text": ("sglang", lambda c: c.update(hidden_size="32"), "config"),
    "another dtype": ("sglang", lambda c: c.update(torch_dtype="bfloat16"), "dtype"),
    "eos lost": ("sglang", lambda c: c.update(eos_token_id=None), "eos"),
    "max position": ("sglang", lambda c: c.update(max_position_embeddings=100), "max_position"),
    "another target": ("sglang", lambda c: c.update(vocab_size=VOCAB + 1), "target"),
}
TENSOR_FAULTS = {
    "d2t holds ids": (lambda w: w.update(d2t=w["d2t"] + torch.arange(64)), "d2t"),
    "d2t is arange": (lambda w: w.update(d2t=torch.arange(64)), "d2t"),
    "t2d off by one": (lambda w: w.update(t2d=w["t2d"].roll(1)), "t2d"),
    "d2t int32": (lambda w: w.update(d2t=w["d2t"].int()), "dtype"),
    "missing norm": (lambda w: w.pop("norm.weight"), "tensors"),
    "unknown tensor": (lambda w: w.update({"fc_norm.0.weight": torch.ones(32)}), "tensors"),
    "lm_head of another D": (lambda w: w.update({"lm_head.weight": torch.zeros(60, 32)}), "shapes"),
    "half precision": (lambda w: w.update({"fc.weight": w["fc.weight"].half()}), "dtype"),
    "NaN": (lambda w: w["norm.weight"].fill_(float("nan")), "values"),
}


@pytest.mark.parametrize("fault", CONFIG_FAULTS)
def test_lint_catches_config_faults(exported, tmp_path, target_path: Path, fault: str):
    engine, change, rule = CONFIG_FAULTS[fault]
    shutil.copytree(exported[0].export / engine, tmp_path / "x")
    edit_config(tmp_path / "x", change)
    problems = lint(tmp_path / "x", engine, target_path)
    assert any(p.startswith(f"{rule}:") for p in problems), problems


@pytest.mark.parametrize("fault", TENSOR_FAULTS)
@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_lint_catches_tensor_faults(exported, tmp_path, target_path: Path, fault: str, engine: str):
    change, rule = TENSOR_FAULTS[fault]
    shutil.copytree(exported[0].export / engine, tmp_path / "x")
    edit_tensors(tmp_path / "x", change)
    problems = lint(tmp_path / "x", engine, target_path)
    assert any(p.startswith(f"{rule}:") for p in problems), problems


def test_lint_of_folders_that_are_none(tmp_path, exported):
    assert lint(tmp_path, "sglang")[0].startswith("files:")
    (tmp_path / "config.json").write_text("[1]")
    assert lint(tmp_path, "sglang")[0].startswith("files:")
    (tmp_path / "model.safetensors").write_bytes(b"junk")
    assert lint(tmp_path, "vllm")[0].startswith("files:")
    assert any(p.startswith("layout:") for p in lint(exported[0].export / "vllm", "sglang"))
    assert lint(exported[0].export / "sglang", "vllm") == []


def test_a_broken_export_is_not_announced(exported, monkeypatch, tmp_path):
    run, config, _ = exported
    newest = checkpoint.latest(run.checkpoints)
    original = export.hf_config
    monkeypatch.setattr(export, "hf_config", lambda d, t: {**original(d, t), "norm_output": True})
    with pytest.raises(ExportError, match="norm_output is on"):
        export.export_checkpoint(newest, config, "sglang", tmp_path / "bad")
    with pytest.raises(ExportError, match="not known"):
        export.export_checkpoint(newest, config, "tgi", tmp_path / "bad2")
    with pytest.raises(ExportError, match="run the train stage first"):
        export.run(RunDir(tmp_path / "none"), config, lambda _: None, lambda: False)


def test_bfloat16_export_reloads_to_the_same_logits(exported, tmp_path, target_path: Path):
    run, config, _ = exported
    newest = checkpoint.latest(run.checkpoints)
    assert newest is not None
    head = load_head(target_path)
    drafter, _ = checkpoint.load_drafter(newest, head)
    export.write(drafter, "sglang", tmp_path / "x", "bfloat16", {}, 3)
    assert lint(tmp_path / "x", "sglang", target_path) == []
    assert load_file(tmp_path / "x" / "model.safetensors")["fc.weight"].dtype == torch.bfloat16
    assert export.reload_gap(drafter, tmp_path / "x", head) == 0.0
    assert config.target.dtype == "float32"
