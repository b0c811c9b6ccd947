"""Canaries, histograms, fair shares: the pure parts."""

import math
import random

import pytest

from core.generate.lanes import (
    Lane,
    LogHistogram,
    RollingHistogram,
    by_preference,
    canary_fails,
)
from core.generate.queues import Item, Queues
from core.generate.request import prefix_key, sampling_of, seed_of
from core.limit import Limit
from core.providers.base import LaneSpec
from tests.core.generate.rig import config_of, prompts_of


class Nobody:
    name = "openrouter"


def lane(canary: int, name: str = "alder", rank: float = 0.0, open_now: int = 0) -> Lane:
    one = Lane(Nobody(), LaneSpec(name=name, rank=rank), Limit(100, start=100), canary)  # type: ignore[arg-type]
    one.limit.in_flight = open_now
    return one


def test_a_prefix_stays_where_its_cache_is_while_loads_are_even() -> None:
    """320 prompts of 40 prefixes over four servers: few prefixes on more than one, no server far
    above its part."""
    lanes = [lane(0, name=f"s{i}") for i in range(4)]
    homes: dict[str, set[str]] = {}
    for i in range(320):
        prefix = f"prefix {i % 40}"
        best = by_preference(lanes, prefix, "")[0]
        best.limit.in_flight += 1
        homes.setdefault(prefix, set()).add(best.name)
    shares = [one.limit.in_flight for one in lanes]
    assert max(shares) <= 1.25 * min(shares) + 3
    assert sum(len(names) for names in homes.values()) < 1.6 * len(homes)
    alone = [lane(0, name=f"s{i}") for i in range(4)]
    for _ in range(100):
        by_preference(alone, "the only one", "")[0].limit.in_flight += 1
    shares = sorted(one.limit.in_flight for one in alone)
    assert shares[-1] <= 1.25 * shares[0] + 3  # one prefix fills them all


@pytest.mark.parametrize(
    ("avoid", "loads", "ranks", "first"),
    [
        ("", (0, 0, 0), (2.0, 1.0, 3.0), "s1"),
        ("s1", (0, 0, 0), (2.0, 1.0, 3.0), "s0"),
        ("", (90, 0, 90), (1.0, 2.0, 1.0), "home"),  # an empty one of lower rank changes nothing
        ("", (50, 0, 50), (1.0, 1.0, 1.0), "s1"),
    ],
)
def test_rank_comes_before_the_cache_and_the_cache_before_emptiness(
    avoid: str, loads: tuple[int, ...], ranks: tuple[float, ...], first: str
) -> None:
    lanes = [
        lane(0, name=f"s{i}", rank=rank, open_now=load)
        for i, (load, rank) in enumerate(zip(loads, ranks, strict=True))
    ]
    if first == "home":
        first = by_preference([lanes[0], lanes[2]], "x", "")[0].name
    ordered = [one.name for one in by_preference(lanes, "x", avoid)]
    assert ordered[0] == first and sorted(ordered) == ["s0", "s1", "s2"]
    without = [one for one in lanes if one.name != first]
    moved = [one.name for one in by_preference(without, "x", avoid)]
    assert moved == [name for name in ordered if name != first]  # nobody else's home moves


def test_quantiles_are_within_eight_percent() -> None:
    dice = random.Random(1)
    histogram = LogHistogram()
    values = sorted(dice.lognormvariate(0, 1) for _ in range(5_000))
    for value in values:
        histogram.add(value)
    for q in (0.01, 0.5, 0.99):
        true = values[math.ceil(q * len(values)) - 1]
        assert histogram.quantile(q) == pytest.approx(true, rel=0.08)
    assert LogHistogram().quantile(0.5) is None


def test_old_values_leave_the_window() -> None:
    rolling = RollingHistogram()
    for i in range(100):
        rolling.add(1.0, i * 0.1)
    for i in range(100):
        rolling.add(10.0, 45.0 + i * 0.1)
    assert rolling.quantile(0.01) == pytest.approx(10.0, rel=0.08)


@pytest.mark.parametrize(
    ("ended", "bad", "fails"),
    [(32, 0, False), (32, 8, False), (32, 16, False), (32, 18, True), (8, 6, False), (8, 8, True)],
)
def test_a_canary_fails_only_when_chance_cannot_explain_it(
    ended: int, bad: int, fails: bool
) -> None:
    assert canary_fails(ended, bad) is fails


def test_a_pair_gets_no_more_than_its_canary_before_the_verdict() -> None:
    one = lane(canary=4)
    for _ in range(4):
        assert one.takes("d", 0.0)
        one.left("d", 0.0)
    assert not one.takes("d", 0.0) and one.takes("other", 0.0)
    one.back("d")
    assert one.takes("d", 0.0)  # a rollout that went elsewhere makes room
    one.left("d", 0.0)
    verdicts = [one.ended("d", bad=False) for _ in range(4)]
    assert [v is not None for v in verdicts] == [False, False, False, True]
    assert verdicts[3] is not None and verdicts[3].passed
    assert one.takes("d", 0.0)


def test_a_verdict_from_outside_comes_first() -> None:
    one = lane(canary=2)
    one.left("d", 0.0)
    one.verdict("d", passed=False)
    assert not one.open_to("d") and one.open_to("other")
    assert one.ended("d", bad=False) is None
    one.verdict("d", passed=True)
    assert not one.open_to("d")


def test_the_dataset_most_behind_is_next_and_retries_go_first() -> None:
    queues = Queues([*prompts_of(10, dataset="a"), *prompts_of(4, dataset="b")])
    a, b = queues.queues
    for queue in queues.queues:
        while queue.waiting:
            queue.ready.append(Item(queue.waiting.popleft()))
    a.taken = 5
    assert [q.dataset for q in queues.by_need()] == ["b", "a"]
    b.taken = 3
    assert [q.dataset for q in queues.by_need()] == ["a", "b"]
    item = a.ready.popleft()
    queues.retry_at(5.0, item)
    assert queues.queued == 14 and queues.next_due() == 5.0
    queues.due(4.9)
    assert a.ready[0] is not item
    queues.due(5.0)
    assert a.ready[0] is item and a.taken == 4
    queues.retry_at(9.0, a.ready.popleft())
    assert queues.drop_retries() == 1 and queues.retrying == 0
    assert queues.remaining() == {"a": 10, "b": 4}


def test_seeds_and_prefixes_depend_on_the_question_alone() -> None:
    assert seed_of(1, "t") == seed_of(1, "t") != seed_of(2, "t")
    assert 0 <= seed_of(1, "t") < 2**31
    config = config_of("http://x", temperature=0.5)
    assert sampling_of(config, "t").seed == seed_of(0, "t")
    one, two = prompts_of(2)
    assert prefix_key(one) == prefix_key(two)
    two.messages.insert(0, {"role": "system", "content": "s"})
    assert prefix_key(one) != prefix_key(two)
