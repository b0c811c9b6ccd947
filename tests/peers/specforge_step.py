"""Runs under SpecForge's interpreter: one forward and backward of its EAGLE-3 training step on
given tensors.

    python specforge_step.py IN.safetensors IN.json OUT.safetensors OUT.json

Writes the logits of every TTT step, the losses, the gradient of each weight, and the seconds of
`repeats` steps."""

import json
import os
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import specforge.algorithms.eagle3.model as eagle3
import torch
from safetensors.torch import load_file, save_file
from specforge.core.loss import _compute_loss
from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
from transformers import LlamaConfig


class ReferenceLoss:
    """SpecForge's own reference formula in place of its Triton kernel."""

    @staticmethod
    def apply(logits, target_p, position_mask):
        return _compute_loss(logits, target_p, position_mask)


def main() -> None:
    tensors, settings = load_file(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    torch.set_num_threads(settings["threads"])
    eagle3.LogSoftmaxLoss = ReferenceLoss
    config = LlamaConfig(**settings["config"])
    config.draft_vocab_size, config.pretraining_tp = settings["draft_vocab_size"], 1
    config.pad_token_id = 0
    model = LlamaForCausalLMEagle3(config, attention_backend="sdpa").float()
    weights = {k[2:]: v for k, v in tensors.items() if k.startswith("w.")}
    weights["embed_tokens.weight"] = tensors["embed"]
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected, unexpected
    assert all("rotary" in name for name in missing), missing
    model.freeze_embedding()
    module = eagle3.OnlineEagle3Model(model, length=settings["steps"], attention_backend="sdpa")
    seen: list[torch.Tensor] = []
    original = model.compute_logits

    def keep(hidden):
        logits = original(hidden)
        seen.append(logits.detach().clone())
        return logits

    def step():
        model.zero_grad(set_to_none=True)
        target = torch.nn.functional.linear(tensors["post_norm"], tensors["lm_head"])
        losses, *_ = module(
            input_ids=tensors["ids"],
            attention_mask=tensors["attention"],
            target=target,
            loss_mask=tensors["mask"][..., None],
            hidden_states=tensors["aux"],
        )
        total = sum(settings["decay"] ** k * loss for k, loss in enumerate(losses))
        total.backward()
        return losses, total

    model.compute_logits = keep
    losses, total = step()
    out = {f"logits.{k}": logits.contiguous() for k, logits in enumerate(seen)}
    out |= {f"grad.{n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    save_file(out, sys.argv[3])
    model.compute_logits = original
    seconds = []
    for _ in range(settings["repeats"]):
        started = time.process_time()
        step()
        seconds.append(time.process_time() - started)
    result = {
        "losses": [float(x) for x in losses],
        "total": float(total),
        "median_s": statistics.median(seconds) if seconds else None,
    }
    Path(sys.argv[4]).write_text(json.dumps(result))


main()
