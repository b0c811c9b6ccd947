"""Canaries, histograms, fair shares: the pure parts."""

import math
import random

import pytest

from core.generate.lanes import (
    BEGINNINGS,
    WARM_UP_S,
    Lane,
    LogHistogram,
    RollingHistogram,
    Warmth,
    by_preference,
    canary_fails,
)
from core.generate.queues import AHEAD, HELD, Item, Queues, grouped
from core.generate.request import Prepared, prefix_key, sampling_of, seed_of
from core.limit import Limit
from core.providers.base import LaneSpec
from core.schema import Prompt
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


def test_groups_follow_each_other_and_their_first_ones_go_ahead() -> None:
    prompts = [
        Prompt(
            prompt_id=f"{name}{i}",
            twin_id="",
            dataset="d",
            messages=[{"role": "system", "content": name}, {"role": "user", "content": "?"}],
        )
        for i in range(200)
        for name in "abc"[: 3 if i < 10 else 2]
    ]
    order = [p.prompt_id for p in grouped(prompts)]
    assert sorted(order) == sorted(p.prompt_id for p in prompts)
    for name, size in (("a", 200), ("b", 200), ("c", 10)):
        assert [i for i in order if i[0] == name] == [f"{name}{i}" for i in range(size)]
    firsts = {name: order.index(name + "0") for name in "abc"}
    seconds = {name: order.index(name + "1") for name in "abc"}
    assert firsts == {"a": 0, "b": 200 - AHEAD, "c": 400 - AHEAD}
    assert seconds == {"a": 1, "b": 201, "c": 401}
    singles = prompts_of(5)
    for i, prompt in enumerate(singles):
        prompt.messages.insert(0, {"role": "system", "content": f"{i}"})
    assert list(grouped(singles)) == singles


NOW = 100.0
LAST = NOW + WARM_UP_S


@pytest.mark.parametrize(
    ("seen", "at", "begun", "waits"),
    [
        ((), NOW, False, False),  # the first one
        ((7,), NOW, False, True),
        ((7,), LAST - 0.01, False, True),
        ((7,), LAST, False, False),  # never longer
        ((7,), NOW, True, False),
        ((8,), NOW, False, False),  # another beginning
        ((7, *range(100, 100 + BEGINNINGS)), NOW, False, False),  # forgotten: first again
    ],
)
def test_who_waits_for_a_cache(seen: tuple[int, ...], at: float, begun: bool, waits: bool) -> None:
    warmth, first = Warmth(), ("first", 1)
    for beginning in seen:
        assert not warmth.waits(beginning, first, NOW, lambda key: False)
    asked: set[tuple[str, int]] = set()

    def began(key: tuple[str, int]) -> bool:
        asked.add(key)
        return begun

    assert warmth.waits(7, ("p", 1), at, began) is waits
    assert asked <= {first}
    over = bool(seen) and not waits
    assert warmth.over(7, at, lambda key: over) is over
    if over:
        assert warmth.over(7, NOW, lambda key: False)  # it stays so


def test_held_prompts_come_back_in_their_order_and_bound_what_is_rendered() -> None:
    queues = Queues([*prompts_of(HELD + 8, dataset="a"), *prompts_of(2, dataset="b")])
    a, b = queues.queues
    for number in range(HELD - 1):
        item = Item(a.waiting.popleft())
        item.prepared = Prepared(prompt=item.prompt, beginning=number % 2 + 1)
        queues.hold(item, "alder")
    assert queues.hungry(4) is a and queues.queued == HELD + 10 and queues.holding
    assert not queues.by_need()
    item = Item(a.waiting.popleft())
    queues.hold(item, "birch")
    assert queues.hungry(4) is b and a.held == HELD
    a.ready.append(Item(a.waiting.popleft()))
    queues.free(lambda lane, beginning: (lane, beginning) == ("alder", 2))
    ids = [item.prompt.prompt_id for item in a.ready]
    assert ids == [*(f"p{i}" for i in range(1, HELD - 1, 2)), f"p{HELD}"]
    queues.free(lambda lane, beginning: True)
    assert not queues.holding and a.held == 0 and len(a.ready) == HELD + 1
    a.ready.clear()
    a.waiting.clear()
    assert not a.left and b.left
    queues.hold(item, "birch")
    assert a.left


def test_seeds_and_prefixes_depend_on_the_question_alone() -> None:
    assert seed_of(1, "t") == seed_of(1, "t") != seed_of(2, "t")
    assert 0 <= seed_of(1, "t") < 2**31
    config = config_of("http://x", temperature=0.5)
    assert sampling_of(config, "t").seed == seed_of(0, "t")
    one, two = prompts_of(2)
    assert prefix_key(one) == prefix_key(two)
    two.messages.insert(0, {"role": "system", "content": "s"})
    assert prefix_key(one) != prefix_key(two)
