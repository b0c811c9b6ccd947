"""Named ways in which a provider may have changed a reply, each as the completion without it.

A count that fits one of them is a hint, never a proof: the verdict is `hypothesis`, and its sample
is not trained on by default (a stripped newline keeps the count in nine cases of ten).
"""

import json
import re
from collections.abc import Iterator, Sequence

import msgspec

from core.reconstruct.checks import is_foreign, is_native
from core.reconstruct.completion import (
    THINK_CLOSE,
    TOOL_MARKERS,
    Draft,
    draft_from_fields,
    has_tool_markers,
)
from core.reconstruct.reply import Reply
from core.render.base import Grammar
from core.schema import ToolCall

MAX_CHARS = 1_000_000
"""Longer replies are not searched: every hypothesis costs one more encoding."""
CALL_CHARS = 100
"""What one more call costs, in characters of text that take as long."""
_NEWLINES = ("\n\n", "\n")
_SPACED = re.compile(" (" + "|".join(map(re.escape, [*TOOL_MARKERS, THINK_CLOSE])) + ")(?= |$)")
_ANY = re.compile("|".join(map(re.escape, [*TOOL_MARKERS, THINK_CLOSE])))


def hypotheses(
    reply: Reply, grammar: Grammar, thinking: bool, prior_calls: int | None
) -> Iterator[tuple[str, Draft]]:
    """(name, completion) in the order in which they are tried.

    `prior_calls`: calls earlier in the conversation, from where Kimi's own ids go on counting.
    """
    spoken = len(reply.reasoning) + len(reply.content)
    if spoken + sum(CALL_CHARS + len(c.id) + len(c.arguments) for c in reply.calls) > MAX_CHARS:
        return
    foreign = any(is_foreign(call) for call in reply.calls)
    if foreign or not in_sequence(reply.calls, prior_calls):
        changed = _renumbered(reply, prior_calls or 0)
        yield "renumbered_id", draft_from_fields(changed, grammar, thinking)
    if foreign:
        return
    for changed in _newlines(reply):
        yield "trimmed_newline", draft_from_fields(changed, grammar, thinking)
    if thinking:
        yield (
            "no_think_close",
            draft_from_fields(reply, grammar, thinking, close_thinking=False),
        )
    yield "spaced_markers", draft_from_fields(_despaced(reply), grammar, thinking)
    for changed in _rewritten_arguments(reply):
        yield "compact_arguments", draft_from_fields(changed, grammar, thinking)
    for changed in _spaces(reply):
        yield "trimmed_space", draft_from_fields(changed, grammar, thinking)


def is_spaced(reply: Reply) -> bool:
    """Whether every marker in the text stands between spaces, as slow detokenizers print them, or,
    where all were parsed away, left its spaces at the edges of the fields."""
    reasoning, content = reply.reasoning, reply.content
    count = len(_ANY.findall(content)) if has_tool_markers(content) or THINK_CLOSE in content else 0
    if count:
        return len(_SPACED.findall(f" {content}")) == count
    edges = [reasoning.endswith(" ")] if reasoning else []
    if reasoning and content:
        edges.append(content.startswith(" "))
    if reply.calls and content:
        edges.append(content.endswith(" "))
    return bool(edges) and all(edges)


def in_sequence(calls: Sequence[ToolCall], prior_calls: int | None) -> bool:
    """Whether ids of parsed calls count on from the conversation's earlier ones, as Kimi's do.
    Ids of another form are not judged here, nor any where the conversation is not known."""
    if prior_calls is None:
        return True
    return all(
        call.id.endswith(f":{n}") for n, call in enumerate(calls, prior_calls) if is_native(call.id)
    )


def _with(reply: Reply, **fields: object) -> Reply:
    return msgspec.structs.replace(reply, **fields)


def _newlines(reply: Reply) -> Iterator[Reply]:
    for newline in _NEWLINES:
        if reply.content and not reply.content.startswith("\n"):
            yield _with(reply, content=newline + reply.content)
    for newline in _NEWLINES:
        if reply.content and not reply.content.endswith("\n"):
            yield _with(reply, content=reply.content + newline)
        if reply.reasoning and not reply.reasoning.endswith("\n"):
            yield _with(reply, reasoning=reply.reasoning + newline)


def _spaces(reply: Reply) -> Iterator[Reply]:
    if reply.reasoning and not reply.reasoning[0].isspace():
        yield _with(reply, reasoning=" " + reply.reasoning)
    if reply.reasoning and not reply.reasoning[-1].isspace():
        yield _with(reply, reasoning=reply.reasoning + " ")
    if reply.content and not reply.content[0].isspace():
        yield _with(reply, content=" " + reply.content)
    if reply.content and not reply.content[-1].isspace():
        yield _with(reply, content=reply.content + " ")


def _despaced(reply: Reply) -> Reply:
    content = re.sub(f" ?({_ANY.pattern}) ?", r"\1", reply.content)
    if reply.reasoning:
        content = content.removeprefix(" ")
    return _with(
        reply,
        reasoning=reply.reasoning.removesuffix(" "),
        content=content.removesuffix(" "),
        calls=[
            ToolCall(
                id=c.id.strip(" "),
                name=c.name,
                arguments=c.arguments.removeprefix(" ").removesuffix(" "),
            )
            for c in reply.calls
        ],
    )


def _renumbered(reply: Reply, prior_calls: int) -> Reply:
    calls = [
        msgspec.structs.replace(c, id=f"functions.{c.name}:{n}")
        if is_foreign(c) or is_native(c.id)
        else c
        for n, c in enumerate(reply.calls, prior_calls)
    ]
    return _with(reply, calls=calls)


def _rewritten_arguments(reply: Reply) -> Iterator[Reply]:
    """The JSON styles that models and servers write; the sampled one is none of ours to choose."""
    try:
        values = [json.loads(c.arguments) for c in reply.calls]
    except (ValueError, RecursionError):
        return
    tried = {tuple(c.arguments for c in reply.calls)}
    for separators in ((",", ":"), (", ", ": "), (", ", ":"), (",", ": ")):
        for ascii_only in (False, True):
            texts = tuple(
                json.dumps(v, separators=separators, ensure_ascii=ascii_only) for v in values
            )
            if texts in tried:
                continue
            tried.add(texts)
            yield _with(
                reply,
                calls=[
                    msgspec.structs.replace(c, arguments=t)
                    for c, t in zip(reply.calls, texts, strict=True)
                ],
            )
