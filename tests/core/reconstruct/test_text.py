"""Text replies: shapes, classes in their order, hypotheses, hostile input."""

import json
from typing import Any

import pytest

from core.reconstruct import StopOffsets, checks
from core.reconstruct.classes import ORDER, first_class
from core.reconstruct.completion import Item
from tests.core.reconstruct.replies import (
    call,
    chat_body,
    delta,
    embedded,
    judged,
    prompt_of,
    sse,
    true_count,
)
from tests.kimi_files import kimi_renderer, needs_kimi, rebuild_one

SB, SE = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CB, CA, CE = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
ONE = f"{SB}{CB}functions.f:0{CA}{{}}{CE}{SE}"


def decoded(sample: Any) -> str:
    return embedded().tokenizer.decode(sample.completion_ids)


# ------------------------------------------------------------------ shapes


def test_stream_equals_body() -> None:
    body = chat_body("Hi wörld", " Let me", [call("f", '{"a": 1}'), call("g", "{}", 1)])
    stream = sse(
        delta(role="assistant", content="", reasoning=" Let"),
        delta(reasoning=" me", reasoning_details=[{"type": "reasoning.text", "text": " Let"}]),
        delta(reasoning_details=[{"type": "reasoning.text", "text": " me"}]),
        delta(content="Hi w"),
        delta(content="örld"),
        delta(tool_calls=[call("f", "", 0)]),
        delta(tool_calls=[{"index": 0, "function": {"arguments": '{"a"'}}]),
        delta(tool_calls=[call("g", "{}", 1)]),
        delta(tool_calls=[{"index": 0, "function": {"arguments": ": 1}"}}]),
        delta("tool_calls"),
        {"choices": [], "usage": {"prompt_tokens": 0, "completion_tokens": 99}},
    )
    assert decoded(judged(stream)) == decoded(judged(body))
    assert judged(stream, true_count(body)).verdict == "consistent"
    assert judged(stream).billed_tokens == 99


def test_stream_with_crlf_and_several_data_lines() -> None:
    event = json.dumps(delta("stop", content="ok"), indent=1)
    stream = "".join(f"data: {line}\r\n" for line in event.split("\n")) + "\r\ndata: [DONE]"
    assert decoded(judged(stream)) == "</think>ok<|im_end|>"


def test_calls_that_all_have_index_zero_stay_apart() -> None:
    stream = sse(
        delta(tool_calls=[call("f", "{}", 0, id="functions.f:0")]),
        delta("tool_calls", tool_calls=[call("g", "{}", 0, id="functions.g:1")]),
    )
    assert [c.id for c in judged(stream).calls] == ["functions.f:0", "functions.g:1"]


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        (sse(delta(content="half"), done=False), "stream_incomplete"),
        (sse(delta(content="half")) + 'data: {"choi', "finish_missing"),
        (sse(delta(content="x"), done=False) + "data: {broken\n\n", "stream_incomplete"),
        (sse(delta("stop", content="x"), done=False) + 'data: {"id"', "stream_incomplete"),
        (sse(), "empty_choices"),
        ("", "stream_incomplete"),
        (sse({"error": {"code": 429, "message": "m"}}), "rate_limited"),
        (
            sse(delta(content="x"), {"error": {"code": 502}, "choices": []}, done=False),
            "upstream_error_midstream",
        ),
        (sse(delta("error", content="x")), "upstream_error_midstream"),
        (sse(delta("content_filter", content="x")), "content_filtered"),
        (sse(delta("banana", content="x")), "finish_unknown"),
    ],
)
def test_broken_streams(stream: str, expected: str) -> None:
    sample = judged(stream)
    assert (sample.verdict, sample.error_class) == ("rejected", expected)


def test_finished_stream_without_done_counts_as_whole() -> None:
    assert judged(sse(delta("stop", content="ok"), done=False)).verdict == "unverifiable"


