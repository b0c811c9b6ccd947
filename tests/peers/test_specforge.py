"""Same weights, same batch: logits, losses and gradients of SpecForge 0.2.0 against ours in
`legacy` / `all` mode.

Needs an interpreter with torch, transformers 5, `pip install --no-deps specforge==0.2.0` and
triton: EYAS_SPECFORGE_PYTHON=/path/to/bin/python. Skipped where the variable is not set."""

import json
import os
import statistics
import subprocess
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from core.drafter.columns import columns_of
from core.drafter.data import Batch, supervised_KT
from core.drafter.loss import teach, ttt_loss
from core.target import Target
from tests.core.drafter.conftest import tiny_drafter, tiny_llama

PYTHON = os.environ.get("EYAS_SPECFORGE_PYTHON", "")
pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="EYAS_SPECFORGE_PYTHON names no interpreter"),
    pytest.mark.timeout(600),
]
STEPS, DECAY, PROMPT = 3, 0.8, 6


def peer(
    tmp_path: Path, batch: Batch, target: Target, drafter, mask_BT: torch.Tensor, repeats: int
):
    """SpecForge's tensors and numbers for this batch (rows of equal length)."""
    head = target.head()
    shifted = torch.nn.functional.pad(batch.last_BTH, (0, 0, 0, 1))[:, 1:]
    post_norm = (
        head.post_norm(shifted)
        * (torch.arange(shifted.shape[1]) < shifted.shape[1] - 1)[None, :, None]
    )
    loss_mask = mask_BT.int().clone()
    loss_mask[:, -1] = 0
    tensors = {
        "ids": torch.nn.functional.pad(batch.ids_BT, (0, 1))[:, 1:].contiguous(),
        "aux": batch.aux_BTX.contiguous(),
        "post_norm": post_norm.contiguous(),
        "mask": loss_mask,
        "attention": torch.ones_like(batch.ids_BT, dtype=torch.bool),
        "embed": drafter.embed_VH.clone(),
        "lm_head": head.lm_head_VH.clone(),
    }
    tensors |= {f"w.{k}": v.contiguous() for k, v in drafter.state_dict().items()}
    c = drafter.c
    settings = {
        "threads": torch.get_num_threads(),
        "steps": STEPS,
        "decay": DECAY,
        "repeats": repeats,
        "draft_vocab_size": c.draft_vocab_size,
        "config": {
            "hidden_size": c.hidden_size,
            "intermediate_size": c.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": c.num_heads,
            "num_key_value_heads": c.num_kv_heads,
            "head_dim": c.head_dim,
            "vocab_size": c.vocab_size,
            "rms_norm_eps": c.rms_eps,
            "max_position_embeddings": 512,
            "rope_theta": 10_000.0,
        },
    }
    save_file(tensors, tmp_path / "in.safetensors")
    (tmp_path / "in.json").write_text(json.dumps(settings))
    script = Path(__file__).with_name("specforge_step.py")
    names = ("in.safetensors", "in.json", "out.safetensors", "out.json")
    done = subprocess.run(
        [PYTHON, str(script), *(str(tmp_path / n) for n in names)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    assert done.returncode == 0, done.stderr[-2_000:]
    return load_file(tmp_path / "out.safetensors"), json.loads((tmp_path / "out.json").read_text())


def legacy_batch(target: Target, rows: int, length: int) -> tuple[Batch, torch.Tensor]:
    torch.manual_seed(2)
    ids_BT = torch.randint(6, target.vocab_size, (rows, length))
    states = target.capture(ids_BT)
    mask_BT = (torch.arange(length) >= PROMPT).repeat(rows, 1)
    supervised = torch.stack([supervised_KT(m, STEPS, "legacy") for m in mask_BT], 1)
    batch = Batch(
        ids_BT,
        states[:, :, :3].flatten(2),
        states[:, :, 3],
        torch.full(ids_BT.shape, -1),
        supervised,
        torch.full((rows,), length),
    )
    return batch, mask_BT


def test_logits_losses_and_gradients(tmp_path: Path):
    target = Target(tiny_llama())
    drafter = tiny_drafter(target, 4)
    batch, mask_BT = legacy_batch(target, 3, 24)
    theirs, numbers = peer(tmp_path, batch, target, drafter, mask_BT, repeats=0)
    columns = columns_of(torch.ones_like(batch.ids_BT, dtype=torch.bool))
    hidden = drafter.columns(batch.ids_BT, batch.aux_BTX, columns, STEPS)
    for k, hidden_NH in enumerate(hidden):
        logits = drafter.logits(hidden_NH).view(3, 24, -1)[:, : 24 - 1 - k]
        torch.testing.assert_close(
            logits.detach(), theirs[f"logits.{k}"][:, : 24 - 1 - k], rtol=1e-5, atol=1e-5
        )
    result = ttt_loss(drafter, batch, teach(batch, target.head(), drafter), DECAY, "all")
    assert result.loss_K == pytest.approx(numbers["losses"], rel=1e-5)
    assert float(result.loss.detach()) == pytest.approx(numbers["total"], rel=1e-5)
    result.loss.backward()
    compared = 0
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, theirs[f"grad.{name}"], rtol=1e-4, atol=1e-6)
        compared += 1
    assert compared == 13


def test_losses_of_a_larger_batch_and_the_time_of_a_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Half of each row supervised, H 128, V 1,024, D 256, batch 4 x 96; both on the same number "
    "of threads."""
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=8,
            num_attention_heads=4,
            num_key_value_heads=4,
            vocab_size=1_024,
            max_position_embeddings=512,
        )
    )
    target = Target(model)
    drafter = tiny_drafter(target, 4, draft_vocab=256)
    batch, _ = legacy_batch(target, 4, 96)
    mask_BT = (torch.arange(96) >= 48).repeat(4, 1)
    supervised = torch.stack([supervised_KT(m, STEPS, "legacy") for m in mask_BT], 1)
    batch = Batch(
        batch.ids_BT, batch.aux_BTX, batch.last_BTH, batch.top1_BT, supervised, batch.length_B
    )
    _, numbers = peer(tmp_path, batch, target, drafter, mask_BT, repeats=20)
    head, seconds = target.head(), []
    for _ in range(20):
        started = time.process_time()
        drafter.zero_grad(set_to_none=True)
        result = ttt_loss(drafter, batch, teach(batch, head, drafter), DECAY, "all")
        result.loss.backward()
        seconds.append(time.process_time() - started)
    ours = statistics.median(seconds)
    with capsys.disabled():
        theirs = numbers["median_s"] * 1e3
        print(f"\nCPU time of a step: SpecForge {theirs:.1f} ms, ours {ours * 1e3:.1f} ms")
    assert result.loss_K == pytest.approx(numbers["losses"], rel=1e-5)
