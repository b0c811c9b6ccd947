"""Kimi's chat templates as data and one renderer: K2, K2-Thinking, K2.5, K2.6.

Promises the text that the checkpoint's template prints (null keys dropped first, as SGLang does)
and ids by structure. The 25,000-character rule is applied over the whole text, as the checkpoint
does, so that ids equal a server's. A conversation that must not be sent is refused: RenderError.
"""

import json
import re
from collections.abc import Collection
from functools import cached_property
from pathlib import Path
from typing import Literal

import msgspec

from core.errors import RenderError
from core.render.base import Grammar, RenderedPrompt, refuse_preserving
from core.render.history import native_history
from core.render.tokenizer import NAMED_OFFSETS, Tokenizer, chunk_cuts
from core.render.tools_ts import ToolBlock, declare
from core.schema import Message, Tool


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """What differs between the templates.

    `thinking`: `none`: no think tokens; `model`: the model writes `<think>` itself; `prompt`: the
    generation prompt ends with it, and thinking can be switched off.
    """

    name: str
    thinking: Literal["none", "model", "prompt"]
    tools: Literal["typescript", "json"]
    default_system: str = ""
    names: bool = True
    """Whether a message's `name` replaces the role word."""
    preserve_thinking: bool = False
    """Whether the template can keep the thinking of answered turns."""


_KIMI = "You are Kimi, an AI assistant created by Moonshot AI."
# K2, K2-Thinking: llama.cpp `models/templates/moonshotai-Kimi-K2*.jinja` (@02f4a63, @0c3c896). That
# copy of K2's prints no calls of the history; later revisions print them as here.
# K2.5: lightseekorg/smg fixture `kimi_k25/chat_template.jinja`; K2.6's differs by its switch
# preserve_thinking alone (miles `kimi_k25_fixed.jinja`; tinker-cookbook `renderers/kimi_k26.py`).
VARIANTS = {
    v.name: v
    for v in (
        Variant(
            name="kimi-k2",
            thinking="none",
            tools="json",
            default_system="You are a helpful assistant",
            names=False,
        ),
        Variant(name="kimi-k2-thinking", thinking="model", tools="json", default_system=_KIMI),
        Variant(name="kimi-k2.5", thinking="prompt", tools="typescript"),
        Variant(name="kimi-k2.6", thinking="prompt", tools="typescript", preserve_thinking=True),
    )
}
_ROLE_MARKERS = {"user": "<|im_user|>", "assistant": "<|im_assistant|>"}
_THINK = ("<think>", "</think>")
_SPECIAL_LIKE = re.compile(r"<\|[^<>|\s]{1,64}\|>|</?think>|\[[A-Z]{3}\]")


