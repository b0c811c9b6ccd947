"""SGLang's HTTP shape over a Desk: /generate and chat with token ids. Free of charge.

Shapes: SGLang 0.5.23 with the kimi_k2 parsers. A client that leaves aborts its request."""

import asyncio
from typing import Any

import msgspec
from aiohttp import web

from core.embedded.arrivals import Arrival, Arrivals
from core.embedded.desk import Desk, Generation, Order
from core.embedded.faults import Hits
from core.embedded.openrouter_api import (
    answer,
    break_connection,
    broken_answer,
)
from core.embedded.openrouter_wire import BLANKS, DONE, dumps, status_answer
from core.embedded.sglang_faults import (
    BREAKING,
    distort_body,
    end_badly,
    error_body,
    idle,
    linger,
    sent,
)
from core.embedded.sglang_wire import ChatBody, GenerateBody, Wire
from core.errors import RenderError


def error(code: int, message: str, streamed: bool = False) -> web.Response:
    """`streamed`: /generate has said 200 before it looks at the prompt."""
    body = {"object": "error", "message": message, "type": "BadRequestError", "code": code}
    return _streamed({"error": body}) if streamed else answer({"error": body, **body}, code)


def _streamed(data: dict[str, Any]) -> web.Response:
    event = b"data: " + dumps(data) + b"\n\n"
    return web.Response(body=event + DONE, content_type="text/event-stream")


