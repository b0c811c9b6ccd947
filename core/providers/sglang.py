"""SGLang servers: `/generate`, or chat with `return_token_ids`, both with our own prompt ids.

Promises: the ids that come back are the sampled ones; the prompt is what we rendered, because a
server that renders messages itself drops names, joins lists and rewrites the arguments of old calls
(seen on 0.5.23; one that ignores `input_ids` shows it in the prompt ids that it returns); every
server is checked against the config before the first request; a cancelled request is aborted on the
server too. Local servers bill nothing. Facts: SGLang 0.5.x."""

import asyncio
import os
import re
import time
from typing import Any

import msgspec

from core.config import Config
from core.errors import ConfigError, ProviderError
from core.providers import base
from core.providers.chat import (
    asked,
    body_of,
    count,
    outgoing_messages,
    reply_of,
    template_switches,
)
from core.providers.classify import classify_error, error_message
from core.providers.http import HttpClient
from core.providers.price import Price, finite, number_in
from core.render.tokenizer import TokenizerLike
from core.schema import Sampling, Usage

METRIC = re.compile(r"^(?:sglang|vllm):(\w+?)(?:\{[^}]*\})?\s+([0-9.eE+-]+)$", re.MULTILINE)
RUNNING = ("num_running_reqs", "num_requests_running")
WAITING = ("num_queue_reqs", "num_requests_waiting")
SHOWN = ("version", "model_path", "tool_call_parser", "reasoning_parser", "speculative_algorithm")
STREAM_TOKENS = 16
STREAM_EVENTS = 256
"""A streamed reply comes in at most so many events, and none but the first and the last brings
fewer tokens than STREAM_TOKENS: most servers repeat everything so far in each of them."""
OLD_STREAMS = "stream_output"
"""The argument is called so on servers (before SGLang #20614) whose events may leave ids out, or
bring new ids beside all of the text (#13759)."""
TOKENIZED = "Count 12345 naïve 世界 🙂\n\tdef f(x):  return x['a'] # don't\r\n"
"""Letters, digits, accents, Han, emoji, code and line ends: two tokenizers rarely agree on all."""


def server_headers(api_key_env: str) -> dict[str, str]:
    """Authorization from the named environment variable; none when no name is given."""
    if not api_key_env:
        return {}
    value = os.environ.get(api_key_env, "").strip()
    if not value:
        raise ConfigError(f"{api_key_env} is not set; export it, or clear api_key_env")
    return {"Authorization": f"Bearer {value}"}


def load_of(metrics: str) -> base.Load | None:
    """Running and waiting requests from a Prometheus page, summed over its label sets."""
    sums: dict[str, float] = {}
    for name, text in METRIC.findall(metrics):
        if (name in RUNNING or name in WAITING) and (value := number_in(text)) is not None:
            sums[name] = sums.get(name, 0.0) + value
    if not any(name in sums for name in WAITING):
        return None
    return base.Load(
        running=int(sum(sums.get(n, 0.0) for n in RUNNING)),
        waiting=int(sum(sums.get(n, 0.0) for n in WAITING)),
    )


def context_of(info: dict[str, Any]) -> int | None:
    """Tokens of prompt and answer: a total above `context_length` is refused; one above
    `max_req_input_len`, which the KV pool bounds as well, is cut short (0.5.14)."""
    known = [count(info.get("context_length")), count(info.get("max_req_input_len"))]
    return min((n for n in known if n), default=None)


async def same_tokenizer(
    who: str, server: HttpClient, path: str, tokenizer: TokenizerLike, model: str = "default"
) -> str:
    """A word on the server's tokenizer. Raises ProviderError when it is not the run's own: its ids
    would mean other words here."""
    sent = {"model": model, "prompt": TOKENIZED, "add_special_tokens": False}
    status, body = await server.post(path, sent)
    theirs = body.get("tokens") if isinstance(body, dict) and status == 200 else None
    if not isinstance(theirs, list):
        return "tokenizer not checked"
    ours = tokenizer.encode_ordinary(TOKENIZED)
    if theirs == ours:
        return "tokenizer as ours"
    pairs = enumerate(zip(theirs, ours, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(theirs), len(ours)))
    said = str(theirs[at : at + 1])[:40]
    raise ProviderError(
        f"{who} has another tokenizer than target.tokenizer (id {at} of a test text: {said}, "
        f"ours {ours[at : at + 1]}); serve the target or name its own",
        "other_tokenizer",
    )


def advice_on(info: dict[str, Any], endpoint: str) -> list[str]:
    """Flags of a server that work, and cost speed or truth."""
    found = []
    if info.get("disable_radix_cache"):
        found.append(
            "has no prefix cache: shared tools and system messages are computed for every prompt; "
            "restart it without --disable-radix-cache"
        )
    names = ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")
    thresholds = [finite(info.get(name)) for name in names]
    if info.get("speculative_algorithm") and any(t is not None and t < 1 for t in thresholds):
        found.append(
            "accepts drafted tokens that the target did not sample; restart it with "
            "--speculative-accept-threshold-single 1 --speculative-accept-threshold-acc 1"
        )
    missing = [n for n in ("tool_call_parser", "reasoning_parser") if n in info and not info[n]]
    if endpoint == "chat" and missing:
        flags = " and ".join("--" + n.replace("_", "-") for n in missing)
        found.append(f"has no {flags}: chat returns markers as text; ids stay exact")
    return found


