"""OpenRouter's endpoints of one model, filtered and ranked by the config: which providers may be
used, at what price.

Pure. Every endpoint that is left out has its reason, so that "no endpoint left" says which filter
to loosen."""

from typing import Any

import msgspec

from core.config import OpenRouter
from core.errors import ProviderError
from core.providers.base import Advice, LaneSpec, name_in
from core.providers.chat import count
from core.providers.price import Price, money, number_in
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
UNABLE = "does not support "
SLOW_RANK = 1e6
"""Added to the rank of a provider that misses a preferred speed: above any price or latency."""


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    spec: LaneSpec
    supported: frozenset[str]


def base_slug(tag: str) -> str:
    """`deepinfra/fp4` is a variant of `deepinfra`."""
    return tag.split("/", 1)[0].lower()


def choose_endpoints(
    endpoints: list[Any], options: OpenRouter, sampling: Sampling, tools: bool = False
) -> tuple[list[Endpoint], list[str]]:
    """Fit endpoints, most preferred first, and lines about those that do not support what is sent.
    `tools`: prompts declare them. Raises ProviderError naming a provider that is not there, or why
    each of the endpoints is out."""
    chosen: list[Endpoint] = []
    reasons: list[str] = []
    rows: dict[str, dict[str, Any]] = {}
    for row in endpoints:
        if isinstance(row, dict) and (tag := _tag(row)):
            rows.setdefault(tag, row)
    _refuse_unknown(list(rows), options)
    for tag, row in rows.items():
        if reason := _unfit(row, tag, options, sampling) or _unable(row, options, tools):
            reasons.append(f"{tag}: {reason}")
        else:
            chosen.append(_endpoint(row, tag, options, sampling.max_tokens))
    if not chosen:
        why = "; ".join(reasons[:6]) or "the model has none"
        too_long = any(": max_tokens " in reason for reason in reasons)
        toolless = any(UNABLE in reason and reason.endswith("tools") for reason in reasons)
        remedy = "lower generate.max_tokens or " * too_long + 'set arm = "text" or ' * toolless
        remedy += "loosen [generate.openrouter]"
        raise ProviderError(
            f"openrouter: no endpoint of {options.model} is left ({why}); {remedy}",
            "no_endpoint",
        )
    chosen.sort(key=lambda e: (e.spec.rank, e.spec.name))
    return chosen, _lines_on(chosen, reasons, options, tools)


def _lines_on(
    chosen: list[Endpoint], reasons: list[str], options: OpenRouter, tools: bool
) -> list[str]:
    lines = []
    if unable := [reason for reason in reasons if f": {UNABLE}" in reason]:
        lines.append(f"openrouter: left out: {'; '.join(unable[:6])}")
    silent = [e.spec.name for e in chosen if not e.supported]
    if tools and silent and not options.require_parameters:
        lines.append(
            Advice(
                f"openrouter: {', '.join(silent[:6])}: not known whether `tools` are supported, "
                "and without openrouter.require_parameters they may be dropped in silence"
            )
        )
    return lines


def _tag(row: dict[str, Any]) -> str | None:
    return name_in(row.get("tag")) or name_in(row.get("provider_name"))


def _refuse_unknown(tags: list[str], options: OpenRouter) -> None:
    """A misspelt provider would quietly leave the others to do its work. `ignore` may name some
    that do not serve this model."""
    for field in ("only", "order"):
        for name in getattr(options, field):
            if tags and not any(_named(tag, [name]) for tag in tags):
                raise ProviderError(
                    f"openrouter: {field} names {name!r}, which has no endpoint of "
                    f"{options.model}; it has {', '.join(sorted(tags)[:12])}",
                    "unknown_provider",
                )


def _named(tag: str, names: list[str]) -> bool:
    low = {n.lower() for n in names}
    return tag.lower() in low or base_slug(tag) in low


def _price(row: dict[str, Any]) -> Price | None:
    """Prices come as decimal strings in USD per token."""
    prompt, completion, request = (_listed(row, n) for n in ("prompt", "completion", "request"))
    if prompt is None or completion is None or request is None:
        return None
    return Price(prompt=prompt, completion=completion, request=request)


