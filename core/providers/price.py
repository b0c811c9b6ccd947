"""Prices, and what a reply says that it cost. Pure.

A cost as a provider wrote it is believed only when it can be one; everything else is unknown, never
zero (C40)."""

from typing import Any

import msgspec

MOST = 2**53
"""Above it a float no longer holds every whole number."""
MOST_USD = 1e9
"""The largest `run.budget_usd`: with a reply that claims more, no resume could ever fit."""


class Price(msgspec.Struct, frozen=True, kw_only=True):
    """USD per token, and per request. `from_list`: the backend never says a cost, so the list is
    the bill."""

    prompt: float = 0.0
    completion: float = 0.0
    request: float = 0.0
    from_list: bool = False

    def worst_usd(self, prompt_tokens: int, max_tokens: int) -> float:
        """`prompt price + max_tokens x output price`: nothing cached, the longest answer."""
        return self.request + prompt_tokens * self.prompt + max_tokens * self.completion

    def bill_usd(self, prompt_tokens: int, completion_tokens: int) -> float:
        """List price of a reply whose counts are known."""
        return self.request + prompt_tokens * self.prompt + completion_tokens * self.completion

    @property
    def free(self) -> bool:
        return not (self.prompt or self.completion or self.request)


def finite(value: Any) -> float | None:
    """A number as a provider wrote it. JSON's have no bound; beyond MOST none of ours can be meant,
    and sums and columns of 64 bits would break."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if -MOST <= value <= MOST else None


def number_in(text: Any) -> float | None:
    """A number as text: prices in lists, gauges of metrics."""
    try:
        return finite(float(text))
    except (TypeError, ValueError, OverflowError):
        return None


def money(value: Any) -> float | None:
    """A cost as a provider wrote it. Only a finite, non-negative number is one, and none above the
    largest budget; null, text, NaN, -1 and true are `unknown` (case C40)."""
    number = finite(value)
    return number if number is not None and 0 <= number <= MOST_USD else None


def cost_of(usage: dict[str, Any] | None, free: bool) -> tuple[float | None, float | None]:
    """(cost, cap) in USD of a reply's `usage` object; (None, None) when it does not say.

    `free`: the price list asks nothing, so a zero is believed. BYOK: the account is billed `cost`
    (0 or a fee) and the upstream cost counts toward the cap; unsaid, it is not zero but unknown.
    Any other zero means "not filled in" and is looked up (C27, C36)."""
    cost = money(usage.get("cost")) if usage else None
    if usage is None or cost is None:
        return (0.0, 0.0) if free else (None, None)
    if usage.get("is_byok") is True:
        details = usage.get("cost_details")
        told = details.get("upstream_inference_cost") if isinstance(details, dict) else None
        upstream = money(told)
        return (None, None) if upstream is None else (cost, cost + upstream)
    return (cost, cost) if cost > 0 or free else (None, None)
