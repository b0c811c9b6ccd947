"""Arms compared: did the API see the tools, and is it the same model? Traits in, a report out; no
files, no clock.

The local arm is the reference: its ids are the server's own. Rates are given with 95 % Wilson
intervals; triggers are compared on twins (the same question through both arms) with the exact
McNemar test. Twins are sampled, so two arms of one model disagree as well: where an arm was asked
twice, its own disagreement (A/A) is the floor that names and arguments are judged against; where it
was not, those two are reported and not judged.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from core.audit import stats
from core.audit.arms import (
    Agreement,
    ArmStats,
    agree,
    arm_stats,
    comparable,
    pct,
    self_agreement,
    share,
)
from core.audit.shares import Interval, interval
from core.audit.traits import SEGMENTS, Trait
from core.config import Audit, Tripwires
from core.conventions import Seen, lost_habits

REFERENCE = "local"


class Likelihood(msgspec.Struct, kw_only=True):
    """Mean log-probability per token under the target, one value a sample, API against local.

    `distance` and `p`: two-sample Kolmogorov-Smirnov. `shift_nats`: difference of means, negative
    where the target finds the API's text less likely than its own.
    """

    segment: str
    samples: int
    reference: int
    shift_nats: float
    distance: float
    p: float


class Deviation(msgspec.Struct, kw_only=True):
    """A difference that is not chance. `remedy`: the weakest decision that cures it."""

    metric: str
    saw: str
    p: float
    remedy: str


class Comparison(msgspec.Struct, kw_only=True):
    """One dataset x provider x arm against the local arm. `twins` and `reference` cover the paired
    samples only."""

    dataset: str
    provider: str
    arm: str
    samples: int
    all: ArmStats
    twins: ArmStats | None = None
    reference: ArmStats | None = None
    agreement: Agreement | None = None
    floor: Agreement | None = None
    own_floor: Agreement | None = None
    likelihood: list[Likelihood] = []
    absurd_edges: int = 0
    drift: Interval = msgspec.field(default_factory=lambda: interval(0, 0))
    judged: bool = False
    deviations: list[Deviation] = []


class Habit(msgspec.Struct, kw_only=True):
    """What a provider takes away, all datasets together (case C49), by the rule of the verdicts.
    `lost`: habits of the model that it never shows, with the chance of that. `trims`: one of them
    is a blank at an edge. Shares against the local arm's, to be read beside it."""

    provider: str
    reasoning_leads: Interval
    local_reasoning_leads: Interval
    answer_leads: Interval
    local_answer_leads: Interval
    lost: dict[str, float] = {}
    trims: bool = False


class SemanticsReport(msgspec.Struct, kw_only=True):
    comparisons: list[Comparison]
    habits: list[Habit]


class Cell(NamedTuple):
    dataset: str
    provider: str
    arm: str


def compare(traits: Iterable[Trait], audit: Audit, wires: Tripwires) -> SemanticsReport:
    """Every API cell against the local arm of its dataset. A dataset with only a local arm has no
    comparison."""
    cells: dict[Cell, list[Trait]] = defaultdict(list)
    for trait in traits:
        cells[Cell(trait.dataset, trait.provider, trait.arm)].append(trait)
    references: dict[str, list[Trait]] = defaultdict(list)
    for cell, rows in cells.items():
        if cell.arm == REFERENCE:
            references[cell.dataset] += rows
    local = {dataset: _by_twin(rows) for dataset, rows in references.items()}
    habits = provider_habits(cells)
    trims = {h.provider: h for h in habits if h.trims}
    comparisons = [
        _compare_cell(
            cell, rows, local.get(cell.dataset, {}), audit, wires, trims.get(cell.provider)
        )
        for cell, rows in sorted(cells.items())
        if cell.arm != REFERENCE
    ]
    return SemanticsReport(comparisons=comparisons, habits=habits)


def _compare_cell(
    cell: Cell,
    rows: list[Trait],
    local: dict[str, list[Trait]],
    audit: Audit,
    wires: Tripwires,
    habit: Habit | None,
) -> Comparison:
    mine = _by_twin(rows)
    pairs = [
        (local[t][0], mine[t][0])
        for t in sorted(mine)
        if t in local and comparable(local[t][0], mine[t][0])
    ]
    drifts = [t.drifted for t in rows if t.drifted is not None]
    result = Comparison(
        dataset=cell.dataset,
        provider=cell.provider,
        arm=cell.arm,
        samples=len(rows),
        all=arm_stats(rows),
        drift=interval(sum(drifts), len(drifts)),
        absurd_edges=sum(t.absurd_edges for t in rows),
        judged=len(pairs) >= audit.min_pairs,
    )
    if pairs:
        result.reference = arm_stats([a for a, _ in pairs])
        result.twins = arm_stats([b for _, b in pairs])
        result.agreement = agree(pairs)
        result.floor = self_agreement(local)
        result.own_floor = self_agreement(mine)
    result.likelihood = likelihoods(rows, [t for ts in local.values() for t in ts], pairs)
    result.deviations = deviations(result, audit, wires)
    if habit:
        result.deviations.append(_habit_deviation(habit))
    return result


def likelihoods(
    rows: Sequence[Trait], local: Sequence[Trait], pairs: Sequence[tuple[Trait, Trait]]
) -> list[Likelihood]:
    """Two-sample test per segment. On twins where there are any, so that both arms answered the
    same questions."""
    if pairs:
        local, rows = [a for a, _ in pairs], [b for _, b in pairs]
    found = []
    for index, segment in enumerate(SEGMENTS):
        here = [v for t in rows if t.likelihood and (v := t.likelihood[index]) is not None]
        there = [v for t in local if t.likelihood and (v := t.likelihood[index]) is not None]
        if here and there:
            distance, p = stats.two_sample(here, there)
            shift = sum(here) / len(here) - sum(there) / len(there)
            found.append(
                Likelihood(
                    segment=segment,
                    samples=len(here),
                    reference=len(there),
                    shift_nats=shift,
                    distance=distance,
                    p=p,
                )
            )
    return found


