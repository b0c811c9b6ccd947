"""The tests of significance against numbers worked out by hand."""

import numpy as np
import pytest

from core.audit import shares, stats


def test_wilson() -> None:
    # Brown, Cai and DasGupta's form, 8 of 10 at 95 %
    assert shares.wilson(8, 10) == pytest.approx((0.490162, 0.943318), abs=1e-6)
    assert shares.wilson(0, 20)[0] == 0.0
    assert shares.wilson(20, 20)[1] == 1.0
    assert shares.wilson(0, 0) == (0.0, 1.0)
    assert shares.interval(0, 0).value is None
    assert shares.interval(3, 4).value == 0.75


@pytest.mark.parametrize(
    ("a", "b", "p"),
    [
        (0, 0, 1.0),
        (5, 5, 1.0),
        (1, 9, 22 / 1024),
        (9, 1, 22 / 1024),
        (0, 10, 2 / 1024),
        (0, 1, 1.0),
    ],
)
def test_mcnemar(a: int, b: int, p: float) -> None:
    assert shares.mcnemar(a, b) == pytest.approx(p)


def test_fisher() -> None:
    # the lady tasting tea: 34/70
    assert stats.fisher(3, 4, 1, 4) == pytest.approx(34 / 70)
    assert stats.fisher(0, 0, 1, 4) == 1.0


def test_f1_and_its_interval() -> None:
    assert shares.f1(6, 2, 1) == pytest.approx(0.8)
    assert shares.f1(0, 0, 0) is None
    low, high = stats.f1_interval(60, 20, 10, 10)
    assert low < 0.8 < high and low > 0.7 and high < 0.9
    assert stats.f1_interval(10, 0, 0, 5) == (1.0, 1.0)
    assert stats.f1_interval(0, 0, 0, 5) == (0.0, 1.0)
    assert stats.f1_interval(60, 20, 10, 10) == stats.f1_interval(60, 20, 10, 10)


def test_mean_interval() -> None:
    assert stats.mean_interval([]) == (0.0, 0.0, 0.0)
    assert stats.mean_interval([3.0]) == (3.0, 3.0, 3.0)
    mean, low, high = stats.mean_interval(list(range(101)))
    assert mean == 50.0
    # standard error of the mean is 29.15 / sqrt(101) = 2.90
    assert low == pytest.approx(50 - 1.96 * 2.9, abs=0.6)
    assert high == pytest.approx(50 + 1.96 * 2.9, abs=0.6)


def test_two_sample() -> None:
    assert stats.two_sample([], [1.0]) == (0.0, 1.0)
    assert stats.two_sample([1, 2, 3], [4, 5, 6])[0] == 1.0
    rng = np.random.default_rng(5)
    same, other = rng.normal(size=400), rng.normal(0.5, size=400)
    assert stats.two_sample(same[:200], same[200:])[1] > 0.05
    assert stats.two_sample(same, other)[1] < 1e-6


def test_paired_shift() -> None:
    assert stats.paired_shift([1, 2, 3], [1, 2, 3]) == 1.0
    assert stats.paired_shift([], []) == 1.0
    # six differences of one sign: 2 / 2**6
    assert stats.paired_shift([0, 0, 0, 0, 0, 0], [1, 2, 3, 4, 5, 6]) == pytest.approx(2 / 64)
