"""Cases of kinds a, b, c and f whose input is a reply: rebuilt through the `eyas tokens` contract.

`accept` means a verdict that is trained on; `exact` in a case is its author's word for a certain
rebuild, which for a text reply is `consistent` here (never `exact`, see C48).
"""

import json
from pathlib import Path
from typing import Any

import pytest

from core.schema import Rollout
from core.store import encode_line, read_jsonl
from tests.kimi_files import CASES, case, needs_cases, rebuild_one

pytestmark = needs_cases

TEXT_CASES = ["C01", "C06", "C10", "C13", "C15", "C17", "C19", "C23", "C26", "C27", "C28", "C30"]
TEXT_CASES += ["C32", "C58"]
LIST_CASES = ["C05", "C08", "C21", "C49", "C52"]


def check(answer: dict[str, Any], expect: dict[str, Any]) -> None:
    wanted = expect.get("strict", expect)
    if wanted["verdict"] == "accept":
        assert answer["verdict"] in ("exact", "consistent"), answer
        assert "class" not in answer
    else:
        assert answer["verdict"] not in ("exact", "consistent"), answer
        assert answer["class"] == wanted["class"]
    if "completion_ids" in expect:
        assert answer["completion_ids"] == expect["completion_ids"]
    if "audit_completion_ids" in expect:
        assert answer["completion_ids"] == expect["audit_completion_ids"]
    if "completion_text" in expect:
        assert answer["completion_text"] == expect["completion_text"]
    if "flags" in expect:
        assert answer["flags"] == expect["flags"]
    if "calls" in expect:
        assert answer["calls"] == expect["calls"]
    if "reencoded_len" in expect:
        assert answer["count"]["rebuilt"] == expect["reencoded_len"]
    assert answer.get("completion_ids") != expect.get("must_not_equal", [-1])
    for token in expect.get("must_not_append", []):
        assert answer["completion_ids"][-1] != token


def with_usage(response: dict[str, Any], expect: dict[str, Any]) -> dict[str, Any]:
    """Two cases leave usage out where it is not their point; the count gate needs one."""
    body = response.get("body", response)
    if expect["verdict"] == "accept" and not body.get("usage"):
        body["usage"] = {"prompt_tokens": 24, "completion_tokens": len(expect["completion_ids"])}
    return response


@pytest.mark.parametrize("name", TEXT_CASES)
def test_one_reply(name: str) -> None:
    data = case(f"{name}.json")
    check(rebuild_one(data["response"], data.get("request")), data["expect"])


@pytest.mark.parametrize(
    ("name", "index"), [(n, i) for n in LIST_CASES for i in range(3 if n in ("C05", "C08") else 2)]
)
def test_replies_of_a_list(name: str, index: int) -> None:
    data = case(f"{name}.json")
    response, expect = data["responses"][index], data["expect"][index]
    check(rebuild_one(with_usage(response, expect), data.get("request")), expect)


def test_c03_ids_from_sglang_are_kept_verbatim() -> None:
    data = case("C03.json")
    answer = rebuild_one(data["response"], data["request"])
    assert answer["verdict"] == "exact"
    check(answer, data["expect"])
    assert 163607 not in answer["completion_ids"]
    assert len(data["expect"]["loss_mask"]) == len(answer["completion_ids"])


def test_c06_has_one_think_close_and_keeps_the_leading_space() -> None:
    answer = rebuild_one(case("C06.json")["response"])
    assert answer["completion_ids"].count(163607) == 1
    reasoning, _, content = answer["completion_text"].partition("</think>")
    assert (reasoning, content) == (" They ask for 2+2.", "4<|im_end|>")


def test_c10_id_is_not_repaired() -> None:
    data = case("C10.json")
    answer = rebuild_one(data["response"], data["request"])
    assert data["expect"]["must_not_rewrite_to"] not in answer["completion_text"]


def test_c13_ids_are_not_renumbered() -> None:
    answer = rebuild_one(case("C13.json")["response"])
    assert [c["id"] for c in answer["calls"]] == ["functions.run:4", "functions.run:4"]
    assert [c["arguments"] for c in answer["calls"]] == ['{"step":"one"}', '{"step":"two"}']


