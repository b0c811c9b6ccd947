"""Clients in eyas's own interpreter, each in a process of its own: aiohttp and nothing else, and
the engine's generate stage with its files on disk. Started by `tests.bench.generate`."""

import asyncio
import json
import tempfile
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec

from tests.bench import meter

EVENT = b"data: "


class Reply(NamedTuple):
    """`size` in bytes."""

    size: int
    events: int


async def bare(options: Any) -> dict[str, float]:
    """Encode, post, read, decode; a stream is read to its end and kept."""
    clock = meter.Meter(options.requests, options.in_flight)
    received: dict[str, Reply] = {}
    headers = {"Authorization": "Bearer bench", "Content-Type": "application/json"}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, headers=headers) as session:

        async def one(number: int) -> None:
            body = msgspec.json.encode(meter.body_of(number, options.stream))
            async with session.post(f"{options.url}/chat/completions", data=body) as reply:
                raw = await reply.read()
                assert reply.status == 200, raw[:200]
                if not options.stream:
                    msgspec.json.decode(raw)
                received[reply.headers["X-Generation-Id"]] = Reply(len(raw), raw.count(EVENT))

        await clock.many(options.in_flight, one)
    row = clock.result()
    return row | accounted(options.url, received)


async def engine(options: Any) -> dict[str, float]:
    """Render, reserve, record the dispatch, send, parse, classify, book, judge, store."""
    from core import events as ev
    from core.config import parse
    from core.embedded import TARGET_DIR
    from core.generate import Generator, Ports
    from core.pipeline.judging import Judges
    from core.reconstruct import StopOffsets
    from core.render.base import load_renderer
    from core.schema import Prompt, Rollout, Sample
    from core.store import Appender, RunDir

    settings = {
        "run": {"budget_usd": 1e6},
        "generate": {
            "max_in_flight": options.in_flight,
            "max_tokens": meter.MAX_TOKENS,
            "canary": 0,
            "openrouter": {"base_url": options.url, "stream": options.stream, "only": ["alder"]},
        },
    }
    prompts = [
        Prompt(
            prompt_id=f"p{i}",
            twin_id=f"t{i}",
            dataset="d",
            messages=meter.body_of(i, options.stream)["messages"],
        )
        for i in range(options.requests)
    ]
    config, renderer = parse(settings, "bench"), load_renderer(TARGET_DIR, "kimi-k2.5")
    clock = meter.Meter(options.requests, options.in_flight)

    def emit(event: ev.Event) -> None:
        if isinstance(event, ev.Outcome):
            clock.done()

    with tempfile.TemporaryDirectory() as folder:
        run = RunDir(Path(folder))
        completions, spend = Appender(run.completions), Appender(run.spend)
        judges = Judges(config, renderer, StopOffsets(), print)
        await judges.start()

        async def judged(rollout: Rollout, prompt: Prompt, ids: list[int]) -> Sample:
            return (await judges.judge(rollout, prompt, ids)).sample

        ports = Ports(
            emit=emit,
            judge=judged,
            renderer=renderer,
            completions=completions,
            spend=spend,
        )
        generator = Generator(config, prompts, ports)
        async with clock.running():
            result = await generator.run()
        await judges.close()
        completions.close()
        spend.close()
        row = clock.result(stored_mb=completions.path.stat().st_size / 1e6)
        assert result.outcomes == {"ok": options.requests}, result
        return row | accounted(options.url, stored(completions.path))


def stored(path: Path) -> dict[str, Reply]:
    """By generation, as the file gives them back."""
    from core.schema import Rollout, reply_text
    from core.store import read_jsonl

    found = {}
    for rollout in read_jsonl(path, Rollout):
        text = reply_text(rollout)
        assert rollout.generation_id is not None and text is not None
        raw = text.encode()
        found[rollout.generation_id] = Reply(len(raw), raw.count(EVENT))
    return found


def accounted(url: str, received: dict[str, Reply]) -> dict[str, float]:
    """Every stream's bytes beside those that the gateway wrote for it. Fails at the first byte that
    differs."""
    with urllib.request.urlopen(f"{url.removesuffix('/api/v1')}/gateway/requests") as reply:
        rows = json.load(reply)["requests"]
    sent = {row["generation_id"]: row["body_bytes"] for row in rows}
    wrong = {g: (r.size, sent.get(g)) for g, r in received.items() if r.size != sent.get(g)}
    assert not wrong, f"bytes kept and bytes sent differ: {dict(list(wrong.items())[:3])}"
    size = sum(r.size for r in received.values())
    return {
        "replies": len(received),
        "bytes": size,
        "events": sum(r.events for r in received.values()),
    }


def main() -> None:
    options = meter.options()
    meter.report(asyncio.run({"aiohttp": bare, "engine": engine}[options.client](options)))


if __name__ == "__main__":
    main()
