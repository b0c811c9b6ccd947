"""Tests and intervals that need resampling or scipy. Numbers in, floats out; no samples, no files.

Two-sided everywhere. Resampling is seeded, so that a report made twice is the same report.
"""

from collections.abc import Sequence

import numpy as np
from scipy import stats

RESAMPLES = 2_000
SEED = 20_231


def fisher(hits_a: int, total_a: int, hits_b: int, total_b: int) -> float:
    """Fisher's exact two-sided p for two independent shares; 1 when one of them counted nothing."""
    if total_a == 0 or total_b == 0:
        return 1.0
    table = [[hits_a, total_a - hits_a], [hits_b, total_b - hits_b]]
    return float(stats.fisher_exact(table).pvalue)


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
