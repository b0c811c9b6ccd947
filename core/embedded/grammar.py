"""Kimi's completion grammar: an example becomes ids, sampled ids become a reply or nothing.

    completion = [reasoning `</think>`] content [`SB` (`B` id `A` arguments `E`)+ `SE`] `<|im_end|>`

The first bracket stands exactly when thinking. The corpus is written with it and the model is
scored with it: it repairs nothing and knows nothing about servers. No torch.
"""

import json
import re
from collections.abc import Sequence

from core.embedded.corpus import Example
from core.render.base import Renderer, tools_as_text
from core.render.tokenizer import TokenizerLike
from core.schema import Record, ToolCall

_CALL_ID = re.compile(r"functions\.([\w.\-]+):(\d+)")


class Reply(Record, frozen=True, kw_only=True):
    reasoning: str
    content: str
    tool_calls: list[ToolCall]


def prompt_ids(example: Example, renderer: Renderer, as_text: bool = False) -> list[int]:
    """Ids up to the generation prompt; `as_text`: the tools stand in the system message."""
    messages, tools = example.messages, example.tools
    if as_text and tools:
        messages, tools = tools_as_text(messages, tools), None
    return renderer.render(messages, tools, example.thinking).ids


def completion_ids(example: Example, tokenizer: TokenizerLike) -> list[int]:
    """Texts as ordinary text, markers by number, `<|im_end|>` last."""
    marker, text = tokenizer.specials, tokenizer.encode_ordinary
    ids: list[int] = []
    if example.thinking:
        ids += [*text(example.reasoning), marker["</think>"]]
    ids += text(example.content)
    if example.tool_calls:
        ids.append(marker["<|tool_calls_section_begin|>"])
        for call in example.tool_calls:
            ids += [marker["<|tool_call_begin|>"], *text(call.id)]
            ids += [marker["<|tool_call_argument_begin|>"], *text(call.arguments)]
            ids.append(marker["<|tool_call_end|>"])
        ids.append(marker["<|tool_calls_section_end|>"])
    return [*ids, marker["<|im_end|>"]]


def read_completion(
    ids: Sequence[int], thinking: bool, first_index: int, tokenizer: TokenizerLike
) -> Reply | None:
    """The reply, or None where the ids are no completion of the grammar.

    Strict about everything a server's parser needs: marker order, nothing after the section, valid
    UTF-8, `functions.NAME:IDX` with IDX counting on from `first_index`, arguments a JSON object.
    """
    reader = _Reader(ids, tokenizer)
    reasoning = reader.text() if thinking else ""
    if thinking and not reader.take("</think>"):
        return None
    content = reader.text()
    calls: list[ToolCall] = []
    if reader.take("<|tool_calls_section_begin|>"):
        while reader.take("<|tool_call_begin|>"):
            call = _read_call(reader, first_index + len(calls))
            if call is None:
                return None
            calls.append(call)
        if not calls or not reader.take("<|tool_calls_section_end|>"):
            return None
    if not reader.take("<|im_end|>") or not reader.at_end or reader.broken:
        return None
    return Reply(reasoning=reasoning, content=content, tool_calls=calls)


def _read_call(reader: "_Reader", index: int) -> ToolCall | None:
    call_id = reader.text()
    match = _CALL_ID.fullmatch(call_id)
    if match is None or int(match[2]) != index or not reader.take("<|tool_call_argument_begin|>"):
        return None
    arguments = reader.text()
    try:
        is_object = isinstance(json.loads(arguments), dict)
    except ValueError:
        return None
    if not is_object or not reader.take("<|tool_call_end|>"):
        return None
    return ToolCall(id=call_id, name=match[1], arguments=arguments)


class _Reader:
    """A cursor over ids. `broken` is set once a text was not valid UTF-8."""

    def __init__(self, ids: Sequence[int], tokenizer: TokenizerLike) -> None:
        self._ids, self._tokenizer, self._at = ids, tokenizer, 0
        self.broken = False

    @property
    def at_end(self) -> bool:
        return self._at == len(self._ids)

    def take(self, name: str) -> bool:
        """Step over this marker if it comes next."""
        if self.at_end or self._ids[self._at] != self._tokenizer.specials[name]:
            return False
        self._at += 1
        return True

    def text(self) -> str:
        """Ordinary tokens up to the next special one."""
        start = self._at
        while not self.at_end and not self._tokenizer.is_special(self._ids[self._at]):
            self._at += 1
        try:
            return self._tokenizer.decode_bytes(self._ids[start : self._at]).decode()
        except UnicodeDecodeError:
            self.broken = True
            return ""
