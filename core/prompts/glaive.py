"""glaive-function-calling-v2: `system` with functions as concatenated JSON, `chat` as one text with
role words.

Oddities of the set that are handled: single-quoted JSON inside JSON with raw newlines, empty user
turns, one call spread over two assistant parts, text before a call, `<|endoftext|>` everywhere,
role words inside content."""

import json
import re
from typing import Any

from core.prompts.conversation import Conversation
from core.schema import Message, Tool

TURN = re.compile(r"(?:\A\s*|\n\n\n)(USER|ASSISTANT|FUNCTION RESPONSE): ?")
CALL = re.compile(
    r'<functioncall>\s*\{\s*"name":\s*"([^"]+)"\s*(?:,\s*"arguments":\s*(.*))?\}\s*\Z', re.DOTALL
)
END = "<|endoftext|>"


def convert(row: dict[str, Any]) -> Conversation:
    system, chat = row.get("system", ""), row.get("chat")
    if not isinstance(system, str) or not isinstance(chat, str):
        raise ValueError('"system" and "chat" are not text; remove the row')
    tools = _functions(system)
    messages: list[Message] = []
    if not tools and (text := system.removeprefix("SYSTEM: ").strip()):
        messages.append({"role": "system", "content": text})
    parts = TURN.split(chat.replace(END, ""))
    for role, text in zip(parts[1::2], parts[2::2], strict=True):
        _add(messages, role, text.strip())
    return Conversation(messages, tools or None)


def _functions(system: str) -> list[Tool]:
    """Objects one after another, with anything between them."""
    decoder = json.JSONDecoder(strict=False)
    functions: list[Tool] = []
    at = system.find("{")
    while at >= 0:
        value, end = decoder.raw_decode(system, at)
        functions.append(value)
        at = system.find("{", end)
    return functions


def _add(messages: list[Message], role: str, text: str) -> None:
    if role == "USER":
        if text:
            messages.append({"role": "user", "content": text})
        return
    if role == "FUNCTION RESPONSE":
        messages.append({"role": "tool", "content": text})
        return
    message: Message = {"role": "assistant", "content": text}
    if "<functioncall>" in text:
        before, _, _ = text.partition("<functioncall>")
        found = CALL.search(text)
        if found is None:
            raise ValueError("a <functioncall> cannot be read; remove the row")
        call = {"name": found[1], "arguments": _arguments(found[2])}
        message = {"role": "assistant", "content": before.strip(), "tool_calls": [call]}
    last = messages[-1] if messages else {}
    if last.get("role") == "assistant" and "tool_calls" not in last:
        joined = "\n".join(t for t in (last["content"], message["content"]) if t)
        messages[-1] = {**message, "content": joined}
    elif last.get("role") == "assistant" and "tool_calls" in message:
        last["tool_calls"] = [*last["tool_calls"], *message["tool_calls"]]
    else:
        messages.append(message)


def _arguments(text: str | None) -> Any:
    """An object, or one in single quotes whose own apostrophes may be escaped."""
    text = (text or "{}").strip()
    if text.startswith("'") and text.endswith("'"):
        text = text[1:-1].replace("\\'", "'")
    return json.loads(text or "{}", strict=False)
