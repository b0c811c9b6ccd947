"""Checks a conversation before it is sent, and makes foreign tool-call ids native.

The template prints a tool call's id verbatim and its function's name nowhere else, so an id such as
`call_abc` hides the name from the model (case C24). Raises RenderError; its `kind` is the refusal
class. Knows messages, nothing about tokens.
"""

import json
import re
from typing import Any

from core.errors import RenderError
from core.schema import Message

ROLES = ("system", "developer", "user", "assistant", "tool")
# Ids that other APIs make up: letters, digits, `-` and `_`, without meaning for the model.
_OPAQUE = re.compile(r"[A-Za-z0-9_-]{1,64}")


def native_history(messages: list[Message]) -> list[Message]:
    """The messages as they should be sent: checked, null keys dropped, tool-call ids native.

    Opaque ids become `functions.NAME:INDEX`, INDEX counting the conversation's calls; an id that is
    neither native nor opaque is refused, since it may be what the model really wrote.
    """
    if not isinstance(messages, list):
        raise RenderError("messages: not a list", kind="messages_invalid")
    history = _History()
    sent = [history.message(m, f"messages[{i}]") for i, m in enumerate(messages)]
    if not any(m["role"] == "user" for m in sent):
        raise RenderError("messages: no user turn; there is nothing to answer", kind="no_user_turn")
    if sent[-1]["role"] == "assistant":
        raise RenderError(
            "messages: the last one is the assistant's; servers would rewrite or continue it",
            kind="last_message_assistant",
        )
    return sent


class _History:
    def __init__(self) -> None:
        self.calls = 0
        self.native: dict[str, str] = {}
        """Tool-call id as given -> as sent."""

    def message(self, message: Any, where: str) -> Message:
        if not isinstance(message, dict):
            raise RenderError(f"{where}: not an object", kind="messages_invalid")
        # SGLang drops null keys before it renders; without that, null reasoning prints `None`.
        sent = {key: value for key, value in message.items() if value is not None}
        role = sent.get("role")
        if role not in ROLES:
            raise RenderError(f"{where}: role {role!r} is not one of {ROLES}", kind="role_unknown")
        _check_texts(sent, where)
        if role == "user" and "content" not in sent:
            raise RenderError(f"{where}: a user turn without content", kind="content_missing")
        if role == "assistant" and sent.get("tool_calls"):
            sent["tool_calls"] = self._tool_calls(sent["tool_calls"], where)
        if role == "tool":
            given = sent.get("tool_call_id")
            if not isinstance(given, str) or given not in self.native:
                raise RenderError(
                    f"{where}: tool result for id {given!r}, which no call before it has",
                    kind="history_tool_result_orphan",
                )
            sent["tool_call_id"] = self.native[given]
        return sent

    def _tool_calls(self, calls: Any, where: str) -> list[dict[str, Any]]:
        if not isinstance(calls, list):
            raise RenderError(f"{where}.tool_calls: not a list", kind="messages_invalid")
        sent = []
        given_here: set[str] = set()
        for i, call in enumerate(calls):
            at = f"{where}.tool_calls[{i}]"
            function = call.get("function") if isinstance(call, dict) else None
            if not isinstance(function, dict):
                raise RenderError(f"{at}: no function", kind="messages_invalid")
            name, given = function.get("name"), call.get("id")
            if not isinstance(name, str) or not name or not isinstance(given, str):
                raise RenderError(f"{at}: no id or no function name", kind="messages_invalid")
            _check_arguments(function.get("arguments"), at)
            native = self._native_id(given, name, at)
            if given in given_here:
                raise RenderError(
                    f"{at}: id {given!r} twice in one turn", kind="history_tool_id_duplicate"
                )
            given_here.add(given)
            self.native[given] = native
            self.calls += 1
            sent.append({**call, "id": native})
        return sent

    def _native_id(self, given: str, name: str, where: str) -> str:
        prefix, _, index = given.rpartition(":")
        if prefix == f"functions.{name}" and index.isdecimal() and index.isascii():
            return given
        native = f"functions.{name}:{self.calls}"
        damaged = given == name or given.startswith("functions")
        if damaged or not _OPAQUE.fullmatch(given) or native in self.native.values():
            raise RenderError(
                f"{where}: id {given!r} is not functions.{name}:N and cannot be made so safely",
                kind="history_tool_id_nonnative",
            )
        return native


def _check_texts(message: Message, where: str) -> None:
    for key in ("name", "reasoning_content"):
        if not isinstance(message.get(key, ""), str):
            raise RenderError(f"{where}.{key}: not text", kind="content_invalid")
    content = message.get("content", "")
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise RenderError(f"{where}.content: not text or a list", kind="content_invalid")
    for part in content:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            raise RenderError(f"{where}.content: a part that is not text", kind="media_unsupported")
        if part.get("type", "text") != "text":
            raise RenderError(
                f"{where}.content: a part of type {part['type']!r}", kind="media_unsupported"
            )


def _check_arguments(arguments: Any, where: str) -> None:
    """SGLang answers 400 to arguments in the history that are not a JSON object."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        raise RenderError(
            f"{where}: arguments are not a JSON object", kind="history_tool_args_invalid"
        )
