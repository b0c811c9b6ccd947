"""The bytes of OpenRouter's shape: bodies, stream events, usage, errors. Pure.

Shapes: spec backends 3.2 and 3.3 (OpenRouter's OpenAPI of 2026-08-22). Events put what differs
between generations in front, so that the rest of a replayed event is encoded once.
"""

import email.utils
import json
import math
from typing import Any

import msgspec

from core.embedded.billing import Charge, Provider, usd
from core.embedded.faults import Hits
from core.embedded.replies import Delta, Parsed
from core.schema import ToolCall

COMMENT = b": OPENROUTER PROCESSING\n\n"
DONE = b"data: [DONE]\n\n"
BLANKS = b"\n         \n\n         \n"
HTML = b"<!DOCTYPE html><html><head><title>502 Bad Gateway</title></head><body>cloud</body></html>"


def dumps(value: Any) -> bytes:
    """JSON; a lone surrogate leaves as its escape."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return _liberal(value)


def _liberal(value: Any) -> bytes:
    """As servers in other languages write it: lone surrogates as escapes, NaN as NaN."""
    return json.dumps(value, separators=(",", ":")).encode()


def head(charge: Charge, kind: str = "chat.completion.chunk") -> bytes:
    """Beginning of a body or event, up to the comma before `choices`."""
    fixed = {
        "id": charge.id,
        "provider": charge.provider,
        "model": charge.model,
        "object": kind,
        "created": int(charge.created),
    }
    return dumps(fixed)[:-1] + b","


def event(opening: bytes, tail: bytes) -> bytes:
    return b"data: " + opening + tail + b"\n\n"


def events(opening: bytes, deltas: list[Delta], form: str = "reasoning") -> bytes:
    """Stream events of `deltas`, one a piece, two a tool call."""
    parts: list[bytes] = []
    for delta in deltas:
        wire = delta.wire.get(form)
        if wire is None:
            wire = delta.wire[form] = b"\n".join(_tail(part) for part in _parts(delta, form))
        parts += [event(opening, tail) for tail in wire.split(b"\n") if tail]
    return b"".join(parts)


def _tail(delta: dict[str, Any], finish: str | None = None) -> bytes:
    choice = {
        "index": 0,
        "delta": {"role": "assistant", "content": "", **delta},
        "finish_reason": finish,
        "native_finish_reason": finish,
        "logprobs": None,
    }
    return b'"choices":[' + dumps(choice) + b"]}"


def _parts(delta: Delta, form: str) -> list[dict[str, Any]]:
    if delta.kind == "reasoning":
        fields = reasoning_fields(delta.text, form)
        return [fields] if fields else []
    if delta.call is None:
        return [{"content": delta.text}]
    call = tool_call(delta.call, delta.index)
    arguments = call["function"].pop("arguments")
    opening = {**call, "function": {**call["function"], "arguments": ""}}
    rest = {"index": delta.index, "type": "function", "function": {"arguments": arguments}}
    return [{"tool_calls": [opening]}, {"tool_calls": [rest]}]


def reasoning_fields(text: str, form: str) -> dict[str, Any]:
    """Which fields carry the reasoning under a form of `Parsed.reasoning_form`."""
    details = [{"type": "reasoning.text", "text": text, "format": "unknown", "index": 0}]
    if form == "withheld_reasoning":
        return {}
    if form == "reasoning_details_only":
        return {"reasoning_details": details}
    if form == "reasoning_content":
        return {"reasoning": text, "reasoning_content": text, "reasoning_details": details}
    if form == "reasoning_disagrees":
        return {"reasoning": text.strip(), "reasoning_details": details}
    return {"reasoning": text, "reasoning_details": details}


def tool_call(call: ToolCall, index: int) -> dict[str, Any]:
    return {
        "index": index,
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def finish_reason(reply: Parsed, hits: Hits) -> str | None:
    return None if "no_finish" in hits else reply.finish_reason


def finish_tail(reply: Parsed, hits: Hits) -> bytes:
    """The event that carries finish_reason."""
    return _tail({}, finish_reason(reply, hits))


def usage(charge: Charge, hits: Hits) -> dict[str, Any] | None:
    """The usage object, after the books are made; None when it is missing."""
    if "no_usage" in hits:
        return None
    if "zero_usage" in hits:
        return {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    prompt, completion = charge.prompt_tokens, charge.completion_tokens
    upstream = charge.byok and hits.value("byok", "said") == "said"
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        **_cost(usd(charge.cost_pico or 0), hits),
        "is_byok": charge.byok,
        "prompt_tokens_details": {"cached_tokens": 0},
        "cost_details": {
            "upstream_inference_cost": usd(charge.upstream_pico) if upstream else None
        },
        "completion_tokens_details": {"reasoning_tokens": charge.reasoning_tokens},
    }


def _cost(cost: float, hits: Hits) -> dict[str, Any]:
    """The `cost` field, or none."""
    if "no_cost" in hits:
        return {}
    if "null_cost" in hits:
        return {"cost": None}
    if "string_cost" in hits:
        return {"cost": str(cost)}
    if "nan_cost" in hits:
        return {"cost": math.nan}
    return {"cost": -1 if "negative_cost" in hits else cost}


def usage_tail(counted: dict[str, Any]) -> bytes:
    """The event that carries usage."""
    return b'"choices":[],"usage":' + _liberal(counted) + b"}"


def body(charge: Charge, provider: Provider, reply: Parsed, hits: Hits) -> bytes:
    """A whole reply."""
    message: dict[str, Any] = {
        "role": "assistant",
        "content": reply.content or provider.empty_content,
        "refusal": None,
        "reasoning": None,
    }
    if reply.reasoning:
        message |= reasoning_fields(reply.reasoning, reply.reasoning_form)
    if reply.calls:
        message["tool_calls"] = [tool_call(c, i) for i, c in enumerate(reply.calls)]
    reason = finish_reason(reply, hits)
    choice: dict[str, Any] = {
        "index": 0,
        "logprobs": None,
        "finish_reason": reason,
        "native_finish_reason": reason,
        "message": message,
    }
    if "error_mid_stream" in hits:
        choice |= {"finish_reason": "error", "error": mid_stream_error(provider.name, hits)}
    rest: dict[str, Any] = {"choices": [] if "empty_choices" in hits else [choice]}
    counted = usage(charge, hits)
    if counted is not None:
        rest["usage"] = counted
    written = _liberal(rest) if "nan_cost" in hits else dumps(rest)
    return head(charge, "chat.completion") + written[1:]


def error(code: int, message: str, metadata: dict[str, Any] | None = None) -> dict[str, Any]:
    inner: dict[str, Any] = {"code": code, "message": message}
    if metadata:
        inner["metadata"] = metadata
    return {"error": inner}


def provider_error(code: int, provider: str, raw: str) -> dict[str, Any]:
    metadata = {"provider_name": provider, "provider_code": code, "raw": raw}
    return error(code, "Provider returned error", metadata)


def mid_stream_error(provider: str, hits: Hits) -> dict[str, Any]:
    """`error` of a reply that a provider gave up."""
    code = int(hits.number("error_mid_stream", 502))
    return dict(provider_error(code, provider, "upstream closed the stream")["error"])


STATUS = {
    "rate_limited": (429, "rate limited upstream, retry shortly"),
    "capacity": (429, "too many requests in flight, retry shortly"),
    "platform_limited": (429, "Rate limit exceeded"),
    "no_credit": (402, "Insufficient credits"),
    "forbidden": (403, "input was flagged"),
    "bad_request": (400, "unsupported parameter"),
    "request_timeout": (408, "Request timed out"),
    "server_error": (500, "Internal Server Error"),
    "bad_gateway": (502, "upstream connect error"),
    "unavailable": (503, "no instance available"),
    "edge_timeout": (524, "a timeout occurred"),
    "overloaded": (529, "provider overloaded"),
}
_PLATFORM = ("platform_limited", "no_credit", "request_timeout", "server_error")


def status_answer(
    name: str, hits: Hits, provider: str, now: float
) -> tuple[int, dict[str, str], dict[str, Any]]:
    """(status, headers, body) of the answers that are an HTTP status."""
    code, raw = STATUS[name]
    headers: dict[str, str] = {}
    unsaid = "1" if code == 429 else "none"
    retry = "none" if name == "capacity" else hits.value(name, unsaid)
    if retry.startswith("date"):
        headers["Retry-After"] = email.utils.formatdate(now + float(retry[4:] or 12), usegmt=True)
    elif retry != "none":
        headers["Retry-After"] = retry
    if name == "platform_limited":
        reset = str(int((now + hits.number(name, 1)) * 1_000))
        headers |= {"X-RateLimit-Limit": "20", "X-RateLimit-Remaining": "0"}
        headers["X-RateLimit-Reset"] = reset
        return code, headers, error(code, raw, {"limit_source": "platform"})
    if name in _PLATFORM:
        return code, headers, error(code, raw)
    return code, headers, provider_error(code, provider, raw)


def body_error(name: str, hits: Hits, charge_id: str, model: str, provider: str) -> bytes:
    """A 200 that is an error: beside an empty choice, or inside the choice."""
    code = int(hits.number("error_in_200", 429)) if name == "error_in_200" else 502
    inner = provider_error(code, provider, "limit reached")["error"]
    choice: dict[str, Any] = {
        "index": 0,
        "finish_reason": "stop",
        "native_finish_reason": "stop",
        "message": {"role": "assistant", "content": None},
    }
    reply: dict[str, Any] = {
        "id": charge_id,
        "provider": provider,
        "model": model,
        "object": "chat.completion",
        "choices": [choice],
        "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
    }
    if name == "choice_error":
        choice |= {"finish_reason": "error", "native_finish_reason": None, "error": inner}
    else:
        reply["error"] = inner
    return dumps(reply)
