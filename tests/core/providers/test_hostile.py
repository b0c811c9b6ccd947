"""Servers that say what no server should: keys quoted back, numbers without bound, facts of another
type, empty bodies. A provider answers each with a Reply or one line, never with an accident of its
own."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from core.config import OpenRouter
from core.providers import base
from core.providers.chat import count, reply_of
from core.providers.classify import MESSAGE_CHARS
from core.providers.endpoints import choose_endpoints
from core.providers.http import HttpClient
from core.providers.price import Price
from core.providers.sglang import load_of
from core.schema import Sampling
from tests.core.providers.test_local_servers import INFO, SAMPLING, SGLANG, VLLM, Server, backend
from tests.core.providers.test_local_streams import complete, kept, sse

KEY = "sk-or-v1-0123456789/abcdef"
BEGINNING = KEY[:14]


@asynccontextmanager
async def answering(
    body: bytes, content_type: str, status: int = 200, **headers: str
) -> AsyncIterator[HttpClient]:
    async def answer(_: web.Request) -> web.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.Response(body=body, status=status, content_type=content_type, headers=named)

    app = web.Application()
    app.router.add_post("/chat", answer)
    async with TestServer(app) as server:
        client = HttpClient(str(server.make_url("")), {"Authorization": f"Bearer {KEY}"}, 5.0)
        try:
            yield client
        finally:
            await client.close()


async def test_a_stream_without_a_byte_is_incomplete() -> None:
    async with answering(b"", "text/event-stream", status=204) as client:
        failure = await client.exchange("/chat", {}, base.Flight())
    assert isinstance(failure, base.StreamIncomplete)


@pytest.mark.parametrize("escaped", [False, True])
async def test_no_field_of_a_whole_reply_holds_the_key(escaped: bool) -> None:

    said = {"id": KEY, "provider": KEY, "model": KEY, "error": {"message": KEY, "code": 400}}
    text = json.dumps(said)
    text = text.replace("/", "\\/") if escaped else text
    seen: list[str | None] = []
    flight = base.Flight(lambda flight: seen.append(flight.generation_id))
    headers = {"X_Generation_Id": KEY, "X_Request_Id": "x" * 190 + KEY}
    async with answering(text.encode(), "application/json", **headers) as client:
        failure = await client.exchange("/chat", {}, flight)
        reply = client.clean(reply_of(flight, {}, Price(), failure))
    assert seen == ["[secret]"] and reply.generation_id == "[secret]"
    assert (reply.provider, reply.model) == ("[secret]", "[secret]")
    assert isinstance(reply.failure, base.BadRequest)
    assert BEGINNING not in f"{reply!r} {reply.failure}"


async def test_no_field_of_a_stream_holds_the_key() -> None:

    opening = {"id": KEY, "provider": KEY, "model": KEY, "choices": []}
    late = "x" * (MESSAGE_CHARS - len(BEGINNING)) + KEY
    events = b"".join(sse(opening, {"error": {"message": late}}))
    seen: list[str | None] = []
    flight = base.Flight(lambda flight: seen.append(flight.generation_id))
    async with answering(events, "text/event-stream") as client:
        failure = await client.exchange("/chat", {}, flight)
        reply = client.clean(reply_of(flight, {}, Price(), failure))
    assert seen == ["[secret]"] and reply.provider == "[secret]"
    assert isinstance(reply.failure, base.UpstreamError)
    assert BEGINNING not in f"{reply!r} {reply.failure}"
    assert BEGINNING.encode() not in kept(reply)


@pytest.mark.parametrize("where", [0, 1, 5])
async def test_a_message_that_is_cut_in_the_key_holds_none_of_it(where: int) -> None:
    message = "x" * (MESSAGE_CHARS - len(BEGINNING) - where) + KEY
    body = json.dumps({"error": {"message": message}}).encode()
    flight = base.Flight()
    async with answering(body, "application/json", status=500) as client:
        await client.exchange("/chat", {}, flight)
    assert KEY.encode() not in flight.received and b"[secret]" in flight.received


@pytest.mark.parametrize("said", ["9" * 5_000, str(10**30), str(2**63), "1e400", "-1"])
async def test_a_count_without_bound_is_no_count(said: str) -> None:
    def event(ids: list[int]) -> bytes:
        whole = {"text": "x", "output_ids": ids, "meta_info": {"id": "r", "completion_tokens": "@"}}
        return b"data: " + json.dumps(whole).replace('"@"', said).encode() + b"\n\n"

    server = Server(server_info=INFO, generate=event([1]) + event([1, 2]) + b"data: [DONE]\n\n")
    async with backend(server, "sglang", SGLANG) as provider:
        await provider.preflight(SAMPLING)
        reply, flight = await complete(provider)
    assert reply.usage.completion_tokens is None and flight.tokens == 0


@pytest.mark.parametrize("value", [2**53, 10**9, 1e300, float("nan"), -1, 1.5, True, "7", None])
def test_what_is_no_count_of_tokens(value: Any) -> None:
    assert count(value) is None


@pytest.mark.parametrize(("value", "tokens"), [(0, 0), (7.0, 7), (10**9 - 1, 10**9 - 1)])
def test_what_is_a_count_of_tokens(value: Any, tokens: int) -> None:
    assert count(value) == tokens


@pytest.mark.parametrize("value", ["1e999", "-1e999", ".", "e", "++", "9" * 5_000])
def test_a_gauge_that_is_no_number_is_left_out(value: str) -> None:
    page = f"sglang:num_queue_reqs {value}\nsglang:num_running_reqs 3\n"
    assert load_of(page) is None
    assert load_of(page + "sglang:num_queue_reqs 2\n") == base.Load(running=3, waiting=2)


@pytest.mark.parametrize("rows", [True, 7, 1.5, "m", {"m": 1}])
async def test_a_list_of_models_that_is_none(rows: Any) -> None:
    def whole(_: Any) -> Any:
        return {"choices": [{"token_ids": None}]}

    server = Server(v1__models={"data": rows}, v1__chat__completions=whole)
    async with backend(server, "vllm", VLLM) as provider:
        await provider.preflight(SAMPLING)
    assert len(provider.lanes) == 1


ROW: dict[str, Any] = {
    "tag": "alder",
    "provider_name": "Alder",
    "pricing": {"prompt": "0.000001", "completion": "0.000002"},
}


def _chosen(*rows: Any) -> list[base.LaneSpec]:
    options = OpenRouter(model="m", require_parameters=False)
    return [one.spec for one in choose_endpoints(list(rows), options, Sampling(max_tokens=8))[0]]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("pricing", {"prompt": 10**400, "completion": "0"}),
        ("pricing", {"prompt": "9" * 5_000, "completion": "0"}),
        ("pricing", {"prompt": "1e999", "completion": "0"}),
        ("pricing", {"prompt": ["1"], "completion": "0"}),
        ("tag", None),
        ("tag", "x" * 300),
    ],
)
def test_an_endpoint_without_price_or_name_is_left_out(field: str, value: Any) -> None:
    nameless = {"provider_name": None} if field == "tag" else {}
    rows = [{**ROW, "tag": "birch", **nameless, field: value}, ROW]
    assert [spec.name for spec in _chosen(*rows)] == ["alder"]


def test_what_an_endpoint_says_beside_its_name_and_price_cannot_break_the_choice() -> None:
    odd = {"supported_parameters": [{}, [], "seed"], "quantization": ["x" * 9_000]}
    (spec,) = _chosen({**ROW, **odd, "provider_name": {"a": 1}, "status": "?"}, ROW, None, 7)
    assert (spec.name, spec.display, spec.note) == ("alder", "", "")
