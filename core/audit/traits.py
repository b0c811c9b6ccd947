"""A sample reduced to what comparing arms needs: some hundred bytes instead of its ids.

83,000 of them are held at once; samples never are. Pure; knows one sample at a time.
"""

import hashlib
from collections.abc import Sequence

import msgspec
import numpy as np

from core.audit.reading import Asked, Reading, canonical_arguments
from core.audit.rules import NATIVE_ID, OWN
from core.schema import Arm, Finding, Sample

SEGMENTS = ("reasoning", "content", "call", "arguments")
"""Segments whose likelihood is compared. `call`: the id of a call, which holds its name."""
_SEGMENT_OF = {
    "reasoning": "reasoning",
    "content": "content",
    "call_id": "call",
    "arguments": "arguments",
}
ABSURD_NATS = -15.0
"""A token with less log-probability than this was hardly sampled from this distribution: of 163,840
tokens all below it together have a mass under 5 %, and in practice under 1 in 10,000."""
EDGE_TOKENS = 1


class Trait(msgspec.Struct, kw_only=True):
    """`provider` is the backend's name where there is no provider. Token counts are of the
    completion.

    `behaves`: its behaviour may be compared (complete, or broken in the call itself, which is a
    trigger as well). `arguments`: hash of the sorted canonical calls; empty when one of them is not
    JSON. `leads`: first reasoning character is a blank; None without reasoning. `answer_leads`:
    first character of the content is a blank; None without content. `habits`: of a reply that was
    not rejected, as the rebuild saw them. `offends` / `maskable`: an
    error finding exists / all of them name positions. `own`: a rule that models break by themselves
    is broken; `hard`: one that only a provider can break. `finish`: `tool_calls` for a whole reply
    with calls, whatever its server calls that.
    """

    sample_id: str
    twin_id: str
    dataset: str
    arm: Arm
    provider: str
    has_tools: bool
    behaves: bool
    triggered: bool
    names: tuple[str, ...] = ()
    arguments: bytes = b""
    calls: int = 0
    undeclared: int = 0
    invalid: int = 0
    native_ids: int = 0
    content_before: bool = False
    reasoning_tokens: int = 0
    tokens: int = 0
    finish: str = ""
    leads: bool | None = None
    answer_leads: bool | None = None
    habits: dict[str, bool] = {}
    drifted: bool | None = None
    trainable: bool = False
    offends: bool = False
    maskable: bool = False
    own: bool = False
    hard: bool = False
    masked_tokens: int = 0
    edge_tokens: int = 0
    cost_usd: float = 0.0
    likelihood: tuple[float | None, ...] = ()
    absurd_edges: int = 0
    verdict: str = ""
    error_class: str | None = None


def reduce(sample: Sample, asked: Asked, reading: Reading, found: Sequence[Finding]) -> Trait:
    """The trait of one sample; likelihoods come from `with_likelihood`."""
    rules = [f.rule for f in found]
    errors = [f for f in found if f.severity == "error"]
    broken_call = (sample.error_class or "").startswith("tool_")
    rejected = sample.verdict == "rejected"
    billed = sample.prompt_tokens_billed
    return Trait(
        sample_id=sample.sample_id,
        twin_id=sample.twin_id,
        dataset=sample.dataset,
        arm=sample.arm,
        provider=provider_of(sample),
        has_tools=asked.tools is not None,
        behaves=(not rejected or broken_call) and "truncated" not in rules,
        triggered=bool(sample.calls) or broken_call,
        names=tuple(sorted(call.name for call in sample.calls)),
        arguments=_arguments_hash(sample),
        calls=len(sample.calls),
        undeclared=rules.count("undeclared_tool"),
        invalid=sum(
            r in ("arguments_not_json", "arguments_not_object", "arguments_schema") for r in rules
        ),
        native_ids=sum(NATIVE_ID.fullmatch(call.id) is not None for call in sample.calls),
        content_before=bool(sample.calls) and reading.answered,
        reasoning_tokens=sum(b - a for kind, a, b in reading.spans if kind == "reasoning"),
        tokens=len(reading.ids),
        finish=_finish(sample),
        leads=sample.habits.get("reasoning_starts_blank"),
        answer_leads=sample.habits.get("content_starts_blank"),
        habits={} if rejected else sample.habits,
        drifted=None if billed is None or not sample.prompt_len else "prompt_drift" in rules,
        trainable=sample.trainable,
        offends=bool(errors),
        maskable=bool(errors) and all(f.spans for f in errors),
        own=any(r in OWN for r in rules),
        hard=any(f.rule not in OWN for f in errors),
        masked_tokens=len(positions_of(errors)),
        edge_tokens=len(edge_positions(reading)),
        cost_usd=sample.cost_usd or 0.0,
        verdict=sample.verdict,
        error_class=sample.error_class,
    )


