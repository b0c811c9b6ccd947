"""The wire form of every fault."""

import email.utils
import json
import math
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from core.embedded.billing import PROVIDERS, pico
from core.embedded.faults import ANSWERS, GENERATION, TEXT, WIRE
from tests.core.embedded.serving import (
    AUTH,
    CHAT,
    PLAIN,
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

COVERED: set[str] = set()
"""Faults that a test of this module asks for; the last test compares it with the list."""


def uses(*names: str) -> Any:
    COVERED.update(names)
    return lambda test: test


STATUSES = {
    "rate_limited": 429,
    "platform_limited": 429,
    "no_credit": 402,
    "forbidden": 403,
    "bad_request": 400,
    "request_timeout": 408,
    "server_error": 500,
    "bad_gateway": 502,
    "unavailable": 503,
    "edge_timeout": 524,
    "overloaded": 529,
}


@uses(*STATUSES)
@pytest.mark.parametrize(("name", "status"), STATUSES.items())
@pytest.mark.parametrize("stream", [False, True])
async def test_statuses(tmp_path: Path, name: str, status: int, stream: bool) -> None:
    async with serving(tmp_path, faults=name) as client:
        response = await post(client, stream=stream)
        assert response.status == status
        error = (await response.json())["error"]
        assert error["code"] == status
        of_platform = name in ("platform_limited", "no_credit", "request_timeout", "server_error")
        assert (error.get("metadata", {}).get("provider_name") is None) == of_platform
        assert ("X-RateLimit-Reset" in response.headers) == (name == "platform_limited")
        assert (await bill(client))["generations"] == []


async def test_retry_after_forms(tmp_path: Path) -> None:
    script = (
        'script:["rate_limited=7", "rate_limited=date12", "rate_limited=none", "unavailable=3",'
        ' "unavailable"]'
    )
    async with serving(tmp_path, faults=script) as client:
        values = [(await post(client)).headers.get("Retry-After") for _ in range(5)]
        assert values[0] == "7"
        date = email.utils.parsedate_to_datetime(values[1] or "").timestamp()
        assert 9 < date - time.time() < 13
        assert values[2:] == [None, "3", None]
        assert (await post(client)).status == 200


@uses("capacity")
async def test_capacity_answers_what_comes_on_top(tmp_path: Path) -> None:
    extra = ["--tokens-per-s", "50", "--ttft-s", "30"]
    async with serving(tmp_path, faults="capacity=2@Alder", extra=extra) as client:
        open_ones = [await post(client, stream=True) for _ in range(2)]
        refused = await post(client, stream=True)
        assert (refused.status, refused.headers.get("Retry-After")) == (429, None)
        assert (await refused.json())["error"]["metadata"]["provider_name"] == "Alder"
        other = await post(client, stream=True, provider={"only": ["birch"]})
        assert other.status == 200
        open_ones[0].close()

        async def admitted() -> bool:
            return (await post(client, stream=True)).status == 200

        await until(admitted)


@uses("html_error", "html_body")
async def test_html(tmp_path: Path) -> None:
    async with serving(tmp_path, faults='script:["html_error","html_body"]') as client:
        for status in (502, 200):
            response = await post(client)
            assert response.status == status
            assert response.content_type == "text/html"
            assert (await response.text()).startswith("<!DOCTYPE html>")


@uses("reset", "hang")
async def test_connections_that_die_before_headers_are_free(tmp_path: Path) -> None:
    async with serving(tmp_path, faults='script:["reset","hang=0.01"]') as client:
        for _ in range(2):
            with pytest.raises((aiohttp.ServerDisconnectedError, aiohttp.ClientOSError)):
                await post(client)
        assert (await bill(client))["generations"] == []


@uses("error_in_200", "choice_error")
async def test_errors_in_a_200(tmp_path: Path) -> None:
    script = 'script:["error_in_200","error_in_200=503","choice_error","error_in_200"]'
    async with serving(tmp_path, faults=script) as client:
        body = await reply(client)
        assert body["error"]["code"] == 429
        assert body["choices"][0]["message"]["content"] is None
        assert (await reply(client))["error"]["code"] == 503
        choice = (await reply(client))["choices"][0]
        assert (choice["finish_reason"], choice["error"]["code"]) == ("error", 502)
        events = sse(await (await post(client, stream=True)).text())
        assert events[0]["error"]["metadata"]["provider_name"] == "Alder"
        assert (await bill(client))["total_usd"] == 0


async def texts(
    tmp_path: Path, faults: str, text: str = TWO_CALLS, **fields: Any
) -> dict[str, Any]:
    """The message under a fault, whole; its stream must say the same."""
    fields = {"tools": TOOLS} | fields
    async with serving(tmp_path, text, faults=faults) as client:
        whole = await message(client, **fields)
        events = sse(await (await post(client, stream=True, **fields)).text())
        deltas = [c["delta"] for e in events for c in e["choices"]]
        assert "".join(d.get("content") or "" for d in deltas) == (whole["content"] or "")
        streamed = "".join(d.get("reasoning") or "" for d in deltas)
        if "disagrees" not in faults:
            assert streamed == (whole["reasoning"] or "")
        ids = [c["id"] for d in deltas for c in d.get("tool_calls", []) if "id" in c]
        assert ids == [c["id"] for c in whole.get("tool_calls", [])]
        # The bill is that of the sampled tokens, whatever is shown.
        expected = len(ids_of(text)) - ("early_tools" in faults)
        assert {g["completion_tokens"] for g in (await bill(client))["generations"]} == {expected}
        return whole


@uses("trim_reasoning", "trim_content")
async def test_trims(tmp_path: Path) -> None:
    assert (await texts(tmp_path, "trim_reasoning", PLAIN))["reasoning"] == "Two and two."
    left = await texts(tmp_path, "trim_reasoning=left,trim_content=right", PLAIN)
    assert (left["reasoning"], left["content"]) == ("Two and two.\n", "\n\nFour.")
    assert (await texts(tmp_path, "trim_content", PLAIN))["content"] == "Four."


@uses("spaced_markers")
async def test_spaced_markers(tmp_path: Path) -> None:
    spaced = await texts(tmp_path, "spaced_markers")
    assert spaced["reasoning"] == " Look both up.\n "
    assert spaced["content"] == " \n\nChecking. "
    assert spaced["tool_calls"][0]["id"] == "functions.get_weather:0"
    raw = await texts(tmp_path, "spaced_markers", tools=None)
    assert (
        " <|tool_call_begin|> functions.get_weather:0 <|tool_call_argument_begin|> "
        in raw["content"]
    )


@uses("unsplit", "answer_as_reasoning", "withheld_reasoning")
async def test_reasoning_in_the_wrong_place(tmp_path: Path) -> None:
    unsplit = await texts(tmp_path, "unsplit", PLAIN)
    assert (unsplit["reasoning"], unsplit["content"]) == (None, PLAIN)
    filed = await texts(tmp_path, "answer_as_reasoning", PLAIN)
    assert (filed["reasoning"], filed["content"]) == (" Two and two.\n\n\nFour. ", "")
    async with serving(tmp_path, faults="withheld_reasoning") as client:
        body = await reply(client)
        assert body["choices"][0]["message"]["reasoning"] is None
        assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


@uses("reasoning_content", "reasoning_details_only", "reasoning_disagrees")
async def test_reasoning_fields(tmp_path: Path) -> None:
    both = await texts(tmp_path, "reasoning_content", PLAIN)
    assert both["reasoning_content"] == both["reasoning"] == " Two and two.\n"
    details = await texts(tmp_path, "reasoning_details_only", PLAIN)
    assert details["reasoning"] is None
    assert details["reasoning_details"][0]["text"] == " Two and two.\n"
    differs = await texts(tmp_path, "reasoning_disagrees", PLAIN)
    assert differs["reasoning"] == "Two and two."
    assert differs["reasoning_details"][0]["text"] == " Two and two.\n"


@uses("early_tools")
async def test_early_tools_changes_the_true_ids_as_well(tmp_path: Path) -> None:
    truth = tmp_path / "truth.jsonl"
    message_ = await texts(tmp_path, "early_tools")
    assert message_["reasoning"] == " Look both up.\n\n\nChecking."
    assert len(message_["tool_calls"]) == 2
    extra = ["--truth", str(truth)]
    async with serving(tmp_path, TWO_CALLS, faults="early_tools", extra=extra) as client:
        await reply(client, tools=TOOLS)
    line = json.loads(truth.read_text())
    assert line["completion_ids"] == [
        i for i in ids_of(TWO_CALLS) if i != ids_of("</think>", stop=False)[0]
    ]
    assert line["faults"] == ["early_tools"]


CALL_FAULTS = {
    "renumbered_ids": ["functions.get_weather:1", "functions.get_weather:2"],
    "renumbered_ids=-1": ["functions.get_weather:-1", "functions.get_weather:0"],
    "dotless_ids": ["functionsget_weather0", "functionsget_weather1"],
    "shared_ids": ["functions.get_weather:0"] * 2,
    "lost_calls": ["functions.get_weather:0"],
    "lost_calls=all": [],
}


@uses("renumbered_ids", "dotless_ids", "shared_ids", "lost_calls", "rewritten_ids")
@pytest.mark.parametrize(("fault", "ids"), CALL_FAULTS.items())
async def test_call_ids(tmp_path: Path, fault: str, ids: list[str]) -> None:
    whole = await texts(tmp_path, fault)
    assert [c["id"] for c in whole.get("tool_calls", [])] == ids


async def test_rewritten_ids(tmp_path: Path) -> None:
    ids = [c["id"] for c in (await texts(tmp_path, "rewritten_ids"))["tool_calls"]]
    assert all(i.startswith("call_") and len(i) == 29 for i in ids)
    assert len(set(ids)) == 2


ARGUMENT_FAULTS = {
    "reserialised_args": '{"city": "Oslo"}',
    "reserialised_args=compact": '{"city":"Oslo"}',
    "reserialised_args=sorted": '{"city": "Oslo"}',
    "string_args": '"{\\"city\\":\\"Oslo\\"}"',
    "newline_args": '{"\ncity":"Oslo"}',
}


@uses("reserialised_args", "string_args", "newline_args")
@pytest.mark.parametrize(("fault", "arguments"), ARGUMENT_FAULTS.items())
async def test_arguments(tmp_path: Path, fault: str, arguments: str) -> None:
    whole = await texts(tmp_path, fault)
    assert whole["tool_calls"][0]["function"]["arguments"] == arguments


@uses("raw_calls", "section_noise", "cut_marker", "replacement", "lone_surrogate")
async def test_content_that_is_not_an_answer(tmp_path: Path) -> None:
    raw = await texts(tmp_path, "raw_calls")
    assert raw["content"] == TWO_CALLS.partition("</think>")[2]
    noise = await texts(tmp_path, "section_noise")
    assert "<|tool_calls_section_begin|>\nCalling:<|tool_call_begin|>" in noise["content"]
    assert (await texts(tmp_path, "cut_marker", PLAIN))["content"].endswith("<|tool_calls_s")
    assert (await texts(tmp_path, "replacement", PLAIN))["content"].endswith("\ufffd")
    async with serving(tmp_path, faults="lone_surrogate") as client:
        data = await (await post(client)).read()
        assert b"\\ud83d" in data
        assert json.loads(data)["choices"][0]["message"]["content"].endswith("\ud83d")


@uses("old_template", "tools_ignored", "reasoning_ignored")
async def test_faults_of_the_prompt(tmp_path: Path) -> None:
    async with serving(tmp_path, TWO_CALLS) as client:
        plain = (await reply(client))["usage"]["prompt_tokens"]
        instant = (await reply(client, reasoning={"enabled": False}))["usage"]["prompt_tokens"]
    assert instant == plain + 1
    async with serving(tmp_path, TWO_CALLS, faults="old_template") as client:
        drift = (await reply(client))["usage"]["prompt_tokens"] - plain
        assert drift > 5
        with_system = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
        kept = (await reply(client, messages=with_system))["usage"]["prompt_tokens"]
    async with serving(tmp_path, TWO_CALLS, faults="tools_ignored") as client:
        assert (await reply(client, messages=with_system))["usage"]["prompt_tokens"] == kept
        body = await reply(client, tools=TOOLS)
        assert body["usage"]["prompt_tokens"] == plain
        assert "tool_calls" not in body["choices"][0]["message"]
    async with serving(tmp_path, PLAIN, faults="reasoning_ignored") as client:
        body = await reply(client, reasoning={"enabled": False})
        assert body["usage"]["prompt_tokens"] == plain
        assert body["choices"][0]["message"]["reasoning"] == " Two and two.\n"


@uses("truncated_body", "blank_lines")
async def test_bodies(tmp_path: Path) -> None:
    script = 'script:["truncated_body","truncated_body=hard","blank_lines"]'
    async with serving(tmp_path, faults=script) as client:
        response = await post(client)
        with pytest.raises(json.JSONDecodeError):
            json.loads(await response.text())
        hard = await post(client)
        with pytest.raises(aiohttp.ClientPayloadError):
            await hard.read()
        blank = await (await post(client)).text()
        assert blank.startswith("\n   ")
        assert json.loads(blank)["choices"][0]["message"]["content"] == "\n\nFour. "
        # What was cut off is paid for all the same, and can be looked up.
        costs = {g["cost_usd"] for g in (await bill(client))["generations"]}
        assert len(costs) == 1 and costs.pop() > 0
        gen_id = hard.headers["X-Generation-Id"]
        lookup = await client.get(f"/api/v1/generation?id={gen_id}", headers=AUTH)
        assert lookup.status == 200


@uses("empty_choices", "no_finish", "no_usage", "zero_usage")
@pytest.mark.parametrize("stream", [False, True])
async def test_missing_parts(tmp_path: Path, stream: bool) -> None:
    script = 'script:["empty_choices","no_finish","no_usage","zero_usage"]'
    async with serving(tmp_path, faults=script) as client:

        async def get() -> list[dict[str, Any]]:
            response = await post(client, stream=stream)
            return sse(await response.text()) if stream else [await response.json()]

        empty = (await get())[-1]
        assert empty["choices"] == []
        alder = PROVIDERS[0]
        assert pico(empty["usage"]["cost"]) == alder.cost_pico(empty["usage"]["prompt_tokens"], 0)
        assert empty["usage"]["completion_tokens"] == 0
        no_finish = await get()
        assert all(c["finish_reason"] is None for e in no_finish for c in e["choices"])
        assert not any("usage" in e for e in await get())
        assert (await get())[-1]["usage"] == {
            "prompt_tokens": 0,
            "completion_tokens": 0,
            "total_tokens": 0,
        }
        paid = [g["cost_usd"] for g in (await bill(client))["generations"]]
        assert paid[0] < paid[1] == paid[2] == paid[3]


@uses("wrong_usage", "wrong_prompt_usage", "null_cost", "string_cost", "negative_cost", "byok")
async def test_usage_that_is_wrong(tmp_path: Path) -> None:
    script = (
        'script:["ok","wrong_usage=3","wrong_usage=-2","wrong_prompt_usage=7","null_cost",'
        '"string_cost","negative_cost","byok"]'
    )
    async with serving(tmp_path, faults=script) as client:
        usages = [(await reply(client))["usage"] for _ in range(8)]
        right, more, less, drift, null, string, negative, byok = usages
        n = right["completion_tokens"]
        assert (more["completion_tokens"], less["completion_tokens"]) == (n + 3, n - 2)
        assert pico(more["cost"]) - pico(right["cost"]) == 3 * pico(3.0) // 1_000_000
        assert drift["prompt_tokens"] == right["prompt_tokens"] + 7
        assert null["cost"] is None
        assert string["cost"] == str(right["cost"])
        assert negative["cost"] == -1
        assert (byok["cost"], byok["is_byok"]) == (0, True)
        assert byok["cost_details"]["upstream_inference_cost"] == right["cost"]
        books = await bill(client)
        paid = [g["cost_usd"] for g in books["generations"]]
        assert paid[4:] == [right["cost"]] * 3 + [0]
        assert pico(books["total_usd"]) == sum(map(pico, paid))


@uses("nan_cost", "no_cost", "overcharge")
@pytest.mark.parametrize("stream", [False, True])
async def test_costs_that_are_wrong(tmp_path: Path, stream: bool) -> None:
    script = 'script:["ok","nan_cost","no_cost","overcharge","overcharge=1.5","byok=unsaid"]'
    async with serving(tmp_path, faults=script) as client:

        async def usage() -> tuple[dict[str, Any], str]:
            text = await (await post(client, stream=stream)).text()
            said = (sse(text)[-1] if stream else json.loads(text))["usage"]
            return dict(said), text

        right, _ = await usage()
        nan, text = await usage()
        assert math.isnan(nan["cost"]) and '"cost":NaN,' in text
        none, _ = await usage()
        assert none.keys() == right.keys() - {"cost"}
        dear = [(await usage())[0]["cost"] for _ in range(2)]
        assert dear == pytest.approx([2 * right["cost"], 1.5 * right["cost"]])
        byok, _ = await usage()
        assert (byok["cost"], byok["is_byok"]) == (0, True)
        assert byok["cost_details"]["upstream_inference_cost"] is None
        books = await bill(client)
        paid = [g["cost_usd"] for g in books["generations"]]
        assert paid == pytest.approx([right["cost"] * n for n in (1, 1, 1, 2, 1.5, 0)])
        assert books["generations"][-1]["upstream_usd"] == right["cost"]


@uses("error_mid_stream", "cut_stream", "no_done")
async def test_streams_that_end_badly(tmp_path: Path) -> None:
    script = 'script:["error_mid_stream","cut_stream","no_done","truncated_body"]'
    text = " a b c d e f g h i j k l m n o p q r s t u v w" * 3 + "</think>Done."
    async with serving(tmp_path, text, faults=script) as client:
        failed = sse(await (await post(client, stream=True)).text())
        assert [c["finish_reason"] for e in failed for c in e["choices"]] == [None] * 3 + ["error"]
        assert failed[-1]["error"]["code"] == 502
        cut = await post(client, stream=True)
        with pytest.raises(aiohttp.ClientPayloadError):
            await cut.read()
        undone = await (await post(client, stream=True)).text()
        assert "[DONE]" not in undone
        assert "usage" in sse(undone)[-1]
        short = sse(await (await post(client, stream=True)).text())
        assert len(short) == 3 and "usage" not in short[-1]
        costs = [g["cost_usd"] for g in (await bill(client))["generations"]]
        assert costs[0] == 0
        assert costs[1] == costs[2] == costs[3] > 0


async def test_bad_ends_of_whole_replies(tmp_path: Path) -> None:
    async with serving(tmp_path, faults='script:["cut_stream","error_mid_stream"]') as client:
        cut = await post(client)
        assert cut.headers["X-Generation-Id"]
        with pytest.raises(aiohttp.ClientPayloadError):
            await cut.read()
        choice = (await reply(client))["choices"][0]
        assert (choice["finish_reason"], choice["error"]["code"]) == ("error", 502)
        costs = [g["cost_usd"] for g in (await bill(client))["generations"]]
        assert costs[0] > 0 == costs[1]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_in_mid_stream_has_any_code(tmp_path: Path, stream: bool) -> None:
    async with serving(tmp_path, faults="error_mid_stream=429") as client:
        text = await (await post(client, stream=stream)).text()
        said = sse(text)[-1]["error"] if stream else json.loads(text)["choices"][0]["error"]
        assert (said["code"], said["metadata"]["provider_name"]) == (429, "Alder")
        assert (await bill(client))["total_usd"] == 0


@uses("silent_stream")
@pytest.mark.parametrize("stream", [False, True])
async def test_silence(tmp_path: Path, stream: bool) -> None:
    async with serving(tmp_path, faults="silent_stream=0.01") as client:
        response = await post(client, stream=stream)
        seen = b""
        while (seen.count(b": OPENROUTER") if stream else seen.count(b"\n")) < 6:
            seen += await response.content.readany()
        assert (b"data: " in seen) == stream
        assert b'finish_reason":"stop' not in seen
        response.close()


@uses("slow", "other_model", "lookup_lost")
async def test_slow_and_lost(tmp_path: Path) -> None:
    extra = ["--latency-scale", "0.01"]
    async with serving(tmp_path, faults="slow=3,lookup_lost,other_model", extra=extra) as client:
        body = await reply(client)
        lookup = await client.get(f"/api/v1/generation?id={body['id']}", headers=AUTH)
        assert lookup.status == 404


async def test_faults_can_be_set_at_run_time(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        plan = await client.post("/gateway/faults", data="server_error@Birch")
        assert (await plan.json())["faults"][0]["scope"] == "Birch"
        assert (await post(client)).status == 200
        birch = ask(provider={"only": ["birch"]})
        assert (await client.post(CHAT, json=birch, headers=AUTH)).status == 500
        scripted = {"script": ["bad_gateway"]}
        await client.post("/gateway/faults", json=scripted)
        assert (await post(client)).status == 502
        assert (await post(client)).status == 200
        wrong = await client.post("/gateway/faults", data="sever_error")
        assert wrong.status == 400
        assert "did you mean server_error" in await wrong.text()
        assert (await (await client.get("/gateway/faults")).json())["faults"] == []


def test_every_fault_has_a_test() -> None:
    assert set(ANSWERS | GENERATION | TEXT | WIRE) == COVERED
