"""Streams of local servers as the generator sees them: counted while they come, given up when they
stall, kept when they are cut off, and the same sample as a whole reply in the end."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from core.reconstruct import read_reply
from core.schema import Rollout, Sample, reply_text
from tests.core.embedded.serving import until
from tests.core.generate.rig import Router, Run, prompts_of, really_judges, renderer

PARTS = 5


def sampled() -> list[int]:
    tokenizer = renderer().tokenizer
    words = "one two three four five six seven eight nine ten 世界 🙂 "
    ids = [*tokenizer.encode_ordinary(" " + words), tokenizer.specials["</think>"]]
    return [*ids, *tokenizer.encode_ordinary(words * 2), tokenizer.specials["<|im_end|>"]]


IDS = sampled()
HALF = len(IDS) // 2


class Local:
    """SGLang or vLLM in a few lines. `plan`: how many tokens the next requests get before silence;
    all, once it is empty. Silence lasts until the client goes or `release` is set."""

    def __init__(self, backend: str, *plan: int) -> None:
        self.backend = backend
        self.plan = list(plan)
        self.release = asyncio.Event()
        self.changed = asyncio.Event()
        self.asked: list[dict[str, Any]] = []
        self.aborted: list[str] = []
        self.silent = self.gone = 0
        self.url = ""

    def app(self) -> web.Application:
        app = web.Application()
        facts = {"version": "0.5.14", "model_path": "m"}
        app.router.add_get("/server_info", _json(facts))
        app.router.add_get("/v1/models", _json({"data": [{"id": "m"}]}))
        app.router.add_post("/abort_request", self._abort)
        app.router.add_post("/generate", self._answer)
        app.router.add_post("/v1/chat/completions", self._answer)
        return app

    def settings(self, stream: bool) -> dict[str, Any]:
        if self.backend == "sglang":
            return {"sglang": {"urls": [self.url], "stream": stream}}
        return {"openai": {"base_url": f"{self.url}/v1", "model": "m", "stream": stream}}

    async def until(self, condition: Callable[["Local"], bool]) -> None:
        while not condition(self):
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), 30)

    async def _abort(self, request: web.Request) -> web.Response:
        self.aborted.append((await request.json())["rid"])
        return web.Response()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if body.get("max_tokens") == 1:  # the probe
            return await self._sent(request, body, [7])
        self.asked.append(body)
        limit = self.plan.pop(0) if self.plan else len(IDS)
        return await self._sent(request, body, IDS, limit)

    async def _sent(
        self, request: web.Request, body: dict[str, Any], ids: list[int], limit: int = 1
    ) -> web.StreamResponse:
        events = self._events(body, ids)
        if not body.get("stream"):
            return web.json_response(self._whole(body, ids))
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        try:
            for tokens, event in events:
                if tokens > limit and not self.release.is_set():
                    self.silent += 1
                    self.changed.set()
                    await self.release.wait()
                await reply.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            await reply.write_eof(b"data: [DONE]\n\n")
        except asyncio.CancelledError:
            self.gone += 1
            self.changed.set()
            raise
        return reply

    def _whole(self, body: dict[str, Any], ids: list[int]) -> dict[str, Any]:
        (*_, (_, last)) = self._events(body, ids)
        if self.backend == "sglang":
            return last
        reasoning, content = _fields(ids)
        message = {"role": "assistant", "reasoning": reasoning, "content": content}
        choice = {"index": 0, "finish_reason": "stop", "message": message, "token_ids": ids}
        return {"choices": [choice], "usage": _usage(ids), "prompt_token_ids": _prompt()}

    def _events(self, body: dict[str, Any], ids: list[int]) -> list[tuple[int, dict[str, Any]]]:
        """(tokens so far, event): the first token, then some at a time."""
        ends = [1, *range(1 + PARTS, len(ids), PARTS), len(ids)]
        if self.backend == "sglang":
            return [(end, _generated(body, ids, end)) for end in ends]
        starts = [0, *ends[:-1]]
        told = [(end, _chatted(ids, a, end)) for a, end in zip(starts, ends, strict=True)]
        opening = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
        last = {"choices": [], "usage": _usage(ids)}
        return [(0, opening | {"prompt_token_ids": _prompt()}), *told, (len(ids), last)]


def _json(body: Any) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response(body)

    return answer


def _prompt() -> list[int]:
    (prompt,) = prompts_of(1)
    return renderer().render(prompt.messages, None, True).ids


def _usage(ids: list[int]) -> dict[str, int]:
    return {"prompt_tokens": len(_prompt()), "completion_tokens": len(ids)}


def _fields(ids: list[int]) -> tuple[str, str]:
    """Text so far as vLLM's parser splits it."""
    reasoning, _, content = renderer().tokenizer.decode(ids).rstrip("\ufffd").partition("</think>")
    return reasoning, content.removesuffix("<|im_end|>")


