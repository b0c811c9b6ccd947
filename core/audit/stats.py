"""The few tests and intervals that the audit uses. Counts in, floats out; no samples, no files.

Two-sided everywhere. Resampling is seeded, so that a report made twice is the same report.
"""

import math
from collections.abc import Sequence

import msgspec
import numpy as np
from scipy import special, stats

RESAMPLES = 2_000
SEED = 20_231
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
    if total == 0:
        return 1.0
    return min(1.0, 2.0 * float(special.bdtr(min(only_first, only_second), total, 0.5)))


def fisher(hits_a: int, total_a: int, hits_b: int, total_b: int) -> float:
    """Fisher's exact two-sided p for two independent shares; 1 when one of them counted nothing."""
    if total_a == 0 or total_b == 0:
        return 1.0
    table = [[hits_a, total_a - hits_a], [hits_b, total_b - hits_b]]
    return float(stats.fisher_exact(table).pvalue)


def f1(both: int, only_first: int, only_second: int) -> float | None:
    """F1 of the second arm's triggers against the first's; None when neither ever triggered."""
    total = 2 * both + only_first + only_second
    return 2 * both / total if total else None


def f1_interval(both: int, only_first: int, only_second: int, neither: int) -> tuple[float, float]:
    """95 % percentile bootstrap of F1 over pairs. The pairs are four kinds, so a resample is one
    multinomial."""
    total = both + only_first + only_second + neither
    if total == 0 or both + only_first + only_second == 0:
        return 0.0, 1.0
    shares = np.array([both, only_first, only_second, neither], dtype=float) / total
    draws = np.random.default_rng(SEED).multinomial(total, shares, size=RESAMPLES)
    denominator = 2 * draws[:, 0] + draws[:, 1] + draws[:, 2]
    values = 2 * draws[denominator > 0, 0] / denominator[denominator > 0]
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean and its 95 % percentile bootstrap. One value has no width; none is (0, 0, 0)."""
    if not len(values):
        return 0.0, 0.0, 0.0
    data = np.asarray(values, dtype=float)
    rng = np.random.default_rng(SEED)
    rounds = max(200, min(RESAMPLES, 4_000_000 // len(data)))
    means = np.array([data[rng.integers(0, len(data), len(data))].mean() for _ in range(rounds)])
    low, high = np.percentile(means, [2.5, 97.5])
    return float(data.mean()), float(low), float(high)


def two_sample(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """Kolmogorov-Smirnov distance and two-sided p of two independent samples; (0, 1) when one is
    empty."""
    if not len(a) or not len(b):
        return 0.0, 1.0
    result = stats.ks_2samp(np.asarray(a, dtype=float), np.asarray(b, dtype=float))
    return float(result.statistic), float(result.pvalue)


def paired_shift(first: Sequence[float], second: Sequence[float]) -> float:
    """Two-sided p of the paired Wilcoxon signed-rank test (normal form above 50 pairs); 1 when all
    are equal."""
    differences = np.asarray(second, dtype=float) - np.asarray(first, dtype=float)
    if len(differences) < 1 or not np.any(differences):
        return 1.0
    return float(stats.wilcoxon(differences).pvalue)