class SGLang:
    """The `sglang` backend. One lane per server; a router counts as one."""

    name = "sglang"
    tells_bills = True
    sends_messages = False

    def __init__(self, config: Config) -> None:
        options = config.generate.sglang
        if not options.urls:
            raise ConfigError("sglang.urls is empty; name the server, e.g. http://127.0.0.1:30000")
        self._endpoint = options.endpoint
        self.streams = options.stream and options.endpoint == "generate"
        self._model = options.model
        headers = server_headers(options.api_key_env)
        self._servers: dict[str, HttpClient] = {}
        for url in options.urls:
            name = url.split("://", 1)[-1].rstrip("/")
            self._servers[name] = HttpClient(url, headers, config.generate.connect_timeout_s)
        self.lanes: list[base.LaneSpec] = []
        self._metrics = dict.fromkeys(self._servers, True)

    async def preflight(
        self, sampling: Sampling, tokenizer: TokenizerLike | None = None, tools: bool = False
    ) -> list[str]:
        lines: list[str] = []
        self.lanes = []
        paths: set[str] = set()
        for name, server in self._servers.items():
            info = await self._facts(name, server)
            self._check(name, info, sampling)
            notes = [f"{k}={info[k]}"[:120] for k in SHOWN if info.get(k)]
            if tokenizer is not None and not info.get("skip_tokenizer_init"):
                words = await same_tokenizer(f"sglang: {name}", server, "/tokenize", tokenizer)
                notes.append(words)
            if self._endpoint == "chat":
                notes.append("replies come whole: chat streams no token ids")
            elif self.streams and OLD_STREAMS in info:
                self.streams = False
                notes.append("replies come whole: a server of this age loses ids in streams")
            lines.append(" ".join([f"sglang: {name}", *notes]))
            lines += [base.Advice(f"sglang: {name} {a}") for a in advice_on(info, self._endpoint)]
            if self._endpoint == "chat":
                lines += await self._probe(name, server)
            paths.add(str(info.get("model_path")))
            self.lanes.append(
                base.LaneSpec(name=name, cancel_stops_bill=True, context_tokens=context_of(info))
            )
        if len(paths) > 1:
            lines.append(base.Advice(f"sglang: the servers serve {len(paths)} different models"))
        return lines

    async def _facts(self, name: str, server: HttpClient) -> dict[str, Any]:
        """The server's arguments; a router passes on those of a worker."""
        status, info = await server.get("/server_info")
        if status in (401, 403):
            raise ProviderError(f"sglang: {name} refuses the key (HTTP {status})", "key_refused")
        if status != 200:
            status, info = await server.get("/get_server_info")
        if status == 200 and isinstance(info, dict):
            return info
        other, version = await server.get("/version")
        vllm = other == 200 and isinstance(version, dict) and "version" in version
        hint = 'it answers like vLLM, set backend = "vllm"' if vllm else "is this an SGLang server?"
        raise ProviderError(
            f"sglang: {name}/server_info answered HTTP {status} without facts; {hint}", "not_sglang"
        )

    async def _probe(self, name: str, server: HttpClient) -> list[str]:
        """One token, free: whether this version's chat returns ids."""
        asked_for = {
            "model": "default",
            "messages": [{"role": "user", "content": "1"}],
            "max_tokens": 1,
            "return_token_ids": True,
        }
        status, body = await server.post("/v1/chat/completions", asked_for)
        choices = body.get("choices") if isinstance(body, dict) else None
        first = choices[0] if isinstance(choices, list) and choices else None
        if status != 200 or not isinstance(first, dict):
            raise ProviderError(
                f"sglang: {name} cannot chat ({error_message(body, f'HTTP {status}')}); "
                'set sglang.endpoint = "generate"',
                "probe_failed",
            )
        if first.get("response_token_ids"):
            return []
        return [
            base.Advice(
                f"sglang: {name} returns no token ids in chat: samples can only be consistent; "
                'set sglang.endpoint = "generate"'
            )
        ]

    def _check(self, name: str, info: dict[str, Any], sampling: Sampling) -> None:
        """What makes requests impossible or answers another model's is refused."""
        served = {str(info[k]) for k in ("served_model_name", "model_path") if info.get(k)}
        served |= {path.rstrip("/").rsplit("/", 1)[-1] for path in served}
        if self._model and served and self._model not in served:
            raise ProviderError(
                f"sglang: {name} serves {base.name_in(info.get('model_path'))}, sglang.model is "
                f"{self._model}; start the server with it, or mend the config",
                "unknown_model",
            )
        if info.get("is_embedding"):
            raise ProviderError(
                f"sglang: {name} serves embeddings; restart it without --is-embedding",
                "server_flags",
            )
        longest = context_of(info)
        if longest is not None and longest <= sampling.max_tokens:
            raise ProviderError(
                f"sglang: {name} has a context of {longest}, max_tokens is {sampling.max_tokens}; "
                "lower generate.max_tokens or restart the server",
                "max_tokens",
            )
        if self._endpoint == "chat" and info.get("skip_tokenizer_init"):
            raise ProviderError(
                f"sglang: {name} runs with --skip-tokenizer-init, which cannot chat; "
                'set sglang.endpoint = "generate"',
                "server_flags",
            )

    def body(self, request: base.CompletionRequest) -> dict[str, Any]:
        sampling, prompt = request.sampling, request.prompt
        if self._endpoint == "generate":
            params: dict[str, Any] = {
                "max_new_tokens": sampling.max_tokens,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "skip_special_tokens": False,
                "spaces_between_special_tokens": False,
                "no_stop_trim": True,
            }
            if sampling.seed is not None:
                params["sampling_seed"] = sampling.seed
            if self.streams:
                params["stream_interval"] = max(STREAM_TOKENS, sampling.max_tokens // STREAM_EVENTS)
            return {
                "rid": request.request_id,
                "input_ids": request.prompt_ids,
                "sampling_params": params,
                "stream": self.streams,
            }
        body = {
            "rid": request.request_id,
            "model": "default",
            "messages": outgoing_messages(prompt.messages, "reasoning_content"),
            "input_ids": request.prompt_ids,
            **asked(prompt),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "stream": False,
            "return_token_ids": True,
            "return_prompt_token_ids": True,
            "return_meta_info": True,
            "chat_template_kwargs": {
                **template_switches(prompt),
                "spaces_between_special_tokens": False,
            },
        }
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        return body

    def _server(self, lane: str | None) -> HttpClient:
        return self._servers[lane] if lane else next(iter(self._servers.values()))

    async def complete(self, request: base.CompletionRequest, flight: base.Flight) -> base.Reply:
        sent = self.body(request)
        path = "/generate" if self._endpoint == "generate" else "/v1/chat/completions"
        failure = await self._server(request.provider).exchange(path, sent, flight)
        return self._reply(request, flight, sent, failure)

    def partial(self, request: base.CompletionRequest, flight: base.Flight) -> base.Reply:
        return self._reply(request, flight, self.body(request), flight.failure)

    def _reply(
        self,
        request: base.CompletionRequest,
        flight: base.Flight,
        sent: dict[str, Any],
        failure: base.Failure | None,
    ) -> base.Reply:
        flight.provider = request.provider
        reply = reply_of(flight, sent, Price(), failure)
        if self._endpoint == "generate" and reply.failure is None:
            reply = self._native(flight, reply)
        reply = self._server(request.provider).clean(reply)
        return msgspec.structs.replace(reply, provider=request.provider)

    def _native(self, flight: base.Flight, reply: base.Reply) -> base.Reply:
        """`/generate` has its own shape: counts under `meta_info`, an abort as a finish reason, in
        a stream also for what is an HTTP status else."""
        body = body_of(flight)
        body = body if isinstance(body, dict) else {}
        meta = body.get("meta_info")
        meta = meta if isinstance(meta, dict) else {}
        finish = meta.get("finish_reason")
        failure: base.Failure | None = None
        if isinstance(finish, dict) and finish.get("type") == "abort":
            code = finish.get("status_code")
            if type(code) is int and 400 <= code < 600:
                failure = classify_error(code, flight.headers, finish, time.time())
            else:
                words = error_message(finish, "the server aborted the request")
                failure = base.UpstreamError(words)
        elif not isinstance(body.get("output_ids"), list):
            failure = base.UpstreamError("no output_ids in the reply; is this /generate of SGLang?")
        return msgspec.structs.replace(
            reply,
            failure=failure,
            generation_id=base.name_in(meta.get("id")) or reply.generation_id,
            usage=Usage(
                prompt_tokens=count(meta.get("prompt_tokens")),
                completion_tokens=count(meta.get("completion_tokens")),
                reasoning_tokens=count(meta.get("reasoning_tokens")),
                cached_tokens=count(meta.get("cached_tokens")),
                cost_usd=0.0,
                cap_usd=0.0,
            ),
        )

    async def lookup(self, generation_id: str) -> base.LookedUp | None:
        return base.LookedUp(cost_usd=0.0, cap_usd=0.0)

    async def account_usd(self) -> float | None:
        return None

    async def abort(self, request: base.CompletionRequest) -> None:
        await self._server(request.provider).post(
            "/abort_request", {"rid": request.request_id, "abort_all": False}
        )

    async def load(self, lane: str) -> base.Load | None:
        """The server's own queue from /metrics, while the server offers them."""
        if not self._metrics.get(lane):
            return None
        status, text = await self._servers[lane].text("/metrics")
        self._metrics[lane] = status != 404
        return load_of(text) if status == 200 else None

    async def close(self) -> None:
        await asyncio.gather(*(s.close() for s in self._servers.values()))
