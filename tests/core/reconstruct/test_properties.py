"""Properties of rebuilding that hold for any text, on the embedded vocabulary and on Kimi's.

Parsing undoes rendering, canonical ids come back from their text, and what is called consistent
decodes to the reply's own text: two different completions can then not share ids.
"""

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from core.reconstruct.completion import draft_from_ids, walk
from core.render.base import Renderer
from core.render.tokenizer import NAMED_OFFSETS
from core.schema import TRAINABLE
from tests.core.reconstruct.replies import call, chat_body, embedded, judged, prompt_of
from tests.kimi_files import kimi_renderer, needs_kimi

VOCABULARIES = pytest.mark.parametrize(
    "renderer_of", [embedded, pytest.param(kimi_renderer, marks=needs_kimi)]
)

CLEAN = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="<[\ufffd"), max_size=30
)
ANYTHING = st.lists(
    st.one_of(
        st.sampled_from(
            [*NAMED_OFFSETS, "<|im_", "<|tool_call_x|>", " ", "\n", "\ud83c", "\ufffd"]
        ),
        st.text(max_size=6),
    ),
    max_size=5,
).map("".join)
NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.\-]{0,12}", fullmatch=True)
OBJECTS = st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=8), max_size=3)


def arguments_of(value: dict[str, Any], compact: bool, ascii_only: bool) -> str:
    separators = (",", ":") if compact else None
    return json.dumps(value, separators=separators, ensure_ascii=ascii_only)


ARGUMENTS = st.builds(arguments_of, OBJECTS, st.booleans(), st.booleans()).filter(
    lambda text: not set("<[\ufffd") & set(text) and text.isprintable()
)
CALLS = st.lists(st.tuples(NAMES, ARGUMENTS), max_size=3).map(
    lambda pairs: [call(name, text, i) for i, (name, text) in enumerate(pairs)]
)


def whole_text(reasoning: str, content: str, calls: list[dict[str, Any]], thinking: bool) -> str:
    """The completion as its author would write it down."""
    text = f"{reasoning}</think>" if thinking else ""
    text += content
    if calls:
        text += "<|tool_calls_section_begin|>"
        for c in calls:
            text += f"<|tool_call_begin|>{c['id']}<|tool_call_argument_begin|>"
            text += f"{c['function']['arguments']}<|tool_call_end|>"
        text += "<|tool_calls_section_end|>"
    return f"{text}<|im_end|>"


@VOCABULARIES
@settings(max_examples=100, deadline=None)
@given(CLEAN, CLEAN, CALLS, st.booleans())
def test_parsing_undoes_building(
    renderer_of: Callable[[], Renderer],
    reasoning: str,
    content: str,
    calls: list[dict[str, Any]],
    thinking: bool,
) -> None:
    assume(content or calls)
    reasoning = reasoning if thinking else ""
    body = chat_body(content, reasoning, calls or None)
    text = whole_text(reasoning, content, calls, thinking)
    renderer: Renderer = renderer_of()
    canonical = renderer.tokenizer.encode_special(text)
    sample = judged(body, len(canonical), prompt_of(thinking=thinking), renderer=renderer)
    assert (sample.verdict, sample.completion_ids) == ("consistent", canonical)

    draft = draft_from_ids(sample.completion_ids, renderer.tokenizer)
    walked = walk(draft.items, thinking)
    assert walked.problems == []
    told = list(zip(draft.items, walked.kinds, strict=True))
    parsed = {k: i.text for i, k in told if k in ("reasoning", "content")}
    assert parsed.get("reasoning", "") == reasoning
    assert parsed.get("content", "") == content
    assert [(c.id, c.arguments) for c in walked.calls] == [
        (c["id"], c["function"]["arguments"]) for c in calls
    ]
    assert [c.name for c in walked.calls] == [c["function"]["name"] for c in calls]


@VOCABULARIES
@settings(max_examples=100, deadline=None)
@given(CLEAN, CLEAN, CALLS)
def test_raw_and_structured_replies_are_twins(
    renderer_of: Callable[[], Renderer], reasoning: str, content: str, calls: list[dict[str, Any]]
) -> None:
    assume(calls)
    raw = whole_text("", content, calls, thinking=False).removesuffix("<|im_end|>")
    structured = judged(chat_body(content, reasoning, calls), renderer=renderer_of())
    unparsed = judged(chat_body(raw, reasoning), renderer=renderer_of())
    assert structured.completion_ids == unparsed.completion_ids
    assert structured.segments == unparsed.segments


@cache
def whole_ids(renderer_of: Callable[[], Renderer]) -> list[int]:
    """Ids that are whole characters by themselves and no part of a marker."""
    tokenizer = renderer_of().tokenizer
    texts = {i: tokenizer.decode([i]) for i in range(min(tokenizer.specials.values()))}
    return [i for i, text in texts.items() if not set("<[\ufffd") & set(text)]


SAMPLED = st.lists(st.integers(0, 1 << 20), max_size=40)


