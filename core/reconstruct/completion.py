"""A completion as markers and text in order: read from a reply's fields or from ids, then walked.

The walk checks the grammar `reasoning </think> text* (SB (B id A json E)+ SE)? end`, gives every
piece its kind and finds the calls. Text pieces are encoded whole, markers by number.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from core.reconstruct.reply import Reply
from core.render.base import Grammar
from core.render.tokenizer import TokenizerLike
from core.schema import Segment, ToolCall

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
SECTION_BEGIN = "<|tool_calls_section_begin|>"
TOOL_MARKERS = (
    SECTION_BEGIN,
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
_TOOL_MARKER = re.compile("(" + "|".join(map(re.escape, TOOL_MARKERS)) + ")")


class Item(NamedTuple):
    """A marker by its spelling, or a run of text. `ids` only where a server gave them."""

    marker: bool
    text: str
    ids: list[int] | None = None


class Draft(msgspec.Struct, kw_only=True):
    """A completion before it is encoded."""

    items: list[Item]
    flags: list[str] = []
    problems: list[str] = []


class Walked(msgspec.Struct, kw_only=True):
    """One kind per item; `state` is where the walk stopped."""

    kinds: list[str]
    calls: list[ToolCall]
    problems: list[str]
    flags: list[str]
    state: str


def has_tool_markers(text: str) -> bool:
    return "<|tool_call" in text and _TOOL_MARKER.search(text) is not None


def draft_from_fields(
    reply: Reply, grammar: Grammar, thinking: bool, close_thinking: bool = True
) -> Draft:
    """Put a text reply together again, byte for byte as its fields say.

    `close_thinking` False: the hypothesis that the model went on without `</think>`.
    """
    draft = Draft(items=[])
    content = reply.content
    truncated = reply.finish == "length"
    if thinking and grammar.think_close is not None:
        content = _add_reasoning(draft, reply, grammar, close_thinking)
    elif reply.reasoning:
        draft.items.append(Item(False, reply.reasoning))
    raw = has_tool_markers(content)
    draft.items += _split(content) if raw else [Item(False, content)]
    if raw:
        draft.flags.append("tool_section_in_content")
        if reply.finish == "stop":
            draft.flags.append("finish_reason_normalised")
    if reply.calls and raw:
        _compare_calls(draft, reply)
    elif reply.calls:
        draft.items += _call_items(reply.calls)
    if not truncated:
        draft.items.append(Item(True, "<|im_end|>"))
    draft.items = [i for i in draft.items if i.marker or i.text]
    return draft


def _add_reasoning(draft: Draft, reply: Reply, grammar: Grammar, close_thinking: bool) -> str:
    """Append the thinking; returns the content that is left."""
    reasoning, content = reply.reasoning, reply.content
    if not grammar.prompt_opens_think:
        draft.items.append(Item(True, THINK_OPEN))
    if not reasoning and THINK_CLOSE in content:
        reasoning, content = content.split(THINK_CLOSE, 1)
        if not grammar.prompt_opens_think:
            reasoning = reasoning.removeprefix(THINK_OPEN)
        draft.flags.append("unsplit_reasoning")
    elif reply.finish == "length" and not content and not reply.calls:
        close_thinking = False  # the model was still thinking
    elif has_tool_markers(reasoning) and not content and not reply.calls:
        # The section began inside the thinking: nothing says that `</think>` came first.
        draft.items += _split(reasoning)
        draft.problems.append("marker_in_reasoning")
        return content
    draft.items.append(Item(False, reasoning))
    if close_thinking:
        draft.items.append(Item(True, THINK_CLOSE))
    return content


def _split(text: str) -> list[Item]:
    parts = _TOOL_MARKER.split(text)
    return [Item(i % 2 == 1, part) for i, part in enumerate(parts) if part]


def _call_items(calls: Sequence[ToolCall]) -> list[Item]:
    begin, end, call_begin, arguments_begin, call_end = TOOL_MARKERS
    items = [Item(True, begin)]
    for call in calls:
        items += [
            Item(True, call_begin),
            Item(False, call.id),
            Item(True, arguments_begin),
            Item(False, call.arguments),
            Item(True, call_end),
        ]
    return [*items, Item(True, end)]


def _compare_calls(draft: Draft, reply: Reply) -> None:
    """Both markers and structured calls: the same calls told twice, or a contradiction."""
    found = walk(draft.items, thinking=False).calls
    told = [(c.name, c.arguments) for c in reply.calls]
    if [(c.name, c.arguments) for c in found] == told:
        draft.flags.append("tool_calls_duplicated")
    else:
        draft.problems.append("tool_calls_disagree")


def draft_from_ids(ids: list[int], tokenizer: TokenizerLike) -> Draft:
    """Cut server ids at structural ids. Any other special id is a marker too, and one too many."""
    draft = Draft(items=[])
    names = {token_id: name for name, token_id in tokenizer.specials.items()}
    start = 0
    for i, token_id in enumerate(ids):
        if not tokenizer.is_special(token_id):
            continue
        if i > start:
            run = ids[start:i]
            draft.items.append(Item(False, tokenizer.decode(run), run))
        draft.items.append(Item(True, names[token_id], [token_id]))
        start = i + 1
    if start < len(ids):
        draft.items.append(Item(False, tokenizer.decode(ids[start:]), ids[start:]))
    return draft


# (state, marker) -> state. What is missing here is out of place.
_STEPS = {
    ("start", THINK_OPEN): "reasoning",
    ("reasoning", THINK_CLOSE): "content",
    ("reasoning", SECTION_BEGIN): "section",
    ("reasoning", "<|im_end|>"): "ended",
    ("content", SECTION_BEGIN): "section",
    ("content", "<|im_end|>"): "ended",
    ("section", "<|tool_call_begin|>"): "call_id",
    ("section", "<|tool_calls_section_end|>"): "after",
    ("call_id", "<|tool_call_argument_begin|>"): "arguments",
    ("arguments", "<|tool_call_end|>"): "section",
    ("after", "<|im_end|>"): "ended",
}
_KINDS = {"reasoning": "reasoning", "start": "reasoning", "call_id": "call_id"}
_KINDS["arguments"] = "arguments"


def walk(items: Sequence[Item], thinking: bool, opens_think: bool = True) -> Walked:
    """`opens_think`: the prompt ended with `<think>`, so the completion starts inside it."""
    state = ("reasoning" if opens_think else "start") if thinking else "content"
    walked = Walked(kinds=[], calls=[], problems=[], flags=[], state=state)
    call_id, arguments, calls_here = "", "", 0
    for item in items:
        if not item.marker:
            walked.kinds.append(_KINDS.get(state, "content"))
            if state == "call_id":
                call_id = item.text
            elif state == "arguments":
                arguments = item.text
            elif state in ("section", "after"):
                walked.problems.append("tool_section_noise")
            elif state == "ended":
                walked.problems.append("control_string_in_output")
            continue
        walked.kinds.append("end" if item.text == "<|im_end|>" else "marker")
        step = _STEPS.get((state, item.text))
        if step is None:
            walked.problems.append(_misplaced(item.text, thinking))
            continue
        if state == "reasoning" and step == "section":
            walked.flags.append("no_think_close")
        if step == "call_id":
            call_id, arguments = "", ""
        elif state == "arguments":
            calls_here += 1
            name = name_of(call_id)
            walked.calls.append(ToolCall(id=call_id, name=name, arguments=arguments))
        elif step == "after" and not calls_here:
            walked.problems.append("tool_section_empty")
        state = step
    walked.state = state
    return walked


def walk_plain(items: Sequence[Item], end_id: int | None) -> Walked:
    """A family whose structure is not known: specials are markers, the end token ends it."""
    kinds = ["marker" if item.marker else "content" for item in items]
    if items and items[-1].marker and items[-1].ids == [end_id]:
        kinds[-1] = "end"
    state = "ended" if kinds[-1:] == ["end"] else "content"
    return Walked(kinds=kinds, calls=[], problems=[], flags=[], state=state)


def _misplaced(marker: str, thinking: bool) -> str:
    if marker == THINK_CLOSE and not thinking:
        return "thinking_mode_mismatch"
    return "markers_unbalanced" if marker in TOOL_MARKERS else "control_string_in_output"


def name_of(call_id: str) -> str:
    """The function's name: one leading `functions.` and the trailing `:digits` off (case C19)."""
    name, colon, index = call_id.rpartition(":")
    if not colon or not index.isdecimal():
        name = call_id
    return name.removeprefix("functions.")


class Encoded(NamedTuple):
    ids: list[int]
    segments: list[Segment]


def encode(items: Sequence[Item], kinds: Sequence[str], tokenizer: TokenizerLike) -> Encoded:
    ids: list[int] = []
    segments: list[Segment] = []
    for item, kind in zip(items, kinds, strict=True):
        start = len(ids)
        if item.ids is not None:
            ids += item.ids
        elif item.marker:
            ids.append(tokenizer.specials[item.text])
        else:
            ids += tokenizer.encode_ordinary(item.text)
        if len(ids) > start:
            segments.append(Segment(kind=kind, start=start, end=len(ids)))
    return Encoded(ids, segments)
