"""Each wire on both sides of its threshold; who is blamed; when a stop becomes a halt."""

import math
from typing import Any

import pytest

from core import config
from core.audit.canary import Canaries
from core.audit.live import Inspector, LiveAudit, observation
from core.audit.tripwires import DEAD_STEPS, SHARES, WINDOW, Observation, Price, Tripwires, plain
from core.config_sections import Generate
from core.events import Canary, Tripwire
from core.schema import Finding
from tests.core.audit.builders import RENDERER, WEATHER, call, prompt, sample

LIMITS = config.Tripwires()
LIST = Price(1e-6, 1e-5)
GOOD: dict[str, Any] = {
    "failed": False,
    "mismatch": False,
    "prompt_drift": False,
    "leak": False,
    "truncated": False,
    "schema_invalid": False,
}


def see(provider: str = "A", dataset: str = "b1", **fields: Any) -> Observation:
    return Observation(provider=provider, dataset=dataset, **{**GOOD, **fields})


def feed(wires: Tripwires, field: str, bad: int, good: int, **where: Any) -> list[Tripwire]:
    """`bad` bad ones after `good` good ones."""
    for i in range(good + bad):
        wires.observe(see(**{**where, field: i >= good}))
    return wires.check()


# Smallest number of bad ones among 32 whose Wilson interval at z = 3.0902 begins above the limit.
SMALLEST = {
    "mismatch": 6,  # begins at 0.0589, 5 of 32 at 0.0441; limit 0.05
    "prompt_drift": 6,
    "leak": 4,  # 0.0307 and 0.0191; 0.02
    "truncation": 16,  # 0.2603 and 0.2366; 0.25
    "schema_invalid": 9,  # 0.1102 and 0.0921; 0.10
    "error_storm": 25,  # 0.5081 and 0.4771; 0.5
}


@pytest.mark.parametrize("name", SHARES)
def test_both_sides_of_each_share(name: str) -> None:
    field = SHARES[name].field
    smallest = SMALLEST[name]
    assert feed(Tripwires(LIMITS), field, smallest - 1, 33 - smallest) == []
    wires = Tripwires(LIMITS, datasets=["b1", "b2"])
    wires.observe(see(provider="B"))
    (trip,) = feed(wires, field, smallest, 32 - smallest)
    assert (trip.name, trip.scope, trip.action) == (name, "A", "stop_provider")
    assert trip.saw.startswith(f"{smallest} of 32 ")
    assert trip.advice


@pytest.mark.parametrize("name", SHARES)
def test_no_rate_is_judged_on_fewer_than_min_samples(name: str) -> None:
    assert feed(Tripwires(LIMITS), SHARES[name].field, LIMITS.min_samples - 1, 0) == []
    assert feed(Tripwires(LIMITS), SHARES[name].field, LIMITS.min_samples, 0) != []


def test_not_applicable_is_not_counted() -> None:
    wires = Tripwires(LIMITS)
    for _ in range(100):
        wires.observe(see(mismatch=None, prompt_drift=None, leak=None, schema_invalid=None))
    assert wires.check() == []
    assert feed(wires, "mismatch", 31, 0) == []


def test_disabled_wires_count_money_and_trip_nothing() -> None:
    wires = Tripwires(config.Tripwires(enabled=False))
    assert feed(wires, "mismatch", 100, 0) == []
    wires.loss(1, math.nan)
    wires.acceptance(1.0)
    wires.disk(0, 10, 50, 100, 10)
    assert wires.check() == []


def test_a_provider_that_goes_bad_late_trips_within_a_window() -> None:
    wires = Tripwires(LIMITS)
    wires.observe(see(provider="B"))
    assert feed(wires, "mismatch", 0, 20_000) == []
    count = 0
    while not (trips := wires.check()):
        wires.observe(see(mismatch=True))
        count += 1
    assert count <= WINDOW // 8
    assert f"of {WINDOW} " in trips[0].saw


def test_the_ring_forgets() -> None:
    wires = Tripwires(LIMITS)
    for _ in range(40):  # 1 in 26 is below 5 %, whatever the window
        assert feed(wires, "mismatch", 1, 25) == []


