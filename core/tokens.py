"""`eyas tokens encode|render|rebuild`: JSON lines in, JSON lines out, order kept, `id` echoed.

A line that cannot be answered is answered with `{"id", "error": {"class", "message"}}`; the stream
goes on. Stateless: no line changes another's answer. ASCII output, so that lone surrogates survive.

    encode   {"id", "text"}                            -> {"id", "ids"}
    render   {"id", "messages", "tools"?, "thinking"?, "preserve_thinking"?}
             -> {"id", "text", "ids", "tools_mode"}
    rebuild  {"id", "request"?, "response", "generation"?}
             -> {"id", "verdict", "class"?, "hypothesis"?, "completion_text"?, "completion_ids"?,
                 "flags", "calls"?, "count": {"rebuilt", "billed"}}
"""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import msgspec

from core.errors import RenderError
from core.providers.chat import count
from core.reconstruct.judging import ask_of
from core.reconstruct.rebuild import Rebuilt, rebuild
from core.reconstruct.reply import read_reply
from core.render.base import Renderer, load_renderer

Mode = Literal["encode", "render", "rebuild"]
MODES: tuple[Mode, ...] = ("encode", "render", "rebuild")


def run(
    mode: Mode,
    tokenizer_dir: Path,
    lines_in: Iterable[str | bytes],
    write: Callable[[str], object],
    variant: str = "",
) -> int:
    """Answer every non-blank line; returns how many were answered with an error.

    `variant` empty: K2.5's rules over a tiktoken.model, else the directory's own chat template.
    Raises TokenizerError before the first line for a bad directory.
    """
    if not variant:
        native = (tokenizer_dir / "tokenizer.json").exists()
        kimi = (tokenizer_dir / "tiktoken.model").exists() or not native
        variant = "kimi-k2.5" if kimi else "template"
    return answer_lines(mode, load_renderer(tokenizer_dir, variant), lines_in, write)


def answer_lines(
    mode: Mode,
    renderer: Renderer,
    lines_in: Iterable[str | bytes],
    write: Callable[[str], object],
) -> int:
    """`run` with a renderer that is there already."""
    answer = {"encode": _encode, "render": _render, "rebuild": _rebuild}[mode]
    errors = 0
    for line in lines_in:
        if not line.strip():
            continue
        reply = _answered(line, answer, renderer)
        errors += "error" in reply
        write(json.dumps(reply, separators=(",", ":")) + "\n")
    return errors


class _BadLine(Exception):
    """`args`: class and message."""


def _answered(
    line: str | bytes, answer: Callable[[dict[str, Any], Renderer], dict[str, Any]], r: Renderer
) -> dict[str, Any]:
    row_id = None
    try:
        row = json.loads(line)
        if not isinstance(row, dict):
            raise _BadLine("line_invalid", "the line is not a JSON object")
        row_id = _repeatable(row.get("id"))
        return {"id": row_id, **answer(row, r)}
    except _BadLine as e:
        kind, message = e.args
    except RenderError as e:
        kind, message = e.kind, str(e)
    except RecursionError:
        kind, message = "line_too_deep", "the line is nested too deeply"
    except ValueError as e:
        kind, message = "line_not_json", f"the line is not JSON: {e}"
    return {"id": row_id, "error": {"class": kind, "message": message}}


def _repeatable(row_id: Any) -> Any:
    """NaN and 1e400 are read, but no line of JSON can hold them."""
    try:
        json.dumps(row_id, allow_nan=False)
    except ValueError as error:
        raise _BadLine("line_invalid", "`id` holds a number that JSON does not know") from error
    return row_id


def _encode(row: dict[str, Any], renderer: Renderer) -> dict[str, Any]:
    text = row.get("text")
    if not isinstance(text, str):
        raise _BadLine("line_invalid", "encode needs `text`, a string")
    return {"ids": renderer.tokenizer.encode_ordinary(text)}


def _render(row: dict[str, Any], renderer: Renderer) -> dict[str, Any]:
    switches = {"thinking": row.get("thinking", True)}
    switches["preserve_thinking"] = row.get("preserve_thinking", False)
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise _BadLine("line_invalid", f"`{name}` is not true or false")
    prompt = renderer.render(row.get("messages") or [], row.get("tools"), **switches)
    reply: dict[str, Any] = {"text": prompt.text, "ids": prompt.ids}
    reply["tools_mode"] = prompt.tools_mode
    if prompt.fallback:
        reply["fallback"] = prompt.fallback
    if prompt.control_strings:
        reply["control_strings"] = prompt.control_strings
    return reply


def _rebuild(row: dict[str, Any], renderer: Renderer) -> dict[str, Any]:
    response, request = row.get("response"), row.get("request") or {}
    if not isinstance(response, dict) or not isinstance(request, dict):
        raise _BadLine("line_invalid", "rebuild needs `response`, an object")
    if "body" not in response and ("choices" in response or "output_ids" in response):
        response = {"body": response}
    kind, raw = _raw_body(response.get("body"))
    status, headers = response.get("status"), response.get("headers")
    reply = read_reply(
        kind,
        raw,
        status if isinstance(status, int) else None,
        headers if isinstance(headers, dict) else {},
    )
    looked_up = row.get("generation")
    native = looked_up.get("native_tokens_completion") if isinstance(looked_up, dict) else None
    if reply.usage.completion_tokens is None and native is not None:
        reply.usage = msgspec.structs.replace(reply.usage, completion_tokens=count(native))
    messages = request.get("messages")
    ask = ask_of(
        request,
        messages=messages if isinstance(messages, list) else None,
        thinking=_thinking(request, renderer),
    )
    return _told(rebuild(reply, ask, renderer), renderer)


def _raw_body(body: Any) -> tuple[str, str | None]:
    if isinstance(body, str):
        return "json", body
    if isinstance(body, dict) and isinstance(body.get("sse"), str):
        return "sse", body["sse"]
    return ("none", None) if body is None else ("json", json.dumps(body))


def _thinking(request: dict[str, Any], renderer: Renderer) -> bool:
    """The switch as each API spells it; on unless something says off."""
    for key in ("input_ids", "input_ids_tail"):
        ids = request.get(key)
        if isinstance(ids, list) and ids and renderer.grammar is not None:
            return bool(ids[-1] != renderer.grammar.think_close)
    template = request.get("chat_template_kwargs")
    if isinstance(template, dict) and isinstance(template.get("thinking"), bool):
        return bool(template["thinking"])
    thinking, reasoning = request.get("thinking"), request.get("reasoning")
    if isinstance(thinking, dict):
        return thinking.get("type") != "disabled"
    if isinstance(reasoning, dict):
        return reasoning.get("enabled") is not False and reasoning.get("effort") != "none"
    return thinking is not False and reasoning is not False


def _told(rebuilt: Rebuilt, renderer: Renderer) -> dict[str, Any]:
    told: dict[str, Any] = {"verdict": rebuilt.verdict}
    if rebuilt.error_class:
        told["class"] = rebuilt.error_class
    if rebuilt.hypothesis:
        told["hypothesis"] = rebuilt.hypothesis
    if rebuilt.ids:
        told["completion_text"] = renderer.tokenizer.decode(rebuilt.ids)
        told["completion_ids"] = rebuilt.ids
    told["flags"] = rebuilt.flags
    if rebuilt.calls:
        told["calls"] = [msgspec.structs.asdict(c) for c in rebuilt.calls]
    told["count"] = {"rebuilt": rebuilt.rebuilt, "billed": rebuilt.billed}
    return told
