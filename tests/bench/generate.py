"""Requests per second, CPU and memory of the engine beside bare aiohttp, the OpenAI SDK, litellm
and bespokelabs-curator: `python -m tests.bench.generate [--in-flight 64,512,2000] [--rounds N]
[--clients aiohttp,engine,...] [--stream]`.

One replay gateway, the same replies for all (about 1,000 tokens, `--delay-s` away), clients in
processes of their own that take turns. Peers run where EYAS_SDK_PYTHON and EYAS_CURATOR_PYTHON
name an interpreter that has them, and are left out with a message otherwise. The engine does its
whole work: render, reserve, record the dispatch, parse, classify, book, judge, store.

`--stream`: every stream brings 30 events/s for 23 to 46 seconds, twice as many streams as are open;
the bytes of each are compared with those that the gateway wrote. The gateway writes what has become
due every 50 microseconds times the open streams: at 2,000 three events at a time.

Columns: median of the rounds [lowest-highest]; steady and lag without the windows' filling and
running dry; `own lag` without what other processes took from this one; CPU is user + system of the
client's process and its children; `gateway` is the gateway's own share of one core, which above
0.95 would mean that it and not the client was measured. Targets: engine >= 0.9 x bare aiohttp and
>= 10 x the OpenAI SDK at 2,000 in flight; 2,000 streams with a loop lag p99 under 20 ms on one
core."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

REPLY_TOKENS = 1_000
STREAM_TOKENS_PER_S = 30.0
STREAM_SIZES = [0.7 + i / 100 for i in range(70)]
"""Times REPLY_TOKENS: real streams do not all end at once."""
OWN = ("aiohttp", "engine")
PEERS = {
    "openai": ("EYAS_SDK_PYTHON", "openai"),
    "litellm": ("EYAS_SDK_PYTHON", "litellm"),
    "curator": ("EYAS_CURATOR_PYTHON", "bespokelabs.curator"),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=0, help="0: 8 windows, peers 2")
    parser.add_argument("--in-flight", default="")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--delay-s", type=float, default=1.0)
    parser.add_argument("--clients", default=",".join([*OWN, *PEERS]))
    parser.add_argument("--stream", action="store_true", help="30 events/s a stream")
    options = parser.parse_args()
    clients = [c for c in options.clients.split(",") if available(c, options.stream)]
    widths = options.in_flight or ("2000" if options.stream else "64,512,2000")
    with tempfile.TemporaryDirectory() as folder, Gateway(Path(folder), options) as gateway:
        for width in map(int, widths.split(",")):
            rows: dict[str, list[dict[str, float]]] = {c: [] for c in clients}
            for _ in range(options.rounds):
                for client in clients:
                    rows[client].append(turn(client, width, options, gateway))
            show(width, rows)


def available(client: str, stream: bool) -> bool:
    if client in OWN:
        return True
    variable, module = PEERS[client]
    python = os.environ.get(variable)
    if stream and client == "curator":
        print("curator left out: it does not stream", flush=True)
    elif not python:
        print(f"{client} left out: {variable} names no interpreter", flush=True)
    elif subprocess.run([python, "-c", f"import {module}"], capture_output=True).returncode:
        print(f"{client} left out: {python} cannot import {module}", flush=True)
    else:
        return True
    return False


def turn(
    client: str, width: int, options: argparse.Namespace, gateway: "Gateway"
) -> dict[str, float]:
    windows, least = (2, 512) if client in PEERS else (8, 1_024)  # peers would take minutes
    count = options.requests or (2 * width if options.stream else max(least, windows * width))
    python, module = sys.executable, "tests.bench.clients"
    if client in PEERS:
        python, module = os.environ[PEERS[client][0]], "tests.bench.peer_clients"
    args = [python, "-m", module, client, "--url", gateway.url]
    args += ["--requests", str(count), "--in-flight", str(width)]
    args += ["--stream"] if options.stream else []
    before = gateway.cpu_s()
    done = subprocess.run(args, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{client}: ended with {done.returncode}\n{done.stderr[-2_000:]}")
    row: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    row["gateway"] = (gateway.cpu_s() - before) / row["seconds"]
    return row


def show(width: int, rows: dict[str, list[dict[str, float]]]) -> None:
    def middle(client: str, field: str) -> float:
        return statistics.median(row[field] for row in rows[client])

    def spread(client: str, field: str, form: str) -> str:
        values = sorted(row[field] for row in rows[client])
        low, high = (format(v, form) for v in (values[0], values[-1]))
        return f"{statistics.median(values):{form}} [{low}-{high}]"

    print(f"\n{width} in flight", flush=True)
    columns = (
        ("requests/s", 20),
        ("steady/s", 20),
        ("CPU ms each", 18),
        ("peak MB", 8),
        ("lag ms p50/p95/p99/max", 32),
        ("own lag", 32),
        ("gateway", 8),
        ("x aiohttp", 10),
    )
    print(f"{'':<8}" + "".join(f"{name:>{size}}" for name, size in columns))
    for client, mine in rows.items():
        steady = "steady_per_s" if all("steady_per_s" in r for r in mine) else "per_s"
        ratio, points = "-", ("50", "95", "99", "max")
        lags = [
            "/".join(f"{middle(client, f'{kind}{p}_ms'):.1f}" for p in points)
            if f"{kind}50_ms" in mine[0]
            else "-"
            for kind in ("lag", "own")
        ]
        if "aiohttp" in rows:
            base = "steady_per_s" if "steady_per_s" in rows["aiohttp"][0] else "per_s"
            ratio = f"{middle(client, steady) / middle('aiohttp', base):.2f}"
        cells = (
            spread(client, "per_s", ".0f"),
            spread(client, steady, ".0f"),
            spread(client, "cpu_ms", ".2f"),
            f"{middle(client, 'peak_mb'):.0f}",
            *lags,
            f"{middle(client, 'gateway'):.2f}",
            ratio,
        )
        print(
            f"{client:<8}" + "".join(f"{c:>{s}}" for c, (_, s) in zip(cells, columns, strict=True))
        )
        if all("bytes" in row for row in mine):
            last = mine[-1]
            print(
                f"{'':<10}{last['replies']:.0f} replies, {last['bytes']:.0f} bytes, every one that "
                f"the gateway wrote; {middle(client, 'cpu_share'):.2f} of one core"
                + (f"; {last['events'] / last['seconds']:.0f} events/s" if last["events"] else ""),
                flush=True,
            )


def reply_ids(tokens: int) -> list[int]:
    """A canonical completion of about that many ids: what a good reply is, so that the judge
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
        if size > tokens:
            break
    encode = renderer.tokenizer.encode_ordinary
    thinking = encode(" A long answer is wanted.")
    return [*thinking, grammar.think_close, *encode("\n".join(content)), grammar.end]


