"""How long the audit of a full-size run takes, and how much memory: `python -m tests.bench.audit
[SAMPLES] [TOKENS]`.

Writes a run of that many samples over the embedded tokenizer (half of them through the local arm),
audits it and prints seconds, samples/s and peak resident memory. Target: 83,000 samples
of 2,000 tokens on two cores in under 180 s and 2 GB.
"""

import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from core import config
from core.pipeline.auditing import run as audit
from core.render.source import renderer_of
from core.render.tokenizer import TokenizerLike
from core.schema import Prompt, Sample, Segment, ToolCall
from core.store import Manifest, RunDir, encode_line, write_manifest, write_samples

SETTINGS = config.Config()
PROMPT_TOKENS = 500
TOOLSETS = 40


def tools(number: int) -> list[dict[str, object]]:
    properties = {f"field_{i}": {"type": "string", "maxLength": 400} for i in range(6)}
    parameters = {
        "type": "object",
        "properties": {**properties, "count": {"type": "integer", "minimum": 0}},
        "required": ["field_0", "count"],
        "additionalProperties": False,
    }
    names = [f"tool_{number}_{i}" for i in range(8)]
    return [{"type": "function", "function": {"name": n, "parameters": parameters}} for n in names]


def prompts(count: int) -> Iterator[Prompt]:
    declared = [tools(i) for i in range(TOOLSETS)]
    text = "Please look at the following and answer with care. " * 40
    for i in range(count):
        yield Prompt(
            prompt_id=f"p{i}",
            twin_id=f"t{i // 2}",
            dataset=f"b{1 + i // 2 % 8}",
            messages=[{"role": "user", "content": f"{i} {text}"}],
            tools=declared[i // 2 % TOOLSETS],
            arm="declared" if i % 2 else "local",
            backend="openrouter" if i % 2 else "sglang",
        )


def samples(count: int, tokens: int, tokenizer: TokenizerLike) -> Iterator[Sample]:
    """Prose of plausible words in other orders, so that no two samples are alike; a call in half of
    them."""
    special = tokenizer.specials
    words = ["the", "weather", "of", "a", "city", "near", "harbour", "changes", "slowly", "than"]
    rng = np.random.default_rng(3)
    body = tokenizer.encode_ordinary(" ".join(rng.choice(words, 6 * tokens)))
    for i in range(count):
        start = int(rng.integers(0, len(body) - tokens))
        thought, said = (
            body[start : start + tokens // 2],
            body[start + tokens // 2 : start + tokens - 120],
        )
        name = f"tool_{i // 2 % TOOLSETS}_{i % 8}"
        call = ToolCall(
            id=f"functions.{name}:0", name=name, arguments=f'{{"field_0":"value {i}","count":{i}}}'
        )
        parts = [("reasoning", thought), ("marker", [special["</think>"]]), ("content", said)]
        if i % 4 < 2:
            parts += [
                (
                    "marker",
                    [special["<|tool_calls_section_begin|>"], special["<|tool_call_begin|>"]],
                ),
                ("call_id", tokenizer.encode_ordinary(call.id)),
                ("marker", [special["<|tool_call_argument_begin|>"]]),
                ("arguments", tokenizer.encode_ordinary(call.arguments)),
                ("marker", [special["<|tool_call_end|>"], special["<|tool_calls_section_end|>"]]),
            ]
        parts.append(("end", [special["<|im_end|>"]]))
        ids: list[int] = []
        segments = []
        for kind, piece in parts:
            segments.append(Segment(kind=kind, start=len(ids), end=len(ids) + len(piece)))
            ids += piece
        yield Sample(
            sample_id=f"p{i}",
            prompt_id=f"p{i}",
            twin_id=f"t{i // 2}",
            dataset=f"b{1 + i // 2 % 8}",
            arm="declared" if i % 2 else "local",
            backend="openrouter" if i % 2 else "sglang",
            provider=f"Provider{i % 5}" if i % 2 else None,
            token_ids=[1] * PROMPT_TOKENS + ids,
            prompt_len=PROMPT_TOKENS,
            verdict="consistent" if i % 2 else "exact",
            calls=[call] if i % 4 < 2 else [],
            segments=segments,
            finish_reason="tool_calls" if i % 4 < 2 else "stop",
            rebuilt_tokens=len(ids),
            billed_tokens=len(ids),
            prompt_tokens_billed=PROMPT_TOKENS,
            cost_usd=0.001 if i % 2 else None,
        )


def main(count: int, tokens: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = RunDir(Path(folder) / "bench")
        run.path.mkdir()
        write_manifest(run, Manifest(run_id="bench"))
        run.config_toml.write_text(config.dump(SETTINGS))
        with run.prompts.open("wb") as file:
            file.writelines(encode_line(p) for p in prompts(count))
        tokenizer = renderer_of(SETTINGS).tokenizer
        write_samples(run, samples(count, tokens, tokenizer))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        began, cpu = time.perf_counter(), time.process_time()
        summary = audit(run, SETTINGS, lambda _: None, lambda: False)
        wall, cpu = time.perf_counter() - began, time.process_time() - cpu
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rate = count / wall
    print(f"{count} samples of {tokens} tokens: {wall:.1f} s ({cpu:.1f} s CPU), {rate:.0f}/s")
    print(f"peak {peak / 1e6:.2f} GB resident ({before / 1e6:.2f} GB before)")
    print(f"{summary}")


if __name__ == "__main__":
    numbers = [int(a) for a in sys.argv[1:]]
    main(*(numbers + [83_000, 2_000][len(numbers) :]))
