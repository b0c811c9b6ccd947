"""What is wrong with a config is said in one line before the first paid request: by the doctor, and
by a run, whose exit code says whose fault it is."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from core import cli
from core.config import Config, dump, parse
from core.journal import load_view
from core.pipeline.engine import Engine, Options
from core.pipeline.setting import resolve
from core.store import create_run
from tests.core.generate.rig import ALDER

HTML = "<!doctype html><title>Welcome</title>"
CHEAP = {**ALDER, "max_completion_tokens": 64}
TIGHT = {**ALDER, "context_length": 1_000}
TOOLLESS = {**ALDER, "supported_parameters": ["max_tokens", "temperature", "top_p", "reasoning"]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
ROW = {"messages": [{"role": "user", "content": "1 + 1?"}], "tools": [TOOL]}
SERVERS: dict[str, dict[str, Any]] = {
    "openrouter": {
        "/api/v1/key": {"data": {"limit_remaining": 50.0}},
        "/api/v1/models/org/m/endpoints": {"data": {"endpoints": [ALDER]}},
    },
    "sglang": {"/server_info": {"version": "0.5.14", "model_path": "org/m"}},
    "vllm": {
        "/v1/models": {"data": [{"id": "org/m", "max_model_len": 4_096}]},
        "/v1/chat/completions": {"choices": [{"token_ids": [1]}]},
    },
}


def without_tools(body: dict[str, Any]) -> Any:
    refused = (400, {"message": "tools need a parser"})
    return refused if "tools" in body else {"choices": [{"token_ids": [1]}]}


class Host:
    """One server that plays any backend; `paid` counts what a paid backend would bill."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers = answers
        self.paid = 0

    async def answer(self, request: web.Request) -> web.Response:
        self.paid += request.path == "/api/v1/chat/completions"
        found = self.answers.get(request.path, (404, {"error": {"message": "not here"}}))
        if callable(found):
            found = found(await request.json())
        status, body = found if isinstance(found, tuple) else (200, found)
        if isinstance(body, str):
            return web.Response(text=body, status=status, content_type="text/html")
        return web.json_response(body, status=status)

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.answer)
        return app


def config_for(backend: str, url: str, settings: dict[str, Any], prompts: Path) -> Config:
    run = {"budget_usd": 5.0, "min_free_disk_bytes": 1, "stages": ["generate"]}
    data: dict[str, Any] = {
        "run": run | settings.get("run", {}),
        "dataset": [{"name": "d", "path": str(prompts), "backend": backend}],
        "generate": {
            "max_tokens": 1_000,
            "max_in_flight": 4,
            "openrouter": {"base_url": f"{url}/api/v1", "model": "org/m"}
            | settings.get("openrouter", {}),
            "sglang": {"urls": [url]} | settings.get("sglang", {}),
            "openai": {"base_url": f"{url}/v1", "model": "org/m"} | settings.get("openai", {}),
        },
    }
    return parse(data, "t")


REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], int, str]] = [
    ("openrouter", {}, {"/api/v1/key": (401, {})}, 1, "key in OPENROUTER_API_KEY is refused"),
    ("openrouter", {"openrouter": {"model": "org/n"}}, {}, 1, "no model 'org/n'"),
    ("openrouter", {"openrouter": {"only": ["aldr"]}}, {}, 1, "only names 'aldr'"),
    ("openrouter", {"openrouter": {"order": ["aldr"]}}, {}, 1, "order names 'aldr'"),
    ("openrouter", {"openrouter": {"ignore": ["alder"]}}, {}, 1, "no endpoint of org/m is left"),
    ("openrouter", {"openrouter": {"max_price_completion": 1.0}}, {}, 1, "above max_price $1.000"),
    (
        "openrouter",
        {},
        {"/api/v1/models/org/m/endpoints": {"data": {"endpoints": [CHEAP]}}},
        1,
        "max_tokens 1000 above its 64",
    ),
    (
        "openrouter",
        {"openrouter": {"require_parameters": False}},
        {"/api/v1/models/org/m/endpoints": {"data": {"endpoints": [TOOLLESS]}}},
        1,
        "alder: does not support tools); set arm",
    ),
    ("vllm", {}, {"/v1/chat/completions": without_tools}, 1, "takes no tools, and prompts declare"),
    (
        "openrouter",
        {},
        {"/api/v1/models/org/m/endpoints": {"data": {"endpoints": [TIGHT]}}},
        1,
        "alder: max_tokens 1000 leaves no room for a prompt in its 1000",
    ),
    ("sglang", {}, {"/server_info": {"max_req_input_len": 999}}, 1, "has a context of 999"),
    (
        "vllm",
        {},
        {"/v1/models": {"data": [{"id": "org/m", "max_model_len": 1_000}]}},
        1,
        "leaves no room for a prompt in the server's 1000",
    ),
    ("openrouter", {"run": {"budget_usd": 0.001}}, {}, 2, "below one worst-case request"),
    ("openrouter", {}, {"/api/v1/key": HTML}, 1, "check openrouter.base_url"),
    ("openrouter", {"openrouter": {"base_url": "localhost:9"}}, {}, 1, "write http://... or https"),
    (
        "openrouter",
        {},
        {"/api/v1/key": {"data": {"limit_remaining": 0.0}}},
        1,
        "does not cover one worst-case request",
    ),
    ("sglang", {"sglang": {"model": "org/n"}}, {}, 1, "serves org/m, sglang.model is org/n"),
    ("sglang", {}, {"/tokenize": {"tokens": [1]}}, 1, "another tokenizer than target.tokenizer"),
    ("sglang", {}, {"/server_info": HTML}, 1, "is this an SGLang server?"),
    (
        "sglang",
        {},
        {"/server_info": (404, {}), "/version": {"version": "0.30"}},
        1,
        'set backend = "vllm"',
    ),
    ("sglang", {"sglang": {"api_key_env": "EYAS_NO_KEY"}}, {}, 2, "EYAS_NO_KEY is not set"),
    ("vllm", {"openai": {"model": "org/n"}}, {}, 1, "does not serve 'org/n'; it has org/m"),
    ("vllm", {}, {"/v1/models": HTML}, 1, "answers no JSON; check openai.base_url"),
    ("vllm", {"openai": {"base_url": "https://api.example.com"}}, {}, 2, "budget could not hold"),
]


@pytest.mark.parametrize(("backend", "settings", "answers", "code", "words"), REFUSED)
async def test_nothing_is_sent_with_a_config_that_cannot_work(
    backend: str,
    settings: dict[str, Any],
    answers: dict[str, Any],
    code: int,
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("EYAS_NO_KEY", raising=False)
    prompts = tmp_path / "p.jsonl"
    prompts.write_text(json.dumps(ROW) + "\n")
    host = Host(SERVERS[backend] | answers)
    async with TestServer(host.app()) as server:
        config = config_for(backend, str(server.make_url("")).rstrip("/"), settings, prompts)
        file = tmp_path / "c.toml"
        file.write_text(dump(config))
        assert await asyncio.to_thread(cli.main, ["doctor", str(file)]) == 1
        said = capsys.readouterr()
        (line,) = [row for row in said.out.splitlines() if row.startswith("fail")]
        assert words in line and said.err == ""
        run = create_run(resolve(config, tmp_path), tmp_path, "refused", ["test"])
        assert await Engine(run, resolve(config, tmp_path), Options([])).main() == code
    view = load_view(run)
    assert view.state == "failed" and words in view.reason and view.reason.isprintable()
    assert host.paid == 0
    assert not run.spend.exists() or run.spend.stat().st_size == 0


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        ("openrouter", "one reply costs at most $0.0200, those to all 1 prompts $0.02"),
        ("sglang", "tokenizer not checked"),
        ("vllm", "returns token ids"),
    ],
)
async def test_the_same_configs_pass_when_nothing_is_wrong(
    backend: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text(json.dumps(ROW) + "\n")
    host = Host(SERVERS[backend])
    async with TestServer(host.app()) as server:
        config = config_for(backend, str(server.make_url("")).rstrip("/"), {}, prompts)
        (tmp_path / "c.toml").write_text(dump(config))
        assert await asyncio.to_thread(cli.main, ["doctor", str(tmp_path / "c.toml")]) == 0
    assert expected in capsys.readouterr().out
    assert host.paid == 0


async def test_the_command_says_it_once(tmp_path: Path) -> None:
    """`eyas run` in lines: the error is one line on stderr, and what was refused is not started."""
    prompts = tmp_path / "p.jsonl"
    prompts.write_text(json.dumps(ROW) + "\n")
    host = Host(SERVERS["openrouter"])
    async with TestServer(host.app()) as server:
        settings = {"openrouter": {"only": ["aldr"]}}
        url = str(server.make_url("")).rstrip("/")
        (tmp_path / "c.toml").write_text(dump(config_for("openrouter", url, settings, prompts)))
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-P", "-m", "core", "run", "c.toml", "--plain"],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            timeout=120,
        )
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith("eyas: openrouter: only names 'aldr'")
    assert done.stderr.count("\n") == 1
    assert "only names" not in done.stdout and "FAILED" in done.stdout
    assert host.paid == 0
