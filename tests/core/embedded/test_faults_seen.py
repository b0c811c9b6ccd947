"""Every fault in every shape: what is counted as hit shows in the reply, in the way that is stated;
what has no place in a shape is refused when the plan is set."""

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import TestClient

from core.embedded.faults import ANSWERS, KINDS, MESSAGES_ONLY, NOT_LOCAL, WIRE, parse_plan
from core.embedded.sglang_faults import BREAKING, STREAMS_ONLY
from core.errors import UsageError
from tests.core.embedded.serving import (
    AUTH,
    CHAT,
    TOOLS,
    TWO_CALLS,
    ask,
    ids_of,
    serving,
    sse,
    until,
)
from tests.core.embedded.test_gateway_sglang import MESSAGES, prompt_ids

QUICK = {"hang": "hang=0.01", "silent_stream": "silent_stream=0.01", "slow": "slow=2"}
ELSEWHERE = {
    "capacity": "needs requests in flight: a test of its own in each shape",
    "other_model": "a recording has one model: tests with a live one in each shape",
    "lookup_lost": "shows in the lookup",
    "slow": "shows in the time",
}
ASKED = [name for name in KINDS if name not in ELSEWHERE]
BROKEN = (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, aiohttp.ClientPayloadError)
ENDLESS = re.compile(rb": OPENROUTER PROCESSING|: keep-alive|\n         ")
Json = dict[str, Any]


class Reply:
    """What a client sees. `body` is None when it is not JSON."""

    def __init__(self, status: int, raw: bytes, broken: bool) -> None:
        self.status = status
        self.raw = re.sub(rb"(gen-|\"created\":)[\w-]+", rb"\g<1>0", raw)
        self.broken = broken
        try:
            self.body: Any = json.loads(raw)
        except ValueError:
            self.body = None

    @property
    def said(self) -> Any:
        """All of it, a stream's pieces joined: how it was cut does not count."""
        if not self.raw.lstrip().startswith((b"data:", b": ")):
            return self.status, self.raw, self.broken
        joined: dict[str, str] = {}
        rest: list[Any] = []
        for event in sse(self.raw.decode()):
            for choice in event.get("choices", []):
                delta = choice.pop("delta", None) or {}
                for key, value in _leaves(delta):
                    joined[key] = joined.get(key, "") + value
            if event.get("choices") != [{"index": 0, "finish_reason": None}]:
                rest.append(event.get("choices"))
            rest.append({k: event[k] for k in ("usage", "error") if k in event})
        rest = [r for r in rest if r]
        done, blank = b"[DONE]" in self.raw, self.raw.startswith(b"\n")
        endless = len(ENDLESS.findall(self.raw)) > 4
        return self.status, joined, rest[-2:], done, blank, self.broken, endless


def _leaves(value: Any, path: str = "") -> list[tuple[str, str]]:
    if isinstance(value, dict):
        return [x for k, v in value.items() for x in _leaves(v, f"{path}/{k}")]
    if isinstance(value, list):
        return [x for v in value for x in _leaves(v, path)]
    return [(path, value)] if isinstance(value, str) and path != "/role" else []


async def post(client: TestClient[Any, Any], path: str, body: Json) -> Reply:
    raw = b""
    try:
        async with client.post(path, json=body, headers=AUTH) as response:
            while not response.content.at_eof() and len(ENDLESS.findall(raw)) < 9:
                raw += await response.content.readany()
            return Reply(response.status, raw, False)
    except BROKEN:
        return Reply(0, raw, True)


