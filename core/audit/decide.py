"""What to do with each dataset, and what each choice costs in tokens and dollars. Pure.

keep        train on it as it is
mask        keep the samples, take the positions that are known to be doubtful out of the loss
filter      drop the samples with an error finding
regenerate  ask again what came from a provider that served something else, and drop what it gave
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Literal, get_args

import msgspec

from core.audit import stats
from core.audit.semantics import REFERENCE, Comparison, SemanticsReport
from core.audit.traits import Trait
from core.config import Audit

Decision = Literal["keep", "mask", "filter", "regenerate"]
DECISIONS: tuple[Decision, ...] = get_args(Decision)
HOPELESS = 0.5
"""Above this share of offending samples filtering keeps the minority, which is a biased one: ask
again instead."""


class Cost(msgspec.Struct, kw_only=True):
    """`tokens`: completion tokens that would no longer be trained on. `paid_usd`: what was paid for
    those. `again_usd`: what asking again would cost, at the price paid so far."""

    tokens: int
    samples: int
    paid_usd: float
    again_usd: float = 0.0


class Scope(msgspec.Struct, kw_only=True):
    """One provider's part of a dataset."""

    provider: str
    arm: str
    samples: int
    decision: Decision
    reason: str


class DatasetDecision(msgspec.Struct, kw_only=True):
    """`judged`: enough twins to compare arms; else the decision rests on findings about single
    samples."""

    dataset: str
    decision: Decision
    reason: str
    judged: bool
    samples: int
    trainable: int
    trainable_tokens: int
    offending: int
    costs: dict[str, Cost]
    scopes: list[Scope]


def decide(traits: Sequence[Trait], report: SemanticsReport, audit: Audit) -> list[DatasetDecision]:
    """One decision per dataset: the strongest that one of its scopes needs."""
    by_dataset: dict[str, list[Trait]] = defaultdict(list)
    for trait in traits:
        by_dataset[trait.dataset].append(trait)
    trims = {h.provider for h in report.habits if h.trims}
    compared = {(c.dataset, c.provider, c.arm): c for c in report.comparisons}
    return [
        _decide(name, rows, compared, trims, audit) for name, rows in sorted(by_dataset.items())
    ]


def _decide(
    name: str,
    rows: list[Trait],
    compared: dict[tuple[str, str, str], Comparison],
    trims: set[str],
    audit: Audit,
) -> DatasetDecision:
    cells: dict[tuple[str, str], list[Trait]] = defaultdict(list)
    for trait in rows:
        cells[trait.provider, trait.arm].append(trait)
    local = [t for t in rows if t.arm == REFERENCE and t.trainable]
    scopes = []
    for (provider, arm), mine in sorted(cells.items()):
        decision, reason = _scope(mine, local, compared.get((name, provider, arm)), audit)
        scopes.append(
            Scope(provider=provider, arm=arm, samples=len(mine), decision=decision, reason=reason)
        )
    worst = max(scopes, key=lambda s: DECISIONS.index(s.decision))
    api = [c for key, c in compared.items() if key[0] == name]
    judged = bool(api) and all(c.judged for c in api)
    reason = worst.reason if len(scopes) == 1 else f"{worst.provider}: {worst.reason}"
    trainable = [t for t in rows if t.trainable]
    if worst.decision == "keep":
        reason = next((s.reason for s in scopes if s.reason.endswith("own way")), "")
        reason = reason or f"no error in {len(trainable)} samples"
    if api and not judged:
        few = min(api, key=lambda c: c.agreement.pairs if c.agreement else 0)
        pairs = few.agreement.pairs if few.agreement else 0
        reason += f"; {few.provider} not compared ({pairs} of {audit.min_pairs} twins)"
    again = {(s.provider, s.arm) for s in scopes if s.decision == "regenerate"}
    return DatasetDecision(
        dataset=name,
        decision=worst.decision,
        reason=reason,
        judged=judged,
        samples=len(rows),
        trainable=len(trainable),
        trainable_tokens=sum(t.tokens for t in trainable),
        offending=sum(t.offends for t in trainable),
        costs=costs(rows, again, trims),
        scopes=scopes,
    )


def _scope(
    rows: list[Trait], local: list[Trait], comparison: Comparison | None, audit: Audit
) -> tuple[Decision, str]:
    """A provider's samples that break a rule are filtered, unless the local arm breaks it about as
    often: then it is the target's own way, and to filter would bias the data."""
    deviations = comparison.deviations if comparison else []
    trained = [t for t in rows if t.trainable]
    if not trained:
        return "regenerate", f"none of {len(rows)} samples is exact or consistent"
    if hit := next((d for d in deviations if d.remedy == "regenerate"), None):
        return "regenerate", f"{hit.saw} (p {hit.p:.1g})"
    own, theirs = sum(t.own for t in trained), sum(t.own for t in local)
    usual = len(local) >= audit.min_pairs and (
        own * len(local) <= theirs * len(trained)
        or stats.fisher(own, len(trained), theirs, len(local)) >= audit.alpha
    )
    bad = [t for t in trained if t.offends and (t.hard or not usual)]
    if len(bad) > HOPELESS * len(trained):
        return "regenerate", f"{len(bad)} of {len(trained)} samples have an error"
    if lost := [t for t in bad if not t.maskable]:
        return "filter", f"{len(lost)} of {len(trained)} samples have an error that no mask cures"
    if hit := next((d for d in deviations if d.remedy == "mask"), None):
        return "mask", hit.saw
    if bad:
        saw = f"{len(bad)} of {len(trained)} samples have doubtful tokens at known positions"
        return "mask", saw
    if own and comparison:
        saw = f"{own} of {len(trained)} samples break a rule, locally {theirs} of {len(local)}"
        return "keep", f"{saw}: the target's own way"
    return "keep", f"no error in {len(trained)} samples"


def costs(rows: Sequence[Trait], again: set[tuple[str, str]], trims: set[str]) -> dict[str, Cost]:
    """The price of each decision for one dataset. `again`: (provider, arm) to ask again; with none,
    the offenders."""
    trained = [t for t in rows if t.trainable]
    bad = [t for t in trained if t.offends]
    masked = [(t, mask_size(t, t.provider in trims)) for t in trained]
    redo = [t for t in rows if (t.provider, t.arm) in again] if again else bad
    return {
        "keep": Cost(tokens=0, samples=0, paid_usd=0.0),
        "mask": Cost(
            tokens=sum(n for _, n in masked),
            samples=sum(n > 0 for _, n in masked),
            paid_usd=sum(t.cost_usd * n / t.tokens for t, n in masked if t.tokens),
        ),
        "filter": _cost(bad),
        "regenerate": msgspec.structs.replace(
            _cost([t for t in redo if t.trainable]),
            samples=len(redo),
            paid_usd=sum(t.cost_usd for t in redo),
            again_usd=sum(t.cost_usd for t in redo),
        ),
    }


def mask_size(trait: Trait, trims: bool) -> int:
    """Positions that `mask` takes from one sample: those of its findings, and every edge of a
    trimming provider."""
    edges = trait.edge_tokens if trims and trait.arm != REFERENCE else 0
    return min(trait.tokens, edges + (trait.masked_tokens if trait.maskable else 0))


def _cost(rows: Sequence[Trait]) -> Cost:
    return Cost(
        tokens=sum(t.tokens for t in rows),
        samples=len(rows),
        paid_usd=sum(t.cost_usd for t in rows),
    )