class KimiRenderer:
    """Renders for one variant; threads may share it."""

    def __init__(self, tokenizer: Tokenizer, variant: Variant) -> None:
        self.tokenizer = tokenizer
        self.rules = variant
        self.variant = variant.name
        self.end_id = tokenizer.specials["<|im_end|>"]
        self.preserves_thinking = variant.preserve_thinking

    @classmethod
    def load(cls, directory: Path, variant: Variant) -> "KimiRenderer":
        required: Collection[str] = NAMED_OFFSETS
        if variant.thinking == "none":
            required = [n for n in NAMED_OFFSETS if n not in _THINK and "media" not in n]
        return cls(Tokenizer.load(directory, required), variant)

    @cached_property
    def grammar(self) -> Grammar:
        ids = self.tokenizer.specials
        thinks = self.rules.thinking != "none"
        return Grammar(
            end=self.end_id,
            think_open=ids["<think>"] if thinks else None,
            think_close=ids["</think>"] if thinks else None,
            section_begin=ids["<|tool_calls_section_begin|>"],
            section_end=ids["<|tool_calls_section_end|>"],
            call_begin=ids["<|tool_call_begin|>"],
            arguments_begin=ids["<|tool_call_argument_begin|>"],
            call_end=ids["<|tool_call_end|>"],
            prompt_opens_think=self.rules.thinking == "prompt",
        )

    def render(
        self,
        messages: list[Message],
        tools: list[Tool] | None,
        thinking: bool,
        preserve_thinking: bool = False,
    ) -> RenderedPrompt:
        if preserve_thinking and not self.preserves_thinking:
            raise refuse_preserving(self)
        script = _Script()
        history = native_history(messages)
        block = self._declare(tools)
        if block is not None:
            script.turn("<|im_system|>", "tool_declare")
            script.text(block.text)
            script.marker("<|im_end|>")
        if self.rules.default_system and history[0]["role"] != "system":
            script.turn("<|im_system|>", "system")
            script.text(self.rules.default_system)
            script.marker("<|im_end|>")
        kept_from = 0 if preserve_thinking else _after_last_answer(history)
        for i, message in enumerate(history):
            self._message(script, message, thinking, kept=i >= kept_from)
        script.turn("<|im_assistant|>", "assistant")
        if self.rules.thinking == "prompt":
            script.marker("<think>")
            if not thinking:
                script.marker("</think>")
        return RenderedPrompt(
            text=script.full_text(),
            ids=script.ids(self.tokenizer),
            tools_mode=block.mode if block else None,
            fallback=block.fallback if block else None,
            control_strings=script.control_strings(self.tokenizer),
        )

    def _declare(self, tools: list[Tool] | None) -> ToolBlock | None:
        if not tools:
            return None
        if not isinstance(tools, list) or not all(isinstance(t, dict) for t in tools):
            raise RenderError("tools: not a list of objects", kind="tools_invalid")
        try:
            if self.rules.tools == "typescript":
                return declare(tools)
            return ToolBlock(text=json.dumps(tools, ensure_ascii=False), mode="json")
        except RecursionError as e:
            raise RenderError("tools: nested too deeply", kind="tools_invalid") from e

    def _message(self, script: "_Script", message: Message, thinking: bool, kept: bool) -> None:
        role = message["role"]
        name = message.get("name") if self.rules.names else None
        script.turn(_ROLE_MARKERS.get(role, "<|im_system|>"), name or role)
        if role == "assistant" and self.rules.thinking != "none":
            off = self.rules.thinking == "prompt" and not thinking
            script.marker("<think>")
            script.text("" if off or not kept else message.get("reasoning_content", ""))
            script.marker("</think>")
        if role == "tool":
            script.text(f"## Return of {message['tool_call_id']}\n")
        content = message.get("content", "")
        script.text(content if isinstance(content, str) else "".join(p["text"] for p in content))
        if role == "assistant" and message.get("tool_calls"):
            script.marker("<|tool_calls_section_begin|>")
            for call in message["tool_calls"]:
                arguments = call["function"]["arguments"]
                if not isinstance(arguments, str):
                    arguments = json.dumps(arguments, ensure_ascii=False)
                script.marker("<|tool_call_begin|>")
                script.text(call["id"])
                script.marker("<|tool_call_argument_begin|>")
                script.text(arguments)
                script.marker("<|tool_call_end|>")
            script.marker("<|tool_calls_section_end|>")
        script.marker("<|im_end|>")


class _Script:
    """Markers and text in order. Text between two markers is one piece, however it was added."""

    def __init__(self) -> None:
        self._parts: list[tuple[bool, str]] = []

    def marker(self, name: str) -> None:
        self._parts.append((True, name))

    def text(self, text: str) -> None:
        if self._parts and not self._parts[-1][0]:
            text = self._parts.pop()[1] + text
        self._parts.append((False, text))

    def turn(self, marker: str, role: str) -> None:
        self.marker(marker)
        self.text(role)
        self.marker("<|im_middle|>")

    def full_text(self) -> str:
        text = "".join(text for _, text in self._parts)
        try:
            text.encode()
        except UnicodeEncodeError as e:
            raise RenderError(
                f"messages: lone surrogate U+{ord(text[e.start]):04X}; no request can carry it",
                kind="lone_surrogate",
            ) from e
        return text

    def ids(self, tokenizer: Tokenizer) -> list[int]:
        cuts = chunk_cuts("".join(text for _, text in self._parts))
        ids: list[int] = []
        start = 0
        for is_marker, text in self._parts:
            end = start + len(text)
            if is_marker:
                ids.append(tokenizer.specials[text])
            else:
                inside = [c - start for c in cuts if start < c < end]
                for a, b in zip([0, *inside], [*inside, len(text)], strict=True):
                    ids += tokenizer.encode_ordinary(text[a:b])
            start = end
        return ids

    def control_strings(self, tokenizer: Tokenizer) -> list[str]:
        found = {
            match
            for is_marker, text in self._parts
            if not is_marker
            for match in _SPECIAL_LIKE.findall(text)
            if match in tokenizer.specials
        }
        return sorted(found)


def _after_last_answer(messages: list[Message]) -> int:
    """Index after the last assistant message without calls: up to there, thinking is dropped."""
    for i in range(len(messages) - 1, -1, -1):
        if messages[i]["role"] == "assistant" and not messages[i].get("tool_calls"):
            return i + 1
    return 0
