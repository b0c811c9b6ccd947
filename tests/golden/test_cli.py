"""Every golden vector through `eyas tokens` as a person runs it: one process a mode, JSON lines in,
JSON lines out."""

import json
import subprocess
import sys
from typing import Any

from tests.golden.test_golden import completion_row, expand, same_ids
from tests.kimi_files import KIMI, golden, needs_kimi

pytestmark = needs_kimi
REFUSED_ON_PURPOSE = 11
"""Prompts of kind `template_only`: what the template makes of a request that must not be sent."""


def eyas_tokens(mode: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Answers in order; nothing on stderr, exit code 0."""
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    done = subprocess.run(
        [sys.executable, "-m", "core", "tokens", mode, "--tokenizer", str(KIMI)],
        input=lines,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stderr) == (0, "")
    answers = [json.loads(line) for line in done.stdout.split("\n") if line]
    assert [a["id"] for a in answers] == [r["id"] for r in rows]
    return answers


def test_encode() -> None:
    rows = golden("tokens")
    asked = [{"id": r["id"], "text": expand(r["input"]["text"])} for r in rows]
    told = zip(rows, eyas_tokens("encode", asked), strict=True)
    right = [r["id"] for r, a in told if same_ids(a["ids"], r["expect"], "ordinary_ids")]
    assert len(right) == len(rows) == 191


def test_render_prompts_and_tools() -> None:
    prompts, tools = golden("prompts"), golden("tools")
    question = [{"role": "user", "content": "q"}]
    asked = [{"id": r["id"], **r["input"]} for r in prompts]
    asked += [{"id": r["id"], "messages": question, "tools": r["input"]["tools"]} for r in tools]
    answers = eyas_tokens("render", asked)
    equal, refused = 0, []
    for row, answer in zip(prompts, answers, strict=False):
        if "error" in answer:
            refused.append(row["kind"])
            continue
        expect = row["expect"]
        ids = expect["safe_ids"] if row["kind"] == "special_text" else expect["ids"]
        got = (answer["text"], answer["tools_mode"], answer["ids"])
        equal += got == (expect["text"], expect["tools_mode"], ids)
    assert refused == ["template_only"] * REFUSED_ON_PURPOSE
    assert equal + len(refused) == len(prompts) == 111

    opened, closed = "<|im_system|>tool_declare<|im_middle|>", "<|im_end|><|im_user|>user"
    blocks = 0
    for row, answer in zip(tools, answers[len(prompts) :], strict=True):
        body = answer["text"].removeprefix(opened).rpartition(closed)[0]
        blocks += (body, answer["tools_mode"]) == (row["expect"]["text"], row["expect"]["mode"])
    assert blocks == len(tools) == 351


def test_rebuild() -> None:
    rows = golden("completions")
    answers = eyas_tokens("rebuild", [completion_row(r) for r in rows])
    right = 0
    for row, answer in zip(rows, answers, strict=True):
        expect = row["expect"]
        cut = expect.get("truncated", False)
        verdict = ("rejected", "truncated_length") if cut else ("consistent", None)
        told = (answer["completion_text"], answer["completion_ids"])
        right += told == (expect["text"], expect["ids"]) and (
            (answer["verdict"], answer.get("class")) == verdict
        )
    assert right == len(rows) == 103