class Gateway:
    """The replay gateway as a process, and its OpenRouter base URL."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        tape = folder / "tape.jsonl"
        sizes = STREAM_SIZES if options.stream else (1.0,)
        lines = [
            {"completion_ids": reply_ids(round(REPLY_TOKENS * size)), "prompt_tokens": 20}
            for size in sizes
        ]
        tape.write_text("".join(json.dumps(line) + "\n" for line in lines))
        self.url = ""
        self._ready = folder / "ready.json"
        speed = STREAM_TOKENS_PER_S if options.stream else 0.0
        args = ["gateway", "--ready", str(self._ready), "--replay", str(tape)]
        args += ["--latency-scale", "0", "--exit-with-stdin", "--credit", "1000000"]
        args += ["--tokens-per-s", str(speed), "--ttft-s", str(options.delay_s)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "core", *args], stdin=subprocess.PIPE
        )

    def cpu_s(self) -> float:
        times = psutil.Process(self._process.pid).cpu_times()
        return times.user + times.system

    def __enter__(self) -> "Gateway":
        while not self._ready.exists():
            if self._process.poll() is not None:
                raise SystemExit("the gateway did not start")
            time.sleep(0.05)
        self.url = str(json.loads(self._ready.read_text())["base_url_openrouter"])
        return self

    def __exit__(self, *_: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


if __name__ == "__main__":
    main()
