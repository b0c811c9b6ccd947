"""One backend's reply, whatever its shape, as the few fields that rebuilding needs.

Reads OpenRouter, SGLang and vLLM chat bodies, SGLang `/generate` bodies and event streams. Never
raises for a bad reply: what is wrong goes into `problems` by class. Knows nothing about tokens.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from core.providers.chat import count
from core.providers.classify import classify_parsed, error_in_body, parsed_or_none
from core.reconstruct.stream import merge_stream
from core.schema import ToolCall, Usage

_FINISHES = {
    "stop": "stop",
    "eos": "stop",
    "end_turn": "stop",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "length": "length",
    "max_tokens": "length",
    "content_filter": "content_filter",
    "error": "error",
    "abort": "error",
}


class Reply(msgspec.Struct, kw_only=True):
    """`ids` and `prompt_ids` only where a server returned them. `reasoning` is one copy of the
    text, however many fields repeat it."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = []
    finish: str | None = None
    ids: list[int] | None = None
    prompt_ids: list[int] | None = None
    text: str | None = None
    """The whole completion as the server decoded it (`/generate`)."""
    usage: Usage = Usage()
    problems: list[str] = []


def read_reply(kind: str, raw: str | None, status: int | None, headers: Mapping[str, str]) -> Reply:
    """`kind`: `json` for a body, `sse` for a stream's events, `none` when nothing came."""
    if kind == "none" or raw is None:
        return Reply(problems=["no_reply"])
    if not raw.isascii():
        # Bytes that were no UTF-8 arrive as lone surrogates: as JSON escapes they stay readable.
        raw = raw.encode("utf-8", "backslashreplace").decode()
    try:
        if kind == "sse":
            merged = merge_stream(raw)
            reply = read_body(merged.body)
            reply.problems += merged.problems
            return reply
        return _read_json(raw, status or 200, headers)
    except RecursionError:
        return Reply(problems=["body_too_deep"])


def _read_json(raw: str, status: int, headers: Mapping[str, str]) -> Reply:
    body = parsed_or_none(raw)
    failure = classify_parsed(status, headers, raw, body, 0.0)
    if failure is None:
        return read_body(body)
    if not isinstance(body, dict):
        body = {}
        if failure.kind == "body_truncated" and raw.strip().endswith("}"):
            # Starts and ends as an object, yet is none: not cut, but broken.
            return Reply(problems=["body_not_json"])
    return Reply(problems=[failure.kind], usage=_usage(body.get("usage")))


def read_body(body: dict[str, Any]) -> Reply:
    """A parsed body whose transport is sound."""
    try:
        if "output_ids" in body:
            return _read_generate(body)
        return _read_chat(body)
    except _Malformed as e:
        return Reply(problems=[str(e)], usage=_usage(body.get("usage")))


class _Malformed(Exception):
    """A field of the wrong type; its argument is the class."""


def _read_generate(body: dict[str, Any]) -> Reply:
    meta = body.get("meta_info")
    meta = meta if isinstance(meta, dict) else {}
    finish = meta.get("finish_reason")
    reply = Reply(
        ids=_ids(body["output_ids"]),
        prompt_ids=_ids(body.get("prompt_token_ids")),
        text=_text(body.get("text")) or None,
        usage=Usage(
            prompt_tokens=count(meta.get("prompt_tokens")),
            completion_tokens=count(meta.get("completion_tokens")),
            reasoning_tokens=count(meta.get("reasoning_tokens")),
        ),
    )
    _set_finish(reply, finish.get("type") if isinstance(finish, dict) else finish, None)
    return reply


