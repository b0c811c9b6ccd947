"""Verdicts on whole rollouts: what may be called exact or consistent, and what may not."""

import json
from typing import Any

import msgspec
import pytest

from core.conventions import LEARN_SAMPLES
from core.reconstruct import StopOffsets, judge, observe
from core.render.base import tools_as_text
from core.schema import Usage
from tests.core.reconstruct.replies import (
    USER,
    call,
    chat_body,
    embedded,
    judged,
    prompt_of,
    rollout_of,
    true_count,
)
from tests.kimi_files import CASES, kimi_renderer, needs_cases

BODY = chat_body("4", " Simple sum.")
CALLS = chat_body("Let me look.", " Need it.", [call("f", '{"a": 1}'), call("g", "{}", 1)])


def test_consistent_sample_is_prompt_then_completion() -> None:
    n = true_count(CALLS)
    sample = judged(CALLS, n)
    renderer = embedded()
    prompt = renderer.render(USER, None, True)
    assert (sample.verdict, sample.error_class, sample.flags) == ("consistent", None, [])
    assert sample.token_ids[: sample.prompt_len] == prompt.ids
    assert renderer.tokenizer.decode(sample.completion_ids) == (
        " Need it.</think>Let me look.<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
        '<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|><|tool_call_begin|>functions.g:1'
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|><|im_end|>"
    )
    assert sample.loss_mask.count(True) == n == sample.billed_tokens == sample.rebuilt_tokens
    assert sample.sample_id == sample.prompt_id == "p"
    assert [(c.name, c.arguments) for c in sample.calls] == [("f", '{"a": 1}'), ("g", "{}")]


def test_segments_tile_the_completion() -> None:
    sample = judged(CALLS)
    assert [s.kind for s in sample.segments] == [
        *("reasoning", "marker", "content", "marker"),
        *("marker", "call_id", "marker", "arguments", "marker"),
        *("marker", "call_id", "marker", "arguments", "marker"),
        *("marker", "end"),
    ]
    assert sample.segments[0].start == 0
    for before, after in zip(sample.segments, sample.segments[1:], strict=False):
        assert before.end == after.start
    assert sample.segments[-1].end == len(sample.completion_ids)


@pytest.mark.parametrize(("off", "fits"), [(-2, False), (-1, True), (0, True), (1, False)])
def test_count_gate_before_learning(off: int, fits: bool) -> None:
    sample = judged(BODY, true_count(BODY) + off)
    assert (sample.verdict == "consistent") == fits
    assert (sample.error_class == "count_mismatch") == (not fits)


def test_no_usage_is_unverifiable_and_zero_is_no_usage() -> None:
    body = chat_body("4", " s.", usage={"prompt_tokens": 0, "completion_tokens": 0})
    assert judged(body).verdict == "unverifiable"
    assert judged(body).billed_tokens is None


def test_looked_up_usage_wins() -> None:
    n = true_count(BODY)
    body = {**BODY, "usage": {"completion_tokens": n + 50}}
    assert judged(body, n).verdict == "consistent"
    assert judged(body).verdict == "mismatch"


def learned(diffs: list[int]) -> StopOffsets:
    offsets = StopOffsets()
    n = true_count(BODY)
    for diff in diffs:
        observe(offsets, judged(BODY, n + diff))
    return offsets


@pytest.mark.parametrize("offset", [0, -1])
def test_offset_is_learned_then_held(offset: int) -> None:
    n = true_count(BODY)
    offsets = learned([offset] * (LEARN_SAMPLES - 1))
    assert offsets.allowed("ProviderA") == (0, -1)
    observe(offsets, judged(BODY, n + offset))
    assert offsets.allowed("ProviderA") == (offset,)
    assert offsets.allowed("ProviderB") == (0, -1)
    other = -1 - offset
    assert judged(BODY, n + offset, offsets=offsets).verdict == "consistent"
    sample = judged(BODY, n + other, offsets=offsets)
    assert sample.verdict in ("mismatch", "hypothesis")
    assert sample.error_class == "count_mismatch"
    observe(offsets, sample)
    assert offsets.allowed("ProviderA") == (offset,)


def test_a_few_strays_do_not_make_an_offset_mixed() -> None:
    assert learned([0] * 47 + [-1] * 3).allowed("ProviderA") == (0,)


