"""What all OpenAI-shaped backends share: messages as sent, and a collected Flight -> Reply.

Knows the chat completions shape and nothing of any one provider's prices or routing.
"""

import time
from typing import Any

from core.providers import base
from core.providers.classify import classify_parsed, parsed_or_none
from core.providers.price import Price, cost_of, finite
from core.schema import Message, Prompt, Usage

MOST_TOKENS = 10**9
"""No context is as long. Sums of what a server says must stay within 64 bits."""


def outgoing_messages(messages: list[Message], reasoning_field: str) -> list[Message]:
    """Messages in the OpenAI shape; an assistant turn's thinking goes under the name that the
    backend reads."""
    out = []
    for message in messages:
        sent = {
            k: v
            for k, v in message.items()
            if k in ("role", "content", "name", "tool_call_id", "tool_calls") and v is not None
        }
        sent.setdefault("content", "" if message["role"] != "assistant" else None)
        thinking = message.get("reasoning_content") or message.get("reasoning")
        if thinking and message["role"] == "assistant":
            sent[reasoning_field] = thinking
        out.append(sent)
    return out


def declares_tools(prompt: Prompt) -> bool:
    """The text arm carries its tools in its messages already."""
    return bool(prompt.tools) and prompt.arm != "text"


def asked(prompt: Prompt) -> dict[str, Any]:
    """The `tools` field of an arm that declares them."""
    return {"tools": prompt.tools} if declares_tools(prompt) else {}


def template_switches(prompt: Prompt) -> dict[str, bool]:
    """`chat_template_kwargs` with which a server's template renders what ours does. The names are
    the template's own: Kimi's ignores `enable_thinking`."""
    switches = {"thinking": prompt.thinking}
    return {**switches, "preserve_thinking": True} if prompt.preserve_thinking else switches


def count(value: Any) -> int | None:
    """A token count as a provider wrote it; None unless it is a whole number below MOST_TOKENS."""
    if type(value) is int:
        return value if 0 <= value < MOST_TOKENS else None
    number = finite(value)
    if number is None or not 0 <= number < MOST_TOKENS or value != int(value):
        return None
    return int(value)


def usage_of(body: dict[str, Any], price: Price) -> Usage:
    """Native token counts and cost. Zeros both ways mean that nothing was filled in (case C27). A
    list prices only replies whose counts are both known."""
    said = body.get("usage")
    said = said if isinstance(said, dict) else {}
    prompt_tokens, completion_tokens = (
        count(said.get("prompt_tokens")),
        count(said.get("completion_tokens")),
    )
    cost, cap = cost_of(said or None, price.free)
    if not prompt_tokens and not completion_tokens:
        return Usage(cost_usd=cost if price.free or cost else None, cap_usd=cap)
    listed = price.from_list and not price.free and "cost" not in said
    if listed and prompt_tokens and completion_tokens is not None:
        cost = cap = price.bill_usd(prompt_tokens, completion_tokens)
    detail, cached = said.get("completion_tokens_details"), said.get("prompt_tokens_details")
    detail = detail if isinstance(detail, dict) else {}
    cached = cached if isinstance(cached, dict) else {}
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        reasoning_tokens=count(detail.get("reasoning_tokens")),
        cached_tokens=count(cached.get("cached_tokens")),
        cost_usd=cost,
        cap_usd=cap,
    )


def body_of(flight: base.Flight) -> Any:
    """A whole body parsed (None: no JSON), or the fields that the bill needs from what a stream's
    ends said. Nothing is read from a body that is nested too deeply: whoever judges it says so."""
    if flight.kind == "sse":
        return flight.body
    try:
        return parsed_or_none(flight.received)
    except RecursionError:
        return {}


def reply_of(
    flight: base.Flight, sent: dict[str, Any], price: Price, failure: base.Failure | None
) -> base.Reply:
    """Everything that is known at the attempt's end. A transport failure that was already found
    wins."""
    raw = flight.received
    parsed = body_of(flight)
    if failure is None and flight.status is not None and flight.kind != "sse":
        failure = classify_parsed(flight.status, flight.headers, raw, parsed, time.time())
    body: dict[str, Any] = parsed if isinstance(parsed, dict) else {}
    generation_id = base.name_in(body.get("id"))
    if flight.kind != "sse" and generation_id:
        flight.known(generation_id)
    elif flight.generation_id is None and raw:
        flight.known(generation_id_in(raw))
    return base.Reply(
        request=sent,
        status=flight.status,
        headers=flight.headers,
        kind=flight.kind if raw else "none",
        raw=_kept(flight),
        provider=base.name_in(body.get("provider")) or flight.provider,
        model=base.name_in(body.get("model")),
        generation_id=flight.generation_id,
        usage=usage_of(body, price),
        failure=failure,
    )


def _kept(flight: base.Flight) -> str | bytes | None:
    if not flight.received:
        return None
    if flight.kind == "sse":
        return bytes(flight.received)
    return flight.received.decode("utf-8", "surrogateescape")


def generation_id_in(raw: bytes | bytearray) -> str | None:
    """The id at the start of a body that was cut off (case C34)."""
    at = raw.find(b'"id"', 0, 400)
    if at < 0:
        return None
    parts = raw[at + 4 : at + 200].split(b'"', 2)
    if len(parts) < 3 or parts[0].strip() != b":":
        return None
    text = parts[1].decode("ascii", "replace")
    return text if text.replace("-", "").replace("_", "").isalnum() else None
