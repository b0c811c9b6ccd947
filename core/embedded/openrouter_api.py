"""OpenRouter's chat completions over a Desk, stream and not, with every fault of the wire.

Headers leave as soon as a request is accepted, so its generation id is known before its reply.
There is no failover: a fault of the chosen provider is the answer.
"""

import asyncio
import hashlib
import socket
import struct
from asyncio import sleep
from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import web

from core.embedded import openrouter_wire as wire
from core.embedded.arrivals import Arrival, Arrivals, Counted
from core.embedded.billing import Charge, Provider
from core.embedded.desk import Desk, Generation, Order
from core.embedded.faults import Hits
from core.embedded.routing import NoEndpoint, Preferences, candidates
from core.errors import RenderError

REFUSED_KEY = "eyas-refused-key"
MODELS = ("eyas/embedded", "moonshotai/kimi-k2.5")
_JSON = "application/json"
COMMENT_EVERY_S = 1.0
DELTAS_BEFORE_FAULT = 3
"""Pieces that a stream shows before it is cut, fails or falls silent."""


class ChatBody(msgspec.Struct, kw_only=True):
    """The fields that change an answer; all others are accepted and ignored."""

    messages: list[dict[str, Any]]
    model: str = MODELS[0]
    tools: list[dict[str, Any]] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    seed: int | None = None
    reasoning: dict[str, Any] | None = None
    include_reasoning: bool | None = None
    provider: Preferences | None = None

    @property
    def thinking(self) -> bool:
        wish = self.reasoning or {}
        return wish.get("enabled") is not False and wish.get("effort") != "none"

    @property
    def hidden_reasoning(self) -> bool:
        return bool((self.reasoning or {}).get("exclude")) or self.include_reasoning is False


def refuse_key(request: web.Request) -> web.Response | None:
    """Any key is accepted but none and REFUSED_KEY."""
    key = request.headers.get("Authorization", "").removeprefix("Bearer").strip()
    if not key:
        return error(401, "No auth credentials found")
    return error(401, "User not found.") if key == REFUSED_KEY else None


def _order(body: ChatBody, content: bytes) -> Order:
    return Order(
        messages=[_named(m) for m in body.messages],
        tools=body.tools or None,
        thinking=body.thinking,
        content=content,
        seed=body.seed,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        stream=bool(body.stream),
    )


def _named(message: dict[str, Any]) -> dict[str, Any]:
    """The router puts `name` in front of the content for models that are not OpenAI's, and hands an
    assistant's `reasoning` on under the template's name for it."""
    if "reasoning" in message and "reasoning_content" not in message:
        message = {("reasoning_content" if k == "reasoning" else k): v for k, v in message.items()}
    name, content = message.get("name"), message.get("content")
    if not name or not isinstance(content, str) or message.get("role") == "tool":
        return message
    return {k: v for k, v in message.items() if k != "name"} | {"content": f"{name}: {content}"}


