"""Make the embedded target: corpus -> tokenizer -> a small Llama, in the layout of a checkpoint.

    python -m core.embedded.make_target [--out DIR] [--steps N] [--state FILE]

Promises: one command makes everything again, the tokenizer to the byte; weights repeat up to the
order of floating-point sums. One sample a row, padded on the right, loss on the completion only:
packed windows were seen not to learn to copy arguments.

    B rows  T tokens  D hidden  N completion tokens of all rows  V vocabulary
"""

import argparse
import io
import json
import random
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import count, islice
from pathlib import Path

import torch
from safetensors.torch import save as save_weights
from torch import Tensor
from torch.nn import functional as F
from torch.optim import AdamW, Muon, Optimizer
from transformers import LlamaConfig, LlamaForCausalLM

from core.embedded import TARGET_DIR
from core.embedded.corpus import FAMILIES, Example, examples
from core.embedded.grammar import completion_ids, prompt_ids
from core.embedded.make_tokenizer import write_tokenizer
from core.render.base import Renderer, load_renderer
from core.render.tokenizer import TokenizerLike
from core.store import write_atomic

VARIANT = "kimi-k2.5"
STEPS = 2_600
SAVE_EVERY = 200
SHARE_FALLING = 0.4
# A batch holds one width (a multiple of 32) and about this many tokens. Few shapes, because each
# new one costs the CPU kernels a second; 32 wide, so that a batch mixes families.
BATCH_TOKENS, BUCKET = 4_096, 32
# Copying is learned sooner on short samples and from samples that are nothing but copies (measured:
# 200 small steps of `echo` alone do it): the first steps see only short ones and many echoes.
SHORT_STEPS, SHORT_WIDTH, SHORT_ECHOES = 500, 128, 8
MAX_WIDTH = 512
HARD = ("echo", "echo", "refusal", "refusal", "second_call", "arithmetic")
"""Families that are drawn more often: those that are learned last."""
TARGETS_MULTIPLE = 256
ROPE_THETA = 10_000.0
TEXT_SHARE = 0.15
"""Share of the samples whose tools stand as text in the system message (the `text` arm)."""
MUON_LR, ADAM_LR, WARMUP_STEPS, WEIGHT_DECAY = 4e-3, 3e-3, 60, 0.01

IGNORED = -100
"""The target that cross_entropy leaves out."""

Row = tuple[list[int], int]
"""Token ids and how many of them are the prompt."""


def model_config(tokenizer: TokenizerLike) -> LlamaConfig:
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


def train(renderer: Renderer, seed: int, steps: int, out: Path, state: Path | None = None) -> None:
    """Train from scratch; write config and weights every SAVE_EVERY steps and at the end.

    The file `state`, where given, keeps what a stopped training needs to go on. Until the last
    SHARE_FALLING of `steps` the learning rate does not depend on `steps`.
    """
    torch.manual_seed(seed)
    tokenizer = renderer.tokenizer
    model = LlamaForCausalLM(model_config(tokenizer))
    # On a CPU and at this size the backward of fused attention takes half of the whole step.
    model.set_attn_implementation("eager")
    optimizers = _optimizers(model)
    peaks = [[group["lr"] for group in o.param_groups] for o in optimizers]
    pad = tokenizer.specials["[PAD]"]
    started, running, done = time.monotonic(), 0.0, 0
    if state is not None and state.exists():
        done = _restore(state, model, optimizers)
    model.train()
    for step, batch in zip(range(1, steps + 1), _batches(renderer, seed), strict=False):
        if step <= done:
            continue
        for optimizer, lrs in zip(optimizers, peaks, strict=True):
            for group, lr in zip(optimizer.param_groups, lrs, strict=True):
                group["lr"] = lr * learning_rate_factor(step, steps)
        ids_BT, where_N, next_N = padded(batch, pad)
        with torch.autocast("cpu", torch.bfloat16):
            hidden_BTD = model.model(input_ids=ids_BT, use_cache=False).last_hidden_state
            logits_NV = model.lm_head(hidden_BTD.flatten(0, 1)[where_N])
        loss = F.cross_entropy(logits_NV.float(), next_N)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        running = loss.item() if step == done + 1 else 0.95 * running + 0.05 * loss.item()
        if step % 25 == 0:
            passed_s = time.monotonic() - started
            sys.stderr.write(f"step {step}/{steps} loss {running:.4f} {passed_s:.0f} s\n")
        if step % SAVE_EVERY == 0 or step == steps:
            save(model, out)
            if state is not None:
                _keep(state, model, optimizers, step)


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


