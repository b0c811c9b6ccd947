"""What SGLang's replies and stream events hold, over a generation. Pure.

Shapes: spec backends 2.1 and 2.2 (SGLang 0.5.23 with the kimi_k2 parsers).
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from core.embedded.desk import Desk, Generation
from core.embedded.distort import ID_FAULTS, distort_text
from core.embedded.openrouter_api import DELTAS_BEFORE_FAULT
from core.embedded.openrouter_wire import tool_call
from core.embedded.replies import Delta, Parsed, text_of
from core.embedded.sglang_faults import distort_body
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


class Wire:
    """`incremental`: events of /generate hold what is new."""

    def __init__(self, desk: Desk, incremental: bool) -> None:
        self._desk = desk
        self._incremental = incremental

    def whole(self, gen: Generation, body: GenerateBody | ChatBody) -> dict[str, Any]:
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
            "created": int(self._desk.now()),
            "model": body.model,
            "choices": [choice],
            "usage": _usage(gen),
            "metadata": {"weight_version": "default"},
        }

    def _generated(
        self, gen: Generation, body: GenerateBody, ids: Sequence[int], finish: str | None
    ) -> dict[str, Any]:
        # Half a character is not shown before its other half.
        text = _text(self._desk, gen, body) if finish else gen.job.text().rstrip("\ufffd")
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

    def first_pieces(self, gen: Generation, body: GenerateBody | ChatBody) -> list[dict[str, Any]]:
        """What a stream shows that breaks."""
        if isinstance(body, ChatBody):
            return self.pieces(gen, body, list(gen.reply().deltas())[:DELTAS_BEFORE_FAULT], False)
        ids = gen.completion_ids[:DELTAS_BEFORE_FAULT]
        event = self._generated(gen, body, ids, None)
        if self._desk.renderer is not None:
            event["text"] = text_of(self._desk.renderer.tokenizer, ids)
        return [event]

    def grown(
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

    def pieces(
        self, gen: Generation, body: ChatBody, deltas: list[Delta], finished: bool
    ) -> list[dict[str, Any]]:
        hits, parts = gen.hits, list[dict[str, Any]]()
        if finished and hits.text:
            deltas = list(gen.reply().deltas())
        for delta in deltas:
            if delta.call is not None:
                call = delta.call
                if not any(name in hits for name in ID_FAULTS):
                    call = _numbered([call], gen.order.messages, delta.index)[0]
                parts.append({"tool_calls": [tool_call(call, delta.index)]})
            elif delta.kind != "reasoning" or "withheld_reasoning" not in hits:
                kind = "reasoning_content" if delta.kind == "reasoning" else "content"
                parts.append({kind: delta.text})
        events = [self._chunk(gen, body, part, None) for part in parts]
        if finished:
            last = self._chunk(gen, body, {}, gen.reply().finish_reason)
            ends = [last, {**last, "choices": [], "usage": _usage(gen)}]
            events += [distort_body(end, hits) for end in ends]
        if "empty_choices" in hits or "no_usage" in hits:
            kept = "usage" if "empty_choices" in hits else "choices"
            events = [event for event in events if event.get(kept)]
        return events

    def _chunk(
        self, gen: Generation, body: ChatBody, delta: dict[str, Any], finish: str | None
    ) -> dict[str, Any]:
        choice = {"index": 0, "delta": {"role": "assistant", **delta}, "finish_reason": finish}
        return {
            "id": gen.id,
            "object": "chat.completion.chunk",
            "created": int(self._desk.now()),
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
