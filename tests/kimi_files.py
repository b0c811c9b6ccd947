"""Kimi's tokenizer files and the fault cases, from the sibling folder `shared`; skip without it."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from core import tokens
from core.render.base import Renderer, load_renderer

SHARED = Path(__file__).resolve().parents[1] / ".." / "shared"
KIMI = SHARED / "kimi"
CASES = SHARED / "cases"

needs_kimi = pytest.mark.skipif(
    not (KIMI / "tiktoken.model").exists(),
    reason="../shared/kimi is absent (Kimi's tokenizer files are not in the repository)",
)
needs_cases = pytest.mark.skipif(
    not (CASES / "C01.json").exists() or not (KIMI / "tiktoken.model").exists(),
    reason="../shared/cases or ../shared/kimi is absent: they are not in the repository",
)


@cache
def kimi_renderer(variant: str = "kimi-k2.5") -> Renderer:
    return load_renderer(KIMI, variant)


def golden(name: str) -> list[dict[str, Any]]:
    path = KIMI / "golden" / f"{name}.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n") if line]


def case(name: str) -> Any:
    return json.loads((CASES / name).read_text())


def ask_tokens(mode: tokens.Mode, rows: list[dict[str, Any]], renderer: Renderer) -> list[Any]:
    """The JSONL contract, line by line."""
    answers: list[str] = []
    tokens.answer_lines(mode, renderer, [json.dumps(row) for row in rows], answers.append)
    return [json.loads(line) for line in answers]


def rebuild_one(
    response: Any, request: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    row = {"id": "x", "request": request or {}, "response": response, **more}
    (answer,) = ask_tokens("rebuild", [row], kimi_renderer())
    return dict(answer)
