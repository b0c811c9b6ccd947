"""Magicoder: `problem` (OSS-Instruct), `instruction` (Evol-Instruct, evol-codealpaca)."""

from typing import Any

from core.prompts.conversation import Conversation


def convert(row: dict[str, Any]) -> Conversation:
    for key in ("problem", "instruction"):
        text = row.get(key)
        if isinstance(text, str) and text.strip():
            return Conversation([{"role": "user", "content": text}])
    raise ValueError('neither "problem" nor "instruction" has text; remove the row')