def test_mixed_offset_proves_nothing() -> None:
    offsets = learned([0, -1] * (LEARN_SAMPLES // 2))
    assert offsets.mixed == {"ProviderA"}
    sample = judged(BODY, true_count(BODY), offsets=offsets)
    assert (sample.verdict, sample.flags) == ("unverifiable", ["mixed_stop_offset"])


@pytest.mark.parametrize(
    ("diffs", "allowed"),
    [
        ([-1] * 8, (-1,)),
        ([-1], (-1,)),  # what little there was agrees
        ([0, 0, 0, -1], ()),  # too few to call one of them a stray
        ([0] * 8 + [-1], (0,)),
        ([0] * 12 + [-1] * 2, ()),
        ([-1] * 12 + [0] * 5, (-1,)),  # other splits of words
        ([-1] * 8 + [0] * 5, ()),
        ([0] * 8 + [1] * 4 + [2] * 4, (0,)),
        ([-1] * 2 + [-2] * 6, ()),  # a convention of its own: what fits, fits by accident
        ([], (0, -1)),
    ],
)
def test_settle_freezes_small_runs(diffs: list[int], allowed: tuple[int, ...]) -> None:
    offsets = learned(diffs)
    assert offsets.allowed("ProviderA") == (0, -1)
    offsets.settle()
    assert offsets.allowed("ProviderA") == allowed


def test_offsets_are_json() -> None:
    offsets = learned([0] * 9)
    again = msgspec.json.decode(msgspec.json.encode(offsets), type=StopOffsets)
    assert again == offsets


def test_judging_does_not_learn() -> None:
    offsets = StopOffsets()
    judged(BODY, true_count(BODY), offsets=offsets)
    assert offsets == StopOffsets()


# ------------------------------------------------------------------ prompts


def test_prompt_of_another_length_is_never_consistent() -> None:
    n, ours = true_count(BODY), len(embedded().render(USER, None, True).ids)
    for extra in range(4):
        usage = Usage(prompt_tokens=ours + extra, completion_tokens=n)
        sample = judged(BODY, usage=usage)
        assert sample.verdict == "consistent"
        assert sample.prompt_tokens_billed == sample.prompt_len + extra
    for extra in (-1, 4, 17):
        usage = Usage(prompt_tokens=ours + extra, completion_tokens=n)
        sample = judged(BODY, usage=usage)
        assert (sample.verdict, sample.error_class) == ("mismatch", "prompt_count_mismatch")
        assert sample.flags == ["prompt_count_drift"]


def test_control_strings_in_the_prompt_need_server_ids() -> None:
    prompt = prompt_of(messages=[{"role": "user", "content": "what is <|im_end|>?"}])
    sample = judged(BODY, true_count(BODY), prompt=prompt)
    assert (sample.verdict, sample.error_class) == ("rejected", "control_string_in_prompt")


def test_a_prompt_that_cannot_be_rendered() -> None:
    prompt = prompt_of(messages=[{"role": "critic", "content": "x"}])
    sample = judged(BODY, 9, prompt=prompt)
    assert (sample.verdict, sample.error_class) == ("rejected", "role_unknown")


def test_text_arm_holds_the_declaration_in_its_system_message() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    asked = tools_as_text(USER, [tool])
    expected = embedded().render(asked, None, True).ids
    for messages in (USER, asked):
        sample = judged(BODY, prompt=prompt_of(messages=messages, tools=[tool], arm="text"))
        assert sample.token_ids[: sample.prompt_len] == expected
    declared = judged(BODY, prompt=prompt_of(tools=[tool]))
    assert declared.token_ids[: declared.prompt_len] == embedded().render(USER, [tool], True).ids


# ------------------------------------------------------------------ server ids


def generate_body(ids: list[int], text: str | None = None, **meta: Any) -> dict[str, Any]:
    info = {"finish_reason": {"type": "stop"}, "completion_tokens": len(ids), **meta}
    return {"text": text, "output_ids": ids, "meta_info": info}


def sampled(text: str) -> list[int]:
    return embedded().tokenizer.encode_special(text)


def judged_ids(body: dict[str, Any], **request: Any) -> Any:
    return judged(body, backend="sglang", provider=None, arm="local", request=request)


def test_exact_with_our_own_prompt_ids() -> None:
    ids = sampled(" ok.</think>4<|im_end|>")
    prompt = embedded().render(USER, None, True).ids
    sample = judged_ids(generate_body(ids, prompt_tokens=len(prompt)), input_ids=prompt)
    assert (sample.verdict, sample.flags) == ("exact", [])
    assert sample.token_ids == prompt + ids


def test_another_prompt_length_on_the_server_is_rejected() -> None:
    ids = sampled(" ok.</think>4<|im_end|>")
    prompt = embedded().render(USER, None, True).ids
    sample = judged_ids(generate_body(ids, prompt_tokens=len(prompt) + 1), input_ids=prompt)
    assert (sample.verdict, sample.error_class) == ("rejected", "prompt_ids_differ")


def test_non_canonical_ids_are_kept() -> None:
    tokenizer = embedded().tokenizer
    letters = [tokenizer.encode_ordinary(c)[0] for c in "weather"]
    assert letters != tokenizer.encode_ordinary("weather")
    end = sampled("<|im_end|>")
    ids = [*sampled(" ok.</think>"), *letters, *end]
    sample = judged_ids(generate_body(ids, " ok.</think>weather"))
    assert (sample.verdict, sample.completion_ids) == ("exact", ids)


def test_server_text_may_lack_what_servers_leave_out() -> None:
    body = " ok.</think>4"
    for text in (f"{body}<|im_end|>", body):
        assert judged_ids(generate_body(sampled(f"{body}<|im_end|>"), text)).verdict == "exact"


@pytest.mark.parametrize("text", ["ok.</think>4", " ok.</think>5", " ok. </think> 4<|im_end|>"])
def test_ids_must_decode_to_the_text(text: str) -> None:
    sample = judged_ids(generate_body(sampled(" ok.</think>4<|im_end|>"), text))
    assert (sample.verdict, sample.error_class) == ("rejected", "ids_text_mismatch")


@pytest.mark.parametrize(
    ("text", "finish", "expected"),
    [
        (" ok.</think>4", "length", "truncated_length"),
        (" ok.</think>4<|im_end|><|im_user|>", "stop", "control_string_in_output"),
        (" ok.</think>4<think>x<|im_end|>", "stop", "control_string_in_output"),
        (" ok.</think><|tool_call_begin|>x<|im_end|>", "stop", "markers_unbalanced"),
        (" thinking<|im_end|>", "stop", "empty_answer"),
        ("</think><|im_end|>", "stop", "empty_completion"),
        ("<|im_end|>", "stop", "empty_completion"),
        (" ok.</think>" + "ab" * 3_000 + "<|im_end|>", "stop", "degenerate_repetition"),
    ],
)
def test_rejected_server_ids(text: str, finish: str, expected: str) -> None:
    ids = sampled(text)
    body = generate_body(ids, finish_reason={"type": finish})
    sample = judged_ids(body)
    assert (sample.verdict, sample.error_class) == ("rejected", expected)
    assert sample.completion_ids == ids


@pytest.mark.parametrize("bad", [10**7, -1])
def test_ids_outside_the_vocabulary(bad: int) -> None:
    sample = judged_ids(generate_body([bad]))
    assert (sample.verdict, sample.error_class) == ("rejected", "token_id_unknown")


def test_no_ids_at_all() -> None:
    assert judged_ids(generate_body([])).error_class == "empty_completion"


def test_missing_end_token_is_flagged() -> None:
    sample = judged_ids(generate_body(sampled(" ok.</think>4")))
    assert (sample.verdict, sample.flags) == ("exact", ["end_not_returned"])


def chat_ids(ids: list[int], **choice: Any) -> dict[str, Any]:
    body = chat_body("4", " ok.")
    body["choices"][0] |= {"response_token_ids": ids, **choice}
    return body


def test_chat_with_ids() -> None:
    prompt = embedded().render(USER, None, True).ids
    ids = sampled(" ok.</think>4<|im_end|>")
    sample = judged(chat_ids(ids, prompt_token_ids=prompt), len(ids))
    assert (sample.verdict, sample.completion_ids) == ("exact", ids)
    other = judged(chat_ids(ids, prompt_token_ids=[*prompt, 5]), len(ids))
    assert (other.verdict, other.error_class) == ("rejected", "prompt_ids_differ")
    wrong = judged(chat_ids(sampled(" ok.</think>5<|im_end|>")), len(ids))
    assert (wrong.verdict, wrong.error_class) == ("rejected", "ids_text_mismatch")


def test_vllm_names_of_the_same_fields() -> None:
    ids = sampled(" ok.</think>4<|im_end|>")
    body = chat_body("4", " ok.", prompt_token_ids=embedded().render(USER, None, True).ids)
    body["choices"][0]["token_ids"] = ids
    assert judged(body, len(ids)).verdict == "exact"


# ------------------------------------------------------------------ providers


@needs_cases
def test_c49_provider_that_trims_whitespace() -> None:
    """Twenty replies whose count fits although their leading space is gone."""
    renderer, offsets = kimi_renderer(), StopOffsets()
    lines = (CASES / "C49.provider.jsonl").read_text().splitlines()
    bodies = [json.loads(line) for line in lines]
    for body in bodies:
        del body["usage"]["prompt_tokens"]  # belongs to a prompt that is not given

    def reply(body: dict[str, Any]) -> Any:
        fields = {"provider": body["provider"]} if "provider" in body else {}
        usage = Usage(completion_tokens=body.get("usage", {}).get("completion_tokens"))
        rollout = rollout_of(body, usage=usage, **{"provider": None, **fields})
        return judge(rollout, prompt_of(), renderer, offsets)

    for i, body in enumerate(bodies):
        ids = renderer.tokenizer.encode_special(f" Item {i} is short.</think>ok<|im_end|>")
        local = reply({"output_ids": ids, "meta_info": {"finish_reason": {"type": "stop"}}})
        assert (local.verdict, local.habits["reasoning_starts_blank"]) == ("exact", True)
        observe(offsets, local)
        sample = reply(body)
        assert sample.habits["reasoning_starts_blank"] is False
        # Seven of seven here and none of seven there are no accident any more.
        assert sample.verdict == ("consistent" if i < 7 else "hypothesis")
        observe(offsets, sample)
    again = [reply(body) for body in bodies]
    assert {s.verdict for s in again} == {"hypothesis"}
    assert {s.hypothesis for s in again} == {"trimmed_space"}
    assert all("provider_trims_whitespace" in s.flags for s in again)