class SGLangApi:
    """POST /generate and /v1/chat/completions."""

    def __init__(self, desk: Desk, arrivals: Arrivals, incremental: bool = False) -> None:
        self.desk = desk
        self._wire = Wire(desk, incremental)
        self._arrivals = arrivals
        self.running: dict[str, Generation] = {}
        self._generate_body = msgspec.json.Decoder(GenerateBody).decode
        self._chat_body = msgspec.json.Decoder(ChatBody).decode

    async def generate(self, request: web.Request) -> web.StreamResponse:
        with self._arrivals.note(request.path) as arrival:
            response = await self._generate(request, arrival)
            arrival.status = response.status
            return response

    async def chat(self, request: web.Request) -> web.StreamResponse:
        with self._arrivals.note(request.path) as arrival:
            response = await self._chat(request, arrival)
            arrival.status = response.status
            return response

    async def _generate(self, request: web.Request, arrival: Arrival) -> web.StreamResponse:
        try:
            body = self._generate_body(await request.read())
        except (msgspec.DecodeError, UnicodeDecodeError) as e:
            return error(400, f"invalid request: {e}")
        params = body.sampling_params
        ids = body.input_ids
        if ids is None and body.text is not None and self.desk.renderer is not None:
            ids = self.desk.renderer.tokenizer.encode_special(body.text)
        if not ids:
            return error(400, "Either text or input_ids should be provided")
        order = Order(
            ids=ids,
            content=msgspec.json.encode(ids),
            seed=params.sampling_seed,
            temperature=params.temperature,
            top_p=params.top_p,
            max_tokens=params.max_new_tokens,
            ignore_eos=params.ignore_eos,
            stop_ids=params.stop_token_ids or [],
            stream=body.stream,
            shape="sglang",
        )
        return await self._serve(request, order, body, body.rid, arrival)

    async def _chat(self, request: web.Request, arrival: Arrival) -> web.StreamResponse:
        try:
            body = self._chat_body(await request.read())
        except (msgspec.DecodeError, UnicodeDecodeError) as e:
            return error(400, f"invalid request: {e}")
        if body.stream and (body.return_token_ids or body.return_prompt_token_ids):
            return error(400, "return_token_ids is not supported with stream=true")
        if not body.messages and body.input_ids is None:
            return error(400, "messages must not be empty")
        kwargs = body.chat_template_kwargs or {}
        order = Order(
            messages=_parsed_history(body.messages),
            tools=body.tools if body.tool_choice != "none" else None,
            thinking=kwargs.get("thinking") is not False,
            preserve_thinking=kwargs.get("preserve_thinking") is True,
            ids=body.input_ids,
            content=msgspec.json.encode((body.messages, body.tools, kwargs)),
            seed=body.sampling_seed if body.sampling_seed is not None else body.seed,
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            max_tokens=body.max_completion_tokens or body.max_tokens,
            ignore_eos=body.ignore_eos,
            stop_ids=body.stop_token_ids or [],
            stream=body.stream,
            shape="sglang",
        )
        return await self._serve(request, order, body, body.rid, arrival)

    async def _serve(
        self,
        request: web.Request,
        order: Order,
        body: GenerateBody | ChatBody,
        rid: str | None,
        arrival: Arrival,
    ) -> web.StreamResponse:
        desk = self.desk
        arrival.stream, arrival.provider = order.stream, "sglang"
        if not desk.source.has_ids:
            return error(501, "the recording holds text without token ids")
        generate = isinstance(body, GenerateBody)
        means_nothing = idle(generate, order.ids is not None, order.stream)
        hits = desk.plan.draw(order.content, "sglang", len(self.running), means_nothing)
        if hits.answer is not None:
            return await self._answer(request, hits, body)
        try:
            gen = desk.prepare(order, hits, rid or desk.new_id(""))
        except RenderError as e:
            return error(400, str(e))
        streamed = order.stream and generate
        if desk.room(gen) < 1:
            return error(
                400,
                f"The input ({gen.prompt_tokens} tokens) is longer than the model's context "
                f"length ({desk.context_length} tokens).",
                streamed,
            )
        if any(not 0 <= i < desk.vocab_size for i in gen.prompt_ids):
            return error(400, f"input_ids outside the vocabulary of {desk.vocab_size}", streamed)
        arrival.generation_id = gen.id
        begun = asyncio.get_running_loop().time()
        desk.start(gen, None, None)
        self.running[gen.id] = gen
        try:
            if order.stream:
                return await self._stream(request, gen, body)
            await gen.settled.wait()
            await linger(gen, begun)
            if "cut_stream" in hits:
                break_connection(request)
                return web.Response(status=499)
            return await sent(request, dumps(distort_body(self._wire.whole(gen, body), hits)), hits)
        except (asyncio.CancelledError, ConnectionError):
            arrival.left = desk.now()
            desk.leave(gen, None)
            raise
        finally:
            self.running.pop(gen.id, None)

    async def _answer(
        self, request: web.Request, hits: Hits, body: GenerateBody | ChatBody
    ) -> web.Response:
        """A fault that answers instead of a generation."""
        name = hits.answer or ""
        if broken := await broken_answer(request, name, hits):
            return broken
        if name in ("error_in_200", "choice_error"):
            said = error_body(name, hits, isinstance(body, GenerateBody))
            return _streamed(said) if body.stream else answer(said)
        code, headers, _ = status_answer(name, hits, "sglang", self.desk.now())
        said = {"object": "error", "message": name.replace("_", " "), "code": code}
        return answer(said, code, headers)

    async def _stream(
        self, request: web.Request, gen: Generation, body: GenerateBody | ChatBody
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        hits, shown = gen.hits, {"text": "", "output_ids": []}
        if "blank_lines" in hits:
            await response.write(BLANKS)
        if "slow" in hits:
            begun = asyncio.get_running_loop().time()
            await gen.job.advance()
            await linger(gen, begun)
        breaking = any(name in hits for name in BREAKING)
        if breaking or "empty_choices" in hits or (hits.text and isinstance(body, ChatBody)):
            await gen.settled.wait()  # what is said is changed as a whole
        if breaking:
            for piece in self._wire.first_pieces(gen, body):
                await response.write(b"data: " + dumps(piece) + b"\n\n")
            await end_badly(request, response, hits)
            return response
        while True:
            finished = gen.job.finish is not None
            deltas = gen.job.take()
            if finished:
                await gen.settled.wait()
            if isinstance(body, GenerateBody):
                pieces = self._wire.grown(gen, body, shown, finished)
            else:
                pieces = self._wire.pieces(gen, body, deltas, finished)
            for piece in pieces:
                await response.write(b"data: " + dumps(piece) + b"\n\n")
            if finished:
                break
            await gen.job.advance()
        await response.write_eof(b"" if "no_done" in hits else DONE)
        return response


def _parsed_history(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Keys whose value is null are dropped before rendering, as SGLang does."""
    return [{k: v for k, v in m.items() if v is not None} for m in messages]
