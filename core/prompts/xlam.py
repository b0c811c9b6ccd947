"""xLAM function calling: `query`, and `tools` as a JSON string with Python type names ("str,
optional")."""

import json
from typing import Any

from core.prompts.conversation import Conversation


def convert(row: dict[str, Any]) -> Conversation:
    query, tools = row.get("query"), row.get("tools")
    if not isinstance(query, str) or not query.strip():
        raise ValueError('no text in "query"; remove the row')
    if isinstance(tools, str):
        tools = json.loads(tools)
    if not isinstance(tools, list):
        raise ValueError('"tools" is not a list')
    return Conversation([{"role": "user", "content": query}], tools)
