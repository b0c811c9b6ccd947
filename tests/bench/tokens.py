"""Rebuild + verify against tiktoken's bare encode of the same text: `python -m tests.bench.tokens`.

One thread; ratios of one run, in CPU time, so that a busy machine changes little. `judge` is the
whole path from the raw reply to a Sample, prompt and all; the stage is that twice over, with its
files, in one thread, two threads and the processes that it really uses.
"""

import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import core.pipeline.rebuild as rebuild_stage
from core.config import TARGET_DIR, parse
from core.pipeline.rebuild import CHUNK, Replies, _judge
from core.reconstruct import StopOffsets, judge
from core.reconstruct.judging import ask_of
from core.reconstruct.rebuild import rebuild
from core.reconstruct.reply import Reply
from core.render.base import load_renderer
from core.render.tokenizer import Tokenizer
from core.schema import Prompt, Rollout, Sample, Usage
from core.store import RunDir, encode_line
from tests.kimi_files import KIMI, golden

REPEATS, SAMPLES, TARGET_TOKENS = 5, 200, 2_000
STAGE_REPLIES = 4_000
Encode = Callable[[str], list[int]]


def fastest(work: Callable[[], object]) -> float:
    """CPU seconds of the fastest of a few repeats."""
    times = []
    for _ in range(REPEATS):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
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


def sent(number: int, reasoning: str, content: str, count: int) -> Rollout:
    message = {"content": content, "reasoning": reasoning}
    return Rollout(
        prompt_id=f"p{number}",
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
        usage=Usage(completion_tokens=count),
    )


def asked(number: int, content: str) -> Prompt:
    messages = [{"role": "user", "content": content}]
    return Prompt(prompt_id=f"p{number}", twin_id="t", dataset="d", messages=messages)


def in_threads(replies: Replies, places: list[int]) -> Iterator[Sample]:
    """What the stage would be with two threads instead of processes."""
    chunks = [places[i : i + CHUNK] for i in range(0, len(places), CHUNK)]
    with ThreadPoolExecutor(2) as pool:
        for judged in pool.map(lambda chunk: list(_judge(replies, chunk)), chunks):
            yield from judged


def in_one(replies: Replies, places: list[int]) -> Iterator[Sample]:
    return _judge(replies, places)


def cpu_s() -> float:
    """Of this process and of its children that have ended."""
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(r.ru_utime + r.ru_stime for r in both)


def stage(directory: Path, pairs: list[tuple[str, str]], bare: Encode) -> None:
    """The whole reconstruct stage (two passes, files read and written) over STAGE_REPLIES replies
    of TARGET_TOKENS tokens: the CPU time it takes, and how fast it is on this machine now."""
    write = sys.stdout.write
    config = parse(
        {"target": {"tokenizer": str(directory)}, "dataset": [{"name": "d", "path": "x"}]}, "bench"
    )
    cut = [(a[: TARGET_TOKENS * 2], b[: TARGET_TOKENS * 2]) for a, b in pairs]
    counts = [len(bare(a)) + len(bare(b)) + 2 for a, b in cut]
    with tempfile.TemporaryDirectory() as folder:
        run = RunDir(Path(folder))
        with run.prompts.open("wb") as prompts, run.completions.open("wb") as completions:
            for i in range(STAGE_REPLIES):
                prompts.write(encode_line(asked(i, cut[0][1][:1_000])))
                k = i % len(cut)
                completions.write(encode_line(sent(i, *cut[k], counts[k])))
        start = cpu_s()
        for i in range(STAGE_REPLIES):
            a, b = cut[i % len(cut)]
            bare(a), bare(b)
        bare_s = cpu_s() - start
        tokens = sum(counts[i % len(cut)] for i in range(STAGE_REPLIES))
        write(f"reconstruct stage, {STAGE_REPLIES} replies, {tokens} tokens; ")
        write(f"bare encode {bare_s:.2f} s CPU\n")
        real = rebuild_stage.judge_all
        ways = {"one thread": in_one, "two threads": in_threads, "processes": real}
        for name, way in ways.items():
            rebuild_stage.judge_all = way
            start, wall = cpu_s(), time.perf_counter()
            found = rebuild_stage.run(run, config, lambda _: None, lambda: False)
            wall, used = time.perf_counter() - wall, cpu_s() - start
            assert found["verdicts"] == {"consistent": STAGE_REPLIES}
            scale = 83_000 * 2_000 / tokens
            write(f"  {name:<12} {STAGE_REPLIES / wall:6.0f} samples/s, {used:5.2f} s CPU")
            write(f" = {used / bare_s:.1f} x bare; 83,000 x 2,000 tokens: {used * scale:.0f} s CPU")
            write(f", {wall * scale:.0f} s at this pace\n")
        rebuild_stage.judge_all = real


def main() -> None:
    directory = KIMI if (KIMI / "tiktoken.model").exists() else TARGET_DIR
    renderer = load_renderer(directory, "kimi-k2.5")
    tokenizer = renderer.tokenizer
    assert isinstance(tokenizer, Tokenizer)
    bare = tokenizer._encoding.encode_ordinary
    pairs = texts()
    prompt = asked(0, pairs[0][1][:1_000])
    replies, rollouts, tokens = [], [], 0
    for reasoning, content in pairs:
        count = len(bare(reasoning)) + len(bare(content)) + 2
        tokens += count
        usage = Usage(completion_tokens=count)
        replies.append(Reply(reasoning=reasoning, content=content, finish="stop", usage=usage))
        rollouts.append(sent(0, reasoning, content, count))
    ask, offsets = ask_of({}, [], True), StopOffsets()
    assert {rebuild(r, ask, renderer).verdict for r in replies} == {"consistent"}
    encode_s = fastest(lambda: [(bare(a), bare(b)) for a, b in pairs])
    rebuild_s = fastest(lambda: [rebuild(r, ask, renderer) for r in replies])
    judge_s = fastest(lambda: [judge(r, prompt, renderer, offsets) for r in rollouts])
    write = sys.stdout.write
    write(f"{len(pairs)} samples, {tokens} tokens, {directory.name}; CPU time of one thread\n")
    write(f"bare encode       {tokens / encode_s / 1e6:6.2f} M tokens/s\n")
    write(f"rebuild + verify  {tokens / rebuild_s / 1e6:6.2f} M tokens/s")
    write(f"   {encode_s / rebuild_s:.2f} x bare\n")
    write(f"judge, raw reply  {tokens / judge_s / 1e6:6.2f} M tokens/s")
    write(f"   {encode_s / judge_s:.2f} x bare (reads JSON and renders the prompt as well)\n")
    stage(directory, pairs, bare)


if __name__ == "__main__":
    main()