def _finish(sample: Sample) -> str:
    reason = sample.finish_reason or sample.error_class or "none"
    return "tool_calls" if reason == "stop" and sample.calls else reason


def provider_of(sample: Sample) -> str:
    """Local servers count as one, whatever port each has in this life of the run."""
    return sample.backend if sample.arm == "local" else sample.provider or sample.backend


def positions_of(found: Sequence[Finding]) -> list[int]:
    """Positions named by findings, each once, ascending."""
    return sorted({i for f in found for a, b in f.spans for i in range(a, b)})


def edge_positions(reading: Reading) -> list[int]:
    """Where trimmed whitespace shows: first and last token of reasoning and content (spec of
    rebuilding, point 5)."""
    edges: set[int] = set()
    for kind, start, end in reading.spans:
        if kind in ("reasoning", "content") and end > start:
            edges.update(range(start, min(start + EDGE_TOKENS, end)))
            edges.update(range(max(end - EDGE_TOKENS, start), end))
    return sorted(edges)


def with_likelihood(
    trait: Trait, sample: Sample, reading: Reading, logprobs: Sequence[float]
) -> list[Finding]:
    """Fill the trait from the target's log-probability of each completion token (nats), same order
    and length.

    Returns a finding for each segment edge with an absurd token: the sign of a token that
    rebuilding from text got wrong. Raises ValueError when the lengths differ: the values belong to
    another sample.
    """
    if len(logprobs) != len(reading.ids):
        raise ValueError(
            f"{sample.sample_id}: {len(logprobs)} log-probabilities for {len(reading.ids)} tokens"
        )
    values = np.asarray(logprobs, dtype=np.float64)
    sums = dict.fromkeys(SEGMENTS, 0.0)
    counts = dict.fromkeys(SEGMENTS, 0)
    absurd: list[tuple[str, int, float]] = []
    for kind, start, end in reading.spans:
        a, b = start - sample.prompt_len, end - sample.prompt_len
        if kind not in _SEGMENT_OF or b <= a:
            continue
        sums[_SEGMENT_OF[kind]] += float(values[a:b].sum())
        counts[_SEGMENT_OF[kind]] += b - a
        for i in {a, b - 1}:
            if values[i] < ABSURD_NATS:
                absurd.append((kind, i + sample.prompt_len, float(values[i])))
    trait.likelihood = tuple(sums[s] / counts[s] if counts[s] else None for s in SEGMENTS)
    trait.absurd_edges = len(absurd)
    return [
        Finding(
            sample_id=sample.sample_id,
            rule="absurd_edge",
            detail=f"log-probability {value:.1f} at the edge of {kind}",
            severity="warn",
            dataset=sample.dataset,
            provider=sample.provider,
            spans=[(i, i + 1)],
        )
        for kind, i, value in sorted(absurd, key=lambda item: item[1])
    ]


def _arguments_hash(sample: Sample) -> bytes:
    pairs = []
    for call in sample.calls:
        canonical = canonical_arguments(call.arguments)
        if canonical is None:
            return b""
        pairs.append((call.name, canonical))
    if not pairs:
        return b""
    return hashlib.blake2b(msgspec.json.encode(sorted(pairs)), digest_size=8).digest()
