"""A conversation as a dataset gives it, brought into the one form that every backend and renderer
accepts.

Promises: native tool ids (functions.NAME:IDX, one counter for the conversation), schemas in plain
JSON Schema, no answer at the end. What cannot be brought there raises ValueError with what and what
to do. Knows no files."""

import json
import re
from typing import Any, NamedTuple

from core.schema import Message, Tool

TYPES = {
    "str": "string", "string": "string", "text": "string", "any": "string",
    "int": "integer", "integer": "integer", "long": "integer",
    "float": "number", "number": "number", "double": "number",
    "bool": "boolean", "boolean": "boolean",
    "dict": "object", "object": "object", "hashmap": "object",
    "list": "array", "array": "array", "tuple": "array", "set": "array",
    "null": "null", "none": "null",
}  # fmt: skip
NOT_IN_NAMES = re.compile(r"[^\w.\-]", re.ASCII)
SUBSCHEMAS = ("properties", "$defs", "definitions", "patternProperties")
LISTS = ("anyOf", "allOf", "oneOf")


class Conversation(NamedTuple):
    """`thinking` None: the dataset decides."""

    messages: list[Message]
    tools: list[Tool] | None = None
    thinking: bool | None = None


class Normal(NamedTuple):
    messages: list[Message]
    tools: list[Tool] | None
    renamed: dict[str, str]
    """Function name as the dataset has it -> as it is sent, where they differ."""


def safe_name(name: str) -> str:
    """Kimi's call ids hold the name: only word characters, dots and hyphens survive there."""
    return NOT_IN_NAMES.sub("_", name.strip()) or "_"


def normalise(conversation: Conversation) -> Normal:
    """Raises ValueError when nothing is left to answer."""
    renamed: dict[str, str] = {}
    tools = [_tool(tool, renamed) for tool in conversation.tools or []]
    names = [tool["function"]["name"] for tool in tools]
    if twice := sorted({n for n in names if names.count(n) > 1}):
        raise ValueError(f"function {twice[0]!r} is declared twice; keep one")
    messages = _messages(conversation.messages, renamed)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not any(m["role"] == "user" for m in messages):
        raise ValueError("no user turn; add one or remove the line")
    return Normal(messages, tools or None, renamed)