def test_one_provider_bad_everywhere_is_stopped() -> None:
    wires = Tripwires(LIMITS, datasets=["b1", "b2"])
    for _ in range(40):
        for dataset in ("b1", "b2"):
            wires.observe(see("A", dataset, mismatch=True))
            wires.observe(see("B", dataset))
    (trip,) = wires.check()
    assert (trip.scope, trip.action) == ("A", "stop_provider")
    assert wires.stopped_providers == {"A"} and not wires.halted


def test_a_dataset_bad_with_every_provider_is_stopped() -> None:
    wires = Tripwires(LIMITS, datasets=["b1", "b2"])
    trips = []
    for _ in range(80):
        for provider in ("A", "B", "C"):
            wires.observe(see(provider, "b1", truncated=True))
            wires.observe(see(provider, "b2"))
            wires.observe(see(provider, "b2"))
        trips += wires.check()
    assert [(t.scope, t.action) for t in trips] == [("b1", "stop_dataset")]


def test_one_provider_bad_on_one_dataset_only() -> None:
    wires = Tripwires(LIMITS, datasets=["b1", "b2"])
    for _ in range(60):
        wires.observe(see("A", "b2"))
        wires.observe(see("A", "b1", schema_invalid=True))
    (alone,) = wires.check()
    assert (alone.scope, alone.action) == ("b1", "stop_dataset")
    wires = Tripwires(LIMITS, datasets=["b1", "b2"])
    for _ in range(60):
        wires.observe(see("A", "b2"))
        wires.observe(see("B", "b1"))
        wires.observe(see("A", "b1", schema_invalid=True))
    (trip,) = wires.check()
    assert (trip.scope, trip.action) == ("A", "stop_provider")


def test_a_fine_provider_is_not_blamed_for_its_neighbour() -> None:
    wires = Tripwires(LIMITS, datasets=["b1", "b2"])
    trips = []
    for i in range(400):
        wires.observe(see("A", "b1", mismatch=i % 3 == 0))
        wires.observe(see("B", "b1", mismatch=i % 40 == 1))
        trips += wires.check()
    assert [(t.scope, t.action) for t in trips] == [("A", "stop_provider")]


def test_the_last_provider_halts_the_run() -> None:
    wires = Tripwires(LIMITS)
    wires.observe(see("sglang", reference=True))  # the reference arm alone is not a run
    (trip,) = feed(wires, "mismatch", 32, 0)
    assert trip.action == "halt" and wires.halted
    assert "no other provider is left" in trip.advice
    assert feed(wires, "leak", 64, 0) == []


def test_two_stops_were_not_enough() -> None:
    wires = Tripwires(LIMITS)
    for provider in "ABCD":
        wires.observe(see(provider))
    trips = [feed(wires, "mismatch", 40, 0, provider=p, dataset=f"of {p}")[0] for p in "ABC"]
    actions = [t.action for t in trips]
    assert actions == ["stop_provider", "stop_provider", "halt"]


def test_stragglers_of_a_stopped_provider_cost_money_and_trip_nothing() -> None:
    wires = Tripwires(LIMITS)
    wires.observe(see("B"))
    (first,) = feed(wires, "mismatch", 32, 0, cost_usd=0.5)
    assert first.cost_usd == pytest.approx(15.5)  # one of the dataset's 32 was the other provider's
    assert feed(wires, "leak", 64, 0, cost_usd=0.5) == []
    wires.observe(see("C", cost_usd=1.0))
    wires.loss(3, math.inf)
    (halt,) = wires.check()
    assert halt.cost_usd == pytest.approx(32 * 0.5 + 64 * 0.5 + 1.0)


