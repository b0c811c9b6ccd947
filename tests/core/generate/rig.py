"""An OpenRouter of a few lines whose every reply is scripted, and a generator round it with its
files in memory."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from core import events as ev
from core.config import Config, parse
from core.embedded import TARGET_DIR
from core.errors import DiskFull
from core.generate import GenerateResult, Generator, Ports, Recovered
from core.prompts import load_prompts
from core.reconstruct import StopOffsets, judge, observe
from core.render.base import Renderer, load_renderer
from core.schema import Prompt, Rollout, Sample, SpendLine

Handler = Callable[[web.Request, "Router"], Awaitable[web.StreamResponse]]
NO_DELAYS = (0.0, 0.0, 0.0)


@cache
def renderer() -> Renderer:
    return load_renderer(TARGET_DIR, "kimi-k2.5")


def completion(content: str = "Four.", cost: Any = 0.001, **fields: Any) -> dict[str, Any]:
    body: dict[str, Any] = {
        "id": "gen-1",
        "provider": "Alder",
        "model": "m",
        "choices": [
            {
                "index": 0,
                "finish_reason": "stop",
                "message": {"role": "assistant", "reasoning": " Sum.", "content": content},
            }
        ],
        "usage": {"prompt_tokens": 20, "completion_tokens": 6, "cost": cost},
    }
    return body | fields


def events_of(body: dict[str, Any], parts: int = 3) -> list[bytes]:
    """The same reply as a stream: content in pieces, then the finish reason, then usage, then the
    end."""
    head = {k: body[k] for k in ("id", "provider", "model") if k in body}
    choice = body["choices"][0]
    text = choice["message"]["content"]
    out = [{**head, "choices": [{"index": 0, "delta": {"reasoning": " Sum."}}]}]
    step = max(1, len(text) // parts)
    out += [
        {**head, "choices": [{"index": 0, "delta": {"content": text[i : i + step]}}]}
        for i in range(0, len(text), step)
    ]
    finish = choice["finish_reason"]
    out.append({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    if "usage" in body:
        out.append({**head, "choices": [], "usage": body["usage"]})
    return [b"data: " + json.dumps(e).encode() + b"\n\n" for e in out] + [b"data: [DONE]\n\n"]


def says(body: Any = None, status: int = 200, headers: dict[str, str] | None = None) -> Handler:
    """Answer at once: an object as JSON, bytes as they are."""

    async def handler(request: web.Request, router: "Router") -> web.StreamResponse:
        if isinstance(body, bytes):
            return web.Response(body=body, status=status, headers=headers)
        return web.json_response(
            completion() if body is None else body, status=status, headers=headers
        )

    return handler


def streams(
    events: Sequence[bytes],
    headers: dict[str, str] | None = None,
    then: str = "end",
    pause_s: float = 0.0,
) -> Handler:
    """Send events `pause_s` apart, then `end`, `cut` the connection, or `wait` (with comments)
    until the client has gone."""

    async def handler(request: web.Request, router: "Router") -> web.StreamResponse:
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream", **(headers or {})})
        await reply.prepare(request)
        for event in events:
            await reply.write(event)
            await asyncio.sleep(pause_s)
        router.streaming += 1
        router.changed.set()
        try:
            while then == "wait":
                await reply.write(b": OPENROUTER PROCESSING\n\n")
                await asyncio.sleep(0.02)
        except (ConnectionResetError, asyncio.CancelledError):
            router.gone += 1
            raise
        if then == "cut" and request.transport is not None:
            request.transport.abort()
        return reply

    return handler


def waits(then: Handler | None = None) -> Handler:
    """Hold the request until the router is released."""

    async def handler(request: web.Request, router: "Router") -> web.StreamResponse:
        router.held += 1
        router.changed.set()
        await router.release.wait()
        return await (then or says())(request, router)

    return handler


def resets() -> Handler:
    async def handler(request: web.Request, router: "Router") -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    return handler


ALDER = {
    "provider_name": "Alder",
    "tag": "alder",
    "quantization": "int4",
    "pricing": {"prompt": "0.000001", "completion": "0.000020"},
    "max_completion_tokens": 100_000,
    "supported_parameters": ["max_tokens", "temperature", "top_p", "reasoning", "seed", "tools"],
    "status": 0,
}


class Router:
    """`script` answers request by request, `otherwise` all further ones."""

    def __init__(self, *script: Handler, otherwise: Handler | None = None) -> None:
        self.script = list(script)
        self.otherwise = otherwise or says()
        self.endpoints: list[dict[str, Any]] = [ALDER]
        self.lookups: dict[str, list[tuple[int, Any]]] = {}
        self.looked_up: list[str] = []
        self.arrivals: list[float] = []
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.aborts: list[str] = []
        self.open = self.peak = self.held = self.streaming = self.gone = 0
        self.key_status = 200
        self.usage: list[float] = []
        """What the key has used, answer by answer; the last one stays. Empty: not said."""
        self.release, self.changed = asyncio.Event(), asyncio.Event()
        self.url = ""

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/api/v1/chat/completions", self._chat)
        app.router.add_get("/api/v1/key", self._key)
        app.router.add_get("/api/v1/generation", self._generation)
        app.router.add_get("/api/v1/models/{model:.+}/endpoints", self._endpoints)
        return app

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        self.arrivals.append(asyncio.get_running_loop().time())
        self.bodies.append(await request.json())
        self.headers.append(dict(request.headers))
        self.open += 1
        self.peak = max(self.peak, self.open)
        self.changed.set()
        handler = self.script.pop(0) if self.script else self.otherwise
        try:
            return await handler(request, self)
        finally:
            self.open -= 1

    async def _key(self, request: web.Request) -> web.Response:
        data: dict[str, Any] = {"limit_remaining": 50.0}
        if self.usage:
            data["usage"] = self.usage.pop(0) if len(self.usage) > 1 else self.usage[0]
        return web.json_response({"data": data}, status=self.key_status)

    async def _generation(self, request: web.Request) -> web.Response:
        name = request.query["id"]
        self.looked_up.append(name)
        self.changed.set()
        rows = self.lookups.get(name, [])
        status, data = rows.pop(0) if len(rows) > 1 else rows[0] if rows else (404, None)
        return web.json_response({"data": data}, status=status)

    async def _endpoints(self, request: web.Request) -> web.Response:
        return web.json_response({"data": {"endpoints": self.endpoints}})

    async def until(self, condition: Callable[["Router"], bool]) -> None:
        while not condition(self):
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), 30)


class MemoryFile:
    """An Appender without a disk. `full_after` lines it has none left; the lines are kept all the
    same."""

    def __init__(self) -> None:
        self.lines: list[Any] = []
        self.full_after: int | None = None
        self.fault: Exception | None = None
        self.changed = asyncio.Event()

    def append(self, record: Any, durable: bool = False) -> asyncio.Future[None]:
        self.post(record)
        done = asyncio.get_running_loop().create_future()
        if self.full_after is not None and len(self.lines) > self.full_after:
            done.set_exception(DiskFull("completions.jsonl: no space left"))
        else:
            done.set_result(None)
        return done

    def post(self, record: Any) -> None:
        self.lines.append(record)
        self.changed.set()

    async def until(self, count: int) -> None:
        """So many lines are there."""
        while len(self.lines) < count:
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), 30)


def accepts(rollout: Rollout, prompt: Prompt, ids: list[int]) -> Sample:
    """A judge for tests in which content does not matter."""
    return Sample(
        sample_id=prompt.prompt_id,
        prompt_id=prompt.prompt_id,
        twin_id=prompt.twin_id,
        dataset=prompt.dataset,
        arm=prompt.arm,
        backend=prompt.backend,
        provider=rollout.provider,
        token_ids=[1, 2],
        prompt_len=1,
        verdict="consistent",
    )


class RealJudge:
    """judge() over the embedded tokenizer, with the stop-token offsets that it learns."""

    def __init__(self) -> None:
        self.offsets = StopOffsets()

    def __call__(self, rollout: Rollout, prompt: Prompt, ids: list[int]) -> Sample:
        return judge(rollout, prompt, renderer(), self.offsets, ids)


def beside(
    judges: Callable[[Rollout, Prompt, list[int]], Sample],
) -> Callable[[Rollout, Prompt, list[int]], Awaitable[Sample]]:
    """A judge in a thread, as the engine has it."""

    async def judged(rollout: Rollout, prompt: Prompt, ids: list[int]) -> Sample:
        return await asyncio.to_thread(judges, rollout, prompt, ids)

    return judged


def really_judges() -> RealJudge:
    return RealJudge()


def config_of(url: str, **settings: Any) -> Config:
    """`settings`: fields of [generate]; `run`, `openrouter`, `sglang` and `dataset` go to their
    sections."""
    run = {"budget_usd": 5.0, **settings.pop("run", {})}
    openrouter = {
        "base_url": f"{url}/api/v1",
        "stream": False,
        "cancellable": ["alder"],
        **settings.pop("openrouter", {}),
    }
    dataset = settings.pop("dataset", [{"name": "d", "kind": "embedded"}])
    generate = {"max_in_flight": 8, "max_tokens": 64, "canary": 0, "openrouter": openrouter}
    generate |= settings
    return parse({"run": run, "dataset": dataset, "generate": generate}, "test")


def prompts_of(count: int, **fields: Any) -> list[Prompt]:
    return [
        Prompt(
            prompt_id=f"p{i}",
            twin_id=f"t{i}",
            messages=[{"role": "user", "content": f"What is 2 + {i}?"}],
            **{"dataset": "d", **fields},
        )
        for i in range(count)
    ]


class Run:
    """One generator and everything that it told."""

    def __init__(
        self,
        router: Router,
        prompts: list[Prompt],
        judges: Callable[[Rollout, Prompt, list[int]], Sample] = accepts,
        recovered: Recovered | None = None,
        delays_s: tuple[float, ...] = NO_DELAYS,
        **settings: Any,
    ) -> None:
        self.events: list[ev.Event] = []
        self.completions, self.spend = MemoryFile(), MemoryFile()
        self.samples: list[Sample] = []
        ports = Ports(
            emit=self.events.append,
            judge=beside(judges),
            renderer=renderer(),
            completions=self.completions,
            spend=self.spend,
            recovered=recovered or Recovered(),
            on_sample=self._sampled,
        )
        self._judge = judges
        self.config = config_of(router.url, **settings)
        self.generator = Generator(self.config, prompts, ports, delays_s, NO_DELAYS)

    async def go(self) -> GenerateResult:
        return await asyncio.wait_for(self.generator.run(), 60)

    def _sampled(self, sample: Sample, rollout: Rollout, prompt: Prompt) -> None:
        self.samples.append(sample)
        if isinstance(self._judge, RealJudge):
            observe(self._judge.offsets, sample)

    @property
    def rollouts(self) -> list[Rollout]:
        return list(self.completions.lines)

    def of(self, kind: type[ev.Event]) -> list[Any]:
        return [e for e in self.events if type(e) is kind]

    @property
    def outcomes(self) -> list[ev.Outcome]:
        return self.of(ev.Outcome)

    def check_books(self) -> float:
        """Every dispatch closed exactly once; returns what was spent."""
        lines: list[SpendLine] = self.spend.lines
        opened = [(x.prompt_id, x.attempt) for x in lines if x.kind == "dispatch"]
        others = ("dispatch", "known", "account", "adjusted")
        closed = [(x.prompt_id, x.attempt) for x in lines if x.kind not in others]
        assert len(set(opened)) == len(opened)
        assert sorted(opened) == sorted(closed)
        return sum(x.cost_usd for x in lines)


@asynccontextmanager
async def serving(router: Router) -> AsyncIterator[Router]:
    async with TestServer(router.app()) as server:
        router.url = str(server.make_url("")).rstrip("/")
        yield router
        router.release.set()


def corpus_prompts(url: str, **settings: Any) -> list[Prompt]:
    return load_prompts(config_of(url, **settings))
