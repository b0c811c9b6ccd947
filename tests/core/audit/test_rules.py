"""Every rule on a sample that breaks it and on one that does not."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.audit.live import observation
from core.audit.reading import Toolbox, Toolboxes, asked, canonical_arguments
from core.audit.rules import LOOP_TOKENS, WATCHED, distinct_ngrams, findings, looping_tail
from core.schema import Sample, ToolCall
from tests.core.audit.builders import WEATHER, call, case_of, prompt, sample

TOOLS = [WEATHER]


def rules_of(one: Sample, asked_for: object = None, **prompt_fields: object) -> dict[str, str]:
    given_prompt = asked_for or prompt(TOOLS, **prompt_fields)
    return {f.rule: f.severity for f in findings(case_of(one, given_prompt))}  # type: ignore[arg-type]


def test_a_good_answer_and_a_good_call_have_no_finding() -> None:
    assert rules_of(sample()) == {}
    assert rules_of(sample(content="", calls=[call()])) == {}
    two = [call(index=0), call('{"city":"Bergen","days":2}', index=1)]
    assert rules_of(sample(content="Both.", calls=two)) == {}


def test_segments_may_count_from_the_completion_or_from_the_prompt() -> None:
    bad = [call(id="call_1")]
    absolute = findings(case_of(sample(calls=bad), prompt(TOOLS)))
    relative = findings(case_of(sample(calls=bad, relative=True), prompt(TOOLS)))
    assert absolute == relative
    (finding,) = absolute
    start, end = finding.spans[0]
    assert bytes(sample(calls=bad).token_ids[start:end]) == b"call_1"


BROKEN = [
    (
        "undeclared tool",
        sample(calls=[call(name="get_time", arguments="{}")]),
        {"undeclared_tool": "error"},
    ),
    ("not JSON", sample(calls=[call("{city: Oslo}")]), {"arguments_not_json": "error"}),
    ("NaN is not JSON", sample(calls=[call('{"days":NaN}')]), {"arguments_not_json": "error"}),
    ("control character", sample(calls=[call('{"city":"a\nb"}')]), {"arguments_not_json": "error"}),
    ("double encoded", sample(calls=[call('"{}"')]), {"arguments_not_object": "error"}),
    ("missing required", sample(calls=[call("{}")]), {"arguments_schema": "error"}),
    ("wrong type", sample(calls=[call('{"city":"x","days":1.5}')]), {"arguments_schema": "error"}),
    ("extra key", sample(calls=[call('{"city":"x","a":1}')]), {"arguments_schema": "error"}),
    ("foreign id", sample(calls=[call(id="call_9f")]), {"id_not_native": "error"}),
    (
        "lost dot and colon",
        sample(calls=[call(id="functionsget_weather0")]),
        {"id_not_native": "error"},
    ),
    (
        "id of another",
        sample(calls=[call(id="functions.get_time:0")]),
        {"id_names_another": "error"},
    ),
    ("renumbered", sample(calls=[call(index=7)]), {"id_renumbered": "warn"}),
    (
        "duplicate id",
        sample(calls=[call(), call('{"city":"B"}')]),
        {"id_duplicate": "error", "id_renumbered": "warn"},
    ),
    ("leak in content", sample(content="a <|tool_call_begin|> b"), {"marker_leak": "error"}),
    ("unknown marker", sample(content="<|endoftext|>"), {"marker_leak": "error"}),
    ("leak in reasoning", sample(reasoning=" so <|im_end|>"), {"marker_leak": "error"}),
    ("leak in arguments", sample(calls=[call('{"city":"<|im_end|>"}')]), {"marker_leak": "error"}),
    ("fragment", sample(content="done <|tool_ca"), {"marker_fragment": "error"}),
    ("truncated", sample(end=False, finish_reason="length"), {"truncated": "warn"}),
    ("no think close", sample(close=0), {"no_think_close": "info"}),
    ("closed twice", sample(close=2), {"think_closed_twice": "error"}),
    ("no reasoning", sample(reasoning=""), {"no_reasoning": "warn"}),
    ("empty answer", sample(content=""), {"empty_answer": "error"}),
    ("blank answer", sample(content="\n"), {"empty_answer": "error", "trailing_blank": "info"}),
    ("trailing blank", sample(content="Fine.\n"), {"trailing_blank": "info"}),
    ("spaced think", sample(reasoning=" Hm. ", content=" Fine."), {"spaced_markers": "warn"}),
    ("spaced arguments", sample(calls=[call(' {"city":"x"} ')]), {"spaced_markers": "warn"}),
    ("replacement", sample(content="a\ufffdb"), {"replacement_char": "warn"}),
    ("call lost", sample(finish_reason="tool_calls"), {"call_lost": "error"}),
    ("prompt short", sample(prompt_tokens_billed=9), {"prompt_drift": "error"}),
    ("prompt long", sample(prompt_tokens_billed=14), {"prompt_drift": "error"}),
    ("mismatch", sample(verdict="mismatch", billed_tokens=99), {"mismatch": "error"}),
    ("hypothesis", sample(verdict="hypothesis", hypothesis="trimmed"), {"hypothesis": "warn"}),
    ("unverifiable", sample(verdict="unverifiable", billed_tokens=None), {"unverifiable": "warn"}),
    ("unknown flag", sample(flags=["odd", "no_think_close"]), {"flag:odd": "info"}),
]


@pytest.mark.parametrize(("one", "expected"), [b[1:] for b in BROKEN], ids=[b[0] for b in BROKEN])
def test_broken_samples(one: Sample, expected: dict[str, str]) -> None:
    assert rules_of(one) == expected
    case = case_of(one, prompt(TOOLS))
    seen = observation(one, findings(case, WATCHED), has_tools=True)
    assert seen == observation(one, findings(case), has_tools=True)


def test_what_the_target_does_itself_is_no_error() -> None:
    own = sample(calls=[call("{}", name="nope", id="call_1")], verdict="exact", arm="local")
    assert rules_of(own) == {"undeclared_tool": "warn", "id_not_native": "warn"}
    ids = sample(verdict="exact", prompt_tokens_billed=99)
    assert rules_of(ids) == {"prompt_drift": "error"}


@pytest.mark.parametrize("billed", [10, 13, None])
def test_prompt_count_within_three_or_unsaid(billed: int | None) -> None:
    assert rules_of(sample(prompt_tokens_billed=billed)) == {}


def test_a_rejected_rollout_without_ids_says_only_that() -> None:
    one = sample(
        verdict="rejected", error_class="empty_choices", token_ids=[], segments=[], prompt_len=0
    )
    assert rules_of(one) == {"rejected:empty_choices": "error"}


def test_no_tool_declared() -> None:
    (finding,) = findings(case_of(sample(calls=[call()]), prompt(None)))
    assert (finding.rule, finding.severity) == ("undeclared_tool", "error")
    assert "no tool was declared" in finding.detail


def test_instant_mode() -> None:
    plain = sample(reasoning=None)
    assert rules_of(plain, thinking=False) == {}
    assert rules_of(sample(), thinking=False) == {"thinks_in_instant_mode": "error"}


def test_the_counter_may_go_on_or_restart() -> None:
    before = [
        {"role": "assistant", "content": "", "tool_calls": [{"id": "functions.get_weather:0"}]}
    ]
    later = prompt(TOOLS, messages=before)
    assert rules_of(sample(calls=[call(index=1)]), later) == {}
    assert rules_of(sample(calls=[call(index=0)]), later) == {}
    assert rules_of(sample(calls=[call(index=2)]), later) == {"id_renumbered": "warn"}


def test_a_quoted_marker_is_no_leak() -> None:
    quoting = prompt(TOOLS, text="What does <|im_end|> mean?")
    assert rules_of(sample(content="<|im_end|> ends a turn."), quoting) == {"marker_quoted": "info"}
    both = sample(content="<|im_end|> and <|im_user|>")
    assert rules_of(both, quoting) == {"marker_leak": "error"}


def test_special_ids_inside_text_are_located() -> None:
    one = sample(content="abc")
    at = one.prompt_len + len(" Look it up.") + 1 + 1
    ids = list(one.token_ids)
    ids[at] = 273
    (finding,) = findings(case_of(sample(content="abc", token_ids=ids), prompt(TOOLS)))
    assert (finding.rule, finding.spans) == ("special_in_text", [(at, at + 1)])


@pytest.mark.parametrize(
    ("schema", "arguments"),
    [
        ({"type": "nonsense"}, {}),
        ({"properties": {"a": {"$ref": "#/definitions/none"}}}, {"a": 1}),
        ({"properties": {"a": {"$ref": "http://127.0.0.1:9/x.json"}}}, {"a": 1}),
        ({"properties": {"a": {"pattern": "("}}}, {"a": "x"}),
    ],
)
def test_an_unusable_schema_is_named_and_judges_nothing(schema: dict, arguments: dict) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    one = sample(calls=[call(json.dumps(arguments), name="f")])
    assert rules_of(one, prompt([tool])) == {"schema_unusable": "info"}


def test_tools_without_wrapper_or_parameters() -> None:
    box = Toolbox([{"name": "bare"}, {"type": "function", "function": {"name": 3}}, {"x": 1}])
    assert len(box) == 1 and "bare" in box
    assert box.error("bare", {"anything": [1]}) is None


def test_one_toolbox_per_declaration() -> None:
    boxes = Toolboxes()
    declared = json.dumps([WEATHER]).encode()
    box = boxes.get(declared)
    assert box is not None and boxes.get(declared) is box
    assert boxes.get(b"[]") is None and boxes.get(b"null") is None


def test_what_is_kept_of_a_prompt() -> None:
    history = [
        {"role": "user", "content": "</think> é"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "a"}, {"id": "b"}]},
    ]
    record = prompt(TOOLS, messages=history, thinking=False, arm="text", backend="sglang")
    read = asked(record, Toolboxes())
    assert read.tools is not None and list(read.tools.schemas) == ["get_weather"]
    assert (read.prompt_id, read.twin_id, read.dataset) == (
        record.prompt_id,
        record.twin_id,
        record.dataset,
    )
    assert (read.arm, read.backend, read.thinking) == ("text", "sglang", False)
    assert read.calls_before == 2 and read.quoted == frozenset({"</think>"})


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ('{"a":1,"b":2}', '{ "b": 2.0, "a": 1 }', True),
        ('{"a":"\\u00e9"}', '{"a":"é"}', True),
        ('{"a":[1,2]}', '{"a":[2,1]}', False),
        ('{"a":"Oslo"}', '{"a":"oslo"}', False),
        ('{"a":1}', '{"a":"1"}', False),
        ('{"a":true}', '{"a":1}', False),
    ],
)
def test_canonical_arguments(a: str, b: str, same: bool) -> None:
    assert (canonical_arguments(a) == canonical_arguments(b)) is same


@pytest.mark.parametrize("bad", ["", "{", "NaN", '{"a":Infinity}', "[" * 100_000])
def test_canonical_arguments_of_no_json(bad: str) -> None:
    assert canonical_arguments(bad) is None


def test_a_loop_is_found_with_its_period() -> None:
    body = "Once." + " and again" * 40
    (finding,) = findings(case_of(sample(content=body), prompt(TOOLS)))
    assert (finding.rule, finding.severity) == ("loop", "error")
    assert "period of 10" in finding.detail
    start, end = finding.spans[0]
    text = sample(content=body)
    assert end == len(text.token_ids) - 1
    # the first round of the loop stays in the loss
    assert bytes(text.token_ids[start - 10 : start]) == b" and again"


def test_below_the_threshold_is_no_loop() -> None:
    assert looping_tail(list(range(500)) + [7] * (LOOP_TOKENS - 1)) == (0, 0)
    assert looping_tail(list(range(500)) + [7] * LOOP_TOKENS) == (1, LOOP_TOKENS)
    assert looping_tail(list(range(64)) * 3) == (0, 0)
    assert looping_tail(list(range(64)) * 4) == (64, 256)
    assert looping_tail([]) == (0, 0)


@given(
    st.lists(st.integers(0, 9), max_size=40), st.lists(st.integers(10, 19), min_size=1, max_size=8)
)
def test_any_repeated_block_is_found(head: list[int], block: list[int]) -> None:
    times = -(-LOOP_TOKENS // len(block)) + 4
    period, length = looping_tail(head + block * times)
    assert len(block) % period == 0
    assert length == len(block) * times


@given(st.lists(st.integers(0, 200_000), min_size=4, max_size=60))
def test_distinct_ngrams_counts_as_a_set_does(ids: list[int]) -> None:
    grams = [tuple(ids[i : i + 4]) for i in range(len(ids) - 3)]
    assert distinct_ngrams(ids) == pytest.approx(len(set(grams)) / len(grams))


@given(
    st.text(max_size=60),
    st.text(max_size=60),
    st.lists(
        st.tuples(st.text(max_size=20), st.text(max_size=20), st.text(max_size=40)), max_size=3
    ),
)
def test_rules_never_raise_on_hostile_text(
    reasoning: str, content: str, raw: list[tuple[str, str, str]]
) -> None:
    calls = [ToolCall(id=i, name=n, arguments=a) for i, n, a in raw]
    one = sample(
        reasoning=reasoning.encode("utf-8", "replace").decode(),
        content=content.encode("utf-8", "replace").decode(),
        calls=[c for c in calls if c.id.isascii()],
    )
    for finding in findings(case_of(one, prompt(TOOLS))):
        assert "\n" not in finding.rule
        assert all(one.prompt_len <= a < b <= len(one.token_ids) for a, b in finding.spans)