def test_mixed_stop_offset() -> None:
    def offsets(minus: int, zero: int) -> list[Tripwire]:
        wires = Tripwires(LIMITS)
        wires.observe(see("B"))
        for i in range(minus + zero):
            wires.observe(see(stop_offset=0 if i < zero else -1))
        return wires.check()

    assert offsets(0, 200) == [] and offsets(200, 0) == []
    assert offsets(12, 37) == []  # fewer than what an offset is learned from
    assert offsets(5, 45) == [] and offsets(34, 16) == []
    (trip,) = offsets(6, 44)
    assert (trip.name, trip.scope) == ("mixed_stop_offset", "A")
    assert trip.saw == "44 replies count the stop token and 6 do not"
    assert [t.name for t in offsets(33, 17)] == ["mixed_stop_offset"]
    wires = Tripwires(LIMITS)
    for _ in range(100):
        wires.observe(see(stop_offset=3))
    assert wires.check() == []


def triggers(local: int, api: int, pairs: int, first: str = "local") -> list[Tripwire]:
    """`pairs` twins; the first `local` trigger locally, the first `api` at the provider."""
    wires = Tripwires(LIMITS)
    wires.observe(see("B"))
    for i in range(pairs):
        ends = [
            see("sglang", twin_id=f"t{i}", reference=True, triggered=i < local),
            see("A", twin_id=f"t{i}", triggered=i < api),
        ]
        for one in ends if first == "local" else reversed(ends):
            wires.observe(one)
    return wires.check()


@pytest.mark.parametrize("first", ["local", "api"])
def test_trigger_rate_both_sides(first: str) -> None:
    # ten discordant pairs of one kind: p = 2/1024; eleven: 2/2048 < 0.001
    assert triggers(10, 0, 32, first) == []
    (trip,) = triggers(11, 0, 32, first)
    assert (trip.name, trip.scope, trip.action) == ("tool_trigger", "A", "stop_provider")
    assert trip.saw == "of 32 twins 11 call a tool only locally and 0 only here (p 0.001)"
    (other,) = triggers(0, 11, 32, first)
    assert "0 call a tool only locally and 11 only here" in other.saw


def test_trigger_is_looked_at_when_pairs_double() -> None:
    assert triggers(32, 0, 31) == []
    # at 32 pairs none differ, at 64 all of the second half do
    wires = Tripwires(LIMITS)
    wires.observe(see("B"))
    seen = []
    for i in range(64):
        wires.observe(see("sglang", twin_id=f"t{i}", reference=True, triggered=True))
        wires.observe(see("A", twin_id=f"t{i}", triggered=i < 32))
        seen += [(i + 1, t.name) for t in wires.check()]
    assert seen == [(64, "tool_trigger")]


def test_two_providers_away_from_the_reference_point_at_the_dataset() -> None:
    wires = Tripwires(LIMITS, datasets=["b1", "b2"])
    wires.observe(see("C"))
    for provider in ("A", "B"):
        for i in range(32):
            wires.observe(see("sglang", twin_id=f"t{i}", reference=True, triggered=True))
            wires.observe(see(provider, twin_id=f"t{i}", triggered=False))
    assert [(t.scope, t.action) for t in wires.check()] == [
        ("A", "stop_provider"),
        ("b1", "stop_dataset"),
    ]


def test_cost_per_kept_token() -> None:
    def run(kept: bool, cost: float, price: Price | None = LIST) -> list[Tripwire]:
        wires = Tripwires(LIMITS, {"A": price} if price else {})
        wires.observe(see("B"))
        for _ in range(LIMITS.min_samples):
            wires.observe(see(kept=kept, prompt_tokens=1000, completion_tokens=100, cost_usd=cost))
        return wires.check()

    # list price of one: 1000 * 1e-6 + 100 * 1e-5 = 0.002; the factor is 3
    assert run(True, 0.0059) == []
    (trip,) = run(True, 0.0061)
    assert trip.name == "cost_per_kept_token" and "3.0 times the list price" in trip.saw
    (nothing,) = run(False, 0.002)
    assert "nothing kept against" in nothing.saw
    assert run(False, 0.0) == []
    assert run(True, 9.0, price=None) == []


def test_a_price_may_come_later() -> None:
    wires = Tripwires(LIMITS)
    wires.set_price("A", Price(0.0, 1e-6))
    wires.observe(see("B"))
    for _ in range(32):
        wires.observe(see(kept=True, completion_tokens=100, cost_usd=1.0))
    assert [t.name for t in wires.check()] == ["cost_per_kept_token"]


