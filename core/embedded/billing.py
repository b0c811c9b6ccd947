"""Providers, their prices, and the books of the gateway: exact integers, every generation charged
at most once.

Money is counted in picodollars (1e-12 USD), so that USD per million tokens times tokens is whole
and sums have no rounding. Knows nothing about HTTP or sampling.
"""

from decimal import Decimal
from functools import lru_cache
from typing import Any

import msgspec

PICO = 1_000_000_000_000


@lru_cache(maxsize=64)
def pico(usd: float | str) -> int:
    """USD to picodollars, through the decimal digits that a person wrote."""
    return int(Decimal(str(usd)) * PICO)


def usd(amount_pico: int) -> float:
    return float(Decimal(amount_pico) / PICO)


class Provider(msgspec.Struct, frozen=True, kw_only=True):
    """An upstream behind the router. Prices are USD per million tokens.

    `stop_offset`: -1 when its `completion_tokens` leave out the stop token. `supports_cancel`: a
    closed stream stops the bill. `empty_content`: what it sends as content when there is none.
    `exacto`: rank for tool calling.
    """

    name: str
    tag: str
    price_prompt: float
    price_completion: float
    stop_offset: int = 0
    supports_cancel: bool = True
    quantization: str = "int4"
    latency_s: float = 0.0
    empty_content: str | None = ""
    exacto: int = 0

    def cost_pico(self, prompt_tokens: int, completion_tokens: int) -> int:
        # USD per million tokens = picodollars per token x 1e-6.
        per_prompt, per_completion = pico(self.price_prompt), pico(self.price_completion)
        return (prompt_tokens * per_prompt + completion_tokens * per_completion) // 1_000_000

    def counted(self, generated: int, finish: str | None) -> int:
        """Tokens billed for `generated` sampled ones under this provider's stop-token
        convention."""
        return generated + self.stop_offset if finish == "stop" else generated


PROVIDERS = (
    Provider(
        name="Alder",
        tag="alder",
        price_prompt=0.6,
        price_completion=3.0,
        latency_s=0.02,
        exacto=0,
    ),
    Provider(
        name="Birch",
        tag="birch/int4",
        price_prompt=0.5,
        price_completion=2.5,
        stop_offset=-1,
        latency_s=0.06,
        empty_content=None,
        exacto=1,
    ),
    Provider(
        name="Cedar",
        tag="cedar/fp8",
        price_prompt=0.45,
        price_completion=2.2,
        supports_cancel=False,
        quantization="fp8",
        latency_s=0.04,
        exacto=2,
    ),
)


class Charge(msgspec.Struct, kw_only=True):
    """One generation in the books. `cost_pico` is None while it is open."""

    id: str
    provider: str
    model: str
    streamed: bool
    created: float
    prompt_tokens: int
    hold_pico: int
    cost_pico: int | None = None
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    finish_reason: str | None = None
    native_finish_reason: str | None = None
    cancelled: bool = False
    byok: bool = False
    upstream_pico: int = 0
    finished: float = 0.0
    hidden: bool = False
    """Never found by a lookup (a fault)."""

    def bill_line(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "provider": self.provider,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "finish_reason": self.finish_reason,
            "cost_usd": None if self.cost_pico is None else usd(self.cost_pico),
            "upstream_usd": usd(self.upstream_pico),
            "streamed": self.streamed,
            "cancelled": self.cancelled,
            "created": self.created,
        }

    def lookup(self) -> dict[str, Any]:
        """`data` of GET /generation. Normalised counts differ from native ones, as they do on the
        real thing."""
        return {
            "id": self.id,
            "model": self.model,
            "provider_name": self.provider,
            "created_at": self.created,
            "streamed": self.streamed,
            "cancelled": self.cancelled,
            "total_cost": usd(self.cost_pico or 0),
            "usage": usd(self.cost_pico or 0),
            "is_byok": self.byok,
            "upstream_inference_cost": usd(self.upstream_pico),
            "cache_discount": None,
            "tokens_prompt": round(self.prompt_tokens * 0.9),
            "tokens_completion": round(self.completion_tokens * 1.1),
            "native_tokens_prompt": self.prompt_tokens,
            "native_tokens_completion": self.completion_tokens,
            "native_tokens_reasoning": self.reasoning_tokens,
            "native_tokens_cached": 0,
            "finish_reason": self.finish_reason,
            "native_finish_reason": self.native_finish_reason,
            "latency": 0,
            "generation_time": round((self.finished - self.created) * 1_000),
        }


class Ledger:
    """The account: credit, open holds, settled charges. `0 <= available` is not promised: a bill
    may pass its hold."""

    def __init__(self, credit_usd: float) -> None:
        self.credit_pico = pico(credit_usd)
        self.spent_pico = 0
        self.held_pico = 0
        self.charges: dict[str, Charge] = {}

    @property
    def available_pico(self) -> int:
        return self.credit_pico - self.spent_pico - self.held_pico

    @property
    def open(self) -> int:
        """Generations that are not settled yet."""
        return sum(c.cost_pico is None for c in self.charges.values())

    def affordable_tokens(self, provider: Provider, prompt_tokens: int) -> int:
        """Completion tokens that the rest of the credit pays for, after the prompt."""
        left = self.available_pico - provider.cost_pico(prompt_tokens, 0)
        return max(0, left * 1_000_000 // max(1, pico(provider.price_completion)))

    def hold(self, charge: Charge) -> None:
        """Open a generation; its worst case is kept from the credit until it is settled."""
        self.charges[charge.id] = charge
        self.held_pico += charge.hold_pico

    def recall(self, charge: Charge) -> None:
        """A settled charge of an earlier life of the process."""
        self.charges[charge.id] = charge
        self.spent_pico += charge.cost_pico or 0

    def settle(self, charge: Charge, cost_pico: int, now: float) -> None:
        """Close a generation, once."""
        assert charge.cost_pico is None
        charge.cost_pico = cost_pico
        charge.finished = now
        self.held_pico -= charge.hold_pico
        self.spent_pico += cost_pico

    def bill(self) -> dict[str, Any]:
        return {
            "total_usd": usd(self.spent_pico),
            "open": self.open,
            "generations": [c.bill_line() for c in self.charges.values()],
        }