def _read_chat(body: dict[str, Any]) -> Reply:
    choices = body.get("choices")
    if not isinstance(choices, list) or not choices:
        return Reply(problems=["empty_choices"], usage=_usage(body.get("usage")))
    choice = choices[0]
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(message, dict):
        raise _Malformed("reply_malformed")
    reply = Reply(
        content=_text(message.get("content")),
        usage=_usage(body.get("usage")),
        ids=_ids(choice.get("response_token_ids", choice.get("token_ids"))),
        prompt_ids=_ids(choice.get("prompt_token_ids", body.get("prompt_token_ids"))),
    )
    if failure := error_in_body(body, {}, 0.0):
        reply.problems.append(failure.kind)
    _set_reasoning(reply, message)
    _set_calls(reply, message.get("tool_calls"))
    _set_finish(reply, choice.get("finish_reason"), choice.get("native_finish_reason"))
    return reply


def _set_reasoning(reply: Reply, message: dict[str, Any]) -> None:
    """`reasoning`, `reasoning_details[].text` and `reasoning_content` are copies of one text. When
    they differ, nothing says which one was sampled (case C08)."""
    details = message.get("reasoning_details")
    details = [d for d in details if isinstance(d, dict)] if isinstance(details, list) else []
    spoken = [d for d in details if d.get("type") == "reasoning.text"]
    copies = [
        _text(message.get("reasoning")),
        "".join(_text(d.get("text")) for d in spoken),
        _text(message.get("reasoning_content")),
    ]
    told = [c for c in copies if c]
    if told:
        reply.reasoning = told[0]
        if any(c != told[0] for c in told):
            reply.problems.append("reasoning_fields_disagree")
        return
    # One token can be `</think>` alone; more were thought and are not shown.
    hidden = len(details) > len(spoken) or (reply.usage.reasoning_tokens or 0) > 1
    if hidden and "</think>" not in reply.content:
        reply.problems.append("reasoning_withheld")


def _set_calls(reply: Reply, calls: Any) -> None:
    if calls is None:
        return
    if not isinstance(calls, list):
        raise _Malformed("reply_malformed")
    placed: list[tuple[int, ToolCall]] = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise _Malformed("reply_malformed")
        arguments = function.get("arguments")
        if not isinstance(arguments, str):
            # An object was re-serialised by somebody: its bytes are gone.
            reply.problems.append("tool_args_not_text")
            arguments = "" if arguments is None else str(arguments)
        index = call.get("index")
        placed.append(
            (
                index if isinstance(index, int) else 0,
                ToolCall(
                    id=_text(call.get("id")), name=_text(function.get("name")), arguments=arguments
                ),
            )
        )
    reply.calls = [call for _, call in sorted(placed, key=lambda p: p[0])]


def _set_finish(reply: Reply, said: Any, native: Any) -> None:
    if said is None or said == "":
        reply.problems.append("finish_missing")
        return
    reply.finish = _FINISHES.get(said.lower()) if isinstance(said, str) else None
    if reply.finish is None:
        reply.problems.append("finish_unknown")
    elif reply.finish == "content_filter":
        reply.problems.append("content_filtered")
    elif reply.finish == "error":
        reply.problems.append("upstream_error_midstream")
    elif isinstance(native, str) and _FINISHES.get(native.lower()) == "length":
        # The provider's own word is the stronger one.
        reply.finish = "length"


def _usage(said: Any) -> Usage:
    """Native token counts; a zero means that nothing was filled in (case C27)."""
    said = said if isinstance(said, dict) else {}
    prompt, completion = count(said.get("prompt_tokens")), count(said.get("completion_tokens"))
    details = said.get("completion_tokens_details")
    details = details if isinstance(details, dict) else {}
    return Usage(
        prompt_tokens=prompt or None,
        completion_tokens=completion or None,
        reasoning_tokens=count(details.get("reasoning_tokens")),
    )


def _text(value: Any) -> str:
    """A text field: null is empty, a list of text parts is joined."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        parts = [p.get("text") if isinstance(p, dict) else p for p in value]
        texts = [t for t in parts if isinstance(t, str)]
        if len(texts) == len(parts):
            return "".join(texts)
    raise _Malformed("reply_malformed")


def _ids(value: Any) -> list[int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(type(i) is int for i in value):
        raise _Malformed("reply_malformed")
    return value
