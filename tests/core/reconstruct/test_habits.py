"""What a provider takes away in every reply, what it counts, and what its text gives away."""

import math
from itertools import combinations
from typing import Any

import pytest

from core.conventions import lost_habits
from core.reconstruct import StopOffsets, observe
from core.reconstruct.completion import Item
from core.reconstruct.habits import habits_of
from core.schema import Message, Sample, ToolCall, Usage
from tests.core.reconstruct.replies import (
    call,
    chat_body,
    embedded,
    judged,
    prompt_of,
    true_count,
)

FUNCTION = {"name": "f", "arguments": "{}"}
EARLIER: list[Message] = [
    {"role": "user", "content": "do both"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": f"functions.f:{i}",
                "type": "function",
                "function": {"name": "f", "arguments": "{}"},
            }
            for i in range(2)
        ],
    },
    {"role": "tool", "tool_call_id": "functions.f:0", "content": "1"},
    {"role": "tool", "tool_call_id": "functions.f:1", "content": "2"},
]


def test_habits_that_a_reply_can_show() -> None:
    items = [Item(False, " so\n"), Item(True, "</think>"), Item(False, "x ")]
    calls = [ToolCall(id="functions.f:0", name="f", arguments='{"b": 1, "a": 2}')]
    assert habits_of(items, ["reasoning", "marker", "content"], calls) == {
        "reasoning_starts_blank": True,
        "reasoning_ends_blank": True,
        "content_starts_blank": False,
        "content_ends_blank": True,
        "arguments_spaced": True,
        "arguments_compact": False,
        "arguments_unsorted": True,
    }


@pytest.mark.parametrize("arguments", ["{}", "", "[1]", "{", "[" * 5_000])
def test_arguments_that_show_no_habit(arguments: str) -> None:
    call_ = ToolCall(id="functions.f:0", name="f", arguments=arguments)
    assert habits_of([], [], [call_]) == {}


def test_one_call_of_several_is_enough_to_show_it() -> None:
    calls = [
        ToolCall(id=f"functions.f:{i}", name="f", arguments=a)
        for i, a in enumerate(['{"a":1}', '{"a": 1}'])
    ]
    assert habits_of([], [], calls) == {"arguments_spaced": True, "arguments_compact": True}


def chance(model: tuple[int, int], provider: int) -> float:
    """By counting: of all ways to spread the model's shown ones over all replies, those that give
    the provider none."""
    shown, could = model
    spread = list(combinations(range(could + provider), shown))
    return sum(all(i < could for i in ways) for ways in spread) / len(spread)


@pytest.mark.parametrize(
    ("model", "provider"), [((7, 7), 7), ((6, 6), 6), ((3, 8), 9), ((5, 7), 9), ((4, 8), 6)]
)
def test_lost_is_what_chance_gives_less_than_once_in_a_thousand(
    model: tuple[int, int], provider: int
) -> None:
    seen = {"d": {"h": [0, provider]}}
    lost = lost_habits({"d": {"h": model}}, seen)
    assert (set(lost) == {"h"}) == (chance(model, provider) < 1e-3)
    assert lost.get("h", 0) == pytest.approx(chance(model, provider) if lost else 0)


def test_datasets_are_compared_each_with_its_own() -> None:
    model = {"a": {"h": [4, 4]}, "b": {"h": [0, 50]}}
    assert set(lost_habits(model, {"b": {"h": [0, 50]}})) == set()
    assert set(lost_habits(model, {"a": {"h": [0, 4]}, "b": {"h": [0, 50]}})) == set()
    both = {"a": {"h": [4, 4]}, "b": {"h": [4, 4]}}
    assert math.isclose(chance((4, 4), 4) ** 2, 1 / 70**2)
    assert set(lost_habits(both, {"a": {"h": [0, 4]}, "b": {"h": [0, 4]}})) == {"h"}
    assert set(lost_habits(both, {"a": {"h": [1, 40]}, "b": {"h": [0, 40]}})) == set()


def local(text: str) -> Sample:
    ids = embedded().tokenizer.encode_special(text + "<|im_end|>")
    body = {"output_ids": ids, "meta_info": {"finish_reason": {"type": "stop"}}}
    return judged(body, backend="sglang", provider=None, arm="local")


def test_a_habit_that_comes_back_is_not_lost() -> None:
    offsets, trimmed = StopOffsets(), chat_body("4", "so.")
    for _ in range(8):
        observe(offsets, local(" so.</think>4"))
        observe(offsets, judged(trimmed, true_count(trimmed)))
    assert offsets.lost["ProviderA"] == {"reasoning_starts_blank"}
    sample = judged(trimmed, true_count(trimmed), offsets=offsets)
    assert (sample.verdict, sample.hypothesis) == ("hypothesis", "trimmed_space")
    assert sample.flags == ["provider_trims_whitespace"]
    whole = chat_body("4", " so.")
    observe(offsets, judged(whole, true_count(whole), offsets=offsets))
    assert offsets.lost["ProviderA"] == set()
    assert judged(trimmed, true_count(trimmed), offsets=offsets).verdict == "consistent"


def test_arguments_that_are_always_rewritten() -> None:
    offsets = StopOffsets(lost={"ProviderA": {"arguments_spaced"}})
    body = chat_body("", " go", [call("f", '{"a":1}')])
    offsets.frozen["ProviderA"] = 0
    sample = judged(body, true_count(body), offsets=offsets)
    assert (sample.verdict, sample.hypothesis) == ("hypothesis", "compact_arguments")
    assert sample.flags == ["provider_rewrites_arguments"]