def test_disk_forecast() -> None:
    def forecast(free: int) -> list[Tripwire]:
        wires = Tripwires(LIMITS)
        wires.disk(free, written_bytes=100 * 10**9, done=50, total=100, keep_bytes=10**9)
        return wires.check()

    assert forecast(101 * 10**9) == []
    (trip,) = forecast(101 * 10**9 - 1)
    assert (trip.name, trip.action) == ("disk", "halt")
    assert trip.saw == "100.0 GB to be written, 101.0 GB free, 1.0 GB to be kept"
    wires = Tripwires(LIMITS)
    wires.disk(0, 100, done=31, total=100, keep_bytes=1)
    wires.disk(0, 100, done=100, total=100, keep_bytes=1)
    assert wires.check() == []


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number(loss: float) -> None:
    wires = Tripwires(LIMITS)
    wires.loss(1, 2.0, 1.0)
    assert wires.check() == []
    wires.loss(2, loss)
    assert [(t.name, t.action) for t in wires.check()] == [("loss", "halt")]


def test_a_gradient_that_is_no_number() -> None:
    wires = Tripwires(LIMITS)
    wires.loss(1, 2.0, math.nan)
    assert [t.name for t in wires.check()] == ["loss"]


def test_a_dead_loss() -> None:
    wires = Tripwires(LIMITS)
    for step in range(DEAD_STEPS - 1):
        wires.loss(step, 3.0)
    assert wires.check() == []
    wires.loss(DEAD_STEPS, 3.0)
    assert "has not moved" in wires.check()[0].saw
    alive = Tripwires(LIMITS)
    for step in range(500):
        alive.loss(step, 3.0 - step * 1e-6)
    assert alive.check() == []


@pytest.mark.parametrize(
    ("lengths", "trips"),
    [
        ([2.0, 1.9, 1.85, 1.79], True),
        ([2.0, 1.9, 1.85, 1.80], False),  # three falls, but not below 0.9 of the best
        ([2.0, 1.7, 1.6], False),
        ([2.0, 1.5, 1.6, 1.4], False),
        ([1.0, 2.0, 3.0], False),
    ],
)
def test_falling_acceptance(lengths: list[float], trips: bool) -> None:
    wires = Tripwires(LIMITS)
    for length in lengths:
        wires.acceptance(length)
    assert bool(wires.check()) is trips


def test_names_from_outside_are_made_plain() -> None:
    assert plain("A\x1b[31m\nB\u202e") == "A?[31m?B?"
    assert len(plain("x" * 1000)) == 60


def test_trips_are_handed_out_once() -> None:
    wires = Tripwires(LIMITS)
    assert len(feed(wires, "mismatch", 40, 0)) == 1
    assert wires.check() == []


def canary(bad: int, size: int = 32) -> tuple[list[Canary], Canaries]:
    canaries = Canaries(LIMITS, size)
    verdicts = [canaries.observe(see(mismatch=i < bad)) for i in range(size)]
    return [v for v in verdicts if v], canaries


def test_canary_both_sides() -> None:
    # one-sided 95 %: 3/32 has a lower end of 0.039, 4/32 of 0.0575; the limit is 0.05
    (passed,), open_ = canary(3)
    assert passed.passed and open_.verdicts == {("A", "b1"): True}
    (failed,), shut = canary(4)
    assert not failed.passed and shut.verdicts == {("A", "b1"): False}
    assert failed.detail.startswith("4 of 4 replies do not match their billed token count")


def test_canary_of_a_few_replies_says_nothing() -> None:
    canaries = Canaries(LIMITS, 32)
    assert [canaries.observe(see(truncated=True)) for _ in range(3)] == [None] * 3
    assert not canaries.verdicts


def test_canary_needs_its_count_for_wires_that_few_replies_speak_about() -> None:
    """One reply of eight calls a tool, and calls it badly: 1 of 1 is no share."""
    canaries = Canaries(LIMITS, 8)
    canaries.observe(see(schema_invalid=True))
    quiet = see(schema_invalid=None)
    (verdict,) = [v for v in (canaries.observe(quiet) for _ in range(7)) if v]
    assert verdict.passed