def test_generate_stream_cumulative_and_incremental() -> None:
    ids = embedded().tokenizer.encode_special(" ok.</think>4<|im_end|>")

    def event(part: list[int], finish: Any) -> dict[str, Any]:
        meta = {"finish_reason": finish, "completion_tokens": len(ids) if finish else None}
        return {"output_ids": part, "meta_info": meta}

    cumulative = sse(event(ids[:2], None), event(ids, {"type": "stop"}))
    incremental = sse(event(ids[:2], None), event(ids[2:], {"type": "stop"}))
    for stream in (cumulative, incremental):
        sample = judged(stream)
        assert (sample.verdict, sample.completion_ids) == ("exact", ids)


def test_content_in_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert decoded(judged(chat_body(parts))) == "</think>ab<|im_end|>"


@pytest.mark.parametrize(
    "body",
    [
        chat_body(5),
        chat_body("x", reasoning={"a": 1}),
        {"choices": [{"finish_reason": "stop", "message": "text"}]},
        {"choices": ["x"]},
        chat_body("x", calls=[{"id": 1, "function": {"name": "f", "arguments": "{}"}}]),
        chat_body("x", calls=["x"]),
        {"output_ids": ["1"], "meta_info": {}},
        {"output_ids": 5},
    ],
)
def test_fields_of_the_wrong_type(body: Any) -> None:
    assert judged(body).error_class == "reply_malformed"


def test_deep_bodies_do_not_crash() -> None:
    raw = '{"choices": ' + "[" * 100_000
    assert judged({}, reply_raw=raw).error_class in ("body_too_deep", "body_truncated")
    whole = '{"choices": ' + "[" * 10_000 + "]" * 10_000 + "}"
    assert judged({}, reply_raw=whole).error_class == "body_too_deep"


def test_no_reply_keeps_the_class_of_the_transport() -> None:
    sample = judged({}, reply_kind="none", reply_raw=None, error_class="connection_lost")
    assert (sample.verdict, sample.error_class) == ("rejected", "connection_lost")


def test_http_errors() -> None:
    body = {"error": {"code": 429, "message": "slow"}}
    assert judged(body, status=429).error_class == "rate_limited"


# ------------------------------------------------------------------ classes


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (chat_body("a\ud83c"), "lone_surrogate"),
        (chat_body("a\ufffd"), "replacement_char"),
        (chat_body("see <|tool_call_start|> there"), "unknown_marker"),
        (chat_body("I look.<|tool_calls_sec"), "marker_fragment"),
        (chat_body("I look.<|im_e", " r"), "marker_fragment"),
        (chat_body("x", " think</thi"), "marker_fragment"),
        (chat_body(f"x{SE}"), "markers_unbalanced"),
        (chat_body(f"x{CB}functions.f:0{CA}{{}}{CE}"), "markers_unbalanced"),
        (chat_body(f"{ONE}{ONE}"), "markers_unbalanced"),
        (chat_body(f"{SB}{CB}functions.f:0{CA}{{}}"), "tool_section_unterminated"),
        (chat_body("x", f" r{ONE}"), "marker_in_reasoning"),
        (chat_body("", f" r{ONE}"), "marker_in_reasoning"),
        (chat_body("the end <|im_end|>"), "control_string_in_output"),
        (chat_body("x<think>y"), "control_string_in_output"),
        (chat_body("x</think>y", " r"), "control_string_in_output"),
        (chat_body("", " r", [call(arguments=f'{{"a": "{CE}"}}')]), "control_string_in_output"),
        (chat_body(f"{SB}{SE}"), "tool_section_empty"),
        (chat_body(f"{SB}x{CB}functions.f:0{CA}{{}}{CE}{SE}"), "tool_section_noise"),
        (chat_body(f"{SB}{CB}functions.f:0{CA}{{}}{CE}\n{SE}"), "tool_section_noise"),
        (chat_body(f"{ONE} Done."), "tool_section_noise"),
        (chat_body(f"{SB}{CB}f:0{CA}{{}}{CE}{SE}"), "tool_id_malformed"),
        (chat_body(f"{SB}{CB}call_9{CA}{{}}{CE}{SE}"), "tool_id_malformed"),
        (chat_body("", " r", [call("f", id="f")]), "tool_id_malformed"),
        (chat_body("", " r", [call("f", id="functionsf0")]), "tool_id_malformed"),
        (chat_body("", " r", [call("f", id="")]), "tool_id_malformed"),
        (chat_body("", " r", [call("f", id="functions.g:0")]), "tool_id_name_mismatch"),
        (chat_body("", " r", [call(), call()]), "tool_id_duplicate"),
        (chat_body("", " r", [call(arguments={"a": 1})]), "tool_args_not_text"),  # type: ignore[arg-type]
        (chat_body(ONE, calls=[call("other")]), "tool_calls_disagree"),
        (chat_body("", " only thoughts"), "empty_answer"),
        (chat_body(""), "empty_completion"),
        (chat_body(None), "empty_completion"),
        (chat_body("hm", " r", finish="tool_calls"), "tool_call_lost"),
        (chat_body("ab " * 3_000, " r"), "degenerate_repetition"),
        (chat_body("x", " r", finish="length"), "truncated_length"),
    ],
)
def test_classes(body: dict[str, Any], expected: str) -> None:
    sample = judged(body, None)
    assert (sample.verdict, sample.error_class) == ("rejected", expected)
    n = sample.rebuilt_tokens
    assert judged(body, n).verdict == "rejected"


