"""Streams of local servers: `/generate`, which repeats itself or does not, and chat with ids."""

import asyncio
import json
import zlib
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
from aiohttp import StreamReader
from hypothesis import given, settings
from hypothesis import strategies as st

from core.providers import base, stream
from core.reconstruct import read_reply
from core.schema import Sampling
from tests.core.providers.test_local_servers import (
    CHAT,
    INFO,
    PROMPT,
    SAMPLING,
    SGLANG,
    VLLM,
    Server,
    backend,
)

IDS = [9, 9, 4, 9, 9, 4, 2]
TEXT = 'a"]\n"completion_tokens":99,"output_ids":[1],"token_ids":[1,2]'
"""As hostile as a text can be to whoever reads events without decoding them."""
DONE = b"data: [DONE]\n\n"


def sse(*events: Any) -> list[bytes]:
    return [b"data: " + json.dumps(e, separators=(",", ":")).encode() + b"\n\n" for e in events]


def generated(ends: Sequence[int], repeats: bool, **finish: Any) -> list[bytes]:
    """Events of `/generate` after so many tokens each; the last one says why it ended."""
    events, before = [], 0
    for end in ends:
        last = end == ends[-1]
        meta = {
            "id": "p-1",
            "finish_reason": (finish or {"type": "stop"}) if last else None,
            "prompt_tokens": 3,
            "completion_tokens": end,
            "cached_tokens": 1,
        }
        start, cut = 0 if repeats else before, len(TEXT) if last else end
        events.append({"text": TEXT[start:cut], "output_ids": IDS[start:end], "meta_info": meta})
        before = end
    return sse(*events)


def chatted(*ids: Sequence[int]) -> list[bytes]:
    """vLLM's events of `return_token_ids`."""
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk"}

    def event(**choice: Any) -> dict[str, Any]:
        return {**head, "choices": [{"index": 0, "finish_reason": None, **choice}]}

    opening = {**event(delta={"role": "assistant", "content": ""}), "prompt_token_ids": [5, 6, 7]}
    told = [event(delta={"content": TEXT[:2]}, token_ids=list(new)) for new in ids]
    told[-1]["choices"][0]["finish_reason"] = "stop"
    tokens = sum(map(len, ids))
    usage = {"prompt_tokens": 3, "completion_tokens": tokens, "total_tokens": 3 + tokens}
    return [*sse(opening, *told, {**head, "choices": [], "usage": usage}), DONE]


async def complete(provider: base.Provider, max_tokens: int = 32) -> tuple[base.Reply, base.Flight]:
    flight = base.Flight()
    request = base.CompletionRequest(
        request_id="p-1",
        prompt=PROMPT,
        prompt_ids=[5, 6, 7],
        sampling=Sampling(max_tokens=max_tokens),
        provider=provider.lanes[0].name,
    )
    return await provider.complete(request, flight), flight


def kept(reply: base.Reply) -> bytes:
    assert isinstance(reply.raw, bytes)
    return zlib.decompress(reply.raw)


@pytest.mark.parametrize("repeats", [True, False])
async def test_a_stream_of_generate_is_whole_counted_and_kept_once(repeats: bool) -> None:
    events = [*generated([1, 3, 5, 7], repeats), DONE]
    server = Server(server_info=INFO, generate=b"".join(events))
    async with backend(server, "sglang", SGLANG) as provider:
        await provider.preflight(SAMPLING)
        assert provider.streams
        reply, flight = await complete(provider)
    assert server.asked[-1][1]["stream"] is True
    assert reply.failure is None and reply.kind == "sse" and reply.generation_id == "p-1"
    usage = reply.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (3, 7, 1)
    assert usage.cost_usd == 0.0
    assert flight.tokens == 7 and flight.first_at is not None
    assert kept(reply) == b"".join(events[3:] if repeats else events)
    read = read_reply("sse", kept(reply).decode(), 200, {})
    assert (read.ids, read.text, read.finish, read.problems) == (IDS, TEXT, "stop", [])


