"""Two local servers behind one backend: a lane each, connections kept, aborts where the request is,
ids exact by construction."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from core.errors import ProviderError
from core.schema import Prompt
from tests.core.generate.rig import Router, Run, prompts_of, really_judges, renderer

INFO = {"version": "0.5.14", "model_path": "m"}


class Local:
    """A small SGLang: answers every prompt with the same ids, or holds it for ever."""

    def __init__(self, holds: bool, arrived: asyncio.Semaphore) -> None:
        self.holds = holds
        self.arrived = arrived
        self.asked: list[dict[str, Any]] = []
        self.aborted: list[str] = []
        self.peers: set[Any] = set()

    async def info(self, request: web.Request) -> web.Response:
        return web.json_response(INFO)

    async def generate(self, request: web.Request) -> web.Response:
        assert request.transport is not None
        self.peers.add(request.transport.get_extra_info("peername"))
        body = await request.json()
        self.asked.append(body)
        self.arrived.release()
        if self.holds:
            await asyncio.Event().wait()
        tokenizer = renderer().tokenizer
        ids = tokenizer.encode_ordinary(" Sum.")
        ids += [tokenizer.specials["</think>"], *tokenizer.encode_ordinary("Four.")]
        ids.append(tokenizer.specials["<|im_end|>"])
        meta = {
            "id": body["rid"],
            "finish_reason": {"type": "stop", "matched": ids[-1]},
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(ids),
            "cached_tokens": 0,
        }
        text = tokenizer.decode(ids)
        return web.json_response({"text": text, "output_ids": ids, "meta_info": meta})

    async def abort(self, request: web.Request) -> web.Response:
        self.aborted.append((await request.json())["rid"])
        return web.Response()

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/server_info", self.info)
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/abort_request", self.abort)
        return app


@asynccontextmanager
async def two(holds: bool = False) -> AsyncIterator[tuple[list[Local], list[str]]]:
    arrived = asyncio.Semaphore(0)
    pair = [Local(holds, arrived), Local(holds, arrived)]
    async with TestServer(pair[0].app()) as a, TestServer(pair[1].app()) as b:
        yield pair, [str(s.make_url("")).rstrip("/") for s in (a, b)]


def questions(count: int) -> list[Prompt]:
    prompts = prompts_of(count, arm="local", backend="sglang")
    for i, prompt in enumerate(prompts):
        prompt.messages.insert(0, {"role": "system", "content": f"You are number {i % 6}."})
    return prompts


async def test_prompts_are_shared_by_their_beginning_and_connections_are_kept() -> None:
    async with two() as (servers, urls):
        run = Run(
            Router(),
            questions(60),
            judges=really_judges(),
            sglang={"urls": urls},
            max_in_flight=4,
        )
        result = await run.go()
    assert result.outcomes == {"ok": 60}
    assert {s.verdict for s in run.samples} == {"exact"}
    asked = [len(s.asked) for s in servers]
    assert sum(asked) == 60 and min(asked) >= 15
    assert sum(len(s.peers) for s in servers) <= 8  # four at once on each, not sixty
    assert run.check_books() == 0.0


async def test_halt_aborts_each_request_where_it_is() -> None:
    async with two(holds=True) as (servers, urls):
        run = Run(Router(), questions(30), sglang={"urls": urls}, max_in_flight=10)
        task = asyncio.create_task(run.go())
        for _ in range(10):
            await asyncio.wait_for(servers[0].arrived.acquire(), 30)
        run.generator.halt("key", "alice")
        result = await asyncio.wait_for(task, 30)
    assert result.reason == "halted" and result.pending == 30
    for server in servers:
        assert server.asked and sorted(server.aborted) == sorted(b["rid"] for b in server.asked)


@pytest.mark.parametrize("down", [0, 1])
async def test_a_server_that_is_down_at_the_start_is_named(down: int) -> None:
    async with two() as (_, urls):
        urls[down] = "http://127.0.0.1:9"
        run = Run(Router(), questions(2), sglang={"urls": urls})
        with pytest.raises(ProviderError, match=r"127\.0\.0\.1:9/server_info: no answer"):
            await run.go()