def _listed(row: dict[str, Any], name: str) -> float | None:
    """One entry of the price list, 0 where it has none; None: not to be read."""
    said = row.get("pricing")
    return money(number_in(said.get(name) or 0)) if isinstance(said, dict) else None


def _slow(row: dict[str, Any], options: OpenRouter) -> bool:
    """Whether the last half hour misses a preferred speed; what is not measured misses none."""
    for wanted, measured, sign in (
        (options.preferred_min_throughput, row.get("throughput_last_30m"), -1),
        (options.preferred_max_latency, row.get("latency_last_30m"), 1),
    ):
        cutoffs = wanted if isinstance(wanted, dict) else {"p50": wanted}
        for percentile, cutoff in cutoffs.items():
            value = _statistic(measured, percentile)
            if sign > 0:
                value /= 1000  # listed in milliseconds, preferred in seconds
            if cutoff and value and sign * (value - cutoff) > 0:
                return True
    return False


def _unfit(row: dict[str, Any], tag: str, options: OpenRouter, sampling: Sampling) -> str:
    """Why this endpoint may not be used; empty when it may."""
    if options.only and not _named(tag, options.only):
        return "not in `only`"
    if _named(tag, options.ignore):
        return "in `ignore`"
    if options.order and not options.allow_fallbacks and not _named(tag, options.order):
        return "not in `order`"
    quantization = name_in(row.get("quantization")) or "unknown"
    if options.quantizations and quantization not in options.quantizations:
        return f"quantization {quantization}"
    status = row.get("status")
    if isinstance(status, int | float) and status < 0:
        return "down"
    price = _price(row)
    if price is None:
        return "no readable price"
    for name, asked, most in (
        ("prompt", price.prompt * 1e6, options.max_price_prompt),
        ("completion", price.completion * 1e6, options.max_price_completion),
        ("request", price.request, options.max_price_request),
        ("image", _listed(row, "image") or 0.0, options.max_price_image),
    ):
        if most and asked > most + 1e-9:
            return f"{name} price ${asked:.3f} above max_price ${most:.3f}"
    longest = count(row.get("max_completion_tokens"))
    if longest is not None and longest < sampling.max_tokens:
        return f"max_tokens {sampling.max_tokens} above its {longest}"
    context = count(row.get("context_length"))
    if context is not None and context <= sampling.max_tokens:
        return f"max_tokens {sampling.max_tokens} leaves no room for a prompt in its {context}"
    return ""


def _unable(row: dict[str, Any], options: OpenRouter, tools: bool) -> str:
    """What the endpoint does not support of what is sent; empty: all of it, or it does not say.
    Without `require_parameters` the rest may be dropped, tools never: their prompts would be
    answered as if they had none."""
    supported = row.get("supported_parameters")
    if not isinstance(supported, list):
        return ""
    needed = [*NEEDED * options.require_parameters, *["tools"] * tools]
    missing = [name for name in needed if name not in supported]
    return UNABLE + ", ".join(missing) if missing else ""


def _context(row: dict[str, Any], max_tokens: int) -> int | None:
    """Tokens of prompt and answer; some endpoints bound the prompt by itself."""
    context, prompt = count(row.get("context_length")), count(row.get("max_prompt_tokens"))
    bounds = [context, None if prompt is None else prompt + max_tokens]
    return min((bound for bound in bounds if bound is not None), default=None)


def _endpoint(row: dict[str, Any], tag: str, options: OpenRouter, max_tokens: int) -> Endpoint:
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
    rank += SLOW_RANK * _slow(row, options)
    supported = row.get("supported_parameters")
    return Endpoint(
        spec=LaneSpec(
            name=tag,
            price=price,
            rank=rank,
            display=name_in(row.get("provider_name")) or "",
            cancel_stops_bill=options.stream
            and (base_slug(tag) in CANCELLABLE or _named(tag, options.cancellable)),
            note=name_in(row.get("quantization")) or "",
            context_tokens=_context(row, max_tokens),
        ),
        supported=frozenset(filter(name_in, supported if isinstance(supported, list) else ())),
    )


def _statistic(value: Any, percentile: str = "p50") -> float:
    """One of an object of percentiles, or a plain number as the median; 0 when unsaid."""
    if isinstance(value, dict):
        value = value.get(percentile)
    elif percentile != "p50":
        value = None
    return money(value) or 0.0