def _generated(body: dict[str, Any], ids: list[int], end: int) -> dict[str, Any]:
    meta = {
        "id": body.get("rid"),
        "finish_reason": {"type": "stop", "matched": ids[-1]} if end == len(ids) else None,
        "prompt_tokens": len(body["input_ids"]),
        "completion_tokens": end,
    }
    text = renderer().tokenizer.decode(ids[:end]).rstrip("\ufffd")
    return {"text": text, "output_ids": ids[:end], "meta_info": meta}


def _chatted(ids: list[int], start: int, end: int) -> dict[str, Any]:
    before, after = _fields(ids[:start]), _fields(ids[:end])
    names = ("reasoning", "content")
    delta = {n: b[len(a) :] for n, a, b in zip(names, before, after, strict=True)}
    finish = "stop" if end == len(ids) else None
    choice = {"index": 0, "delta": delta, "finish_reason": finish, "token_ids": ids[start:end]}
    return {"choices": [choice]}


@asynccontextmanager
async def local(backend: str, *plan: int) -> AsyncIterator[Local]:
    server = Local(backend, *plan)
    async with listening(server):
        yield server
        server.release.set()


@asynccontextmanager
async def listening(server: Local) -> AsyncIterator[None]:
    async with TestServer(server.app()) as running:
        server.url = str(running.make_url("")).rstrip("/")
        yield


def run_on(server: Local, count: int = 1, stream: bool = True, **settings: Any) -> Run:
    prompts = prompts_of(count, arm="local", backend=server.backend)
    for prompt in prompts:
        prompt.messages[0]["content"] = prompts[0].messages[0]["content"]
    return Run(Router(), prompts, really_judges(), **server.settings(stream), **settings)


def partial_ids(rollout: Rollout) -> int:
    """How many ids a cut stream kept, as a reader of its record finds them."""
    text = reply_text(rollout)
    reply = read_reply(rollout.reply_kind, text, rollout.status, rollout.headers)
    assert reply.ids is not None and reply.ids == IDS[: len(reply.ids)]
    return len(reply.ids)


both = pytest.mark.parametrize("backend", ["sglang", "vllm"])


@both
async def test_tokens_are_counted_while_they_come_and_the_first_one_is_timed(backend: str) -> None:
    async with local(backend, HALF) as server:
        run = run_on(server)
        task = asyncio.create_task(run.go())
        await server.until(lambda s: s.silent == 1)
        told = 1 + (HALF - 1) // PARTS * PARTS  # the events that hold no more than half

        async def counted() -> bool:
            return run.generator.stats().live_tokens >= told

        await until(counted)
        assert run.generator.stats().live_tokens == told
        server.release.set()
        await task
    (sample,), (rollout,) = run.samples, run.rollouts
    assert (sample.verdict, sample.completion_ids) == ("exact", IDS)
    assert rollout.timings is not None and rollout.timings.ttft_s is not None
    assert 0 < rollout.timings.ttft_s <= rollout.timings.total_s
    stats = run.generator.stats()
    assert stats.live_tokens == len(IDS) and stats.providers[0].ttft_p50_s is not None


