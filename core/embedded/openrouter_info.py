"""The rest of OpenRouter's HTTP shape: generation lookup, credits, key, models and endpoints."""

import re
from typing import Any

from aiohttp import web

from core.embedded.billing import Provider, pico, usd
from core.embedded.desk import Desk
from core.embedded.openrouter_api import MODELS, answer, error, refuse_key

_PARAMETERS = (
    "include_reasoning",
    "max_tokens",
    "reasoning",
    "seed",
    "temperature",
    "tool_choice",
    "tools",
    "top_p",
)


def _answer(data: Any) -> web.Response:
    return answer({"data": data})


def _per_token(usd_per_million: float) -> str:
    """Prices are strings, USD per token."""
    return f"{usd(pico(usd_per_million) // 1_000_000):.12f}".rstrip("0")


class InfoApi:
    """`lookup_lag_s`: how long after its end a generation cannot be found."""

    def __init__(self, desk: Desk, *, lookup_lag_s: float = 0.25) -> None:
        self._desk = desk
        self._lag_s = lookup_lag_s

    async def generation(self, request: web.Request) -> web.Response:
        if refused := refuse_key(request):
            return refused
        wanted = request.query.get("id", "")
        charge = self._desk.ledger.charges.get(wanted)
        if (
            charge is None
            or charge.hidden
            or charge.cost_pico is None
            or self._desk.now() < charge.finished + self._lag_s
        ):
            return error(404, f"Generation {wanted if _known_form(wanted) else ''} not found")
        return _answer(charge.lookup())

    async def credits(self, request: web.Request) -> web.Response:
        if refused := refuse_key(request):
            return refused
        ledger = self._desk.ledger
        return _answer(
            {"total_credits": usd(ledger.credit_pico), "total_usage": usd(ledger.spent_pico)}
        )

    async def key(self, request: web.Request) -> web.Response:
        if refused := refuse_key(request):
            return refused
        ledger = self._desk.ledger
        spent = usd(ledger.spent_pico)
        return _answer(
            {
                "label": "embedded",
                "limit": usd(ledger.credit_pico),
                "limit_remaining": usd(ledger.credit_pico - ledger.spent_pico),
                "limit_reset": None,
                "usage": spent,
                "usage_daily": spent,
                "is_free_tier": False,
            }
        )

    async def models(self, request: web.Request) -> web.Response:
        first = self._desk.providers[0]
        return _answer(
            [
                {
                    "id": name,
                    "name": name,
                    "context_length": self._desk.context_length,
                    "pricing": _pricing(first),
                    "supported_parameters": list(_PARAMETERS),
                }
                for name in MODELS
            ]
        )

    async def endpoints(self, request: web.Request) -> web.Response:
        name = f"{request.match_info['author']}/{request.match_info['slug']}"
        if name not in MODELS:
            return error(404, "No endpoints found for this model.")
        rows = [self._endpoint(p, name) for p in self._desk.providers]
        return _answer({"id": name, "name": name, "endpoints": rows})

    def _endpoint(self, provider: Provider, model: str) -> dict[str, Any]:
        limit = self._desk.context_length
        return {
            "name": f"{provider.name} | {model}",
            "model_name": model,
            "provider_name": provider.name,
            "tag": provider.tag,
            "quantization": provider.quantization,
            "context_length": limit,
            "max_completion_tokens": limit,
            "max_prompt_tokens": None,
            "pricing": _pricing(provider),
            "supported_parameters": list(_PARAMETERS),
            "status": 0,
            "uptime_last_5m": 100.0,
            "uptime_last_30m": 100.0,
            "uptime_last_1d": 100.0,
            "latency_last_30m": dict.fromkeys(("p50", "p99"), provider.latency_s * 1000),
            "throughput_last_30m": None,
            "supports_implicit_caching": False,
        }


def _known_form(text: str) -> bool:
    return len(text) < 80 and re.fullmatch(r"[\w\-]+", text) is not None


def _pricing(provider: Provider) -> dict[str, str]:
    return {
        "prompt": _per_token(provider.price_prompt),
        "completion": _per_token(provider.price_completion),
        "request": "0",
        "image": "0",
    }