@pytest.mark.parametrize(("max_tokens", "interval"), [(64, 16), (16_384, 64)])
async def test_events_are_few_however_long_the_reply(max_tokens: int, interval: int) -> None:
    server = Server(server_info=INFO, generate=b"".join([*generated([7], True), DONE]))
    async with backend(server, "sglang", SGLANG) as provider:
        await provider.preflight(SAMPLING)
        await complete(provider, max_tokens)
    assert server.asked[-1][1]["sampling_params"]["stream_interval"] == interval


@pytest.mark.parametrize(
    ("events", "failure"),
    [
        (generated([1], True, type="abort", message="full", status_code=503), base.Unavailable),
        (generated([1], True, type="abort", message="too long", status_code=400), base.BadRequest),
        (generated([1, 3], True, type="abort", message="gone"), base.UpstreamError),
        (sse({"error": {"message": "too long", "code": 400}}), base.BadRequest),
        (sse({"nothing": 1}), base.UpstreamError),
    ],
)
async def test_what_is_a_status_of_a_whole_reply_is_one_of_a_stream(
    events: list[bytes], failure: type[base.Failure]
) -> None:
    server = Server(server_info=INFO, generate=b"".join([*events, DONE]))
    async with backend(server, "sglang", SGLANG) as provider:
        await provider.preflight(SAMPLING)
        reply, _ = await complete(provider)
    assert type(reply.failure) is failure and kept(reply)


async def test_a_stream_without_an_end_is_no_reply() -> None:
    server = Server(server_info=INFO, generate=b"".join(generated([1, 3, 7], True)[:2]))
    async with backend(server, "sglang", SGLANG) as provider:
        await provider.preflight(SAMPLING)
        reply, flight = await complete(provider)
    assert isinstance(reply.failure, base.StreamIncomplete)
    assert reply.usage.completion_tokens == flight.tokens == 3
    assert read_reply("sse", kept(reply).decode(), 200, {}).ids == IDS[:3]


async def test_whole_replies_where_the_config_or_the_endpoint_wants_them() -> None:
    whole = {"sglang": {"urls": ["URL"], "stream": False}}
    server = Server(server_info=INFO, generate={"output_ids": [1], "meta_info": {}})
    async with backend(server, "sglang", whole) as provider:
        await provider.preflight(SAMPLING)
        assert not provider.streams
        await complete(provider)
    sent = server.asked[-1][1]
    assert sent["stream"] is False and "stream_interval" not in sent["sampling_params"]
    answer = {"choices": [{"message": {}, "response_token_ids": [1]}]}
    server = Server(server_info=INFO, v1__chat__completions=answer)
    async with backend(server, "sglang", CHAT) as provider:
        (line,) = await provider.preflight(SAMPLING)
        assert line.endswith("replies come whole: chat streams no token ids")
        assert not provider.streams
        await complete(provider)
    assert server.asked[-1][1]["stream"] is False


@pytest.mark.parametrize("flag", [False, True])
async def test_whole_replies_from_servers_whose_streams_lose_ids(flag: bool) -> None:
    info = {**INFO, "version": "0.5.5", "stream_output": flag}
    server = Server(server_info=info, generate={"output_ids": [1], "meta_info": {}})
    async with backend(server, "sglang", SGLANG) as provider:
        (line,) = await provider.preflight(SAMPLING)
        assert line.endswith("replies come whole: a server of this age loses ids in streams")
        assert not provider.streams
        await complete(provider)
    sent = server.asked[-1][1]
    assert sent["stream"] is False and "stream_interval" not in sent["sampling_params"]


def vllm(streamed: Any) -> Server:
    def answer(body: dict[str, Any]) -> Any:
        assert body["return_token_ids"] is True
        return streamed if body.get("stream") else {"choices": [{"token_ids": [1], "message": {}}]}

    return Server(v1__models={"data": [{"id": "m"}]}, v1__chat__completions=answer)


