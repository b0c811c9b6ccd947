"""Golden vectors of Kimi-K2.5 where more is known than `eyas tokens` prints (see `test_cli`)."""

import hashlib
import json
from typing import Any

import pytest

from core import tokens
from core.render.tools_ts import declare
from tests.kimi_files import KIMI, ask_tokens, golden, kimi_renderer, needs_kimi

pytestmark = needs_kimi


def expand(recipe: Any) -> str:
    """Texts that are too long to store stand as recipes."""
    if isinstance(recipe, str):
        return recipe
    if "repeat" in recipe:
        part, times = recipe["repeat"]
        return expand(part) * times
    if "concat" in recipe:
        return "".join(map(expand, recipe["concat"]))
    x, out = recipe["lcg"]["seed"], []
    for _ in range(recipe["lcg"]["n"]):
        x = (1103515245 * x + 12345) % 2**31
        alphabet = recipe["lcg"]["alphabet"]
        out.append(alphabet[(x >> 16) % len(alphabet)])
    return "".join(out)


def same_ids(ids: list[int], expect: dict[str, Any], key: str) -> bool:
    if key in expect:
        return bool(ids == expect[key])
    digest = expect[f"{key}_digest"]
    text = ",".join(map(str, ids)).encode()
    return len(ids) == digest["count"] and hashlib.sha256(text).hexdigest() == digest["sha256"]


def test_run_loads_a_directory_and_answers_in_order() -> None:
    answers: list[str] = []
    lines = ['{"id": 7, "text": "Hello"}', "\n", "no json", '{"id": [1], "text": 5}']
    errors = tokens.run("encode", KIMI, lines, answers.append)
    assert errors == 2
    assert [json.loads(a) for a in answers] == [
        {"id": 7, "ids": [19180]},
        {"id": None, "error": json.loads(answers[1])["error"]},
        {"id": [1], "error": json.loads(answers[2])["error"]},
    ]
    assert json.loads(answers[1])["error"]["class"] == "line_not_json"
    assert json.loads(answers[2])["error"]["class"] == "line_invalid"


def test_default_encode_all_equal() -> None:
    tokenizer = kimi_renderer().tokenizer
    wrong = [
        r["id"]
        for r in golden("tokens")
        if not same_ids(
            tokenizer.encode_special(expand(r["input"]["text"])), r["expect"], "special_ids"
        )
    ]
    assert wrong == []


def test_tools_all_equal() -> None:
    rows = golden("tools")
    wrong = []
    for row in rows:
        block = declare(row["input"]["tools"])
        if (block.mode, block.text) != (row["expect"]["mode"], row["expect"]["text"]):
            wrong.append(row["id"])
        assert (block.fallback is not None) == (block.mode == "json")
    assert wrong == []
    assert len(rows) == 351


def test_prompts_all_equal_or_refused() -> None:
    """Only requests that no product should send are refused; in `special_text` ids are the safe
    ones, in `long_run` they are the server's, cut over the whole text."""
    rows = golden("prompts")
    asked = [{"id": r["id"], **r["input"]} for r in rows]
    wrong, refused = [], {}
    for row, answer in zip(rows, ask_tokens("render", asked, kimi_renderer()), strict=True):
        expect = row["expect"]
        if "error" in answer:
            refused[row["id"]] = answer["error"]["class"]
            continue
        ids = expect["safe_ids"] if row["kind"] == "special_text" else expect["ids"]
        got = (answer["text"], answer["tools_mode"], answer["ids"])
        if got != (expect["text"], expect["tools_mode"], ids):
            wrong.append(row["id"])
    assert wrong == []
    assert len(rows) == 111
    only = {r["id"] for r in rows if r["kind"] == "template_only"}
    assert set(refused) <= only
    assert refused["prompt-template_only-009"] == "history_tool_id_nonnative"
    assert refused["prompt-template_only-012"] == "history_tool_args_invalid"


def completion_row(row: dict[str, Any]) -> dict[str, Any]:
    reply = dict(row["input"]["reply"])
    choice = {"finish_reason": reply.pop("finish_reason"), "message": reply}
    usage = {"prompt_tokens": 9, "completion_tokens": len(row["expect"]["ids"])}
    body = {"choices": [choice], "usage": usage}
    request = {"thinking": row["input"]["thinking"]}
    return {"id": row["id"], "request": request, "response": {"status": 200, "body": body}}


def test_twins_have_the_same_ids() -> None:
    """A raw reply and its structured twin."""
    rows = {r["id"]: r for r in golden("completions")}
    answers = ask_tokens("rebuild", [completion_row(r) for r in rows.values()], kimi_renderer())
    ids = {a["id"]: a["completion_ids"] for a in answers}
    twins = [(r["id"], r["twin"]) for r in rows.values() if r.get("twin")]
    assert len(twins) >= 20
    assert all(ids[a] == ids[b] for a, b in twins)


@pytest.mark.parametrize("with_text", [True, False])
def test_server_ids_are_exact_where_text_is_consistent(with_text: bool) -> None:
    rows = [r for r in golden("completions") if not r["expect"].get("truncated")]
    asked = []
    for row in rows:
        ids = row["expect"]["ids"]
        meta = {"finish_reason": {"type": "stop"}, "completion_tokens": len(ids)}
        body: dict[str, Any] = {"output_ids": ids, "meta_info": meta}
        if with_text:
            body["text"] = row["expect"]["text"]
        request = {"thinking": row["input"]["thinking"]}
        asked.append({"id": row["id"], "request": request, "response": {"body": body}})
    answers = ask_tokens("rebuild", asked, kimi_renderer())
    assert {(a["verdict"], a.get("class")) for a in answers} == {("exact", None)}
    assert [a["completion_ids"] for a in answers] == [r["expect"]["ids"] for r in rows]
