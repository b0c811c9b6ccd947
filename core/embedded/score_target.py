"""Score the embedded target on held-out prompts: form, tools and arguments, by family.

    python -m core.embedded.score_target [--target DIR] [--n 400] [--temperature 0.6] [--text]

Samples with transformers, not with the gateway's sampler: a second opinion about the weights.
`right` means exactly the expected calls with equal arguments and the expected strings.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from core.embedded import TARGET_DIR
from core.embedded.corpus import FAMILIES, Example, examples, is_right
from core.embedded.grammar import prompt_ids, read_completion
from core.render.base import Renderer, load_renderer
from core.schema import Record

VARIANT = "kimi-k2.5"
MAX_NEW_TOKENS = 160
ROWS = 50


class Score(Record, frozen=True, kw_only=True):
    """Counts of one family, or of all. `canonical`: sampled ids are their own text's encoding."""

    family: str
    n: int
    well_formed: int
    right: int
    should_call: int
    right_calls: int
    canonical: int


def score(
    directory: Path,
    n: int,
    temperature: float,
    seed: int = 0,
    as_text: bool = False,
) -> list[Score]:
    """One Score a family in the corpus's order, then the sum as `all`. Temperature 0 is greedy."""
    renderer = load_renderer(directory, VARIANT)
    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
    chosen = list(examples("heldout", seed, limit=n))
    prompts = [prompt_ids(example, renderer, as_text) for example in chosen]
    torch.manual_seed(seed)
    completions = sample(model, prompts, temperature, renderer)
    scores = [
        _judged(example, ids, renderer) for example, ids in zip(chosen, completions, strict=True)
    ]
    by_family = [
        _sum(family, [s for s in scores if s.family == family])
        for family in FAMILIES
        if any(s.family == family for s in scores)
    ]
    return [*by_family, _sum("all", scores)]


def sample(
    model: LlamaForCausalLM, prompts: list[list[int]], temperature: float, renderer: Renderer
) -> list[list[int]]:
    """Completions in the order of `prompts`, ending with `<|im_end|>` unless one ran too long."""
    pad, end = renderer.tokenizer.specials["[PAD]"], renderer.tokenizer.specials["<|im_end|>"]
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    completions: list[list[int]] = [[] for _ in prompts]
    for start in range(0, len(order), ROWS):
        rows = order[start : start + ROWS]
        width = max(len(prompts[i]) for i in rows)
        ids = torch.tensor([[pad] * (width - len(prompts[i])) + prompts[i] for i in rows])
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=(ids != pad).long(),
                do_sample=temperature > 0,
                temperature=temperature if temperature > 0 else None,
                top_k=0 if temperature > 0 else None,
                max_new_tokens=MAX_NEW_TOKENS,
                eos_token_id=end,
                pad_token_id=pad,
            )
        for i, row in zip(rows, out[:, width:].tolist(), strict=True):
            completions[i] = row[: row.index(end) + 1] if end in row else row
    return completions


def table(scores: Sequence[Score]) -> str:
    lines = [
        f"{'family':<16}{'n':>6}{'well-formed':>13}{'right':>9}{'right calls':>17}{'canonical':>11}"
    ]
    for s in scores:
        calls = f"{s.right_calls}/{s.should_call} {_percent(s.right_calls, s.should_call)}"
        lines.append(
            f"{s.family:<16}{s.n:>6}{_percent(s.well_formed, s.n):>13}{_percent(s.right, s.n):>9}"
            f"{calls if s.should_call else '-':>17}{_percent(s.canonical, s.n):>11}"
        )
    return "\n".join(lines) + "\n"


def _judged(example: Example, ids: list[int], renderer: Renderer) -> Score:
    first_index = sum(len(message.get("tool_calls", ())) for message in example.messages)
    reply = read_completion(ids, example.thinking, first_index, renderer.tokenizer)
    right = reply is not None and is_right(example.expect, reply.content, reply.tool_calls)
    calls = bool(example.expect.calls)
    return Score(
        family=example.family,
        n=1,
        well_formed=reply is not None,
        right=right,
        should_call=calls,
        right_calls=calls and right,
        canonical=_is_canonical(ids, renderer),
    )


def _is_canonical(ids: list[int], renderer: Renderer) -> bool:
    """Between special tokens, do the ids equal the encoding of their text?"""
    tokenizer = renderer.tokenizer
    expected: list[int] = []
    start = 0
    for at, token_id in enumerate([*ids, -1]):
        if token_id < 0 or tokenizer.is_special(token_id):
            expected += tokenizer.encode_ordinary(tokenizer.decode(ids[start:at]))
            expected += [token_id] if token_id >= 0 else []
            start = at + 1
    return expected == ids


def _sum(family: str, scores: Sequence[Score]) -> Score:
    return Score(
        family=family,
        n=len(scores),
        well_formed=sum(s.well_formed for s in scores),
        right=sum(s.right for s in scores),
        should_call=sum(s.should_call for s in scores),
        right_calls=sum(s.right_calls for s in scores),
        canonical=sum(s.canonical for s in scores),
    )


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--target", type=Path, default=TARGET_DIR)
    parser.add_argument("--n", type=int, default=400)
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--text", action="store_true", help="tools as text in the system message")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    scores = score(args.target, args.n, args.temperature, args.seed, as_text=args.text)
    if args.json:
        rows = [{field: getattr(s, field) for field in s.__struct_fields__} for s in scores]
        sys.stdout.write(json.dumps(rows) + "\n")
    else:
        sys.stdout.write(table(scores))
    return 0


if __name__ == "__main__":
    sys.exit(main())
