"""What is told of an attempt: its one event, and in words why it did not end well."""

from core import events as ev
from core.generate.attempt import Landing
from core.schema import Rollout, Sample


def outcome_event(
    rollout: Rollout, sample: Sample | None = None, cost_usd: float | None = None
) -> ev.Outcome:
    return ev.Outcome(
        prompt_id=rollout.prompt_id,
        dataset=rollout.dataset,
        arm=rollout.arm,
        backend=rollout.backend,
        outcome=rollout.outcome,
        sample_id=sample.sample_id if sample else "",
        provider=rollout.provider,
        error_class=rollout.error_class,
        verdict=sample.verdict if sample else None,
        attempt=rollout.attempt,
        prompt_tokens=rollout.usage.prompt_tokens,
        completion_tokens=rollout.usage.completion_tokens,
        cost_usd=cost_usd,
        latency_s=rollout.timings.total_s if rollout.timings else None,
        calls=len(sample.calls) if sample else 0,
    )


def error_of(landing: Landing) -> tuple[str | None, str | None]:
    """(class, what was said) of an attempt that did not end well."""
    if landing.cut:
        return "cut_" + landing.cut, None
    if landing.failure is not None:
        return landing.failure.kind, str(landing.failure)
    if landing.sample is not None and landing.sample.verdict == "rejected":
        return landing.sample.error_class, None
    return None, None
