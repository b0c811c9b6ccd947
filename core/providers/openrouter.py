"""OpenRouter: one pinned provider a request, billed cost, look-up of bills that no reply showed.

Promises: `preflight` chooses the providers by the config's own filters and prices and refuses, in
one line, before the first paid request; a request names exactly one provider, so that limits,
verdicts and semantics are that provider's (Auto Exacto re-orders providers whenever `tools` is
sent). Facts: openrouter.ai/docs, read 2026-11."""

import math
import os
from typing import Any

from core.config import Config
from core.errors import ConfigError, ProviderError
from core.providers import base
from core.providers.chat import asked, count, outgoing_messages, reply_of
from core.providers.endpoints import choose_endpoints
from core.providers.http import HttpClient
from core.providers.price import finite, money
from core.render.tokenizer import TokenizerLike
from core.schema import Sampling

EMBEDDED_KEY = "embedded"


def _key(config: Config) -> str:
    name = config.generate.openrouter.api_key_env
    if value := os.environ.get(name, "").strip():
        return value
    if config.target.kind == "embedded":
        return EMBEDDED_KEY
    raise ConfigError(f"{name} is not set; export it, or name another in openrouter.api_key_env")


class OpenRouter:
    """The `openrouter` backend."""

    name = "openrouter"
    sends_messages = True
    tells_bills = True

    def __init__(self, config: Config) -> None:
        generate = config.generate
        self._options = generate.openrouter
        self._session = config.run.name or f"eyas-{config.run.seed}"
        self._budget_usd = config.run.budget_usd
        self.streams = self._options.stream
        self.lanes: list[base.LaneSpec] = []
        self._specs: dict[str, base.LaneSpec] = {}
        self._supported: dict[str, frozenset[str]] = {}
        headers = {
            "Authorization": f"Bearer {_key(config)}",
            "X-OpenRouter-Metadata": "enabled",
            "X-Title": "eyas",
        }
        if self._options.app_url:
            headers["HTTP-Referer"] = self._options.app_url
        self._http = HttpClient(self._options.base_url, headers, generate.connect_timeout_s)

    async def preflight(
        self, sampling: Sampling, tokenizer: TokenizerLike | None = None, tools: bool = False
    ) -> list[str]:
        left = {"on this key": await self._key_left(), "of credits": await self._credits_left()}
        lines = [f"openrouter: ${usd:.2f} left {what}" for what, usd in left.items() if usd]
        model = self._options.model
        status, body = await self._http.get(f"/models/{model}/endpoints")
        if status == 404:
            raise ProviderError(
                f"openrouter: no model {model!r}; check openrouter.model", "unknown_model"
            )
        data = body.get("data") if isinstance(body, dict) else None
        endpoints = data.get("endpoints") if isinstance(data, dict) else None
        if status != 200 or not isinstance(endpoints, list):
            raise self._strange(status, f"the endpoints of {model}")
        chosen, notes = choose_endpoints(endpoints, self._options, sampling, tools)
        self.lanes = [c.spec for c in chosen]
        self._specs = {c.spec.name: c.spec for c in chosen}
        self._supported = {c.spec.name: c.supported for c in chosen}
        for spec in self.lanes:
            price, note = spec.price, f" ({spec.note})" if spec.note else ""
            lines.append(
                f"openrouter: {spec.name} at ${price.prompt * 1e6:.3f} in, "
                f"${price.completion * 1e6:.3f} out per million tokens{note}"
            )
        lines += [*notes, *self._unchecked()]
        worst = min(spec.price.worst_usd(1, sampling.max_tokens) for spec in self.lanes)
        return [*lines, *self._afford([usd for usd in left.values() if usd is not None], worst)]

    def _unchecked(self) -> list[str]:
        """Conditions that the list of endpoints does not tell: OpenRouter filters by them, and a
        provider that fails one is refused with 404 when it is asked."""
        options = self._options
        conditions = {
            'data_collection = "deny"': options.data_collection == "deny",
            "zdr": options.zdr,
            "enforce_distillable_text": options.enforce_distillable_text,
        }
        if not (said := [name for name, asked_for in conditions.items() if asked_for]):
            return []
        return [f"openrouter: not checked before the first request: {', '.join(said)}"]

    def _strange(self, status: int, what: str) -> ProviderError:
        if status >= 500 or status == 429:
            return ProviderError(f"openrouter: {what}: HTTP {status}; retry later", "unavailable")
        return ProviderError(
            f"openrouter: {self._http.base_url} answers HTTP {status} without {what}; "
            "check openrouter.base_url",
            "not_openrouter",
        )

    def _afford(self, left_usd: list[float], worst_usd: float) -> list[str]:
        """OpenRouter checks `max_tokens` x price against the balance before it serves (402)."""
        least = min(left_usd, default=math.inf)
        if least < worst_usd:
            raise ProviderError(
                f"openrouter: ${least:.4f} left does not cover one worst-case request "
                f"(${worst_usd:.4f}); add credits or lower generate.max_tokens",
                "payment_required",
            )
        if least < self._budget_usd:
            return [
                base.Advice(
                    f"openrouter: ${least:.2f} left is less than run.budget_usd "
                    f"${self._budget_usd:.2f}; add credits, or the run stops at them"
                )
            ]
        return []

    async def _key_left(self) -> float | None:
        status, body = await self._http.get("/key")
        if status in (401, 403):
            raise ProviderError(
                f"openrouter: the key in {self._options.api_key_env} is refused (HTTP {status}); "
                "set a valid one",
                "key_refused",
            )
        if status == 200 and not isinstance(body, dict):
            raise self._strange(status, "JSON")
        data = body.get("data") if isinstance(body, dict) else None
        left = finite(data.get("limit_remaining")) if isinstance(data, dict) else None
        return None if left is None else max(0.0, left)

    async def _credits_left(self) -> float | None:
        """Only a management key may read credits; any other answer is no news."""
        status, body = await self._http.get("/credits")
        data = body.get("data") if isinstance(body, dict) and status == 200 else None
        if not isinstance(data, dict):
            return None
        total, used = money(data.get("total_credits")), money(data.get("total_usage"))
        return None if total is None or used is None else max(0.0, total - used)

    def body(self, request: base.CompletionRequest) -> dict[str, Any]:
        """The request as it is sent and recorded. Nothing in it is secret."""
        prompt, sampling, options = request.prompt, request.sampling, self._options
        supported = self._supported.get(request.provider or "", frozenset())
        body: dict[str, Any] = {
            "model": options.model,
            "messages": outgoing_messages(prompt.messages, "reasoning"),
            **asked(prompt),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "stream": options.stream,
            "reasoning": self._reasoning(prompt.thinking),
            "provider": self._routing(request.provider),
            "session_id": f"{self._session}-{request.session}"[:256],
        }
        if sampling.seed is not None and (not supported or "seed" in supported):
            body["seed"] = sampling.seed
        return body

    def _reasoning(self, thinking: bool) -> dict[str, Any]:
        options = self._options
        if thinking and options.reasoning_effort:
            return {"enabled": True, "effort": options.reasoning_effort}
        if thinking and options.reasoning_max_tokens:
            return {"enabled": True, "max_tokens": options.reasoning_max_tokens}
        return {"enabled": thinking}

    def _routing(self, provider: str | None) -> dict[str, Any]:
        options = self._options
        routing: dict[str, Any] = {
            "allow_fallbacks": options.allow_fallbacks and provider is None,
            "require_parameters": options.require_parameters,
            "data_collection": options.data_collection,
        }
        if provider is not None:
            routing["only"] = [provider]
        else:
            for name in ("order", "only", "ignore"):
                if chosen := getattr(options, name):
                    routing[name] = list(chosen)
            if options.sort:
                routing["sort"] = options.sort
        for name in ("quantizations", "preferred_min_throughput", "preferred_max_latency"):
            if chosen := getattr(options, name):
                routing[name] = chosen
        if options.zdr:
            routing["zdr"] = True
        if options.enforce_distillable_text:
            routing["enforce_distillable_text"] = True
        keys = ("prompt", "completion", "request", "image")
        limits = {key: getattr(options, f"max_price_{key}") for key in keys}
        if limits := {k: v for k, v in limits.items() if v > 0}:
            routing["max_price"] = limits
        return routing

    async def complete(self, request: base.CompletionRequest, flight: base.Flight) -> base.Reply:
        sent = self.body(request)
        failure = await self._http.exchange("/chat/completions", sent, flight)
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
        spec = self._specs.get(request.provider or "", base.LaneSpec(name=""))
        return self._http.clean(reply_of(flight, sent, spec.price, failure))

    async def lookup(self, generation_id: str) -> base.LookedUp | None:
        status, body = await self._http.get("/generation", id=generation_id)
        if status == 401:
            name = self._options.api_key_env
            raise base.KeyRefused(f"openrouter: the key in {name} is refused (HTTP 401)")
        data = body.get("data") if isinstance(body, dict) and status == 200 else None
        if not isinstance(data, dict):
            return None
        cost = money(data.get("total_cost"))
        if cost is None:
            return None
        upstream = money(data.get("upstream_inference_cost")) if data.get("is_byok") else 0.0
        if upstream is None:
            return None  # billed elsewhere, nobody says how much
        return base.LookedUp(
            cost_usd=cost,
            cap_usd=cost + upstream,
            prompt_tokens=count(data.get("native_tokens_prompt")),
            completion_tokens=count(data.get("native_tokens_completion")),
            provider=base.name_in(data.get("provider_name")),
        )

    async def account_usd(self) -> float | None:
        """Of this key alone; what BYOK requests cost upstream is not in it."""
        status, body = await self._http.get("/key")
        data = body.get("data") if isinstance(body, dict) and status == 200 else None
        return money(data.get("usage")) if isinstance(data, dict) else None

    async def abort(self, request: base.CompletionRequest) -> None:
        """Closing the stream is the abort."""

    async def load(self, lane: str) -> base.Load | None:
        return None

    async def close(self) -> None:
        await self._http.close()
