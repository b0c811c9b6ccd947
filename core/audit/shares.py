"""Shares, their intervals and the exact test of paired ones. Arithmetic alone: the engine's loop
uses it.

Two-sided everywhere.
"""

import math

import msgspec

Z95 = 1.959963984540054


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """A share `hits / total` with its 95 % interval; `value` is None when nothing was counted."""

    hits: int
    total: int
    low: float = 0.0
    high: float = 1.0

    @property
    def value(self) -> float | None:
        return self.hits / self.total if self.total else None


def wilson(hits: int, total: int, z: float = Z95) -> tuple[float, float]:
    """Wilson's score interval of a share (E. B. Wilson, JASA 22, 1927). (0, 1) when nothing was
    counted."""
    if total == 0:
        return 0.0, 1.0
    share, square = hits / total, z * z
    middle = (share + square / (2 * total)) / (1 + square / total)
    half = (
        z / (1 + square / total) * math.sqrt(share * (1 - share) / total + square / (4 * total**2))
    )
    return max(0.0, middle - half), min(1.0, middle + half)


def interval(hits: int, total: int) -> Interval:
    low, high = wilson(hits, total)
    return Interval(hits=hits, total=total, low=low, high=high)


def mcnemar(only_first: int, only_second: int) -> float:
    """Exact two-sided p of McNemar's test from the two discordant counts (Q. McNemar, Psychometrika
    12, 1947).

    Under the null each discordant pair is a fair coin: twice the binomial tail, at most 1.
    """
    total = only_first + only_second
    term = tail = 1
    for i in range(min(only_first, only_second)):
        term = term * (total - i) // (i + 1)
        tail += term
    return min(1.0, 2 * tail / (1 << total))


def f1(both: int, only_first: int, only_second: int) -> float | None:
    """F1 of the second arm's triggers against the first's; None when neither ever triggered."""
    total = 2 * both + only_first + only_second
    return 2 * both / total if total else None