@both
async def test_streams_and_whole_replies_give_equal_samples(backend: str) -> None:
    seen: list[Sample] = []
    async with local(backend) as server:
        for stream, kind in ((True, "sse"), (False, "json")):
            run = run_on(server, stream=stream)
            await run.go()
            assert server.asked[-1]["stream"] is stream
            assert [r.reply_kind for r in run.rollouts] == [kind]
            seen += run.samples
    streamed, whole = seen
    assert streamed == whole and whole.verdict == "exact" and whole.completion_ids == IDS


async def test_a_prompt_that_a_stream_refuses_says_nothing_of_the_time_to_a_first_token() -> None:
    """SGLang refuses in an event, at once; measured by that, every answer would be a slow one."""

    class Refusing(Local):
        async def _sent(self, request: Any, body: Any, ids: Any, limit: int = 1) -> Any:
            event = {"error": {"message": "longer than the context", "code": 400}}
            data = b"data: " + json.dumps(event).encode() + b"\n\ndata: [DONE]\n\n"
            return web.Response(body=data, content_type="text/event-stream")

    server = Refusing("sglang")
    async with listening(server):
        run = run_on(server, 3)
        result = await run.go()
    assert result.outcomes == {"failed": 3}
    assert {r.error_class for r in run.rollouts} == {"bad_request"}
    (row,) = run.generator.stats().providers
    assert row.ttft_p50_s is None and run.generator._lanes[0].limit._wait_base is None


@both
async def test_a_stalled_stream_is_given_up_and_asked_again(backend: str) -> None:
    async with local(backend, HALF) as server:
        run = run_on(server, idle_timeout_s=0.3, first_event_timeout_s=20.0)
        result = await run.go()
        assert server.gone == 1
    first, second = run.rollouts
    assert (first.error_class, second.outcome) == ("stream_idle_timeout", "ok")
    assert 0 < partial_ids(first) <= HALF
    assert run.samples[0].completion_ids == IDS and result.outcomes == {"ok": 1}
    assert len(server.aborted) == (backend == "sglang")
    assert run.check_books() == 0.0


@both
async def test_a_halt_keeps_what_streams_have_brought_and_aborts_them(backend: str) -> None:
    async with local(backend, HALF, HALF, HALF) as server:
        run = run_on(server, 9, max_in_flight=3)
        task = asyncio.create_task(run.go())
        await server.until(lambda s: s.silent == 3)
        run.generator.halt("key", "alice")
        result = await asyncio.wait_for(task, 30)
        await server.until(lambda s: s.gone == 3)
    assert result.reason == "halted" and result.pending == 9 and len(server.asked) == 3
    assert [r.outcome for r in run.rollouts] == ["aborted"] * 3
    assert all(0 < partial_ids(r) <= HALF for r in run.rollouts)
    if backend == "sglang":
        assert sorted(server.aborted) == sorted(b["rid"] for b in server.asked)


async def test_the_queue_of_an_own_server_is_no_timeout_while_it_works() -> None:
    """One request runs, slowly; what waits behind it hears nothing for longer than the clock of a
    first event allows, and is served in the end. A server of which nobody hears is given up."""
    slot = asyncio.Semaphore(1)

    class Busy(Local):
        async def _sent(self, request: Any, body: Any, ids: Any, limit: int = 1) -> Any:
            reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await reply.prepare(request)
            async with slot:
                for _, event in self._events(body, ids):
                    await reply.write(b"data: " + json.dumps(event).encode() + b"\n\n")
                    await asyncio.sleep(0.05)
            await reply.write_eof(b"data: [DONE]\n\n")
            return reply

    server = Busy("sglang")
    async with listening(server):
        run = run_on(server, 2, first_event_timeout_s=0.6, idle_timeout_s=20.0)
        await run.go()
        assert [r.outcome for r in run.rollouts] == ["ok", "ok"] and len(server.asked) == 2
        await slot.acquire()
        run = run_on(server, 1, first_event_timeout_s=0.3, attempts_unpaid=1, attempts_paid=1)
        await run.go()
    assert [r.error_class for r in run.rollouts] == ["first_event_timeout"]
