"""vLLM and any other OpenAI-compatible server: chat completions, with token ids where the server
returns them.

Promises: whether it does is probed with one tiny request, never assumed (only on servers that bill
nothing). `skip_special_tokens: false` goes with `spaces_between_special_tokens: false`, because
vLLM's detokenizer inserts spaces unless both are sent (vLLM #33457). Prices come from the config:
such servers never say a cost."""

import asyncio
import ipaddress
from typing import Any
from urllib.parse import urlsplit

import msgspec

from core.config import Config, OpenAI
from core.errors import ConfigError, ProviderError
from core.providers import base
from core.providers.chat import asked, count, outgoing_messages, reply_of, template_switches
from core.providers.classify import error_message
from core.providers.http import CONTROL_TIMEOUT, HttpClient
from core.providers.price import Price
from core.providers.sglang import load_of, same_tokenizer, server_headers
from core.providers.stream import brings_ids
from core.render.tokenizer import TokenizerLike
from core.schema import Sampling

EXACT = {
    "return_token_ids": True,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
}

TOOL = {"type": "function", "function": {"name": "probe", "parameters": {"type": "object"}}}
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


def _priced(options: OpenAI) -> bool:
    return options.price_prompt > 0 or options.price_completion > 0


def _public(base_url: str) -> bool:
    """Whether somebody else may be running this server: neither a private address nor a name that
    only a local network knows."""
    host = urlsplit(base_url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_global
    except ValueError:
        return "." in host and not host.endswith((".local", ".internal", ".lan", ".localhost"))


class OpenAICompatible:
    """The `vllm` and `openai` backends."""

    sends_messages = True

    def __init__(self, config: Config, name: str) -> None:
        options = config.generate.openai
        if not options.base_url or not options.model:
            raise ConfigError("openai.base_url and openai.model are needed for this backend")
        if not options.free and _public(options.base_url) and not _priced(options):
            raise ConfigError(
                f"{options.base_url}: openai.price_prompt and openai.price_completion are 0, so "
                "the budget could not hold; set them, or openai.free = true if it bills nothing"
            )
        self.name = name
        self.streams = False
        self._may_stream = options.stream
        self._model = options.model
        self._price = Price(
            prompt=options.price_prompt / 1e6,
            completion=options.price_completion / 1e6,
            from_list=True,
        )
        self.lanes: list[base.LaneSpec] = []
        self._exact: dict[str, Any] = {}
        headers = server_headers(options.api_key_env)
        self._http = HttpClient(options.base_url, headers, config.generate.connect_timeout_s)
        self._lane = options.base_url.split("://", 1)[-1].rstrip("/")
        self._metrics = True
        self.tells_bills = self._price.free

    async def preflight(
        self, sampling: Sampling, tokenizer: TokenizerLike | None = None, tools: bool = False
    ) -> list[str]:
        status, body = await self._http.get("/models")
        if status in (401, 403):
            raise ProviderError(f"{self.name}: the key is refused (HTTP {status})", "key_refused")
        if status == 200 and not isinstance(body, dict):
            raise ProviderError(
                f"{self.name}: {self._http.base_url}/models answers no JSON; "
                "check openai.base_url (it ends in /v1 as a rule)",
                "not_openai",
            )
        rows = body.get("data") if isinstance(body, dict) else None
        models = [m for m in rows if isinstance(m, dict)] if isinstance(rows, list) else []
        found = next((m for m in models if m.get("id") == self._model), None)
        if status != 200 or (models and found is None):
            known = ", ".join(base.name_in(m.get("id")) or "?" for m in models[:5])
            raise ProviderError(
                f"{self.name}: {self._lane} does not serve {self._model!r}"
                f"{f'; it has {known}' if known else f' (HTTP {status})'}",
                "unknown_model",
            )
        longest = count(found.get("max_model_len")) if found else None
        if longest is not None and longest <= sampling.max_tokens:
            raise ProviderError(
                f"{self.name}: max_tokens {sampling.max_tokens} leaves no room for a prompt in the "
                f"server's {longest}; lower generate.max_tokens",
                "max_tokens",
            )
        note = await self._probe() if self._price.free else "billed: token ids not probed"
        if tools and self._price.free:
            await self._probe_tools()
        if tokenizer is not None and self._price.free:
            who, path = f"{self.name}: {self._lane}", "/../tokenize"
            said = await same_tokenizer(who, self._http, path, tokenizer, self._model)
            note += f", {said}"
        self.lanes = [
            base.LaneSpec(
                name=self._lane,
                price=self._price,
                cancel_stops_bill=self._price.free,
                note=note,
                context_tokens=longest,
            )
        ]
        return [f"{self.name}: {self._lane} {note}"]

    def _one_token(self, **fields: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": "1"}]
        return {"model": self._model, "messages": messages, "max_tokens": 1, **fields}

    async def _probe_tools(self) -> None:
        """One token: vLLM takes tools only with two flags, and refuses every prompt with them
        else."""
        status, body = await self._http.post("/chat/completions", self._one_token(tools=[TOOL]))
        if status != 200:
            raise ProviderError(
                f"{self.name}: {self._lane} takes no tools, and prompts declare them "
                f"({error_message(body, f'HTTP {status}')}); start it with "
                '--enable-auto-tool-choice --tool-call-parser NAME, or set arm = "text"',
                "no_tools",
            )

    async def _probe(self) -> str:
        """One token, to see whether the server knows the fields that make ids exact."""
        asked_for = self._one_token(**EXACT)
        status, body = await self._http.post("/chat/completions", asked_for)
        if status == 200 and isinstance(body, dict):
            choices = body.get("choices")
            if not isinstance(choices, list) or not all(isinstance(c, dict) for c in choices):
                raise ProviderError(
                    f"{self.name}: the probe's reply has no list of choices; is "
                    f"{self._http.base_url} an OpenAI-compatible server?",
                    "probe_failed",
                )
            self._exact = dict(EXACT)
            if choices and choices[0].get("token_ids"):
                return await self._probe_stream(asked_for)
            return "returns no token ids: samples can only be consistent"
        if status in (400, 422):
            plain = {k: v for k, v in asked_for.items() if k not in EXACT}
            again, _ = await self._http.post("/chat/completions", plain)
            if again == 200:
                words = error_message(body, f"HTTP {status}")
                return f"refuses token-id fields ({words}): samples can only be consistent"
        raise ProviderError(
            f"{self.name}: the probe request failed: {error_message(body, f'HTTP {status}')}",
            "probe_failed",
        )

    async def _probe_stream(self, asked_for: dict[str, Any]) -> str:
        """One token more: replies are streamed where that loses no ids."""
        if not self._may_stream:
            return "returns token ids"
        flight = base.Flight()
        try:
            async with asyncio.timeout(CONTROL_TIMEOUT.total):
                sent = {**asked_for, **STREAMED}
                failure = await self._http.exchange("/chat/completions", sent, flight)
        except TimeoutError:
            failure = base.TotalTimeout("the streamed probe")
        whole = failure is None and "usage" in flight.body  # which only a stream fills
        self.streams = whole and brings_ids(flight.received)
        if self.streams:
            return "streams token ids"
        return "returns token ids, but not in streams: replies come whole"

    def body(self, request: base.CompletionRequest) -> dict[str, Any]:
        prompt, sampling = request.prompt, request.sampling
        body: dict[str, Any] = {
            "model": self._model,
            "messages": outgoing_messages(prompt.messages, "reasoning_content"),
            **asked(prompt),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            **(STREAMED if self.streams else {"stream": False}),
            **self._exact,
        }
        if self._exact or prompt.preserve_thinking:
            body["chat_template_kwargs"] = template_switches(prompt)
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        return body

    async def complete(self, request: base.CompletionRequest, flight: base.Flight) -> base.Reply:
        sent = self.body(request)
        failure = await self._http.exchange("/chat/completions", sent, flight)
        return self._reply(flight, sent, failure)

    def partial(self, request: base.CompletionRequest, flight: base.Flight) -> base.Reply:
        return self._reply(flight, self.body(request), flight.failure)

    def _reply(
        self, flight: base.Flight, sent: dict[str, Any], failure: base.Failure | None
    ) -> base.Reply:
        reply = self._http.clean(reply_of(flight, sent, self._price, failure))
        return msgspec.structs.replace(reply, provider=self._lane)

    async def lookup(self, generation_id: str) -> base.LookedUp | None:
        return base.LookedUp(cost_usd=0.0, cap_usd=0.0) if self._price.free else None

    async def account_usd(self) -> float | None:
        return None

    async def abort(self, request: base.CompletionRequest) -> None:
        """Closing the connection is the abort."""

    async def load(self, lane: str) -> base.Load | None:
        if not self._metrics:
            return None
        status, text = await self._http.text("/../metrics")
        self._metrics = status != 404
        return load_of(text) if status == 200 else None

    async def close(self) -> None:
        await self._http.close()