def test_native_finish_reason_is_the_stronger_word() -> None:
    body = chat_body("cut he", " r")
    body["choices"][0]["native_finish_reason"] = "length"
    assert judged(body).error_class == "truncated_length"


def test_stop_at_the_limit_is_doubted() -> None:
    body = chat_body("4", " s.")
    n = true_count(body)
    sample = judged(body, n, request={"max_tokens": n})
    assert (sample.error_class, sample.flags) == ("truncated_length", ["stop_at_limit"])
    assert judged(body, n, request={"max_tokens": n + 1}).verdict == "consistent"


@pytest.mark.parametrize(
    ("choice", "body", "violated"),
    [
        ("none", chat_body("", " r", [call()]), True),
        ("required", chat_body("x", " r"), True),
        ("required", chat_body("", " r", [call()]), False),
        ({"type": "function", "function": {"name": "g"}}, chat_body("", " r", [call()]), True),
        ({"type": "function", "function": {"name": "f"}}, chat_body("", " r", [call()]), False),
        ("auto", chat_body("x", " r"), False),
    ],
)
def test_tool_choice(choice: Any, body: dict[str, Any], violated: bool) -> None:
    sample = judged(body, true_count(body), request={"tool_choice": choice})
    assert (sample.error_class == "tool_choice_violated") == violated
    assert (sample.verdict == "consistent") == (not violated)


def test_thinking_switched_off() -> None:
    off = prompt_of(thinking=False)
    plain = judged(chat_body("Four."), prompt=off)
    assert decoded(plain) == "Four.<|im_end|>"
    for body in (chat_body("4", " r"), chat_body(" r</think>4")):
        assert judged(body, prompt=off).error_class == "thinking_mode_mismatch"


def test_class_order() -> None:
    assert len(set(ORDER)) == len(ORDER)
    assert first_class([]) is None
    assert first_class(["count_mismatch", "lone_surrogate"]) == "lone_surrogate"
    assert first_class(["empty_answer", "finish_missing"]) == "finish_missing"
    assert first_class(["finish_missing", "key_refused"]) == "key_refused"
    public = ["body_truncated", "thinking_mode_mismatch", "finish_missing", "lone_surrogate"]
    public += ["marker_fragment", "tool_section_noise", "empty_answer", "tool_call_lost"]
    public += ["count_mismatch", "degenerate_repetition"]
    assert [c for c in ORDER if c in public] == public


