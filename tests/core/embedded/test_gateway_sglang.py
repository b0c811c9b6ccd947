"""SGLang's shape, and the live model behind both shapes."""

import asyncio
import itertools
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from core.embedded import TARGET_DIR
from core.embedded.gateway import Gateway, arguments
from core.errors import UsageError
from core.providers.chat import template_switches
from core.reconstruct.stream import merge_stream
from core.render.base import load_renderer
from core.schema import Prompt
from tests.core.embedded.serving import (
    PLAIN,
    TOOLS,
    TWO_CALLS,
    ids_of,
    reply,
    serving,
    sse,
    tokenizer,
    until,
)
from tests.core.embedded.tiny import write_tiny

WIDE = " Café 世界 🙂🙃, naïve.\n</think>\n\n世界 🙂 four. "
MESSAGES = [{"role": "user", "content": "What is 2 + 2?"}]


def prompt_ids(tools: list[dict[str, Any]] | None = None) -> list[int]:
    return load_renderer(TARGET_DIR, "kimi-k2.5").render(MESSAGES, tools, True).ids


async def chat(client: TestClient[Any, Any], **fields: Any) -> dict[str, Any]:
    body = {"messages": MESSAGES, "max_tokens": 200, "seed": 1, "return_token_ids": True}
    response = await client.post("/v1/chat/completions", json=body | fields)
    assert response.status == 200, await response.text()
    return dict(await response.json())


async def test_generate(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        body = {"input_ids": prompt_ids(), "rid": "r1", "sampling_params": {"max_new_tokens": 200}}
        out = await (await client.post("/generate", json=body)).json()
        ids = ids_of(PLAIN)
        assert out["output_ids"] == ids
        assert out["text"] == PLAIN
        meta = out["meta_info"]
        assert meta["finish_reason"] == {"type": "stop", "matched": ids[-1]}
        assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"]) == (
            "r1",
            len(prompt_ids()),
            len(ids),
        )
        kept = body | {"sampling_params": {"max_new_tokens": 200, "no_stop_trim": True}}
        out = await (await client.post("/generate", json=kept)).json()
        assert out["text"] == PLAIN + "<|im_end|>"
        short = body | {"sampling_params": {"max_new_tokens": 4}}
        out = await (await client.post("/generate", json=short)).json()
        assert out["output_ids"] == ids[:4]
        assert out["meta_info"]["finish_reason"] == {"type": "length", "length": 4}


