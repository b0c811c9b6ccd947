"""SGLang's HTTP shape over a Desk: /generate and chat with token ids. Free of charge.

Shapes: SGLang 0.5.23 with the kimi_k2 parsers. A client that leaves aborts its request."""

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import web

from core.embedded.arrivals import Arrival, Arrivals
from core.embedded.desk import Desk, Generation, Order
from core.embedded.distort import ID_FAULTS, distort_text
from core.embedded.faults import Hits
from core.embedded.openrouter_api import answer, break_connection, broken_answer
from core.embedded.openrouter_wire import DONE, dumps, status_answer, tool_call
from core.embedded.replies import Delta, Parsed
from core.embedded.sglang_faults import distort_body, error_body, idle, linger, sent
from core.errors import RenderError
from core.schema import ToolCall


class SamplingParams(msgspec.Struct, kw_only=True):
    """The fields that change a sample; all others are accepted and ignored."""

    max_new_tokens: int | None = 128
    temperature: float = 1.0
    top_p: float = 1.0
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    no_stop_trim: bool = False
    sampling_seed: int | None = None
    stream_interval: int | None = None


class GenerateBody(msgspec.Struct, kw_only=True):
    text: str | None = None
    input_ids: list[int] | None = None
    sampling_params: SamplingParams = msgspec.field(default_factory=SamplingParams)
    return_logprob: bool = False
    stream: bool = False
    rid: str | None = None


class ChatBody(msgspec.Struct, kw_only=True):
    messages: list[dict[str, Any]] = []
    model: str = ""
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    input_ids: list[int] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    sampling_seed: int | None = None
    stream: bool = False
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    separate_reasoning: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_ids: bool = False
    return_prompt_token_ids: bool = False
    return_meta_info: bool = False
    rid: str | None = None


def error(code: int, message: str, streamed: bool = False) -> web.Response:
    """`streamed`: /generate has said 200 before it looks at the prompt."""
    body = {"object": "error", "message": message, "type": "BadRequestError", "code": code}
    if streamed:
        event = b"data: " + dumps({"error": body}) + b"\n\n"
        return web.Response(body=event + DONE, content_type="text/event-stream")
    return answer({"error": body, **body}, code)


