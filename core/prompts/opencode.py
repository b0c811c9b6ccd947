"""OpenCodeInstruct: the task stands in `input`."""

from typing import Any

from core.prompts.conversation import Conversation


def convert(row: dict[str, Any]) -> Conversation:
    text = row.get("input")
    if not isinstance(text, str) or not text.strip():
        raise ValueError('no text in "input"; remove the row')
    return Conversation([{"role": "user", "content": text}])