@VOCABULARIES
@settings(max_examples=200, deadline=None)
@given(SAMPLED, SAMPLED.filter(bool))
def test_canonical_ids_come_back_from_their_text(
    renderer_of: Callable[[], Renderer], a: list[int], b: list[int]
) -> None:
    """Any ids are decoded; the canonical ids of that text are what the rebuild gives, unless the
    text looks as if spaces had been put round its markers."""
    renderer: Renderer = renderer_of()
    tokenizer, table = renderer.tokenizer, whole_ids(renderer_of)
    first, second = (tokenizer.decode([table[i % len(table)] for i in part]) for part in (a, b))
    assume(not (first.endswith(" ") and second.startswith(" ")))
    ids = tokenizer.encode_special(f"{first}</think>{second}<|im_end|>")
    sample = judged(chat_body(second, first), len(ids), renderer=renderer)
    assert (sample.verdict, sample.completion_ids) == ("consistent", ids)


@VOCABULARIES
@settings(max_examples=200, deadline=None)
@given(
    ANYTHING, ANYTHING, st.none() | st.lists(st.tuples(ANYTHING, ANYTHING, ANYTHING), max_size=2)
)
def test_consistent_means_the_reply_s_own_text(
    renderer_of: Callable[[], Renderer],
    reasoning: str,
    content: str,
    told: list[tuple[str, str, str]] | None,
) -> None:
    """Any reply gets a verdict, and an admitted one decodes to exactly what its fields say."""
    calls = [call(n, a, i, id=c) for i, (c, n, a) in enumerate(told)] if told else None
    renderer: Renderer = renderer_of()
    body = chat_body(content, reasoning, calls)
    sample = judged(body, renderer=renderer)
    if sample.rebuilt_tokens is None:
        return
    for billed in (sample.rebuilt_tokens, sample.rebuilt_tokens - 1):
        again = judged(body, billed, renderer=renderer)
        if again.verdict not in TRAINABLE:
            continue
        unsplit = "</think>" in content and not reasoning
        text = whole_text(reasoning, content, calls or [], thinking=not unsplit)
        assert renderer.tokenizer.decode(again.completion_ids) == text


@VOCABULARIES
@settings(max_examples=200, deadline=None)
@given(ANYTHING, st.booleans())
def test_no_text_makes_structure(
    renderer_of: Callable[[], Renderer], content: str, thinking: bool
) -> None:
    """Special ids in a rebuilt completion are the grammar's own, in the grammar's order."""
    renderer: Renderer = renderer_of()
    body = chat_body(content, "r" if thinking else None)
    sample = judged(body, None, prompt_of(thinking=thinking), renderer=renderer)
    tokenizer = renderer.tokenizer
    structural = {s.start for s in sample.segments if s.kind in ("marker", "end")}
    special = {i for i, t in enumerate(sample.completion_ids) if tokenizer.is_special(t)}
    assert structural == special


def edits(reasoning: str, content: str) -> list[tuple[str, str]]:
    """Other replies, and pairs of them, that a careless rebuild would take for one."""
    whole, at = reasoning + content, len(reasoning)
    tails = ["\n", "\r\n", " ", "\0", "é", "e\u0301", "ﬁ", "fi"]
    return [
        (reasoning.strip(), content.strip()),
        (reasoning, content.lstrip("\n")),
        *((reasoning + tail, content) for tail in tails),
        *((reasoning, content + tail) for tail in tails),
        *((reasoning, tail + content) for tail in tails),
        (whole[: at + 1], whole[at + 1 :]),
        (whole[: max(0, at - 1)], whole[max(0, at - 1) :]),
        (reasoning.upper(), content.replace("\ufffd", "\ud83c")),
        ("", f"{reasoning}</think>{content}"),
    ]


EDITED = st.lists(
    st.one_of(
        st.sampled_from(["\n", "\n\n", " ", "\r\n", "é", "e\u0301", "Å", "ﬁ", "\ufffd", "\0"]),
        st.text(max_size=5),
        st.sampled_from(["<|im_end|>", "</think>", "<|im_", "[EOS]", "{}"]),
    ),
    max_size=5,
).map("".join)


@VOCABULARIES
@settings(max_examples=50, deadline=None)
@given(EDITED, EDITED, CALLS)
def test_equal_ids_mean_equal_text(
    renderer_of: Callable[[], Renderer], reasoning: str, content: str, calls: list[dict[str, Any]]
) -> None:
    """Of two replies that are admitted, those with the same ids have the same text, and those with
    the same text the same ids."""
    renderer: Renderer = renderer_of()
    texts_of: dict[tuple[int, ...], str] = {}
    ids_of: dict[str, tuple[int, ...]] = {}
    for thought, answer in [(reasoning, content), *edits(reasoning, content)]:
        for told in (calls, []):
            body = chat_body(answer, thought, told or None)
            count = judged(body, renderer=renderer).rebuilt_tokens
            sample = judged(body, count, renderer=renderer)
            if sample.verdict != "consistent":
                continue
            unsplit = "</think>" in answer and not thought
            text = whole_text(thought, answer, told, thinking=not unsplit)
            ids = tuple(sample.completion_ids)
            assert texts_of.setdefault(ids, text) == text
            assert ids_of.setdefault(text, ids) == ids