async def test_generate_takes_text(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        text = load_renderer(TARGET_DIR, "kimi-k2.5").render(MESSAGES, None, True).text
        out = await (await client.post("/generate", json={"text": text})).json()
        assert out["meta_info"]["prompt_tokens"] == len(prompt_ids())


@pytest.mark.parametrize("incremental", [False, True])
async def test_generate_streams_everything_so_far_or_what_is_new(
    tmp_path: Path, incremental: bool
) -> None:
    flags = ["--incremental-streaming-output"] if incremental else []
    async with serving(tmp_path, WIDE, extra=["--tokens-per-s", "50", *flags]) as client:
        info = await (await client.get("/server_info")).json()
        assert info["incremental_streaming_output"] is incremental
        params = {"max_new_tokens": 200, "stream_interval": 3}
        body = {"input_ids": prompt_ids(), "sampling_params": params, "stream": True}
        raw = await (await client.post("/generate", json=body)).text()
        whole = await (await client.post("/generate", json=body | {"stream": False})).json()
        events = sse(raw)
        counts = [e["meta_info"]["completion_tokens"] for e in events]
        assert len(events) > 3 and counts[0] < 3
        assert all(b - a >= 3 for a, b in itertools.pairwise(counts[:-1]))
        sizes = [len(e["output_ids"]) for e in events]
        grown = [counts[0], *(b - a for a, b in itertools.pairwise(counts))]
        assert sizes == (grown if incremental else counts)
        ends = [e["meta_info"]["finish_reason"] for e in events]
        assert ends[:-1] == [None] * (len(ends) - 1) and ends[-1]["type"] == "stop"
        if not incremental:
            assert all(whole["text"].startswith(e["text"]) for e in events)
        merged = merge_stream(raw).body
        assert (merged["text"], merged["output_ids"]) == (WIDE, ids_of(WIDE))
        assert (whole["text"], whole["output_ids"]) == (WIDE, ids_of(WIDE))


async def test_a_stream_of_generate_refuses_after_its_200(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        body = {"input_ids": [5, 1 << 20], "stream": True}
        answer = await client.post("/generate", json=body)
        assert answer.status == 200 and answer.content_type == "text/event-stream"
        (event,) = sse(await answer.text())
        assert event["error"]["code"] == 400


async def test_chat_gives_text_and_both_id_lists(tmp_path: Path) -> None:
    async with serving(tmp_path, TWO_CALLS) as client:
        body = await chat(client, tools=TOOLS)
        choice = body["choices"][0]
        assert choice["prompt_token_ids"] == prompt_ids(TOOLS)
        assert choice["response_token_ids"] == ids_of(TWO_CALLS)
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["reasoning_content"] == " Look both up.\n"
        assert choice["message"]["content"] == "\n\nChecking."
        assert [c["id"] for c in choice["message"]["tool_calls"]] == [
            "functions.get_weather:0",
            "functions.get_weather:1",
        ]
        assert body["usage"]["completion_tokens"] == len(ids_of(TWO_CALLS))
        raw = (await chat(client))["choices"][0]
        assert raw["message"]["tool_calls"] is None
        assert "<|tool_call_begin|>" in raw["message"]["content"]
        instant = await chat(client, chat_template_kwargs={"thinking": False})
        assert instant["choices"][0]["prompt_token_ids"] == [
            *prompt_ids(),
            tokenizer().specials["</think>"],
        ]


async def test_preserved_thinking_is_rendered_as_ours(tmp_path: Path) -> None:
    """The switch of the request makes the server's prompt ours; a template without it refuses."""
    history = [
        *MESSAGES,
        {"role": "assistant", "content": "4", "reasoning_content": "easy"},
        {"role": "user", "content": "And 3 + 3?"},
    ]
    switches = template_switches(
        Prompt(prompt_id="p", twin_id="t", dataset="d", messages=history, preserve_thinking=True)
    )
    assert switches == {"thinking": True, "preserve_thinking": True}
    async with serving(tmp_path, extra=["--variant", "kimi-k2.6"]) as client:
        for preserve in (False, True):
            fields = {"chat_template_kwargs": switches} if preserve else {}
            choice = (await chat(client, messages=history, **fields))["choices"][0]
            ours = load_renderer(TARGET_DIR, "kimi-k2.6").render(history, None, True, preserve)
            assert choice["prompt_token_ids"] == ours.ids
            assert ("easy" in ours.text) is preserve
    async with serving(tmp_path) as client:
        body = {"messages": history, "chat_template_kwargs": switches}
        refused = await client.post("/v1/chat/completions", json=body)
        assert refused.status == 400 and "preserve_thinking" in await refused.text()


async def test_chat_numbers_calls_after_the_history(tmp_path: Path) -> None:
    call = {
        "id": "functions.get_weather:0",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city":"Rome"}'},
    }
    history = [
        *MESSAGES,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "rain"},
    ]
    async with serving(tmp_path, TWO_CALLS) as client:
        body = await chat(client, messages=history, tools=TOOLS)
        calls = body["choices"][0]["message"]["tool_calls"]
        assert [c["id"] for c in calls] == ["functions.get_weather:1", "functions.get_weather:2"]


async def test_chat_stream_says_the_same(tmp_path: Path) -> None:
    async with serving(tmp_path, TWO_CALLS, extra=["--tokens-per-s", "400"]) as client:
        whole = (await chat(client, tools=TOOLS))["choices"][0]["message"]
        body = {"messages": MESSAGES, "tools": TOOLS, "stream": True}
        text = await (await client.post("/v1/chat/completions", json=body)).text()
        deltas = [c["delta"] for e in sse(text) for c in e["choices"]]
        joined = "".join(d.get("reasoning_content", "") for d in deltas)
        assert joined == whole["reasoning_content"]
        assert [c for d in deltas for c in d.get("tool_calls", [])] == whole["tool_calls"]
        refused = await client.post("/v1/chat/completions", json=body | {"return_token_ids": True})
        assert refused.status == 400


async def test_server_facts(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        info = await (await client.get("/server_info")).json()
        assert (info["tool_call_parser"], info["reasoning_parser"]) == ("kimi_k2", "kimi_k2")
        assert info["disable_radix_cache"] is True
        assert (await client.get("/health")).status == 200
        assert (await (await client.get("/model_info")).json())["is_generation"] is True
        models = await (await client.get("/v1/models")).json()
        assert models["data"][0]["max_model_len"] == info["context_length"]
        await chat(client)
        metrics = await (await client.get("/metrics")).text()
        count = len(ids_of(PLAIN))
        assert f'sglang:generation_tokens_total{{model_name="eyas/embedded"}} {count}' in metrics
        tokens = await (await client.post("/tokenize", json={"prompt": "a<think>"})).json()
        assert tokens["tokens"] == [
            *tokenizer().encode_ordinary("a"),
            tokenizer().specials["<think>"],
        ]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {}),
        ("/generate", {"input_ids": [5, 1 << 20]}),
        ("/generate", {"input_ids": "text"}),
        ("/v1/chat/completions", {"messages": []}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": 5}]}),
        ("/abort_request", {"rid": 5}),
    ],
)
async def test_refused(tmp_path: Path, path: str, body: dict[str, Any]) -> None:
    async with serving(tmp_path) as client:
        assert (await client.post(path, json=body)).status == 400


