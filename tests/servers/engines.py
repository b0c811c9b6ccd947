"""The same run of eyas against SGLang and against vLLM: `python -m tests.servers.engines`.

A small real model (SmolLM2-135M-Instruct, no tools, no thinking) on this machine's CPU, float32,
greedy, in streams and in whole replies. Every sample must be `exact`: the server's own ids, which
decode to its text, over the prompt that eyas rendered. Prints a table; returns 1 when one is not (a
reply cut by the limit is let pass), or when a way's replies came otherwise than it says.
"""

import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

from core.audit.record import load_audit
from core.schema import Rollout, Sample, reply_text
from core.store import RunDir, read_jsonl, read_samples
from tests.servers.eyas_run import eyas_run
from tests.servers.serving import BESIDE, free_port, python_of, served, sglang, vllm

SMOLLM2 = Path(os.environ.get("EYAS_SMOLLM2") or BESIDE / "envs" / "smollm2")
"""The model directory: config, safetensors, tokenizer (../shared/tools/servers.md makes it)."""
ENGINES = {"sglang": "sglang", "incremental": "sglang", "vllm": "vllm"}
"""What is started (SGLang twice: its streams repeat themselves, or do not), and where it lives."""
QUESTIONS = 20
MAX_TOKENS = 160
ASKED = [
    f"{ask} {thing}?"
    for ask in ("In one short sentence, what is", "Answer with one word: what colour is")
    for thing in (
        *("the Moon", "a bicycle", "bread", "snow", "grass", "a falcon", "tea", "iron", "rain"),
        "a lemon",
    )
]


class Way(NamedTuple):
    """One backend as a user configures it."""

    name: str
    engine: str
    backend: str
    generate: dict[str, Any]
    kind: str
    """How its replies come: `sse` or `json`."""


class Result(NamedTuple):
    way: Way
    samples: list[Sample]
    run: RunDir
    seconds: float


def ways(engine: str, url: str) -> list[Way]:
    if engine == "incremental":
        sections = {"sglang": {"urls": [url]}}
        return [Way("SGLang generate incremental", engine, "sglang", sections, "sse")]
    made = []
    for stream, kind, how in ((True, "sse", "streamed"), (False, "json", "whole")):
        if engine == "vllm":
            options = {"base_url": f"{url}/v1", "model": "smol", "stream": stream}
            made.append(Way(f"vLLM chat {how}", engine, "vllm", {"openai": options}, kind))
        else:
            options = {"urls": [url], "endpoint": "generate", "stream": stream}
            made.append(Way(f"SGLang generate {how}", engine, "sglang", {"sglang": options}, kind))
    if engine == "sglang":
        options = {"urls": [url], "endpoint": "chat"}
        made.append(Way("SGLang chat", engine, "sglang", {"sglang": options}, "json"))
    return made


def run_all(engine: str, url: str, folder: Path) -> list[Result]:
    questions = folder / "questions.jsonl"
    lines = [{"messages": [{"role": "user", "content": text}]} for text in ASKED[:QUESTIONS]]
    questions.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    results = []
    for way in ways(engine, url):
        dataset = {"name": "ask", "kind": "messages", "path": str(questions), "thinking": False}
        config = {
            "target": {
                **{"kind": "hf", "path": str(SMOLLM2), "tokenizer": str(SMOLLM2)},
                "variant": "template",
            },
            "dataset": [{**dataset, "arm": "local", "backend": way.backend}],
            "generate": {
                **{"max_in_flight": 8, "max_tokens": MAX_TOKENS, "temperature": 0.0, "canary": 2},
                **way.generate,
            },
            "tripwires": {"truncation_rate": 1.0},
        }
        started = time.monotonic()
        run = eyas_run(folder, way.name.replace(" ", "-").lower(), config)
        seconds = time.monotonic() - started
        results.append(Result(way, list(read_samples(run)), run, seconds))
    return results


def sound(sample: Sample) -> bool:
    """The server's ids over our prompt; a greedy reply cut by the limit is sound as well."""
    return sample.verdict == "exact" or (
        sample.error_class == "truncated_length" and bool(sample.completion_ids)
    )


def serve_and_run(engine: str, folder: Path) -> list[Result]:
    port, log = free_port(), folder / f"{engine}.log"
    if engine == "vllm":
        command = vllm(SMOLLM2, port, "smol")
    else:
        flags = ["--context-length", "2048", "--max-total-tokens", "16384"]
        flags += ["--incremental-streaming-output"] if engine == "incremental" else []
        command = sglang(SMOLLM2, port, *flags)
    with served(command, port, log) as url:
        return run_all(engine, url, folder)


def show(results: list[Result], out: Console) -> None:
    columns = ("backend", "samples", "verdicts", "completion tokens", "rebuilt from text")
    table = Table(*columns, "TTFT p50", "kB kept a reply", "s")
    for r in results:
        verdicts = Counter(s.error_class or s.verdict for s in r.samples)
        found = load_audit(r.run).exactness
        lines = replies(r)
        firsts = [t.ttft_s for t in (line.timings for line in lines) if t and t.ttft_s is not None]
        kept = sum(len(reply_text(line) or "") for line in lines) / max(1, len(lines))
        table.add_row(
            r.way.name,
            str(len(r.samples)),
            ", ".join(f"{n} {v}" for v, n in verdicts.most_common()),
            f"{sum(len(s.completion_ids) for s in r.samples):,}",
            f"{found.exact} of {found.samples} ({found.low:.0%} - {found.high:.0%})",
            f"{median(firsts):.2f} s" if firsts else "",
            f"{kept / 1e3:.1f}",
            f"{r.seconds:.0f}",
        )
    out.print(table)
    out.print(f"identical completions in all backends: {agreeing(results)} of {QUESTIONS}")


def replies(result: Result) -> list[Rollout]:
    lines = read_jsonl(result.run.completions, Rollout)
    return [line for line in lines if line.outcome != "aborted"]


def agreeing(results: list[Result]) -> int:
    """Questions whose ids are the same everywhere, stop token aside."""
    told = [
        {s.twin_id: (s.token_ids[: s.prompt_len], s.completion_ids) for s in r.samples}
        for r in results
    ]
    return sum(all(t.get(twin) == one for t in told) for twin, one in told[0].items())


def main() -> int:
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="eyas-engines-") as name:
        for engine, environment in ENGINES.items():
            if (python := python_of(environment)).exists():
                results += serve_and_run(engine, Path(name))
            else:
                print(f"no {environment} environment at {python}: left out", file=sys.stderr)
        if results:
            show(results, Console(width=140))
    good = all(len(r.samples) == QUESTIONS and all(map(sound, r.samples)) for r in results)
    good = good and all(line.reply_kind == r.way.kind for r in results for line in replies(r))
    return 0 if results and good else 1


if __name__ == "__main__":
    sys.exit(main())
