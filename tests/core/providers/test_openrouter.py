"""OpenRouter's pre-flight and the request that it sends: the account, the endpoints, every routing
field."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from core.config import parse
from core.errors import ConfigError, ProviderError
from core.providers import base
from core.providers.openrouter import OpenRouter
from core.schema import Sampling
from tests.core.generate.rig import ALDER, prompts_of

SAMPLING = Sampling(max_tokens=1_000, seed=7)


class Site:
    """Answers by path; keeps what was asked and with which headers."""

    def __init__(self, **answers: Any) -> None:
        self.answers = {"key": {"data": {}}, "endpoints": {"data": {"endpoints": [ALDER]}}}
        self.answers |= answers
        self.asked: list[str] = []
        self.headers: list[dict[str, str]] = []

    async def _any(self, request: web.Request) -> web.Response:
        name = request.path.rsplit("/", 1)[-1]
        self.asked.append(name)
        self.headers.append(dict(request.headers))
        answer = self.answers.get(name, (404, {"error": {"message": "none"}}))
        status, data = answer if isinstance(answer, tuple) else (200, answer)
        if isinstance(data, str):
            return web.Response(text=data, status=status, content_type="text/html")
        return web.json_response(data, status=status)


@asynccontextmanager
async def openrouter(
    site: Site, budget_usd: float = 5.0, **options: Any
) -> AsyncIterator[OpenRouter]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", site._any)
    async with TestServer(app) as server:
        url = str(server.make_url("/api/v1"))
        section = {"base_url": url, "model": "org/m", **options}
        run = {"budget_usd": budget_usd}
        provider = OpenRouter(parse({"run": run, "generate": {"openrouter": section}}, "t"))
        try:
            yield provider
        finally:
            await provider.close()


HTML = "<!doctype html><title>hello</title>"


@pytest.mark.parametrize(
    ("answers", "kind", "words"),
    [
        ({"key": (401, {})}, "key_refused", "key in OPENROUTER_API_KEY is refused"),
        ({"key": HTML}, "not_openrouter", "without JSON; check openrouter.base_url"),
        ({"endpoints": (404, {})}, "unknown_model", "no model 'org/m'; check openrouter.model"),
        ({"endpoints": HTML}, "not_openrouter", "without the endpoints of org/m; check"),
        ({"endpoints": (503, {})}, "unavailable", "HTTP 503; retry later"),
        (
            {"key": {"data": {"limit_remaining": 0.001}}},
            "payment_required",
            r"\$0.0010 left does not cover one worst-case request \(\$0.0200\)",
        ),
        (
            {"credits": {"data": {"total_credits": 10.0, "total_usage": 12.5}}},
            "payment_required",
            r"\$0.0000 left does not cover",
        ),
        ({"endpoints": {"data": {"endpoints": []}}}, "no_endpoint", "the model has none"),
    ],
)
async def test_what_is_refused_before_the_first_request(
    answers: dict[str, Any], kind: str, words: str
) -> None:
    site = Site(**answers)
    async with openrouter(site) as provider:
        with pytest.raises(ProviderError, match=words) as caught:
            await provider.preflight(SAMPLING)
    assert caught.value.kind == kind and "\n" not in str(caught.value)
    assert "completions" not in site.asked


async def test_account_and_prices_are_shown_and_a_short_account_is_advice() -> None:
    site = Site(
        key={"data": {"limit_remaining": 4.0}},
        credits={"data": {"total_credits": 10.0, "total_usage": 2.5}},
    )
    async with openrouter(site, app_url="https://example.org/me") as provider:
        lines = await provider.preflight(SAMPLING)
    assert lines == [
        "openrouter: $4.00 left on this key",
        "openrouter: $7.50 left of credits",
        "openrouter: alder at $1.000 in, $20.000 out per million tokens (int4)",
        'openrouter: not checked before the first request: data_collection = "deny", '
        "enforce_distillable_text",
        "openrouter: $4.00 left is less than run.budget_usd $5.00; add credits, or the run stops "
        "at them",
    ]
    assert [isinstance(line, base.Advice) for line in lines] == [False] * 4 + [True]
    sent = site.headers[0]
    assert sent["HTTP-Referer"] == "https://example.org/me" and sent["X-Title"] == "eyas"
    assert sent["X-OpenRouter-Metadata"] == "enabled"
    async with openrouter(site, budget_usd=3.0) as provider:
        assert len(await provider.preflight(SAMPLING)) == 4


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, ""),
        ({"zdr": True}, "zdr"),
        ({"enforce_distillable_text": True, "zdr": True}, "zdr, enforce_distillable_text"),
        ({"data_collection": "deny"}, 'data_collection = "deny"'),
    ],
)
async def test_what_endpoints_do_not_tell_is_said_not_to_be_checked(
    options: dict[str, Any], said: str
) -> None:
    loose = {"data_collection": "allow", "zdr": False, "enforce_distillable_text": False}
    async with openrouter(Site(), **loose | options) as provider:
        lines = await provider.preflight(SAMPLING)
    words = "openrouter: not checked before the first request: "
    assert [x.removeprefix(words) for x in lines if x.startswith(words)] == [said] * bool(said)


ROUTING: dict[str, Any] = {
    "only": ["alder", "birch"],
    "order": ["birch", "alder"],
    "ignore": ["oak"],
    "quantizations": ["int4", "fp8"],
    "sort": "throughput",
    "preferred_min_throughput": {"p50": 30.0, "p90": 10.0},
    "preferred_max_latency": 2.5,
    "require_parameters": False,
    "allow_fallbacks": True,
    "max_price_prompt": 1.0,
    "max_price_completion": 30.0,
    "max_price_request": 0.5,
    "max_price_image": 0.25,
    "data_collection": "allow",
    "zdr": True,
    "enforce_distillable_text": True,
}
SAME = {
    "require_parameters": False,
    "data_collection": "allow",
    "quantizations": ["int4", "fp8"],
    "preferred_min_throughput": {"p50": 30.0, "p90": 10.0},
    "preferred_max_latency": 2.5,
    "zdr": True,
    "enforce_distillable_text": True,
    "max_price": {"prompt": 1.0, "completion": 30.0, "request": 0.5, "image": 0.25},
}


@pytest.mark.parametrize(
    ("provider", "own"),
    [
        ("alder", {"only": ["alder"], "allow_fallbacks": False}),
        (
            None,
            {
                "only": ["alder", "birch"],
                "order": ["birch", "alder"],
                "ignore": ["oak"],
                "sort": "throughput",
                "allow_fallbacks": True,
            },
        ),
    ],
)
async def test_every_routing_field_is_sent(provider: str | None, own: dict[str, Any]) -> None:
    async with openrouter(Site(), **ROUTING) as client:
        body = client.body(request(provider))
    assert body["provider"] == SAME | own
    assert body["session_id"].endswith("-prefix") and body["seed"] == 7


def request(provider: str | None = "alder", thinking: bool = True) -> base.CompletionRequest:
    return base.CompletionRequest(
        request_id="r",
        prompt=prompts_of(1, thinking=thinking)[0],
        prompt_ids=[1],
        sampling=SAMPLING,
        provider=provider,
        session="prefix",
    )


@pytest.mark.parametrize(
    ("options", "thinking", "sent"),
    [
        ({}, True, {"enabled": True}),
        ({}, False, {"enabled": False}),
        ({"reasoning_effort": "high"}, True, {"enabled": True, "effort": "high"}),
        ({"reasoning_effort": "high"}, False, {"enabled": False}),
        ({"reasoning_max_tokens": 512}, True, {"enabled": True, "max_tokens": 512}),
    ],
)
async def test_reasoning_switches(
    options: dict[str, Any], thinking: bool, sent: dict[str, Any]
) -> None:
    async with openrouter(Site(), **options) as client:
        assert client.body(request(thinking=thinking))["reasoning"] == sent


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"reasoning_effort": "high", "reasoning_max_tokens": 9}, "exclude each other"),
        ({"quantizations": ["int5"]}, "'int5' is not known"),
        ({"sort": "exacto"}, "'exacto' is not known; use price, throughput, latency"),
        ({"preferred_max_latency": {"p95": 1.0}}, "p95"),
        ({"preferred_min_throughput": -1.0}, ">= 0"),
    ],
)
def test_settings_that_cannot_be_meant(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse({"generate": {"openrouter": options}}, "t")
    assert words in str(caught.value)