def test_undeclared_tool_is_a_flag() -> None:
    body = chat_body("", " r", [call("f")])
    tools = [{"type": "function", "function": {"name": "g"}}]
    sample = judged(body, true_count(body), request={"tools": tools})
    assert (sample.verdict, sample.flags) == ("consistent", ["tool_undeclared"])


def test_bracketed_specials_stay_text_and_the_count_tells() -> None:
    body = chat_body("ends with [EOS]", " r")
    n = true_count(body)
    sample = judged(body, n)
    assert (sample.verdict, sample.flags) == ("consistent", ["special_like_text"])
    ends = embedded().tokenizer.encode_special("ends with [EOS]")
    assert len(ends) < n - 3
    assert not judged(body, n - len(sample.completion_ids) + len(ends) + 3).trainable


def test_lengths_with_specials_are_those_of_every_reading() -> None:
    tok = embedded().tokenizer
    items = [Item(False, "a [EOS] b"), Item(True, "</think>"), Item(False, "[BOS][EOS]")]
    plain = [len(tok.encode_ordinary(t)) for t in ("a ", " b", "a [EOS] b", "[BOS]", "[EOS]")]
    first = (plain[0] + 1 + plain[1], plain[2])
    second = (2, 1 + plain[4], plain[3] + 1, len(tok.encode_ordinary("[BOS][EOS]")))
    every = {a + 1 + b for a in first for b in second} - {first[1] + 1 + second[3]}
    assert checks.lengths_with_specials(items, tok) == every
    assert checks.lengths_with_specials([Item(False, "[EOS]" * 7)], tok) is None


@needs_kimi
def test_a_special_that_keeps_the_count_is_unproven() -> None:
    """` [EOS][]` is three tokens as text and three with the special: no count tells them apart."""
    tok = kimi_renderer().tokenizer
    text, other = tok.encode_ordinary("so [EOS][]"), tok.encode_special("so [EOS][]")
    assert len(text) == len(other) and text != other
    for content, verdict in (("so [EOS][]", "unverifiable"), ("so [EOS] done", "consistent")):
        usage = {"prompt_tokens": 9, "completion_tokens": len(tok.encode_ordinary(content)) + 3}
        told = rebuild_one({"body": {**chat_body(content, "r"), "usage": usage}})
        assert told["verdict"] == verdict and "special_like_text" in told["flags"]


def test_markers_and_the_same_calls_structured() -> None:
    body = chat_body(ONE, " r", [call("f")], finish="tool_calls")
    sample = judged(body, true_count(body))
    assert sample.verdict == "consistent"
    assert sample.flags == ["tool_section_in_content", "tool_calls_duplicated"]
    assert decoded(sample).count(SB) == 1


# ------------------------------------------------------------------ hypotheses

THOUGHT = " The sum is four."
WHOLE = {
    "plain": f"{THOUGHT}</think>\n\nFour.<|im_end|>",
    "early": f" go{ONE}<|im_end|>",
    "call": f' go</think>{SB}{CB}functions.f:2{CA}{{"a": [1, 2]}}{CE}{SE}<|im_end|>',
}


def billed_for(text: str) -> int:
    return len(embedded().tokenizer.encode_special(text))


HISTORY_WITH_CALLS = [
    {"role": "user", "content": "q"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [call("f", "{}", 0), call("f", "{}", 1)],
    },
    {"role": "tool", "tool_call_id": "functions.f:0", "content": "1"},
    {"role": "tool", "tool_call_id": "functions.f:1", "content": "2"},
]


