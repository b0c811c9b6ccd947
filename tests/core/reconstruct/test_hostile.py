"""Any reply gets a Sample: arbitrary JSON in every field, arbitrary events, other variants."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.reconstruct import StopOffsets, judge
from core.reconstruct.classes import ORDER
from core.render.base import load_renderer
from core.schema import Usage
from tests.core.reconstruct.replies import (
    call,
    chat_body,
    embedded,
    judged,
    prompt_of,
    rollout_of,
    sse,
    true_count,
)
from tests.core.render.test_template import directory

__all__ = ["directory"]

FROM_BACKENDS = {"bad_request", "key_refused", "server_error", "payment_required", "moderated"}
FROM_BACKENDS |= {"not_served", "gateway_timeout", "provider_unavailable"}
KEYS = ["choices", "message", "delta", "content", "reasoning", "reasoning_details", "tool_calls"]
KEYS += ["function", "name", "arguments", "id", "index", "finish_reason", "native_finish_reason"]
KEYS += ["usage", "prompt_tokens", "completion_tokens", "completion_tokens_details", "error"]
KEYS += ["code", "output_ids", "meta_info", "text", "type", "token_ids", "prompt_token_ids"]
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 2**70),
    st.floats(),
    st.sampled_from(["stop", "tool_calls", "length", "reasoning.text", "functions.f:0", "{}", ""]),
    st.text(max_size=5),
)
JSON: st.SearchStrategy[Any] = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(KEYS), inner, max_size=5)
    ),
    max_leaves=25,
)
TOP = st.dictionaries(st.sampled_from(KEYS), JSON, max_size=6)
CHOICES = st.builds(
    lambda message, finish, top: {
        **top,
        "choices": [{"message": message, "delta": message, "finish_reason": finish}],
    },
    st.dictionaries(st.sampled_from(KEYS), JSON, max_size=5),
    LEAVES,
    TOP,
)


@settings(max_examples=150, deadline=None)
@given(st.one_of(TOP, CHOICES))
def test_any_body_gets_a_sample(body: dict[str, Any]) -> None:
    for sample in (judged(body), judged(sse(body, body))):
        if sample.verdict == "rejected":
            assert sample.error_class in ORDER or sample.error_class in FROM_BACKENDS
        elif sample.verdict == "consistent":
            assert sample.billed_tokens is not None and sample.rebuilt_tokens is not None
            assert sample.billed_tokens - sample.rebuilt_tokens in (0, -1)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=60), st.sampled_from(["json", "sse"]), st.sampled_from([200, 429, 500]))
def test_any_bytes_get_a_class(raw: str, kind: str, status: int) -> None:
    sample = judged({}, reply_kind=kind, reply_raw=raw, status=status)
    assert sample.verdict == "rejected"
    assert sample.error_class


def variant_sample(variant: str, body: dict[str, Any], billed: int | None) -> Any:
    rollout = rollout_of(body, usage=Usage(completion_tokens=billed))
    return judge(rollout, prompt_of(), embedded(variant), StopOffsets())


def test_k2_thinking_writes_the_opening_tag_itself() -> None:
    decode = embedded().tokenizer.decode
    whole = "<think> r</think>4<|im_end|>"
    for body in (chat_body("4", " r"), chat_body("<think> r</think>4")):
        n = variant_sample("kimi-k2-thinking", body, None).rebuilt_tokens
        sample = variant_sample("kimi-k2-thinking", body, n)
        assert (sample.verdict, decode(sample.completion_ids)) == ("consistent", whole)
    ids = embedded().tokenizer.encode_special(whole)
    body = {"output_ids": ids, "meta_info": {"finish_reason": {"type": "stop"}}}
    assert variant_sample("kimi-k2-thinking", body, None).verdict == "exact"
    assert variant_sample("kimi-k2.5", body, None).error_class == "control_string_in_output"


def test_k2_does_not_think() -> None:
    body = chat_body("4", None, [call()])
    sample = variant_sample("kimi-k2", body, None)
    text = embedded().tokenizer.decode(sample.completion_ids)
    assert text.startswith("4<|tool_calls_section_begin|>")


def test_unknown_grammar_proves_only_bare_answers(directory: Path) -> None:
    renderer = load_renderer(directory, "template")

    def of(body: dict[str, Any], billed: int | None) -> Any:
        rollout = rollout_of(body, usage=Usage(completion_tokens=billed))
        return judge(rollout, prompt_of(), renderer, StopOffsets())

    n = of(chat_body("hello world"), None).rebuilt_tokens
    sample = of(chat_body("hello world"), n)
    assert sample.verdict == "consistent"
    assert sample.completion_ids[-1] == renderer.end_id
    assert of(chat_body("hello world"), n + 3).verdict == "mismatch"
    assert of(chat_body("hello", " r"), 5).verdict == "unverifiable"
    assert of(chat_body("", calls=[call()]), 5).flags == ["no_grammar"]
    ids = [*renderer.tokenizer.encode_ordinary("hello world"), renderer.end_id]
    body = {"output_ids": ids, "meta_info": {"finish_reason": {"type": "stop"}}}
    exact = of({**body, "text": "hello world"}, len(ids))
    assert exact.verdict == "exact" and exact.segments == sample.segments
    cut = {"output_ids": ids[:-1], "meta_info": {"finish_reason": {"type": "length"}}}
    assert [s.kind for s in of(cut, len(ids) - 1).segments] == ["content"]
    assert of({**body, "text": "hello mars"}, len(ids)).error_class == "ids_text_mismatch"


@pytest.mark.parametrize("spelling", ["stop", "STOP", "eos", "end_turn"])
def test_finish_spellings(spelling: str) -> None:
    body = chat_body("4", " r", finish=spelling)
    assert judged(body, true_count(body)).verdict == "consistent"


def test_raw_bytes_that_were_not_utf8() -> None:
    raw = json.dumps(chat_body("caf\udce9", " r"), ensure_ascii=False)
    assert judged({}, reply_raw=raw).error_class == "lone_surrogate"
    stream = sse(chat_body("x")).replace('"x"', '"caf\udce9"')
    assert judged({}, reply_kind="sse", reply_raw=stream).error_class == "lone_surrogate"