async def test_chat_streams_where_ids_come_in_streams() -> None:
    server = vllm(b"".join(chatted([9], [9, 4], [2])))
    async with backend(server, "vllm", VLLM) as provider:
        (line,) = await provider.preflight(SAMPLING)
        assert line.endswith("streams token ids") and provider.streams
        reply, flight = await complete(provider)
    sent = server.asked[-1][1]
    assert sent["stream"] is True and sent["stream_options"] == {"include_usage": True}
    assert reply.failure is None and reply.usage.completion_tokens == flight.tokens == 4
    read = read_reply("sse", kept(reply).decode(), 200, {})
    assert (read.ids, read.prompt_ids, read.finish) == ([9, 9, 4, 2], [5, 6, 7], "stop")


@pytest.mark.parametrize(
    "streamed",
    [
        (400, {"message": "return_token_ids is not supported with streaming"}),
        b"".join(chatted([])),
        b"".join([*chatted([9])[:-2], DONE]),
        {"choices": [{"token_ids": [1], "message": {}}]},
    ],
    ids=["refused", "no ids", "no usage", "no stream"],
)
async def test_chat_comes_whole_where_a_stream_would_cost_something(streamed: Any) -> None:
    server = vllm(streamed)
    async with backend(server, "vllm", VLLM) as provider:
        (line,) = await provider.preflight(SAMPLING)
        assert line.endswith("returns token ids, but not in streams: replies come whole")
        await complete(provider)
        assert not provider.streams
    assert server.asked[-1][1]["stream"] is False
    whole = {"openai": {**VLLM["openai"], "stream": False}}
    async with backend(vllm(b"".join(chatted([9]))), "vllm", whole) as provider:
        (line,) = await provider.preflight(SAMPLING)
        assert line.endswith("returns token ids") and not provider.streams


@pytest.mark.parametrize(
    ("name", "config", "page"),
    [
        ("sglang", SGLANG, "sglang:num_queue_reqs 7\n"),
        ("vllm", VLLM, "vllm:num_requests_waiting 7\n"),
    ],
)
async def test_a_queue_that_cannot_be_read_once_is_read_again(
    name: str, config: dict[str, Any], page: str
) -> None:
    server = vllm(b"".join(chatted([9])))
    server.answers |= {"/server_info": INFO, "/metrics": (500, "busy")}
    async with backend(server, name, config) as provider:
        await provider.preflight(SAMPLING)
        lane = provider.lanes[0].name
        assert await provider.load(lane) is None
        server.answers["/metrics"] = page
        assert await provider.load(lane) == base.Load(running=0, waiting=7)


@st.composite
def pieces(draw: st.DrawFn) -> tuple[list[int], bool, list[int], bool]:
    ends = draw(st.lists(st.integers(1, 7), min_size=1, max_size=7, unique=True))
    cuts = draw(st.lists(st.integers(0, 3_000), max_size=9))
    return sorted(ends), draw(st.booleans()), sorted(cuts), draw(st.booleans())


@settings(max_examples=150)
@given(pieces())
def test_nothing_but_repetition_is_left_out_however_it_arrives(
    case: tuple[list[int], bool, list[int], bool],
) -> None:
    ends, repeats, cuts, cut_off = case
    sent = b"".join([*generated(ends, repeats), DONE])
    arrived = sent[: max([*cuts, 1])] if cut_off else sent

    async def read() -> base.Flight:
        content, flight = StreamReader(mock.Mock(connected=True), 1 << 16), base.Flight()
        reading = asyncio.create_task(stream.collect_events(content, flight))
        for start, end in zip([0, *cuts], [*cuts, len(arrived)], strict=True):
            content.feed_data(arrived[start:end])
            for _ in range(4):
                await asyncio.sleep(0)
        content.feed_eof()
        await asyncio.gather(reading, return_exceptions=True)
        return flight

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "GATHER_S", 0.0)
        flight = asyncio.run(read())
    told, all_of_it = (
        read_reply("sse", raw.decode(), 200, {}) for raw in (bytes(flight.received), arrived)
    )
    assert (told.ids, told.text, told.finish) == (all_of_it.ids, all_of_it.text, all_of_it.finish)
    assert flight.tokens == len(told.ids or [])
    if not cut_off:
        assert told.ids == IDS[: ends[-1]] and told.text == TEXT and told.finish == "stop"
