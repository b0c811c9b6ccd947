"""Make the embedded target: corpus -> tokenizer -> a small Llama, in the layout of a checkpoint.

    python -m core.embedded.make_target [--out DIR] [--steps N] [--seed N] [--tokenizer-only]

Promises: one command makes everything again, the tokenizer to the byte; weights repeat up to the
order of floating-point sums. One sample a row, padded on the right, loss on the completion only:
packed windows were seen not to learn to copy arguments.

    B rows  T tokens  D hidden  N completion tokens of all rows  V vocabulary
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save as save_weights
from torch import Tensor
from torch.nn import functional as F
from torch.optim import AdamW, Muon, Optimizer
from transformers import LlamaConfig, LlamaForCausalLM

from core.embedded import TARGET_DIR
from core.embedded.corpus import Example, examples
from core.embedded.grammar import completion_ids, prompt_ids
from core.embedded.make_tokenizer import write_tokenizer
from core.render.base import Renderer, load_renderer
from core.render.tokenizer import Tokenizer
from core.store import write_atomic

VARIANT = "kimi-k2.5"
STEPS, ROWS = 5_000, 32
# Batches are cut from pools of this many samples sorted by length, so that a row is hardly padded.
POOL = 64 * ROWS
ROPE_THETA = 10_000.0
TEXT_SHARE = 0.15
"""Share of the samples whose tools stand as text in the system message (the `text` arm)."""
MUON_LR, ADAM_LR, WARMUP_STEPS, WEIGHT_DECAY = 4e-3, 3e-3, 60, 0.01

Row = tuple[list[int], int]
"""Token ids and how many of them are the prompt."""


def model_config(tokenizer: Tokenizer) -> LlamaConfig:
    """8 layers make the aux layers [1, n//2-1, n-4] = [1, 3, 4] distinct; 3.5 M parameters."""
    return LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=3,
        max_position_embeddings=1_024,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.specials["[BOS]"],
        eos_token_id=tokenizer.specials["<|im_end|>"],
        pad_token_id=tokenizer.specials["[PAD]"],
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )


def train(renderer: Renderer, tokenizer: Tokenizer, seed: int, steps: int, out: Path) -> None:
    """Train from scratch; write config and weights every 400 steps and at the end."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(model_config(tokenizer))
    optimizers = _optimizers(model)
    peaks = [[group["lr"] for group in o.param_groups] for o in optimizers]
    pad = tokenizer.specials["[PAD]"]
    started, running = time.monotonic(), 0.0
    model.train()
    for step, batch in zip(range(1, steps + 1), _batches(renderer, seed), strict=False):
        for optimizer, lrs in zip(optimizers, peaks, strict=True):
            for group, lr in zip(optimizer.param_groups, lrs, strict=True):
                group["lr"] = lr * _schedule(step, steps)
        ids_BT, is_target_BT = _tensors(batch, pad)
        with torch.autocast("cpu", torch.bfloat16):
            hidden_BTD = model.model(input_ids=ids_BT[:, :-1], use_cache=False).last_hidden_state
            logits_NV = model.lm_head(hidden_BTD[is_target_BT[:, 1:]])
        loss = F.cross_entropy(logits_NV.float(), ids_BT[:, 1:][is_target_BT[:, 1:]])
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        running = loss.item() if step == 1 else 0.95 * running + 0.05 * loss.item()
        if step % 25 == 0:
            passed_s = time.monotonic() - started
            sys.stderr.write(f"step {step}/{steps} loss {running:.4f} {passed_s:.0f} s\n")
        if step % 400 == 0 or step == steps:
            save(model, out)


def save(model: LlamaForCausalLM, out: Path) -> None:
    """bfloat16 weights and config; the tied head is not stored, the model itself stays float32."""
    weights = {
        name: tensor.to(torch.bfloat16)
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    write_atomic(out / "model.safetensors", save_weights(weights, metadata={"format": "pt"}))
    # Engines and transformers 4 read `rope_theta`, transformers 5 writes `rope_parameters`.
    fields = {**model.config.to_diff_dict(), "rope_theta": ROPE_THETA}
    config = json.dumps(fields, indent=2, sort_keys=True) + "\n"
    write_atomic(out / "config.json", config.encode())


def _optimizers(model: LlamaForCausalLM) -> list[Optimizer]:
    """Muon on the matrices inside the layers, AdamW on embeddings and norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        Muon(
            matrices,
            lr=MUON_LR,
            weight_decay=WEIGHT_DECAY,
            momentum=0.95,
            adjust_lr_fn="match_rms_adamw",
        ),
        AdamW(others, lr=ADAM_LR, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def _schedule(step: int, steps: int) -> float:
    """Linear warm-up, then flat, then linear to zero over the last 40 %."""
    return min(step / WARMUP_STEPS, 1.0, (steps - step + 1) / (0.4 * steps))


def _batches(renderer: Renderer, seed: int) -> Iterator[list[Row]]:
    """Endless. Samples of like length share a batch; batches are shuffled in each pool."""
    shuffle = random.Random(seed)
    pool: list[Row] = []
    epoch = 0
    while True:
        for example in examples("train", seed + epoch):
            pool.append(_row(example, renderer, shuffle.random() < TEXT_SHARE))
            if len(pool) == POOL:
                pool.sort(key=lambda row: len(row[0]))
                batches = [pool[i : i + ROWS] for i in range(0, POOL, ROWS)]
                shuffle.shuffle(batches)
                yield from batches
                pool = []
        epoch += 1


def _row(example: Example, renderer: Renderer, as_text: bool) -> Row:
    prompt = prompt_ids(example, renderer, as_text)
    return prompt + completion_ids(example, renderer.tokenizer), len(prompt)


def _tensors(batch: list[Row], pad: int) -> tuple[Tensor, Tensor]:
    """ids_BT padded on the right, and which of them are predicted."""
    width = max(len(ids) for ids, _ in batch)
    ids_BT = torch.full((len(batch), width), pad)
    is_target_BT = torch.zeros(len(batch), width, dtype=torch.bool)
    for i, (ids, prompt_len) in enumerate(batch):
        ids_BT[i, : len(ids)] = torch.tensor(ids)
        is_target_BT[i, prompt_len : len(ids)] = True
    return ids_BT, is_target_BT


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=TARGET_DIR)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokenizer-only", action="store_true")
    args = parser.parse_args(argv)
    write_tokenizer(args.out)
    if args.tokenizer_only:
        return 0
    tokenizer = Tokenizer.load(args.out)
    train(load_renderer(args.out, VARIANT), tokenizer, args.seed, args.steps, args.out)
    size = (args.out / "model.safetensors").stat().st_size
    sys.stderr.write(json.dumps({"out": str(args.out), "weights_bytes": size}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
