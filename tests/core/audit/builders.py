"""Samples and prompts for the audit's tests, over a tokenizer of one id per byte."""

import itertools
from collections.abc import Sequence
from typing import Any, ClassVar

from core.audit.reading import Reader, Toolboxes, asked
from core.audit.rules import Case
from core.audit.traits import Trait
from core.render.base import Grammar
from core.schema import Prompt, Sample, Segment, ToolCall

SPECIALS = {
    "<|im_end|>": 258,
    "<|im_middle|>": 273,
    "<|tool_calls_section_begin|>": 267,
    "<|tool_calls_section_end|>": 268,
    "<|tool_call_begin|>": 269,
    "<|tool_call_argument_begin|>": 270,
    "<|tool_call_end|>": 271,
    "<think>": 278,
    "</think>": 279,
}
END, CLOSE = SPECIALS["<|im_end|>"], SPECIALS["</think>"]


class ByteTokenizer:
    """ids 0..255 are bytes, specials above."""

    vocab_size = 512
    specials = SPECIALS
    sha256 = "bytes"
    hashes: ClassVar[dict[str, str]] = {}

    def encode_ordinary(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_special(self, text: str) -> list[int]:
        raise NotImplementedError

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        return bytes(i for i in ids if i < 256)

    def decode(self, ids: Sequence[int]) -> str:
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])

    def is_special(self, token_id: int) -> bool:
        return token_id >= 256


class ByteRenderer:
    tokenizer = ByteTokenizer()
    variant = "kimi-k2.5"
    end_id = END
    preserves_thinking = False
    grammar = Grammar(
        end=END,
        think_open=278,
        think_close=CLOSE,
        section_begin=267,
        section_end=268,
        call_begin=269,
        arguments_begin=270,
        call_end=271,
        prompt_opens_think=True,
    )

    def render(
        self, messages: Any, tools: Any, thinking: bool, preserve_thinking: bool = False
    ) -> Any:
        raise NotImplementedError


RENDERER = ByteRenderer()
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def call(
    arguments: str = '{"city":"Oslo"}', name: str = "get_weather", index: int = 0, id: str = ""
) -> ToolCall:
    return ToolCall(id=id or f"functions.{name}:{index}", name=name, arguments=arguments)


def prompt(
    tools: list[dict[str, Any]] | None = None, text: str = "Weather in Oslo?", **fields: Any
) -> Prompt:
    values: dict[str, Any] = {"prompt_id": "p", "twin_id": "t", "dataset": "b1", **fields}
    values.setdefault("messages", [{"role": "user", "content": text}])
    return Prompt(tools=tools, **values)


def sample(
    reasoning: str | None = " Look it up.",
    content: str = "Fine.",
    calls: Sequence[ToolCall] = (),
    close: int = 1,
    end: bool = True,
    relative: bool = False,
    **fields: Any,
) -> Sample:
    """A completion by structure: reasoning, </think>, content, calls, end. Prompt: ten zeros."""
    head = [0] * 10
    ids: list[int] = []
    segments: list[Segment] = []
    base = 0 if relative else len(head)

    def put(kind: str, part: list[int]) -> None:
        segments.append(Segment(kind=kind, start=base + len(ids), end=base + len(ids) + len(part)))
        ids.extend(part)

    if reasoning is not None:
        put("reasoning", list(reasoning.encode()))
    if close and reasoning is not None:
        put("marker", [CLOSE] * close)
    if content:
        put("content", list(content.encode()))
    if calls:
        put("marker", [267])
        for one in calls:
            put("marker", [269])
            put("call_id", list(one.id.encode()))
            put("marker", [270])
            put("arguments", list(one.arguments.encode("utf-8", "surrogatepass")))
            put("marker", [271])
        put("marker", [268])
    if end:
        put("end", [END])
    values: dict[str, Any] = {
        "sample_id": "s",
        "prompt_id": "p",
        "twin_id": "t",
        "dataset": "b1",
        "arm": "declared",
        "backend": "openrouter",
        "provider": "Alpha",
        "verdict": "consistent",
        "habits": {
            f"{kind}_starts_blank": text[0].isspace()
            for kind, text in (("reasoning", reasoning), ("content", content))
            if text
        },
        "finish_reason": "tool_calls" if calls else "stop",
        "token_ids": head + ids,
        "prompt_len": len(head),
        "segments": segments,
        "calls": list(calls),
        "rebuilt_tokens": len(ids),
        "billed_tokens": len(ids),
        "prompt_tokens_billed": len(head),
        **fields,
    }
    return Sample(**values)


_number = itertools.count()


def trait(twin: str, arm: str = "declared", provider: str = "Alpha", **fields: Any) -> Trait:
    """A trainable trait with tools that did not call, unless told otherwise."""
    values: dict[str, Any] = {
        "sample_id": f"{arm}-{provider}-{twin}-{next(_number):06d}",
        "twin_id": twin,
        "dataset": "b1",
        "arm": arm,
        "provider": "sglang" if arm == "local" else provider,
        "has_tools": True,
        "behaves": True,
        "triggered": bool(fields.get("calls")),
        "tokens": 10,
        "finish": "tool_calls" if fields.get("calls") else "stop",
        "trainable": True,
        "verdict": "exact" if arm == "local" else "consistent",
        **fields,
    }
    return Trait(**values)


def case_of(one: Sample, given: Prompt) -> Case:
    """A sample beside its prompt, as the rules look at it."""
    return Case(one, asked(given, Toolboxes()), Reader(RENDERER).read(one))