async def under(
    client: TestClient[Any, Any], spec: str, path: str, body: Json
) -> tuple[Reply, Json]:
    """(the reply under a plan, the gateway's count of hits)."""
    await client.post("/gateway/faults", data=spec)
    reply = await post(client, path, body)
    return reply, (await (await client.get("/gateway/faults")).json())["hits"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_hit_shows_in_the_api_shape(tmp_path: Path, stream: bool) -> None:
    wrong = []
    async with serving(tmp_path, TWO_CALLS) as client:
        for name in ASKED:
            body = ask(tools=TOOLS, stream=stream)
            body["reasoning"] = {"enabled": name != "reasoning_ignored"}
            clean, _ = await under(client, "", CHAT, body)
            hit, hits = await under(client, QUICK.get(name, name), CHAT, body)
            counted = stream or name != "no_done"
            if hits != ({name: 1} if counted else {}) or (hit.said != clean.said) is not counted:
                wrong.append(name)
    assert wrong == []


def local_body(name: str, endpoint: str, stream: bool = False) -> Json:
    if endpoint == "generate":
        return {"input_ids": prompt_ids(TOOLS), "rid": "r", "stream": stream}
    return {
        "messages": MESSAGES,
        "tools": TOOLS,
        "rid": "r",
        "stream": stream,
        "return_token_ids": not stream,
        "chat_template_kwargs": {"thinking": name != "reasoning_ignored"},
    }


PATHS = {"chat": "/v1/chat/completions", "generate": "/generate"}
THINK, ANSWER = TWO_CALLS.split("</think>")
TALK, CALLS = ANSWER.split("<|tool_calls_section_begin|>")
IDS = ["functions.get_weather:0", "functions.get_weather:1"]


def message(body: Json) -> Json:
    return dict(body["choices"][0]["message"])


def call_ids(body: Json) -> list[str]:
    return [c["id"] for c in message(body)["tool_calls"]]


def first_arguments(body: Json) -> str:
    return str(message(body)["tool_calls"][0]["function"]["arguments"])


def usage(clean: Json, hit: Json) -> tuple[int, int]:
    """By how much the counts of prompt and completion differ."""
    a, b = clean["usage"], hit["usage"]
    prompt, completion = (b[k] - a[k] for k in ("prompt_tokens", "completion_tokens"))
    return prompt, completion


def meta(clean: Json, hit: Json) -> tuple[int, int]:
    return usage({"usage": clean["meta_info"]}, {"usage": hit["meta_info"]})


def shortened(ids: list[int]) -> bool:
    return ids == [i for i in ids_of(TWO_CALLS) if i != ids_of("</think>", stop=False)[0]]


Check = Callable[[Json, Json], bool]


def holds(check: Check, clean: Json, hit: Json) -> bool:
    try:
        return check(clean, hit)
    except (KeyError, TypeError):
        return False


IN_CHAT: dict[str, Check] = {
    "old_template": lambda a, b: usage(a, b)[0] > 5,
    "tools_ignored": lambda a, b: (
        usage(a, b)[0] == len(prompt_ids()) - len(prompt_ids(TOOLS))
        and message(b)["content"] == ANSWER
    ),
    "reasoning_ignored": lambda a, b: message(b)["reasoning_content"] == THINK,
    "trim_reasoning": lambda a, b: message(b)["reasoning_content"] == THINK.strip(),
    "trim_content": lambda a, b: message(b)["content"] == TALK.strip(),
    "spaced_markers": lambda a, b: message(b)["reasoning_content"] == THINK + " ",
    "unsplit": lambda a, b: message(b)["content"] == THINK + "</think>" + TALK,
    "answer_as_reasoning": lambda a, b: (
        (message(b)["reasoning_content"], message(b)["content"]) == (THINK + TALK, "")
    ),
    "withheld_reasoning": lambda a, b: message(b)["reasoning_content"] is None,
    "early_tools": lambda a, b: (
        (message(b)["reasoning_content"], usage(a, b)) == (THINK + TALK, (0, -1))
    ),
    "rewritten_ids": lambda a, b: all(i.startswith("call_") for i in call_ids(b)),
    "renumbered_ids": lambda a, b: call_ids(b) == [IDS[1], "functions.get_weather:2"],
    "dotless_ids": lambda a, b: call_ids(b) == ["functionsget_weather0", "functionsget_weather1"],
    "shared_ids": lambda a, b: call_ids(b) == [IDS[0], IDS[0]],
    "reserialised_args": lambda a, b: first_arguments(b) == '{"city": "Oslo"}',
    "string_args": lambda a, b: json.loads(json.loads(first_arguments(b))) == {"city": "Oslo"},
    "newline_args": lambda a, b: first_arguments(b) == '{"\ncity":"Oslo"}',
    "lost_calls": lambda a, b: call_ids(b) == IDS[:1],
    "raw_calls": lambda a, b: message(b)["content"] == ANSWER,
    "section_noise": lambda a, b: "begin|>\nCalling:<|tool" in message(b)["content"],
    "cut_marker": lambda a, b: message(b)["content"] == TALK + "<|tool_calls_s",
    "lone_surrogate": lambda a, b: message(b)["content"] == TALK + "\ud83d",
    "replacement": lambda a, b: message(b)["content"] == TALK + "\ufffd",
    "empty_choices": lambda a, b: b["choices"] == [] and b["usage"]["completion_tokens"] == 0,
    "no_finish": lambda a, b: b["choices"][0]["finish_reason"] is None,
    "no_usage": lambda a, b: "usage" not in b,
    "zero_usage": lambda a, b: b["usage"]["total_tokens"] == 0 == b["usage"]["prompt_tokens"],
    "wrong_usage": lambda a, b: usage(a, b) == (0, 1),
    "wrong_prompt_usage": lambda a, b: usage(a, b) == (20, 0),
    "error_in_200": lambda a, b: b["error"]["code"] == 429 and message(b)["content"] is None,
    "choice_error": lambda a, b: b["choices"][0]["error"]["code"] == 502,
}
IN_GENERATE: dict[str, Check] = {
    "trim_reasoning": lambda a, b: b["text"] == THINK.strip() + "</think>" + ANSWER,
    "trim_content": lambda a, b: b["text"] == THINK + "</think>" + ANSWER.strip(),
    "spaced_markers": lambda a, b: b["text"].startswith(THINK + " </think> " + TALK + " <|tool"),
    "early_tools": lambda a, b: b["text"] == THINK + ANSWER and shortened(b["output_ids"]),
    "section_noise": lambda a, b: "begin|>\nCalling:<|tool" in b["text"],
    "cut_marker": lambda a, b: b["text"] == TWO_CALLS + "<|tool_calls_s",
    "lone_surrogate": lambda a, b: b["text"] == TWO_CALLS + "\ud83d",
    "replacement": lambda a, b: b["text"] == TWO_CALLS + "\ufffd",
    "no_finish": lambda a, b: b["meta_info"]["finish_reason"] is None,
    "no_usage": lambda a, b: not {"prompt_tokens", "completion_tokens"} & b["meta_info"].keys(),
    "zero_usage": lambda a, b: b["meta_info"]["completion_tokens"] == 0,
    "wrong_usage": lambda a, b: meta(a, b) == (0, 1),
    "wrong_prompt_usage": lambda a, b: meta(a, b) == (20, 0),
    "error_in_200": lambda a, b: b["error"]["code"] == 429,
}
STATUS = {
    **{"rate_limited": 429, "platform_limited": 429, "no_credit": 402, "forbidden": 403},
    **{"bad_request": 400, "request_timeout": 408, "server_error": 500, "bad_gateway": 502},
    **{"unavailable": 503, "edge_timeout": 524, "overloaded": 529, "html_error": 502},
}
FEW = 3
"""Events of a stream before it breaks."""
IN_STREAMS: dict[str, Callable[[Reply], bool]] = {
    "error_mid_stream": lambda b: sse(b.raw.decode())[-1]["error"]["code"] == 502,
    "silent_stream": lambda b: len(ENDLESS.findall(b.raw)) > 4,
    "cut_stream": lambda b: b.broken,
    "truncated_body": lambda b: b"[DONE]" not in b.raw and not b.broken,
    "no_done": lambda b: b"[DONE]" not in b.raw and not b.broken,
}
IN_BYTES: dict[str, Callable[[Reply, Reply], bool]] = {
    "html_body": lambda a, b: b.status == 200 and b.raw.startswith(b"<!DOCTYPE"),
    "reset": lambda a, b: b.broken and not b.raw,
    "hang": lambda a, b: b.broken and not b.raw,
    "cut_stream": lambda a, b: b.broken,
    "truncated_body": lambda a, b: a.raw.startswith(b.raw) and b.body is None and not b.broken,
    "blank_lines": lambda a, b: b.raw.startswith(b"\n   ") and b.body == a.body,
}


@pytest.mark.parametrize("name", NOT_LOCAL)
def test_what_has_no_place_in_sglang_s_shape_is_refused(name: str) -> None:
    for spec in (f"{name}@sglang", f"{name}:0.1@SGLang", f'script:["{name}@sglang"]'):
        with pytest.raises(UsageError, match="leave out @sglang") as refused:
            parse_plan(spec)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("endpoint", PATHS)
async def test_a_hit_does_what_it_says_in_sglang_s_shape(tmp_path: Path, endpoint: str) -> None:
    wrong = []
    async with serving(tmp_path, TWO_CALLS) as client:
        for name in (n for n in ASKED if n not in NOT_LOCAL):
            path, body = PATHS[endpoint], local_body(name, endpoint)
            clean, _ = await under(client, "", path, body)
            assert clean.status == 200 and clean.body is not None
            hit, hits = await under(client, f"{QUICK.get(name, name)}@sglang", path, body)
            if name in STREAMS_ONLY or (endpoint == "generate" and name in MESSAGES_ONLY):
                right = hits == {} and hit.raw == clean.raw
            else:
                right = hits == {name: 1} and as_stated(name, endpoint, clean, hit)
            if not right:
                wrong.append(name)
    assert wrong == []


@pytest.mark.parametrize("endpoint", PATHS)
async def test_a_hit_does_so_in_sglang_s_streams(tmp_path: Path, endpoint: str) -> None:
    """What it does to a whole reply it does to what the events come to; the rest breaks them."""
    wrong = []
    async with serving(tmp_path, TWO_CALLS, extra=["--tokens-per-s", "8000"]) as client:
        for name in (n for n in ASKED if n not in NOT_LOCAL):
            path, body = PATHS[endpoint], local_body(name, endpoint, stream=True)
            clean, _ = await under(client, "", path, body)
            assert b"[DONE]" in clean.raw
            hit, hits = await under(client, f"{QUICK.get(name, name)}@sglang", path, body)
            events = sse(hit.raw.decode(errors="replace")) if hit.raw[:1] != b"<" else []
            clean.body = come_to(sse(clean.raw.decode()))
            if endpoint == "generate" and name in MESSAGES_ONLY:
                right = hits == {} and hit.said == clean.said
            elif name in IN_STREAMS:
                right = hits == {name: 1} and IN_STREAMS[name](hit)
                assert len(events) <= FEW + 1 or name == "no_done"
            else:
                hit.body = come_to(events)
                right = hits == {name: 1} and as_stated(name, endpoint, clean, hit)
            if not right:
                wrong.append(name)
    assert wrong == []


def come_to(events: list[Json]) -> Json:
    """The whole reply that a stream's events amount to."""
    if not events or "choices" not in {k for e in events for k in e} or "error" in events[-1]:
        return events[-1] if events else {}
    whole: Json = {"role": "assistant", "content": "", "reasoning_content": ""}
    finish: str | None = None
    choices: list[Json] = []
    counts: Json = {}
    for event in events:
        counts |= {"usage": event["usage"]} if "usage" in event else {}
        for choice in event["choices"]:
            if "delta" not in choice:
                return {"choices": event["choices"]}
            for key, value in choice["delta"].items():
                if key != "role":
                    whole[key] = whole.get(key, type(value)()) + value
            finish = choice["finish_reason"] or finish
            choices = [{"message": whole}]
    whole["reasoning_content"] = whole["reasoning_content"] or None
    return {"choices": [c | {"finish_reason": finish} for c in choices], **counts}


def as_stated(name: str, endpoint: str, clean: Reply, hit: Reply) -> bool:
    if name in STATUS:
        return hit.status == STATUS[name]
    if name in IN_BYTES:
        return IN_BYTES[name](clean, hit)
    check = (IN_CHAT if endpoint == "chat" else IN_GENERATE)[name]
    return hit.status == 200 and holds(check, clean.body, hit.body) > holds(
        check, clean.body, clean.body
    )


def test_no_fault_is_left_out() -> None:
    shown = {*STATUS, *IN_BYTES, *IN_STREAMS, *IN_CHAT, *NOT_LOCAL, *ELSEWHERE}
    assert shown == KINDS.keys()
    assert IN_CHAT.keys() - IN_GENERATE.keys() == MESSAGES_ONLY
    assert IN_STREAMS.keys() == {*STREAMS_ONLY, *BREAKING}
    assert NOT_LOCAL.keys() < KINDS.keys() and not NOT_LOCAL.keys() & ANSWERS.keys()
    assert WIRE.keys() > {"lookup_lost"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("endpoint", PATHS)
async def test_a_body_that_is_cut_hard_ends_its_connection(
    tmp_path: Path, endpoint: str, stream: bool
) -> None:
    async with serving(tmp_path) as client:
        spec, body = "truncated_body=hard@sglang", local_body("", endpoint, stream)
        hit, hits = await under(client, spec, PATHS[endpoint], body)
    assert hit.broken and hits == {"truncated_body": 1}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("shape", ["openrouter", *PATHS])
async def test_a_slow_server_takes_so_many_times_as_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str, stream: bool
) -> None:
    slept: list[float] = []

    async def sleep(delay_s: float) -> None:
        slept.append(delay_s)

    module = "openrouter_api" if shape == "openrouter" else "sglang_faults"
    monkeypatch.setattr(f"core.embedded.{module}.sleep", sleep)
    extra = ["--latency-scale", "1"] if shape == "openrouter" else ["--ttft-s", "0.03"]
    body = ask(stream=stream) if shape == "openrouter" else local_body("", shape, stream)
    path = PATHS.get(shape, CHAT)
    async with serving(tmp_path, extra=extra) as client:
        clean, _ = await under(client, "", path, body)
        slept.clear()
        spec = "slow=5" if shape == "openrouter" else "slow=5@sglang"
        hit, hits = await under(client, spec, path, body)
    assert hits == {"slow": 1} and hit.said == clean.said
    # Alder's 20 ms five times; four times what came before, which a clock measures.
    assert slept == [0.1] if shape == "openrouter" else len(slept) == 1 and slept[0] >= 4 * 0.03


@pytest.mark.parametrize("endpoint", PATHS)
async def test_capacity_answers_what_comes_on_top(tmp_path: Path, endpoint: str) -> None:
    extra = ["--tokens-per-s", "50", "--ttft-s", "30"]
    async with serving(tmp_path, faults="capacity=2@sglang", extra=extra) as client:
        body = local_body("", endpoint)
        del body["rid"]
        path = PATHS[endpoint]
        waiting = [asyncio.create_task(post(client, path, body)) for _ in range(2)]

        async def full() -> bool:
            told = await (await client.get("/gateway/requests")).json()
            return int(told["in_flight"]) == 2

        await until(full)
        refused = await post(client, path, body)
        assert refused.status == 429 and not any(task.done() for task in waiting)
        plan = await (await client.get("/gateway/faults")).json()
        assert plan["hits"] == {"capacity": 1}
        await client.post("/abort_request", json={"abort_all": True})
        assert [reply.status for reply in await asyncio.gather(*waiting)] == [200, 200]
