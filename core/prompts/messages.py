"""`messages`: our own format. {"messages": [...], "tools"?: [...], "thinking"?: bool} a line."""

from typing import Any

from core.prompts.conversation import Conversation


def convert(row: dict[str, Any]) -> Conversation:
    if "messages" not in row:
        raise ValueError('no "messages"; a line is {"messages": [...], "tools"?: [...]}')
    thinking = row.get("thinking")
    if thinking is not None and not isinstance(thinking, bool):
        raise ValueError('"thinking" is neither true nor false')
    tools = row.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise ValueError('"tools" is not a list')
    return Conversation(row["messages"], tools, thinking)
