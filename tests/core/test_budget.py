"""The books: amounts in, never more out than the budget."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.budget import Budget, Forecast

USD = st.floats(0, 0.05, allow_nan=False)


def test_reserve_settle_and_refuse() -> None:
    budget = Budget(1.0)
    assert budget.reserve(("a", 1), 0.6)
    assert not budget.fits(0.5) and budget.could_ever_fit(0.5)
    assert not budget.reserve(("b", 1), 0.5)
    budget.settle(("a", 1), 0.25)
    assert (budget.cost_usd, budget.reserved_usd) == (0.25, 0.0)
    assert budget.reserve(("b", 1), 0.75)
    assert not budget.fits(1e-9)
    assert not budget.could_ever_fit(0.76)


def test_uncertain_is_the_worst_case_and_stays_marked() -> None:
    budget = Budget(1.0)
    budget.reserve(("a", 1), 0.3)
    assert budget.settle_uncertain(("a", 1)) == 0.3
    assert (budget.cost_usd, budget.spent_usd, budget.uncertain_usd) == (0.3, 0.3, 0.3)


def test_byok_counts_toward_the_cap_but_not_into_the_books() -> None:
    budget = Budget(0.01)
    budget.reserve(("a", 1), 0.005)
    budget.settle(("a", 1), 0.0, 0.0042)
    assert (budget.cost_usd, budget.spent_usd) == (0.0, 0.0042)


def test_a_key_is_settled_once() -> None:
    budget = Budget(1.0)
    budget.reserve(("a", 1), 0.1)
    with pytest.raises(ValueError, match="already reserved"):
        budget.reserve(("a", 1), 0.1)
    budget.settle_free(("a", 1))
    with pytest.raises(KeyError):
        budget.settle(("a", 1), 0.1)


def test_likely_reservations_state_their_bound() -> None:
    budget = Budget(1.0)
    budget.reserve(("a", 1), 0.1, worst_usd=0.4)
    assert budget.reserved_usd == 0.1
    assert budget.exposure_usd == pytest.approx(0.4)
    assert budget.settle_uncertain(("a", 1)) == pytest.approx(0.4)
    assert budget.exposure_usd == pytest.approx(0.4)


def test_a_free_request_fits_an_empty_budget() -> None:
    budget = Budget(0.0)
    assert budget.fits(0.0) and budget.reserve(("local", 1), 0.0)
    assert not budget.fits(1e-12)


def test_dispatches_of_an_earlier_life_count_whatever_the_budget_says() -> None:
    budget = Budget(0.1)
    budget.earlier(0.05, 0.06, 0.01)
    budget.adopt(("old", 1), 0.2)
    assert budget.reserved_usd == 0.2 and not budget.fits(0.001)
    budget.settle(("old", 1), 0.01)
    assert budget.cost_usd == pytest.approx(0.06)
    assert budget.fits(0.03) and not budget.fits(0.0301)


@given(
    st.floats(0.01, 0.5),
    st.lists(
        st.tuples(
            USD, USD, st.floats(0, 1), st.sampled_from(["billed", "free", "uncertain", "byok"])
        ),
        max_size=120,
    ),
    st.randoms(use_true_random=False),
)
def test_the_bill_never_passes_the_cap(
    cap: float, requests: list[tuple[float, float, float, str]], dice: object
) -> None:
    """Random arrivals, prices and ends, in any order: what the provider bills stays under the
    budget, because every bill is at most the worst case that was reserved for it."""
    budget = Budget(cap)
    open_: list[tuple[tuple[str, int], float, str]] = []
    billed = booked = 0.0
    for number, (prompt_usd, answer_usd, share, how) in enumerate(requests):
        worst = prompt_usd + answer_usd
        key = (f"p{number}", 1)
        if budget.reserve(key, worst):
            open_.append((key, prompt_usd + share * answer_usd, how))
        while len(open_) > 20 or (open_ and dice.random() < 0.3):  # type: ignore[attr-defined]
            billed, booked = _end(budget, open_.pop(0), billed, booked)
            assert budget.spent_usd + budget.reserved_usd <= cap + 1e-11
    for request in open_:
        billed, booked = _end(budget, request, billed, booked)
    assert billed <= cap + 1e-9
    assert math.isclose(budget.cost_usd, booked, abs_tol=1e-9)
    assert budget.reserved_usd == 0


def _end(
    budget: Budget, request: tuple[tuple[str, int], float, str], billed: float, booked: float
) -> tuple[float, float]:
    key, cost, how = request
    if how == "free":
        budget.settle_free(key)
        return billed, booked
    if how == "uncertain":
        worst = budget.settle_uncertain(key)
        return billed + min(cost, worst), booked + worst
    if how == "byok":
        budget.settle(key, 0.0, cost)
        return billed, booked
    budget.settle(key, cost)
    return billed + cost, booked + cost


@given(st.lists(st.tuples(USD, USD), min_size=1, max_size=60), st.floats(0, 1))
def test_a_faster_mode_never_passes_the_bound_that_it_states(
    requests: list[tuple[float, float]], share: float
) -> None:
    budget = Budget(0.2)
    bound = 0.0
    keys = []
    for number, (likely, more) in enumerate(requests):
        if budget.reserve((f"p{number}", 1), likely, worst_usd=likely + more):
            keys.append((f"p{number}", likely + share * more))
    bound = budget.exposure_usd
    for name, cost in keys:
        budget.settle((name, 1), cost)
    assert budget.cost_usd <= bound + 1e-9


def test_forecast_knows_datasets_and_its_own_error() -> None:
    forecast = Forecast()
    assert forecast.cost(0.0, {"a": 10}) is None
    for _ in range(50):
        forecast.observe("cheap", 0.01)
        forecast.observe("dear", 0.10)
    total, error = forecast.cost(5.5, {"cheap": 100, "dear": 10}) or (0.0, 0.0)
    assert total == pytest.approx(5.5 + 1.0 + 1.0)
    assert error == pytest.approx(0.0, abs=1e-9)
    for usd in (0.05, 0.15) * 25:
        forecast.observe("dear", usd)
    _, error = forecast.cost(5.5, {"dear": 10}) or (0.0, 0.0)
    assert 0.1 < error < 0.2  # sd 0.036, ten to come: 0.036 x sqrt(10), and the mean's own error


def test_an_unseen_dataset_costs_the_overall_mean() -> None:
    forecast = Forecast()
    forecast.observe("a", 0.02)
    total, _ = forecast.cost(0.0, {"b": 5}) or (0.0, 0.0)
    assert total == pytest.approx(0.1)


def test_time_left() -> None:
    assert Forecast.time(0, 60.0, 10) is None
    left, error = Forecast.time(100, 60.0, 300) or (0.0, 0.0)
    assert (left, error) == (180.0, 18.0)
