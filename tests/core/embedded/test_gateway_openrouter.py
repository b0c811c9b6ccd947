"""OpenRouter's shape with faults off: replies, streams, routing, money, lookups."""

from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientConnectionResetError, web
from aiohttp.test_utils import TestClient, TestServer

from core.embedded.billing import PROVIDERS, pico, usd
from core.embedded.gateway import quiet_goodbye
from core.render.base import load_renderer
from tests.core.embedded.serving import (
    AUTH,
    CHAT,
    PLAIN,
    TARGET_DIR,
    TOOLS,
    TWO_CALLS,
    ask,
    bill,
    ids_of,
    message,
    post,
    reply,
    serving,
    sse,
    until,
)


async def test_a_whole_reply(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        response = await post(client)
        body = await response.json()
        assert response.headers["X-Generation-Id"] == body["id"]
        assert (body["provider"], body["model"]) == ("Alder", "eyas/embedded")
        choice = body["choices"][0]
        assert choice["finish_reason"] == choice["native_finish_reason"] == "stop"
        assert choice["message"]["reasoning"] == " Two and two.\n"
        assert choice["message"]["content"] == "\n\nFour. "
        assert choice["message"]["reasoning_details"] == [
            {"type": "reasoning.text", "text": " Two and two.\n", "format": "unknown", "index": 0}
        ]
        assert "tool_calls" not in choice["message"]
        renderer = load_renderer(TARGET_DIR, "kimi-k2.5")
        prompt = renderer.render([{"role": "user", "content": "What is 2 + 2?"}], None, True)
        usage = body["usage"]
        assert usage["prompt_tokens"] == len(prompt.ids)
        assert usage["completion_tokens"] == len(ids_of(PLAIN))
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert usage["completion_tokens_details"]["reasoning_tokens"] == len(
            ids_of(" Two and two.\n", stop=False)
        )
        # Alder: 0.60 and 3.00 USD per million.
        expected = usage["prompt_tokens"] * 0.6e-6 + usage["completion_tokens"] * 3e-6
        assert usage["cost"] == pytest.approx(expected, abs=1e-12)


async def test_calls_declared_and_not(tmp_path: Path) -> None:
    async with serving(tmp_path, TWO_CALLS) as client:
        declared = (await reply(client, tools=TOOLS))["choices"][0]
        assert declared["finish_reason"] == "tool_calls"
        assert declared["message"]["content"] == "\n\nChecking."
        assert declared["message"]["tool_calls"][1] == {
            "index": 1,
            "id": "functions.get_weather:1",
            "type": "function",
            "function": {"name": "get_weather", "arguments": '{"city":"Bergen"}'},
        }
        raw = (await reply(client))["choices"][0]
        assert raw["finish_reason"] == "stop"
        assert raw["message"]["content"] == TWO_CALLS.partition("</think>")[2]


async def test_tools_and_thinking_change_the_prompt(tmp_path: Path) -> None:
    renderer = load_renderer(TARGET_DIR, "kimi-k2.5")
    messages = [{"role": "user", "content": "What is 2 + 2?"}]
    async with serving(tmp_path) as client:
        with_tools = await reply(client, tools=TOOLS)
        count = len(renderer.render(messages, TOOLS, True).ids)
        assert with_tools["usage"]["prompt_tokens"] == count
        instant = await reply(client, reasoning={"enabled": False})
        assert instant["usage"]["prompt_tokens"] == len(renderer.render(messages, None, False).ids)
        assert instant["choices"][0]["message"]["reasoning"] is None
        none = await reply(client, reasoning={"effort": "none"})
        assert none["usage"]["prompt_tokens"] == instant["usage"]["prompt_tokens"]
        named = [{"role": "system", "name": "style", "content": "Be brief."}, *messages]
        prefixed = [{"role": "system", "content": "style: Be brief."}, *messages]
        counts = [(await reply(client, messages=m))["usage"] for m in (named, prefixed)]
        assert counts[0]["prompt_tokens"] == counts[1]["prompt_tokens"]


@pytest.mark.parametrize("timing", [[], ["--tokens-per-s", "400"]])
async def test_a_stream_says_what_the_whole_reply_says(tmp_path: Path, timing: list[str]) -> None:
    async with serving(tmp_path, TWO_CALLS, extra=timing) as client:
        whole = await reply(client, tools=TOOLS)
        response = await post(client, tools=TOOLS, stream=True)
        text = await response.text()
        assert response.headers["Content-Type"] == "text/event-stream"
        assert text.startswith(": OPENROUTER PROCESSING\n\n")
        assert text.endswith("data: [DONE]\n\n")
        events = sse(text)
        assert {e["id"] for e in events} == {response.headers["X-Generation-Id"]}
        deltas = [e["choices"][0]["delta"] for e in events if e["choices"]]
        expected = whole["choices"][0]["message"]
        assert "".join(d.get("reasoning", "") for d in deltas) == expected["reasoning"]
        assert "".join(d["content"] for d in deltas) == expected["content"]
        calls: dict[int, dict[str, str]] = {}
        for part in (c for d in deltas for c in d.get("tool_calls", [])):
            call = calls.setdefault(part["index"], {"id": part.get("id", ""), "arguments": ""})
            call["arguments"] += part["function"]["arguments"]
        assert [(c["id"], c["arguments"]) for c in calls.values()] == [
            (c["id"], c["function"]["arguments"]) for c in expected["tool_calls"]
        ]
        assert events[-1]["choices"] == []
        assert events[-1]["usage"] == whole["usage"]
        assert events[-2]["choices"][0]["finish_reason"] == "tool_calls"


async def test_providers_differ(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        replies = {p.name: await reply(client, provider={"only": [p.tag]}) for p in PROVIDERS}
        n = len(ids_of(PLAIN))
        assert [r["usage"]["completion_tokens"] for r in replies.values()] == [n, n - 1, n]
        for provider in PROVIDERS:
            usage = replies[provider.name]["usage"]
            cost = provider.cost_pico(usage["prompt_tokens"], usage["completion_tokens"])
            assert usage["cost"] == usd(cost)
        cut = await reply(client, provider={"only": ["birch"]}, max_tokens=5)
        assert cut["usage"]["completion_tokens"] == 5
        assert cut["choices"][0]["finish_reason"] == "length"
        assert cut["choices"][0]["message"]["content"] is None


async def test_the_bill_is_the_sum_of_the_replies(tmp_path: Path) -> None:
    async with serving(tmp_path, PLAIN, TWO_CALLS) as client:
        asks = [{"seed": i, "provider": {}, "stream": i % 2 == 0} for i in range(20)]
        costs = []
        for fields in asks:
            response = await post(client, **fields)
            text = await response.text()
            body = sse(text)[-1] if fields["stream"] else await response.json()
            costs.append(pico(body["usage"]["cost"]))
        books = await bill(client)
        assert pico(books["total_usd"]) == sum(costs)
        assert (books["open"], len(books["generations"])) == (0, 20)
        credits = await (await client.get("/api/v1/credits", headers=AUTH)).json()
        assert credits["data"] == {"total_credits": 1000.0, "total_usage": books["total_usd"]}
        key = await (await client.get("/api/v1/key", headers=AUTH)).json()
        assert key["data"]["usage"] == books["total_usd"]
        assert key["data"]["limit_remaining"] == pytest.approx(1000 - books["total_usd"])


async def wait_for_bill(client: Any) -> dict[str, Any]:
    """The books once every generation is settled."""

    async def settled() -> bool:
        books = await bill(client)
        return bool(books["generations"]) and books["open"] == 0

    await until(settled)
    return await bill(client)


@pytest.mark.parametrize(
    ("provider", "stream", "stops"),
    [("alder", True, True), ("birch", True, True), ("cedar", True, False), ("alder", False, False)],
)
async def test_a_cancelled_request_is_billed_as_its_provider_does(
    tmp_path: Path, provider: str, stream: bool, stops: bool
) -> None:
    text = " word" * 18 + "</think>Done."
    total = len(ids_of(text))
    slow = ["--tokens-per-s", "60"]
    async with serving(tmp_path, text, extra=slow) as client:
        response = await post(client, provider={"only": [provider]}, stream=stream)
        if stream:
            seen = b""
            while seen.count(b"data: ") < 5:
                seen += await response.content.readany()
        response.close()
        books = await wait_for_bill(client)
        line = books["generations"][0]
        rates = next(p for p in PROVIDERS if p.tag.startswith(provider))
        expected = rates.cost_pico(line["prompt_tokens"], line["completion_tokens"])
        assert pico(line["cost_usd"]) == expected
        if stops:
            assert 5 <= line["completion_tokens"] < total
            assert (line["cancelled"], line["finish_reason"]) == (True, None)
        else:
            assert line["completion_tokens"] == total
            assert (line["cancelled"], line["finish_reason"]) == (False, "stop")
        requests = (await (await client.get("/gateway/requests")).json())["requests"]
        assert requests[0]["left"] is not None
        lookup = await client.get(f"/api/v1/generation?id={line['id']}", headers=AUTH)
        data = (await lookup.json())["data"]
        assert data["total_cost"] == line["cost_usd"]
        assert data["cancelled"] == stops
        assert data["native_tokens_completion"] == line["completion_tokens"]


async def test_cancelled_before_the_first_token_is_free(tmp_path: Path) -> None:
    async with serving(tmp_path, extra=["--tokens-per-s", "50", "--ttft-s", "30"]) as client:
        response = await post(client, stream=True)
        response.close()
        books = await wait_for_bill(client)
        assert books["total_usd"] == 0
        assert books["generations"][0]["completion_tokens"] == 0


async def test_a_client_that_vanishes_while_it_is_written_to_is_no_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def gone(request: web.Request) -> web.StreamResponse:
        raise ClientConnectionResetError("Cannot write to closing transport")

    app = web.Application(middlewares=[quiet_goodbye])
    app.router.add_get("/", gone)
    async with TestClient(TestServer(app)) as client:
        assert (await client.get("/")).status == 499
    assert not [r for r in caplog.records if r.name == "aiohttp.server"]


async def test_lookup_lags(tmp_path: Path) -> None:
    async with serving(tmp_path, extra=["--lookup-lag-s", "0.2"]) as client:
        body = await reply(client)
        path = f"/api/v1/generation?id={body['id']}"
        assert (await client.get(path, headers=AUTH)).status == 404

        async def found() -> bool:
            return (await client.get(path, headers=AUTH)).status == 200

        await until(found)
        response = await client.get(path, headers=AUTH)
        data = (await response.json())["data"]
        assert data["total_cost"] == body["usage"]["cost"]
        assert data["native_tokens_prompt"] == body["usage"]["prompt_tokens"]
        assert data["native_tokens_reasoning"] > 0
        assert data["provider_name"] == "Alder"
        unknown = await client.get("/api/v1/generation?id=<b>", headers=AUTH)
        assert unknown.status == 404
        assert "<b>" not in await unknown.text()


async def test_credit_is_checked_before_anything_is_sampled(tmp_path: Path) -> None:
    async with serving(tmp_path, extra=["--credit", "0.001"]) as client:
        refused = await post(client, max_tokens=1_000)
        assert refused.status == 402
        error = (await refused.json())["error"]
        assert "requested up to 1000 tokens" in error["message"]
        assert error["code"] == 402
        assert (await post(client, max_tokens=200)).status == 200
        # Without max_tokens the whole context is the worst case.
        body = ask()
        del body["max_tokens"]
        assert (await client.post(CHAT, json=body, headers=AUTH)).status == 402
        assert len((await bill(client))["generations"]) == 1


async def test_requests_in_flight_hold_credit(tmp_path: Path) -> None:
    extra = ["--credit", "0.001", "--tokens-per-s", "40", "--ttft-s", "20"]
    async with serving(tmp_path, extra=extra) as client:
        first = await post(client, stream=True)
        assert (await post(client)).status == 402
        first.close()
        await wait_for_bill(client)
        assert (await post(client, stream=True)).status == 200


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"model": "nobody/nothing"}, 400),
        ({"messages": []}, 400),
        ({"messages": [{"role": "user", "content": "x " * 300_000}]}, 400),
        ({"messages": "hello"}, 400),
        ({"provider": {"only": ["nobody"]}}, 404),
        ({"provider": {"max_price": {"completion": 0.1}}}, 404),
    ],
)
async def test_refused_requests(tmp_path: Path, fields: dict[str, object], status: int) -> None:
    async with serving(tmp_path) as client:
        response = await post(client, **fields)
        assert response.status == status
        assert (await response.json())["error"]["code"] == status
        assert (await bill(client))["generations"] == []