def _keep(path: Path, model: LlamaForCausalLM, optimizers: list[Optimizer], step: int) -> None:
    data = io.BytesIO()
    states = [optimizer.state_dict() for optimizer in optimizers]
    torch.save({"step": step, "model": model.state_dict(), "optimizers": states}, data)
    write_atomic(path, data.getvalue())


def _restore(path: Path, model: LlamaForCausalLM, optimizers: list[Optimizer]) -> int:
    """Load what `_keep` wrote; the step that it was written after."""
    kept = torch.load(path, weights_only=True)
    model.load_state_dict(kept["model"])
    for optimizer, one in zip(optimizers, kept["optimizers"], strict=True):
        optimizer.load_state_dict(one)
    return int(kept["step"])


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


def learning_rate_factor(step: int, steps: int) -> float:
    """Linear warm-up, then flat, then linear to zero."""
    return min(step / WARMUP_STEPS, 1.0, (steps - step + 1) / (SHARE_FALLING * steps))


def _batches(renderer: Renderer, seed: int) -> Iterator[list[Row]]:
    """Endless; each batch is one bucket of widths, yielded as soon as it is full."""
    early = _filled(renderer, seed, (*FAMILIES, *["echo"] * SHORT_ECHOES), SHORT_WIDTH)
    yield from islice(early, SHORT_STEPS)
    for epoch in count(1):
        yield from _filled(renderer, seed + epoch, (*FAMILIES, *HARD), MAX_WIDTH)


def _filled(
    renderer: Renderer, seed: int, families: Sequence[str], max_width: int
) -> Iterator[list[Row]]:
    draw = random.Random(seed)
    buckets: defaultdict[int, list[Row]] = defaultdict(list)
    for example in examples("train", seed, families):
        row = _row(example, renderer, draw.random() < TEXT_SHARE)
        width = -(-len(row[0]) // BUCKET) * BUCKET
        if width <= max_width:
            buckets[width].append(row)
            if len(buckets[width]) == BATCH_TOKENS // width:
                yield buckets.pop(width)


def _row(example: Example, renderer: Renderer, as_text: bool) -> Row:
    prompt = prompt_ids(example, renderer, as_text)
    return prompt + completion_ids(example, renderer.tokenizer), len(prompt)


def padded(batch: list[Row], pad: int) -> tuple[Tensor, Tensor, Tensor]:
    """ids_BT padded on the right, flat positions before completion tokens, and those tokens.

    The last two are filled up to a multiple of TARGETS_MULTIPLE with targets that the loss ignores.
    """
    width = -(-max(len(ids) for ids, _ in batch) // BUCKET) * BUCKET
    ids_BT = torch.full((len(batch), width), pad)
    where, following = list[int](), list[int]()
    for i, (ids, prompt_len) in enumerate(batch):
        ids_BT[i, : len(ids)] = torch.tensor(ids)
        where += range(i * width + prompt_len - 1, i * width + len(ids) - 1)
        following += ids[prompt_len:]
    fill = -len(where) % TARGETS_MULTIPLE
    return ids_BT, torch.tensor(where + [0] * fill), torch.tensor(following + [IGNORED] * fill)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=TARGET_DIR)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--state", type=Path, help="file that lets a killed training go on")
    parser.add_argument("--tokenizer-only", action="store_true")
    args = parser.parse_args(argv)
    write_tokenizer(args.out)
    if args.tokenizer_only:
        return 0
    train(load_renderer(args.out, VARIANT), args.seed, args.steps, args.out, args.state)
    size = (args.out / "model.safetensors").stat().st_size
    sys.stderr.write(json.dumps({"out": str(args.out), "weights_bytes": size}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
