"""The `eyas tokens` contract on the embedded vocabulary: order, ids, errors, shapes."""

import json
from pathlib import Path
from typing import Any

import pytest

from core import tokens
from core.embedded import TARGET_DIR
from core.errors import TokenizerError
from core.render.base import load_renderer


def answers(mode: tokens.Mode, *rows: Any) -> list[Any]:
    lines = [row if isinstance(row, str | bytes) else json.dumps(row) for row in rows]
    out: list[str] = []
    tokens.run(mode, TARGET_DIR, lines, out.append)
    assert all(line.endswith("\n") and line.isascii() and line.count("\n") == 1 for line in out)
    return [json.loads(line) for line in out]


def test_encode_recognises_no_special() -> None:
    tokenizer = load_renderer(TARGET_DIR, "kimi-k2.5").tokenizer
    (answer,) = answers("encode", {"id": {"any": 1}, "text": "a<|im_end|>\u2028b"})
    assert answer["id"] == {"any": 1}
    assert answer["ids"] == tokenizer.encode_ordinary("a<|im_end|>\u2028b")


def test_order_is_kept_and_blank_lines_are_skipped() -> None:
    told = answers("encode", {"id": 3, "text": "c"}, "", b"\n", {"id": 1, "text": "a"})
    assert [a["id"] for a in told] == [3, 1]


@pytest.mark.parametrize(
    ("mode", "line", "expected"),
    [
        ("encode", "nope", "line_not_json"),
        ("encode", b"\xff\xfe", "line_not_json"),
        ("encode", "[" * 100_000, "line_too_deep"),
        ("encode", "5", "line_invalid"),
        ("encode", {"id": 1}, "line_invalid"),
        ("encode", b'{"id": 1e400, "text": "x"}', "line_invalid"),
        ("encode", b'{"id": [NaN], "text": "x"}', "line_invalid"),
        ("render", {"id": 1, "messages": []}, "no_user_turn"),
        ("render", {"id": 1, "messages": 5}, "messages_invalid"),
        (
            "render",
            {"id": 1, "messages": [{"role": "user", "content": "x"}], "tools": 5},
            "tools_invalid",
        ),
        ("render", {"id": 1, "messages": [], "thinking": "yes"}, "line_invalid"),
        ("rebuild", {"id": 1}, "line_invalid"),
        ("rebuild", {"id": 1, "response": {}, "request": []}, None),
        ("rebuild", {"id": 1, "response": {}, "request": [1]}, "line_invalid"),
    ],
)
def test_bad_lines_are_answered(mode: tokens.Mode, line: Any, expected: str | None) -> None:
    bad, good = answers(mode, line, {"id": 2, "text": "x", "messages": [], "response": {}})
    assert good["id"] == 2
    if expected is None:
        assert (bad["verdict"], bad["class"]) == ("rejected", "no_reply")
        return
    assert bad["error"]["class"] == expected
    assert "\n" not in bad["error"]["message"]


def test_render() -> None:
    messages = [{"role": "user", "content": "x"}]
    on, off, tools = answers(
        "render",
        {"id": 1, "messages": messages},
        {"id": 2, "messages": messages, "thinking": False},
        {"id": 3, "messages": messages, "tools": [{"type": "other"}]},
    )
    assert off["text"] == on["text"] + "</think>"
    assert off["ids"][:-1] == on["ids"]
    assert (on["tools_mode"], tools["tools_mode"]) == (None, "json")
    assert tools["fallback"] == "no entry of type function"


REPLY = {"choices": [{"finish_reason": "stop", "message": {"content": "4", "reasoning": " r"}}]}


@pytest.mark.parametrize(
    ("request_", "thinks"),
    [
        ({}, True),
        ({"thinking": False}, False),
        ({"thinking": {"type": "disabled"}}, False),
        ({"reasoning": {"enabled": False}}, False),
        ({"reasoning": {"effort": "none"}}, False),
        ({"reasoning": {"effort": "high"}}, True),
        ({"chat_template_kwargs": {"thinking": False}}, False),
        ({"chat_template_kwargs": {"enable_thinking": False}}, True),
    ],
)
def test_every_spelling_of_the_switch(request_: dict[str, Any], thinks: bool) -> None:
    (answer,) = answers("rebuild", {"id": 1, "request": request_, "response": {"body": REPLY}})
    assert (answer.get("class") == "thinking_mode_mismatch") == (not thinks)


def test_prompt_ids_tell_the_switch_too() -> None:
    specials = load_renderer(TARGET_DIR, "kimi-k2.5").tokenizer.specials
    closed = {"input_ids_tail": [specials["<think>"], specials["</think>"]]}
    (answer,) = answers("rebuild", {"id": 1, "request": closed, "response": {"body": REPLY}})
    assert answer["class"] == "thinking_mode_mismatch"


def test_body_as_object_text_stream_or_bare() -> None:
    delta = {"choices": [{"finish_reason": "stop", "delta": REPLY["choices"][0]["message"]}]}
    forms = [
        {"status": 200, "body": REPLY},
        {"status": 200, "body": f"\n  \n{json.dumps(REPLY)}"},
        {"status": 200, "body": {"sse": f"data: {json.dumps(delta)}\n\ndata: [DONE]\n\n"}},
        REPLY,
    ]
    told = answers("rebuild", *[{"id": 0, "response": form} for form in forms])
    assert told[0]["completion_text"] == " r</think>4<|im_end|>"
    assert all(answer == told[0] for answer in told)
    assert told[0]["verdict"] == "unverifiable"
    assert told[0]["count"] == {"rebuilt": len(told[0]["completion_ids"]), "billed": None}


def test_a_bad_directory_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError):
        tokens.run("encode", tmp_path, [], print)