class SGLangApi:
    """POST /generate and /v1/chat/completions."""

    def __init__(self, desk: Desk, arrivals: Arrivals, incremental: bool = False) -> None:
        self.desk = desk
        self._incremental = incremental
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
            return await self._answer(request, hits, generate)
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
            return await sent(request, dumps(distort_body(self._whole(gen, body), hits)), hits)
        except (asyncio.CancelledError, ConnectionError):
            arrival.left = desk.now()
            desk.leave(gen, None)
            raise
        finally:
            self.running.pop(gen.id, None)

    async def _answer(self, request: web.Request, hits: Hits, generate: bool) -> web.Response:
        """A fault that answers instead of a generation."""
        name = hits.answer or ""
        if broken := await broken_answer(request, name, hits):
            return broken
        if name in ("error_in_200", "choice_error"):
            return answer(error_body(name, hits, generate))
        code, headers, _ = status_answer(name, hits, "sglang", self.desk.now())
        said = {"object": "error", "message": name.replace("_", " "), "code": code}
        return answer(said, code, headers)

    def _whole(self, gen: Generation, body: GenerateBody | ChatBody) -> dict[str, Any]:
        if isinstance(body, GenerateBody):
            return self._generated(gen, body, gen.completion_ids, gen.finish)
        reply = gen.reply()
        message = {"role": "assistant", **_fields(reply, body), "tool_calls": None}
        calls = reply.calls
        if not any(name in gen.hits for name in ID_FAULTS):
            calls = _numbered(calls, gen.order.messages)
        if calls:
            message["tool_calls"] = [tool_call(c, i) for i, c in enumerate(calls)]
        choice: dict[str, Any] = {
            "index": 0,
            "message": message,
            "logprobs": None,
            "finish_reason": reply.finish_reason,
            "matched_stop": _matched(gen),
        }
        if body.return_token_ids:
            choice |= {
                "prompt_token_ids": gen.prompt_ids,
                "response_token_ids": gen.completion_ids,
            }
        if body.return_meta_info:
            choice["meta_info"] = self._meta(gen, gen.completion_ids, gen.finish)
        return {
            "id": gen.id,
            "object": "chat.completion",
            "created": int(self.desk.now()),
            "model": body.model,
            "choices": [choice],
            "usage": _usage(gen),
            "metadata": {"weight_version": "default"},
        }

    def _generated(
        self, gen: Generation, body: GenerateBody, ids: Sequence[int], finish: str | None
    ) -> dict[str, Any]:
        # Half a character is not shown before its other half.
        text = _text(self.desk, gen, body) if finish else gen.job.text().rstrip("\ufffd")
        meta = self._meta(gen, ids, finish)
        if body.return_logprob:
            meta["output_token_logprobs"] = [
                [logprob, i, None] for logprob, i in zip(gen.job.logprobs, ids, strict=False)
            ]
        return {"text": text, "output_ids": list(ids), "meta_info": meta}

    def _meta(self, gen: Generation, ids: Sequence[int], finish: str | None) -> dict[str, Any]:
        reasons: dict[str | None, dict[str, Any]] = {
            "stop": {"type": "stop", "matched": _matched(gen)},
            "length": {"type": "length", "length": len(ids)},
            "abort": {"type": "abort", "message": "Aborted"},
        }
        return {
            "id": gen.id,
            "finish_reason": reasons.get(finish),
            "prompt_tokens": gen.prompt_tokens,
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "reasoning_tokens": gen.reasoning_tokens,
            "weight_version": "default",
            "num_retractions": 0,
        }

    async def _stream(
        self, request: web.Request, gen: Generation, body: GenerateBody | ChatBody
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        shown: dict[str, Any] = {"text": "", "output_ids": []}
        if "slow" in gen.hits:
            begun = asyncio.get_running_loop().time()
            await gen.job.advance()
            await linger(gen, begun)
        while True:
            finished = gen.job.finish is not None
            deltas = gen.job.take()
            if finished:
                await gen.settled.wait()
            if isinstance(body, GenerateBody):
                pieces = self._grown(gen, body, shown, finished)
            else:
                pieces = self._pieces(gen, body, deltas, finished)
            for piece in pieces:
                await response.write(b"data: " + dumps(piece) + b"\n\n")
            if "cut_stream" in gen.hits:
                break_connection(request)
                return response
            if finished:
                break
            await gen.job.advance()
        await response.write_eof(DONE)
        return response

    def _grown(
        self, gen: Generation, body: GenerateBody, shown: dict[str, Any], finished: bool
    ) -> list[dict[str, Any]]:
        """/generate's next event, once it is due: the first token, then every `stream_interval`,
        then the end. It repeats what was `shown`, unless the server is incremental."""
        ids = gen.completion_ids if finished else gen.job.out
        interval = body.sampling_params.stream_interval or 1
        new = len(ids) - len(shown["output_ids"])
        if not finished and new < (interval if shown["output_ids"] else 1):
            return []
        event = self._generated(gen, body, ids, gen.finish if finished else None)
        before = dict(shown)
        shown |= {name: event[name] for name in before}
        if self._incremental:
            event |= {name: event[name][len(part) :] for name, part in before.items()}
        return [distort_body(event, gen.hits) if finished else event]

    def _pieces(
        self, gen: Generation, body: ChatBody, deltas: list[Delta], finished: bool
    ) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = []
        for delta in deltas:
            if delta.call is not None:
                call = _numbered([delta.call], gen.order.messages, delta.index)[0]
                parts.append({"tool_calls": [tool_call(call, delta.index)]})
            else:
                kind = "reasoning_content" if delta.kind == "reasoning" else "content"
                parts.append({kind: delta.text})
        events = [self._chunk(gen, body, part, None) for part in parts]
        if finished:
            last = self._chunk(gen, body, {}, gen.reply().finish_reason)
            events += [last, {**last, "choices": [], "usage": _usage(gen)}]
        return events

    def _chunk(
        self, gen: Generation, body: ChatBody, delta: dict[str, Any], finish: str | None
    ) -> dict[str, Any]:
        choice = {"index": 0, "delta": {"role": "assistant", **delta}, "finish_reason": finish}
        return {
            "id": gen.id,
            "object": "chat.completion.chunk",
            "created": int(self.desk.now()),
            "model": body.model,
            "choices": [choice],
        }


def _fields(reply: Parsed, body: ChatBody) -> dict[str, Any]:
    """Empty content is "", empty reasoning null; unsplit when separate_reasoning is off."""
    if reply.reasoning_form == "withheld_reasoning":
        return {"content": reply.content, "reasoning_content": None}
    if body.separate_reasoning:
        return {"content": reply.content, "reasoning_content": reply.reasoning or None}
    return {"content": reply.reasoning + reply.content, "reasoning_content": None}


def _numbered(
    calls: list[ToolCall], messages: list[dict[str, Any]], first: int = 0
) -> list[ToolCall]:
    """SGLang gives ids of its own: functions.NAME:(calls in the history + index), whatever was
    sampled."""
    before = sum(len(m.get("tool_calls") or []) for m in messages) + first
    return [
        msgspec.structs.replace(c, id=f"functions.{c.name}:{before + i}")
        for i, c in enumerate(calls)
    ]


def _parsed_history(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Keys whose value is null are dropped before rendering, as SGLang does."""
    return [{k: v for k, v in m.items() if v is not None} for m in messages]


def _matched(gen: Generation) -> int | None:
    return gen.completion_ids[-1] if gen.finish == "stop" and gen.completion_ids else None


def _text(desk: Desk, gen: Generation, body: GenerateBody) -> str:
    text = distort_text(gen.job.text(), gen.hits) if gen.hits.text else gen.job.text()
    if not body.sampling_params.no_stop_trim or gen.finish != "stop" or desk.renderer is None:
        return text
    return text + desk.renderer.tokenizer.decode(gen.completion_ids[-1:])


def _usage(gen: Generation) -> dict[str, Any]:
    return {
        "prompt_tokens": gen.prompt_tokens,
        "completion_tokens": gen.generated,
        "total_tokens": gen.prompt_tokens + gen.generated,
        "reasoning_tokens": gen.reasoning_tokens,
        "prompt_tokens_details": None,
    }
