"""ToolACE: `system` is prose with a JSON list of functions, calls are written like Python: [Get
Weather(city="Oslo")].

Names may hold spaces; `conversation.safe_name` mends them and the map is kept with the prompt.
"""

import ast
import json
import re
from typing import Any

from core.prompts.conversation import Conversation
from core.schema import Message, Tool

ROLES = {"user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant"}
WORDS = {"true": True, "false": False, "null": None, "none": None}
START = re.compile(r"\[\s*\{")


def convert(row: dict[str, Any]) -> Conversation:
    system, turns = row.get("system"), row.get("conversations")
    if not isinstance(system, str) or not isinstance(turns, list):
        raise ValueError('no "system" or "conversations"; remove the row')
    prose, tools = split_system(system)
    messages: list[Message] = [{"role": "system", "content": prose}] if prose else []
    for turn in turns:
        role = turn.get("from") if isinstance(turn, dict) else None
        text = turn.get("value") if isinstance(turn, dict) else None
        if not isinstance(role, str) or not isinstance(text, str):
            raise ValueError("a turn has no from or no value; remove the row")
        if role == "tool":
            messages += _results(messages, text)
        elif ROLES.get(role) == "assistant":
            calls = parse_calls(text)
            content = "" if calls else text
            messages.append({"role": "assistant", "content": content, "tool_calls": calls})
        elif role in ROLES:
            messages.append({"role": "user", "content": text})
        else:
            raise ValueError(f"turn from {role!r} is not known; remove the row")
    return Conversation(messages, tools or None)


def split_system(system: str) -> tuple[str, list[Tool]]:
    """(prose without the list, functions). The prose that explains the call syntax goes with the
    list: tools are declared in the model's own form."""
    found = START.search(system)
    if found is None:
        return system.strip(), []
    functions, _ = json.JSONDecoder(strict=False).raw_decode(system, found.start())
    return "", [f for f in functions if isinstance(f, dict)]


def _results(messages: list[Message], text: str) -> list[Message]:
    """One result per call of the last turn, in order; a single call gets the whole text."""
    calls = messages[-1].get("tool_calls") if messages else None
    if not calls:
        raise ValueError("a tool result answers no call; remove the row")
    if len(calls) == 1:
        return [{"role": "tool", "content": text}]
    values = json.loads(text)
    if not isinstance(values, list) or len(values) != len(calls):
        raise ValueError("tool results and calls differ in number; remove the row")
    return [{"role": "tool", "content": json.dumps(v, ensure_ascii=False)} for v in values]


def parse_calls(text: str) -> list[dict[str, Any]]:
    """Calls of `[Name(a=1), Other Name(b="x")]`; none when the text is no such list. Raises
    ValueError for a list that looks like calls and cannot be read."""
    text = text.strip()
    if not (text.startswith("[") and text.endswith("]") and "(" in text):
        return []
    calls, at = [], 1
    while at < len(text) - 1:
        opening = text.find("(", at)
        if opening < 0:
            break
        name = text[at:opening].strip(" ,\n\t")
        end = _closing(text, opening)
        if not name or end < 0:
            raise ValueError("a call cannot be read; remove the row")
        calls.append({"name": name, "arguments": _keywords(text[opening : end + 1])})
        at = end + 1
    return calls


def _closing(text: str, opening: int) -> int:
    """Index of the bracket that closes the one at `opening`, quotes respected; -1 when there is
    none."""
    depth, quote, at = 0, "", opening
    while at < len(text):
        char = text[at]
        if quote:
            if char == "\\":
                at += 1
            elif char == quote:
                quote = ""
        elif char in "\"'":
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
            if depth == 0:
                return at
        at += 1
    return -1


def _keywords(text: str) -> dict[str, Any]:
    try:
        call = ast.parse(f"f{text}", mode="eval").body
    except (SyntaxError, ValueError, RecursionError) as e:
        raise ValueError("arguments of a call cannot be read; remove the row") from e
    if not isinstance(call, ast.Call) or call.args or any(k.arg is None for k in call.keywords):
        raise ValueError("a call has arguments without names; remove the row")
    return {str(k.arg): _literal(k.value) for k in call.keywords}


def _literal(node: ast.expr) -> Any:
    """Python literals, with JSON's true, false and null as words."""
    match node:
        case ast.Name(id=name) if name.lower() in WORDS:
            return WORDS[name.lower()]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {
                str(_literal(k)): _literal(v)
                for k, v in zip(keys, values, strict=True)
                if k is not None
            }
        case _:
            try:
                value = ast.literal_eval(node)
            except ValueError as e:
                raise ValueError("an argument is no literal; remove the row") from e
            if isinstance(value, bytes | complex | set) or value is Ellipsis:
                raise ValueError("an argument is no JSON value; remove the row")
            return value
