"""Replies in the backends' shapes, made from the fields of a completion."""

import json
from functools import cache
from typing import Any

from core.embedded import TARGET_DIR
from core.reconstruct import StopOffsets, judge
from core.render.base import Renderer, load_renderer
from core.schema import Prompt, Rollout, Sample, Usage

USER = [{"role": "user", "content": "2+2?"}]


@cache
def embedded(variant: str = "kimi-k2.5") -> Renderer:
    return load_renderer(TARGET_DIR, variant)


def call(name: str = "f", arguments: str = "{}", index: int = 0, **fields: Any) -> dict[str, Any]:
    given = fields.pop("id", f"functions.{name}:{index}")
    function = {"name": name, "arguments": arguments}
    return {"id": given, "type": "function", "index": index, "function": function, **fields}


def chat_body(
    content: Any = "",
    reasoning: Any = None,
    calls: list[dict[str, Any]] | None = None,
    finish: str | None = None,
    **top: Any,
) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": content, "reasoning": reasoning}
    if calls is not None:
        message["tool_calls"] = calls
    finish = finish or ("tool_calls" if calls else "stop")
    return {"id": "gen-1", "choices": [{"finish_reason": finish, "message": message}], **top}


def rollout_of(body: Any, billed: int | None = None, **fields: Any) -> Rollout:
    kind = "sse" if isinstance(body, str) else "json"
    defaults: dict[str, Any] = {
        "prompt_id": "p",
        "twin_id": "t",
        "dataset": "d",
        "arm": "declared",
        "attempt": 1,
        "outcome": "ok",
        "backend": "openrouter",
        "provider": "ProviderA",
        "status": 200,
        "reply_kind": kind,
        "reply_raw": body if kind == "sse" else json.dumps(body),
        "usage": Usage(completion_tokens=billed),
    }
    return Rollout(**{**defaults, **fields})


def prompt_of(**fields: Any) -> Prompt:
    defaults: dict[str, Any] = {
        "prompt_id": "p",
        "twin_id": "t",
        "dataset": "d",
        "messages": USER,
        "source_row": 3,
    }
    return Prompt(**{**defaults, **fields})


def judged(
    body: Any,
    billed: int | None = None,
    prompt: Prompt | None = None,
    offsets: StopOffsets | None = None,
    renderer: Renderer | None = None,
    **fields: Any,
) -> Sample:
    """One reply through `judge`; without a renderer, on the embedded vocabulary."""
    return judge(
        rollout_of(body, billed, **fields),
        prompt or prompt_of(),
        renderer or embedded(),
        offsets or StopOffsets(),
    )


def true_count(body: Any, **fields: Any) -> int:
    """What an honest provider would bill."""
    count = judged(body, None, **fields).rebuilt_tokens
    assert count is not None
    return count


def sse(*events: Any, done: bool = True) -> str:
    lines = [f"data: {json.dumps(e)}\n\n" for e in events]
    return "".join([": OPENROUTER PROCESSING\n\n", *lines, "data: [DONE]\n\n" if done else ""])


def delta(finish: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"id": "gen-1", "choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}