async def test_faults_in_this_shape_need_the_scope(tmp_path: Path) -> None:
    async with serving(tmp_path, faults="server_error,bad_gateway@sglang#1") as client:
        body = {"input_ids": prompt_ids()}
        assert (await client.post("/generate", json=body)).status == 502
        assert (await client.post("/generate", json=body)).status == 200


async def test_abort(tmp_path: Path) -> None:
    async with serving(tmp_path, extra=["--tokens-per-s", "50", "--ttft-s", "30"]) as client:
        body = {"input_ids": prompt_ids(), "rid": "mine"}
        waiting = asyncio.create_task(client.post("/generate", json=body))

        async def arrived() -> bool:
            requests = await (await client.get("/gateway/requests")).json()
            return bool(requests["in_flight"])

        await until(arrived)
        assert (await client.post("/abort_request", json={"rid": "other"})).status == 200
        assert not waiting.done()
        await client.post("/abort_request", json={"rid": "mine"})
        out = await (await waiting).json()
        assert out["meta_info"]["finish_reason"]["type"] == "abort"
        assert out["output_ids"] == []


async def test_text_recordings_have_no_ids(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text(json.dumps({"text": PLAIN, "completion_tokens": 9, "prompt_tokens": 33}))
    async with serving(tmp_path, extra=["--replay", str(path)]) as client:
        assert (await client.post("/generate", json={"input_ids": [1]})).status == 501
        body = await reply(client)
        assert body["choices"][0]["message"]["content"] == "\n\nFour. "
        assert body["usage"]["prompt_tokens"] == 33
        assert body["usage"]["completion_tokens"] == 9


# -- live: a random model with the shipped tokenizer


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    for name in ("tiktoken.model", "tokenizer_config.json"):
        shutil.copy(TARGET_DIR / name, directory / name)
    return write_tiny(directory, vocab_size=tokenizer().vocab_size)


@asynccontextmanager
async def live(model_dir: Path, *extra: str) -> AsyncIterator[TestClient[Any, Any]]:
    base = ["--model-dir", str(model_dir), "--latency-scale", "0", "--threads", "1"]
    gateway = Gateway(arguments([*base, *extra]))
    async with TestClient(TestServer(gateway.app())) as client:
        yield client
    await gateway.desk.close()
    gateway.arrivals.close()


async def test_one_seed_one_sample_on_every_shape(model_dir: Path, tmp_path: Path) -> None:
    truth = tmp_path / "truth.jsonl"
    async with live(model_dir, "--truth", str(truth)) as client:
        for seed in range(4):
            fields = {"seed": seed, "max_tokens": 24, "temperature": 0.8, "top_p": 0.9}
            await reply(client, **fields)
            await reply(client, **fields, provider={"only": ["cedar"]})
            await chat(client, **fields)
            params = {
                "sampling_seed": seed,
                "max_new_tokens": 24,
                "temperature": 0.8,
                "top_p": 0.9,
            }
            body = {"input_ids": prompt_ids(), "sampling_params": params, "return_logprob": True}
            out = await (await client.post("/generate", json=body)).json()
            logprobs = out["meta_info"]["output_token_logprobs"]
            assert [i for _, i, _ in logprobs] == out["output_ids"]
            assert all(lp < 0 for lp, _, _ in logprobs)
    lines = [json.loads(line) for line in truth.read_text().splitlines()]
    samples = {(line["seed"], tuple(line["completion_ids"])) for line in lines}
    assert len(lines) == 16
    assert len(samples) == 4
    assert {tuple(line["prompt_ids"]) for line in lines} == {tuple(prompt_ids())}
    assert [line["arm"] for line in lines[:4]] == ["text", "text", "local", "local"]


async def test_requests_in_one_batch_and_a_stream(model_dir: Path) -> None:
    async with live(model_dir, "--slots", "4") as client:
        alone = [await reply(client, seed=s, max_tokens=20) for s in range(10)]
        together = await asyncio.gather(*(reply(client, seed=s, max_tokens=20) for s in range(10)))
        assert [r["choices"] for r in together] == [r["choices"] for r in alone]
        response = await client.post(
            "/generate",
            json={
                "input_ids": prompt_ids(),
                "stream": True,
                "sampling_params": {"max_new_tokens": 20},
            },
        )
        events = sse(await response.text())
        assert len(events[-1]["output_ids"]) <= 20


async def test_other_model_samples_otherwise(model_dir: Path) -> None:
    async with live(model_dir) as client:
        usual = await reply(client, max_tokens=30)
        await client.post("/gateway/faults", data="other_model")
        other = await reply(client, max_tokens=30)
        assert other["choices"][0]["message"] != usual["choices"][0]["message"]
        assert other["usage"]["prompt_tokens"] == usual["usage"]["prompt_tokens"]
        local = await chat(client, max_tokens=30)
        await client.post("/gateway/faults", data="other_model@sglang")
        hit = await chat(client, max_tokens=30)
        ids = [r["choices"][0]["response_token_ids"] for r in (local, hit)]
        assert ids[0] != ids[1]


async def test_pause_holds_and_continues(model_dir: Path) -> None:
    async with live(model_dir) as client:
        await client.post("/pause_generation")
        waiting = asyncio.create_task(reply(client, max_tokens=5))

        async def queued() -> bool:
            metrics = await (await client.get("/metrics")).text()
            return 'num_queue_reqs{model_name="eyas/embedded"} 1' in metrics

        await until(queued)
        await client.post("/continue_generation")
        assert (await waiting)["usage"]["completion_tokens"] == 5


async def test_a_model_of_another_vocabulary_is_refused(model_dir: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(model_dir, other)
    write_tiny(other, vocab_size=300)
    with pytest.raises(UsageError, match="different models"):
        Gateway(arguments(["--model-dir", str(other)]))
