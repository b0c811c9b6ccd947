"""Mixture-of-Thoughts: `messages`, the assistant's with its thinking inline; that thinking is not
part of a prompt."""

import re
from typing import Any

from core.prompts.conversation import Conversation, flat_text

THINKING = re.compile(r"<think>.*?</think>\s*", re.DOTALL)


def convert(row: dict[str, Any]) -> Conversation:
    given = row.get("messages")
    if not isinstance(given, list):
        raise ValueError('no "messages"; remove the row')
    messages = []
    for message in given:
        if isinstance(message, dict) and message.get("role") == "assistant":
            message = {**message, "content": THINKING.sub("", flat_text(message.get("content")))}
        messages.append(message)
    return Conversation(messages)