def deviations(result: Comparison, audit: Audit, wires: Tripwires) -> list[Deviation]:
    """What is not chance at level `audit.alpha`. Twins count from `audit.min_pairs` on; prompt
    drift needs none."""
    found = []
    if result.drift.total and result.drift.low > wires.prompt_drift_rate:
        found.append(
            Deviation(
                metric="prompt_drift",
                saw=f"{pct(result.drift)} of replies were billed for another prompt than ours",
                p=0.0,
                remedy="regenerate",
            )
        )
    for test in result.likelihood:
        if (
            min(test.samples, test.reference) >= audit.min_pairs
            and test.p < audit.alpha
            and test.shift_nats < 0
        ):
            found.append(
                Deviation(
                    metric=f"likelihood:{test.segment}",
                    saw=f"to the target its {test.segment} is {-test.shift_nats:.2f} nats a token"
                    " less likely than the local arm's",
                    p=test.p,
                    remedy="regenerate",
                )
            )
    if result.judged and result.agreement and result.twins and result.reference:
        found += _paired_deviations(
            result.agreement, result.twins, result.reference, result.floor, audit
        )
    return found


def _paired_deviations(
    pair: Agreement, mine: ArmStats, local: ArmStats, floor: Agreement | None, audit: Audit
) -> list[Deviation]:
    found = []
    if pair.trigger_p < audit.alpha:
        saw = f"calls a tool in {pct(mine.trigger)} of twins, the local arm in {pct(local.trigger)}"
        found.append(Deviation(metric="trigger", saw=saw, p=pair.trigger_p, remedy="regenerate"))
    shares = (
        (
            "undeclared",
            "names an undeclared tool in",
            mine.undeclared,
            local.undeclared,
            True,
            "filter",
        ),
        (
            "schema_valid",
            "has valid arguments in",
            mine.schema_valid,
            local.schema_valid,
            False,
            "filter",
        ),
        ("native_id", "has native ids in", mine.native_id, local.native_id, False, "mask"),
    )
    for metric, words, here, there, high_is_bad, remedy in shares:
        p = stats.fisher(here.hits, here.total, there.hits, there.total)
        if p < audit.alpha and ((here.value or 0.0) > (there.value or 0.0)) == high_is_bad:
            saw = f"{words} {pct(here)} of calls, the local arm in {pct(there)}"
            found.append(Deviation(metric=metric, saw=saw, p=p, remedy=remedy))
    if floor and floor.pairs >= audit.min_pairs:
        for metric, here, there in (
            ("name_match", pair.name_match, floor.name_match),
            ("args_match", pair.args_match, floor.args_match),
        ):
            p = stats.fisher(here.hits, here.total, there.hits, there.total)
            if p < audit.alpha and (here.value or 0.0) < (there.value or 0.0):
                words = metric.replace("_", " ")
                saw = f"{words} {pct(here)}, the local arm with itself {pct(there)}"
                found.append(Deviation(metric=metric, saw=saw, p=p, remedy="regenerate"))
    return found


def provider_habits(cells: dict[Cell, list[Trait]]) -> list[Habit]:
    """Text cannot show them for one sample: a trimmed blank keeps the token count in 95 % of
    cases. The model's own are those of replies with server ids."""
    local = [t for c, ts in cells.items() if c.arm == REFERENCE for t in ts]
    lead, answer = share([t.leads for t in local]), share([t.answer_leads for t in local])
    model = _seen(t for ts in cells.values() for t in ts if t.verdict == "exact")
    providers: dict[str, list[Trait]] = defaultdict(list)
    for cell, rows in cells.items():
        if cell.arm != REFERENCE:
            providers[cell.provider] += rows
    habits = []
    for provider, rows in sorted(providers.items()):
        lost = lost_habits(model, _seen(t for t in rows if t.verdict != "exact"))
        habits.append(
            Habit(
                provider=provider,
                reasoning_leads=share([t.leads for t in rows]),
                local_reasoning_leads=lead,
                answer_leads=share([t.answer_leads for t in rows]),
                local_answer_leads=answer,
                lost=lost,
                trims=any(name.endswith("blank") for name in lost),
            )
        )
    return habits


def _seen(traits: Iterable[Trait]) -> Seen:
    seen: dict[str, dict[str, list[int]]] = {}
    for trait in traits:
        mine = seen.setdefault(trait.dataset, {})
        for name, shown in trait.habits.items():
            count = mine.setdefault(name, [0, 0])
            count[0] += shown
            count[1] += 1
    return seen


def _habit_deviation(habit: Habit) -> Deviation:
    blanks = {name: p for name, p in habit.lost.items() if name.endswith("blank")}
    words = ", ".join(name.replace("_", " ") for name in blanks)
    return Deviation(
        metric="provider_trims_whitespace",
        saw=f"never seen, though the model does it: {words}; reasoning starts with a blank in"
        f" {pct(habit.reasoning_leads)} of replies, in {pct(habit.local_reasoning_leads)} locally",
        p=min(blanks.values()),
        remedy="mask",
    )


def _by_twin(rows: Iterable[Trait]) -> dict[str, list[Trait]]:
    grouped: dict[str, list[Trait]] = defaultdict(list)
    for trait in rows:
        grouped[trait.twin_id].append(trait)
    for group in grouped.values():
        group.sort(key=lambda t: t.sample_id)
    return dict(grouped)