async def test_keys(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        assert (await client.post(CHAT, json=ask())).status == 401
        refused = {"Authorization": "Bearer eyas-refused-key"}
        assert (await client.post(CHAT, json=ask(), headers=refused)).status == 401
        for path in ("key", "credits", "generation?id=x"):
            assert (await client.get(f"/api/v1/{path}", headers=refused)).status == 401


async def test_models_and_endpoints(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        models = (await (await client.get("/api/v1/models")).json())["data"]
        assert models[0]["id"] == "eyas/embedded"
        path = "/api/v1/models/eyas/embedded/endpoints"
        rows = (await (await client.get(path)).json())["data"]["endpoints"]
        assert [(r["provider_name"], r["quantization"]) for r in rows] == [
            ("Alder", "int4"),
            ("Birch", "int4"),
            ("Cedar", "fp8"),
        ]
        assert [r["pricing"]["completion"] for r in rows] == ["0.000003", "0.0000025", "0.0000022"]
        assert (await client.get("/api/v1/models/no/body/endpoints")).status == 404


async def test_reasoning_can_be_left_out(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        shown = await reply(client)
        hidden = await reply(client, reasoning={"exclude": True})
        assert hidden["choices"][0]["message"]["reasoning"] is None
        assert hidden["usage"] == shown["usage"]
        assert (await message(client, include_reasoning=False))["reasoning"] is None
        text = await (await post(client, reasoning={"exclude": True}, stream=True)).text()
        assert not any("reasoning" in c["delta"] for e in sse(text) for c in e["choices"])


@pytest.mark.parametrize("stream", [True, False])
async def test_the_bytes_of_every_body_are_counted(tmp_path: Path, stream: bool) -> None:
    async with serving(tmp_path, PLAIN) as client:
        received = await (await post(client, stream=stream)).read()
        (row,) = (await (await client.get("/gateway/requests")).json())["requests"]
        assert row["body_bytes"] == len(received) > 100
