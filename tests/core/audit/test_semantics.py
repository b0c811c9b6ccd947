"""Arms compared and datasets decided, with numbers that can be checked by hand."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from core.audit.arms import agree, arm_stats, self_agreement
from core.audit.decide import decide, mask_size
from core.audit.reading import Reader
from core.audit.rules import findings
from core.audit.semantics import Comparison, SemanticsReport, compare
from core.audit.traits import Trait, edge_positions, reduce, with_likelihood
from core.config import Audit, Tripwires
from core.schema import Sample
from tests.core.audit.builders import RENDERER, WEATHER, call, case_of, prompt, sample, trait

SETTINGS, LIMITS = Audit(), Tripwires()
CASES = Path(__file__).resolve().parents[3] / ".." / "shared" / "cases"


def pairs(both: int, only_local: int, only_api: int, neither: int, **api: object) -> list[Trait]:
    """Twins with these four kinds of agreement on triggering."""
    rows = []
    kinds = [(True, True)] * both + [(True, False)] * only_local
    kinds += [(False, True)] * only_api + [(False, False)] * neither
    for i, (local, remote) in enumerate(kinds):
        same = {"names": ("f",), "arguments": b"a"}
        rows.append(trait(f"t{i}", "local", calls=int(local), **(same if local else {})))
        rows.append(trait(f"t{i}", calls=int(remote), **({**same, **api} if remote else api)))
    return rows


def only(traits: list[Trait]) -> Comparison:
    (comparison,) = compare(traits, SETTINGS, LIMITS).comparisons
    return comparison


def metrics(comparison: Comparison) -> set[str]:
    return {d.metric for d in comparison.deviations}


def test_trigger_counts_f1_and_p() -> None:
    comparison = only(pairs(30, 9, 1, 10))
    pair = comparison.agreement
    assert pair is not None and comparison.twins is not None and comparison.reference is not None
    assert (pair.pairs, pair.both, pair.only_first, pair.only_second, pair.neither) == (
        50,
        30,
        9,
        1,
        10,
    )
    assert pair.trigger_p == pytest.approx(22 / 1024)
    assert pair.f1 == pytest.approx(60 / 70)
    assert comparison.twins.trigger.value == pytest.approx(31 / 50)
    assert comparison.reference.trigger.value == pytest.approx(39 / 50)
    assert comparison.judged and not comparison.deviations


def test_a_provider_that_drops_tools_is_found_and_asked_again() -> None:
    # 11 discordant pairs one way: p = 2 / 2**11 = 0.00098, just under 0.001; ten are not enough
    assert metrics(only(pairs(30, 11, 0, 10))) == {"trigger"}
    assert metrics(only(pairs(30, 10, 0, 10))) == set()
    assert metrics(only(pairs(30, 0, 11, 10))) == {"trigger"}


def test_few_twins_judge_nothing() -> None:
    few = only(pairs(0, 29, 0, 0))
    assert not few.judged and not few.deviations
    assert metrics(only(pairs(0, 30, 0, 0))) == {"trigger"}


def test_no_local_arm() -> None:
    comparison = only([trait("a", calls=1), trait("b")])
    assert comparison.agreement is None and not comparison.judged
    assert comparison.all.trigger.value == 0.5


def test_names_and_arguments_are_counted_where_both_called() -> None:
    rows = [
        (
            trait("1", "local", calls=1, names=("f",), arguments=b"a"),
            trait("1", calls=1, names=("f",), arguments=b"a"),
        ),
        (
            trait("2", "local", calls=1, names=("f",), arguments=b"a"),
            trait("2", calls=1, names=("f",), arguments=b"b"),
        ),
        (
            trait("3", "local", calls=1, names=("f",), arguments=b"a"),
            trait("3", calls=2, names=("f", "f"), arguments=b"c"),
        ),
        (
            trait("4", "local", calls=1, names=("f",), arguments=b""),
            trait("4", calls=1, names=("f",), arguments=b""),
        ),
        (trait("5", "local"), trait("5", calls=1, names=("f",), arguments=b"a")),
    ]
    pair = agree(rows)
    assert (pair.name_match.hits, pair.name_match.total) == (3, 4)
    assert (pair.args_match.hits, pair.args_match.total) == (
        1,
        3,
    )  # unreadable arguments equal nothing
    assert (pair.same_call_count.hits, pair.same_call_count.total) == (3, 4)
    assert (pair.same_finish.hits, pair.same_finish.total) == (4, 5)


def test_arm_stats_by_hand() -> None:
    stats = arm_stats(
        [
            trait(
                "1", calls=2, undeclared=1, invalid=1, native_ids=1, content_before=True, leads=True
            ),
            trait("2", calls=1, native_ids=1, leads=True, reasoning_tokens=4),
            trait("3", leads=False, answer_leads=True, reasoning_tokens=8),
            trait("4", has_tools=False),
            trait("5", behaves=False, triggered=True, calls=1, finish="length"),
        ]
    )
    assert (stats.trigger.hits, stats.trigger.total) == (2, 3)
    assert (stats.undeclared.hits, stats.undeclared.total) == (1, 3)
    assert (stats.schema_valid.hits, stats.schema_valid.total) == (2, 3)
    assert (stats.native_id.hits, stats.native_id.total) == (2, 3)
    assert (stats.content_before.hits, stats.content_before.total) == (1, 2)
    assert stats.calls_per_reply == 1.5
    assert stats.reasoning_tokens == 3.0
    assert (stats.reasoning_leads.hits, stats.reasoning_leads.total) == (2, 3)
    assert stats.finish == {"length": 1, "stop": 2, "tool_calls": 2}


def test_the_noise_floor_needs_a_question_asked_twice() -> None:
    once = {"a": [trait("a", "local", calls=1)]}
    assert self_agreement(once) is None
    twice = {"a": [trait("a", "local", calls=1), trait("a", "local")], "b": [trait("b", "local")]}
    floor = self_agreement(twice)
    assert floor is not None and (floor.pairs, floor.only_first) == (1, 1)


def test_names_are_judged_against_the_floor_only() -> None:
    wrong = pairs(60, 0, 0, 0, names=("g",))
    assert metrics(only(wrong)) == set()
    again = [trait(f"t{i}", "local", calls=1, names=("f",), arguments=b"a") for i in range(60)]
    comparison = only(wrong + again)
    assert comparison.floor is not None and comparison.floor.name_match.value == 1.0
    assert metrics(comparison) == {"name_match"}
    noisy = [trait(f"t{i}", "local", calls=1, names=("h",), arguments=b"a") for i in range(60)]
    assert metrics(only(wrong + noisy)) == set()


def test_schema_undeclared_and_ids_are_worse_than_local() -> None:
    assert metrics(only(pairs(40, 0, 0, 0, invalid=1))) == {"schema_valid"}
    assert metrics(only(pairs(40, 0, 0, 0, undeclared=1))) == {"undeclared"}
    rows = pairs(40, 0, 0, 0)
    for row in rows:
        row.native_ids = int(row.arm == "local")
    assert metrics(only(rows)) == {"native_id"}


def test_prompt_drift_needs_no_twins() -> None:
    rows = [trait(str(i), drifted=i < 20) for i in range(60)]
    assert metrics(only(rows)) == {"prompt_drift"}
    assert metrics(only([trait(str(i), drifted=i < 3) for i in range(60)])) == set()


def test_likelihood_two_sample_on_twins() -> None:
    rows = pairs(0, 0, 0, 60)
    for i, row in enumerate(rows):
        own = -0.5 - 0.001 * (i // 2)
        row.likelihood = (own - (0.4 if row.arm == "declared" else 0.0), own, None, None)
    comparison = only(rows)
    by_segment = {t.segment: t for t in comparison.likelihood}
    assert set(by_segment) == {"reasoning", "content"}
    assert by_segment["reasoning"].shift_nats == pytest.approx(-0.4)
    assert by_segment["reasoning"].distance == 1.0
    assert by_segment["content"].p == 1.0
    assert metrics(comparison) == {"likelihood:reasoning"}
    for row in rows:  # more likely than the local arm's own text is not a sign of another model
        row.likelihood = (
            -row.likelihood[0] if row.arm == "declared" else row.likelihood[0],
            None,
            None,
            None,
        )
    assert metrics(only(rows)) == set()


def test_whitespace_habit_of_case_c49() -> None:
    path = CASES / "C49.provider.jsonl"
    if not path.exists():
        pytest.skip("shared cases are not beside this checkout")
    replies = [json.loads(line) for line in path.read_text().splitlines()]
    traits = []
    for i, reply in enumerate(replies):
        message = reply["choices"][0]["message"]
        for arm, thought in (
            ("declared", message["reasoning"]),
            ("local", " " + message["reasoning"]),
        ):
            one = sample(
                reasoning=thought,
                content=message["content"],
                twin_id=f"t{i}",
                sample_id=f"{arm}{i}",
                arm=arm,
                verdict="exact" if arm == "local" else "consistent",
                provider=reply["provider"] if arm == "declared" else None,
                backend="sglang",
            )
            traits.append(_trait_of(one))
    report = compare(traits, SETTINGS, LIMITS)
    (habit,) = report.habits
    assert (habit.provider, habit.trims) == ("ProviderTrim", True)
    assert (habit.reasoning_leads.hits, habit.local_reasoning_leads.hits) == (0, 20)
    # none of 20 against 20 of 20 drawn from one urn: 1 / C(40, 20)
    assert habit.lost == {"reasoning_starts_blank": pytest.approx(1 / math.comb(40, 20))}
    (deviation,) = report.comparisons[0].deviations
    assert (deviation.metric, deviation.remedy) == ("provider_trims_whitespace", "mask")
    (decision,) = decide(traits, report, SETTINGS)
    assert decision.decision == "mask"
    # first and last token of reasoning and content, in each of the 20 replies
    assert decision.costs["mask"].tokens == 20 * 4


def test_a_provider_that_keeps_blanks_has_no_habit() -> None:
    """Nor one that shows them once, nor one of whom too little is known."""
    seen = {"reasoning_starts_blank": True}

    def trims(shown: int, replies: int) -> bool:
        rows = [trait(str(i), "local", leads=True, habits=seen) for i in range(20)]
        for i in range(replies):
            mine = {"reasoning_starts_blank": i < shown}
            rows.append(trait(str(i), leads=i < shown, habits=mine))
        (habit,) = compare(rows, SETTINGS, LIMITS).habits
        return habit.trims

    assert not trims(20, 20) and not trims(1, 20) and not trims(0, 2)
    assert trims(0, 3)  # 1 / C(23, 3) is the first below 1 in 1,000


def _trait_of(one: Sample, tools: bool = True) -> Trait:
    case = case_of(one, prompt([WEATHER] if tools else None))
    return reduce(one, case.asked, case.reading, findings(case))


def test_reduce_counts_what_the_sample_shows() -> None:
    calls = [call(), call("{}", index=1), call(name="nope", arguments="{}", id="call_x")]
    got = _trait_of(sample(reasoning=" Hm", content="So.", calls=calls, cost_usd=0.5))
    assert (got.calls, got.undeclared, got.invalid, got.native_ids) == (3, 1, 1, 2)
    assert got.names == ("get_weather", "get_weather", "nope")
    assert got.triggered and got.behaves and got.content_before and got.leads is True
    assert (got.reasoning_tokens, got.finish, got.cost_usd) == (3, "tool_calls", 0.5)
    assert got.offends and not got.maskable


def test_reduce_names_local_servers_and_finishes_alike() -> None:
    there = {"arm": "local", "backend": "sglang", "provider": "127.0.0.1:1"}
    local = _trait_of(sample(calls=[call("{}")], finish_reason="stop", verdict="exact", **there))
    assert (local.provider, local.finish) == ("sglang", "tool_calls")
    assert local.own and not local.offends and not local.hard
    api = _trait_of(sample(calls=[call("{}")]))
    assert (api.provider, api.finish) == ("Alpha", "tool_calls")
    assert api.own and api.offends
    drifted = _trait_of(sample(prompt_tokens_billed=99))
    assert drifted.hard and not drifted.own


def test_reduce_equal_calls_have_equal_hashes() -> None:
    one = _trait_of(sample(calls=[call('{"city":"Oslo","days":2}')]))
    two = _trait_of(sample(calls=[call('{ "days": 2.0, "city": "Oslo" }', index=4)]))
    other = _trait_of(sample(calls=[call('{"city":"Bergen","days":2}')]))
    assert one.arguments == two.arguments != other.arguments
    assert _trait_of(sample(calls=[call("{")])).arguments == b""


def test_reduce_a_broken_call_is_a_trigger_and_a_cut_one_is_not_judged() -> None:
    broken = _trait_of(sample(verdict="rejected", error_class="tool_id_malformed"))
    assert broken.triggered and broken.behaves and not broken.trainable
    cut = _trait_of(sample(end=False, finish_reason="length"))
    assert not cut.behaves
    lost = _trait_of(sample(verdict="rejected", error_class="empty_choices"))
    assert not lost.behaves


def test_likelihood_of_segments_and_absurd_edges() -> None:
    one = sample(reasoning="ab", content="cd", calls=[call()])
    reading = Reader(RENDERER).read(one)
    got = _trait_of(one)
    values = [-1.0] * len(reading.ids)
    values[0] = -20.0
    (finding,) = with_likelihood(got, one, reading, values)
    assert got.likelihood == (-10.5, -1.0, -1.0, -1.0)
    assert (finding.rule, finding.spans) == ("absurd_edge", [(one.prompt_len, one.prompt_len + 1)])
    values[0] = -15.0
    assert with_likelihood(got, one, reading, values) == []
    with pytest.raises(ValueError, match="3 log-probabilities"):
        with_likelihood(got, one, reading, [0.0] * 3)


def test_edges_are_first_and_last_tokens() -> None:
    one = sample(reasoning="abc", content="d")
    assert edge_positions(Reader(RENDERER).read(one)) == [10, 12, 14]


def decided(traits: list[Trait]) -> dict[str, str]:
    report = compare(traits, SETTINGS, LIMITS)
    return {d.dataset: d.decision for d in decide(traits, report, SETTINGS)}


def test_decisions_and_their_costs() -> None:
    rows = [trait(str(i), cost_usd=0.01) for i in range(10)]
    assert decided(rows) == {"b1": "keep"}
    rows[0].offends, rows[0].maskable, rows[0].masked_tokens = True, True, 4
    assert decided(rows) == {"b1": "mask"}
    rows[1].offends = True
    (one,) = decide(rows, compare(rows, SETTINGS, LIMITS), SETTINGS)
    assert (one.decision, one.offending, one.trainable, one.trainable_tokens) == (
        "filter",
        2,
        10,
        100,
    )
    assert one.reason.startswith("1 of 10 samples have an error that no mask cures")
    assert "Alpha not compared (0 of 30 twins)" in one.reason and not one.judged
    got = {
        k: (c.tokens, c.samples, round(c.paid_usd, 6), round(c.again_usd, 6))
        for k, c in one.costs.items()
    }
    assert got == {
        "keep": (0, 0, 0.0, 0.0),
        "mask": (4, 1, 0.004, 0.0),
        "filter": (20, 2, 0.02, 0.0),
        "regenerate": (20, 2, 0.02, 0.02),
    }
    for row in rows[:6]:
        row.offends = True
    assert decided(rows) == {"b1": "regenerate"}


def test_untrained_samples_offend_nobody() -> None:
    rows = [trait(str(i)) for i in range(4)]
    rows[0].offends, rows[0].trainable = True, False
    assert decided(rows) == {"b1": "keep"}


def faulty(local: int, api: int, of: int = 60, **fields: Any) -> list[Trait]:
    """Twins of which the first `local` and `api` break a rule that models break by themselves."""
    rows = []
    for i in range(of):
        rows.append(trait(f"t{i}", "local", own=i < local))
        rows.append(trait(f"t{i}", own=i < api, offends=i < api, **fields))
    return rows


def test_mistakes_of_the_target_itself_are_kept() -> None:
    assert decided(faulty(6, 8)) == {"b1": "keep"}
    (one,) = decide(faulty(6, 8), compare(faulty(6, 8), SETTINGS, LIMITS), SETTINGS)
    assert one.reason == "8 of 60 samples break a rule, locally 6 of 60: the target's own way"
    # 11 of 60 against none: Fisher's p is 0.0006, ten of 60: 0.0013
    assert decided(faulty(0, 11)) == {"b1": "filter"}
    assert decided(faulty(0, 10)) == {"b1": "keep"}
    assert decided(faulty(9, 3)) == {"b1": "keep"}
    # too few local samples to know the target's way, or a rule that only providers break
    assert decided(faulty(1, 2, of=20)) == {"b1": "filter"}
    assert decided(faulty(6, 8, hard=True)) == {"b1": "filter"}


def test_only_the_deviating_provider_is_asked_again() -> None:
    rows = pairs(0, 40, 0, 0)
    rows += [
        trait(f"t{i}", provider="Beta", calls=1, names=("f",), arguments=b"a") for i in range(40)
    ]
    for row in rows:
        row.cost_usd = 0.0 if row.arm == "local" else 0.01
    report = compare(rows, SETTINGS, LIMITS)
    (one,) = decide(rows, report, SETTINGS)
    assert one.decision == "regenerate" and one.judged
    assert {s.provider: s.decision for s in one.scopes} == {
        "Alpha": "regenerate",
        "Beta": "keep",
        "sglang": "keep",
    }
    assert one.costs["regenerate"].samples == 40
    assert one.costs["regenerate"].again_usd == pytest.approx(0.4)
    assert one.reason.startswith("Alpha: calls a tool in 0.0% of twins, the local arm in 100.0%")


def test_datasets_are_decided_apart() -> None:
    rows = [trait("1"), trait("2", dataset="b2", offends=True)]
    assert decided(rows) == {"b1": "keep", "b2": "regenerate"}


def test_a_mask_never_exceeds_its_sample() -> None:
    row = trait("1", offends=True, maskable=True, masked_tokens=8, edge_tokens=4)
    assert (mask_size(row, True), mask_size(row, False)) == (10, 8)
    assert mask_size(trait("1", "local", edge_tokens=4), True) == 0


def test_nothing_compares_to_nothing() -> None:
    assert compare([], SETTINGS, LIMITS) == SemanticsReport(comparisons=[], habits=[])
    assert decide([], SemanticsReport(comparisons=[], habits=[]), SETTINGS) == []