def test_canary_off() -> None:
    canaries = Canaries(LIMITS, 0)
    assert canaries.observe(see(mismatch=True)) is None and not canaries.verdicts


def test_observation_of_a_good_sample() -> None:
    got = observation(sample(cost_usd=0.1, calls=[call()]), [], True)
    assert (got.provider, got.mismatch, got.stop_offset, got.prompt_drift) == (
        "Alpha",
        False,
        0,
        False,
    )
    assert (got.leak, got.truncated, got.schema_invalid, got.triggered) == (
        False,
        False,
        False,
        True,
    )
    assert (got.kept, got.cost_usd, got.prompt_tokens, got.reference) == (True, 0.1, 10, False)


@pytest.mark.parametrize(
    ("fields", "rules", "expected"),
    [
        ({"verdict": "mismatch"}, [], {"mismatch": True, "kept": False}),
        ({"verdict": "rejected", "error_class": "count_mismatch"}, [], {"mismatch": True}),
        (
            {"verdict": "exact", "arm": "local"},
            [],
            {"mismatch": None, "stop_offset": None, "reference": True},
        ),
        ({"billed_tokens": 18}, [], {"stop_offset": -1}),
        ({"billed_tokens": None}, [], {"stop_offset": None}),
        ({"prompt_tokens_billed": None}, [], {"prompt_drift": None}),
        ({}, ["prompt_drift"], {"prompt_drift": True}),
        ({}, ["marker_leak"], {"leak": True}),
        (
            {"verdict": "rejected", "error_class": "marker_in_reasoning"},
            [],
            {"leak": True, "triggered": None},
        ),
        ({}, ["truncated"], {"truncated": True, "triggered": None}),
        ({"verdict": "rejected", "error_class": "truncated_length"}, [], {"truncated": True}),
        (
            {"verdict": "rejected", "error_class": "tool_id_malformed"},
            [],
            {"triggered": True, "schema_invalid": True},
        ),
        ({"calls": [call()]}, ["undeclared_tool"], {"schema_invalid": True, "triggered": True}),
        ({}, [], {"schema_invalid": None, "triggered": False}),
    ],
)
def test_observation(fields: dict[str, Any], rules: list[str], expected: dict[str, Any]) -> None:
    found = [Finding(sample_id="s", rule=r, detail="") for r in rules]
    got = observation(sample(**fields), found, True)
    assert {k: getattr(got, k) for k in expected} == expected


def test_a_broken_call_of_the_target_itself_trips_nothing() -> None:
    found = [Finding(sample_id="s", rule="arguments_schema", detail="")]
    local = sample(calls=[call()], verdict="exact", arm="local")
    assert observation(local, found, True).schema_invalid is None
    assert observation(sample(calls=[call()]), found, True).schema_invalid is True


def test_without_tools_nothing_is_a_trigger() -> None:
    assert observation(sample(), [], False).triggered is None


def test_live_audit_from_sample_to_trip() -> None:
    settings = config.Config(
        dataset=[
            config.Dataset(name="b1", kind="embedded"),
            config.Dataset(name="b2", kind="embedded"),
        ],
        generate=Generate(canary=8),
    )
    live, inspector = LiveAudit(settings), Inspector(RENDERER)
    events: list[Any] = []
    for i in range(40):
        one = sample(calls=[call("{}")], twin_id=f"t{i}")
        seen = inspector.inspect(one, prompt([WEATHER]))
        assert seen.schema_invalid
        events += live.observe(seen)
    kinds = [type(e).__name__ for e in events]
    assert kinds == ["Canary", "Tripwire"]
    assert not events[0].passed and events[1].name == "schema_invalid"
    assert live.wires.halted and not any(live.canaries.verdicts.values())


def test_live_audit_counts_failures() -> None:
    live = LiveAudit(config.Config(generate=Generate(canary=0)))
    events: list[Any] = []
    for _ in range(40):
        events += live.fail("A", "b1", cost_usd=0.25)
    (trip,) = events
    assert (trip.name, trip.action, trip.cost_usd) == ("error_storm", "halt", 8.0)
