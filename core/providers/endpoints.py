"""OpenRouter's endpoints of one model, filtered and ranked by the config: which providers may be
used, at what price.

Pure. Every endpoint that is left out has its reason, so that "no endpoint left" says which filter
to loosen."""

from typing import Any

import msgspec

from core.config import OpenRouter
from core.errors import ProviderError
from core.providers.base import LaneSpec
from core.providers.chat import count
from core.providers.price import Price, money
from core.schema import Sampling

# Providers on which closing a stream stops the bill (openrouter.ai/docs, streaming, cancellation).
CANCELLABLE = frozenset(
    {
        "anthropic", "anyscale", "avian", "azure", "chutes", "cloudflare", "cohere", "deepinfra",
        "deepseek", "fireworks", "friendli", "hyperbolic", "infermatic", "lepton", "liquid",
        "mancer", "novita", "octoai", "openai", "recursal", "together", "xai",
    }
)  # fmt: skip
NEEDED = ("max_tokens", "temperature", "top_p", "reasoning")


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    spec: LaneSpec
    supported: frozenset[str]


def base_slug(tag: str) -> str:
    """`deepinfra/fp4` is a variant of `deepinfra`."""
    return tag.split("/", 1)[0].lower()


def choose_endpoints(
    endpoints: list[Any], options: OpenRouter, sampling: Sampling
) -> list[Endpoint]:
    """Fit endpoints, most preferred first. Raises ProviderError naming why each of the others is
    out."""
    chosen: list[Endpoint] = []
    reasons: list[str] = []
    for row in endpoints:
        if not isinstance(row, dict):
            continue
        tag = str(row.get("tag") or row.get("provider_name") or "")
        if reason := _unfit(row, tag, options, sampling):
            reasons.append(f"{tag}: {reason}")
        else:
            chosen.append(_endpoint(row, tag, options))
    if not chosen:
        why = "; ".join(reasons[:6]) or "the model has none"
        raise ProviderError(
            f"openrouter: no endpoint of {options.model} is left ({why}); "
            "loosen [generate.openrouter]",
            "no_endpoint",
        )
    return sorted(chosen, key=lambda e: (e.spec.rank, e.spec.name))


def _named(tag: str, names: list[str]) -> bool:
    low = {n.lower() for n in names}
    return tag.lower() in low or base_slug(tag) in low


def _price(row: dict[str, Any]) -> Price | None:
    """Prices come as decimal strings in USD per token."""
    said = row.get("pricing")
    if not isinstance(said, dict):
        return None
    values = []
    for name in ("prompt", "completion", "request"):
        try:
            values.append(money(float(said.get(name) or 0)))
        except (TypeError, ValueError):
            return None
    prompt, completion, request = values
    if prompt is None or completion is None or request is None:
        return None
    return Price(prompt=prompt, completion=completion, request=request)


def _unfit(row: dict[str, Any], tag: str, options: OpenRouter, sampling: Sampling) -> str:
    """Why this endpoint may not be used; empty when it may."""
    if options.only and not _named(tag, options.only):
        return "not in `only`"
    if _named(tag, options.ignore):
        return "in `ignore`"
    if options.order and not options.allow_fallbacks and not _named(tag, options.order):
        return "not in `order`"
    quantization = row.get("quantization") or "unknown"
    if options.quantizations and quantization not in options.quantizations:
        return f"quantization {quantization}"
    status = row.get("status")
    if isinstance(status, int | float) and status < 0:
        return "down"
    price = _price(row)
    if price is None:
        return "no readable price"
    for name, per_token, most in (
        ("prompt", price.prompt, options.max_price_prompt),
        ("completion", price.completion, options.max_price_completion),
    ):
        if most and per_token * 1e6 > most + 1e-9:
            return f"{name} price ${per_token * 1e6:.3f} above max_price ${most:.3f}"
    longest = count(row.get("max_completion_tokens"))
    if longest is not None and longest < sampling.max_tokens:
        return f"max_tokens {sampling.max_tokens} above its {longest}"
    supported = row.get("supported_parameters")
    if options.require_parameters and isinstance(supported, list):
        missing = [name for name in NEEDED if name not in supported]
        if missing:
            return f"does not support {', '.join(missing)}"
    return ""


def _endpoint(row: dict[str, Any], tag: str, options: OpenRouter) -> Endpoint:
    price = _price(row) or Price()
    order = [n.lower() for n in options.order]
    rank = 0.0
    if order:
        hits = [i for i, n in enumerate(order) if n in (tag.lower(), base_slug(tag))]
        rank = float(hits[0]) if hits else float(len(order))
    elif options.sort == "price":
        rank = price.prompt + price.completion
    elif options.sort == "throughput":
        rank = -_statistic(row.get("throughput_last_30m"))
    elif options.sort == "latency":
        rank = _statistic(row.get("latency_last_30m"))
    supported = row.get("supported_parameters")
    return Endpoint(
        spec=LaneSpec(
            name=tag,
            price=price,
            rank=rank,
            display=str(row.get("provider_name") or ""),
            cancel_stops_bill=options.stream
            and (base_slug(tag) in CANCELLABLE or _named(tag, options.cancellable)),
            note=str(row.get("quantization") or ""),
        ),
        supported=frozenset(supported) if isinstance(supported, list) else frozenset(),
    )


def _statistic(value: Any) -> float:
    """A number, or the median of an object of percentiles; 0 when unsaid."""
    if isinstance(value, dict):
        value = value.get("p50")
    return money(value) or 0.0
