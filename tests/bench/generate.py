"""Requests per second and CPU per request of the engine beside bare aiohttp and the OpenAI SDK,
same gateway, same replies, in turns: `python -m tests.bench.generate [--requests N] [--in-flight
64,512,2000] [--sdk] [--stream]`.

Each client runs in a process of its own against one replay gateway (a reply of about 1,000 tokens,
1 s away). The engine does its whole work: render, reserve, write the dispatch, parse, classify,
book, judge, store. Printed: requests per second, CPU milliseconds per request, peak memory, loop
lag; ratios last. Targets: engine >= 0.9 x bare aiohttp at 2,000 in flight; 2,000 streams x 30
events/s with a loop lag p99 under 20 ms."""

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPLY_TOKENS = 1_000
CLIENTS = ("aiohttp", "engine")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=4_000)
    parser.add_argument("--in-flight", default="64,512,2000")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--delay-s", type=float, default=1.0)
    parser.add_argument("--sdk", action="store_true", help="the OpenAI SDK as well (slow)")
    parser.add_argument("--stream", action="store_true", help="30 events/s a stream")
    parser.add_argument("--client", help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        work = {"aiohttp": bare, "engine": engine, "sdk": sdk}[options.client]
        print(json.dumps(measured(work(options))))
        return
    clients = [*CLIENTS, *(["sdk"] if options.sdk else [])]
    with tempfile.TemporaryDirectory() as folder, gateway(Path(folder), options) as url:
        for width in map(int, options.in_flight.split(",")):
            compare(options, clients, width, url)


def compare(options: argparse.Namespace, clients: list[str], width: int, url: str) -> None:
    best: dict[str, dict[str, float]] = {}
    for _ in range(options.rounds):
        for client in clients:
            count = min(options.requests, max(width * 4, 256))
            args = [sys.executable, "-m", "tests.bench.generate", "--client", client, "--url", url]
            args += ["--requests", str(count), "--in-flight", str(width)]
            args += ["--stream"] if options.stream else []
            out = subprocess.run(args, capture_output=True, text=True, check=True).stdout
            row = json.loads(out.splitlines()[-1])
            if client not in best or row["per_s"] > best[client]["per_s"]:
                best[client] = row
    for client, row in best.items():
        ratio = row["per_s"] / best["aiohttp"]["per_s"]
        print(
            f"{width:>5} in flight  {client:<8} {row['per_s']:8.1f} requests/s"
            f"  {row['cpu_ms']:6.2f} ms CPU each  {row['rss_mb']:6.0f} MB"
            f"  lag p99 {row['lag_ms']:5.1f} ms  {ratio:5.2f} x aiohttp",
            flush=True,
        )


def reply_ids() -> list[int]:
    """A canonical completion of about REPLY_TOKENS ids: what a good reply is, so that the judge
    does a good reply's work."""
    from core.embedded import TARGET_DIR
    from core.embedded.corpus import examples
    from core.render.base import load_renderer

    renderer = load_renderer(TARGET_DIR, "kimi-k2.5")
    grammar = renderer.grammar
    assert grammar is not None and grammar.think_close is not None
    texts = (e.content for e in examples("heldout", 0, (), 4_000) if e.content)
    content: list[str] = []
    size = 0
    for text in texts:
        content.append(text)
        size += len(renderer.tokenizer.encode_ordinary(text))
        if size > REPLY_TOKENS:
            break
    encode = renderer.tokenizer.encode_ordinary
    thinking = encode(" A long answer is wanted.")
    return [*thinking, grammar.think_close, *encode("\n".join(content)), grammar.end]


class gateway:
    """The replay gateway as a process; yields its OpenRouter base URL."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        tape = folder / "tape.jsonl"
        line = {"completion_ids": reply_ids(), "prompt_tokens": 20}
        tape.write_text(json.dumps(line) + "\n")
        self.ready = folder / "ready.json"
        speed = 30.0 if options.stream else 0.0
        args = ["gateway", "--ready", str(self.ready), "--replay", str(tape)]
        args += ["--latency-scale", "0", "--exit-with-stdin", "--credit", "1000000"]
        args += ["--tokens-per-s", str(speed), "--ttft-s", str(options.delay_s)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "core", *args], stdin=subprocess.PIPE
        )

    def __enter__(self) -> str:
        while not self.ready.exists():
            if self.process.poll() is not None:
                raise SystemExit("the gateway did not start")
            time.sleep(0.05)
        return str(json.loads(self.ready.read_text())["base_url_openrouter"])

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def measured(work: Any) -> dict[str, float]:
    """Run a client; CPU and memory of this process alone."""
    before = time.process_time()
    count, seconds, lag_s = asyncio.run(work)
    cpu = time.process_time() - before
    return {
        "per_s": count / seconds,
        "cpu_ms": cpu / count * 1_000,
        "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "lag_ms": lag_s * 1_000,
    }


async def lag_of(samples: list[float]) -> None:
    while True:
        before = time.monotonic()
        await asyncio.sleep(0.01)
        samples.append(time.monotonic() - before - 0.01)


def p99(samples: list[float]) -> float:
    return sorted(samples)[int(len(samples) * 0.99)] if samples else 0.0


def body_of(number: int, options: argparse.Namespace) -> dict[str, Any]:
    return {
        "model": "eyas/embedded",
        "messages": [{"role": "user", "content": f"What is 2 + {number}?"}],
        "max_tokens": 4_096,
        "stream": options.stream,
        "provider": {"only": ["alder"], "allow_fallbacks": False},
    }


async def bare(options: argparse.Namespace) -> tuple[int, float, float]:
    """aiohttp and nothing else: encode, post, read, decode."""
    import aiohttp
    import msgspec

    gate = asyncio.Semaphore(int(options.in_flight))
    samples: list[float] = []
    lag = asyncio.create_task(lag_of(samples))
    headers = {"Authorization": "Bearer bench", "Content-Type": "application/json"}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, headers=headers) as session:

        async def one(number: int) -> None:
            async with gate:
                body = msgspec.json.encode(body_of(number, options))
                async with session.post(f"{options.url}/chat/completions", data=body) as reply:
                    raw = await reply.read()
                    assert reply.status == 200, raw[:200]
                    if not options.stream:
                        msgspec.json.decode(raw)

        start = time.monotonic()
        await asyncio.gather(*(one(i) for i in range(options.requests)))
        seconds = time.monotonic() - start
    lag.cancel()
    return options.requests, seconds, p99(samples)


async def sdk(options: argparse.Namespace) -> tuple[int, float, float]:
    """The OpenAI SDK with its defaults but for retries and timeouts."""
    import openai

    gate = asyncio.Semaphore(int(options.in_flight))
    samples: list[float] = []
    lag = asyncio.create_task(lag_of(samples))
    async with openai.AsyncOpenAI(
        base_url=options.url, api_key="bench", max_retries=0, timeout=600
    ) as client:

        async def one(number: int) -> None:
            async with gate:
                body = body_of(number, options)
                provider = {"provider": body.pop("provider")}
                reply = await client.chat.completions.create(**body, extra_body=provider)
                if options.stream:
                    async for _ in reply:
                        pass

        start = time.monotonic()
        await asyncio.gather(*(one(i) for i in range(options.requests)))
        seconds = time.monotonic() - start
    lag.cancel()
    return options.requests, seconds, p99(samples)


async def engine(options: argparse.Namespace) -> tuple[int, float, float]:
    """The whole generate stage with its files on disk; judged by the real rebuild."""
    from core.config import parse
    from core.embedded import TARGET_DIR
    from core.generate import Generator, Ports
    from core.reconstruct import StopOffsets, judge
    from core.render.base import load_renderer
    from core.schema import Prompt
    from core.store import Appender

    os.environ["OPENROUTER_API_KEY"] = "bench-key"
    config = parse(
        {
            "run": {"budget_usd": 1e6},
            "generate": {
                "max_in_flight": int(options.in_flight),
                "max_tokens": 4_096,
                "canary": 0,
                "openrouter": {
                    "base_url": options.url,
                    "stream": options.stream,
                    "only": ["alder"],
                },
            },
        },
        "bench",
    )
    prompts = [
        Prompt(
            prompt_id=f"p{i}",
            twin_id=f"t{i}",
            dataset="d",
            messages=[{"role": "user", "content": f"What is 2 + {i}?"}],
        )
        for i in range(options.requests)
    ]
    renderer, offsets = load_renderer(TARGET_DIR, "kimi-k2.5"), StopOffsets()
    samples: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        completions = Appender(Path(folder) / "completions.jsonl")
        spend = Appender(Path(folder) / "spend.jsonl")
        ports = Ports(
            emit=lambda event: None,
            judge=lambda rollout, prompt: judge(rollout, prompt, renderer, offsets),
            renderer=renderer,
            completions=completions,
            spend=spend,
        )
        lag = asyncio.create_task(lag_of(samples))
        start = time.monotonic()
        result = await Generator(config, prompts, ports).run()
        seconds = time.monotonic() - start
        lag.cancel()
        completions.close()
        spend.close()
    assert sum(result.outcomes.values()) == options.requests, result
    return options.requests, seconds, p99(samples)


if __name__ == "__main__":
    main()
