"""Nemotron-Agentic: OpenAI messages with `reasoning_content`; `arguments` may be an object; `tools`
beside them."""

import json
from typing import Any

from core.prompts.conversation import Conversation


def convert(row: dict[str, Any]) -> Conversation:
    messages, tools = row.get("messages"), row.get("tools")
    if isinstance(tools, str):
        tools = json.loads(tools)
    if not isinstance(messages, list):
        raise ValueError('no "messages"; remove the row')
    if tools is not None and not isinstance(tools, list):
        raise ValueError('"tools" is not a list')
    return Conversation(messages, tools)
