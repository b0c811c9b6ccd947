"""Behaviour of one arm, and how far two samples of the same question agree. Traits in, counts out.

Counts first: every rate is hits of total with its 95 % Wilson interval.
"""

from collections import Counter
from collections.abc import Sequence

import msgspec

from core.audit import stats
from core.audit.shares import Interval, f1, interval, mcnemar
from core.audit.traits import Trait


class ArmStats(msgspec.Struct, kw_only=True):
    """One arm's behaviour on the samples that count. Shares of calls are over calls, the others
    over samples."""

    samples: int
    trigger: Interval
    undeclared: Interval
    schema_valid: Interval
    native_id: Interval
    content_before: Interval
    calls_per_reply: float | None = None
    reasoning_tokens: float = 0.0
    reasoning_low: float = 0.0
    reasoning_high: float = 0.0
    reasoning_leads: Interval = msgspec.field(default_factory=lambda: interval(0, 0))
    answer_leads: Interval = msgspec.field(default_factory=lambda: interval(0, 0))
    finish: dict[str, int] = {}


class Agreement(msgspec.Struct, kw_only=True):
    """Two samples of each question, counted. Names and arguments are over pairs in which both
    called."""

    pairs: int
    both: int
    only_first: int
    only_second: int
    neither: int
    trigger_p: float
    f1: float | None
    f1_low: float
    f1_high: float
    name_match: Interval
    args_match: Interval
    same_call_count: Interval
    same_finish: Interval
    reasoning_p: float


def arm_stats(rows: Sequence[Trait]) -> ArmStats:
    """Behaviour of one arm. Trigger rate is over samples with tools whose behaviour counts."""
    fit = [t for t in rows if t.behaves]
    offered = [t for t in fit if t.has_tools]
    calling = [t for t in fit if t.calls]
    calls = sum(t.calls for t in calling)
    mean, low, high = stats.mean_interval([t.reasoning_tokens for t in fit])
    return ArmStats(
        samples=len(rows),
        trigger=interval(sum(t.triggered for t in offered), len(offered)),
        undeclared=interval(sum(t.undeclared for t in calling), calls),
        schema_valid=interval(calls - sum(t.invalid for t in calling), calls),
        native_id=interval(sum(t.native_ids for t in calling), calls),
        content_before=interval(sum(t.content_before for t in calling), len(calling)),
        calls_per_reply=calls / len(calling) if calling else None,
        reasoning_tokens=mean,
        reasoning_low=low,
        reasoning_high=high,
        reasoning_leads=share([t.leads for t in fit]),
        answer_leads=share([t.answer_leads for t in fit]),
        finish=dict(sorted(Counter(t.finish for t in rows).items())),
    )


def agree(pairs: Sequence[tuple[Trait, Trait]]) -> Agreement:
    """How far two samples of the same question agree; first is the reference.

    F1 counts a trigger of the second as positive and the first's as truth (K2-Vendor-Verifier's
    tool_call_f1). Triggers are compared where tools were declared, reasoning length and finish on
    every pair.
    """
    offered = [(a, b) for a, b in pairs if a.has_tools]
    kinds = Counter((a.triggered, b.triggered) for a, b in offered)
    both, first, second = kinds[True, True], kinds[True, False], kinds[False, True]
    calling = [(a, b) for a, b in offered if a.calls and b.calls]
    named = [(a, b) for a, b in calling if a.names == b.names]
    low, high = stats.f1_interval(both, first, second, kinds[False, False])
    return Agreement(
        pairs=len(pairs),
        both=both,
        only_first=first,
        only_second=second,
        neither=kinds[False, False],
        trigger_p=mcnemar(first, second),
        f1=f1(both, first, second),
        f1_low=low,
        f1_high=high,
        name_match=interval(len(named), len(calling)),
        args_match=interval(sum(a.arguments == b.arguments != b"" for a, b in named), len(named)),
        same_call_count=interval(sum(a.calls == b.calls for a, b in calling), len(calling)),
        same_finish=interval(sum(a.finish == b.finish for a, b in pairs), len(pairs)),
        reasoning_p=stats.paired_shift(
            [a.reasoning_tokens for a, _ in pairs], [b.reasoning_tokens for _, b in pairs]
        ),
    )


def self_agreement(twins: dict[str, list[Trait]]) -> Agreement | None:
    """A/A: the first two samples of each question that was asked twice through the same arm."""
    pairs = [
        (ts[0], ts[1])
        for _, ts in sorted(twins.items())
        if len(ts) > 1 and comparable(ts[0], ts[1])
    ]
    return agree(pairs) if pairs else None


def comparable(a: Trait, b: Trait) -> bool:
    return a.behaves and b.behaves


def share(values: Sequence[bool | None]) -> Interval:
    known = [v for v in values if v is not None]
    return interval(sum(known), len(known))


def pct(share: Interval) -> str:
    return "none" if share.value is None else f"{share.value:.1%}"
