"""Properties of rebuilding that hold for any text, on the embedded vocabulary.

Parsing undoes rendering, canonical ids come back from their text, and what is called consistent
decodes to the reply's own text: two different completions can then not share ids.
"""

import json
from functools import cache
from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from core.reconstruct.completion import draft_from_ids, walk
from core.render.tokenizer import NAMED_OFFSETS
from core.schema import TRAINABLE
from tests.core.reconstruct.replies import call, chat_body, embedded, judged, prompt_of

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


@settings(max_examples=100, deadline=None)
@given(CLEAN, CLEAN, CALLS, st.booleans())
def test_parsing_undoes_building(
    reasoning: str, content: str, calls: list[dict[str, Any]], thinking: bool
) -> None:
    assume(content or calls)
    reasoning = reasoning if thinking else ""
    body = chat_body(content, reasoning, calls or None)
    text = whole_text(reasoning, content, calls, thinking)
    canonical = embedded().tokenizer.encode_special(text)
    sample = judged(body, len(canonical), prompt_of(thinking=thinking))
    assert (sample.verdict, sample.completion_ids) == ("consistent", canonical)

    grammar = embedded().grammar
    assert grammar is not None
    draft = draft_from_ids(sample.completion_ids, embedded().tokenizer)
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


@settings(max_examples=100, deadline=None)
@given(CLEAN, CLEAN, CALLS)
def test_raw_and_structured_replies_are_twins(
    reasoning: str, content: str, calls: list[dict[str, Any]]
) -> None:
    assume(calls)
    raw = whole_text("", content, calls, thinking=False).removesuffix("<|im_end|>")
    structured = judged(chat_body(content, reasoning, calls))
    unparsed = judged(chat_body(raw, reasoning))
    assert structured.completion_ids == unparsed.completion_ids
    assert structured.segments == unparsed.segments


@cache
def whole_ids() -> list[int]:
    """Ids that are whole characters by themselves and no part of a marker."""
    tokenizer = embedded().tokenizer
    texts = {i: tokenizer.decode([i]) for i in range(min(tokenizer.specials.values()))}
    return [i for i, text in texts.items() if not set("<[\ufffd") & set(text)]


SAMPLED = st.lists(st.integers(0, len(whole_ids()) - 1), max_size=40)


@settings(max_examples=200, deadline=None)
@given(SAMPLED, SAMPLED.filter(bool))
def test_canonical_ids_come_back_from_their_text(a: list[int], b: list[int]) -> None:
    """Any ids are decoded; the canonical ids of that text are what the rebuild gives, unless the
    text looks as if spaces had been put round its markers."""
    tokenizer, table = embedded().tokenizer, whole_ids()
    first, second = (tokenizer.decode([table[i] for i in part]) for part in (a, b))
    assume(not (first.endswith(" ") and second.startswith(" ")))
    ids = tokenizer.encode_special(f"{first}</think>{second}<|im_end|>")
    sample = judged(chat_body(second, first), len(ids))
    assert (sample.verdict, sample.completion_ids) == ("consistent", ids)


@settings(max_examples=200, deadline=None)
@given(
    ANYTHING, ANYTHING, st.none() | st.lists(st.tuples(ANYTHING, ANYTHING, ANYTHING), max_size=2)
)
def test_consistent_means_the_reply_s_own_text(
    reasoning: str, content: str, told: list[tuple[str, str, str]] | None
) -> None:
    """Any reply gets a verdict, and an admitted one decodes to exactly what its fields say."""
    calls = [call(n, a, i, id=c) for i, (c, n, a) in enumerate(told)] if told else None
    body = chat_body(content, reasoning, calls)
    sample = judged(body)
    if sample.rebuilt_tokens is None:
        return
    for billed in (sample.rebuilt_tokens, sample.rebuilt_tokens - 1):
        again = judged(body, billed)
        if again.verdict not in TRAINABLE:
            continue
        unsplit = "</think>" in content and not reasoning
        text = whole_text(reasoning, content, calls or [], thinking=not unsplit)
        assert embedded().tokenizer.decode(again.completion_ids) == text


@settings(max_examples=200, deadline=None)
@given(ANYTHING, st.booleans())
def test_no_text_makes_structure(content: str, thinking: bool) -> None:
    """Special ids in a rebuilt completion are the grammar's own, in the grammar's order."""
    sample = judged(
        chat_body(content, "r" if thinking else None), None, prompt_of(thinking=thinking)
    )
    tokenizer = embedded().tokenizer
    structural = {s.start for s in sample.segments if s.kind in ("marker", "end")}
    special = {i for i, t in enumerate(sample.completion_ids) if tokenizer.is_special(t)}
    assert structural == special