@pytest.mark.parametrize(
    ("name", "whole", "body"),
    [
        ("trimmed_newline", "plain", chat_body("Four.", THOUGHT)),
        ("no_think_close", "early", chat_body("", " go", [call("f")])),
        (
            "compact_arguments",
            "call",
            chat_body("", " go", [call("f", '{\n  "a": [\n    1,\n    2\n  ]\n}', 2)]),
        ),
        (
            "renumbered_id",
            "call",
            chat_body("", " go", [call("f", '{"a": [1, 2]}', 0, id="call_0f9")]),
        ),
    ],
)
def test_named_hypotheses(name: str, whole: str, body: dict[str, Any]) -> None:
    prompt = prompt_of(messages=HISTORY_WITH_CALLS)
    sample = judged(body, billed_for(WHOLE[whole]), prompt, StopOffsets(frozen={"ProviderA": 0}))
    assert (sample.verdict, sample.hypothesis) == ("hypothesis", name)
    assert sample.error_class == "count_mismatch"
    assert not sample.trainable
    assert decoded(sample) == WHOLE[whole]
    assert sample.rebuilt_tokens != sample.billed_tokens


def test_a_missing_think_close_is_not_taken_for_an_uncounted_stop() -> None:
    """Before the offset is known, N - 1 fits both."""
    body = chat_body("", " go", [call("f")])
    sample = judged(body, billed_for(WHOLE["early"]))
    assert (sample.verdict, sample.flags) == ("unverifiable", ["think_close_unproven"])


def test_spaced_markers() -> None:
    spaced = f"{SB} {CB} functions.f:0 {CA} {{}} {CE} {SE}"
    body = chat_body(spaced, " go")
    sample = judged(body, billed_for(f" go</think>{ONE}<|im_end|>"))
    assert (sample.verdict, sample.hypothesis) == ("hypothesis", "spaced_markers")
    assert "spaced_markers" in sample.flags
    assert decoded(sample) == f" go</think>{ONE}<|im_end|>"
    assert judged(body, true_count(body)).verdict != "consistent"


def test_spaced_think_close() -> None:
    body = chat_body(f"{THOUGHT} </think> Four.")
    sample = judged(body, billed_for(f"{THOUGHT}</think>Four.<|im_end|>"))
    assert (sample.verdict, sample.hypothesis) == ("hypothesis", "spaced_markers")


def test_foreign_id_is_never_admitted() -> None:
    body = chat_body("", " go", [call("f", id="call_0f9")])
    verbatim = true_count(body)
    for billed in (None, verbatim, verbatim - 1, verbatim + 40):
        sample = judged(body, billed)
        assert not sample.trainable
    assert judged(body, None).flags == ["tool_id_foreign"]
    assert judged(body, verbatim + 40).verdict == "mismatch"


def test_long_runs_are_not_admitted() -> None:
    body = chat_body("".join(f"{i}-" for i in range(6_000)) + " end of the line", " r")
    sample = judged(body, true_count(body))
    assert sample.verdict == "unverifiable"
    assert sample.flags == ["long_run"]


def test_reasoning_copies() -> None:
    details = [{"type": "reasoning.text", "text": " a"}]
    body = chat_body("x", " a")
    message = body["choices"][0]["message"]
    message |= {"reasoning_details": details, "reasoning_content": " a"}
    assert decoded(judged(body)) == " a</think>x<|im_end|>"
    message["reasoning_content"] = "a"
    assert judged(body).error_class == "reasoning_fields_disagree"
    message |= {"reasoning": None, "reasoning_content": None}
    assert decoded(judged(body)) == " a</think>x<|im_end|>"
    message["reasoning_details"] = [{"type": "reasoning.summary", "summary": "short"}]
    assert judged(body).error_class == "reasoning_withheld"


# ------------------------------------------------------------------ size


def test_ten_megabytes_of_marker_starts() -> None:
    body = chat_body("<|" * 1_000_000 + "<" * 1_000_000 + "</think" * 10_000, " r")
    assert judged(body, None).verdict in ("unverifiable", "rejected")


def test_a_hundred_thousand_markers() -> None:
    sample = judged(chat_body(f"{CE}" * 100_000, " r"), None)
    assert sample.error_class == "markers_unbalanced"