def test_c15_arguments_are_not_unwrapped() -> None:
    answer = rebuild_one(case("C15.json")["response"])
    assert answer["calls"][0]["arguments"] == '"{\\"city\\":\\"Oslo\\"}"'


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("{command: npm init}", "tool_args_invalid_json"),
        ("[1, 2]", "tool_args_not_object"),
        ("3", "tool_args_not_object"),
        ("", "tool_args_invalid_json"),
        ('{"a": NaN}', "tool_args_invalid_json"),
        ('{"a": 1} trailing', "tool_args_invalid_json"),
        ('{"a": ' + "[" * 10_000 + "]" * 10_000 + "}", "tool_args_too_deep"),
        ('{"a": 1' + "".join(map(str, range(1_500))) + "}", None),
        ('{"a": "\\ud83c"}', None),
    ],
    ids=["bare", "list", "number", "empty", "nan", "trailing", "deep", "digits", "surrogate"],
)
def test_c15_other_argument_texts(arguments: str, expected: str | None) -> None:
    data = case("C15.json")
    body = data["response"]["body"]
    body["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] = arguments
    del body["usage"]
    assert rebuild_one(data["response"]).get("class") == expected


def test_c17_the_raw_newline_survives_one_json_line(tmp_path: Path) -> None:
    data = case("C17.json")
    message = data["response"]["body"]["choices"][0]["message"]
    raw = message["tool_calls"][0]["function"]["arguments"]
    rollout = Rollout(
        prompt_id="p",
        twin_id="t",
        dataset="d",
        arm="declared",
        attempt=1,
        outcome="rejected",
        backend="openrouter",
        reply_kind="json",
        reply_raw=raw,
    )
    path = tmp_path / "completions.jsonl"
    path.write_bytes(encode_line(rollout) * 2)
    assert path.read_bytes().count(b"\n") == 2
    assert [r.reply_raw for r in read_jsonl(path, Rollout)] == [raw, raw]


def test_c21_nothing_is_appended_and_no_call_salvaged() -> None:
    data = case("C21.json")
    answer = rebuild_one(data["responses"][0])
    assert 163586 not in answer["completion_ids"]
    assert 163596 not in answer["completion_ids"]
    assert answer["completion_text"].endswith('{"y":')


def test_c22_stream_cut_inside_a_marker() -> None:
    expect = case("C22.expect.json")
    answer = rebuild_one({"status": 200, "body": {"sse": (CASES / "C22.sse").read_text()}})
    check(answer, expect)
    assert answer["completion_text"] == f"</think>{expect['content']}<|im_end|>"
    assert answer["count"]["billed"] is None


@pytest.mark.parametrize("name", ["truncated", "html", "ws"])
def test_c34_bodies(name: str) -> None:
    raw = (CASES / f"C34.{name}.txt").read_text()
    check(rebuild_one({"status": 200, "body": raw}), case("C34.expect.json")[name])


def test_c36_without_usage_nothing_is_consistent_until_looked_up() -> None:
    data = case("C36.json")
    unknown = rebuild_one(data["response"])
    assert (unknown["verdict"], unknown["count"]["billed"]) == ("unverifiable", None)
    assert unknown["completion_ids"] == data["expect"]["completion_ids"]
    found = data["generation_lookup"][-1]["body"]["data"]
    check(rebuild_one(data["response"], generation=found), data["expect"])


def test_c40_costs_do_not_touch_the_count() -> None:
    body = case("C36.json")["response"]["body"]
    lines = (CASES / "C40.jsonl").read_text().splitlines()
    for line in lines:
        usage = json.loads(line)["usage"]
        answer = rebuild_one({"status": 200, "body": {**body, "usage": usage}})
        assert answer["count"] == {"rebuilt": 6, "billed": 9}


@pytest.mark.parametrize("index", [0, 1])
def test_c48_sampled_ids_are_kept_though_not_canonical(index: int) -> None:
    data = case("C48.json")
    expect = data["expect"]["sglang"][index]
    answer = rebuild_one({"status": 200, "body": data["sglang"][index]})
    assert answer["verdict"] == "exact"
    check(answer, expect)


@pytest.mark.parametrize("index", [0, 1])
def test_c48_text_is_at_most_consistent(index: int) -> None:
    data = case("C48.json")
    expect = data["expect"]["openrouter"][index]
    answer = rebuild_one({"status": 200, "body": data["openrouter"][index]})
    assert answer["verdict"] != "exact"
    check(answer, expect)
