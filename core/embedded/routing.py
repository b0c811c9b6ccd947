"""Which provider serves a request: OpenRouter's routing fields as a pure function over the named
providers.

There is no failover after a choice: what goes wrong at the chosen provider is answered as it is,
with its name.
"""

import functools
from collections.abc import Sequence
from typing import Any

import msgspec

from core.embedded.billing import Provider

Number = float | int


class Preferences(msgspec.Struct, frozen=True, kw_only=True):
    """The `provider` object of a request; unknown keys are ignored as the real service does."""

    order: list[str] | None = None
    only: list[str] | None = None
    ignore: list[str] | None = None
    allow_fallbacks: bool | None = None
    require_parameters: bool | None = None
    quantizations: list[str] | None = None
    sort: str | dict[str, Any] | None = None
    max_price: dict[str, Number | str] | None = None


class NoEndpoint(Exception):
    """Nothing is left after the filters; the message is what the service answers (404)."""


def candidates(
    providers: Sequence[Provider], wish: Preferences, tools: bool, draw: float
) -> list[Provider]:
    """Providers in the order in which they are tried. Raises NoEndpoint.

    `draw` in [0, 1) decides where no order is asked for: weights are the inverse square of the
    price.
    With `tools` and no sort the best tool callers come first (Auto Exacto).
    """
    left = [p for p in providers if _allowed(p, wish)]
    if not left:
        raise NoEndpoint("No allowed providers are available for the selected model.")
    left = [p for p in left if _cheap_enough(p, wish.max_price or {})]
    if not left:
        raise NoEndpoint("No endpoints found that satisfy the max_price of the request.")
    ranked = _ranked(left, wish, tools, draw)
    if wish.order:
        first = [p for slug in wish.order for p in ranked if matches(p, slug)]
        if not first and wish.allow_fallbacks is False:
            raise NoEndpoint("No endpoints found for the providers in order.")
        rest = [] if wish.allow_fallbacks is False else [p for p in ranked if p not in first]
        ranked = first + rest
    return ranked


def matches(provider: Provider, slug: str) -> bool:
    """A base slug or a name matches all variants; a slug with a slash one of them."""
    return slug.lower() in _names(provider.name, provider.tag)


@functools.cache
def _names(name: str, tag: str) -> tuple[str, str, str]:
    return name.lower(), tag.lower(), tag.split("/")[0]


def _allowed(provider: Provider, wish: Preferences) -> bool:
    if wish.only and not any(matches(provider, s) for s in wish.only):
        return False
    if wish.ignore and any(matches(provider, s) for s in wish.ignore):
        return False
    return not wish.quantizations or provider.quantization in wish.quantizations


def _cheap_enough(provider: Provider, limits: dict[str, Number | str]) -> bool:
    prices = {"prompt": provider.price_prompt, "completion": provider.price_completion}
    return all(price <= float(limits[kind]) for kind, price in prices.items() if kind in limits)


def _ranked(left: list[Provider], wish: Preferences, tools: bool, draw: float) -> list[Provider]:
    sort = wish.sort.get("by") if isinstance(wish.sort, dict) else wish.sort
    if sort == "exacto" or (tools and not sort):
        return sorted(left, key=lambda p: p.exacto)
    if sort == "price":
        return sorted(left, key=lambda p: p.price_prompt + p.price_completion)
    if sort in ("latency", "throughput"):
        return sorted(left, key=lambda p: p.latency_s)
    weights = [(p.price_prompt + p.price_completion) ** -2 for p in left]
    point = draw * sum(weights)
    for provider, weight in zip(left, weights, strict=True):
        point -= weight
        if point < 0:
            return [provider, *(p for p in left if p is not provider)]
    return left
