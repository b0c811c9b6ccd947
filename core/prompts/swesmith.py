"""SWE-smith trajectories: `messages` is a JSON string; only the `tool` split has tool calls in
OpenAI's form."""

import json
from typing import Any

from core.prompts.conversation import Conversation


def convert(row: dict[str, Any]) -> Conversation:
    messages, tools = row.get("messages"), row.get("tools")
    if isinstance(messages, str):
        messages = json.loads(messages)
    if isinstance(tools, str):
        tools = json.loads(tools)
    if not isinstance(messages, list):
        raise ValueError('"messages" is no list; remove the row')
    return Conversation(messages, tools if isinstance(tools, list) else None)