def answer(data: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(body=wire.dumps(data), status=status, headers=headers, content_type=_JSON)


def error(code: int, message: str) -> web.Response:
    return answer(wire.error(code, message), code)


async def broken_answer(request: web.Request, name: str, hits: Hits) -> web.Response | None:
    """The answering faults that look the same in every API shape; None for the others."""
    if name in ("reset", "hang"):
        if name == "hang":
            await asyncio.sleep(hits.number("hang", 600))
        break_connection(request, reset=name == "reset")
        return web.Response(status=499)
    if name in ("html_error", "html_body"):
        status = 502 if name == "html_error" else 200
        return web.Response(status=status, body=wire.HTML, content_type="text/html")
    return None


def break_connection(request: web.Request, reset: bool = False) -> None:
    """Close without an end; with `reset` the peer gets RST instead of FIN."""
    transport = request.transport
    if transport is None:
        return
    sock = transport.get_extra_info("socket")
    if reset and sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


class ChatApi:
    """POST /chat/completions; `latency_scale` multiplies the providers' latencies (0 in tests)."""

    def __init__(
        self,
        desk: Desk,
        arrivals: Arrivals,
        *,
        latency_scale: float = 1.0,
    ) -> None:
        self._desk = desk
        self._arrivals = arrivals
        self._latency_scale = latency_scale
        self._in_flight: Counter[str] = Counter()
        self._decode = msgspec.json.Decoder(ChatBody).decode

    async def chat(self, request: web.Request) -> web.StreamResponse:
        with self._arrivals.note(request.path) as arrival:
            response = await self._chat(request, arrival)
            arrival.status = response.status
            if isinstance(response, Counted):
                arrival.body_bytes = response.body_bytes
            return response

    async def _chat(self, request: web.Request, arrival: Arrival) -> web.StreamResponse:
        if refused := refuse_key(request):
            return refused
        try:
            body = self._decode(await request.read())
        except (msgspec.DecodeError, UnicodeDecodeError) as e:
            return error(400, f"invalid request: {e}")
        if body.model not in MODELS:
            return error(400, f"{body.model} is not a valid model ID")
        if not body.messages:
            return error(400, "Input required: specify messages")
        content = msgspec.json.encode((body.messages, body.tools, body.thinking))
        try:
            provider = self._choose(body, content)
        except NoEndpoint as e:
            return error(404, str(e))
        arrival.provider, arrival.stream = provider.name, bool(body.stream)
        idle = () if body.stream else ("no_done",)
        busy = self._in_flight[provider.name]
        hits = self._desk.plan.draw(content, provider.name, busy, idle)
        if hits.answer is not None:
            return await self._answer(request, hits.answer, hits, provider, body)
        return await self._accept(request, body, content, provider, hits, arrival)

    def _choose(self, body: ChatBody, content: bytes) -> Provider:
        digest = hashlib.blake2b(content + str(body.seed).encode(), digest_size=7).digest()
        draw = int.from_bytes(digest, "little") / 2**56
        wish = body.provider or Preferences()
        return candidates(self._desk.providers, wish, bool(body.tools), draw)[0]

    async def _accept(
        self,
        request: web.Request,
        body: ChatBody,
        content: bytes,
        provider: Provider,
        hits: Hits,
        arrival: Arrival,
    ) -> web.StreamResponse:
        desk, order = self._desk, _order(body, content)
        try:
            gen = desk.prepare(order, hits, desk.new_id("gen-"))
        except RenderError as e:
            return error(400, str(e))
        room = desk.room(gen)
        if room < 1:
            return error(
                400,
                f"This endpoint's maximum context length is {desk.context_length} tokens. "
                f"However, you requested about {gen.prompt_tokens} tokens.",
            )
        worst = min(order.max_tokens or room, room)
        hold = provider.cost_pico(gen.prompt_tokens, worst)
        if hold > desk.ledger.available_pico:
            afford = desk.ledger.affordable_tokens(provider, gen.prompt_tokens)
            return error(
                402,
                "This request requires more credits, or fewer max_tokens. You requested up to "
                f"{worst} tokens, but can only afford {afford}.",
            )
        charge = Charge(
            id=gen.id,
            provider=provider.name,
            model=body.model,
            streamed=order.stream,
            created=desk.now(),
            prompt_tokens=gen.prompt_tokens,
            hold_pico=hold,
        )
        arrival.generation_id = gen.id
        desk.start(gen, charge, provider)
        self._in_flight[provider.name] += 1
        try:
            if order.stream:
                return await self._stream(request, gen, charge, provider, body)
            return await self._whole(request, gen, charge, provider, body)
        except (asyncio.CancelledError, ConnectionError):
            arrival.left = desk.now()
            desk.leave(gen, provider)
            raise
        finally:
            self._in_flight[provider.name] -= 1

    async def _latency(self, provider: Provider, hits: Hits) -> None:
        factor = hits.number("slow", 10) if "slow" in hits else 1.0
        if delay := provider.latency_s * self._latency_scale * factor:
            await sleep(delay)

    async def _open(self, request: web.Request, gen: Generation, content_type: str) -> Counted:
        response = Counted(headers={"X-Generation-Id": gen.id, "Content-Type": content_type})
        await response.prepare(request)
        return response

    async def _whole(
        self,
        request: web.Request,
        gen: Generation,
        charge: Charge,
        provider: Provider,
        body: ChatBody,
    ) -> web.StreamResponse:
        hits = gen.hits
        response = await self._open(request, gen, _JSON)
        await self._latency(provider, hits)
        if "silent_stream" in hits:
            while True:
                await response.write(b"\n         ")
                await asyncio.sleep(hits.number("silent_stream", COMMENT_EVERY_S))
        await gen.settled.wait()
        if "cut_stream" in hits:
            break_connection(request)
            return response
        reply = gen.reply()
        if body.hidden_reasoning:
            reply.reasoning_form = "withheld_reasoning"
        data = wire.body(charge, provider, reply, hits)
        if "blank_lines" in hits:
            data = wire.BLANKS + data
        if "truncated_body" in hits:
            await response.write(data[: len(data) * 2 // 3])
            if hits.value("truncated_body", "") == "hard":
                break_connection(request)
            return response
        await response.write_eof(data)
        return response

    async def _stream(
        self,
        request: web.Request,
        gen: Generation,
        charge: Charge,
        provider: Provider,
        body: ChatBody,
    ) -> web.StreamResponse:
        hits = gen.hits
        response = await self._open(request, gen, "text/event-stream")
        await response.write(wire.BLANKS if "blank_lines" in hits else wire.COMMENT)
        await self._latency(provider, hits)
        opening = wire.head(charge)
        form = "withheld_reasoning" if body.hidden_reasoning else "reasoning"
        broken = await self._relay(request, response, gen, opening, form)
        if broken:
            return response
        await gen.settled.wait()
        reply = gen.reply()
        last = []
        if "empty_choices" not in hits:
            last.append(wire.event(opening, wire.finish_tail(reply, hits)))
        counted = wire.usage(charge, hits)
        if counted is not None:
            last.append(wire.event(opening, wire.usage_tail(counted)))
        if "no_done" not in hits:
            last.append(wire.DONE)
        await response.write_eof(b"".join(last))
        return response

    async def _relay(
        self,
        request: web.Request,
        response: web.StreamResponse,
        gen: Generation,
        opening: bytes,
        form: str,
    ) -> bool:
        """Pieces as they come; True when a fault has ended the stream."""
        hits, job, sent = gen.hits, gen.job, 0
        breaking = any(
            n in hits for n in ("cut_stream", "error_mid_stream", "silent_stream", "truncated_body")
        )
        if "empty_choices" in hits:
            await gen.settled.wait()
            return False
        if hits.text or breaking:
            # What the reply says is changed as a whole: it waits for its end and is cut into
            # pieces again.
            await self._commented(response, gen)
            reply = gen.reply()
            deltas = list(reply.deltas())
            form = reply.reasoning_form if form == "reasoning" else form
            if breaking:
                deltas = deltas[:DELTAS_BEFORE_FAULT]
            await response.write(wire.events(opening, deltas, form))
            return await self._break(request, response, gen, opening) if breaking else False
        while True:
            finished = job.finish is not None
            data = wire.events(opening, job.take(), form)
            if data:
                sent += 1
                await response.write(data)
            if finished:
                return False
            if sent:
                await job.advance()
            else:
                await self._first(response, gen)

    async def _first(self, response: web.StreamResponse, gen: Generation) -> None:
        """Wait for something to take; comments keep the connection alive."""
        try:
            await asyncio.wait_for(gen.job.advance(), COMMENT_EVERY_S)
        except TimeoutError:
            await response.write(wire.COMMENT)

    async def _commented(self, response: web.StreamResponse, gen: Generation) -> None:
        while True:
            try:
                await asyncio.wait_for(gen.settled.wait(), COMMENT_EVERY_S)
                return
            except TimeoutError:
                await response.write(wire.COMMENT)

    async def _break(
        self,
        request: web.Request,
        response: web.StreamResponse,
        gen: Generation,
        opening: bytes,
    ) -> bool:
        hits = gen.hits
        if "error_mid_stream" in hits:
            name = gen.charge.provider if gen.charge else ""
            inner = wire.mid_stream_error(name, hits)
            choice = {"index": 0, "delta": {"content": ""}, "finish_reason": "error"}
            tail = wire.dumps({"error": inner, "choices": [choice]})[1:]
            await response.write_eof(wire.event(opening, tail))
        elif "silent_stream" in hits:
            while True:
                await response.write(wire.COMMENT)
                await asyncio.sleep(hits.number("silent_stream", COMMENT_EVERY_S))
        elif "cut_stream" in hits:
            break_connection(request)
        return True

    async def _answer(
        self, request: web.Request, name: str, hits: Hits, provider: Provider, body: ChatBody
    ) -> web.StreamResponse:
        """A fault that answers instead of a generation."""
        if broken := await broken_answer(request, name, hits):
            return broken
        if name in ("error_in_200", "choice_error"):
            gen_id = self._desk.new_id("gen-")
            data = wire.body_error(name, hits, gen_id, body.model, provider.name)
            headers = {"X-Generation-Id": gen_id}
            if body.stream:
                data = b"data: " + data + b"\n\n" + wire.DONE
                return web.Response(body=data, headers=headers, content_type="text/event-stream")
            return web.Response(body=data, headers=headers, content_type=_JSON)
        status, headers, said = wire.status_answer(name, hits, provider.name, self._desk.now())
        return answer(said, status, headers)
