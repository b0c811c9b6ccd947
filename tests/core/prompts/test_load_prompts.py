"""Datasets of a config -> prompts: ids, duplicates, twins, limits, and errors with their line."""

import json
from pathlib import Path
from typing import Any

import pytest

from core.config import parse
from core.errors import PromptError
from core.prompts import load_prompts
from core.schema import Prompt

ANSWER = {"role": "assistant", "content": "x"}


def ask(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


def load(tmp_path: Path, rows: list[Any], generate: Any = None, **dataset: Any) -> list[Prompt]:
    path = tmp_path / "d.jsonl"
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    section = {"name": "d", "path": str(path), **dataset}
    return load_prompts(parse({"dataset": [section], "generate": generate or {}}, "t"))


def test_ids_follow_content_and_settings(tmp_path: Path) -> None:
    rows = [ask("a"), ask("b"), ask("a"), ask("a", thinking=False)]
    prompts = load(tmp_path, rows)
    assert [p.source_row for p in prompts] == [1, 2, 4]
    assert len({p.twin_id for p in prompts}) == 3
    again = load(tmp_path, rows)
    assert [p.prompt_id for p in again] == [p.prompt_id for p in prompts]
    hotter = load(tmp_path, rows, {"temperature": 0.3})
    assert [p.twin_id for p in hotter] == [p.twin_id for p in prompts]
    assert not {p.prompt_id for p in hotter} & {p.prompt_id for p in prompts}


def test_preserved_thinking_is_another_question(tmp_path: Path) -> None:
    (plain,) = load(tmp_path, [ask("a")])
    (kept,) = load(tmp_path, [ask("a")], preserve_thinking=True)
    assert (plain.preserve_thinking, kept.preserve_thinking) == (False, True)
    assert plain.twin_id != kept.twin_id and plain.prompt_id != kept.prompt_id


def test_key_order_does_not_make_another_prompt(tmp_path: Path) -> None:
    rows = [
        '{"messages": [{"role": "user", "content": "é \\ud83d"}]}',
        '{"messages": [{"content": "\\u00e9 \\ud83d", "role": "user"}]}',
    ]
    assert len(load(tmp_path, rows)) == 1


def test_twins_are_spread_and_ask_the_same_question(tmp_path: Path) -> None:
    prompts = load(tmp_path, [ask(str(i)) for i in range(9)], twins=3)
    apis = [p for p in prompts if p.arm == "declared"]
    twins = [p for p in prompts if p.arm == "local"]
    assert [t.messages[0]["content"] for t in twins] == ["0", "3", "6"]
    assert {t.backend for t in twins} == {"sglang"}
    assert {t.twin_id for t in twins} <= {p.twin_id for p in apis}
    assert not {t.prompt_id for t in twins} & {p.prompt_id for p in apis}


def test_limit_counts_distinct_prompts(tmp_path: Path) -> None:
    prompts = load(tmp_path, [ask("a"), ask("a"), ask("b"), ask("c")], limit=2)
    assert [p.messages[0]["content"] for p in prompts] == ["a", "b"]


def test_the_corpus_is_a_dataset() -> None:
    section = {"name": "e", "kind": "embedded", "limit": 40, "twins": 10}
    prompts = load_prompts(parse({"dataset": [section]}, "t"))
    assert len([p for p in prompts if p.arm == "declared"]) == 40
    assert len([p for p in prompts if p.arm == "local"]) == 10
    assert any(p.tools for p in prompts) and {p.thinking for p in prompts} == {True, False}


@pytest.mark.parametrize(
    ("rows", "where", "words"),
    [
        ([ask("a"), "{not json"], ":2:", "not JSON"),
        (["[1]"], ":1:", "not a JSON object"),
        (
            [ask("a"), "", {"messages": [{"role": "assistant", "content": "x"}]}],
            ":3:",
            "no user turn",
        ),
        ([{"prompt": "x"}], ":1:", 'no "messages"'),
        ([{"messages": [{"role": "user", "contents": "x"}]}], ":1:", "user message has no content"),
        ([ask("a", thinking="yes")], ":1:", "thinking"),
        ([ask("a", tools={})], ":1:", "tools"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, rows: list[Any], where: str, words: str) -> None:
    with pytest.raises(PromptError) as caught:
        load(tmp_path, rows)
    assert where in str(caught.value) and words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bad_files_are_named(tmp_path: Path) -> None:
    section = {"name": "d", "path": str(tmp_path / "none.jsonl")}
    with pytest.raises(PromptError, match=r"none\.jsonl: cannot be read"):
        load_prompts(parse({"dataset": [section]}, "t"))
    with pytest.raises(PromptError, match="no prompt of its own"):
        load(tmp_path, [""])
    with pytest.raises(PromptError, match=r"no \[\[dataset\]\]"):
        load_prompts(parse({}, "t"))
    (tmp_path / "latin.jsonl").write_bytes(b'{"a": 1}\n{"b": "\xe9"}\n')
    section = {"name": "d", "path": str(tmp_path / "latin.jsonl"), "kind": "opencode"}
    with pytest.raises(PromptError, match="not UTF-8"):
        load_prompts(parse({"dataset": [section]}, "t"))


def test_odd_rows_of_a_published_set_are_passed_over_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"input": "a"}, {"input": ""}, {"input": "b"}, {"output": "x"}]
    prompts = load(tmp_path, rows, kind="opencode")
    assert len(prompts) == 2
    assert "2 rows passed over" in caplog.text and ":2:" in caplog.text


def test_a_byte_order_mark_does_no_harm(tmp_path: Path) -> None:
    (only,) = load(tmp_path, ["\ufeff" + json.dumps(ask("a"))])
    assert (only.source_row, only.messages[0]["content"]) == (1, "a")
