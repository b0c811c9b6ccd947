"""Provider routing fields."""

from collections import Counter

import pytest

from core.embedded.billing import PROVIDERS
from core.embedded.routing import NoEndpoint, Preferences, candidates


def names(wish: Preferences, tools: bool = False, draw: float = 0.0) -> list[str]:
    return [p.name for p in candidates(PROVIDERS, wish, tools, draw)]


def test_filters() -> None:
    assert names(Preferences(only=["birch"])) == ["Birch"]
    assert names(Preferences(only=["Birch", "cedar/fp8"], sort="price")) == ["Cedar", "Birch"]
    assert "Alder" not in names(Preferences(ignore=["alder"]))
    assert names(Preferences(quantizations=["fp8"])) == ["Cedar"]
    assert names(Preferences(max_price={"completion": 2.4})) == ["Cedar"]
    assert names(Preferences(max_price={"prompt": "0.55", "completion": 2.6}, sort="price")) == [
        "Cedar",
        "Birch",
    ]


@pytest.mark.parametrize(
    "wish",
    [
        Preferences(only=["nobody"]),
        Preferences(ignore=["alder", "birch", "cedar"]),
        Preferences(quantizations=["bf16"]),
        Preferences(max_price={"completion": 1}),
        Preferences(order=["nobody"], allow_fallbacks=False),
    ],
)
def test_nothing_left(wish: Preferences) -> None:
    with pytest.raises(NoEndpoint):
        names(wish)


def test_order_comes_first_and_alone_without_fallbacks() -> None:
    assert names(Preferences(order=["cedar", "alder"]))[:2] == ["Cedar", "Alder"]
    assert names(Preferences(order=["cedar", "alder"], allow_fallbacks=False)) == [
        "Cedar",
        "Alder",
    ]


def test_sorts_and_exacto() -> None:
    assert names(Preferences(sort="latency"))[0] == "Alder"
    assert names(Preferences(sort="price"))[0] == "Cedar"
    assert names(Preferences(sort={"by": "price"}))[0] == "Cedar"
    assert names(Preferences(), tools=True, draw=0.99) == ["Alder", "Birch", "Cedar"]


def test_default_is_weighted_by_inverse_square_price() -> None:
    counts = Counter(names(Preferences(), draw=(i + 0.5) / 10_000)[0] for i in range(10_000))
    weights = {p.name: (p.price_prompt + p.price_completion) ** -2 for p in PROVIDERS}
    for name, weight in weights.items():
        assert abs(counts[name] / 10_000 - weight / sum(weights.values())) < 0.001