def flat_text(content: Any) -> str:
    """Text of a content that may be a list of parts. Raises ValueError for anything that is not
    text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = []
        for part in content:
            if not isinstance(part, dict) or not isinstance(part.get("text"), str):
                raise ValueError("a content part is not text; only text can be asked")
            parts.append(part["text"])
        return "".join(parts)
    raise ValueError("content is neither text nor a list of parts")


def _messages(rows: list[Message], renamed: dict[str, str]) -> list[Message]:
    if not isinstance(rows, list):
        raise ValueError("messages is not a list")
    out: list[Message] = []
    calls = 0
    waiting: dict[str, str] = {}
    order: list[str] = []
    for row in rows:
        if not isinstance(row, dict) or not isinstance(row.get("role"), str):
            raise ValueError("a message has no role")
        role = row["role"]
        message: Message = {"role": role, "content": flat_text(row.get("content"))}
        if role == "assistant":
            thinking = row.get("reasoning_content") or row.get("reasoning")
            if isinstance(thinking, str) and thinking:
                message["reasoning_content"] = thinking
            if row.get("tool_calls"):
                if not isinstance(row["tool_calls"], list):
                    raise ValueError("tool_calls is not a list")
                waiting, order = {}, []
                message["tool_calls"] = []
                for call in row["tool_calls"]:
                    sent = _call(call, calls, renamed)
                    message["tool_calls"].append(sent)
                    given = call.get("id") if isinstance(call, dict) else None
                    waiting[given if isinstance(given, str) else sent["id"]] = sent["id"]
                    order.append(sent["id"])
                    calls += 1
        elif role in ("tool", "function"):
            message["role"] = "tool"
            message["tool_call_id"] = _answered(row.get("tool_call_id"), waiting, order)
        elif role not in ("system", "user", "developer"):
            raise ValueError(f"role {role!r} is not known; use system, user, assistant or tool")
        elif role == "user" and not message["content"]:
            raise ValueError("a user message has no content; write one or remove the line")
        if isinstance(row.get("name"), str) and role in ("system", "user"):
            message["name"] = row["name"]
        out.append(message)
    return out


def _answered(given: Any, waiting: dict[str, str], order: list[str]) -> str:
    """The native id of the call that a result answers: by its id, else the oldest one without an
    answer."""
    native = waiting.pop(given, None) if isinstance(given, str) else None
    if native is None:
        native = order[0] if order else None
    if native is None or native not in order:
        raise ValueError("a tool result answers no call; remove it or add its call")
    order.remove(native)
    return native


def _call(call: Any, index: int, renamed: dict[str, str]) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not name:
        raise ValueError("a tool call has no function name")
    arguments = function.get("arguments", {})
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments or {}, ensure_ascii=False)
    if not isinstance(json.loads(arguments), dict):
        raise ValueError(f"arguments of {name} are not a JSON object")
    safe = renamed.get(name, safe_name(name))
    return {
        "id": f"functions.{safe}:{index}",
        "type": "function",
        "function": {"name": safe, "arguments": arguments},
    }


def _tool(tool: Any, renamed: dict[str, str]) -> Tool:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not name:
        raise ValueError("a tool has no function name")
    safe = safe_name(name)
    if safe != name:
        renamed[name] = safe
    sent: dict[str, Any] = {"name": safe}
    if isinstance(function.get("description"), str):
        sent["description"] = function["description"]
    sent["parameters"] = parameters(function.get("parameters"))
    return {"type": "function", "function": sent}


def parameters(given: Any) -> dict[str, Any]:
    """JSON Schema of a function's parameters, always an object. Accepts a bare map of properties as
    well."""
    if not given:
        return {"type": "object", "properties": {}}
    if not isinstance(given, dict):
        raise ValueError("parameters are not an object")
    bare = "properties" not in given and not isinstance(given.get("type"), str)
    if bare and all(isinstance(v, dict) for v in given.values()):
        given = {"type": "object", "properties": given}
    fixed = schema(given)
    fixed["type"] = "object"
    fixed.setdefault("properties", {})
    return fixed


def schema(given: Any) -> dict[str, Any]:
    """One (sub)schema: type names of JSON Schema, anyOf for oneOf, enum for const, and `optional`
    taken out of the type's text into the parent's `required`."""
    if not isinstance(given, dict):
        return {}
    out: dict[str, Any] = {}
    for key, value in given.items():
        if key == "type":
            out["type"] = _type(value)
        elif key in SUBSCHEMAS and isinstance(value, dict):
            out[key] = {name: schema(sub) for name, sub in value.items()}
        elif key in LISTS and isinstance(value, list):
            out["anyOf" if key == "oneOf" else key] = [schema(sub) for sub in value]
        elif key == "items":
            out["items"] = schema(value[0] if isinstance(value, list) and value else value)
        elif key == "const":
            out["enum"] = [value]
        else:
            out[key] = value
    required = _required(given)
    if required is not None:
        out["required"] = required
    if out.get("required") == []:
        del out["required"]
    return out


def _type(value: Any) -> Any:
    if isinstance(value, list):
        return [_type(v) for v in value]
    if not isinstance(value, str):
        return "string"
    word = re.split(r"[\s,\[<(]", value.strip().lower(), maxsplit=1)[0]
    return TYPES.get(word, value if value in TYPES.values() else TYPES.get(word, "string"))


def _required(given: dict[str, Any]) -> list[str] | None:
    """Explicit list minus optional ones; from the types' own words where no list is given."""
    properties = given.get("properties")
    properties = properties if isinstance(properties, dict) else {}
    optional = {
        name
        for name, sub in properties.items()
        if isinstance(sub, dict)
        and isinstance(sub.get("type"), str)
        and "optional" in sub["type"].lower()
    }
    listed = given.get("required")
    if isinstance(listed, list):
        return [n for n in listed if n in properties and n not in optional]
    if optional:
        return [n for n in properties if n not in optional]
    return None
