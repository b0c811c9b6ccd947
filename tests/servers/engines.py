"""The same run of eyas against SGLang and against vLLM: `python -m tests.servers.engines`.

A small real model (SmolLM2-135M-Instruct, no tools, no thinking) on this machine's CPU, float32,
greedy. Every sample must be `exact`: the server's own ids, which decode to its text, over the
prompt that eyas rendered. Prints a table; returns 1 when one is not (a reply cut by the limit is
let pass).
"""

import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

from core.audit.record import load_audit
from core.schema import Sample
from core.store import RunDir, read_samples
from tests.servers.eyas_run import eyas_run
from tests.servers.serving import BESIDE, free_port, python_of, served, sglang, vllm

SMOLLM2 = Path(os.environ.get("EYAS_SMOLLM2") or BESIDE / "envs" / "smollm2")
"""The model directory: config, safetensors, tokenizer (../shared/tools/servers.md makes it)."""
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


class Result(NamedTuple):
    way: Way
    samples: list[Sample]
    run: RunDir
    seconds: float


def ways(engine: str, url: str) -> list[Way]:
    if engine == "vllm":
        options = {"openai": {"base_url": f"{url}/v1", "model": "smol"}}
        return [Way("vLLM chat", engine, "vllm", options)]
    made = []
    for endpoint in ("generate", "chat"):
        options = {"sglang": {"urls": [url], "endpoint": endpoint}}
        made.append(Way(f"SGLang {endpoint}", engine, "sglang", options))
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
    if engine == "sglang":
        limits = ("--context-length", "2048", "--max-total-tokens", "16384")
        command = sglang(SMOLLM2, port, *limits)
    else:
        command = vllm(SMOLLM2, port, "smol")
    with served(command, port, log) as url:
        return run_all(engine, url, folder)


def show(results: list[Result], out: Console) -> None:
    table = Table("backend", "samples", "verdicts", "completion tokens", "rebuilt from text", "s")
    for r in results:
        verdicts = Counter(s.error_class or s.verdict for s in r.samples)
        found = load_audit(r.run).exactness
        table.add_row(
            r.way.name,
            str(len(r.samples)),
            ", ".join(f"{n} {v}" for v, n in verdicts.most_common()),
            f"{sum(len(s.completion_ids) for s in r.samples):,}",
            f"{found.exact} of {found.samples} ({found.low:.0%} - {found.high:.0%})",
            f"{r.seconds:.0f}",
        )
    out.print(table)
    out.print(f"identical completions in all backends: {agreeing(results)} of {QUESTIONS}")


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
        for engine in ("sglang", "vllm"):
            if python_of(engine).exists():
                results += serve_and_run(engine, Path(name))
            else:
                print(f"no {engine} environment at {python_of(engine)}: left out", file=sys.stderr)
        if results:
            show(results, Console(width=140))
    good = all(len(r.samples) == QUESTIONS and all(map(sound, r.samples)) for r in results)
    return 0 if results and good else 1


if __name__ == "__main__":
    sys.exit(main())
