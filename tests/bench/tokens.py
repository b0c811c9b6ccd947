"""Rebuild + verify against tiktoken's bare encode of the same text: `python -m tests.bench.tokens`.

One thread; ratios of one run. `judge` is the whole path from the raw reply to a Sample, prompt and
all.
"""

import json
import sys
import time
from collections.abc import Callable

from core.embedded import TARGET_DIR
from core.reconstruct import StopOffsets, judge
from core.reconstruct.judging import ask_of
from core.reconstruct.rebuild import rebuild
from core.reconstruct.reply import Reply
from core.render.base import load_renderer
from core.render.tokenizer import Tokenizer
from core.schema import Prompt, Rollout, Usage
from tests.kimi_files import KIMI, golden

REPEATS, SAMPLES, TARGET_TOKENS = 5, 200, 2_000


def fastest(work: Callable[[], object]) -> float:
    """Seconds of the fastest of a few repeats."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def texts() -> list[tuple[str, str]]:
    """Reasoning and content of about 2,000 tokens together, from the golden texts."""
    parts = [r["input"]["text"] for r in golden("tokens") if isinstance(r["input"]["text"], str)]
    prose = [p for p in parts if 20 < len(p) < 2_000 and "<" not in p and "\ufffd" not in p]
    whole = "\n".join(prose) or "The quick brown fox jumps over the lazy dog. " * 500
    found = []
    for i in range(SAMPLES):
        start = (i * 997) % max(1, len(whole) - 100)
        text = (whole[start:] + whole * 4)[: 4 * TARGET_TOKENS]
        found.append((text[: len(text) // 2], text[len(text) // 2 :]))
    return found


def main() -> None:
    directory = KIMI if (KIMI / "tiktoken.model").exists() else TARGET_DIR
    renderer = load_renderer(directory, "kimi-k2.5")
    tokenizer = renderer.tokenizer
    assert isinstance(tokenizer, Tokenizer)
    bare = tokenizer._encoding.encode_ordinary
    pairs = texts()
    prompt = Prompt(
        prompt_id="p",
        twin_id="t",
        dataset="d",
        messages=[{"role": "user", "content": pairs[0][1][:1_000]}],
    )
    replies, rollouts, tokens = [], [], 0
    for reasoning, content in pairs:
        count = len(bare(reasoning)) + len(bare(content)) + 2
        tokens += count
        usage = Usage(completion_tokens=count)
        replies.append(Reply(reasoning=reasoning, content=content, finish="stop", usage=usage))
        message = {"content": content, "reasoning": reasoning}
        rollouts.append(
            Rollout(
                prompt_id="p",
                twin_id="t",
                dataset="d",
                arm="declared",
                attempt=1,
                outcome="ok",
                backend="openrouter",
                provider="x",
                status=200,
                reply_kind="json",
                reply_raw=json.dumps({"choices": [{"finish_reason": "stop", "message": message}]}),
                usage=usage,
            )
        )
    ask, offsets = ask_of({}, [], True), StopOffsets()
    assert {rebuild(r, ask, renderer).verdict for r in replies} == {"consistent"}
    encode_s = fastest(lambda: [(bare(a), bare(b)) for a, b in pairs])
    rebuild_s = fastest(lambda: [rebuild(r, ask, renderer) for r in replies])
    judge_s = fastest(lambda: [judge(r, prompt, renderer, offsets) for r in rollouts])
    write = sys.stdout.write
    write(f"{len(pairs)} samples, {tokens} tokens, {directory.name}\n")
    write(f"bare encode       {tokens / encode_s / 1e6:6.2f} M tokens/s\n")
    write(f"rebuild + verify  {tokens / rebuild_s / 1e6:6.2f} M tokens/s")
    write(f"   {encode_s / rebuild_s:.2f} x bare\n")
    write(f"judge, raw reply  {tokens / judge_s / 1e6:6.2f} M tokens/s")
    write(f"   {encode_s / judge_s:.2f} x bare (reads JSON and renders the prompt as well)\n")
    write(
        f"83,000 samples of 2,000 tokens: {83_000 * 2_000 / (tokens / judge_s):.0f} s on one core\n"
    )


if __name__ == "__main__":
    main()
