"""SGLang and OpenAI-compatible servers: what is checked, what is sent, what comes back exact."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from core.budget import Budget
from core.config import Config, parse
from core.errors import ConfigError, ProviderError
from core.generate.books import Books
from core.providers import base, make_provider
from core.providers.chat import usage_of
from core.providers.price import Price
from core.providers.sglang import TOKENIZED, advice_on, load_of
from core.schema import Prompt, Sampling
from tests.core.generate.rig import MemoryFile, renderer

SAMPLING = Sampling(max_tokens=32, seed=7, temperature=0.5)
PROMPT = Prompt(
    prompt_id="p",
    twin_id="t",
    dataset="d",
    messages=[{"role": "user", "content": "1+1?"}],
    thinking=False,
)


class Server:
    """Answers by path; keeps what it was asked."""

    def __init__(self, **answers: Any) -> None:
        self.answers = {"/" + k.replace("__", "/"): v for k, v in answers.items()}
        self.asked: list[tuple[str, Any]] = []

    async def _any(self, request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else None
        self.asked.append((request.path, body))
        answer = self.answers.get(request.path, (404, None))
        if callable(answer):
            answer = answer(body)
        status, data = answer if isinstance(answer, tuple) else (200, answer)
        if isinstance(data, bytes):
            return web.Response(body=data, status=status, content_type="text/event-stream")
        if isinstance(data, str):
            return web.Response(text=data, status=status)
        return web.json_response(data, status=status)

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._any)
        return app


@asynccontextmanager
async def backend(
    server: Server, name: str, config: dict[str, Any]
) -> AsyncIterator[base.Provider]:
    async with TestServer(server.app()) as running:
        url = str(running.make_url("")).rstrip("/")
        provider = make_provider(name, made(config, url))
        try:
            yield provider
        finally:
            await provider.close()


def made(config: dict[str, Any], url: str) -> Config:
    filled = {
        section: {k: _filled(v, url) for k, v in fields.items()}
        for section, fields in config.items()
    }
    return parse({"generate": filled}, "t")


def _filled(value: Any, url: str) -> Any:
    if isinstance(value, list):
        return [_filled(v, url) for v in value]
    return value.replace("URL", url) if isinstance(value, str) else value


SGLANG = {"sglang": {"urls": ["URL"]}}
CHAT = {"sglang": {"urls": ["URL"], "endpoint": "chat"}}
NAMED = {"sglang": {"urls": ["URL"], "model": "org/kimi"}}
VLLM = {"openai": {"base_url": "URL/v1", "model": "m"}}
INFO = {"version": "0.5.14", "context_length": 4096}


async def complete(provider: base.Provider, lane: str | None = None) -> base.Reply:
    request = base.CompletionRequest(
        request_id="p-1",
        prompt=PROMPT,
        prompt_ids=[5, 6, 7],
        sampling=SAMPLING,
        provider=lane or provider.lanes[0].name,
    )
    return await provider.complete(request, base.Flight())


async def test_no_answer_to_a_question_of_ours_holds_the_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SERVER_KEY", "sk-very-secret-key")
    info = {**INFO, "version": "0.5 of sk-very-secret-key"}
    config = {"sglang": {"urls": ["URL"], "api_key_env": "SERVER_KEY"}}
    async with backend(Server(server_info=info), "sglang", config) as provider:
        (line,) = await provider.preflight(SAMPLING)
    assert "version=0.5 of [secret]" in line


async def test_generate_sends_our_ids_and_returns_theirs() -> None:
    reply = {
        "text": "2",
        "output_ids": [9, 2],
        "meta_info": {
            "id": "p-1",
            "finish_reason": {"type": "stop"},
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "cached_tokens": 1,
        },
    }
    server = Server(server_info=INFO, generate=reply)
    async with backend(server, "sglang", SGLANG) as provider:
        lines = await provider.preflight(SAMPLING)
        assert "version=0.5.14" in lines[0]
        got = await complete(provider)
    sent = server.asked[-1][1]
    assert sent["input_ids"] == [5, 6, 7] and sent["rid"] == "p-1"
    assert sent["sampling_params"]["sampling_seed"] == 7
    assert sent["sampling_params"]["skip_special_tokens"] is False
    assert sent["sampling_params"]["spaces_between_special_tokens"] is False
    assert got.failure is None and got.usage.completion_tokens == 2
    assert got.usage.cached_tokens == 1 and got.usage.cost_usd == 0.0
    assert not provider.sends_messages


@pytest.mark.parametrize(
    "reply",
    [
        {"text": "", "output_ids": [], "meta_info": {"finish_reason": {"type": "abort"}}},
        {"text": "2", "meta_info": {"finish_reason": {"type": "stop"}}},
    ],
)
async def test_an_abort_or_a_reply_without_ids_is_a_failure(reply: dict[str, Any]) -> None:
    async with backend(Server(server_info=INFO, generate=reply), "sglang", SGLANG) as provider:
        await provider.preflight(SAMPLING)
        got = await complete(provider)
    assert isinstance(got.failure, base.UpstreamError)


async def test_chat_asks_for_ids_of_both_sides() -> None:
    choice = {"message": {}, "response_token_ids": [1]}
    server = Server(server_info=INFO, v1__chat__completions={"choices": [choice]})
    async with backend(server, "sglang", CHAT) as provider:
        assert len(await provider.preflight(SAMPLING)) == 1
        await complete(provider)
        assert not provider.sends_messages
    sent = server.asked[-1][1]
    # The server's own rendering drops names and rewrites arguments: our ids go along.
    assert sent["input_ids"] == [5, 6, 7] and sent["messages"]
    assert sent["return_token_ids"] and sent["return_prompt_token_ids"]
    assert sent["chat_template_kwargs"] == {
        "thinking": False,
        "spaces_between_special_tokens": False,
    }


async def test_an_abort_names_the_request() -> None:
    server = Server(server_info=INFO, abort_request={})
    async with backend(server, "sglang", SGLANG) as provider:
        await provider.preflight(SAMPLING)
        request = base.CompletionRequest(
            request_id="p-1",
            prompt=PROMPT,
            prompt_ids=[],
            sampling=SAMPLING,
            provider=provider.lanes[0].name,
        )
        await provider.abort(request)
    assert server.asked[-1] == ("/abort_request", {"rid": "p-1", "abort_all": False})


@pytest.mark.parametrize(
    ("config", "answers", "words"),
    [
        (SGLANG, {}, "is this an SGLang server"),
        (SGLANG, {"server_info": (401, None)}, "refuses the key"),
        (SGLANG, {"server_info": {"context_length": 16}}, "max_tokens is 32"),
        (SGLANG, {"server_info": {"max_req_input_len": 32}}, "has a context of 32, max_tokens is"),
        (CHAT, {"server_info": {"skip_tokenizer_init": True}}, "skip-tokenizer-init"),
        (SGLANG, {"server_info": "<html>hello</html>"}, "HTTP 200 without facts; is this an SGL"),
        (SGLANG, {"version": {"version": "0.32.0"}}, 'like vLLM, set backend = "vllm"'),
        (SGLANG, {"server_info": {"is_embedding": True}}, "serves embeddings"),
        (NAMED, {"server_info": {"model_path": "org/other"}}, "serves org/other, sglang.model is"),
        (CHAT, {"server_info": INFO}, 'cannot chat .HTTP 404.; set sglang.endpoint = "generate"'),
        (SGLANG, {"server_info": INFO, "tokenize": {"tokens": [1, 2]}}, "has another tokenizer"),
    ],
)
async def test_a_server_that_is_not_what_the_config_says(
    config: dict[str, Any], answers: dict[str, Any], words: str
) -> None:
    server = Server(**answers)
    async with backend(server, "sglang", config) as provider:
        with pytest.raises(ProviderError, match=words) as caught:
            await provider.preflight(SAMPLING, renderer().tokenizer)
    assert "\n" not in str(caught.value)
    assert "/generate" not in [path for path, _ in server.asked]


@pytest.mark.parametrize("name", ["kimi", "org/kimi", "/models/kimi"])
async def test_a_named_model_is_known_by_each_of_its_names(name: str) -> None:
    info = {**INFO, "model_path": "/models/kimi", "served_model_name": "org/kimi"}
    config = {"sglang": {"urls": ["URL"], "model": name}}
    async with backend(Server(server_info=info), "sglang", config) as provider:
        assert (await provider.preflight(SAMPLING))[0].endswith("model_path=/models/kimi")


@pytest.mark.parametrize(
    ("info", "tokens"),
    [
        ({}, None),
        ({"context_length": None, "max_req_input_len": 2_042}, 2_042),
        ({"context_length": 4_096}, 4_096),
        ({"context_length": 4_096, "max_req_input_len": 1_018}, 1_018),
    ],
)
async def test_what_a_server_holds(info: dict[str, Any], tokens: int | None) -> None:
    async with backend(Server(server_info=info), "sglang", SGLANG) as provider:
        await provider.preflight(SAMPLING)
        assert [lane.context_tokens for lane in provider.lanes] == [tokens]
    model = {"id": "m", "max_model_len": tokens}
    answers = {"v1__models": {"data": [model]}, "v1__chat__completions": {"choices": [{}]}}
    async with backend(Server(**answers), "vllm", VLLM) as provider:
        await provider.preflight(SAMPLING)
        assert [lane.context_tokens for lane in provider.lanes] == [tokens]


async def test_the_server_has_the_tokenizer_of_the_run() -> None:
    tokenizer = renderer().tokenizer

    def tokenize(body: dict[str, Any]) -> Any:
        assert body["add_special_tokens"] is False
        return {"tokens": tokenizer.encode_ordinary(body["prompt"])}

    async with backend(Server(server_info=INFO, tokenize=tokenize), "sglang", SGLANG) as provider:
        assert "tokenizer as ours" in (await provider.preflight(SAMPLING, tokenizer))[0]
    async with backend(Server(server_info=INFO), "sglang", SGLANG) as provider:
        assert "tokenizer not checked" in (await provider.preflight(SAMPLING, tokenizer))[0]
    exact = {"choices": [{"token_ids": [1]}]}
    vllm = Server(v1__models={"data": [{"id": "m"}]}, v1__chat__completions=exact)
    vllm.answers["/tokenize"] = tokenize
    async with backend(vllm, "vllm", VLLM) as provider:
        assert "tokenizer as ours" in (await provider.preflight(SAMPLING, tokenizer))[0]
        vllm.answers["/tokenize"] = {"tokens": [7]}
        with pytest.raises(ProviderError, match=r"another tokenizer .*\[7\]") as caught:
            await provider.preflight(SAMPLING, tokenizer)
    assert caught.value.kind == "other_tokenizer"


async def test_a_tokenizer_that_ends_early_or_talks_at_length_is_another_one() -> None:
    ours = renderer().tokenizer.encode_ordinary(TOKENIZED)
    short = f"id 3 of a test text: [], ours [{ours[3]}]"
    for theirs, said in ((ours[:3], short), (["x" * 9_999], "id 0 of a test text: ['xxx")):
        answers = {"server_info": INFO, "tokenize": {"tokens": theirs}}
        async with backend(Server(**answers), "sglang", SGLANG) as provider:
            with pytest.raises(ProviderError, match="another tokenizer") as caught:
                await provider.preflight(SAMPLING, renderer().tokenizer)
        assert said in str(caught.value) and len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("info", "endpoint", "words"),
    [
        ({}, "generate", []),
        ({"disable_radix_cache": True}, "generate", ["--disable-radix-cache"]),
        (
            {"speculative_algorithm": "EAGLE3", "speculative_accept_threshold_acc": 0.9},
            "generate",
            ["that the target did not sample"],
        ),
        (
            {"speculative_algorithm": "EAGLE3", "speculative_accept_threshold_acc": 1.0},
            "generate",
            [],
        ),
        ({"tool_call_parser": None}, "generate", []),
        ({"tool_call_parser": None, "reasoning_parser": "kimi_k2"}, "chat", ["--tool-call-parser"]),
    ],
)
def test_flags_that_cost_speed_or_truth(
    info: dict[str, Any], endpoint: str, words: list[str]
) -> None:
    found = advice_on(info, endpoint)
    assert len(found) == len(words)
    assert all(word in line for word, line in zip(words, found, strict=True))


async def test_chat_without_ids_and_servers_of_two_models_are_said() -> None:
    info = {**INFO, "model_path": "a"}
    blind = Server(server_info=info, v1__chat__completions={"choices": [{"message": {}}]})
    async with backend(blind, "sglang", CHAT) as provider:
        lines = await provider.preflight(SAMPLING)
    assert "returns no token ids in chat" in lines[-1] and isinstance(lines[-1], base.Advice)
    other = Server(server_info={**INFO, "model_path": "b"})
    async with TestServer(other.app()) as second:
        urls = ["URL", str(second.make_url(""))]
        async with backend(Server(server_info=info), "sglang", {"sglang": {"urls": urls}}) as both:
            lines = await both.preflight(SAMPLING)
            assert len(both.lanes) == 2
    assert "2 different models" in lines[-1] and isinstance(lines[-1], base.Advice)


async def test_a_server_of_an_older_version_is_found() -> None:
    async with backend(Server(get_server_info=INFO), "sglang", SGLANG) as provider:
        assert len(await provider.preflight(SAMPLING)) == 1


def test_load_is_summed_over_label_sets() -> None:
    page = (
        '# HELP x\nsglang:num_running_reqs{tp="0"} 3.0\nsglang:num_running_reqs{tp="1"} 2.0\n'
        "sglang:num_queue_reqs 7.0\n"
    )
    assert load_of(page) == base.Load(running=5, waiting=7)
    assert load_of('vllm:num_requests_waiting{model="m"} 1.0\n') == base.Load(running=0, waiting=1)
    assert load_of("other 1\n") is None


async def test_load_is_asked_only_while_it_is_offered() -> None:
    server = Server(server_info=INFO)
    async with backend(server, "sglang", SGLANG) as provider:
        await provider.preflight(SAMPLING)
        lane = provider.lanes[0].name
        assert await provider.load(lane) is None
        asked = len(server.asked)
        assert await provider.load(lane) is None and len(server.asked) == asked


async def test_token_ids_of_a_chat_server_are_probed_not_assumed() -> None:
    models = {"data": [{"id": "m", "max_model_len": 4096}]}
    exact = {"choices": [{"token_ids": [1], "message": {}}]}
    server = Server(v1__models=models, v1__chat__completions=exact)
    async with backend(server, "vllm", VLLM) as provider:
        lines = await provider.preflight(SAMPLING)
        assert "returns token ids" in lines[0]
        await complete(provider)
    sent = server.asked[-1][1]
    assert sent["return_token_ids"] is True
    assert sent["skip_special_tokens"] is sent["spaces_between_special_tokens"] is False


async def test_a_chat_server_that_knows_no_token_ids_falls_to_text_and_says_so() -> None:
    models = {"data": [{"id": "m"}]}

    def strict(body: dict[str, Any]) -> Any:
        unknown = "return_token_ids" in body
        return (400, {"message": "unknown field"}) if unknown else {"choices": [{"message": {}}]}

    server = Server(v1__models=models, v1__chat__completions=strict)
    async with backend(server, "openai", VLLM) as provider:
        said = (await provider.preflight(SAMPLING))[0]
        assert "refuses token-id fields (unknown field): samples can only be consistent" in said
        await complete(provider)
    assert "return_token_ids" not in server.asked[-1][1]
    deaf = Server(v1__models=models, v1__chat__completions={"choices": [{"message": {}}]})
    async with backend(deaf, "vllm", VLLM) as provider:
        said = (await provider.preflight(SAMPLING))[0]
        assert "returns no token ids: samples can only be consistent" in said
    broken = Server(v1__models=models, v1__chat__completions=(400, {"message": "no chat template"}))
    async with backend(broken, "vllm", VLLM) as provider:
        with pytest.raises(ProviderError, match="probe request failed: no chat template"):
            await provider.preflight(SAMPLING)


async def test_a_chat_server_that_takes_no_tools_is_refused_when_prompts_declare_them() -> None:
    def toolless(body: dict[str, Any]) -> Any:
        words = '"auto" tool choice requires --enable-auto-tool-choice'
        if "tools" in body:
            return 400, {"message": words}
        return {"choices": [{"token_ids": [1]}]}

    server = Server(v1__models={"data": [{"id": "m"}]}, v1__chat__completions=toolless)
    async with backend(server, "vllm", VLLM) as provider:
        assert "returns token ids" in (await provider.preflight(SAMPLING))[0]
        with pytest.raises(ProviderError, match="takes no tools, and prompts declare") as caught:
            await provider.preflight(SAMPLING, None, True)
        assert "--enable-auto-tool-choice --tool-call-parser" in str(caught.value)
        server.answers["/v1/chat/completions"] = {"choices": [{"token_ids": [1]}]}
        assert "returns token ids" in (await provider.preflight(SAMPLING, None, True))[0]
    sent = server.asked[-1][1]
    assert sent["tools"] and sent["max_tokens"] == 1


async def test_a_billed_chat_server_is_not_probed_and_priced_by_the_config() -> None:
    config = {"openai": {**VLLM["openai"], "price_prompt": 1.0, "price_completion": 2.0}}
    reply = {
        "choices": [{"message": {"content": "2"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 100, "completion_tokens": 50},
    }
    server = Server(v1__models={"data": [{"id": "m"}]}, v1__chat__completions=reply)
    async with backend(server, "openai", config) as provider:
        await provider.preflight(SAMPLING, renderer().tokenizer, tools=True)
        assert [path for path, _ in server.asked] == ["/v1/models"]
        got = await complete(provider)
    assert got.usage.cost_usd == pytest.approx(200e-6)


@pytest.mark.parametrize(
    ("usage", "usd"),
    [
        ({"prompt_tokens": 100, "completion_tokens": 0}, 100e-6),
        ({"prompt_tokens": 100}, None),
        ({"completion_tokens": 50}, None),
        ({"prompt_tokens": 0, "completion_tokens": 50}, None),  # no prompt is empty: not filled in
        ({"prompt_tokens": 100, "completion_tokens": "50"}, None),
        ({"prompt_tokens": None, "completion_tokens": 50.5}, None),
    ],
)
def test_a_list_prices_nothing_of_which_half_is_unknown(
    usage: dict[str, Any], usd: float | None
) -> None:
    said = usage_of({"usage": usage}, Price(prompt=1e-6, completion=2e-6, from_list=True))
    assert (said.cost_usd, said.cap_usd) == (pytest.approx(usd), pytest.approx(usd))


async def test_nobody_waits_for_a_bill_that_cannot_be_asked_for() -> None:
    config = {"openai": {**VLLM["openai"], "price_prompt": 1.0, "price_completion": 2.0}}
    async with backend(Server(), "openai", config) as provider:
        books = Books(Budget(1.0), MemoryFile(), lookup_delays_s=(3_600.0,))
        assert await asyncio.wait_for(books.look_up(provider, "gen-1"), 30) is None
    async with backend(Server(), "openai", VLLM) as provider:  # free: the bill is known
        found = await books.look_up(provider, "gen-1")
        assert found is not None and found.cost_usd == 0.0


@pytest.mark.parametrize("choices", [{"0": {}}, [7], None, "none"])
async def test_a_probe_that_is_answered_with_anything_else_is_one_line(choices: Any) -> None:
    reply = {"choices": choices}
    server = Server(v1__models={"data": [{"id": "m"}]}, v1__chat__completions=reply)
    async with backend(server, "vllm", VLLM) as provider:
        with pytest.raises(ProviderError, match="no list of choices; is http") as caught:
            await provider.preflight(SAMPLING)
    assert caught.value.kind == "probe_failed"


@pytest.mark.parametrize(
    ("models", "words"),
    [
        ({"data": [{"id": "other"}]}, "does not serve 'm'; it has other"),
        ({"data": [{"id": "m", "max_model_len": 32}]}, "for a prompt in the server's 32; lower"),
        ((401, None), "key is refused"),
        ((500, None), "HTTP 500"),
        ("<html>hello</html>", "answers no JSON; check openai.base_url"),
    ],
)
async def test_a_chat_server_that_is_not_what_the_config_says(models: Any, words: str) -> None:
    async with backend(Server(v1__models=models), "vllm", VLLM) as provider:
        with pytest.raises(ProviderError, match=words):
            await provider.preflight(SAMPLING)


def test_settings_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"sglang\.urls is empty"):
        make_provider("sglang", parse({}, "t"))
    with pytest.raises(ConfigError, match=r"openai\.base_url"):
        make_provider("vllm", parse({}, "t"))
    with pytest.raises(ConfigError, match="NO_KEY is not set"):
        sglang = {"urls": ["http://x"], "api_key_env": "NO_KEY"}
        make_provider("sglang", parse({"generate": {"sglang": sglang}}, "t"))
    for url in ("https://api.example.com/v1", "http://8.8.8.8/v1"):
        public = {"generate": {"openai": {"base_url": url, "model": "m"}}}
        with pytest.raises(ConfigError, match=r"are 0, so the budget could not hold"):
            make_provider("openai", parse(public, "t"))
    with pytest.raises(ConfigError, match="unknown backend 'x'"):
        make_provider("x", parse({}, "t"))