# ------------------------------------------------------------------ thinking


def thought(body: dict[str, Any], off: int, offsets: StopOffsets | None = None) -> Sample:
    """`off`: reported minus true reasoning tokens."""
    mine = judged(body, true_count(body))
    reasoning = next(s for s in mine.segments if s.kind == "reasoning")
    usage = Usage(
        completion_tokens=mine.rebuilt_tokens,
        reasoning_tokens=reasoning.end - reasoning.start + off,
    )
    return judged(body, usage=usage, offsets=offsets)


BODY = chat_body("Four.", " Two and two make four.")


@pytest.mark.parametrize(
    ("off", "verdict"),
    [(0, "consistent"), (1, "consistent"), (9, "unverifiable"), (-1, "unverifiable")],
)
def test_reasoning_count_before_learning(off: int, verdict: str) -> None:
    sample = thought(BODY, off)
    assert (sample.verdict, sample.reasoning_off) == (verdict, off)
    assert ("reasoning_count" in sample.flags) == (verdict == "unverifiable")


@pytest.mark.parametrize("convention", [0, 1])
def test_reasoning_count_is_learned(convention: int) -> None:
    offsets = StopOffsets(frozen={"ProviderA": 0})
    for _ in range(8):
        observe(offsets, thought(BODY, convention, offsets))
    assert offsets.thinking("ProviderA") == (convention,)
    assert thought(BODY, convention, offsets).verdict == "consistent"
    other = thought(BODY, 1 - convention, offsets)
    assert (other.verdict, other.error_class) == ("mismatch", "count_mismatch")


def test_estimates_of_reasoning_prove_nothing() -> None:
    offsets = StopOffsets(frozen={"ProviderA": 0})
    for _ in range(8):
        observe(offsets, thought(BODY, 17, offsets))
    assert offsets.thinking("ProviderA") is None
    assert thought(BODY, 23, offsets).verdict == "consistent"


def test_no_reasoning_count_is_none() -> None:
    usage = Usage(completion_tokens=true_count(BODY), reasoning_tokens=0)
    sample = judged(BODY, usage=usage)
    assert (sample.verdict, sample.reasoning_off) == ("consistent", None)


def test_answer_on_the_wrong_side_of_think() -> None:
    """The total is the same, wherever `</think>` stood."""
    real = chat_body("Checking.", " Look it up.\n", [call()])
    moved = chat_body("", " Look it up.\nChecking.", [call()])
    reasoning = judged(real, true_count(real)).segments[0].end
    offsets = StopOffsets(frozen={"ProviderA": 0}, thoughts={"ProviderA": [20, 0, 0]})
    for body, verdict in ((real, "consistent"), (moved, "mismatch")):
        usage = Usage(completion_tokens=true_count(body), reasoning_tokens=reasoning)
        assert judged(body, usage=usage, offsets=offsets).verdict == verdict
        silent = Usage(completion_tokens=true_count(body))
        assert judged(body, usage=silent, offsets=offsets).verdict == "consistent"


# ------------------------------------------------------------------ text alone


@pytest.mark.parametrize(
    ("reasoning", "content", "calls"),
    [
        (" so. ", " Four.", None),
        (" so. ", "  ", [call()]),
        (" so. ", " Checking. ", [call()]),
        (" so. ", "", [call()]),
    ],
)
def test_spaces_that_parsed_markers_left(
    reasoning: str, content: str, calls: list[dict[str, Any]] | None
) -> None:
    spaced = chat_body(content, reasoning, calls)
    clean = chat_body(content.strip(" "), reasoning.removesuffix(" "), calls)
    known = StopOffsets(frozen={"ProviderA": 0})
    for offsets in (None, known):
        sample = judged(spaced, true_count(clean), offsets=offsets)
        assert (sample.verdict, sample.hypothesis) == ("hypothesis", "spaced_markers")
        assert sample.completion_ids == judged(clean, true_count(clean)).completion_ids
    learning = StopOffsets()
    observe(learning, judged(BODY, true_count(BODY)))
    for _ in range(2):
        observe(learning, judged(spaced, true_count(spaced)))
    assert (learning.seen, learning.suspect) == ({"ProviderA": {0: 1}}, {"ProviderA": 2})
    learning.settle()
    assert learning.mixed == {"ProviderA"}  # one clean reply of three shows no convention


def test_natural_spaces_are_kept_where_the_count_proves_them() -> None:
    body = chat_body(" Four.", " so. ")
    sample = judged(body, true_count(body), offsets=StopOffsets(frozen={"ProviderA": 0}))
    assert (sample.verdict, sample.flags) == ("consistent", ["spaced_markers"])


@pytest.mark.parametrize(
    ("first", "verdict"), [(2, "consistent"), (0, "hypothesis"), (3, "hypothesis")]
)
def test_ids_count_on_from_the_conversation(first: int, verdict: str) -> None:
    body = chat_body("", " go", [call("f", "{}", first), call("f", "{}", first + 1)])
    known = StopOffsets(frozen={"ProviderA": 0})
    sample = judged(body, true_count(body), prompt_of(messages=EARLIER), known)
    assert sample.verdict == verdict
    if verdict == "hypothesis":
        assert sample.hypothesis == "renumbered_id"
        assert "tool_id_out_of_sequence" in sample.flags
        assert [c.id for c in sample.calls] == ["functions.f:2", "functions.f:3"]
